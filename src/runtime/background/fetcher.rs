//! The fetcher: copies experts to the device in the background and publishes each when it is whole.
//!
//! First come the copies of the plan; then those that contexts ask for, as they come, until the cache ends.

use super::Cached;
use crate::device::copy::{COPY_TIMEOUT, Copy, CopyEngine, Outcome, Started};
use crate::runtime::hot_device::CopyUnderWay;
use crate::runtime::model::cache_handle::CacheHandle;
use crate::runtime::model::fetch_queue::Fetch;
use crate::runtime::model::layer_cache::LayerCache;
use crate::runtime::model::policy::LayerPolicy;
use crate::units::Slot;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long to wait for a copy before looking for new fetches.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A copy that was started and is not reported yet.
struct InFlight {
    id: u64,
    fetch: Fetch,
    slot: Slot,
    started: Instant,
    /// Time that the host spent on it.
    staging: Duration,
    was_alone: bool,
    _counted: CopyUnderWay,
}

/// What became of an attempt to start a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// It is in flight.
    Started,
    /// It is not possible or not needed any more.
    Dropped,
    /// All staging blocks are in flight: try again later.
    NoStaging,
}

/// Makes the copies of one model's cache.
pub struct Fetcher {
    engine: Box<dyn CopyEngine>,
    cache: Arc<CacheHandle>,
    /// By their index in the plan; `None`: a layer without slots.
    layers: Vec<Option<Cached>>,
    in_flight: VecDeque<InFlight>,
    next_id: u64,
}

impl Fetcher {
    /// Nothing in flight.
    pub fn new(engine: Box<dyn CopyEngine>, cache: Arc<CacheHandle>, layers: Vec<Option<Cached>>) -> Self {
        Self { engine, cache, layers, in_flight: VecDeque::new(), next_id: 0 }
    }

    /// Makes these copies and returns when all of them have landed, or at the end. `between` is done between them.
    pub fn carry_out(&mut self, mut fetches: VecDeque<Fetch>, between: &mut dyn FnMut()) {
        while !(self.cache.is_over() || fetches.is_empty() && self.in_flight.is_empty()) {
            while let Some(fetch) = fetches.pop_front() {
                if self.start(fetch) == Attempt::NoStaging {
                    fetches.push_front(fetch);
                    break;
                }
            }
            self.settle(POLL_INTERVAL);
            self.pause(between);
        }
        self.land_all();
    }

    /// Makes the copies that contexts ask for, until the end. `between` is done between them.
    pub fn serve(&mut self, between: &mut dyn FnMut()) {
        while !self.cache.is_over() {
            self.pause(between);
            match self.cache.queue.pop() {
                Some(fetch) => {
                    let attempt = self.start(fetch);
                    self.end_fetch(&fetch, attempt == Attempt::Started);
                    if attempt == Attempt::NoStaging {
                        // This fetch is the oldest that waits, and is dropped.
                        self.settle(POLL_INTERVAL);
                    }
                }
                None if self.in_flight.is_empty() => self.cache.queue.wait(),
                None => self.settle(POLL_INTERVAL),
            }
        }
        self.land_all();
    }

    /// Does something else. Copies in flight are not to blame for the time that it takes.
    fn pause(&mut self, between: &mut dyn FnMut()) {
        let start = Instant::now();
        between();
        let time = start.elapsed();
        if time > POLL_INTERVAL {
            self.in_flight.iter_mut().for_each(|copy| copy.was_alone = false);
            self.engine.paused(time);
        }
    }

    /// Tells the layer that its fetch has been started, or will not be.
    pub fn end_fetch(&self, fetch: &Fetch, is_started: bool) {
        if let Some(layer) = self.layer(fetch) {
            layer.state().end_fetch(is_started);
        }
    }

    fn layer(&self, fetch: &Fetch) -> Option<&Arc<LayerCache>> {
        Some(&self.layers.get(fetch.layer)?.as_ref()?.cache)
    }

    fn start(&mut self, fetch: Fetch) -> Attempt {
        let Some(layer) = self.layer(&fetch).cloned() else { return Attempt::Dropped };
        let expert = fetch.admission.admit;
        let slot = {
            let slots = &mut layer.state().slots;
            match fetch.admission.evict {
                // Where no slot is spare the evicted expert stops serving now.
                Some(evict) if slots.n_free() == 0 => slots.start_replace(expert, evict),
                Some(evict) => slots.start_swap(expert, evict),
                None => slots.start_fill(expert),
            }
        };
        // Overtaken by events: the expert is there already, the evicted one is gone or in use, or no slot is free.
        let Some(slot) = slot else { return Attempt::Dropped };
        let id = self.next_id;
        let was_alone = self.in_flight.is_empty();
        let started = Instant::now();
        let copy = Copy { id, target: layer.writer.clone(), slot };
        match self.engine.start(copy, &mut |staging| layer.read_expert(expert, staging)) {
            Started::Yes => {
                self.next_id += 1;
                let staging = started.elapsed();
                let _counted = self.cache.device.copy_starts();
                self.in_flight.push_back(InFlight { id, fetch, slot, started, staging, was_alone, _counted });
                Attempt::Started
            }
            Started::Full => {
                layer.state().slots.abandon(slot);
                Attempt::NoStaging
            }
            Started::Unreadable => {
                layer.state().slots.abandon(slot);
                Attempt::Dropped
            }
            Started::Refused => {
                // Some of it may be under way all the same.
                layer.state().slots.retire(slot);
                self.cache.device.turn_off("a copy to it could not be started");
                Attempt::Dropped
            }
        }
    }

    /// Waits a moment for the oldest copy and publishes it if it is whole.
    fn settle(&mut self, timeout: Duration) {
        let Some((id, outcome)) = self.engine.wait(timeout) else { return };
        let place = self.in_flight.iter().position(|copy| copy.id == id);
        let Some(landed) = place.and_then(|place| self.in_flight.remove(place)) else { return };
        let Some(layer) = self.layer(&landed.fetch).cloned() else { return };
        match outcome {
            Outcome::Whole => {
                let calls = {
                    let mut state = layer.state();
                    state.slots.publish(landed.slot);
                    state.policy.as_ref().map(LayerPolicy::calls)
                };
                self.cache.add_copied(1, layer.writer.expert_bytes());
                // A copy that waited behind others tells less of the device than of them.
                let alone = (landed.was_alone && self.in_flight.is_empty()).then(|| landed.started.elapsed());
                let lag = landed.fetch.decided_at.and_then(|decided_at| calls?.checked_sub(decided_at));
                self.cache.device.copied(landed.staging, alone, lag);
            }
            Outcome::Failed => {
                layer.state().slots.retire(landed.slot);
                self.cache.device.turn_off("a copy to it failed");
            }
            Outcome::Lost => {
                layer.state().slots.retire(landed.slot);
                self.cache.device.turn_off("a copy to it did not end");
            }
        }
    }

    /// Lets copies in flight land, as long as the device works.
    fn land_all(&mut self) {
        while !self.in_flight.is_empty() && !self.cache.device.is_off() && self.engine.in_flight() > 0 {
            self.settle(COPY_TIMEOUT);
        }
        // What is still under way may still write: its slots are lost.
        while let Some(lost) = self.in_flight.pop_front() {
            if let Some(layer) = self.layer(&lost.fetch) {
                layer.state().slots.retire(lost.slot);
            }
        }
    }
}

#[cfg(test)]
mod tests;
