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
pub enum Place {
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

/// Sees to it that a lane which was taken out and is lost, by a panic say, is not waited for.
pub struct Loan(Option<Arc<LaneCell>>);

impl Loan {
    /// Of the lane that was taken out of `cell`.
    pub fn of(cell: &Arc<LaneCell>) -> Self {
        Self(Some(cell.clone()))
    }

    /// Gives the lane back.
    pub fn give_back(mut self, lane: Box<ContextLane>) {
        if let Some(cell) = self.0.take() {
            cell.put(lane);
        }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(cell) = &self.0 {
            cell.lose();
        }
    }
}

impl LaneCell {
    /// Takes the lane out, if it is here; it is lent then. The lock is held for this only.
    pub fn take(&self) -> Place {
        Self::take_from(&mut self.lock())
    }

    /// The same, once whoever has it has given it back. For threads that no token waits for.
    pub fn wait_and_take(&self) -> Place {
        let is_lent = |place: &mut Place| matches!(place, Place::Lent);
        let place = self.given_back.wait_while(self.lock(), is_lent);
        Self::take_from(&mut place.unwrap_or_else(PoisonError::into_inner))
    }

    fn take_from(place: &mut Place) -> Place {
        match std::mem::take(place) {
            Place::Here(lane) => {
                *place = Place::Lent;
                Place::Here(lane)
            }
            Place::Lent => {
                *place = Place::Lent;
                Place::Lent
            }
            Place::Nowhere => Place::Nowhere,
        }
    }

    /// Puts a lane here, or back; drops it if its cache is over.
    pub fn put(&self, lane: Box<ContextLane>) {
        let mut place = self.lock();
        // Whoever ends a cache marks it first and empties the cells then: one of both sees the other.
        let (before, over) = if !lane.cache.is_over() {
            (std::mem::replace(&mut *place, Place::Here(lane)), None)
        } else if matches!(*place, Place::Lent) {
            (std::mem::take(&mut *place), Some(lane))
        } else {
            // The next cache has put its own here meanwhile.
            (Place::Nowhere, Some(lane))
        };
        drop(place);
        self.given_back.notify_all();
        drop((before, over)); // frees device memory: not under the lock
    }

    /// A lane that was lent will not come back.
    pub fn lose(&self) {
        let mut place = self.lock();
        if matches!(*place, Place::Lent) {
            *place = Place::Nowhere;
        }
        drop(place);
        self.given_back.notify_all();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_that_is_lost_is_not_waited_for() {
        let cell = Arc::new(LaneCell { place: Mutex::new(Place::Lent), given_back: Condvar::new() });
        assert!(matches!(cell.take(), Place::Lent));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| matches!(cell.wait_and_take(), Place::Nowhere));
            drop(Loan::of(&cell));
            assert!(waiting.join().unwrap());
        });
        assert!(matches!(cell.take(), Place::Nowhere), "and can be asked for again");
    }
}
