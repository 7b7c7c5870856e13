//! A context's hot lane: asked for, layer by layer, from the cache's thread, and lent to a call once it is ready.

use super::splits::{HotBlock, ResolvedBlock};
use crate::ggml::Graph;
use crate::lanes::{HotIndex, Width};
use crate::moe::FfnTemplate;
use crate::options::Config;
use crate::runtime::model::Model;
use crate::runtime::model::cache_handle::IdleMemory;
use crate::runtime::model::lane_cell::{ContextLane, LaneCell, Loan, Place};
use crate::runtime::model::lane_request::{Answer, AskedLayer, LaneRequest};
use crate::runtime::model::layer_cache::LayerCache;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A context's hot lane, if it has one.
#[derive(Default)]
pub struct HotSide {
    cell: Arc<LaneCell>,
    /// The model that knows of it.
    model: Weak<Model>,
    /// What the lane has been asked to know.
    asked: Vec<Arc<AskedLayer>>,
}

/// A hot lane that is ready for a call.
pub struct ReadyLane {
    /// The lane, lent for the call.
    pub lane: Box<ContextLane>,
    /// Takes it back.
    pub loan: Loan,
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
    /// not ready or for good. Graphs that take longer than `limit` are not made ready.
    pub fn ready(
        &mut self,
        split: &Graph<'_>,
        block: &mut ResolvedBlock,
        n_tokens: usize,
        limit: Duration,
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
            match self.find(split, &mut block.hot, template, &cache, (width, limit)) {
                Found::Lane(lane, index) => return Some(ReadyLane { loan: Loan::of(&self.cell), lane, cache, index }),
                Found::Nothing => return None,
                Found::Asked => {}
            }
            if !config.waits_for_lanes() {
                return None;
            }
            cache.handle.queue.wait_answered();
        }
        None
    }

    fn find(
        &mut self,
        split: &Graph<'_>,
        hot: &mut HotBlock,
        template: &Arc<FfnTemplate>,
        cache: &Arc<LayerCache>,
        (width, limit): (Width, Duration),
    ) -> Found {
        match hot {
            HotBlock::Asked(asked) if is_of(&asked.cache, cache) => {}
            HotBlock::Refused(known) if is_of(known, cache) => return Found::Nothing,
            // A new graph, or a new cache.
            _ => match self.asked_before(split, template, cache) {
                Ok(asked) => *hot = HotBlock::Asked(asked),
                Err(tensors) => return self.ask(hot, template, cache, tensors, (width, limit)),
            },
        }
        let HotBlock::Asked(asked) = hot else { return Found::Nothing };
        let asked = asked.clone();
        let Some(answer) = asked.answers[width as usize].get() else {
            return self.request(&asked, cache, (width, limit));
        };
        let Some(&Some(index)) = answer.get() else { return Found::Nothing };
        match self.cell.take() {
            Place::Here(lane) => {
                if Arc::ptr_eq(&lane.cache, &cache.handle) && lane.lane.is_warm(index, width, limit) {
                    return Found::Lane(lane, index);
                }
                self.cell.put(lane);
            }
            // The cache's thread is at work with it.
            Place::Lent => return Found::Nothing,
            Place::Nowhere => {}
        }
        // It was made anew since. Another graph may have asked.
        if let Some(newer) = self.asked.iter().find(|known| known.is_for(cache, template, &asked.tensors))
            && !Arc::ptr_eq(newer, &asked)
        {
            *hot = HotBlock::Asked(newer.clone());
            return Found::Asked;
        }
        self.ask(hot, template, cache, Some(asked.tensors.clone()), (width, limit))
    }

    /// What another graph of this context has asked for, or the pool's tensor for each weight; `Err(None)` if the cache cannot
    /// serve the block.
    fn asked_before(
        &self,
        split: &Graph<'_>,
        template: &Arc<FfnTemplate>,
        cache: &Arc<LayerCache>,
    ) -> Result<Arc<AskedLayer>, Option<Vec<usize>>> {
        let tensors = cache.tensors_for(split, template).ok_or(None)?;
        let known = self.asked.iter().find(|known| known.is_for(cache, template, &tensors));
        known.cloned().ok_or(Some(tensors))
    }

    /// Asks the cache's thread to make the lane ready for so many tokens.
    fn ask(
        &mut self,
        hot: &mut HotBlock,
        template: &Arc<FfnTemplate>,
        cache: &Arc<LayerCache>,
        tensors: Option<Vec<usize>>,
        ready_for: (Width, Duration),
    ) -> Found {
        let Some(tensors) = tensors else {
            // An adapter that has come since: what belongs in the cache is more than it was made for.
            cache.handle.end_for_refill();
            return Found::Nothing;
        };
        self.asked.retain(|known| known.cache.strong_count() > 0 && !known.is_for(cache, template, &tensors));
        let (of, template) = (Arc::downgrade(cache), template.clone());
        let asked = Arc::new(AskedLayer { cache: of, template, tensors, answers: Default::default() });
        self.asked.push(asked.clone());
        *hot = HotBlock::Asked(asked.clone());
        self.request(&asked, cache, ready_for)
    }

    fn request(&self, asked: &AskedLayer, cache: &Arc<LayerCache>, (width, limit): (Width, Duration)) -> Found {
        let Some(model) = self.model.upgrade() else { return Found::Nothing };
        let answer = asked.answers[width as usize].get_or_init(Answer::default).clone();
        let queue = cache.handle.queue.clone();
        queue.request_made();
        model.add_lane_request(LaneRequest {
            cell: Arc::downgrade(&self.cell),
            cache: asked.cache.clone(),
            template: asked.template.clone(),
            tensors: asked.tensors.clone(),
            width,
            limit,
            answer,
            queue: queue.clone(),
        });
        queue.wake();
        Found::Asked
    }

    /// Forgets the templates, and gives the lane's memory back to the device.
    pub fn forget_templates(&mut self) {
        self.asked.clear();
        self.cell.release();
    }
}

/// What there is for a call.
enum Found {
    /// The lane, and the layer in it.
    Lane(Box<ContextLane>, HotIndex),
    /// Nothing yet, or nothing at all.
    Nothing,
    /// An answer, soon.
    Asked,
}

fn is_of<T>(known: &Weak<T>, owner: &Arc<T>) -> bool {
    known.as_ptr() == Arc::as_ptr(owner)
}
