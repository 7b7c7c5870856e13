//! Whether a profile is of the model it is to be used with, or of another quantisation of it.

use crate::gguf::ModelFile;
use crate::profile::{ModelId, ModelMismatchError, ModelShape, RecordedProfile, fingerprint_in_file};
use crate::units::layer_number;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

/// A profile of another model than the one to be started.
#[derive(Debug, thiserror::Error)]
pub enum OtherModelError {
    /// They contradict each other.
    #[error("was recorded from another model than {model}: {what}; expected a profile of this model")]
    Mismatch {
        /// The model's file.
        model: PathBuf,
        /// How they differ.
        what: ModelMismatchError,
    },
    /// The model's bytes cannot be read.
    #[error("cannot be compared with {model}, whose tensors cannot be read: {error}; expected a whole model")]
    Unreadable {
        /// The model's file.
        model: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
}

/// What a profile that serves a model was recorded from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordedFrom {
    /// This model, as far as the profile says.
    ThisModel,
    /// The same model with other types.
    OtherQuantisation,
}

/// Compares a profile with a model: by its tensors' fingerprints, then by what all quantisations have in common, or, where the
/// profile names no tensors, by layers and experts.
///
/// Fails with the first contradiction.
pub fn check_model(profile: &RecordedProfile, model: &ModelFile) -> Result<RecordedFrom, OtherModelError> {
    let mismatch = |what| OtherModelError::Mismatch { model: model.path().into(), what };
    let recorded = match &profile.model {
        Some(recorded) if !recorded.tensors.is_empty() => recorded,
        _ => return same_layers(profile, model).map(|()| RecordedFrom::ThisModel).map_err(mismatch),
    };
    let is_same = has_tensors(model, recorded);
    if is_same.map_err(|error| OtherModelError::Unreadable { model: model.path().into(), error })? {
        return Ok(RecordedFrom::ThisModel);
    }
    let compared = profile.check_other_quantisation(recorded, &shape(model, profile, recorded));
    compared.map(|()| RecordedFrom::OtherQuantisation).map_err(mismatch)
}

/// Whether some of the recorded tensors are in the model, and all of those are equal.
fn has_tensors(model: &ModelFile, recorded: &ModelId) -> io::Result<bool> {
    let mut is_any = false;
    for (name, theirs) in &recorded.tensors {
        let Some(ours) = fingerprint_in_file(model, name)? else { continue };
        if ours != *theirs {
            return Ok(false);
        }
        is_any = true;
    }
    Ok(is_any)
}

/// What is to be compared of a model with a profile.
fn shape(model: &ModelFile, profile: &RecordedProfile, recorded: &ModelId) -> ModelShape {
    // Those at the end that predict further tokens are computed only where that is asked for.
    let n_computed = model
        .number("block_count")
        .zip(model.number("nextn_predict_layers"))
        .map_or(u64::MAX, |(all, last)| all.saturating_sub(last));
    let is_computed = |layer: u32| u64::from(layer) < n_computed || profile.layers.contains_key(&layer);
    let experts = model.experts().filter(|tensor| is_computed(tensor.layer));
    let mut tensors: BTreeMap<_, _> =
        experts.map(|tensor| (tensor.name.to_owned(), (tensor.layer, tensor.shape))).collect();
    // What was recorded need not be called as experts are.
    for name in recorded.tensors.keys().filter(|name| !name.contains("_exps")) {
        if let (Some(layer), Some(tensor)) = (layer_number(name), model.tensor(name)) {
            let [n_in, n_out, n_expert, _] = tensor.info.shape;
            tensors.insert(name.clone(), (layer, [n_in, n_out, n_expert]));
        }
    }
    let n_used = model.number("expert_used_count").and_then(|n_used| u32::try_from(n_used).ok());
    let by_layer = tensors.values().filter_map(|(layer, _)| Some((*layer, n_used?))).collect();
    ModelShape { tensors, n_used: by_layer, is_whole: true }
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
        let tensors = |model: &ModelFile| -> serde_json::Map<_, _> {
            let id = |name: &str| fingerprint_in_file(model, name).unwrap().unwrap();
            model.experts().map(|tensor| (tensor.name.to_owned(), id(tensor.name).into())).collect()
        };
        let of = |recorded: &ModelFile| {
            let (tensors, n_expert) = (tensors(recorded), recorded.experts().next().unwrap().n_expert);
            let layers: Vec<_> = recorded.experts().map(|tensor| tensor.layer).collect();
            let counted: Vec<_> = layers.iter().map(|n| format!(r#"{{"layer":{n},"experts":[[0,1]]}}"#)).collect();
            let own: Vec<_> = layers.iter().map(|n| format!(r#"{{"layer":{n},"n_expert":{n_expert}}}"#)).collect();
            profile(&format!(
                r#""layers":[{}],"model":{{"fingerprint":"","tensors":{}}},"moe_hot":{{"layers":[{}]}}"#,
                counted.join(","),
                serde_json::Value::Object(tensors),
                own.join(",")
            ))
        };
        let recorded = of(&model(2, 4, 1));
        assert_eq!(check_model(&recorded, &model(2, 4, 1)).unwrap(), RecordedFrom::ThisModel);
        assert_eq!(check_model(&recorded, &model(2, 4, 2)).unwrap(), RecordedFrom::OtherQuantisation, "other bytes");
        assert!(mismatch(&recorded, &model(2, 8, 1)).contains("8 experts in layer 0, not 4"));
        assert!(mismatch(&recorded, &model(1, 4, 2)).contains("no experts in layer 1"));
        assert!(mismatch(&recorded, &model(3, 4, 2)).contains("layer 2, and the profile does not know"));
        let elsewhere =
            r#""layers":[{"layer":1,"experts":[[0,1]]}],"model":{"fingerprint":"","tensors":{"blk.7.x":"1"}}"#;
        assert!(mismatch(&profile(elsewhere), &model(2, 4, 1)).contains("none of the 1 tensors"));
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
        assert!(fingerprint_in_file(&model, "blk.0.ffn_up_exps.weight").is_err());
        assert_eq!(fingerprint_in_file(&model, "blk.7.ffn_up_exps.weight").unwrap(), None);
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
