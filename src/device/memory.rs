//! How much of a device's memory experts may take, and how much of it is taken.

use crate::ggml::Device;
use crate::units::Bytes;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a device may round an allocation up to. More than that in its report is someone else's.
const GRANULARITY: Bytes = Bytes(2 << 20);

/// What a backend instance takes of a device at most. More than that is someone else's.
const MAX_INSTANCE: Bytes = Bytes::from_mib(512);

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
    /// Where the device reports that it has rounded up, what it reports is reserved. No lock is held during `allocate`.
    pub fn allocate<T>(
        self: &Arc<Self>,
        bytes: Bytes,
        allocate: impl FnOnce() -> Option<T>,
    ) -> Option<(T, Reservation)> {
        let mut reservation = self.reserve(bytes)?;
        let (made, taken) = self.taken_by(allocate);
        let made = made?;
        if self.device.has_memory_of_its_own() {
            reservation.grow_to(taken.min(bytes.saturating_add(GRANULARITY)));
        }
        Some((made, reservation))
    }

    /// Reserves what `make` takes of the device, whatever it is.
    pub fn measure<T>(self: &Arc<Self>, make: impl FnOnce() -> T) -> (T, Reservation) {
        let (made, taken) = self.taken_by(make);
        let mut reservation = Reservation { owner: self.clone(), bytes: Bytes::ZERO };
        if self.device.has_memory_of_its_own() {
            reservation.grow_to(taken.min(MAX_INSTANCE));
        }
        (made, reservation)
    }

    /// Bytes that the device reports as gone while `make` runs.
    fn taken_by<T>(&self, make: impl FnOnce() -> T) -> (T, Bytes) {
        let (before, _) = self.device.memory();
        let made = make();
        let (after, _) = self.device.memory();
        (made, Bytes(before.saturating_sub(after)))
    }

    fn reserved(&self) -> MutexGuard<'_, Bytes> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    fn grow_to(&mut self, bytes: Bytes) {
        let more = bytes.saturating_sub(self.bytes);
        self.bytes = self.bytes.saturating_add(more);
        let mut reserved = self.owner.reserved();
        *reserved = reserved.saturating_add(more);
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
