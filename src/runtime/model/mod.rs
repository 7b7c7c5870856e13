//! One model: its layers, what identifies it, and where its profile goes.

pub mod cache;
pub mod layer;
pub mod policy;

use super::record::Sink;
use crate::ggml::Tensor;
use crate::profile::{
    BatchCounts, Counter, Counts, LayerPerf, LayerRecord, ModelId, MoeHot, Profile, RecordedProfile, SCHEMA, Summary,
    TensorId, combine_fingerprints, ratio,
};
use crate::units::layer_number;
use layer::Layer;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// How often one model's cache is filled anew at most: adapters that come and go must not keep the bus busy.
const MAX_FILLS: u64 = 64;

/// The buffers that occur together in one context's graphs.
pub struct Model {
    inner: Mutex<Inner>,
    /// Where its recorded profile goes. Only saving looks at it, for as long as a save takes.
    recorded: Mutex<Sink>,
    /// Where what its cache has learnt goes, likewise.
    learnt: Mutex<Sink>,
    /// The profile that its cache began with.
    began_with: OnceLock<RecordedProfile>,
    has_profile: AtomicBool,
    wants_fill: AtomicBool,
    /// How often it was to be filled anew.
    n_fills: AtomicU64,
    /// Calls of a layer before it was last loaded.
    calls_before: AtomicU64,
    copied_bytes: Arc<AtomicU64>,
}

/// Layer number and fingerprint of expert tensors, by name.
type Tensors = BTreeMap<String, (u32, String)>;

#[derive(Default)]
struct Inner {
    layers: Vec<Arc<Layer>>,
    /// Layers of the weights in live memory, by buffer and data address.
    by_weights: HashMap<(usize, usize), Arc<Layer>>,
    /// Every expert tensor seen.
    tensors: Tensors,
}

impl Model {
    /// Nothing seen yet.
    pub fn new() -> Self {
        Self {
            inner: Mutex::default(),
            recorded: Mutex::default(),
            learnt: Mutex::default(),
            began_with: OnceLock::new(),
            has_profile: AtomicBool::new(false),
            wants_fill: AtomicBool::new(true),
            n_fills: AtomicU64::new(0),
            calls_before: AtomicU64::new(0),
            copied_bytes: Arc::default(),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any of its weights are in memory.
    pub fn is_loaded(&self) -> bool {
        !self.inner().by_weights.is_empty()
    }

    /// Whether these very weights (name and content) have been seen.
    pub fn knows(&self, weights: Tensor<'_>) -> bool {
        self.inner().tensors.get(&*weights.name()).is_some_and(|(_, known)| *known == fingerprint(weights))
    }

    /// The layer of `weights` `[n_in, n_out, n_expert]` in the buffer with this address; made when new.
    pub fn layer_of(&self, buffer: usize, weights: Tensor<'_>, n_used: u32) -> Arc<Layer> {
        let key = (buffer, weights.address());
        let mut inner = self.inner();
        if let Some(layer) = inner.by_weights.get(&key) {
            return layer.clone();
        }
        let name = weights.name().into_owned();
        let number = layer_number(&name).unwrap_or_else(|| inner.next_number());
        let layer = inner.find_or_add(number, weights, n_used);
        inner.by_weights.insert(key, layer.clone());
        inner.tensors.insert(name, (number, fingerprint(weights)));
        layer
    }

    /// Forgets the weights of one buffer and what was copied from it; counts are kept.
    pub fn forget_buffer(&self, buffer: usize) {
        let layers = {
            let mut inner = self.inner();
            inner.by_weights.retain(|(owner, _), _| *owner != buffer);
            inner.layers.clone()
        };
        let lost: Vec<_> = layers.iter().filter_map(|layer| layer.forget_buffer(buffer)).collect();
        if let Some(cache) = lost.first() {
            // An adapter has gone, or the model, which may be loaded again, elsewhere in memory.
            cache.model.refill();
        } else if !self.is_loaded() {
            self.want_fill();
        }
    }

    /// Has its cache filled anew, once its layers have been computed a few times more. A bounded number of times.
    pub fn want_fill(&self) {
        if self.n_fills.fetch_add(1, Relaxed) < MAX_FILLS {
            let calls = self.layers().iter().map(|layer| layer.counts.calls()).max();
            self.calls_before.store(calls.unwrap_or(0), Relaxed);
            self.wants_fill.store(true, Relaxed);
        }
    }

    /// Its layers, in the order in which they were seen.
    pub fn layers(&self) -> Vec<Arc<Layer>> {
        self.inner().layers.clone()
    }

    /// What identifies it, as far as it has been seen.
    pub fn id(&self) -> ModelId {
        model_id(&self.inner().tensors)
    }

    /// Whether its cache is to be filled now: once, when one of its layers has been computed `n` times since it was loaded.
    /// `calls`: of that layer so far.
    pub fn take_fill(&self, calls: u64, n: u64) -> bool {
        self.wants_fill.load(Relaxed)
            && calls >= n.saturating_add(self.calls_before.load(Relaxed))
            && self.wants_fill.swap(false, Relaxed)
    }

    /// Where its recorded profile goes; held while it is being saved.
    pub fn recorded(&self) -> MutexGuard<'_, Sink> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where what its cache has learnt goes; held while it is being saved.
    pub fn learnt(&self) -> MutexGuard<'_, Sink> {
        self.learnt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the profile that its cache begins with; the first counts, and is returned.
    pub fn begin_with(&self, demand: RecordedProfile) -> &RecordedProfile {
        self.began_with.get_or_init(|| demand)
    }

    /// Notes that the profile has been read, or that it will not be.
    pub fn set_has_profile(&self) {
        self.has_profile.store(true, Relaxed);
    }

    /// Whether the profile that its cache begins with has been read, or will not be.
    pub fn has_profile(&self) -> bool {
        self.has_profile.load(Relaxed)
    }

    /// The profile that its cache began with.
    pub fn began_with(&self) -> Option<&RecordedProfile> {
        self.began_with.get()
    }

    /// Calls of all layers so far.
    pub fn calls(&self) -> u64 {
        self.layers().iter().map(|layer| layer.counts.calls()).sum()
    }

    /// Counts bytes that were copied to a device.
    pub fn copied_bytes(&self) -> &Arc<AtomicU64> {
        &self.copied_bytes
    }

    /// Calls and requests of all layers so far.
    pub fn totals(&self) -> Totals {
        let layers = self.inner().layers.clone();
        let counts: Vec<_> = layers.iter().map(|layer| layer.counts.snapshot()).collect();
        Totals {
            layers: layers.len(),
            calls: counts.iter().map(Counts::calls).sum(),
            requests: counts.iter().flat_map(Counts::experts).sum(),
            hits: counts.iter().flat_map(|counts| counts.hot.iter()).sum(),
            copied_bytes: self.copied_bytes.load(Relaxed),
        }
    }

    /// Everything recorded so far.
    pub fn profile(&self, min_batch_stock: u32) -> Profile {
        // Copies are made under the lock; the profile is built from them outside, lest a decoding context wait.
        let (mut layers, tensors) = {
            let inner = self.inner();
            (inner.layers.clone(), inner.tensors.clone())
        };
        layers.sort_by_key(|layer| layer.counts.layer());
        let counts: Vec<_> = layers.iter().map(|layer| layer.counts.snapshot()).collect();
        let seen = || layers.iter().zip(&counts);
        let perf: Vec<_> = seen().map(|(layer, counts)| layer_perf(layer.counts.layer(), counts)).collect();
        let layer_calls = perf.iter().map(|layer| layer.calls).sum();
        let hot: u64 = perf.iter().map(|layer| layer.hot_slots_total).sum();
        let cold: u64 = perf.iter().map(|layer| layer.cold_slots_total).sum();
        Profile {
            enabled: true,
            mode: "full".into(),
            schema: SCHEMA.into(),
            n_expert: layers.iter().map(|layer| layer.counts.n_expert()).max().unwrap_or(0),
            n_expert_used: layers.iter().map(|layer| layer.n_used).max().unwrap_or(0),
            updates: perf.iter().map(|layer| layer.calls).max().unwrap_or(0),
            overflow_resets: 0,
            summary: Summary { layer_calls, hot_slot_ratio: ratio(hot, hot + cold) },
            layers: perf,
            model: Some(model_id(&tensors)),
            moe_hot: Some(MoeHot {
                format: 1,
                min_batch_stock,
                layers: seen().map(|(layer, counts)| layer_record(layer, counts, &tensors)).collect(),
            }),
        }
    }
}

/// What a model was asked for so far.
pub struct Totals {
    /// MoE layers seen.
    pub layers: usize,
    /// Expert FFNs computed.
    pub calls: u64,
    /// (token, expert) pairs.
    pub requests: u64,
    /// Those whose expert was resident.
    pub hits: u64,
    /// Bytes copied to a device.
    pub copied_bytes: u64,
}

impl Inner {
    fn find_or_add(&mut self, number: u32, weights: Tensor<'_>, n_used: u32) -> Arc<Layer> {
        if let Some(layer) = self.layers.iter().find(|layer| layer.counts.layer() == number) {
            return layer.clone();
        }
        let layer = Arc::new(Layer::new(number, weights, n_used));
        self.layers.push(layer.clone());
        layer
    }

    /// A number for weights whose name has none.
    fn next_number(&self) -> u32 {
        self.layers.iter().map(|layer| layer.counts.layer() + 1).max().unwrap_or(0)
    }
}

fn model_id(tensors: &Tensors) -> ModelId {
    ModelId {
        fingerprint: combine_fingerprints(tensors.values().map(|(_, id)| id.as_str())),
        tensors: tensors.iter().map(|(name, (_, id))| (name.clone(), id.clone())).collect(),
    }
}

fn layer_record(layer: &Layer, counts: &Counts, tensors: &Tensors) -> LayerRecord {
    let number = layer.counts.layer();
    let of_layer = tensors.values().filter(|(owner, _)| *owner == number);
    LayerRecord {
        layer: number,
        n_expert: layer.counts.n_expert(),
        n_expert_used: layer.n_used,
        block: layer.sight().shape.to_string(),
        fingerprint: combine_fingerprints(of_layer.map(|(_, id)| id.as_str())),
        batch_1: batch_counts(&counts.single),
        batch_2_up: batch_counts(&counts.multi),
        ranks: Vec::new(),
        resident: Vec::new(),
    }
}

fn layer_perf(number: u32, counts: &Counts) -> LayerPerf {
    let hot = counts.hot.iter().copied();
    let cold = counts.experts().zip(hot.clone()).map(|(all, hot)| all.saturating_sub(hot));
    LayerPerf::new(number, counts.calls(), without_zeros(hot), without_zeros(cold), without_zeros(counts.experts()))
}

fn batch_counts(counter: &Counter) -> BatchCounts {
    BatchCounts { calls: counter.calls, experts: without_zeros(counter.experts.iter().copied()) }
}

fn without_zeros(counts: impl IntoIterator<Item = u64>) -> Vec<(u32, u64)> {
    (0..).zip(counts).filter(|&(_, count)| count > 0).collect()
}

fn fingerprint(weights: Tensor<'_>) -> String {
    let id = TensorId {
        name: &weights.name(),
        type_name: &weights.type_name(),
        shape: [0, 1, 2, 3].map(|dim| weights.ne(dim)),
        n_bytes: weights.n_bytes(),
    };
    id.fingerprint(|offset, len| weights.weight_bytes(offset, len))
}
