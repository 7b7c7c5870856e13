//! One model: its layers, what identifies it, and where its profile goes.

use crate::ggml::Tensor;
use crate::moe::Shape;
use crate::routing::{
    BatchCounts, Counter, Counts, LayerCounts, LayerPerf, LayerRecord, ModelId, MoeHot, Profile, SCHEMA, Summary,
    TensorId, combine_fingerprints,
};
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One MoE layer of a model.
pub struct Layer {
    /// Requests per expert.
    pub counts: LayerCounts,
    /// The weights whose MUL_MAT_ID stands for the layer: the first of them that was seen.
    representative: String,
    n_used: u32,
    shape: Mutex<Shape>,
}

impl Layer {
    /// Whether a block with these weights is the one to count. A layer that comes in parts is counted once.
    pub fn is_counted_by(&self, weights: Tensor<'_>) -> bool {
        weights.name() == self.representative
    }

    /// Notes how complete the layer's block was; the most complete sight counts.
    pub fn saw(&self, shape: Shape) {
        let mut seen = self.shape.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*seen, Shape::Partial(_)) {
            *seen = shape;
        }
    }

    fn shape(&self) -> Shape {
        *self.shape.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The buffers that occur together in one context's graphs.
#[derive(Default)]
pub struct Model {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    layers: Vec<Arc<Layer>>,
    /// Layers of the weights in live memory, by buffer and data address.
    by_weights: HashMap<(usize, usize), Arc<Layer>>,
    /// Layer number and fingerprint of every expert tensor seen, by name.
    tensors: BTreeMap<String, (u32, String)>,
    /// Where the profile goes, once it has been settled.
    destination: Option<Destination>,
    /// Calls that the last saved profile holds.
    saved_calls: u64,
}

/// Where a model's profile goes.
#[derive(Clone, PartialEq, Eq)]
pub enum Destination {
    /// To this file.
    File(PathBuf),
    /// Nowhere: the file that the user named is not ours to replace.
    Nowhere,
}

impl Model {
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

    /// Forgets the weights of one buffer; counts are kept.
    pub fn forget_buffer(&self, buffer: usize) {
        self.inner().by_weights.retain(|(owner, _), _| *owner != buffer);
    }

    /// Where the profile goes; `None` until settled.
    pub fn destination(&self) -> Option<Destination> {
        self.inner().destination.clone()
    }

    /// Settles where the profile goes.
    pub fn set_destination(&self, destination: Destination) {
        self.inner().destination = Some(destination);
    }

    /// Calls of all layers so far, if that is more than the last saved profile holds.
    pub fn unsaved_calls(&self) -> Option<u64> {
        let inner = self.inner();
        let calls = inner.layers.iter().map(|layer| layer.counts.calls()).sum();
        (calls > inner.saved_calls).then_some(calls)
    }

    /// Notes that a profile with at least this many calls has been saved.
    pub fn set_saved(&self, calls: u64) {
        self.inner().saved_calls = calls;
    }

    /// The model's identity as far as its tensors have been seen.
    pub fn id(&self) -> ModelId {
        self.inner().id()
    }

    /// Everything recorded so far.
    pub fn profile(&self, min_batch_stock: u32) -> Profile {
        let inner = self.inner();
        let mut layers: Vec<_> = inner.layers.iter().collect();
        layers.sort_by_key(|layer| layer.counts.layer());
        let counts: Vec<_> = layers.iter().map(|layer| layer.counts.snapshot()).collect();
        let seen = || layers.iter().zip(&counts);
        let perf: Vec<_> = seen().map(|(layer, counts)| layer_perf(layer.counts.layer(), counts)).collect();
        let layer_calls = perf.iter().map(|layer| layer.calls).sum();
        Profile {
            enabled: true,
            mode: "full".into(),
            schema: SCHEMA.into(),
            n_expert: layers.iter().map(|layer| layer.counts.n_expert()).max().unwrap_or(0),
            n_expert_used: layers.iter().map(|layer| layer.n_used).max().unwrap_or(0),
            updates: perf.iter().map(|layer| layer.calls).max().unwrap_or(0),
            overflow_resets: 0,
            summary: Summary { layer_calls, hot_slot_ratio: 0.0 },
            layers: perf,
            model: Some(inner.id()),
            moe_hot: Some(MoeHot {
                format: 1,
                min_batch_stock,
                layers: seen().map(|(layer, counts)| inner.record(layer, counts)).collect(),
            }),
        }
    }
}

impl Inner {
    fn find_or_add(&mut self, number: u32, weights: Tensor<'_>, n_used: u32) -> Arc<Layer> {
        if let Some(layer) = self.layers.iter().find(|layer| layer.counts.layer() == number) {
            return layer.clone();
        }
        let n_expert = u32::try_from(weights.ne(2)).unwrap_or(u32::MAX);
        let layer = Arc::new(Layer {
            counts: LayerCounts::new(number, n_expert),
            representative: weights.name().into_owned(),
            n_used,
            shape: Mutex::new(Shape::Partial("not seen")),
        });
        self.layers.push(layer.clone());
        layer
    }

    /// A number for weights whose name has none.
    fn next_number(&self) -> u32 {
        self.layers.iter().map(|layer| layer.counts.layer() + 1).max().unwrap_or(0)
    }

    fn id(&self) -> ModelId {
        ModelId {
            fingerprint: combine_fingerprints(self.tensors.values().map(|(_, id)| id.as_str())),
            tensors: self.tensors.iter().map(|(name, (_, id))| (name.clone(), id.clone())).collect(),
        }
    }

    fn record(&self, layer: &Layer, counts: &Counts) -> LayerRecord {
        let number = layer.counts.layer();
        let of_layer = self.tensors.values().filter(|(owner, _)| *owner == number);
        LayerRecord {
            layer: number,
            n_expert: layer.counts.n_expert(),
            n_expert_used: layer.n_used,
            block: layer.shape().to_string(),
            fingerprint: combine_fingerprints(of_layer.map(|(_, id)| id.as_str())),
            batch_1: batch_counts(&counts.single),
            batch_2_up: batch_counts(&counts.multi),
        }
    }
}

fn layer_perf(number: u32, counts: &Counts) -> LayerPerf {
    LayerPerf::all_cold(number, counts.calls(), without_zeros(counts.experts()))
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
    id.fingerprint(|offset, len| weights.bytes(offset, len))
}

/// The N of `blk.N.` in a tensor's name. For numbering only.
fn layer_number(name: &str) -> Option<u32> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_numbered_by_their_names() {
        assert_eq!(layer_number("blk.17.ffn_up_exps.weight"), Some(17));
        assert_eq!(layer_number("blk.x.ffn_up_exps.weight"), None);
        assert_eq!(layer_number("output.weight"), None);
    }
}
