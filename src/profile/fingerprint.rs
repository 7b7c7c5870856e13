//! What identifies a model. Tensors are told apart by name, type, shape and a few sampled bytes.

use crate::gguf::ModelFile;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::io;

/// Places in a tensor that are sampled, evenly spread.
const SAMPLES: usize = 4;
/// Bytes read at each place.
const SAMPLE_BYTES: usize = 64;
/// Hex digits of a fingerprint.
const DIGITS: usize = 16;

/// What identifies a tensor besides its bytes.
pub struct TensorId<'a> {
    /// Name, as in the GGUF file.
    pub name: &'a str,
    /// Element type, as in the GGUF file, for example `q4_K`.
    pub type_name: &'a str,
    /// Shape in ggml order.
    pub shape: [u64; 4],
    /// Size in bytes.
    pub n_bytes: usize,
}

impl TensorId<'_> {
    /// 16 hex digits: the start of SHA-256 over the identity and the sampled bytes.
    ///
    /// `read(offset, len)` returns bytes of the tensor; where it returns nothing only the identity counts.
    pub fn fingerprint<B: AsRef<[u8]>>(&self, read: impl Fn(usize, usize) -> Option<B>) -> String {
        let mut hash = Sha256::new();
        for text in [self.name, self.type_name] {
            hash.update(text.as_bytes());
            hash.update([0]);
        }
        for n in self.shape.iter().chain([&(self.n_bytes as u64)]) {
            hash.update(n.to_le_bytes());
        }
        let len = SAMPLE_BYTES.min(self.n_bytes);
        let span = self.n_bytes - len;
        for sample in 0..SAMPLES {
            if let Some(bytes) = read(span / (SAMPLES - 1) * sample, len) {
                hash.update(bytes);
            }
        }
        digits(hash)
    }
}

/// What the plugin will find to be the fingerprint of the tensor `name` of the model in this file. `None` if there is no such
/// tensor.
///
/// Fails if its data cannot be read.
pub fn fingerprint_in_file(model: &ModelFile, name: &str) -> io::Result<Option<String>> {
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

/// Which model a profile belongs to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelId {
    /// 16 hex digits over all recorded tensors.
    pub fingerprint: String,
    /// Each recorded expert tensor's own fingerprint, by name.
    #[serde(default)]
    pub tensors: BTreeMap<String, String>,
    /// Their shapes, `[n_in, n_out, n_expert]`, by name; profiles of earlier versions have none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub shapes: BTreeMap<String, [u64; 3]>,
}

impl ModelId {
    /// Whether both name the same model: they share tensors, and all that they share are equal.
    pub fn is_same_model(&self, other: &ModelId) -> bool {
        let mut shared = self.tensors.iter().filter_map(|(name, id)| Some((id, other.tensors.get(name)?))).peekable();
        shared.peek().is_some() && shared.all(|(a, b)| a == b)
    }
}

/// One fingerprint for a set of them, in the order given.
pub fn combine_fingerprints<'a>(fingerprints: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = Sha256::new();
    for fingerprint in fingerprints {
        hash.update(fingerprint.as_bytes());
        hash.update([0]);
    }
    digits(hash)
}

fn digits(hash: Sha256) -> String {
    hash.finalize().iter().take(DIGITS / 2).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(name: &str, shape: [u64; 4], bytes: &[u8]) -> String {
        let id = TensorId { name, type_name: "f32", shape, n_bytes: bytes.len() };
        id.fingerprint(|offset, len| bytes.get(offset..offset + len))
    }

    #[test]
    fn name_shape_and_sampled_bytes_all_count() {
        let bytes = vec![1u8; 1000];
        let base = fingerprint("a", [10, 25, 1, 1], &bytes);
        assert_eq!(base.len(), DIGITS);
        assert_eq!(base, fingerprint("a", [10, 25, 1, 1], &bytes));
        assert_ne!(base, fingerprint("b", [10, 25, 1, 1], &bytes));
        assert_ne!(base, fingerprint("a", [25, 10, 1, 1], &bytes));
        let mut last = bytes.clone();
        last[998] = 2;
        assert_ne!(base, fingerprint("a", [10, 25, 1, 1], &last));
    }

    #[test]
    fn models_are_the_same_if_all_shared_tensors_are_and_there_are_some() {
        let id = |tensors: &[(&str, &str)]| ModelId {
            fingerprint: String::new(),
            tensors: tensors.iter().map(|&(name, id)| (name.into(), id.into())).collect(),
            shapes: BTreeMap::new(),
        };
        let all = id(&[("a", "1"), ("b", "2")]);
        assert!(all.is_same_model(&id(&[("a", "1"), ("c", "9")])), "recorded with fewer layers in our buffer");
        assert!(!all.is_same_model(&id(&[("a", "1"), ("b", "9")])));
        assert!(!all.is_same_model(&id(&[("c", "1")])));
    }

    #[test]
    fn tiny_and_empty_tensors_have_fingerprints() {
        assert_eq!(fingerprint("a", [1, 1, 1, 1], &[7, 7, 7, 7]).len(), DIGITS);
        assert_eq!(fingerprint("a", [0, 1, 1, 1], &[]).len(), DIGITS);
    }
}
