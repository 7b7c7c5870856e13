//! What a model's file says of its experts, and of what else a GPU would hold.
//!
//! Which operations a layer's experts go through shows only when the model runs; the plugin's log says what it found.

use super::size;
use crate::cache::{LayerDemand, Spare, TensorBytes, gains_nothing};
use crate::gguf::{Fact, ModelFile, TensorInfo};
use crate::units::{Bytes, Layer, layer_number};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::path::Path;

/// What names of expert weights hold, in every architecture of llama.cpp.
const EXPERTS: &str = "_exps";
/// Chunk experts (GroveMoE), which the plugin leaves to the CPU.
const CHUNK_EXPERTS: &str = "_chexps";
/// Looked up row by row, which llama.cpp does on the CPU.
const EMBEDDINGS: [&str; 2] = ["token_embd.weight", "per_layer_token_embd.weight"];
/// The output projection; a model without one uses its embeddings, on the GPU then.
const OUTPUT: &str = "output.weight";
/// Bytes of one element of the KV cache, f16 unless told otherwise.
const KV_ELEMENT: u64 = 2;
/// What a backend may want behind the last expert of a tensor; CUDA does.
const PADDING: Bytes = Bytes(512);
/// What backends align tensors to; CUDA does.
const ALIGNMENT: Bytes = Bytes(128);

/// A model's experts and the rest of it.
pub struct Model {
    /// `general.name`, else the file's name.
    pub name: String,
    /// `general.architecture`.
    pub architecture: String,
    /// Blocks of the model, with experts or without.
    pub n_blocks: Option<u64>,
    /// Layers with experts, by number.
    pub layers: Vec<ExpertLayer>,
    /// Weights besides experts that a GPU holds when all layers are offloaded.
    pub other: Bytes,
    /// Keys and values of one token, as if every block had full attention in f16; `None` if the file does not say.
    pub kv_per_token: Option<Bytes>,
}

/// One layer's experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertLayer {
    /// The N of `blk.N.`.
    pub layer: u32,
    /// Experts.
    pub n_expert: u64,
    /// Experts per token, if the file says so.
    pub n_used: Option<u16>,
    /// Tensors with a part for each expert.
    pub tensors: Vec<ExpertTensor>,
    /// Bytes of chunk experts beside them.
    pub chunk_bytes: Bytes,
}

/// One tensor of a layer's experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertTensor {
    /// Without `blk.N.`.
    pub name: String,
    /// ggml's name.
    pub kind: &'static str,
    /// One expert's part, in ggml order.
    pub shape: Vec<u64>,
    /// Experts.
    pub n_expert: u64,
    /// All experts together.
    pub bytes: Bytes,
}

impl ExpertLayer {
    /// Bytes of one expert in all tensors.
    pub fn expert_bytes(&self) -> Bytes {
        Bytes(self.tensors.iter().map(|tensor| tensor.bytes.0 / tensor.n_expert.max(1)).sum())
    }

    /// Bytes of all experts.
    pub fn bytes(&self) -> Bytes {
        self.tensors.iter().map(|tensor| tensor.bytes).sum::<Bytes>().saturating_add(self.chunk_bytes)
    }

    /// Why the layer cannot be cached, as far as the file tells; `None` if nothing speaks against it.
    pub fn refusal(&self) -> Option<String> {
        if let Some(other) = self.tensors.iter().find(|tensor| tensor.n_expert != self.n_expert) {
            return Some(format!("{} has {} experts, others {}", other.name, other.n_expert, self.n_expert));
        }
        let Ok(n_expert) = u16::try_from(self.n_expert) else {
            return Some(format!("more than {} experts", u16::MAX));
        };
        if u16::try_from(self.layer).is_err() {
            return Some(format!("layer number above {}", u16::MAX));
        }
        let n_used = self.n_used?;
        if n_used > n_expert {
            return Some(format!("{n_used} experts per token of only {n_expert}"));
        }
        let bytes = self.expert_bytes();
        gains_nothing(n_used, n_expert, bytes).then(|| {
            format!("few large experts ({n_used} of {n_expert}, {}): keep whole layers on the GPU", size::show(bytes))
        })
    }

    /// What a plan must know of it; `None` if it cannot be cached or its experts per token are unknown.
    pub fn demand(&self, n_used: Option<u16>, counts: Option<Vec<u64>>) -> Option<LayerDemand> {
        if self.refusal().is_some() {
            return None;
        }
        let tensor = |tensor: &ExpertTensor| TensorBytes {
            per_expert: Bytes(tensor.bytes.0 / tensor.n_expert.max(1)),
            padding: PADDING,
        };
        Some(LayerDemand {
            layer: Layer(u16::try_from(self.layer).ok()?),
            n_expert: u16::try_from(self.n_expert).ok()?,
            n_used: n_used.or(self.n_used)?,
            tensors: self.tensors.iter().map(tensor).collect(),
            alignment: ALIGNMENT,
            spare: Spare::One,
            counts,
        })
    }
}

impl Model {
    /// Looks through a model's files. Fails if it is not whole or has no experts.
    pub fn read(path: &Path) -> Result<(Self, ModelFile)> {
        let file = ModelFile::open(path)?;
        file.check_whole()?;
        let model = Self::of(&file, path).with_context(|| path.display().to_string())?;
        Ok((model, file))
    }

    fn of(file: &ModelFile, path: &Path) -> Result<Self> {
        let n_used = |layer: u32| {
            let n = match file.fact("expert_used_count")? {
                Fact::Number(n) => n,
                Fact::Numbers(by_block) => by_block.get(layer as usize)?,
                Fact::Text(_) => return None,
            };
            u16::try_from(*n).ok().filter(|&n| n > 0)
        };
        let mut layers = BTreeMap::<u32, ExpertLayer>::new();
        let mut other = Bytes::ZERO;
        let has_output = file.tensor(OUTPUT).is_some();
        for (name, info) in file.tensors() {
            let bytes = Bytes(info.n_bytes);
            let layer = layer_number(name);
            if let Some(layer) = layer.filter(|_| name.contains(CHUNK_EXPERTS)) {
                let of_layer = layers.entry(layer).or_insert_with(|| ExpertLayer::new(layer, n_used(layer)));
                of_layer.chunk_bytes = of_layer.chunk_bytes.saturating_add(bytes);
            } else if let Some((layer, tensor)) = layer.zip(expert_tensor(name, info)) {
                let of_layer = layers.entry(layer).or_insert_with(|| ExpertLayer::new(layer, n_used(layer)));
                of_layer.n_expert = of_layer.n_expert.max(tensor.n_expert);
                of_layer.tensors.push(tensor);
            } else if !EMBEDDINGS.contains(&name) || (name == EMBEDDINGS[0] && !has_output) {
                other = other.saturating_add(bytes);
            }
        }
        layers.retain(|_, layer| layer.tensors.iter().any(|tensor| tensor.shape.len() == 2)); // more than biases
        ensure!(
            layers.values().any(|layer| layer.bytes() > Bytes::ZERO),
            "has no experts; expected a mixture-of-experts model"
        );
        let file_name = || path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(Self {
            name: file.text("general.name").map_or_else(file_name, str::to_owned),
            architecture: file.text("general.architecture").unwrap_or("unknown").to_owned(),
            n_blocks: file.number("block_count"),
            layers: layers.into_values().collect(),
            other,
            kv_per_token: kv_per_token(file),
        })
    }

    /// Bytes of all experts.
    pub fn expert_bytes(&self) -> Bytes {
        self.layers.iter().map(ExpertLayer::bytes).sum()
    }
}

impl ExpertLayer {
    fn new(layer: u32, n_used: Option<u16>) -> Self {
        Self { layer, n_expert: 0, n_used, tensors: Vec::new(), chunk_bytes: Bytes::ZERO }
    }
}

/// The tensor, if it holds a part for each expert: `[…, n_expert]`.
fn expert_tensor(name: &str, info: &TensorInfo) -> Option<ExpertTensor> {
    let dims = info.shape.get(..info.n_dims as usize)?;
    let (&n_expert, shape) = dims.split_last().filter(|(n_expert, _)| **n_expert > 0)?;
    let short = name.splitn(3, '.').nth(2).filter(|_| name.contains(EXPERTS))?;
    Some(ExpertTensor {
        name: short.to_owned(),
        kind: info.kind.name,
        shape: shape.to_vec(),
        n_expert,
        bytes: Bytes(info.n_bytes),
    })
}

/// Sum over blocks of heads · (key + value) elements.
fn kv_per_token(file: &ModelFile) -> Option<Bytes> {
    let n_blocks = file.number("block_count")?;
    let heads = file.number("attention.head_count");
    let head = || file.number("embedding_length")?.checked_div(heads?);
    let key = file.number("attention.key_length").or_else(head)?;
    let value = file.number("attention.value_length").or_else(head)?;
    let kv_heads = match file.fact("attention.head_count_kv") {
        Some(Fact::Numbers(heads)) => heads.iter().copied().fold(0, u64::saturating_add),
        Some(Fact::Number(heads)) => heads.saturating_mul(n_blocks),
        _ => heads?.saturating_mul(n_blocks),
    };
    Some(Bytes(kv_heads).saturating_mul(key.saturating_add(value)).saturating_mul(KV_ELEMENT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::testing::{Writer, moe, text};

    fn model(writer: Writer) -> Result<Model> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        std::fs::write(&path, writer.finish(0)).unwrap();
        Model::read(&path).map(|(model, _)| model)
    }

    fn number(writer: Writer, key: &str, value: u32) -> Writer {
        writer.entry(&format!("x.{key}"), 4, &value.to_le_bytes())
    }

    #[test]
    fn experts_and_the_rest_are_told_apart() {
        let mut writer = moe(2, 8)
            .tensor("token_embd.weight", 0, &[4, 10], 160)
            .tensor("output.weight", 0, &[4, 10], 160)
            .entry("general.architecture", 8, &text("x"));
        for (key, value) in [("expert_used_count", 2), ("block_count", 3), ("embedding_length", 16)] {
            writer = number(writer, key, value);
        }
        for (key, value) in [("attention.head_count", 4), ("attention.head_count_kv", 2)] {
            writer = number(writer, key, value);
        }
        let model = model(writer).unwrap();
        assert_eq!((model.layers.len(), model.expert_bytes()), (2, Bytes(2 * 256)), "the bias of layer 9 has no layer");
        assert_eq!((model.other, model.kv_per_token), (Bytes(160), Some(Bytes(3 * 2 * 8 * 2))));
        assert_eq!((model.layers[0].n_used, model.layers[0].expert_bytes()), (Some(2), Bytes(32)));
        assert_eq!(model.layers[0].refusal(), None);
    }

    #[test]
    fn a_model_without_experts_is_refused() {
        let error = model(Writer::new().tensor("output.weight", 0, &[4, 10], 160)).err().unwrap();
        assert!(format!("{error:#}").contains("has no experts"), "{error:#}");
    }

    #[test]
    fn layers_that_cannot_be_cached_say_why() {
        let tensor = |n_expert, mib| ExpertTensor {
            name: "ffn_up_exps.weight".into(),
            kind: "f32",
            shape: vec![1, 1],
            n_expert,
            bytes: Bytes::from_mib(mib * n_expert),
        };
        let layer = |n_used, tensors: Vec<ExpertTensor>| ExpertLayer {
            n_expert: tensors[0].n_expert,
            tensors,
            ..ExpertLayer::new(0, Some(n_used))
        };
        let says = |layer: ExpertLayer| layer.refusal().unwrap_or_default();
        assert!(says(layer(2, vec![tensor(8, 95)])).contains("few large experts (2 of 8, 95 MiB)"));
        assert!(says(layer(2, vec![tensor(8, 1), tensor(4, 1)])).contains("has 4 experts, others 8"));
        assert!(says(layer(2, vec![tensor(70_000, 1)])).contains("more than 65535"));
        assert!(says(layer(9, vec![tensor(8, 1)])).contains("9 experts per token of only 8"));
        assert_eq!(says(layer(8, vec![tensor(128, 3)])), "");
    }
}
