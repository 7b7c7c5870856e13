//! One MoE layer of a model: its counts, the tensors that make up its experts, and its cache.

use super::expert_tensor::{ExpertTensor, WeightKey, weight_key};
use super::layer_cache::LayerCache;
use crate::ggml::{Graph, SharedWeights, Tensor};
use crate::moe::{FfnTemplate, Shape};
use crate::profile::LayerCounts;
use crate::runtime::timing::LaneTimes;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// FFN templates of one layer that are remembered: each scale of an adapter makes another.
const MAX_TEMPLATES: usize = 8;

/// One MoE layer of a model.
pub struct Layer {
    /// Requests per expert.
    pub counts: LayerCounts,
    /// What its lanes took.
    pub times: LaneTimes,
    /// Experts per token.
    pub n_used: u32,
    /// Name of the weights whose MUL_MAT_ID stands for the layer: the first that appeared.
    representative: String,
    info: Mutex<LayerInfo>,
    cache: Mutex<Option<Arc<LayerCache>>>,
}

/// What is known of a layer from its splits.
#[derive(Clone)]
pub struct LayerInfo {
    /// How complete its block is: the most complete one that appeared.
    pub shape: Shape,
    /// Every expert tensor of its FFN templates.
    pub tensors: Vec<ExpertTensor>,
    /// Its FFN templates: one, as a rule; another with LoRA.
    pub templates: Vec<Arc<FfnTemplate>>,
    /// Why the last block that could not be cached could not.
    pub reason: Option<&'static str>,
}

impl Layer {
    /// A layer of which nothing was computed yet.
    pub fn new(number: u32, weights: Tensor<'_>, n_used: u32) -> Self {
        let n_expert = u32::try_from(weights.ne(2)).unwrap_or(u32::MAX);
        let shape = Shape::Partial("not seen");
        let info = LayerInfo { shape, tensors: Vec::new(), templates: Vec::new(), reason: None };
        Self {
            counts: LayerCounts::new(number, n_expert),
            times: LaneTimes::default(),
            n_used,
            representative: weights.name().into_owned(),
            info: Mutex::new(info),
            cache: Mutex::default(),
        }
    }

    /// Whether a block with these weights is the one to count. A layer that comes in several splits is counted once.
    pub fn is_counted_by(&self, weights: Tensor<'_>) -> bool {
        weights.name() == self.representative
    }

    /// Records how complete the layer's block was.
    pub fn record_shape(&self, shape: Shape) {
        let mut info = self.lock_info();
        if matches!(info.shape, Shape::Partial(_)) {
            info.shape = shape;
        }
    }

    /// Records the FFN template of the layer's block and where its experts lie.
    pub fn record_template(&self, split: &Graph<'_>, template: &Arc<FfnTemplate>) {
        let mut info = self.lock_info();
        for (index, &shape) in template.weights.iter().enumerate() {
            let Some(tensor) = template.weight(split, index) else { return };
            let Some(key) = weight_key(&tensor) else { return };
            if info.tensors.iter().any(|known| known.key == key) {
                continue;
            }
            let Some(weights) = SharedWeights::of(&tensor) else {
                info.reason = Some("experts that are not in a buffer of ours");
                return;
            };
            info.tensors.push(ExpertTensor { key, shape, weights });
        }
        if !info.templates.iter().any(|known| **known == **template) {
            if info.templates.len() >= MAX_TEMPLATES {
                info.templates.remove(0);
            }
            info.templates.push(template.clone());
        }
    }

    /// Records why a block of the layer cannot be cached.
    pub fn record_refusal(&self, reason: &'static str) {
        self.lock_info().reason = Some(reason);
    }

    /// A copy of all that is known.
    pub fn info(&self) -> LayerInfo {
        self.lock_info().clone()
    }

    /// Bytes of one expert's weights, if its FFN template is known.
    pub fn expert_bytes(&self) -> Option<u64> {
        let bytes: usize = self.lock_info().tensors.iter().map(|tensor| tensor.shape.expert_bytes).sum();
        (bytes > 0).then_some(bytes as u64)
    }

    /// Its cache, if there is one.
    pub fn cache(&self) -> Option<Arc<LayerCache>> {
        self.lock_cache().clone()
    }

    /// Gives it a cache; `false` if the memory that it was made for has gone meanwhile, or the cache is over. Whoever gives
    /// it takes it away again.
    pub fn give_cache(&self, cache: &Arc<LayerCache>) -> bool {
        // Both under the lock that `forget_buffer` takes.
        let info = self.lock_info();
        let is_there = |key: WeightKey| info.tensors.iter().any(|known| known.key == key);
        if !cache.keys().all(is_there) || cache.handle.is_over() {
            return false;
        }
        let old = self.lock_cache().replace(cache.clone());
        drop(info);
        drop(old); // may free device memory: not under the locks
        true
    }

    /// Takes this cache away, if the layer has it.
    pub fn take_cache(&self, cache: &Arc<LayerCache>) {
        let taken = self.lock_cache().take_if(|held| Arc::ptr_eq(held, cache));
        drop(taken); // may free device memory: the lock is free again
    }

    /// Forgets all that lies in a buffer that is about to go. What was copied from it must not serve its successor.
    ///
    /// Returns the cache that it takes away for this.
    pub fn forget_buffer(&self, buffer: usize) -> Option<Arc<LayerCache>> {
        let mut info = self.lock_info();
        info.tensors.retain(|tensor| tensor.key.0 != buffer);
        self.lock_cache().take_if(|cache| cache.keys().any(|key| key.0 == buffer))
    }

    fn lock_cache(&self) -> MutexGuard<'_, Option<Arc<LayerCache>>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_info(&self) -> MutexGuard<'_, LayerInfo> {
        self.info.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
