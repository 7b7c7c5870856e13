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

/// One device's memory, and what all models together have taken of it.
pub struct DeviceMemory {
    device: Device,
    limit: Limit,
    reserved: Mutex<Bytes>,
}

/// Bytes of a device's memory that count against its limit until dropped.
pub struct Reservation {
    owner: Arc<DeviceMemory>,
    bytes: Bytes,
}

impl DeviceMemory {
    /// Nothing taken yet.
    pub fn new(device: Device, limit: Limit) -> Self {
        Self { device, limit, reserved: Mutex::default() }
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Bytes that may still be taken, measured now: contexts, draft models and projectors come late.
    pub fn available(&self) -> Bytes {
        let report = self.device.memory();
        self.available_beside(report, *self.reserved())
    }

    fn available_beside(&self, (free, total): (u64, u64), reserved: Bytes) -> Bytes {
        match self.limit {
            Limit::Nothing => Bytes::ZERO,
            Limit::FreeLess(reserve) => Bytes(free).saturating_sub(reserve),
            Limit::AtMost(most) => {
                let left = most.saturating_sub(reserved);
                // A device that reports no memory at all does not tell.
                if (free, total) == (0, 0) { left } else { left.min(Bytes(free)) }
            }
        }
    }

    /// Reserves `bytes`, if there is room for them.
    fn reserve(self: &Arc<Self>, bytes: Bytes) -> Option<Reservation> {
        // Asking a device can take long: not under the lock.
        let report = self.device.memory();
        let mut reserved = self.reserved();
        if self.available_beside(report, *reserved) < bytes {
            return None;
        }
        *reserved = reserved.saturating_add(bytes);
        Some(Reservation { owner: self.clone(), bytes })
    }

    /// Reserves `bytes` for what `allocate` makes; `None` if there is no room, or it makes nothing.
    ///
    /// What is asked for counts, never the difference of two of the device's reports: its free memory moves for other
    /// reasons as well. No lock is held during `allocate`.
    pub fn allocate<T>(
        self: &Arc<Self>,
        bytes: Bytes,
        allocate: impl FnOnce() -> Option<T>,
    ) -> Option<(T, Reservation)> {
        let reservation = self.reserve(bytes)?;
        Some((allocate()?, reservation))
    }

    fn reserved(&self) -> MutexGuard<'_, Bytes> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut reserved = self.owner.reserved();
        *reserved = reserved.saturating_sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::testing::load_cpu;

    fn memory(limit: Limit) -> Arc<DeviceMemory> {
        load_cpu();
        Arc::new(DeviceMemory::new(Device::cpu().unwrap(), limit))
    }

    #[test]
    fn what_is_reserved_counts_against_the_limit_until_dropped() {
        let memory = memory(Limit::AtMost(Bytes(100)));
        let (_, first) = memory.allocate(Bytes(60), || Some(())).unwrap();
        assert_eq!(memory.available(), Bytes(40));
        assert!(memory.allocate(Bytes(41), || Some(())).is_none(), "more than is left");
        drop(first);
        assert_eq!(memory.available(), Bytes(100));
    }

    #[test]
    fn what_could_not_be_allocated_is_not_reserved() {
        let memory = memory(Limit::AtMost(Bytes(100)));
        assert!(memory.allocate(Bytes(60), || None::<()>).is_none());
        assert_eq!(memory.available(), Bytes(100));
    }

    #[test]
    fn nothing_fits_where_nothing_may_be_taken() {
        assert!(memory(Limit::Nothing).allocate(Bytes(1), || Some(())).is_none());
        assert_eq!(memory(Limit::FreeLess(Bytes::MAX)).available(), Bytes::ZERO);
    }
}
