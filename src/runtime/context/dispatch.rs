//! Computing one layer's block in two lanes at once: resident experts on the device, the others on the CPU.

use super::splits::{Known, Seen};
use super::timing::Stopwatch;
use crate::cache::{Call, RegressionGuard};
use crate::ggml::{Graph, Level, OwnIds, Status, log, sys};
use crate::lanes::{ColdLane, Form, HotIndex, HotLane, Requests, try_out};
use crate::moe::FfnTemplate;
use crate::options::Config;
use crate::runtime::background::fetch::Wish;
use crate::runtime::hot_device::{Claim, HotDevice};
use crate::runtime::model::layer::{LayerCache, LayerState};
use crate::units::{Bytes, Expert, MissRule, Slot};
use crate::{Error, Result};
use std::sync::{Arc, Weak};

/// Both lanes of one context and the lists that they work through.
pub struct Lanes {
    pub cold: ColdLane,
    hot: Option<HotSide>,
    /// Why this context has no hot lane although there is a cache.
    refused: bool,
    hot_requests: Requests,
    cold_requests: Requests,
    /// For each id of the batch, in order: whether it was resident.
    is_hot: Vec<bool>,
    /// Slots that this call uses, each as often as it does.
    acquired: Vec<Slot>,
    /// What the call made its layer wish for, and the layer's calls until then.
    wish: Option<(Expert, Option<Expert>, u32)>,
    /// The splits' count of forgotten recipes when these lanes were last used.
    n_forgotten: u32,
    /// Missed experts that this call brings to the device first.
    copies: Vec<(Expert, Slot)>,
    guard: RegressionGuard,
}

/// A context's hot lane and what it takes of the device.
struct HotSide {
    lane: HotLane,
    device: Arc<HotDevice>,
    _instance: Claim,
    scratch: Option<Claim>,
}

impl Lanes {
    /// The cold lane alone; the hot one is made when there is a cache.
    pub fn new() -> Result<Self> {
        Ok(Self {
            cold: ColdLane::new()?,
            hot: None,
            refused: false,
            hot_requests: Requests::default(),
            cold_requests: Requests::default(),
            is_hot: Vec::new(),
            acquired: Vec::new(),
            wish: None,
            n_forgotten: 0,
            copies: Vec::new(),
            guard: RegressionGuard::default(),
        })
    }

    /// For each id of the last batch: whether it was resident.
    pub fn served_hot(&self) -> impl Iterator<Item = bool> {
        self.is_hot.iter().copied()
    }

    /// Drops what was made for recipes that have been forgotten.
    pub fn forget_recipes(&mut self, n_forgotten: u32) {
        if self.n_forgotten != n_forgotten {
            self.n_forgotten = n_forgotten;
            self.cold.forget_templates();
            self.hot = None;
        }
    }

    /// Computes the block; resident experts on the device if this context can.
    pub fn compute(
        &mut self,
        split: &Graph<'_>,
        seen: &mut Seen,
        ids: &OwnIds,
        config: &Config,
        watch: &mut Stopwatch,
    ) -> Status {
        let ready = seen.ffn.clone().and_then(|ffn| Some((self.usable_cache(split, seen, &ffn, ids, config)?, ffn)));
        let Some(((cache, layer), ffn)) = ready else {
            let status = self.compute_cold(split, ids, watch);
            if ids.n_tokens() == 1 {
                self.guard.was_cold(watch.elapsed_ns());
            }
            return status;
        };
        self.part(split, layer, &cache, ids, config);
        let mut landed = false;
        let status = if self.hot_requests.is_empty() {
            let status = self.compute_cold(split, ids, watch);
            self.wish = cache.state().learn(ids.ids(), ids.n_tokens(), &cache.model.device);
            status
        } else {
            match self.compute_parted(split, layer, &ffn, &cache, ids, watch) {
                Ok(Ok(status)) => {
                    landed = true;
                    status
                }
                // Nothing of the split has been written: the cold lane computes all of it.
                Ok(Err(status)) => {
                    cache.model.device.turn_off(&format!("it refused to compute (ggml status {status})"));
                    self.compute_cold(split, ids, watch)
                }
                Err(error) => {
                    cache.model.device.turn_off(&error.to_string());
                    self.compute_cold(split, ids, watch)
                }
            }
        };
        if ids.n_tokens() == 1 && status == sys::GGML_STATUS_SUCCESS {
            self.judge(&cache, config, watch);
        }
        self.settle(&cache, landed);
        status
    }

    /// The whole split on the CPU, where it lies.
    fn compute_cold(&mut self, split: &Graph<'_>, ids: &OwnIds, watch: &mut Stopwatch) -> Status {
        self.is_hot.clear();
        self.is_hot.resize(ids.n_used() * ids.n_tokens(), false);
        watch.launched();
        let status = self.cold.compute(split);
        watch.computed();
        watch.joined();
        status
    }

    /// Tells resident experts from others and holds the slots of the former. The lock is held for these look-ups only.
    fn part(&mut self, split: &Graph<'_>, layer: HotIndex, cache: &LayerCache, ids: &OwnIds, config: &Config) {
        let n = ids.n_used() * ids.n_tokens();
        self.hot_requests.reset(n);
        self.cold_requests.reset(n);
        self.is_hot.clear();
        self.acquired.clear();
        self.copies.clear();
        self.wish = None;
        let is_single = ids.n_tokens() == 1;
        if is_single && self.guard.wants_reference() {
            ids.iter().for_each(|(used, token, id)| self.cold_requests.push(used, token, id));
            return;
        }
        let mut state = cache.state();
        for (used, token, id) in ids.iter() {
            let slot = u16::try_from(id).ok().and_then(|id| state.slots.resident(Expert(id)));
            match slot {
                Some(slot) => {
                    self.hot_requests.push(used, token, slot.0.into());
                    state.slots.acquire(slot);
                    self.acquired.push(slot);
                }
                None => self.cold_requests.push(used, token, id),
            }
            self.is_hot.push(slot.is_some());
        }
        let rule = config.miss;
        // A fixed set has no room for those that come.
        let is_fixed = state.learner.is_none();
        if is_fixed || !is_single || rule == MissRule::Cpu || self.cold_requests.is_empty() {
            return;
        }
        // All requests of one expert go to one lane.
        let is_distinct = matches!(self.cold_requests.form(), Form::OneToken(_));
        if is_distinct && self.hot.as_ref().is_some_and(|hot| hot.lane.can_copy(layer, split)) {
            let n_slots = state.slots.n_slots().saturating_sub(self.acquired.len());
            let n_copies = cache.model.device.costs().choose(rule, self.cold_requests.len(), n_slots);
            self.move_to_device(&mut state, n_copies);
        }
    }

    /// Moves up to `n` missed requests to the hot lane, which brings their experts to free slots first.
    fn move_to_device(&mut self, state: &mut LayerState, n: usize) {
        for _ in 0..n {
            let Some((used, token, id)) = self.cold_requests.pop() else { return };
            let Some((expert, slot)) = state.start_copy(id) else {
                self.cold_requests.push(used, token, id);
                return;
            };
            self.hot_requests.push(used, token, slot.0.into());
            self.copies.push((expert, slot));
        }
    }

    /// Both lanes at once, one wait, then the rows. The inner error is the device's refusal.
    fn compute_parted(
        &mut self,
        split: &Graph<'_>,
        layer: HotIndex,
        ffn: &Arc<FfnTemplate>,
        cache: &LayerCache,
        ids: &OwnIds,
        watch: &mut Stopwatch,
    ) -> Result<Result<Status, Status>> {
        let Some(HotSide { lane, .. }) = &mut self.hot else { return Err(Error::Ggml("a hot lane")) };
        let (cold, requests, wish) = (&mut self.cold, &self.cold_requests, &mut self.wish);
        let meanwhile = || {
            watch.launched();
            let status = if requests.is_empty() {
                Ok(sys::GGML_STATUS_SUCCESS)
            } else {
                cold.compute_requests(split, ffn, requests)
            };
            watch.computed();
            // The device may still be at work: learning costs nothing then.
            *wish = cache.state().learn(ids.ids(), ids.n_tokens(), &cache.model.device);
            status
        };
        let status = match lane.compute_while(layer, split, &self.hot_requests, &self.copies, meanwhile)? {
            Ok(status) => status?,
            Err(refusal) => return Ok(Err(refusal)),
        };
        watch.joined();
        if status != sys::GGML_STATUS_SUCCESS {
            return Ok(Ok(status));
        }
        // Every reader of the split is done: only now may its memory be written.
        lane.write_rows(layer, split, &self.hot_requests)?;
        if !self.cold_requests.is_empty() {
            self.cold.write_rows(split, ffn, &self.cold_requests)?;
        }
        Ok(Ok(status))
    }

    /// Learns from what a single-token call took, and gives the cache up if it has been losing for long.
    fn judge(&mut self, cache: &LayerCache, config: &Config, watch: &Stopwatch) {
        if self.hot_requests.is_empty() {
            self.guard.was_cold(watch.elapsed_ns());
            return;
        }
        let (cold_ns, device_ns, wait_ns) = watch.lanes_ns();
        cache.model.device.costs().learn(&Call {
            n_cold: self.cold_requests.len(),
            cold_ns,
            n_copied: self.copies.len(),
            device_ns,
            waited: wait_ns > WAITED_NS,
        });
        let is_judged = config.test_slots.is_none();
        if let Some(loss) = self.guard.was_parted(watch.elapsed_ns()).filter(|_| is_judged) {
            let [ours, cold] = [loss.ours_ns, loss.cold_ns].map(|ns| ns / 1e3);
            cache.model.give_up(&format!("a layer takes {ours:.0} µs with it and {cold:.0} µs without"));
        }
    }

    /// Lets go of the slots, publishes what was copied, and passes the wish on. The lock is held for the former only.
    fn settle(&mut self, cache: &Arc<LayerCache>, landed: bool) {
        {
            let mut state = cache.state();
            self.acquired.iter().for_each(|&slot| state.slots.release(slot));
            self.copies.iter().for_each(|&(_, slot)| state.end_copy(slot, landed));
        }
        if landed {
            cache.model.add_copied(self.copies.len() * cache.writer.expert_bytes());
        }
        let Some((expert, victim, wished_at)) = self.wish.take() else { return };
        if !cache.model.is_over() {
            cache.model.wishes.push(Wish { cache: cache.clone(), expert, victim, wished_at: Some(wished_at) });
        }
    }

    /// The layer's cache, with this context's hot lane ready for it.
    fn usable_cache(
        &mut self,
        split: &Graph<'_>,
        seen: &mut Seen,
        ffn: &Arc<FfnTemplate>,
        ids: &OwnIds,
        config: &Config,
    ) -> Option<(Arc<LayerCache>, HotIndex)> {
        if self.hot.as_ref().is_some_and(|hot| hot.device.is_off()) {
            self.hot = None;
        }
        let Some(cache) = seen.layer.cache().filter(|cache| !cache.model.is_over()) else {
            if let Known::Ready(..) = std::mem::take(&mut seen.hot) {
                // The cache has been given up, or is about to be filled anew: its memory goes back to the device.
                self.hot = None;
            }
            return None;
        };
        if self.refused || ids.n_tokens() > config.max_hot_tokens() {
            return None;
        }
        let is_of = |known: &Weak<LayerCache>| known.as_ptr() == Arc::as_ptr(&cache);
        match &seen.hot {
            Known::Ready(known, layer) if is_of(known) && self.is_ready(*layer) => return Some((cache, *layer)),
            Known::Refused(known) if is_of(known) => return None,
            _ => {}
        }
        let known = Arc::downgrade(&cache);
        let Some(layer) = self.prepare(split, ffn, &cache, config) else {
            seen.hot = Known::Refused(known);
            return None;
        };
        seen.hot = Known::Ready(known, layer);
        Some((cache, layer))
    }

    fn is_ready(&self, layer: HotIndex) -> bool {
        self.hot.as_ref().is_some_and(|hot| hot.lane.knows(layer))
    }

    /// Makes the hot lane ready for a layer it has not computed yet. `None`: this context or recipe has none.
    fn prepare(
        &mut self,
        split: &Graph<'_>,
        ffn: &Arc<FfnTemplate>,
        cache: &Arc<LayerCache>,
        config: &Config,
    ) -> Option<HotIndex> {
        let Some(tensors) = cache.tensors_for(split, ffn) else {
            // An adapter that has come since: what belongs in the cache is more than it was made for.
            cache.model.refill();
            return None;
        };
        let trial = try_out(cache.model.device.device(), ffn, config.max_hot_rows(ffn.n_used)).ok()?;
        if trial.unsupported.is_some() || !self.make_room(&cache.model.device, trial.scratch_bytes, config) {
            return None;
        }
        Some(self.hot.as_mut()?.lane.add_layer(&cache.pool, ffn, &tensors))
    }

    /// A hot lane with this much scratch memory. If there is no room this context goes on without one, and says so.
    fn make_room(&mut self, device: &Arc<HotDevice>, scratch_bytes: usize, config: &Config) -> bool {
        if self.hot.is_none() {
            let (lane, instance) = device.measure(|| HotLane::new(device.device(), !config.no_host));
            match lane {
                Ok(lane) => {
                    self.hot = Some(HotSide { lane, device: device.clone(), _instance: instance, scratch: None });
                }
                Err(error) => {
                    device.turn_off(&error.to_string());
                    return false;
                }
            }
        }
        let Some(HotSide { lane, scratch, .. }) = &mut self.hot else { return false };
        if lane.scratch_bytes() >= scratch_bytes {
            return true;
        }
        // The old memory goes before the new one comes.
        lane.drop_scratch();
        *scratch = None;
        match device.allocate(Bytes(scratch_bytes as u64), || lane.grow(scratch_bytes).then_some(())) {
            Some(((), claim)) => *scratch = Some(claim),
            None => {
                self.refused = true;
                self.hot = None;
                let name = device.device().name();
                log(Level::Warn, &format!("no room on {name} for a context's scratch memory: it computes on the CPU"));
            }
        }
        !self.refused
    }
}

/// A shorter wait for the device is that of asking it.
const WAITED_NS: f32 = 5_000.0;
