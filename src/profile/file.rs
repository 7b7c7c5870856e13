//! The profile file (experts.json): schema `llama.cpp.moe_layer_perf.v1`, plus our `model` and `moe_hot`.
//!
//! `profiles/README.md` describes every field. Other readers ignore what they do not know; so do we.

use super::fault::MAX_MIB;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// The schema that other programs read and write.
pub const SCHEMA: &str = "llama.cpp.moe_layer_perf.v1";
/// Anything larger is something else.
const MAX_BYTES: u64 = MAX_MIB << 20;

/// `[expert, count]`.
pub type Count = (u32, u64);

/// The whole file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// Whether anything was recorded.
    #[serde(default)]
    pub enabled: bool,
    /// Always `full`.
    #[serde(default)]
    pub mode: String,
    /// [`SCHEMA`].
    pub schema: String,
    /// Experts per layer; the largest where layers differ.
    #[serde(default)]
    pub n_expert: u32,
    /// Experts per token; the largest where layers differ.
    #[serde(default)]
    pub n_expert_used: u32,
    /// Batches recorded: calls of the layer that was called most.
    #[serde(default)]
    pub updates: u64,
    /// Always 0: our counters are 64 bits wide.
    #[serde(default)]
    pub overflow_resets: u64,
    /// Totals.
    #[serde(default)]
    pub summary: Summary,
    /// Per layer, in the schema's own fields.
    pub layers: Vec<LayerPerf>,
    /// Which model was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelId>,
    /// What other programs do not know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe_hot: Option<MoeHot>,
}

/// Totals over all layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Expert FFNs computed.
    #[serde(default)]
    pub layer_calls: u64,
    /// Share of requests that ran on a device.
    #[serde(default)]
    pub hot_slot_ratio: f64,
}

/// One layer in the schema's own fields. A "slot" here is one request: one (token, expert) pair.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerPerf {
    /// Layer number.
    pub layer: u32,
    /// Expert FFNs computed.
    #[serde(default)]
    pub calls: u64,
    /// Requests that ran on a device.
    #[serde(default)]
    pub hot_slots_total: u64,
    /// Requests that ran on the CPU.
    #[serde(default)]
    pub cold_slots_total: u64,
    /// The same per call.
    #[serde(default)]
    pub hot_slots_per_call: f64,
    /// The same per call.
    #[serde(default)]
    pub cold_slots_per_call: f64,
    /// Share of requests that ran on a device.
    #[serde(default)]
    pub hot_slot_ratio: f64,
    /// Requests per expert, without zeros.
    #[serde(default)]
    pub experts: Vec<Count>,
    /// Those that ran on a device.
    #[serde(default)]
    pub hot_experts: Vec<Count>,
    /// Those that ran on the CPU.
    #[serde(default)]
    pub cold_experts: Vec<Count>,
}

impl LayerPerf {
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

/// `part` of `whole`; 0 of nothing.
pub fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Which model a profile belongs to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelId {
    /// 16 hex digits over all recorded tensors.
    pub fingerprint: String,
    /// Each recorded expert tensor's own fingerprint, by name.
    #[serde(default)]
    pub tensors: BTreeMap<String, String>,
}

impl ModelId {
    /// Whether both name the same model: they share tensors, and all that they share are equal.
    pub fn is_same_model(&self, other: &ModelId) -> bool {
        let mut shared = self.tensors.iter().filter_map(|(name, id)| Some((id, other.tensors.get(name)?))).peekable();
        shared.peek().is_some() && shared.all(|(a, b)| a == b)
    }
}

/// Our own section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeHot {
    /// Version of this section.
    pub format: u32,
    /// Batches of this many tokens and more are stock's and were not seen.
    pub min_batch_stock: u32,
    /// Per layer.
    pub layers: Vec<LayerRecord>,
}

/// One layer in our own section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerRecord {
    /// Layer number.
    pub layer: u32,
    /// Experts in this layer.
    pub n_expert: u32,
    /// Experts per token in this layer.
    pub n_expert_used: u32,
    /// What the layer's expert FFN looked like, see [`crate::moe::Shape`].
    pub block: String,
    /// 16 hex digits over the layer's tensors.
    pub fingerprint: String,
    /// Batches of one token.
    pub batch_1: BatchCounts,
    /// Batches of two tokens up to `min_batch_stock` minus one.
    pub batch_2_up: BatchCounts,
    /// What a cache that learns knows of each expert: its rank among them, 1 and up, the best highest; without zeros.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<(u32, u16)>,
    /// Experts that such a cache held on its device when this was written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resident: Vec<u32>,
}

/// Counts for one kind of batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BatchCounts {
    /// Expert FFNs computed.
    pub calls: u64,
    /// Requests per expert, without zeros.
    pub experts: Vec<Count>,
}

impl Profile {
    /// Reads a profile.
    ///
    /// Fails when the file cannot be read, is larger than 64 MiB, or is not JSON with our schema.
    pub fn read(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { path: path.into(), action: "cannot read", error: source };
        let not = |reason: String| Error::NotAProfile { path: path.into(), reason };
        let file = File::open(path).map_err(io)?;
        let mut text = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(io)?;
        if text.len() as u64 > MAX_BYTES {
            return Err(not(format!("larger than {MAX_MIB} MiB")));
        }
        let profile: Self = serde_json::from_slice(&text).map_err(|error| not(error.to_string()))?;
        if profile.schema != SCHEMA {
            return Err(not(format!("schema is {:?}, expected {SCHEMA:?}", profile.schema)));
        }
        Ok(profile)
    }

    /// The profile that a path holds now; `None` if nothing or an empty file is there.
    ///
    /// Fails where something else is: that is not ours to replace.
    pub fn read_if_any(path: &Path) -> Result<Option<Self>> {
        let not = |reason: &str| Error::NotAProfile { path: path.into(), reason: reason.into() };
        match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { path: path.into(), action: "cannot look at it", error: source }),
            Ok(meta) if meta.is_dir() => Err(not("it is a folder")),
            Ok(meta) if !meta.is_file() => Err(not("it is not a regular file")),
            Ok(meta) if meta.len() == 0 => Ok(None),
            Ok(_) => Self::read(path).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_another_program_with_the_schemas_fields_alone_is_read() {
        let text = r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":3,"experts":[[5,9]],"extra":1}]}"#;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("experts.json");
        fs::write(&path, text).unwrap();
        let profile = Profile::read(&path).unwrap();
        assert_eq!((profile.layers[0].layer, &profile.layers[0].experts[..]), (3, &[(5, 9)][..]));
    }

    #[test]
    fn only_nothing_an_empty_file_or_a_profile_may_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert!(Profile::read_if_any(&path).unwrap().is_none());
        fs::write(&path, "").unwrap();
        assert!(Profile::read_if_any(&path).unwrap().is_none());
        fs::write(&path, "GGUF....").unwrap();
        assert!(Profile::read_if_any(&path).is_err());
        assert!(Profile::read_if_any(folder.path()).unwrap_err().to_string().contains("folder"));
        assert!(Profile::read_if_any(Path::new("/dev/null")).unwrap_err().to_string().contains("regular"));
    }

    #[test]
    fn what_is_not_a_profile_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for (text, reason) in [
            ("", "EOF"),
            ("{}", "schema"),
            (r#"{"schema":"other.v2","layers":[]}"#, "other.v2"),
            (r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":-1}]}"#, "-1"),
        ] {
            fs::write(&path, text).unwrap();
            let message = Profile::read(&path).unwrap_err().to_string();
            assert!(message.contains(reason) && message.contains("file"), "{text:?}: {message}");
        }
    }

    #[test]
    fn models_are_the_same_if_all_shared_tensors_are_and_there_are_some() {
        let id = |tensors: &[(&str, &str)]| ModelId {
            fingerprint: String::new(),
            tensors: tensors.iter().map(|&(name, id)| (name.into(), id.into())).collect(),
        };
        let all = id(&[("a", "1"), ("b", "2")]);
        assert!(all.is_same_model(&id(&[("a", "1"), ("c", "9")])), "recorded with fewer layers in our buffer");
        assert!(!all.is_same_model(&id(&[("a", "1"), ("b", "9")])));
        assert!(!all.is_same_model(&id(&[("c", "1")])));
    }
}
