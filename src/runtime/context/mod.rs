//! One llama.cpp context's side of the runtime: what is done for each split.

mod both_lanes;
mod dispatch;
mod hot_side;
mod splits;

use super::model::cache_handle::CacheHandle;
use super::model::layer_cache::LayerCache;
use super::registry::{Runtime, runtime};
use super::timing::Stopwatch;
use crate::cache::{Call, Loss, RegressionGuard};
use crate::ggml::{AbortCallback, Graph, Ids, InPlace, Level, OwnIds, Status, graphs_built, log, sys};
use crate::lanes::{ColdLane, TooSlow, Width};
use crate::profile::check_ids;
use crate::{Error, Result};
use both_lanes::{BothLanes, compute_whole};
use dispatch::{Computed, LaneFault, Partition};
use hot_side::{HotSide, ReadyLane};
use splits::{HotBlock, ResolvedBlock, Splits};
use std::sync::{Arc, Once, Weak};
use std::time::Duration;

/// A device that is found to be too slow in so many layers is.
const LAYERS_TO_BE_SURE: usize = 3;
/// A shorter wait for the device is that of asking it.
const MIN_WAIT_NS: f32 = 5_000.0;

/// Computes the splits of one llama.cpp context. Used by one thread at a time.
pub struct Context {
    runtime: &'static Runtime,
    splits: Splits,
    lanes: ContextLanes,
    /// Those of the batch at hand: one for each block of its split.
    ids: Vec<OwnIds>,
    /// Whether llama.cpp has decoded with it: it sets the threads then, and never while it measures.
    worked: bool,
}

/// What a context computes with.
struct ContextLanes {
    cold: ColdLane,
    hot: HotSide,
    partition: Partition,
    guard: RegressionGuard,
    /// The cache that it judges.
    judged: Weak<CacheHandle>,
    watch: Stopwatch,
    /// The splits' count of forgotten templates when the lanes were last used.
    n_forgotten: u32,
    said_cpu_fault: Once,
}

impl Context {
    /// A new context. Starts no thread and touches no file: llama.cpp makes and frees contexts to measure.
    pub fn new() -> Result<Self> {
        Self::of(runtime())
    }

    fn of(runtime: &'static Runtime) -> Result<Self> {
        let lanes = ContextLanes {
            cold: ColdLane::new()?,
            hot: HotSide::default(),
            partition: Partition::default(),
            guard: RegressionGuard::default(),
            judged: Weak::new(),
            watch: Stopwatch::new(runtime.config().test_timings.is_some()),
            n_forgotten: 0,
            said_cpu_fault: Once::new(),
        };
        runtime.context_opened();
        Ok(Self { runtime, splits: Splits::new(runtime), lanes, ids: Vec::new(), worked: false })
    }

    /// Computes one split and returns ggml's answer.
    ///
    /// A split with ids outside the layer fails and leaves everything as it was.
    pub fn compute(&mut self, split: &Graph<'_>) -> Status {
        self.compute_at(split, None)
    }

    /// The same for a split that lies at `place` on a device: its result may be left there instead of in host memory.
    pub fn compute_at(&mut self, split: &Graph<'_>, place: Option<&InPlace<'_>>) -> Status {
        self.lanes.watch.start(graphs_built());
        self.lanes.forget_templates(self.splits.n_forgotten());
        let (blocks, model) = self.splits.blocks(split);
        if let Err(error) = read_ids(&mut self.ids, split, blocks) {
            log(Level::Error, &error.to_string());
            return sys::GGML_STATUS_FAILED;
        }
        let ids = &self.ids;
        let [block] = blocks else {
            let status = self.lanes.cold.compute(split);
            if status == sys::GGML_STATUS_SUCCESS {
                for (block, ids) in blocks.iter().zip(ids) {
                    count(block, ids, std::iter::repeat(false), self.runtime);
                }
            }
            return status;
        };
        let ids = &ids[0];
        if let Some(model) = model {
            self.lanes.hot.join(model);
        }
        let status = self.lanes.compute((split, place), block, ids, self.runtime);
        if status != sys::GGML_STATUS_SUCCESS {
            return status;
        }
        let calls = count(block, ids, self.lanes.partition.served_hot(), self.runtime);
        let hits = || self.lanes.partition.served_hot().filter(|&hot| hot).count();
        self.lanes.watch.stop(graphs_built(), ids.ids().len(), hits);
        if let Some(model) = model.filter(|_| calls > 0) {
            block.layer.times.add(self.lanes.watch.lanes_ns(), !self.lanes.partition.hot.is_empty());
            self.runtime.add_to_trace(model, &block.layer, ids);
            self.runtime.consider_fill(model, block.layer.counts.layer(), calls);
        }
        status
    }

    /// Threads to compute with. llama.cpp says it before every batch.
    pub fn set_threads(&mut self, n_threads: i32) {
        self.runtime.batch_begins();
        self.use_threads(n_threads);
    }

    /// The same for a second instance of the same llama.cpp context: the batch has been counted.
    pub fn use_threads(&mut self, n_threads: i32) {
        self.worked = true;
        self.lanes.cold.set_threads(n_threads);
    }

    /// Whom to ask whether to stop.
    pub fn set_abort_callback(&mut self, callback: AbortCallback) {
        self.lanes.cold.set_abort_callback(callback);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.runtime.context_closed(self.worked, self.lanes.watch.times());
    }
}

impl ContextLanes {
    /// Computes the one block of a split; resident experts on the device if this context can.
    fn compute(
        &mut self,
        (split, place): (&Graph<'_>, Option<&InPlace<'_>>),
        block: &mut ResolvedBlock,
        ids: &OwnIds,
        runtime: &Runtime,
    ) -> Status {
        let ready = match self.limit(ids.n_tokens(), runtime) {
            Some(limit) => self.hot.ready(split, block, ids.n_tokens(), limit, runtime.config()),
            None => None,
        };
        let (Some(ready), Some(template)) = (ready, &block.template) else {
            self.partition.set_all_cold(ids);
            let status = compute_whole(&mut self.cold, split, &mut self.watch);
            // Others say nothing of what a call with the cache is compared with: of no token, say, or too large ones.
            if block.template.is_some() && (1..=runtime.config().max_hot_tokens()).contains(&ids.n_tokens()) {
                let is_undisturbed = block.layer.cache().is_none_or(|cache| cache.handle.queue.is_prepared());
                self.guard.was_cold(ids.n_tokens(), self.watch.elapsed_ns(), is_undisturbed);
            }
            return status;
        };
        let ReadyLane { mut lane, loan, cache, index } = ready;
        if self.judged.as_ptr() != Arc::as_ptr(&cache.handle) {
            // What an earlier cache has cost says nothing of this one.
            self.guard.forget_cache();
            self.judged = Arc::downgrade(&cache.handle);
        }
        let too_slow = lane.lane.too_slow(Width::of(ids.n_tokens()));
        let mut can_serve = true;
        if runtime.config().is_guarded() && !self.may_use_device(&cache, ids.n_tokens(), too_slow) {
            can_serve = !self.guard.has_given_up(ids.n_tokens());
            self.partition.set_all_cold(ids);
        } else {
            let can_copy = || lane.lane.can_copy(index, split);
            self.partition.set(ids, &cache, runtime.config().miss, can_copy);
            // Tests that have tokens wait for lanes have them wait for graphs too.
            if !runtime.config().waits_for_lanes() && !lane.lane.is_warm_for(index, &self.partition.hot) {
                can_serve = false;
                self.partition.cancel(&cache);
                self.partition.set_all_cold(ids);
                if let Some(slow) = too_slow.filter(|slow| is_known(slow, &cache)) {
                    let loss = self.guard.was_too_large(ids.n_tokens(), slow.takes.as_nanos() as f64);
                    loss.inspect(|loss| give_up(&cache, ids.n_tokens(), loss));
                }
            }
        }
        let beside_copies = cache.handle.device.has_copies_in_flight();
        let mut fetch = None;
        let mut learn = || fetch = cache.learn(ids.ids(), ids.n_tokens(), can_serve);
        let computed = if self.partition.hot.is_empty() {
            let status = compute_whole(&mut self.cold, split, &mut self.watch);
            learn();
            Computed { status, has_landed: false, fault: None }
        } else {
            let (cold, hot, watch) = (&mut self.cold, &mut lane.lane, &mut self.watch);
            let mut lanes = BothLanes { cold, hot, layer: index, template, watch, place };
            dispatch::compute(&mut lanes, split, &mut self.partition, learn)
        };
        match &computed.fault {
            Some(LaneFault::Device(why)) => cache.handle.device.turn_off(why),
            Some(LaneFault::Cpu(why)) => {
                block.hot = HotBlock::Refused(Arc::downgrade(&cache));
                let what =
                    "the CPU could not compute some experts of a layer, it computes all of such layers from now on";
                self.said_cpu_fault.call_once(|| log(Level::Error, &format!("{what}: {why}")));
            }
            None if computed.status == sys::GGML_STATUS_SUCCESS => {
                self.judge(&cache, ids.n_tokens(), beside_copies, runtime);
            }
            None => {}
        }
        self.partition.settle(&cache, computed.has_landed);
        if let Some(fetch) = fetch {
            cache.handle.queue.push(fetch);
        }
        loan.give_back(lane);
        computed.status
    }

    /// From which time on a graph on the device is of no use for so many tokens; `None`: not known yet.
    fn limit(&mut self, n_tokens: usize, runtime: &Runtime) -> Option<Duration> {
        if !runtime.config().is_guarded() {
            return Some(Duration::MAX);
        }
        self.guard.limit_ns(n_tokens).map(|ns| Duration::from_nanos(ns as u64))
    }

    /// Whether a call with so many tokens may use the device. Gives the cache up if even the smallest graph is far too slow.
    fn may_use_device(&mut self, cache: &LayerCache, n_tokens: usize, too_slow: Option<TooSlow>) -> bool {
        if let Some(slow) = too_slow.filter(|slow| slow.is_smallest && is_known(slow, cache))
            && let Some(loss) = self.guard.device_takes(n_tokens, slow.takes.as_nanos() as f64)
        {
            give_up(cache, n_tokens, &loss);
        }
        // Others are being made ready, which takes time of the device's.
        !cache.handle.queue.has_requests() && self.guard.may_use_device(n_tokens, cache.handle.n_layers)
    }

    /// Learns from what a call took, and gives the cache up if it loses.
    fn judge(&mut self, cache: &LayerCache, n_tokens: usize, beside_copies: bool, runtime: &Runtime) {
        if self.partition.hot.is_empty() {
            self.guard.was_cold(n_tokens, self.watch.elapsed_ns(), cache.handle.queue.is_prepared());
            return;
        }
        if n_tokens == 1 {
            let (cold_ns, device_ns, wait_ns) = self.watch.lanes_ns();
            cache.handle.device.costs().learn(&Call {
                n_cold: self.partition.cold.len(),
                cold_ns,
                n_copied: self.partition.copies.len(),
                device_ns,
                waited: wait_ns > MIN_WAIT_NS,
                beside_copies,
            });
        }
        let is_filled = cache.handle.queue.is_filled();
        let loss = self.guard.was_partitioned(n_tokens, self.watch.elapsed_ns(), is_filled);
        if let Some(loss) = loss.filter(|_| runtime.config().is_guarded()) {
            give_up(cache, n_tokens, &loss);
        }
    }

    /// Drops what was made for templates that have been forgotten.
    fn forget_templates(&mut self, n_forgotten: u32) {
        if self.n_forgotten != n_forgotten {
            self.n_forgotten = n_forgotten;
            self.cold.forget_templates();
            self.hot.forget_templates();
        }
    }
}

/// Whether that has been found in so many layers that it was no moment's.
fn is_known(slow: &TooSlow, cache: &LayerCache) -> bool {
    slow.n_layers >= LAYERS_TO_BE_SURE.min(cache.handle.n_layers)
}

/// Gives the cache up, or, if it is used with other sizes of batches, says that it is not used with this one.
fn give_up(cache: &LayerCache, n_tokens: usize, loss: &Loss) {
    let [ours, cold] = [loss.ours_ns, loss.cold_ns].map(|ns| ns / 1e3);
    let times = format!("a layer takes {ours:.0} µs with it and {cold:.0} µs without");
    if loss.is_used_elsewhere {
        cache
            .handle
            .log(Level::Warn, &format!("hot cache not used for batches of about {n_tokens} tokens any more: {times}"));
    } else {
        cache.handle.give_up(&times);
    }
}

fn ids_of<'a>(split: &Graph<'a>, block: &ResolvedBlock) -> Result<Ids<'a>> {
    let layer = block.layer.counts.layer();
    block.block.ids(split).and_then(|ids| ids.ids()).ok_or(Error::IdsTensor { layer })
}

/// Copies the ids of every block, then checks the copies: nobody can change them any more.
fn read_ids(copies: &mut Vec<OwnIds>, split: &Graph<'_>, blocks: &[ResolvedBlock]) -> Result<()> {
    if copies.len() < blocks.len() {
        copies.resize_with(blocks.len(), OwnIds::default);
    }
    for (block, copy) in blocks.iter().zip(copies) {
        copy.read(&ids_of(split, block)?);
        check_ids(block.layer.counts.layer(), block.n_expert, copy.iter())?;
    }
    Ok(())
}

/// Counts the ids of one block and returns the layer's calls so far, 0 if these are not to be counted; `is_hot` tells for each id
/// whether it was resident.
fn count(block: &ResolvedBlock, ids: &OwnIds, is_hot: impl Iterator<Item = bool>, runtime: &Runtime) -> u64 {
    if !block.is_counted || ids.n_tokens() == 0 || ids.n_tokens() >= runtime.config().plain_min_batch as usize {
        return 0;
    }
    block.layer.counts.add(ids.n_tokens(), ids.ids().iter().copied().zip(is_hot))
}

#[cfg(test)]
mod tests;
