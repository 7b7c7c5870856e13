//! JSON of schema `llama.cpp.moe_layer_perf.v1`, our own, and of `llama.cpp.moe_layer_opt_perf.v1`, with the same fields.

use super::{Format, n_expert, n_used};
use crate::profile::{
    BatchCounts, LayerPerf, LayerRecord, MoeHot, OPT_SCHEMA, Profile, RecordedProfile, SCHEMA, Summary,
};
use anyhow::{Context, Result};
use serde::Deserialize;

/// What the section says of a layer that nobody has looked at.
const UNKNOWN_BLOCK: &str = "unknown: imported";
/// Version of our own section.
const SECTION_FORMAT: u32 = 1;
/// llama.cpp's threshold, as far as it is known of a recording.
const MIN_BATCH_STOCK: u32 = 32;

/// Only the field that says which of the two it is.
#[derive(Deserialize)]
struct SchemaOnly {
    schema: String,
}

/// Reads a profile of either schema.
pub fn read(text: &[u8]) -> Result<(RecordedProfile, Format)> {
    let profile = RecordedProfile::from_slice_of_either(text)?;
    let is_opt = serde_json::from_slice(text).is_ok_and(|SchemaOnly { schema }| schema == OPT_SCHEMA);
    Ok((profile, if is_opt { Format::OptPerfJson } else { Format::PerfJson }))
}

/// Writes a profile. Who was resident and what a cache has learnt is left out: that is of one session.
pub fn write(profile: &RecordedProfile, is_opt: bool) -> Result<Vec<u8>> {
    let mut layers = Vec::new();
    let mut own = Vec::new();
    for (&layer, recorded) in &profile.layers {
        let requests: u64 = recorded.requests.iter().map(|&(_, count)| count).sum();
        let used = n_used(profile, recorded);
        // Where it is not said, the calls that so many requests take.
        let by_requests = || used.map_or(0, |used| requests.div_ceil(used.into()));
        let calls = if recorded.calls > 0 { recorded.calls } else { by_requests() };
        layers.push(LayerPerf::new(layer, calls, Vec::new(), recorded.requests.clone(), recorded.requests.clone()));
        own.push(LayerRecord {
            layer,
            n_expert: n_expert(profile, recorded),
            n_expert_used: used.unwrap_or(0),
            block: UNKNOWN_BLOCK.into(),
            fingerprint: String::new(),
            batch_1: BatchCounts::default(),
            batch_2_up: BatchCounts::default(),
            ranks: Vec::new(),
            resident: Vec::new(),
        });
    }
    let are_alike = own.iter().all(|layer| {
        Some(layer.n_expert) == own.first().map(|first| first.n_expert)
            && Some(layer.n_expert_used) == own.first().map(|first| first.n_expert_used)
    });
    let file = Profile {
        enabled: true,
        mode: "full".into(),
        schema: if is_opt { OPT_SCHEMA } else { SCHEMA }.into(),
        n_expert: own.iter().map(|layer| layer.n_expert).max().unwrap_or(0),
        n_expert_used: own.iter().map(|layer| layer.n_expert_used).max().unwrap_or(0),
        updates: layers.iter().map(|layer| layer.calls).max().unwrap_or(0),
        overflow_resets: 0,
        summary: Summary { layer_calls: layers.iter().map(|layer| layer.calls).sum(), hot_slot_ratio: 0.0 },
        layers,
        model: profile.model.clone(),
        // Only this section can say that layers differ.
        moe_hot: (!are_alike).then_some(MoeHot {
            format: SECTION_FORMAT,
            min_batch_stock: MIN_BATCH_STOCK,
            layers: own,
        }),
    };
    let mut text = serde_json::to_vec(&file).context("JSON")?;
    text.push(b'\n');
    Ok(text)
}
