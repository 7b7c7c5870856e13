//! The fetcher with an engine whose copies land when, and as, a test says.

use super::*;
use crate::cache::{Admission, SlotState};
use crate::ggml::sys;
use crate::ggml::testing::Builder;
use crate::runtime::model::layer::Layer;
use crate::runtime::model::layer_cache::testing;
use crate::units::Expert;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Mutex;

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
    in_flight: Vec<(u64, Slot)>,
    landed: VecDeque<(u64, Outcome)>,
    contents: HashMap<Slot, Content>,
    /// What it answers instead of starting a copy.
    refusal: Option<Started>,
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
        if let Some(answer) = inner.refusal {
            return answer;
        }
        inner.in_flight.push((copy.id, copy.slot));
        inner.contents.insert(copy.slot, Content::Half);
        Started::Yes
    }

    fn in_flight(&self) -> usize {
        self.lock().in_flight.len()
    }

    fn wait(&mut self, _: Duration) -> Option<(u64, Outcome)> {
        self.lock().landed.pop_front()
    }

    fn paused(&mut self, _: Duration) {}
}

fn fetch(admit: Expert, evict: Option<Expert>) -> Fetch {
    Fetch { layer: 0, admission: Admission { admit, evict }, decided_at: None }
}

/// A fetcher of one layer, its engine and the layer's cache.
fn fetcher() -> (Shared, Fetcher, Arc<LayerCache>) {
    let handle = testing::handle();
    let cache = Arc::new(testing::cache(&handle, N_EXPERT, N_SLOTS));
    let builder = Builder::new();
    let weights = builder.leaf(sys::GGML_TYPE_F32, [8, 4, N_EXPERT.into()]);
    let layer = Arc::new(Layer::new(0, weights, 2));
    let engine = Shared::default();
    let cached = Cached { layer, cache: cache.clone() };
    let fetcher = Fetcher::new(Box::new(engine.clone()), handle, vec![Some(cached)]);
    (engine, fetcher, cache)
}

impl Shared {
    /// Has the oldest copy in flight end so, at the next look.
    fn land(&self, outcome: Outcome) {
        let mut inner = self.lock();
        let (id, _) = inner.in_flight.remove(0);
        inner.landed.push_back((id, outcome));
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Fetch(Expert, Option<Expert>),
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
        4 => (expert(), prop::option::of(expert())).prop_map(|(expert, evict)| Event::Fetch(expert, evict)),
        4 => (0..8usize, outcome).prop_map(|(place, outcome)| Event::Land(place, outcome)),
        4 => expert().prop_map(Event::Launch),
        3 => (0..8usize).prop_map(Event::End),
        2 => (expert(), any::<bool>()).prop_map(|(expert, is_done)| Event::CopyNow(expert, is_done)),
    ]
}

proptest! {
    #[test]
    fn nothing_half_copied_is_ever_served_whatever_lands_when(events in prop::collection::vec(event(), 0..150)) {
        let (engine, mut fetcher, cache) = fetcher();
        let mut launches: Vec<(Slot, Expert)> = Vec::new();
        for event in events {
            match event {
                Event::Fetch(expert, evict) if !fetcher.cache.is_over() => {
                    prop_assert!(fetcher.start(fetch(expert, evict)) != Attempt::NoStaging);
                }
                Event::Land(place, outcome) => {
                    let mut inner = engine.lock();
                    if place < inner.in_flight.len() {
                        let (id, slot) = inner.in_flight.remove(place);
                        let state = cache.state().slots.state(slot);
                        if let (Outcome::Whole, Some(SlotState::Filling(expert))) = (outcome, state) {
                            inner.contents.insert(slot, Content::Whole(expert));
                        }
                        inner.landed.push_back((id, outcome));
                        drop(inner);
                        fetcher.settle(Duration::ZERO);
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
                Event::Fetch(..) | Event::End(_) => {}
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
fn an_expert_serves_from_the_moment_its_copy_is_whole_and_not_before() {
    let (engine, mut fetcher, cache) = fetcher();
    assert_eq!(fetcher.start(fetch(Expert(2), None)), Attempt::Started);
    assert_eq!(cache.state().slots.resident(Expert(2)), None);
    engine.land(Outcome::Whole);
    fetcher.settle(Duration::ZERO);
    assert!(cache.state().slots.resident(Expert(2)).is_some());
}

#[test]
fn a_fetch_that_finds_no_staging_leaves_its_slot_free_and_is_tried_again() {
    let (engine, mut fetcher, cache) = fetcher();
    engine.lock().refusal = Some(Started::Full);
    assert_eq!(fetcher.start(fetch(Expert(2), None)), Attempt::NoStaging);
    assert_eq!(cache.state().slots.n_free(), usize::from(N_SLOTS));
    engine.lock().refusal = None;
    assert_eq!(fetcher.start(fetch(Expert(2), None)), Attempt::Started);
}

#[test]
fn what_cannot_be_read_any_more_costs_nothing() {
    let (engine, mut fetcher, cache) = fetcher();
    engine.lock().refusal = Some(Started::Unreadable);
    assert_eq!(fetcher.start(fetch(Expert(2), None)), Attempt::Dropped);
    assert_eq!((cache.state().slots.n_free(), fetcher.cache.is_over()), (usize::from(N_SLOTS), false));
}

#[test]
fn a_device_that_refuses_or_loses_a_copy_is_turned_off_and_the_slot_is_not_used_again() {
    let cases: [(Option<Started>, Option<Outcome>); 3] =
        [(Some(Started::Refused), None), (None, Some(Outcome::Failed)), (None, Some(Outcome::Lost))];
    for (refusal, outcome) in cases {
        let (engine, mut fetcher, cache) = fetcher();
        engine.lock().refusal = refusal;
        fetcher.start(fetch(Expert(2), None));
        if let Some(outcome) = outcome {
            engine.land(outcome);
            fetcher.settle(Duration::ZERO);
        }
        let state = cache.state();
        let retired = (0..N_SLOTS).filter(|&slot| state.slots.state(Slot(slot)) == Some(SlotState::Retired)).count();
        assert_eq!((retired, fetcher.cache.device.is_off()), (1, true), "{refusal:?} {outcome:?}");
    }
}

#[test]
fn a_fetch_of_a_layer_without_slots_is_dropped() {
    let (_, mut fetcher, _) = fetcher();
    let other = Fetch { layer: 7, ..fetch(Expert(0), None) };
    assert_eq!(fetcher.start(other), Attempt::Dropped);
}

#[test]
fn a_layer_may_ask_again_once_its_fetch_has_been_started() {
    let (engine, mut fetcher, cache) = fetcher();
    let fetch = cache.learn(&[3], 1, true).unwrap();
    assert_eq!(cache.learn(&[4], 1, true), None, "one at a time");
    fetcher.cache.queue.push(fetch);
    std::thread::scope(|scope| {
        let (handle, cache) = (fetcher.cache.clone(), cache.clone());
        scope.spawn(move || fetcher.serve(&mut || {}));
        // The next fetch can be had once the fetcher has started the first.
        while cache.learn(&[4], 1, true).is_none() {
            std::thread::yield_now();
        }
        engine.land(Outcome::Whole);
        handle.end();
    });
}

#[test]
fn at_the_end_the_layers_cache_is_taken_away() {
    let (_, mut fetcher, cache) = fetcher();
    let layer = fetcher.layers[0].as_ref().unwrap().layer.clone();
    layer.give_cache(&cache);
    assert!(layer.cache().is_some());
    fetcher.cache.end();
    fetcher.serve(&mut || {});
    drop(fetcher);
    assert!(layer.cache().is_none());
    assert_eq!(Arc::strong_count(&cache), 1, "nobody else keeps the pool");
}

#[test]
fn a_cache_that_is_over_is_given_to_no_layer() {
    let (_, fetcher, cache) = fetcher();
    let layer = fetcher.layers[0].as_ref().unwrap().layer.clone();
    fetcher.cache.end();
    layer.give_cache(&cache);
    assert!(layer.cache().is_none());
}
