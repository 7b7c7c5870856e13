//! How much of a device's memory experts may take, and how much of it is taken.

use crate::ggml::Device;
use crate::units::Bytes;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How much of a device's memory may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Nothing.
    Nothing,
    /// So many bytes.
    AtMost(Bytes),
    /// What is free, less so many bytes.
    FreeLess(Bytes),
}

/// Of a device's memory this much is never taken, whatever the budget: backends take more while they work (pools of their
/// streams, kernels and graphs that are loaded when first used) and some abort the process when there is none. A part of all
/// memory, ...
const FLOOR_PARTS: u64 = 32;
/// ... and no more than this: that of a device of 8 GiB.
const MAX_FLOOR: Bytes = Bytes::from_mib(256);

/// One device's memory, and what all models together have taken of it.
///
/// What is asked for counts, never the difference of two of the device's reports: its free memory moves for other reasons
/// as well. The device is asked when a plan is made; what it promises then is kept to.
pub struct DeviceMemory {
    device: Device,
    limit: Limit,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    reserved: Bytes,
    /// What may be reserved in all, as of the last plan.
    allowed: Bytes,
}

/// Bytes of a device's memory that count against its limit until dropped.
pub struct Reservation {
    owner: Arc<DeviceMemory>,
    bytes: Bytes,
}

impl DeviceMemory {
    /// Nothing taken yet.
    pub fn new(device: Device, limit: Limit) -> Self {
        Self { device, limit, state: Mutex::default() }
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Bytes that may still be taken, measured now: contexts, draft models and projectors come late. Can take long: it asks
    /// the device.
    pub fn plan(&self) -> Bytes {
        let (free, total) = self.device.memory();
        let mut state = self.state();
        let left = self.limit.left(state.reserved, free, total);
        state.allowed = state.reserved.saturating_add(left);
        left
    }

    /// Reserves `bytes` for what `allocate` makes; `None` if that is more than the last plan allows, or it makes nothing.
    /// No lock is held during `allocate`.
    pub fn allocate<T>(
        self: &Arc<Self>,
        bytes: Bytes,
        allocate: impl FnOnce() -> Option<T>,
    ) -> Option<(T, Reservation)> {
        let reservation = self.reserve(bytes)?;
        Some((allocate()?, reservation))
    }

    /// Reserves `bytes`, if the last plan allows it.
    pub fn reserve(self: &Arc<Self>, bytes: Bytes) -> Option<Reservation> {
        let mut state = self.state();
        let reserved = state.reserved.saturating_add(bytes);
        if reserved > state.allowed {
            return None;
        }
        state.reserved = reserved;
        Some(Reservation { owner: self.clone(), bytes })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Limit {
    /// What may still be taken where so much is, and the device reports so many bytes free, and in all.
    fn left(self, reserved: Bytes, free: u64, total: u64) -> Bytes {
        let floor = MAX_FLOOR.min(Bytes(total / FLOOR_PARTS));
        let above = |reserve: Bytes| Bytes(free).saturating_sub(reserve);
        match self {
            Self::Nothing => Bytes::ZERO,
            Self::FreeLess(reserve) => above(reserve.max(floor)),
            Self::AtMost(most) => {
                let left = most.saturating_sub(reserved);
                // A device that reports no memory at all does not tell.
                if (free, total) == (0, 0) { left } else { left.min(above(floor)) }
            }
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.owner.state();
        state.reserved = state.reserved.saturating_sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::testing::load_cpu;

    const MIB: u64 = 1 << 20;

    fn memory(limit: Limit) -> Arc<DeviceMemory> {
        load_cpu();
        Arc::new(DeviceMemory::new(Device::cpu().unwrap(), limit))
    }

    #[test]
    fn what_is_reserved_counts_against_the_limit_until_dropped() {
        let memory = memory(Limit::AtMost(Bytes(100)));
        assert!(memory.reserve(Bytes(1)).is_none(), "nothing is planned yet");
        assert_eq!(memory.plan(), Bytes(100));
        let (_, first) = memory.allocate(Bytes(60), || Some(())).unwrap();
        assert_eq!(memory.plan(), Bytes(40));
        assert!(memory.allocate(Bytes(41), || Some(())).is_none(), "more than is left");
        drop(first);
        assert_eq!(memory.plan(), Bytes(100));
    }

    #[test]
    fn what_could_not_be_allocated_is_not_reserved() {
        let memory = memory(Limit::AtMost(Bytes(100)));
        memory.plan();
        assert!(memory.allocate(Bytes(60), || None::<()>).is_none());
        assert!(memory.reserve(Bytes(100)).is_some());
    }

    #[test]
    fn nothing_fits_where_nothing_may_be_taken() {
        for limit in [Limit::Nothing, Limit::FreeLess(Bytes::MAX)] {
            let memory = memory(limit);
            assert_eq!(memory.plan(), Bytes::ZERO);
            assert!(memory.reserve(Bytes(1)).is_none());
        }
    }

    #[test]
    fn a_floor_stays_free_whatever_the_budget() {
        let left = |limit: Limit, free_mib, total_mib| limit.left(Bytes::ZERO, free_mib * MIB, total_mib * MIB);
        let mib = Bytes::from_mib;
        assert_eq!(left(Limit::AtMost(mib(8000)), 8000, 12_000), mib(8000 - 256));
        assert_eq!(left(Limit::AtMost(mib(4000)), 8000, 12_000), mib(4000), "there is more than that");
        assert_eq!(left(Limit::FreeLess(mib(0)), 8000, 12_000), mib(8000 - 256));
        assert_eq!(left(Limit::FreeLess(mib(1024)), 8000, 12_000), mib(8000 - 1024), "not both");
        assert_eq!(left(Limit::AtMost(mib(64)), 64, 64), mib(62), "a small device");
        assert_eq!(left(Limit::AtMost(mib(64)), 0, 0), mib(64), "a device that does not tell");
    }
}
