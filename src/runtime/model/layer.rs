//! One MoE layer of a model: its counts, the tensors that make up its experts, and its cache.

use super::cache::ModelCache;
use super::policy::Learner;
use crate::Result;
use crate::cache::Slots;
use crate::device::{Pool, PoolWriter};
use crate::ggml::{Graph, SharedWeights, Tensor};
use crate::moe::{FfnTemplate, Shape, WeightShape};
use crate::profile::LayerCounts;
use crate::runtime::hot_device::HotDevice;
use crate::units::{Expert, Slot};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Recipes of one layer that are remembered: each scale of an adapter makes another.
const MAX_RECIPES: usize = 8;

/// Which tensor of which live buffer.
pub type WeightKey = (usize, usize);

/// The key of an expert tensor; `None` without a buffer.
pub fn weight_key(weights: &Tensor<'_>) -> Option<WeightKey> {
    Some((weights.buffer()?.address(), weights.address()))
}

/// One MoE layer of a model.
pub struct Layer {
    /// Requests per expert.
    pub counts: LayerCounts,
    /// Experts per token.
    pub n_used: u32,
    /// The weights whose MUL_MAT_ID stands for the layer: the first of them that was seen.
    representative: String,
    seen: Mutex<Sight>,
    cache: Mutex<Option<Arc<LayerCache>>>,
}

/// What has been seen of a layer.
#[derive(Clone)]
pub struct Sight {
    /// The most complete one.
    pub shape: Shape,
    /// Every expert tensor of its recipes.
    pub parts: Vec<Part>,
    /// Its recipes: one, as a rule; another with LoRA.
    pub ffns: Vec<Arc<FfnTemplate>>,
    /// Why the last block that could not be cached could not.
    pub reason: Option<&'static str>,
}

/// One expert tensor of a layer.
#[derive(Clone)]
pub struct Part {
    key: WeightKey,
    /// As the recipe sees it.
    pub shape: WeightShape,
    /// All experts' bytes.
    pub weights: SharedWeights,
}

/// A layer's pool and what each slot holds.
pub struct LayerCache {
    /// Device memory.
    pub pool: Arc<Pool>,
    /// The way into it.
    pub writer: Arc<PoolWriter>,
    /// Locked for as long as it takes to look up a batch's experts, to learn from them, or to change one slot.
    state: Mutex<LayerState>,
    /// The model's cache that it is part of.
    pub model: Arc<ModelCache>,
    /// The pool's tensors, in its order.
    parts: Vec<Part>,
}

/// What each slot of a layer holds, and what is learnt about what it should hold.
pub struct LayerState {
    pub slots: Slots,
    /// `None`: the set is fixed.
    pub learner: Option<Learner>,
}

impl LayerState {
    /// Takes a slot for a missed expert that is copied while its token waits: a free one while there is room for one more
    /// resident, else that of the resident that is worth least and in nobody's use.
    pub fn start_copy(&mut self, id: i32) -> Option<(Expert, Slot)> {
        let expert = Expert(u16::try_from(id).ok()?);
        let (slots, learner) = (&mut self.slots, self.learner.as_mut()?);
        if !learner.may_replace() {
            return None;
        }
        let slot = if learner.has_room(slots) {
            slots.start_fill(expert)?
        } else {
            let victim = learner.worst(slots.staying().filter(|&resident| slots.is_unused(resident)))?;
            slots.start_replace(expert, victim)?
        };
        learner.spend();
        Some((expert, slot))
    }

    /// Such a copy is over. If it is not known to be whole it may still be under way: its slot is not used again.
    pub fn end_copy(&mut self, slot: Slot, is_whole: bool) {
        if is_whole {
            self.slots.publish(slot);
        } else {
            self.slots.retire(slot);
        }
    }

    /// A wish has been started, or will not be.
    pub fn end_wish(&mut self, is_started: bool) {
        if let Some(learner) = &mut self.learner {
            learner.end_wish(is_started);
        }
    }

    /// Learns from a call's routing. Returns the copy to wish for, if one pays: who comes, who goes, and the calls so far.
    pub fn learn(&mut self, ids: &[i32], n_tokens: usize, device: &HotDevice) -> Option<(Expert, Option<Expert>, u32)> {
        let learner = self.learner.as_mut()?;
        if learner.observe(ids.iter().copied(), n_tokens)
            && let Some(cost) = device.copy_cost()
        {
            learner.set_cost(cost);
        }
        let (expert, victim) = learner.wish(&self.slots)?;
        Some((expert, victim, learner.calls()))
    }
}

impl Layer {
    /// A layer of which nothing was computed yet.
    pub fn new(number: u32, weights: Tensor<'_>, n_used: u32) -> Self {
        let n_expert = u32::try_from(weights.ne(2)).unwrap_or(u32::MAX);
        let seen = Sight { shape: Shape::Partial("not seen"), parts: Vec::new(), ffns: Vec::new(), reason: None };
        Self {
            counts: LayerCounts::new(number, n_expert),
            n_used,
            representative: weights.name().into_owned(),
            seen: Mutex::new(seen),
            cache: Mutex::default(),
        }
    }

    /// Whether a block with these weights is the one to count. A layer that comes in parts is counted once.
    pub fn is_counted_by(&self, weights: Tensor<'_>) -> bool {
        weights.name() == self.representative
    }

    /// Notes how complete the layer's block was; the most complete sight counts.
    pub fn saw(&self, shape: Shape) {
        let mut seen = self.seen();
        if matches!(seen.shape, Shape::Partial(_)) {
            seen.shape = shape;
        }
    }

    /// Notes the recipe of the layer's block and where its experts lie.
    pub fn saw_recipe(&self, split: &Graph<'_>, ffn: &Arc<FfnTemplate>) {
        let mut seen = self.seen();
        for (index, &shape) in ffn.weights.iter().enumerate() {
            let Some(tensor) = ffn.weight(split, index) else { return };
            let Some(key) = weight_key(&tensor) else { return };
            if seen.parts.iter().any(|part| part.key == key) {
                continue;
            }
            let Some(weights) = SharedWeights::of(&tensor) else {
                seen.reason = Some("experts that are not in a buffer of ours");
                return;
            };
            seen.parts.push(Part { key, shape, weights });
        }
        if !seen.ffns.iter().any(|known| **known == **ffn) {
            if seen.ffns.len() >= MAX_RECIPES {
                seen.ffns.remove(0);
            }
            seen.ffns.push(ffn.clone());
        }
    }

    /// Bytes of one expert's weights, if its recipe was seen.
    pub fn expert_bytes(&self) -> Option<u64> {
        let bytes: usize = self.seen().parts.iter().map(|part| part.shape.expert_bytes).sum();
        (bytes > 0).then_some(bytes as u64)
    }

    /// Notes why a block of the layer cannot be cached.
    pub fn saw_refusal(&self, reason: &'static str) {
        self.seen().reason = Some(reason);
    }

    /// A copy of all that has been seen.
    pub fn sight(&self) -> Sight {
        self.seen().clone()
    }

    /// Its cache, if there is one.
    pub fn cache(&self) -> Option<Arc<LayerCache>> {
        self.cache_place().clone()
    }

    /// Gives it a cache, unless the model's memory that it was made for has gone meanwhile.
    pub fn give_cache(&self, cache: Arc<LayerCache>) {
        // Both under the lock that `forget_buffer` takes.
        let seen = self.seen();
        let is_there = |part: &Part| seen.parts.iter().any(|known| known.key == part.key);
        if cache.parts.iter().all(is_there) && !cache.model.is_over() {
            *self.cache_place() = Some(cache);
        }
    }

    /// Takes its cache away.
    pub fn drop_cache(&self) {
        *self.cache_place() = None;
    }

    /// Forgets all that lies in a buffer that is about to go. What was copied from it must not serve its successor.
    ///
    /// Returns the cache that it takes away for this.
    pub fn forget_buffer(&self, buffer: usize) -> Option<Arc<LayerCache>> {
        let mut seen = self.seen();
        seen.parts.retain(|part| part.key.0 != buffer);
        let mut cache = self.cache_place();
        let is_of_it = |cache: &mut Arc<LayerCache>| cache.parts.iter().any(|part| part.key.0 == buffer);
        cache.take_if(is_of_it)
    }

    fn cache_place(&self) -> MutexGuard<'_, Option<Arc<LayerCache>>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen(&self) -> MutexGuard<'_, Sight> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LayerCache {
    /// A pool of this model's cache, and what its slots hold: nothing.
    pub fn new(pool: Pool, model: Arc<ModelCache>, parts: Vec<Part>, state: LayerState) -> Result<Self> {
        let pool = Arc::new(pool);
        let writer = Arc::new(PoolWriter::new(&pool)?);
        Ok(Self { pool, writer, state: Mutex::new(state), model, parts })
    }

    /// What each slot holds, and what is learnt.
    pub fn state(&self) -> MutexGuard<'_, LayerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pool's tensor for each weight of a recipe; `None` if one is not in the pool.
    pub fn tensors_for(&self, split: &Graph<'_>, ffn: &FfnTemplate) -> Option<Vec<usize>> {
        let place = |index| {
            let key = weight_key(&ffn.weight(split, index)?)?;
            self.parts.iter().position(|part| part.key == key)
        };
        (0..ffn.weights.len()).map(place).collect()
    }

    /// Puts the bytes of one expert's tensors one after the other into `staging`; `false` if they are gone.
    pub fn read_expert(&self, expert: Expert, staging: &mut [u8]) -> bool {
        let mut rest = staging;
        for Part { shape, weights, .. } in &self.parts {
            let len = shape.expert_bytes;
            let Some((to, after)) = std::mem::take(&mut rest).split_at_mut_checked(len) else { return false };
            let offset = usize::from(expert.0) * len;
            if weights.with_bytes(offset, len, |bytes| to.copy_from_slice(bytes)).is_none() {
                return false;
            }
            rest = after;
        }
        rest.is_empty()
    }
}

/// Caches for unit tests.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use crate::ggml::{BufferType, sys};
    use crate::runtime::model::Model;

    /// An empty cache in the CPU's memory that learns.
    pub(crate) fn cache(device: &Arc<HotDevice>, n_expert: u16, n_slots: u16) -> LayerCache {
        let shape = crate::device::PoolTensor {
            kind: sys::GGML_TYPE_F32,
            ne: [8, 4, n_expert.into(), 1],
            slot_dim: 2,
            slot_bytes: 8 * 4 * size_of::<f32>(),
        };
        let pool = Pool::allocate(BufferType::cpu().unwrap(), &[shape], n_slots).unwrap().unwrap();
        let learner = Learner::new(&vec![0.0; n_expert.into()], n_slots, 1.min(n_slots - 1), 2, None);
        let state = LayerState { slots: Slots::new(n_expert, n_slots), learner: Some(learner) };
        LayerCache::new(pool, ModelCache::new(device.clone(), &Arc::new(Model::new())), Vec::new(), state).unwrap()
    }
}
