//! A context's hot lane: made ready for each layer's cache, lent to a call, and given back to the device when the cache ends.

use super::splits::{HotBlock, ResolvedBlock};
use crate::device::DeviceMemory;
use crate::ggml::{Graph, Level, log};
use crate::lanes::{HotIndex, HotLane, try_out};
use crate::moe::FfnTemplate;
use crate::options::Config;
use crate::runtime::model::cache_handle::{CacheHandle, IdleMemory};
use crate::runtime::model::lane_cell::{ContextLane, LaneCell};
use crate::runtime::model::layer_cache::LayerCache;
use crate::units::Bytes;
use std::sync::{Arc, Weak};

/// A context's hot lane, if it has one.
#[derive(Default)]
pub struct HotSide {
    cell: Arc<LaneCell>,
    /// A cache for which the device had no room for this context's scratch memory.
    refused: Option<Weak<CacheHandle>>,
}

/// A hot lane that is ready for a call.
pub struct ReadyLane {
    /// The lane, lent for the call: [`HotSide::give_back`] takes it back.
    pub lane: Box<ContextLane>,
    /// The layer's cache.
    pub cache: Arc<LayerCache>,
    /// The layer in the lane.
    pub index: HotIndex,
}

impl HotSide {
    /// The lane, ready for the cache of this block's layer. `None`: the block is computed on the CPU.
    pub fn ready(
        &mut self,
        split: &Graph<'_>,
        block: &mut ResolvedBlock,
        n_tokens: usize,
        config: &Config,
    ) -> Option<ReadyLane> {
        let template = block.template.as_ref()?;
        let Some(cache) = block.layer.cache().filter(|cache| !cache.handle.is_over()) else {
            if let HotBlock::Ready(..) = std::mem::take(&mut block.hot) {
                self.drop_lane();
            }
            return None;
        };
        if n_tokens > config.max_hot_tokens() || is_of(self.refused.as_ref(), &cache.handle) {
            return None;
        }
        let lane = self.cell.take().filter(|lane| Arc::ptr_eq(&lane.cache, &cache.handle));
        match (&block.hot, lane) {
            (HotBlock::Ready(known, index), Some(lane)) if is_of(Some(known), &cache) && lane.lane.knows(*index) => {
                Some(ReadyLane { lane, index: *index, cache })
            }
            (HotBlock::Refused(known), lane) if is_of(Some(known), &cache) => {
                lane.into_iter().for_each(|lane| self.cell.put(lane));
                None
            }
            (_, lane) => {
                let (lane, index) = self.prepare(lane, split, template, &cache, config);
                let known = Arc::downgrade(&cache);
                match (lane, index) {
                    (Some(lane), Some(index)) => {
                        block.hot = HotBlock::Ready(known, index);
                        Some(ReadyLane { lane, cache, index })
                    }
                    (lane, _) => {
                        lane.into_iter().for_each(|lane| self.cell.put(lane));
                        block.hot = HotBlock::Refused(known);
                        None
                    }
                }
            }
        }
    }

    /// Takes the lane back after a call.
    pub fn give_back(&self, lane: Box<ContextLane>) {
        self.cell.put(lane);
    }

    /// Gives the lane's memory back to the device.
    pub fn drop_lane(&self) {
        self.cell.release();
    }

    /// Makes the lane ready for a layer that it has not computed yet. The index is `None` if it cannot be.
    fn prepare(
        &mut self,
        lane: Option<Box<ContextLane>>,
        split: &Graph<'_>,
        template: &Arc<FfnTemplate>,
        cache: &Arc<LayerCache>,
        config: &Config,
    ) -> (Option<Box<ContextLane>>, Option<HotIndex>) {
        let Some(tensors) = cache.tensors_for(split, template) else {
            // An adapter that has come since: what belongs in the cache is more than it was made for.
            cache.handle.end_for_refill();
            return (lane, None);
        };
        let device = cache.handle.device.device();
        let trial = match try_out(device, template, config.max_hot_rows(template.n_used)) {
            Ok(trial) if trial.unsupported.is_none() => trial,
            _ => return (lane, None),
        };
        let Some(mut lane) = lane.or_else(|| self.new_lane(&cache.handle, config)) else { return (None, None) };
        if !grow(&mut lane, trial.scratch_bytes, cache.handle.device.memory()) {
            self.refused = Some(Arc::downgrade(&cache.handle));
            let name = device.name();
            log(Level::Warn, &format!("no room on {name} for a context's scratch memory: it computes on the CPU"));
            return (None, None);
        }
        let index = lane.lane.add_layer(&cache.pool, template, &tensors);
        (Some(lane), Some(index))
    }

    fn new_lane(&self, cache: &Arc<CacheHandle>, config: &Config) -> Option<Box<ContextLane>> {
        let device = &cache.device;
        match HotLane::new(device.device(), !config.no_host) {
            Ok(lane) => {
                let cell: Arc<dyn IdleMemory> = self.cell.clone();
                cache.note_idle_memory(Arc::downgrade(&cell));
                Some(Box::new(ContextLane::new(lane, cache.clone())))
            }
            Err(error) => {
                device.turn_off(&error.to_string());
                None
            }
        }
    }
}

/// Gives the lane this much scratch memory at least. `false`: the device has no room.
fn grow(lane: &mut ContextLane, scratch_bytes: usize, memory: &Arc<DeviceMemory>) -> bool {
    let ContextLane { lane, scratch, .. } = lane;
    if lane.scratch_bytes() >= scratch_bytes {
        return true;
    }
    // The old memory goes before the new one comes.
    lane.drop_scratch();
    *scratch = None;
    let made = memory.allocate(Bytes(scratch_bytes as u64), || lane.grow(scratch_bytes).then_some(()));
    *scratch = made.map(|((), reservation)| reservation);
    scratch.is_some()
}

fn is_of<T>(known: Option<&Weak<T>>, owner: &Arc<T>) -> bool {
    known.is_some_and(|known| known.as_ptr() == Arc::as_ptr(owner))
}
