//! The profile file (experts.json) as we write it: schema `llama.cpp.moe_layer_perf.v1`, plus our `model` and `moe_hot`.
//!
//! `profiles/README.md` describes every field. Other readers ignore what they do not know; so does ours.

use super::counts::Counts;
use super::fingerprint::ModelId;
use super::format::Count;
use serde::Serialize;

/// The whole file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Profile {
    /// Whether anything was recorded.
    pub enabled: bool,
    /// Always `full`.
    pub mode: String,
    /// [`SCHEMA`](super::format::SCHEMA).
    pub schema: String,
    /// Experts per layer; the largest where layers differ.
    pub n_expert: u32,
    /// Experts per token; the largest where layers differ.
    pub n_expert_used: u32,
    /// Batches recorded: calls of the layer that was called most.
    pub updates: u64,
    /// Always 0: our counters are 64 bits wide.
    pub overflow_resets: u64,
    /// Totals.
    pub summary: Summary,
    /// Per layer, in the schema's own fields.
    pub layers: Vec<LayerPerf>,
    /// Which model was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelId>,
    /// What other programs do not know.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moe_hot: Option<MoeHot>,
}

/// Totals over all layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Expert FFNs computed.
    pub layer_calls: u64,
    /// Share of requests that ran on a device.
    pub hot_slot_ratio: f64,
}

/// One layer in the schema's own fields. A "slot" here is one request: one (token, expert) pair.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerPerf {
    /// Layer number.
    pub layer: u32,
    /// Expert FFNs computed.
    pub calls: u64,
    /// Requests that ran on a device.
    pub hot_slots_total: u64,
    /// Requests that ran on the CPU.
    pub cold_slots_total: u64,
    /// The same per call.
    pub hot_slots_per_call: f64,
    /// The same per call.
    pub cold_slots_per_call: f64,
    /// Share of requests that ran on a device.
    pub hot_slot_ratio: f64,
    /// Requests per expert, without zeros.
    pub experts: Vec<Count>,
    /// Those that ran on a device.
    pub hot_experts: Vec<Count>,
    /// Those that ran on the CPU.
    pub cold_experts: Vec<Count>,
}

impl LayerPerf {
    /// What was counted of a layer.
    pub fn of(layer: u32, counts: &Counts) -> Self {
        let hot = counts.hot.iter().copied();
        let cold = counts.experts().zip(hot.clone()).map(|(all, hot)| all.saturating_sub(hot));
        Self::new(layer, counts.calls(), without_zeros(hot), without_zeros(cold), without_zeros(counts.experts()))
    }

    /// A layer's calls, and its requests by expert: on a device, on the CPU, and all.
    pub fn new(layer: u32, calls: u64, hot: Vec<Count>, cold: Vec<Count>, all: Vec<Count>) -> Self {
        let sum = |counts: &[Count]| counts.iter().map(|&(_, count)| count).sum::<u64>();
        let (hot_total, cold_total) = (sum(&hot), sum(&cold));
        Self {
            layer,
            calls,
            hot_slots_total: hot_total,
            cold_slots_total: cold_total,
            hot_slots_per_call: ratio(hot_total, calls),
            cold_slots_per_call: ratio(cold_total, calls),
            hot_slot_ratio: ratio(hot_total, hot_total + cold_total),
            experts: all,
            hot_experts: hot,
            cold_experts: cold,
        }
    }
}

/// Counts by expert, those that are 0 left out.
pub fn without_zeros(counts: impl IntoIterator<Item = u64>) -> Vec<Count> {
    (0..).zip(counts).filter(|&(_, count)| count > 0).collect()
}

/// `part` of `whole`; 0 of nothing.
pub fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Our own section.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MoeHot {
    /// Version of this section.
    pub format: u32,
    /// Batches of this many tokens and more are stock's and were not seen.
    pub min_batch_stock: u32,
    /// Per layer.
    pub layers: Vec<LayerRecord>,
}

/// One layer in our own section.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerRecord {
    /// Layer number.
    pub layer: u32,
    /// Experts in this layer.
    pub n_expert: u32,
    /// Experts per token in this layer.
    pub n_expert_used: u32,
    /// What the layer's expert FFN looked like, whole or partial, and why.
    pub block: String,
    /// 16 hex digits over the layer's tensors.
    pub fingerprint: String,
    /// Batches of one token.
    pub batch_1: BatchCounts,
    /// Batches of two tokens up to `min_batch_stock` minus one.
    pub batch_2_up: BatchCounts,
    /// What a cache that learns knows of each expert: its rank among them, 1 and up, the best highest; without zeros.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<(u32, u16)>,
    /// Experts that such a cache held on its device when this was written.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub resident: Vec<u32>,
}

/// Counts for one kind of batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BatchCounts {
    /// Expert FFNs computed.
    pub calls: u64,
    /// Requests per expert, without zeros.
    pub experts: Vec<Count>,
}
