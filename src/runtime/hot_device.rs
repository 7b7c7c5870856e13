//! The hot device: which one it is, how much of its memory is ours, and whether it still works.

use super::model::cache::ModelCache;
use crate::cache::{CopyCost, MissCosts};
use crate::ggml::{Device, Level, log};
use crate::options::{Budget, Config};
use crate::units::Bytes;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// What a device may round an allocation up to. More than that in its report is someone else's.
const GRANULARITY: Bytes = Bytes(2 << 20);

/// What a backend instance takes of a device at most. More than that is someone else's.
const MOST_OF_INSTANCE: Bytes = Bytes::from_mib(512);

/// Chooses the device: the one that was named, else the first GPU of this machine with memory of its own.
///
/// The error is a reason for users.
pub fn choose(config: &Config) -> Result<Device, String> {
    let Some(name) = &config.device else {
        return Device::local_gpu().ok_or_else(|| {
            "no GPU with memory of its own was found (--moe-hot-cache-device names another device)".into()
        });
    };
    match Device::named(name) {
        Some(device) if device.buffer_type().is_some() && !device.is_ours() => Ok(device),
        Some(_) => Err(format!("{name} is no device that can hold experts")),
        None => {
            let names: Vec<_> = Device::all().filter(|device| !device.is_ours()).map(|device| device.name()).collect();
            Err(format!("no device is called {name:?}; expected one of {}", names.join(", ")))
        }
    }
}

/// One device and what all models together use of it.
pub struct HotDevice {
    device: Device,
    budget: Budget,
    reserve: Bytes,
    used: Mutex<Bytes>,
    /// What copies and misses cost. Locked for a few operations on numbers.
    costs: Mutex<MissCosts>,
    /// Calls of a layer between a wish and its landing: a moving average, in [`LAG_UNITS`].
    lag: AtomicU32,
    /// Models' caches that are on it.
    caches: Mutex<Vec<Weak<ModelCache>>>,
    off: AtomicBool,
}

/// Fractions of a call that lags are kept in.
const LAG_UNITS: u32 = 16;

/// Bytes of the device's memory that count against the budget until dropped.
pub struct Claim {
    owner: Arc<HotDevice>,
    bytes: Bytes,
}

impl HotDevice {
    /// Nothing used yet.
    pub fn new(device: Device, config: &Config) -> Self {
        let reserve = Bytes::from_mib(config.auto_reserve_mib);
        Self {
            device,
            budget: config.max_mib,
            reserve,
            used: Mutex::default(),
            costs: Mutex::default(),
            lag: AtomicU32::new(0),
            caches: Mutex::default(),
            off: AtomicBool::new(false),
        }
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether it has failed.
    pub fn is_off(&self) -> bool {
        self.off.load(Relaxed)
    }

    /// Gives the device up for the rest of the session and says why, once.
    pub fn turn_off(&self, reason: &str) {
        if !self.off.swap(true, Relaxed) {
            let name = self.device.name();
            log(
                Level::Warn,
                &format!("hot cache off on {name}: {reason}; experts run on the CPU, answers stay the same"),
            );
            let caches = std::mem::take(&mut *self.caches());
            caches.iter().filter_map(Weak::upgrade).for_each(|cache| cache.end());
        }
    }

    /// Notes a model's cache, to be ended if the device fails.
    pub fn register(&self, cache: &Arc<ModelCache>) {
        let mut caches = self.caches();
        caches.retain(|cache| cache.strong_count() > 0);
        caches.push(Arc::downgrade(cache));
    }

    fn caches(&self) -> MutexGuard<'_, Vec<Weak<ModelCache>>> {
        self.caches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What copies and misses cost.
    pub fn costs(&self) -> MutexGuard<'_, MissCosts> {
        self.costs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy in the background has landed: how long the host was at it, how long it took if none was before it, and how
    /// many calls late it came.
    pub fn copied(&self, staging: Duration, took: Option<Duration>, lag: Option<u32>) {
        let ns = |duration: Duration| duration.as_nanos() as f32;
        self.costs().learn_background(ns(staging), took.map(ns));
        if let Some(lag) = lag {
            let old = self.lag.load(Relaxed);
            let new = lag.saturating_mul(LAG_UNITS);
            self.lag.store(old - old / 8 + new / 8, Relaxed);
        }
    }

    /// What a copy in the background costs, for admission; `None` as long as nothing was measured.
    pub fn copy_cost(&self) -> Option<CopyCost> {
        let price = self.costs().copy_in_misses()?;
        Some(CopyCost { price, lag: self.lag.load(Relaxed) / LAG_UNITS })
    }

    /// Bytes that may still be taken, measured now: contexts, draft models and projectors come late.
    pub fn available(&self) -> Bytes {
        self.available_beside(*self.used())
    }

    fn available_beside(&self, used: Bytes) -> Bytes {
        let free = || Bytes(self.device.memory().0);
        match self.budget {
            Budget::Off => Bytes(0),
            Budget::Automatic => free().saturating_sub(self.reserve),
            Budget::Mib(mib) => {
                let left = Bytes::from_mib(mib).saturating_sub(used);
                // A device that reports no memory at all does not tell.
                if self.device.memory() == (0, 0) { left } else { left.min(free()) }
            }
        }
    }

    /// Takes `bytes` for what `allocate` makes; `None` if there is no room or it makes nothing.
    ///
    /// Counts what the device itself reports, where it rounds up.
    pub fn allocate<T>(self: &Arc<Self>, bytes: Bytes, allocate: impl FnOnce() -> Option<T>) -> Option<(T, Claim)> {
        let mut used = self.used();
        if self.available_beside(*used) < bytes {
            return None;
        }
        let (before, _) = self.device.memory();
        let made = allocate()?;
        let (after, _) = self.device.memory();
        let reported = Bytes(before.saturating_sub(after)).min(bytes.saturating_add(GRANULARITY));
        let bytes = if self.device.has_memory_of_its_own() { bytes.max(reported) } else { bytes };
        *used = used.saturating_add(bytes);
        Some((made, Claim { owner: self.clone(), bytes }))
    }

    /// Counts what `make` takes of the device, whatever it is.
    pub fn measure<T>(self: &Arc<Self>, make: impl FnOnce() -> T) -> (T, Claim) {
        let mut used = self.used();
        let (before, _) = self.device.memory();
        let made = make();
        let (after, _) = self.device.memory();
        let is_its_own = self.device.has_memory_of_its_own();
        let bytes = if is_its_own { Bytes(before.saturating_sub(after)).min(MOST_OF_INSTANCE) } else { Bytes(0) };
        *used = used.saturating_add(bytes);
        (made, Claim { owner: self.clone(), bytes })
    }

    fn used(&self) -> MutexGuard<'_, Bytes> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut used = self.owner.used();
        *used = used.saturating_sub(self.bytes);
    }
}
