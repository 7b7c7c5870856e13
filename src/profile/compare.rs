//! Whether a profile serves a model: it was recorded from it, or from another quantisation of it.

use super::fingerprint::ModelId;
use super::read::RecordedProfile;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Shape of an expert tensor in ggml order, `[n_in, n_out, n_expert]`.
pub type ExpertShape = [u64; 3];

/// What of a model every quantisation of it has in common.
#[derive(Debug, Default)]
pub struct ModelShape {
    /// Expert tensors by name: layer number and shape.
    pub tensors: BTreeMap<String, (u32, ExpertShape)>,
    /// Experts per token, by layer number, as far as it is known.
    pub n_used: BTreeMap<u32, u32>,
    /// Whether these are all of the model's layers with experts; otherwise those that we were given.
    pub is_whole: bool,
}

/// How a profile and a model contradict each other.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ModelMismatchError {
    /// They share no tensor.
    #[error("it has none of the {0} tensors that were recorded")]
    NothingShared(usize),
    /// A tensor in the profile that the model does not have, or the other way round.
    #[error("tensor {name} is in {place} only")]
    Tensor {
        /// Its name.
        name: String,
        /// Where it is.
        place: &'static str,
    },
    /// A layer in the profile that has no experts in the model.
    #[error("it has no experts in layer {layer}")]
    Layer {
        /// Layer number.
        layer: u32,
    },
    /// A layer of the model that is not in the profile.
    #[error("it has experts in layer {layer}, and the profile does not know that layer")]
    UnknownLayer {
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
    /// Different numbers of experts per token.
    #[error("it uses {ours} experts per token in layer {layer}, not {theirs}")]
    Used {
        /// Layer number.
        layer: u32,
        /// In the model.
        ours: u32,
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
    /// A tensor of both that has another shape.
    #[error("tensor {name} is {ours:?}, not {theirs:?}")]
    Shape {
        /// Its name.
        name: String,
        /// In the model.
        ours: ExpertShape,
        /// In the profile.
        theirs: ExpertShape,
    },
}

impl RecordedProfile {
    /// Whether it can have been recorded from another quantisation of this model: the same layers, experts, experts per token
    /// and tensors, whatever their types and bytes.
    ///
    /// Fails with the first contradiction.
    pub fn check_other_quantisation(&self, recorded: &ModelId, model: &ModelShape) -> Result<(), ModelMismatchError> {
        if !recorded.tensors.keys().any(|name| model.tensors.contains_key(name)) {
            return Err(ModelMismatchError::NothingShared(recorded.tensors.len()));
        }
        let layers: BTreeSet<u32> = model.tensors.values().map(|(layer, _)| *layer).collect();
        let mut in_profile = self.layers.keys();
        if let Some(&layer) = in_profile.find(|layer| model.is_whole && !layers.contains(layer)) {
            return Err(ModelMismatchError::Layer { layer });
        }
        if let Some(&layer) = layers.iter().find(|layer| !self.layers.contains_key(layer)) {
            return Err(ModelMismatchError::UnknownLayer { layer });
        }
        for (layer, shape) in model.tensors.values() {
            self.check_layer(*layer, shape[2], model.n_used.get(layer).copied())?;
        }
        for (name, &(_, ours)) in &model.tensors {
            if !recorded.tensors.contains_key(name) {
                return Err(ModelMismatchError::Tensor { name: name.clone(), place: "the model" });
            }
            match recorded.shapes.get(name) {
                Some(&theirs) if theirs != ours => {
                    return Err(ModelMismatchError::Shape { name: name.clone(), ours, theirs });
                }
                _ => {}
            }
        }
        match recorded.tensors.keys().find(|name| model.is_whole && !model.tensors.contains_key(*name)) {
            Some(name) => Err(ModelMismatchError::Tensor { name: name.clone(), place: "the profile" }),
            None => Ok(()),
        }
    }

    fn check_layer(&self, layer: u32, n_expert: u64, n_used: Option<u32>) -> Result<(), ModelMismatchError> {
        let Some(known) = self.layers.get(&layer) else { return Ok(()) };
        if let Some(theirs) = known.n_expert.filter(|&theirs| u64::from(theirs) != n_expert) {
            return Err(ModelMismatchError::Experts { place: format!("layer {layer}"), ours: n_expert, theirs });
        }
        match (n_used, known.n_used) {
            (Some(ours), Some(theirs)) if ours != theirs => Err(ModelMismatchError::Used { layer, ours, theirs }),
            _ => Ok(()),
        }
    }
}

/// What a user is told when the profile at `path` serves although it is of another quantisation. `learns`: it is written to.
pub fn other_quantisation(path: &Path, learns: bool) -> String {
    let learns = if learns { "; what is learnt is saved there, which makes it this model's profile" } else { "" };
    format!("{} was recorded from another quantisation of this model: taken to begin with{learns}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(layers: u32, n_expert: u32, n_used: u32, shape: ExpertShape) -> RecordedProfile {
        let of_layer = |layer: u32| serde_json::json!({"layer": layer, "experts": [[0, 1]]});
        let own = |layer: u32| serde_json::json!({"layer": layer, "n_expert": n_expert, "n_expert_used": n_used});
        let ids = |value: serde_json::Value| -> serde_json::Map<_, _> {
            (0..layers).map(|layer| (format!("blk.{layer}.ffn_up_exps.weight"), value.clone())).collect()
        };
        let text = serde_json::json!({
            "schema": "llama.cpp.moe_layer_perf.v1",
            "layers": (0..layers).map(of_layer).collect::<Vec<_>>(),
            "model": {"fingerprint": "a", "tensors": ids("1".into()), "shapes": ids(shape.to_vec().into())},
            "moe_hot": {"layers": (0..layers).map(own).collect::<Vec<_>>()},
        });
        RecordedProfile::from_slice(text.to_string().as_bytes()).unwrap()
    }

    fn model(layers: std::ops::Range<u32>, shape: ExpertShape, n_used: u32, is_whole: bool) -> ModelShape {
        ModelShape {
            tensors: layers.clone().map(|n| (format!("blk.{n}.ffn_up_exps.weight"), (n, shape))).collect(),
            n_used: layers.map(|layer| (layer, n_used)).collect(),
            is_whole,
        }
    }

    #[test]
    fn everything_but_types_and_bytes_must_agree() {
        let shape = [8, 4, 16];
        let profile = profile(3, 16, 2, shape);
        let check = |model: &ModelShape| match profile.check_other_quantisation(profile.model.as_ref().unwrap(), model)
        {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        };
        assert_eq!(check(&model(0..3, shape, 2, true)), "");
        assert_eq!(check(&model(1..3, shape, 2, false)), "", "some layers are on a GPU");
        for (model, said) in [
            (model(1..3, shape, 2, true), "no experts in layer 0"),
            (model(0..4, shape, 2, true), "experts in layer 3, and the profile does not know"),
            (model(0..4, shape, 2, false), "experts in layer 3, and the profile does not know"),
            (model(0..3, [8, 4, 32], 2, true), "32 experts in layer 0, not 16"),
            (model(0..3, shape, 4, true), "uses 4 experts per token in layer 0, not 2"),
            (model(0..3, [8, 6, 16], 2, true), "ffn_up_exps.weight is [8, 6, 16], not [8, 4, 16]"),
            (model(7..9, shape, 2, true), "none of the 3 tensors"),
        ] {
            assert!(check(&model).contains(said), "{said}: {}", check(&model));
        }
        let mut more = model(0..3, shape, 2, true);
        more.tensors.insert("blk.2.ffn_gate_exps.weight".into(), (2, shape));
        assert!(check(&more).contains("tensor blk.2.ffn_gate_exps.weight is in the model only"));
        let name = more.tensors.remove("blk.2.ffn_up_exps.weight").map(|_| "blk.2.ffn_up_exps.weight").unwrap();
        more.tensors.remove("blk.2.ffn_gate_exps.weight");
        more.tensors.insert("blk.2.ffn_gate_up_exps.weight".into(), (2, shape));
        assert!(check(&more).contains("blk.2.ffn_gate_up_exps.weight") || check(&more).contains(name));
    }
}
