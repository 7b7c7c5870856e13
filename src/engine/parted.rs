//! Computing one layer's block in two lanes at once: resident experts on the device, the others on the CPU.

use super::device::{Claim, HotDevice};
use super::layer::LayerCache;
use super::splits::Seen;
use crate::cache::{Bytes, Expert};
use crate::config::Config;
use crate::ggml::{Graph, Ids, Level, Status, log, sys};
use crate::lanes::{ColdLane, HotLane, Requests, try_out};
use crate::moe::Ffn;
use crate::perf::Stopwatch;
use crate::{Error, Result};
use std::sync::Arc;

/// Both lanes of one context and the lists that they work through.
pub struct Lanes {
    pub cold: ColdLane,
    hot: Option<HotSide>,
    /// Why this context has no hot lane although there is a cache.
    refused: bool,
    hot_requests: Requests,
    cold_requests: Requests,
    /// For each id of the batch, in order: whether it ran on the device.
    is_hot: Vec<bool>,
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
        })
    }

    /// For each id of the last batch: whether it ran on the device.
    pub fn served_hot(&self) -> impl Iterator<Item = bool> {
        self.is_hot.iter().copied()
    }

    /// Computes the block; resident experts on the device if this context can.
    pub fn compute(
        &mut self,
        split: &Graph<'_>,
        seen: &mut Seen,
        ids: &Ids<'_>,
        config: &Config,
        watch: &mut Stopwatch,
    ) -> Status {
        self.is_hot.clear();
        let Some(ffn) = seen.ffn.clone() else { return self.compute_cold(split, ids, watch) };
        let Some(cache) = self.usable_cache(split, seen, &ffn, ids, config) else {
            return self.compute_cold(split, ids, watch);
        };
        self.part(&cache, ids);
        if self.hot_requests.is_empty() {
            return self.compute_cold(split, ids, watch);
        }
        match self.compute_parted(split, seen, &ffn, watch) {
            Ok(Ok(status)) => status,
            // Nothing of the split has been written: the cold lane computes all of it.
            Ok(Err(status)) => {
                cache.device.turn_off(&format!("it refused to compute (ggml status {status})"));
                self.compute_cold(split, ids, watch)
            }
            Err(error) => {
                cache.device.turn_off(&error.to_string());
                self.compute_cold(split, ids, watch)
            }
        }
    }

    /// The whole split on the CPU, where it lies.
    fn compute_cold(&mut self, split: &Graph<'_>, ids: &Ids<'_>, watch: &mut Stopwatch) -> Status {
        self.is_hot.clear();
        self.is_hot.resize(ids.n_used() * ids.n_tokens(), false);
        watch.launched();
        let status = self.cold.compute(split);
        watch.computed();
        status
    }

    /// Tells resident experts from others. The lock is held for these few lookups only.
    fn part(&mut self, cache: &LayerCache, ids: &Ids<'_>) {
        let n = ids.n_used() * ids.n_tokens();
        self.hot_requests.reset(n);
        self.cold_requests.reset(n);
        let slots = cache.slots();
        for (used, token, id) in ids.iter() {
            let slot = u16::try_from(id).ok().and_then(|id| slots.resident(Expert(id)));
            match slot {
                Some(slot) => self.hot_requests.push(used, token, slot.0.into()),
                None => self.cold_requests.push(used, token, id),
            }
            self.is_hot.push(slot.is_some());
        }
    }

    /// Both lanes at once, one wait, then the rows. The inner error is the device's refusal.
    fn compute_parted(
        &mut self,
        split: &Graph<'_>,
        seen: &Seen,
        ffn: &Arc<Ffn>,
        watch: &mut Stopwatch,
    ) -> Result<Result<Status, Status>> {
        let (Some((_, layer)), Some(HotSide { lane, .. })) = (&seen.hot, &mut self.hot) else {
            return Err(Error::Ggml("a hot lane"));
        };
        let (cold, requests) = (&mut self.cold, &self.cold_requests);
        let meanwhile = || {
            watch.launched();
            let status = if requests.is_empty() {
                Ok(sys::GGML_STATUS_SUCCESS)
            } else {
                cold.compute_requests(split, ffn, requests)
            };
            watch.computed();
            status
        };
        let status = match lane.compute_while(*layer, split, &self.hot_requests, meanwhile)? {
            Ok(status) => status?,
            Err(refusal) => return Ok(Err(refusal)),
        };
        if status != sys::GGML_STATUS_SUCCESS {
            return Ok(Ok(status));
        }
        // Every reader of the split is done: only now may its memory be written.
        lane.write_rows(*layer, split, &self.hot_requests)?;
        if !self.cold_requests.is_empty() {
            self.cold.write_rows(split, ffn, &self.cold_requests)?;
        }
        Ok(Ok(status))
    }

    /// The layer's cache, with this context's hot lane ready for it.
    fn usable_cache(
        &mut self,
        split: &Graph<'_>,
        seen: &mut Seen,
        ffn: &Arc<Ffn>,
        ids: &Ids<'_>,
        config: &Config,
    ) -> Option<Arc<LayerCache>> {
        if self.hot.as_ref().is_some_and(|hot| hot.device.is_off()) {
            self.hot = None;
        }
        let cache = seen.layer.cache().filter(|cache| !cache.device.is_off());
        let Some(cache) = cache else {
            seen.hot = None;
            return None;
        };
        if self.refused || ids.n_tokens() > config.max_hot_tokens() {
            return None;
        }
        let is_ready = |hot: &(Arc<LayerCache>, _)| Arc::ptr_eq(&hot.0, &cache);
        if self.hot.is_none() || !seen.hot.as_ref().is_some_and(is_ready) {
            self.prepare(split, seen, ffn, &cache, config)?;
        }
        Some(cache)
    }

    /// Makes the hot lane ready for a layer it has not computed yet. `None`: this context or recipe has none.
    fn prepare(
        &mut self,
        split: &Graph<'_>,
        seen: &mut Seen,
        ffn: &Arc<Ffn>,
        cache: &Arc<LayerCache>,
        config: &Config,
    ) -> Option<()> {
        let tensors = cache.tensors_for(split, ffn)?;
        let trial = try_out(cache.device.device(), ffn, config.max_hot_rows(ffn.n_used)).ok()?;
        if trial.unsupported.is_some() || !self.make_room(&cache.device, trial.scratch_bytes, config) {
            return None;
        }
        let hot = self.hot.as_mut()?;
        seen.hot = Some((cache.clone(), hot.lane.add_layer(&cache.pool, ffn, &tensors)));
        Some(())
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
