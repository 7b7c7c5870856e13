//! What a model's cache has learnt, as a profile for the next session.

use super::model::Model;
use crate::config::Config;
use crate::routing::{Demand, LayerPerf, Profile};
use std::collections::BTreeMap;

/// After so many calls of a layer the counts that its session began with weigh half.
const HALF_LIFE_CALLS: f64 = 10_000.0;

/// Counts of this session and, decayed, of those before; ranks, and who is resident now.
pub fn profile(config: &Config, model: &Model) -> Profile {
    let mut profile = model.profile(config.offload_min_batch);
    for layer in &mut profile.layers {
        add_earlier(layer, model.began_with());
        // Readers take these two before `experts`: they would hide the earlier sessions.
        layer.hot_experts.clear();
        layer.cold_experts.clear();
    }
    let layers = model.layers();
    for record in profile.moe_hot.iter_mut().flat_map(|section| &mut section.layers) {
        let layer = layers.iter().find(|layer| layer.counts.layer() == record.layer);
        let Some(cache) = layer.and_then(|layer| layer.cache()) else { continue };
        let state = cache.state();
        record.resident = state.slots.staying().map(|expert| expert.0.into()).collect();
        record.resident.sort_unstable();
        let ranks = state.learner.as_ref().map(|learner| learner.ranks()).unwrap_or_default();
        record.ranks = (0..).zip(ranks).filter(|&(_, rank)| rank > 0).collect();
    }
    profile
}

fn add_earlier(layer: &mut LayerPerf, earlier: Option<&Demand>) {
    let Some(earlier) = earlier.and_then(|demand| demand.layers.get(&layer.layer)) else { return };
    let weight = 0.5f64.powf(layer.calls as f64 / HALF_LIFE_CALLS);
    let mut counts: BTreeMap<u32, u64> = layer.experts.iter().copied().collect();
    for &(expert, count) in &earlier.requests {
        *counts.entry(expert).or_default() += (count as f64 * weight).round() as u64;
    }
    layer.experts = counts.into_iter().filter(|&(_, count)| count > 0).collect();
}
