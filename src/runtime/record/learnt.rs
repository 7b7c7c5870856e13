//! What a model's cache has learnt, as a profile for the next session.

use crate::options::Config;
use crate::profile::{BatchCounts, Count, LayerPerf, LayerRecord, Profile, RecordedLayer, RecordedProfile};
use crate::runtime::model::Model;
use std::collections::BTreeMap;

/// After so many calls of a layer the counts that its session began with weigh half.
const HALF_LIFE_CALLS: f64 = 10_000.0;

/// Counts of this session and, decayed, of those before; ranks, and who is resident now.
///
/// What an earlier session knew of layers that have not been seen, or have no cache now, is kept.
pub fn profile(config: &Config, model: &Model) -> Profile {
    let mut profile = model.profile(config.offload_min_batch);
    let earlier = model.began_with();
    for layer in &mut profile.layers {
        if let Some(earlier) = earlier.and_then(|profile| profile.layers.get(&layer.layer)) {
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
                let ranks = state.learner.as_ref().map(|learner| learner.ranks()).unwrap_or_default();
                record.ranks = (0..).zip(ranks).filter(|&(_, rank)| rank > 0).collect();
            }
            None => {
                if let Some(earlier) = earlier.and_then(|profile| profile.layers.get(&record.layer)) {
                    keep(record, earlier);
                }
            }
        }
    }
    if let Some(earlier) = earlier {
        add_unseen(&mut profile, earlier);
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
fn add_unseen(profile: &mut Profile, earlier: &RecordedProfile) {
    for (&layer, known) in &earlier.layers {
        if profile.layers.iter().any(|seen| seen.layer == layer) {
            continue;
        }
        profile.layers.push(LayerPerf::new(layer, 0, Vec::new(), Vec::new(), known.requests.clone()));
        let (Some(section), Some(n_expert)) = (&mut profile.moe_hot, known.n_expert) else { continue };
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
        keep(&mut record, known);
        section.layers.push(record);
    }
    profile.layers.sort_by_key(|layer| layer.layer);
    if let Some(section) = &mut profile.moe_hot {
        section.layers.sort_by_key(|record| record.layer);
    }
}
