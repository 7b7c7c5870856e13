//! What was recorded of a model, and what its cache has learnt, as a profile.

use crate::options::Config;
use crate::profile::{
    BatchCounts, Count, Counter, Counts, LayerPerf, LayerRecord, MoeHot, Profile, RecordedLayer, RecordedProfile,
    SCHEMA, Summary, combine_fingerprints, ratio, without_zeros,
};
use crate::runtime::model::layer::Layer;
use crate::runtime::model::{Model, Tensors, model_id};
use std::collections::BTreeMap;

/// After so many calls of a layer the counts that its session began with weigh half.
const HALF_LIFE_CALLS: f64 = 10_000.0;

/// Everything recorded so far.
pub fn recorded(config: &Config, model: &Model) -> Profile {
    // Copies are made under locks; the profile is built from them outside, so that no decoding context waits.
    let (mut layers, tensors) = (model.layers(), model.tensors());
    layers.sort_by_key(|layer| layer.counts.layer());
    let counts: Vec<_> = layers.iter().map(|layer| layer.counts.snapshot()).collect();
    let with_counts = || layers.iter().zip(&counts);
    let perf: Vec<_> = with_counts().map(|(layer, counts)| LayerPerf::of(layer.counts.layer(), counts)).collect();
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
            min_batch_stock: config.plain_min_batch,
            layers: with_counts().map(|(layer, counts)| layer_record(layer, counts, &tensors)).collect(),
        }),
    }
}

fn layer_record(layer: &Layer, counts: &Counts, tensors: &Tensors) -> LayerRecord {
    let number = layer.counts.layer();
    let of_layer = tensors.values().filter(|tensor| tensor.layer == number);
    LayerRecord {
        layer: number,
        n_expert: layer.counts.n_expert(),
        n_expert_used: layer.n_used,
        block: layer.info().shape.to_string(),
        fingerprint: combine_fingerprints(of_layer.map(|tensor| tensor.fingerprint.as_str())),
        batch_1: batch_counts(&counts.single),
        batch_2_up: batch_counts(&counts.multi),
        ranks: Vec::new(),
        resident: Vec::new(),
    }
}

fn batch_counts(counter: &Counter) -> BatchCounts {
    BatchCounts { calls: counter.calls, experts: without_zeros(counter.experts.iter().copied()) }
}

/// Counts of this session and, decayed, of those before; ranks, and who is resident now.
///
/// What an earlier session knew of layers that have not been computed, or have no cache now, is kept.
pub fn learnt(config: &Config, model: &Model) -> Profile {
    let mut profile = recorded(config, model);
    let in_file = model.starting().in_file();
    let earlier = in_file.as_ref().map(|(profile, _)| &**profile);
    for layer in &mut profile.layers {
        if let Some(earlier) = earlier.and_then(|demand| demand.layers.get(&layer.layer)) {
            add_earlier(layer, earlier);
        }
        // Readers take these two before `experts`: they would hide the earlier sessions.
        layer.hot_experts.clear();
        layer.cold_experts.clear();
    }
    let layers = model.layers();
    for record in profile.moe_hot.iter_mut().flat_map(|section| &mut section.layers) {
        let layer = layers.iter().find(|layer| layer.counts.layer() == record.layer);
        match layer.and_then(|layer| layer.cache()) {
            Some(cache) => {
                let state = cache.state();
                record.resident = state.slots.staying().map(|expert| expert.0.into()).collect();
                record.resident.sort_unstable();
                let ranks = state.policy.as_ref().map(|policy| policy.ranks()).unwrap_or_default();
                record.ranks = (0..).zip(ranks).filter(|&(_, rank)| rank > 0).collect();
            }
            None => {
                if let Some(earlier) = earlier.and_then(|demand| demand.layers.get(&record.layer)) {
                    keep(record, earlier);
                }
            }
        }
    }
    if let Some(earlier) = earlier {
        add_missing(&mut profile, earlier);
    }
    profile
}

fn add_earlier(layer: &mut LayerPerf, earlier: &RecordedLayer) {
    let weight = 0.5f64.powf(layer.calls as f64 / HALF_LIFE_CALLS);
    let mut counts: BTreeMap<u32, u64> = layer.experts.iter().copied().collect();
    for &(expert, count) in &earlier.requests {
        *counts.entry(expert).or_default() += (count as f64 * weight).round() as u64;
    }
    layer.experts = counts.into_iter().filter(|&(_, count)| count > 0).collect();
}

fn keep(record: &mut LayerRecord, earlier: &RecordedLayer) {
    let rank = |&(expert, rank): &Count| Some((expert, u16::try_from(rank).ok()?));
    record.ranks = earlier.ranks.iter().filter_map(rank).collect();
    record.resident.clone_from(&earlier.resident);
}

/// Layers that this session has not computed, as they were.
fn add_missing(profile: &mut Profile, earlier: &RecordedProfile) {
    for (&layer, earlier) in &earlier.layers {
        if profile.layers.iter().any(|known| known.layer == layer) {
            continue;
        }
        profile.layers.push(LayerPerf::new(layer, 0, Vec::new(), Vec::new(), earlier.requests.clone()));
        let (Some(section), Some(n_expert)) = (&mut profile.moe_hot, earlier.n_expert) else { continue };
        let mut record = LayerRecord {
            layer,
            n_expert,
            n_expert_used: profile.n_expert_used,
            block: "partial: not seen".into(),
            fingerprint: String::new(),
            batch_1: BatchCounts::default(),
            batch_2_up: BatchCounts::default(),
            ranks: Vec::new(),
            resident: Vec::new(),
        };
        keep(&mut record, earlier);
        section.layers.push(record);
    }
    profile.layers.sort_by_key(|layer| layer.layer);
    if let Some(section) = &mut profile.moe_hot {
        section.layers.sort_by_key(|record| record.layer);
    }
}
