//! Whether a profile is of the model it is to be used with.

use crate::gguf::ModelFile;
use crate::profile::Demand;
use std::collections::BTreeMap;
use std::io;

/// How a profile and a model contradict each other.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Mismatch {
    /// A tensor of both that is not the same.
    #[error("tensor {0} differs")]
    Tensor(String),
    /// They share no tensor.
    #[error("it has none of the {0} tensors that were recorded")]
    NothingShared(usize),
    /// A layer in the profile that has no experts in the model.
    #[error("it has no experts in layer {layer}")]
    Layer {
        /// Layer number.
        layer: u32,
    },
    /// Different numbers of experts.
    #[error("it has {ours} experts in {place}, not {theirs}")]
    Experts {
        /// Which layer, or the largest.
        place: String,
        /// In the model.
        ours: u64,
        /// In the profile.
        theirs: u32,
    },
    /// An expert in the profile that is not in the model.
    #[error("it has {ours} experts in layer {layer}, and the profile counts expert {expert}")]
    Expert {
        /// Layer number.
        layer: u32,
        /// In the model.
        ours: u64,
        /// Expert id in the profile.
        expert: u32,
    },
    /// The model's bytes cannot be read.
    #[error("its tensors cannot be read: {0}")]
    Unreadable(#[from] io::Error),
}

/// Compares a profile with a model: by its tensors' fingerprints, or, where the profile has none, by layers and experts.
///
/// Fails with the first contradiction, in the order of names or layers.
pub fn check_model(profile: &Demand, model: &ModelFile) -> Result<(), Mismatch> {
    match &profile.model {
        Some(recorded) if !recorded.tensors.is_empty() => same_tensors(&recorded.tensors, model),
        _ => same_layers(profile, model),
    }
}

fn same_layers(profile: &Demand, model: &ModelFile) -> Result<(), Mismatch> {
    let mut n_expert = BTreeMap::new();
    for tensor in model.experts() {
        let most = n_expert.entry(tensor.layer).or_insert(0);
        *most = tensor.n_expert.max(*most);
    }
    for (&layer, of_layer) in &profile.layers {
        let ours = *n_expert.get(&layer).ok_or(Mismatch::Layer { layer })?;
        if let Some(theirs) = of_layer.n_expert {
            same_number(format!("layer {layer}"), ours, theirs)?;
        }
        if let Some(&(expert, _)) = of_layer.requests.iter().find(|&&(expert, _)| u64::from(expert) >= ours) {
            return Err(Mismatch::Expert { layer, ours, expert });
        }
    }
    let most = n_expert.values().max().copied().unwrap_or(0);
    profile.n_expert.map_or(Ok(()), |theirs| same_number("its largest layer".into(), most, theirs))
}

fn same_number(place: String, ours: u64, theirs: u32) -> Result<(), Mismatch> {
    if ours == u64::from(theirs) { Ok(()) } else { Err(Mismatch::Experts { place, ours, theirs }) }
}

fn same_tensors(recorded: &BTreeMap<String, String>, model: &ModelFile) -> Result<(), Mismatch> {
    let mut shared = 0;
    for (name, theirs) in recorded {
        let Some(ours) = model.fingerprint(name)? else { continue };
        if ours != *theirs {
            return Err(Mismatch::Tensor(name.clone()));
        }
        shared += 1;
    }
    if shared == 0 { Err(Mismatch::NothingShared(recorded.len())) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::testing::moe;
    use std::fs;

    /// The model with these layers and experts, every byte of it `fill`.
    fn model(n_layers: u32, n_expert: u64, fill: u8) -> ModelFile {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, moe(n_layers, n_expert).finish(fill)).unwrap();
        ModelFile::open(&path).unwrap() // keeps the file open
    }

    fn demand(rest: &str) -> Demand {
        let text = format!(r#"{{"schema":"llama.cpp.moe_layer_perf.v1",{rest}}}"#);
        Demand::from_slice(text.as_bytes()).unwrap()
    }

    fn mismatch(demand: &Demand, model: &ModelFile) -> String {
        check_model(demand, model).unwrap_err().to_string()
    }

    #[test]
    fn recorded_tensors_decide_whether_it_is_the_same_model() {
        const TENSOR: &str = "blk.1.ffn_up_exps.weight";
        let id = model(2, 4, 1).fingerprint(TENSOR).unwrap().unwrap();
        let of = |tensor: &str| {
            let tensors = serde_json::json!({ tensor: id });
            demand(&format!(
                r#""layers":[{{"layer":1,"experts":[[0,1]]}}],"model":{{"fingerprint":"","tensors":{tensors}}}"#
            ))
        };
        assert!(check_model(&of(TENSOR), &model(2, 4, 1)).is_ok());
        assert!(mismatch(&of(TENSOR), &model(2, 4, 2)).contains(TENSOR), "other bytes");
        assert!(mismatch(&of(TENSOR), &model(2, 8, 1)).contains(TENSOR), "another shape");
        assert!(mismatch(&of("blk.7.x"), &model(2, 4, 1)).contains("none of the 1 tensors"));
    }

    #[test]
    fn without_recorded_tensors_layers_and_experts_decide() {
        let layers = r#""layers":[{"layer":0,"experts":[[2,1]]},{"layer":1,"experts":[[7,1]]}]"#;
        let plain = demand(layers);
        assert!(check_model(&plain, &model(2, 8, 0)).is_ok());
        assert!(mismatch(&plain, &model(1, 8, 0)).contains("no experts in layer 1"));
        assert!(mismatch(&plain, &model(2, 4, 0)).contains("4 experts in layer 1, and the profile counts expert 7"));
        let counted = demand(&format!(r#""n_expert":16,{layers}"#));
        assert!(mismatch(&counted, &model(2, 8, 0)).contains("8 experts in its largest layer, not 16"));
        let own = demand(&format!(r#"{layers},"moe_hot":{{"layers":[{{"layer":0,"n_expert":16}}]}}"#));
        assert!(mismatch(&own, &model(2, 8, 0)).contains("8 experts in layer 0, not 16"));
    }
}
