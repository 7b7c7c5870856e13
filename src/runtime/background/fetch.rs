//! The ring: copies experts to the device in the background, publishes each when it is whole, and goes on until told.
//!
//! First come the experts of the plan, hottest first; then the wishes of contexts that decode, as they come.

use crate::device::copy::{Copy, CopyEngine, Outcome, Started};
use crate::runtime::model::cache::ModelCache;
use crate::runtime::model::layer::LayerCache;
use crate::runtime::model::policy::Learner;
use crate::units::{Expert, Slot};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Wishes that wait at most. The oldest is dropped for one more: what was wanted long ago is wanted least.
const MAX_WISHES: usize = 256;
/// How long to wait for a copy before looking for new wishes.
const GLANCE: Duration = Duration::from_millis(2);

/// A copy that a context would like: into the place of another expert, or into a free slot.
#[derive(Clone)]
pub struct Wish {
    /// Whose layer.
    pub cache: Arc<LayerCache>,
    /// Who shall come.
    pub expert: Expert,
    /// Who shall go.
    pub victim: Option<Expert>,
    /// The layer's calls when it was wished for; `None`: by a plan.
    pub wished_at: Option<u32>,
}

/// Wishes on their way to the ring, and the word that it shall end.
#[derive(Default)]
pub struct Wishes {
    queue: Mutex<VecDeque<Wish>>,
    changed: Condvar,
    ended: AtomicBool,
    filled: AtomicBool,
}

impl Wishes {
    /// None yet; room for all that may wait.
    pub fn new() -> Self {
        Self { queue: Mutex::new(VecDeque::with_capacity(MAX_WISHES)), ..Self::default() }
    }

    /// Adds a wish. The lock is held for this only.
    pub fn push(&self, wish: Wish) {
        let mut queue = self.lock();
        if self.has_ended() {
            return;
        }
        let dropped = if queue.len() >= MAX_WISHES { queue.pop_front() } else { None };
        queue.push_back(wish);
        drop(queue);
        self.changed.notify_one();
        if let Some(dropped) = dropped {
            dropped.cache.state().end_wish(false);
        }
    }

    /// Tells the ring to end.
    pub fn end(&self) {
        // Under the lock, lest the ring go to sleep just before it is told.
        let mut queue = self.lock();
        self.ended.store(true, Relaxed);
        // Wishes hold caches, and caches hold this queue.
        queue.clear();
        drop(queue);
        self.changed.notify_all();
    }

    /// Whether the ring shall end.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Relaxed)
    }

    /// Drops all that wait: wished for while the plan was carried out, they are old.
    pub fn forget(&self) {
        let old = std::mem::replace(&mut *self.lock(), VecDeque::with_capacity(MAX_WISHES));
        old.iter().for_each(|wish| wish.cache.state().end_wish(false));
    }

    /// The plan has been carried out, or given up.
    pub fn set_filled(&self) {
        let queue = self.lock();
        self.filled.store(true, Relaxed);
        drop(queue);
        self.changed.notify_all();
    }

    /// Waits until the plan has been carried out, or given up.
    pub fn wait_filled(&self) {
        let queue = self.lock();
        drop(self.changed.wait_while(queue, |_| !self.filled.load(Relaxed)));
    }

    fn take(&self) -> Option<Wish> {
        self.lock().pop_front()
    }

    /// Waits until there is a wish, or the end.
    fn wait(&self) {
        let queue = self.lock();
        let is_idle = |queue: &mut VecDeque<Wish>| queue.is_empty() && !self.has_ended();
        drop(self.changed.wait_while(queue, is_idle));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Wish>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A copy that was started and is not reported yet.
struct Flight {
    id: u64,
    cache: Arc<LayerCache>,
    slot: Slot,
    wished_at: Option<u32>,
    started: Instant,
    /// How long the host was at it.
    staging: Duration,
    was_alone: bool,
}

/// One model's ring.
pub struct Ring {
    pub engine: Box<dyn CopyEngine>,
    pub model: Arc<ModelCache>,
    flights: VecDeque<Flight>,
    next_id: u64,
}

impl Ring {
    /// Nothing under way.
    pub fn new(engine: Box<dyn CopyEngine>, model: Arc<ModelCache>) -> Self {
        Self { engine, model, flights: VecDeque::new(), next_id: 0 }
    }

    /// Carries out the plan and returns when all of it has landed, or at the end.
    pub fn carry_out(&mut self, mut plan: VecDeque<Wish>) {
        while !(self.is_over() || plan.is_empty() && self.flights.is_empty()) {
            while let Some(wish) = plan.pop_front() {
                if let Err(wish) = self.start(wish) {
                    plan.push_front(wish);
                    break;
                }
            }
            self.settle(GLANCE);
        }
        self.land_all();
    }

    /// Carries out wishes until the end.
    pub fn serve(&mut self) {
        while !self.is_over() {
            match self.model.wishes.take() {
                Some(wish) => {
                    let cache = wish.cache.clone();
                    let is_started = self.start(wish);
                    cache.state().end_wish(matches!(is_started, Ok(true)));
                    if is_started.is_err() {
                        // All staging is in flight: this wish is the oldest, and is dropped.
                        self.settle(GLANCE);
                    }
                }
                None if self.flights.is_empty() => self.model.wishes.wait(),
                None => self.settle(GLANCE),
            }
        }
        self.land_all();
    }

    fn is_over(&self) -> bool {
        self.model.wishes.has_ended() || self.model.is_over()
    }

    /// Starts a copy and returns whether it did; gives the wish back if no staging is free.
    fn start(&mut self, wish: Wish) -> Result<bool, Wish> {
        let Wish { cache, expert, victim, wished_at } = wish;
        let slot = {
            let slots = &mut cache.state().slots;
            match victim {
                // Where no slot is spare the victim stops serving now.
                Some(victim) if slots.n_free() == 0 => slots.start_replace(expert, victim),
                Some(victim) => slots.start_swap(expert, victim),
                None => slots.start_fill(expert),
            }
        };
        // Overtaken by events: the expert is there already, the victim is gone or in use, or no slot is free.
        let Some(slot) = slot else { return Ok(false) };
        let id = self.next_id;
        let was_alone = self.flights.is_empty();
        let started = Instant::now();
        let copy = Copy { id, target: cache.writer.clone(), slot };
        match self.engine.start(copy, &mut |staging| cache.read_expert(expert, staging)) {
            Started::Yes => {
                self.next_id += 1;
                let staging = started.elapsed();
                self.flights.push_back(Flight { id, cache, slot, wished_at, started, staging, was_alone });
                Ok(true)
            }
            Started::Full => {
                cache.state().slots.abandon(slot);
                Err(Wish { cache, expert, victim, wished_at })
            }
            Started::Unreadable => {
                cache.state().slots.abandon(slot);
                Ok(false)
            }
            Started::Refused => {
                // Some of it may be under way all the same.
                cache.state().slots.retire(slot);
                self.model.device.turn_off("a copy to it could not be started");
                Ok(false)
            }
        }
    }

    /// Waits a moment for the oldest copy and publishes it if it is whole.
    fn settle(&mut self, timeout: Duration) {
        let Some((id, outcome)) = self.engine.wait(timeout) else { return };
        let Some(flight) =
            self.flights.iter().position(|flight| flight.id == id).and_then(|at| self.flights.remove(at))
        else {
            return;
        };
        let Flight { cache, slot, wished_at, started, staging, was_alone, .. } = flight;
        match outcome {
            Outcome::Whole => {
                let calls = {
                    let mut state = cache.state();
                    state.slots.publish(slot);
                    state.learner.as_ref().map(Learner::calls)
                };
                self.model.add_copied(cache.writer.expert_bytes());
                // A copy that waited behind others tells less of the device than of them.
                let alone = (was_alone && self.flights.is_empty()).then(|| started.elapsed());
                let lag = wished_at.and_then(|wished_at| calls?.checked_sub(wished_at));
                self.model.device.copied(staging, alone, lag);
            }
            Outcome::Failed => {
                cache.state().slots.retire(slot);
                self.model.device.turn_off("a copy to it failed");
            }
            Outcome::Lost => {
                cache.state().slots.retire(slot);
                self.model.device.turn_off("a copy to it did not end");
            }
        }
    }

    /// Lets copies under way land, as long as the device works.
    fn land_all(&mut self) {
        while !self.flights.is_empty() && !self.model.device.is_off() && self.engine.in_flight() > 0 {
            self.settle(crate::device::copy::PATIENCE);
        }
        // What is still under way may still write: its slots are lost.
        for Flight { cache, slot, .. } in self.flights.drain(..) {
            cache.state().slots.retire(slot);
        }
        if self.is_over() {
            self.model.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::SlotState;
    use crate::device::copy::Started;
    use crate::ggml::Device;
    use crate::ggml::testing::load_cpu;
    use crate::options::Config;
    use crate::runtime::hot_device::HotDevice;
    use crate::runtime::model::layer::testing::cache;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const N_EXPERT: u16 = 6;
    const N_SLOTS: u16 = 4;

    /// What the device's memory holds in a slot.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Content {
        Half,
        Whole(Expert),
    }

    /// An engine whose copies land when, and as, the test says.
    #[derive(Default)]
    struct Scheduled {
        flying: Vec<(u64, Slot)>,
        landed: VecDeque<(u64, Outcome)>,
        contents: HashMap<Slot, Content>,
    }

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Scheduled>>);

    impl Shared {
        fn lock(&self) -> std::sync::MutexGuard<'_, Scheduled> {
            self.0.lock().unwrap()
        }
    }

    impl CopyEngine for Shared {
        fn start(&mut self, copy: Copy, _: crate::device::copy::Read<'_>) -> Started {
            let mut inner = self.lock();
            inner.flying.push((copy.id, copy.slot));
            inner.contents.insert(copy.slot, Content::Half);
            Started::Yes
        }

        fn in_flight(&self) -> usize {
            self.lock().flying.len()
        }

        fn wait(&mut self, _: Duration) -> Option<(u64, Outcome)> {
            self.lock().landed.pop_front()
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        Wish(Expert, Option<Expert>),
        /// The copy at this place among those in flight ends so.
        Land(usize, Outcome),
        /// A context looks an expert up and launches it; another may be at it too.
        Launch(Expert),
        /// The launch at this place ends.
        End(usize),
        /// A context takes a slot for a missed expert while its token waits, and the copy is whole (or its launch refused).
        CopyNow(Expert, bool),
    }

    fn event() -> impl Strategy<Value = Event> {
        let expert = || (0..N_EXPERT).prop_map(Expert);
        let outcome = prop_oneof![12 => Just(Outcome::Whole), 1 => Just(Outcome::Failed), 1 => Just(Outcome::Lost)];
        prop_oneof![
            4 => (expert(), prop::option::of(expert())).prop_map(|(expert, victim)| Event::Wish(expert, victim)),
            4 => (0..8usize, outcome).prop_map(|(place, outcome)| Event::Land(place, outcome)),
            4 => expert().prop_map(Event::Launch),
            3 => (0..8usize).prop_map(Event::End),
            2 => (expert(), any::<bool>()).prop_map(|(expert, is_done)| Event::CopyNow(expert, is_done)),
        ]
    }

    proptest! {
        #[test]
        fn nothing_half_copied_is_ever_served_whatever_lands_when(events in prop::collection::vec(event(), 0..150)) {
            load_cpu();
            let device = Arc::new(HotDevice::new(Device::cpu().unwrap(), &Config::from_env()));
            let cache = Arc::new(cache(&device, N_EXPERT, N_SLOTS));
            let engine = Shared::default();
            let mut ring = Ring::new(Box::new(engine.clone()), cache.model.clone());
            let mut launches: Vec<(Slot, Expert)> = Vec::new();
            for event in events {
                match event {
                    Event::Wish(expert, victim) if !device.is_off() => {
                        let wish = Wish { cache: cache.clone(), expert, victim, wished_at: None };
                        prop_assert!(ring.start(wish).is_ok());
                    }
                    Event::Land(place, outcome) => {
                        let mut inner = engine.lock();
                        if place < inner.flying.len() {
                            let (id, slot) = inner.flying.remove(place);
                            let flight = ring.flights.iter().find(|flight| flight.id == id).unwrap();
                            if let (Outcome::Whole, Some(SlotState::Filling(expert))) = (outcome, flight.cache.state().slots.state(slot)) {
                                inner.contents.insert(slot, Content::Whole(expert));
                            }
                            inner.landed.push_back((id, outcome));
                            drop(inner);
                            ring.settle(Duration::ZERO);
                        }
                    }
                    Event::Launch(expert) => {
                        let slots = &mut cache.state().slots;
                        if let Some(slot) = slots.resident(expert) {
                            slots.acquire(slot);
                            launches.push((slot, expert));
                        }
                    }
                    Event::End(place) if place < launches.len() => {
                        let (slot, _) = launches.remove(place);
                        cache.state().slots.release(slot);
                    }
                    Event::CopyNow(expert, is_done) => {
                        let mut state = cache.state();
                        let is_cold = state.slots.is_cold(expert);
                        if let Some((expert, slot)) = state.start_copy(expert.0.into()) {
                            prop_assert!(is_cold);
                            let content = if is_done { Content::Whole(expert) } else { Content::Half };
                            engine.lock().contents.insert(slot, content);
                            state.end_copy(slot, is_done);
                        }
                    }
                    Event::Wish(..) | Event::End(_) => {}
                }
                let (state, contents) = (cache.state(), &engine.lock().contents);
                for expert in (0..N_EXPERT).map(Expert) {
                    if let Some(slot) = state.slots.resident(expert) {
                        prop_assert_eq!(contents.get(&slot), Some(&Content::Whole(expert)));
                    }
                }
                for (slot, expert) in &launches {
                    prop_assert_eq!(contents.get(slot), Some(&Content::Whole(*expert)), "under a launch");
                }
            }
        }
    }

    #[test]
    fn the_oldest_wish_is_dropped_for_one_too_many_and_none_is_kept_after_the_end() {
        load_cpu();
        let device = Arc::new(HotDevice::new(Device::cpu().unwrap(), &Config::from_env()));
        let cache = Arc::new(cache(&device, u16::MAX, 1));
        let wishes = Wishes::new();
        let wish = |id: usize| Wish { cache: cache.clone(), expert: Expert(id as u16), victim: None, wished_at: None };
        (0..=MAX_WISHES).for_each(|id| wishes.push(wish(id)));
        assert_eq!(wishes.take().unwrap().expert, Expert(1));
        wishes.end();
        wishes.push(wish(7));
        assert!(wishes.take().is_none());
        wishes.wait();
        assert_eq!(Arc::strong_count(&cache), 1, "a wish that is kept would keep the pool");
    }
}
