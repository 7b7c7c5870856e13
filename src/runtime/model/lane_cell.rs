//! A context's hot lane, and where it is kept between calls, so that an idle context's device memory can be given back.

use super::cache_handle::{CacheHandle, IdleMemory};
use crate::device::Reservation;
use crate::lanes::HotLane;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A context's hot lane and what it has reserved of the device.
pub struct ContextLane {
    /// The lane.
    pub lane: HotLane,
    /// The cache whose layers it computes.
    pub cache: Arc<CacheHandle>,
    /// The scratch memory, if there is any.
    pub scratch: Option<Reservation>,
}

impl ContextLane {
    /// A lane without scratch memory.
    pub fn new(lane: HotLane, cache: Arc<CacheHandle>) -> Self {
        Self { lane, cache, scratch: None }
    }
}

/// Holds a context's hot lane while the context computes nothing.
#[derive(Default)]
pub struct LaneCell(Mutex<Option<Box<ContextLane>>>);

impl LaneCell {
    /// Takes the lane out, for a call or for good. The lock is held for this only.
    pub fn take(&self) -> Option<Box<ContextLane>> {
        self.lock().take()
    }

    /// Puts the lane back after a call; drops it if its cache is over.
    pub fn put(&self, lane: Box<ContextLane>) {
        let mut place = self.lock();
        // Whoever ends a cache marks it first and empties the cells then: one of both sees the other.
        if !lane.cache.is_over() {
            *place = Some(lane);
            return;
        }
        drop(place);
        drop(lane); // frees device memory: not under the lock
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<ContextLane>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IdleMemory for LaneCell {
    fn release(&self) {
        drop(self.take());
    }
}
