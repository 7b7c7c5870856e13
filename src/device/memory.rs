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
    planning: Mutex<()>,
}

#[derive(Default)]
struct State {
    reserved: Bytes,
    /// What of it is not allocated yet: the device still reports it as free.
    pending: Bytes,
    /// What may be reserved in all, as of the last plan.
    allowed: Bytes,
}

/// Bytes of a device's memory that count against its limit until dropped.
pub struct Reservation {
    owner: Arc<DeviceMemory>,
    bytes: Bytes,
    is_pending: bool,
}

impl DeviceMemory {
    /// Nothing taken yet.
    pub fn new(device: Device, limit: Limit) -> Self {
        Self { device, limit, state: Mutex::default(), planning: Mutex::default() }
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Plans and allocations from now on are nobody else's until the guard is dropped: two models that plan at once would
    /// count on the same memory.
    pub fn begin_planning(&self) -> MutexGuard<'_, ()> {
        self.planning.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that may still be taken, measured now: contexts, draft models and projectors come late. Can take long: it asks
    /// the device.
    pub fn plan(&self) -> Bytes {
        let (free, total) = self.device.memory();
        let mut state = self.state();
        let left = self.limit.left(&state, free, total);
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
        let mut reservation = self.reserve(bytes)?;
        let allocated = allocate()?;
        reservation.is_pending = false;
        let mut state = self.state();
        state.pending = state.pending.saturating_sub(bytes);
        drop(state);
        Some((allocated, reservation))
    }

    /// Reserves `bytes`, if the last plan allows it.
    pub fn reserve(self: &Arc<Self>, bytes: Bytes) -> Option<Reservation> {
        let mut state = self.state();
        let reserved = state.reserved.saturating_add(bytes);
        if reserved > state.allowed {
            return None;
        }
        state.reserved = reserved;
        state.pending = state.pending.saturating_add(bytes);
        Some(Reservation { owner: self.clone(), bytes, is_pending: true })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Limit {
    /// What may still be taken where so much is, and the device reports so many bytes free, and in all.
    fn left(self, state: &State, free: u64, total: u64) -> Bytes {
        let floor = MAX_FLOOR.min(Bytes(total / FLOOR_PARTS));
        let above = |reserve: Bytes| Bytes(free).saturating_sub(reserve).saturating_sub(state.pending);
        match self {
            Self::Nothing => Bytes::ZERO,
            Self::FreeLess(reserve) => above(reserve.max(floor)),
            Self::AtMost(most) => {
                let left = most.saturating_sub(state.reserved);
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
        if self.is_pending {
            state.pending = state.pending.saturating_sub(self.bytes);
        }
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
        let left = |limit: Limit, free_mib, total_mib| limit.left(&State::default(), free_mib * MIB, total_mib * MIB);
        let mib = Bytes::from_mib;
        assert_eq!(left(Limit::AtMost(mib(8000)), 8000, 12_000), mib(8000 - 256));
        assert_eq!(left(Limit::AtMost(mib(4000)), 8000, 12_000), mib(4000), "there is more than that");
        assert_eq!(left(Limit::FreeLess(mib(0)), 8000, 12_000), mib(8000 - 256));
        assert_eq!(left(Limit::FreeLess(mib(1024)), 8000, 12_000), mib(8000 - 1024), "not both");
        assert_eq!(left(Limit::AtMost(mib(64)), 64, 64), mib(62), "a small device");
        assert_eq!(left(Limit::AtMost(mib(64)), 0, 0), mib(64), "a device that does not tell");
    }

    #[test]
    fn what_is_reserved_and_not_allocated_yet_is_not_free() {
        let mib = Bytes::from_mib;
        let state = State { reserved: mib(1000), pending: mib(600), allowed: mib(0) };
        let left = |limit: Limit| limit.left(&state, 8000 * MIB, 12_000 * MIB);
        assert_eq!(left(Limit::FreeLess(mib(1024))), mib(8000 - 1024 - 600));
        assert_eq!(left(Limit::AtMost(mib(4000))), mib(4000 - 1000), "the budget is the narrower bound");
        assert_eq!(left(Limit::AtMost(mib(12_000))), mib(8000 - 256 - 600));
    }

    #[test]
    fn what_is_pending_ends_with_the_allocation_or_the_reservation() {
        let memory = memory(Limit::AtMost(Bytes(100)));
        memory.plan();
        let pending = || memory.state().pending;
        let reserved = memory.reserve(Bytes(10)).unwrap();
        let allocated = memory.allocate(Bytes(20), || Some(())).unwrap();
        assert_eq!(pending(), Bytes(10));
        assert!(memory.allocate(Bytes(5), || None::<()>).is_none());
        assert_eq!(pending(), Bytes(10));
        drop(allocated);
        drop(reserved);
        assert_eq!((pending(), memory.state().reserved), (Bytes::ZERO, Bytes::ZERO));
    }
}
