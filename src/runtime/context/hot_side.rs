//! A context's hot lane: asked for, layer by layer, from the cache's thread, and lent to a call once it is ready.

use super::splits::{AskedLanes, HotBlock, ResolvedBlock};
use crate::ggml::Graph;
use crate::lanes::{HotIndex, Width};
use crate::moe::FfnTemplate;
use crate::options::Config;
use crate::runtime::model::Model;
use crate::runtime::model::cache_handle::IdleMemory;
use crate::runtime::model::lane_cell::{ContextLane, LaneCell};
use crate::runtime::model::lane_request::{Answer, LaneRequest};
use crate::runtime::model::layer_cache::LayerCache;
use std::sync::{Arc, Weak};

/// A context's hot lane, if it has one.
#[derive(Default)]
pub struct HotSide {
    cell: Arc<LaneCell>,
    /// The model that knows of it.
    model: Weak<Model>,
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
    /// Makes the context known to its model.
    pub fn join(&mut self, model: &Arc<Model>) {
        if self.model.as_ptr() != Arc::as_ptr(model) {
            self.model = Arc::downgrade(model);
            model.join(&self.cell);
        }
    }

    /// The lane, ready for the cache of this block's layer. `None`: the block is computed on the CPU, as long as the lane is
    /// not ready or for good.
    pub fn ready(
        &mut self,
        split: &Graph<'_>,
        block: &mut ResolvedBlock,
        n_tokens: usize,
        config: &Config,
    ) -> Option<ReadyLane> {
        let template = block.template.as_ref()?;
        let Some(cache) = block.layer.cache().filter(|cache| !cache.handle.is_over()) else {
            block.hot = HotBlock::Unknown;
            return None;
        };
        if n_tokens > config.max_hot_tokens() {
            return None;
        }
        let width = Width::of(n_tokens);
        // Once more for each request, if a test waits for the answers.
        for _ in 0..=2 {
            match self.find(&mut block.hot, &cache, width) {
                Found::Lane(lane, index) => return Some(ReadyLane { lane, cache, index }),
                Found::Nothing => return None,
                Found::NotAsked(width) => self.ask(split, &mut block.hot, template, &cache, width)?,
            }
            if !config.waits_for_lanes() {
                return None;
            }
            cache.handle.queue.wait_answered();
        }
        None
    }

    fn find(&self, hot: &mut HotBlock, cache: &Arc<LayerCache>, width: Width) -> Found {
        let asked = match hot {
            HotBlock::Asked(asked) if is_of(&asked.cache, cache) => asked,
            HotBlock::Refused(known) if is_of(known, cache) => return Found::Nothing,
            _ => return Found::NotAsked(Width::OneToken),
        };
        let index = match asked.one_token.get() {
            Some(Some(index)) => *index,
            Some(None) | None => return Found::Nothing,
        };
        // The cache's thread may be at work with it.
        let Some(lane) = self.cell.take() else { return Found::Nothing };
        let is_its = Arc::ptr_eq(&lane.cache, &cache.handle) && lane.lane.is_warm(index, Width::OneToken);
        if is_its && lane.lane.is_warm(index, width) {
            return Found::Lane(lane, index);
        }
        self.cell.put(lane);
        match (is_its, &asked.several_tokens) {
            // It was made anew since.
            (false, _) => Found::NotAsked(Width::OneToken),
            (true, None) => Found::NotAsked(width),
            (true, Some(_)) => Found::Nothing,
        }
    }

    /// Asks the cache's thread to make the lane ready. `None` if the cache cannot serve the block.
    fn ask(
        &self,
        split: &Graph<'_>,
        hot: &mut HotBlock,
        template: &Arc<FfnTemplate>,
        cache: &Arc<LayerCache>,
        width: Width,
    ) -> Option<()> {
        let model = self.model.upgrade()?;
        let Some(tensors) = cache.tensors_for(split, template) else {
            // An adapter that has come since: what belongs in the cache is more than it was made for.
            cache.handle.end_for_refill();
            return None;
        };
        let answer = Answer::default();
        match (width, &mut *hot) {
            (Width::SeveralTokens, HotBlock::Asked(asked)) => asked.several_tokens = Some(answer.clone()),
            _ => {
                let (cache, one_token) = (Arc::downgrade(cache), answer.clone());
                *hot = HotBlock::Asked(AskedLanes { cache, one_token, several_tokens: None });
            }
        }
        let (cell, template) = (Arc::downgrade(&self.cell), template.clone());
        let queue = cache.handle.queue.clone();
        queue.request_made();
        let of = Arc::downgrade(cache);
        model.add_lane_request(LaneRequest { cell, cache: of, template, tensors, width, answer, queue: queue.clone() });
        queue.wake();
        Some(())
    }

    /// Takes the lane back after a call.
    pub fn give_back(&self, lane: Box<ContextLane>) {
        self.cell.put(lane);
    }

    /// Gives the lane's memory back to the device.
    pub fn drop_lane(&self) {
        self.cell.release();
    }
}

/// What there is for a call.
enum Found {
    /// The lane, and the layer in it.
    Lane(Box<ContextLane>, HotIndex),
    /// Nothing yet, or nothing at all.
    Nothing,
    /// Nobody has asked for it.
    NotAsked(Width),
}

fn is_of<T>(known: &Weak<T>, owner: &Arc<T>) -> bool {
    known.as_ptr() == Arc::as_ptr(owner)
}
