//! A layer's pool, what each of its slots holds, and what the layer's policy has learnt.

use super::cache_handle::CacheHandle;
use super::expert_tensor::{ExpertTensor, WeightKey, weight_key};
use super::fetch_queue::Fetch;
use super::policy::LayerPolicy;
use crate::Result;
use crate::cache::Slots;
use crate::device::{Pool, PoolWriter};
use crate::ggml::Graph;
use crate::moe::FfnTemplate;
use crate::units::{Expert, Slot};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A layer's pool and what its slots hold.
pub struct LayerCache {
    /// Device memory.
    pub pool: Arc<Pool>,
    /// The way into it.
    pub writer: Arc<PoolWriter>,
    /// The model's cache that it belongs to.
    pub handle: Arc<CacheHandle>,
    /// Its place among that cache's layers.
    index: usize,
    /// Locked for as long as it takes to look up a batch's experts, to learn from them, or to change one slot.
    state: Mutex<LayerState>,
    /// The pool's tensors, in its order.
    tensors: Vec<ExpertTensor>,
}

/// What each slot of a layer holds, and what is learnt about what it should hold.
pub struct LayerState {
    /// What each slot holds.
    pub slots: Slots,
    /// `None`: the set of residents is fixed.
    pub policy: Option<LayerPolicy>,
}

impl LayerState {
    /// Takes a slot for a missed expert that is copied while its token waits: a free one while there is room for one more
    /// resident, else that of the resident that is worth least and in nobody's use.
    pub fn start_copy(&mut self, id: i32) -> Option<(Expert, Slot)> {
        let expert = Expert(u16::try_from(id).ok()?);
        let (slots, policy) = (&mut self.slots, self.policy.as_mut()?);
        if !policy.may_replace() {
            return None;
        }
        let slot = if policy.has_room(slots) {
            slots.start_fill(expert)?
        } else {
            let victim = policy.worst(slots.staying().filter(|&resident| slots.is_unused(resident)))?;
            slots.start_replace(expert, victim)?
        };
        policy.spend();
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

    /// A fetch has been started, or will not be.
    pub fn end_fetch(&mut self, is_started: bool) {
        if let Some(policy) = &mut self.policy {
            policy.end_fetch(is_started);
        }
    }
}

impl LayerCache {
    /// A pool of this cache, and what its slots hold. `index`: the layer's place in the cache.
    pub fn new(
        pool: Pool,
        handle: Arc<CacheHandle>,
        index: usize,
        tensors: Vec<ExpertTensor>,
        state: LayerState,
    ) -> Result<Self> {
        let pool = Arc::new(pool);
        let writer = Arc::new(PoolWriter::new(&pool)?);
        Ok(Self { pool, writer, handle, index, state: Mutex::new(state), tensors })
    }

    /// What each slot holds, and what is learnt.
    pub fn state(&self) -> MutexGuard<'_, LayerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Learns from a call's routing and returns the copy to make, if one pays. `may_admit`: whether one can pay at all: not where
    /// the device cannot serve such calls.
    pub fn learn(&self, ids: &[i32], n_tokens: usize, may_admit: bool) -> Option<Fetch> {
        let mut state = self.state();
        let LayerState { slots, policy } = &mut *state;
        let policy = policy.as_mut()?;
        if policy.observe(ids.iter().copied(), n_tokens)
            && let Some(cost) = self.handle.device.copy_cost()
        {
            policy.set_cost(cost);
        }
        let admission = if may_admit { policy.admission(slots)? } else { return None };
        Some(Fetch { layer: self.index, admission, decided_at: Some(policy.calls()) })
    }

    /// Which tensors of which buffers it was made for.
    pub fn keys(&self) -> impl Iterator<Item = WeightKey> {
        self.tensors.iter().map(|tensor| tensor.key)
    }

    /// The pool's tensor for each weight of an FFN template; `None` if one is not in the pool.
    pub fn tensors_for(&self, split: &Graph<'_>, template: &FfnTemplate) -> Option<Vec<usize>> {
        let place = |index| {
            let key = weight_key(&template.weight(split, index)?)?;
            self.tensors.iter().position(|tensor| tensor.key == key)
        };
        (0..template.weights.len()).map(place).collect()
    }

    /// Puts the bytes of one expert's tensors one after the other into `staging`; `false` if they are gone.
    pub fn read_expert(&self, expert: Expert, staging: &mut [u8]) -> bool {
        let mut rest = staging;
        for ExpertTensor { shape, weights, .. } in &self.tensors {
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
    use crate::device::PoolTensor;
    use crate::ggml::testing::load_cpu;
    use crate::ggml::{BufferType, Device, sys};
    use crate::options::Config;
    use crate::runtime::hot_device::HotDevice;

    /// A handle to a cache on the CPU's memory.
    pub(crate) fn handle() -> Arc<CacheHandle> {
        load_cpu();
        let device = Arc::new(HotDevice::new(Device::cpu().unwrap(), &Config::from_env()));
        CacheHandle::new(device, 1, Arc::default(), Arc::default(), Arc::default())
    }

    /// An empty cache in the CPU's memory that learns. `n_slots` at least 1.
    pub(crate) fn cache(handle: &Arc<CacheHandle>, n_expert: u16, n_slots: u16) -> LayerCache {
        let policy = LayerPolicy::new(&vec![0.0; n_expert.into()], n_slots, 1.min(n_slots - 1), 2, None);
        with_policy(handle, n_expert, n_slots, Some(policy))
    }

    /// The same with this policy.
    pub(crate) fn with_policy(
        handle: &Arc<CacheHandle>,
        n_expert: u16,
        n_slots: u16,
        policy: Option<LayerPolicy>,
    ) -> LayerCache {
        const BYTES: usize = 8 * 4 * size_of::<f32>();
        let shape =
            PoolTensor { kind: sys::GGML_TYPE_F32, ne: [8, 4, n_expert.into(), 1], slot_dim: 2, slot_bytes: BYTES };
        let pool = Pool::allocate(BufferType::cpu().unwrap(), &[shape], n_slots).unwrap().unwrap();
        let state = LayerState { slots: Slots::new(n_expert, n_slots), policy };
        LayerCache::new(pool, handle.clone(), 0, Vec::new(), state).unwrap()
    }
}
