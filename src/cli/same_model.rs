//! Whether a profile is of the model it is to be used with.

use crate::gguf::ModelFile;
use crate::profile::{RecordedProfile, TensorId};
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

/// A profile of another model than the one to be started.
#[derive(Debug, thiserror::Error)]
#[error("was recorded from another model than {model}: {what}; expected a profile of this model")]
pub struct OtherModelError {
    /// The model's file.
    pub model: PathBuf,
    /// How they differ.
    pub what: ModelMismatchError,
}

/// How a profile and a model contradict each other.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ModelMismatchError {
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
pub fn check_model(profile: &RecordedProfile, model: &ModelFile) -> Result<(), OtherModelError> {
    compare(profile, model).map_err(|what| OtherModelError { model: model.path().into(), what })
}

fn compare(profile: &RecordedProfile, model: &ModelFile) -> Result<(), ModelMismatchError> {
    match &profile.model {
        Some(recorded) if !recorded.tensors.is_empty() => same_tensors(&recorded.tensors, model),
        _ => same_layers(profile, model),
    }
}

fn same_layers(profile: &RecordedProfile, model: &ModelFile) -> Result<(), ModelMismatchError> {
    let mut n_expert = BTreeMap::new();
    for tensor in model.experts() {
        let most = n_expert.entry(tensor.layer).or_insert(0);
        *most = tensor.n_expert.max(*most);
    }
    for (&layer, of_layer) in &profile.layers {
        let ours = *n_expert.get(&layer).ok_or(ModelMismatchError::Layer { layer })?;
        if let Some(theirs) = of_layer.n_expert {
            same_number(format!("layer {layer}"), ours, theirs)?;
        }
        if let Some(&(expert, _)) = of_layer.requests.iter().find(|&&(expert, _)| u64::from(expert) >= ours) {
            return Err(ModelMismatchError::Expert { layer, ours, expert });
        }
    }
    let most = n_expert.values().max().copied().unwrap_or(0);
    profile.n_expert.map_or(Ok(()), |theirs| same_number("its largest layer".into(), most, theirs))
}

fn same_number(place: String, ours: u64, theirs: u32) -> Result<(), ModelMismatchError> {
    if ours == u64::from(theirs) { Ok(()) } else { Err(ModelMismatchError::Experts { place, ours, theirs }) }
}

fn same_tensors(recorded: &BTreeMap<String, String>, model: &ModelFile) -> Result<(), ModelMismatchError> {
    let mut shared = 0;
    for (name, theirs) in recorded {
        let Some(ours) = fingerprint(model, name)? else { continue };
        if ours != *theirs {
            return Err(ModelMismatchError::Tensor(name.clone()));
        }
        shared += 1;
    }
    if shared == 0 { Err(ModelMismatchError::NothingShared(recorded.len())) } else { Ok(()) }
}

/// What the plugin will find to be the fingerprint of the model's tensor `name`. `None` if there is no such tensor.
///
/// Fails if its data cannot be read.
fn fingerprint(model: &ModelFile, name: &str) -> io::Result<Option<String>> {
    let Some(tensor) = model.tensor(name) else { return Ok(None) };
    let n_bytes = usize::try_from(tensor.info.n_bytes).map_err(io::Error::other)?;
    let failed = OnceCell::new();
    let read = |offset: usize, len: usize| {
        let mut bytes = vec![0; len]; // a sample
        let read = tensor.read_exact_at(&mut bytes, offset as u64);
        read.map_err(|error| failed.set(error)).ok().map(|()| bytes)
    };
    let id = TensorId { name, type_name: tensor.info.kind.name, shape: tensor.info.shape, n_bytes };
    let fingerprint = id.fingerprint(read);
    failed.into_inner().map_or(Ok(Some(fingerprint)), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::testing::type_facts;
    use crate::gguf::Type;
    use crate::gguf::testing::moe;
    use std::fs;

    /// The model with these layers and experts, every byte of it `fill`.
    fn model(n_layers: u32, n_expert: u64, fill: u8) -> ModelFile {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, moe(n_layers, n_expert).finish(fill)).unwrap();
        ModelFile::open(&path).unwrap() // keeps the file open
    }

    fn profile(rest: &str) -> RecordedProfile {
        let text = format!(r#"{{"schema":"llama.cpp.moe_layer_perf.v1",{rest}}}"#);
        RecordedProfile::from_slice(text.as_bytes()).unwrap()
    }

    fn mismatch(profile: &RecordedProfile, model: &ModelFile) -> String {
        check_model(profile, model).unwrap_err().to_string()
    }

    #[test]
    fn recorded_tensors_decide_whether_it_is_the_same_model() {
        const TENSOR: &str = "blk.1.ffn_up_exps.weight";
        let id = fingerprint(&model(2, 4, 1), TENSOR).unwrap().unwrap();
        let of = |tensor: &str| {
            let tensors = serde_json::json!({ tensor: id });
            profile(&format!(
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
        let plain = profile(layers);
        assert!(check_model(&plain, &model(2, 8, 0)).is_ok());
        assert!(mismatch(&plain, &model(1, 8, 0)).contains("no experts in layer 1"));
        assert!(mismatch(&plain, &model(2, 4, 0)).contains("4 experts in layer 1, and the profile counts expert 7"));
        let counted = profile(&format!(r#""n_expert":16,{layers}"#));
        assert!(mismatch(&counted, &model(2, 8, 0)).contains("8 experts in its largest layer, not 16"));
        let own = profile(&format!(r#"{layers},"moe_hot":{{"layers":[{{"layer":0,"n_expert":16}}]}}"#));
        assert!(mismatch(&own, &model(2, 8, 0)).contains("8 experts in layer 0, not 16"));
    }

    #[test]
    fn data_that_is_not_there_is_an_error_and_not_another_fingerprint() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let file = moe(1, 4).finish(1);
        fs::write(&path, &file[..file.len() - 40]).unwrap();
        let model = ModelFile::open(&path).unwrap();
        assert!(fingerprint(&model, "blk.0.ffn_up_exps.weight").is_err());
        assert_eq!(fingerprint(&model, "blk.7.ffn_up_exps.weight").unwrap(), None);
    }

    /// A fingerprint holds the type's name, so the launcher and the plugin must agree on it.
    #[test]
    fn gguf_says_of_every_type_what_ggml_says() {
        for id in 0..100 {
            let ours = Type::of(id).map(|known| (known.name.to_owned(), known.block, known.bytes));
            assert_eq!(ours, type_facts(id), "type {id}");
        }
    }
}
