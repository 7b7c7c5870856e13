//! The hot device: which one it is, what copies to it cost, and whether it still works.

use super::model::fetch_queue::FetchQueue;
use crate::cache::{CopyCost, MissCosts};
use crate::device::{DeviceMemory, Limit};
use crate::ggml::{Device, Level, log};
use crate::options::host::UNIFIED_MEMORY;
use crate::options::{Budget, Config};
use crate::units::Bytes;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// Why there is no hot device, in words for users.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoDevice {
    /// None was named, and none can be chosen.
    #[error("no GPU with memory of its own was found (--moe-hot-cache-device names another device)")]
    NoGpu,
    /// It would be the host's memory.
    #[error(
        "the memory of {0} is the host's too ({UNIFIED_MEMORY} is set); --moe-hot-cache-device takes it all the same"
    )]
    Unified(String),
    /// The named one has no memory to hold anything in.
    #[error("{0} is no device that can hold experts")]
    HoldsNothing(String),
    /// There is none of that name.
    #[error("no device is called {name:?}; expected one of {}", known.join(", "))]
    Unknown {
        /// The name.
        name: String,
        /// Those that there are.
        known: Vec<String>,
    },
}

/// Chooses the device: the one that was named, else the first GPU of this machine with memory of its own.
fn choose(config: &Config) -> Result<Device, NoDevice> {
    let Some(name) = &config.device else {
        let first = Device::local_gpu().ok_or(NoDevice::NoGpu)?;
        let is_apart = |device: &Device| !(config.unified_memory && device.is_of_cuda_backend());
        let apart = Device::all().find(|device| device.is_local_gpu() && is_apart(device));
        return apart.ok_or_else(|| NoDevice::Unified(first.name().into_owned()));
    };
    match Device::named(name) {
        Some(device) if device.buffer_type().is_some() && !device.is_ours() => Ok(device),
        Some(_) => Err(NoDevice::HoldsNothing(name.clone())),
        None => {
            let known = Device::all().filter(|device| !device.is_ours()).map(|device| device.name().into_owned());
            Err(NoDevice::Unknown { name: name.clone(), known: known.collect() })
        }
    }
}

/// The device that holds experts, for all models.
pub struct HotDevice {
    memory: Arc<DeviceMemory>,
    /// What copies and misses cost. Locked for a few operations on numbers.
    costs: Mutex<MissCosts>,
    /// Calls of a layer between the decision on a copy and its landing: a moving average, in fractions of [`LAG_UNITS`].
    lag: AtomicU32,
    /// Copies in the background that are under way to it, of all caches.
    copies_in_flight: AtomicUsize,
    /// The queues of the caches that are on it.
    queues: Mutex<Vec<Weak<FetchQueue>>>,
    off: AtomicBool,
}

/// A copy in the background, from start to end.
pub struct CopyUnderWay(Arc<HotDevice>);

impl Drop for CopyUnderWay {
    fn drop(&mut self) {
        self.0.copies_in_flight.fetch_sub(1, Relaxed);
    }
}

/// Fractions of a call that lags are kept in.
const LAG_UNITS: u32 = 16;
/// A new lag counts for one part in so many of the average.
const LAG_WEIGHT: u32 = 8;

impl HotDevice {
    /// The device that the user has named, or that suits best.
    pub fn choose(config: &Config) -> Result<Arc<Self>, NoDevice> {
        choose(config).map(|device| Arc::new(Self::new(device, config)))
    }

    /// Nothing on it yet.
    pub fn new(device: Device, config: &Config) -> Self {
        let limit = match config.max_mib {
            Budget::Off => Limit::Nothing,
            Budget::Mib(mib) => Limit::AtMost(Bytes::from_mib(mib)),
            Budget::Automatic => Limit::FreeLess(Bytes::from_mib(config.auto_reserve_mib)),
        };
        Self {
            memory: Arc::new(DeviceMemory::new(device, limit)),
            costs: Mutex::default(),
            lag: AtomicU32::new(0),
            copies_in_flight: AtomicUsize::new(0),
            queues: Mutex::default(),
            off: AtomicBool::new(false),
        }
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.memory.device()
    }

    /// Its memory.
    pub fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    /// Whether it has failed.
    pub fn is_off(&self) -> bool {
        self.off.load(Relaxed)
    }

    /// Gives the device up for the rest of the session and says why, once.
    pub fn turn_off(&self, reason: &str) {
        if self.off.swap(true, Relaxed) {
            return;
        }
        let name = self.device().name();
        let what = format!("hot cache off on {name}: {reason}; experts run on the CPU, answers stay the same");
        log(Level::Warn, &what);
        let queues = std::mem::take(&mut *self.queues());
        queues.iter().filter_map(Weak::upgrade).for_each(|queue| queue.end());
    }

    /// Notes the queue of a cache on it, to be ended if the device fails.
    pub fn register(&self, queue: &Arc<FetchQueue>) {
        let mut queues = self.queues();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(queue));
        drop(queues);
        if self.is_off() {
            queue.end();
        }
    }

    fn queues(&self) -> MutexGuard<'_, Vec<Weak<FetchQueue>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What copies and misses cost.
    pub fn costs(&self) -> MutexGuard<'_, MissCosts> {
        self.costs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy in the background has landed. `staging`: time that the host spent on it; `took`: time until it landed, if no
    /// other copy was before it; `lag`: calls of its layer between decision and landing.
    pub fn copied(&self, staging: Duration, took: Option<Duration>, lag: Option<u32>) {
        let ns = |duration: Duration| duration.as_nanos() as f32;
        self.costs().learn_background(ns(staging), took.map(ns));
        if let Some(lag) = lag {
            let old = self.lag.load(Relaxed);
            let new = lag.saturating_mul(LAG_UNITS);
            self.lag.store(old - old / LAG_WEIGHT + new / LAG_WEIGHT, Relaxed);
        }
    }

    /// Counts a copy in the background until the answer is dropped.
    pub fn copy_starts(self: &Arc<Self>) -> CopyUnderWay {
        self.copies_in_flight.fetch_add(1, Relaxed);
        CopyUnderWay(self.clone())
    }

    /// Whether copies in the background are under way.
    pub fn has_copies_in_flight(&self) -> bool {
        self.copies_in_flight.load(Relaxed) > 0
    }

    /// What a copy in the background costs, for admission; `None` as long as nothing was measured.
    pub fn copy_cost(&self) -> Option<CopyCost> {
        let price = self.costs().copy_in_misses()?;
        Some(CopyCost { price, lag: self.lag.load(Relaxed) / LAG_UNITS })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::copy::testing::in_a_process_of_its_own;
    use crate::ggml::test_devices::register_cuda_lookalike;
    use crate::ggml::testing::load_cpu;

    #[test]
    fn memory_that_cuda_shares_with_the_host_is_taken_only_if_named() {
        in_a_process_of_its_own(|| {
            load_cpu();
            let device = register_cuda_lookalike();
            let config = |unified, named: bool| {
                let variables = |name: &str| (unified && name == UNIFIED_MEMORY).then(Default::default);
                Config { device: named.then(|| "CUDA0".into()), ..Config::from_lookup(variables) }
            };
            assert!(choose(&config(false, false)) == Ok(device));
            assert!(choose(&config(true, false)) == Err(NoDevice::Unified("CUDA0".into())));
            assert!(choose(&config(true, true)) == Ok(device));
        });
    }
}
