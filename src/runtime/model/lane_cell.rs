//! A context's hot lane, and where it is kept between calls, so that the cache's thread can work on it and give an idle
//! context's device memory back.

use super::cache_handle::{CacheHandle, IdleMemory};
use crate::device::Reservation;
use crate::lanes::HotLane;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A context's hot lane and what it has reserved of the device.
pub struct ContextLane {
    /// The lane.
    pub lane: HotLane,
    /// The cache whose layers it computes.
    pub cache: Arc<CacheHandle>,
    /// Its scratch memory.
    pub _scratch: Reservation,
}

/// Where a context's lane is.
#[derive(Default)]
enum Place {
    /// Nowhere: it has none.
    #[default]
    Nowhere,
    /// Here.
    Here(Box<ContextLane>),
    /// With the context, for a call, or with the cache's thread.
    Lent,
}

/// Holds a context's hot lane while nobody works with it.
#[derive(Default)]
pub struct LaneCell {
    place: Mutex<Place>,
    given_back: Condvar,
}

impl LaneCell {
    /// Takes the lane out, if it is here. The lock is held for this only.
    pub fn take(&self) -> Option<Box<ContextLane>> {
        let mut place = self.lock();
        match std::mem::replace(&mut *place, Place::Lent) {
            Place::Here(lane) => Some(lane),
            other => {
                *place = other;
                None
            }
        }
    }

    /// The same, once whoever has it has given it back; `None` if there is none. For threads that no token waits for.
    pub fn wait_and_take(&self) -> Option<Box<ContextLane>> {
        let is_lent = |place: &mut Place| matches!(place, Place::Lent);
        drop(self.given_back.wait_while(self.lock(), is_lent));
        self.take()
    }

    /// Puts a lane here, or back; drops it if its cache is over.
    pub fn put(&self, lane: Box<ContextLane>) {
        let mut place = self.lock();
        // Whoever ends a cache marks it first and empties the cells then: one of both sees the other.
        let (now, over) = if lane.cache.is_over() { (Place::Nowhere, Some(lane)) } else { (Place::Here(lane), None) };
        let before = std::mem::replace(&mut *place, now);
        drop(place);
        self.given_back.notify_all();
        drop((before, over)); // frees device memory: not under the lock
    }

    fn lock(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IdleMemory for LaneCell {
    /// A lane that is lent is dropped when it is put back: its cache is over.
    fn release(&self) {
        let mut place = self.lock();
        let released = if matches!(*place, Place::Lent) { Place::Nowhere } else { std::mem::take(&mut *place) };
        drop(place);
        drop(released);
    }
}
