//! Profiles for unit tests.

use super::fingerprint::ModelId;
use super::format::SCHEMA;
use super::write::{LayerPerf, Profile, Summary};

/// A profile of the model whose one tensor has this fingerprint; `count` requests of expert 7.
pub(crate) fn profile(fingerprint: &str, count: u64) -> Profile {
    Profile {
        enabled: true,
        mode: "full".into(),
        schema: SCHEMA.into(),
        n_expert: 8,
        n_expert_used: 2,
        updates: 1,
        overflow_resets: 0,
        summary: Summary { layer_calls: 1, hot_slot_ratio: 0.0 },
        layers: vec![LayerPerf::new(0, 1, Vec::new(), vec![(7, count)], vec![(7, count)])],
        model: Some(ModelId {
            fingerprint: fingerprint.into(),
            tensors: [("blk.0.ffn_up_exps.weight".to_owned(), fingerprint.to_owned())].into(),
            shapes: [("blk.0.ffn_up_exps.weight".to_owned(), [4, 2, 8])].into(),
        }),
        moe_hot: None,
    }
}
