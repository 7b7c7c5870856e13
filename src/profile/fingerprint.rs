//! Which model is this? Tensors are told apart by name, type, shape and a few sampled bytes.

use sha2::{Digest, Sha256};

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

/// The N of `blk.N.` in a tensor's name. For numbering only.
pub fn layer_number(name: &str) -> Option<u32> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// One fingerprint for a set of them, in the order given.
pub fn combine<'a>(fingerprints: impl IntoIterator<Item = &'a str>) -> String {
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
    fn layers_are_numbered_by_their_names() {
        assert_eq!(layer_number("blk.17.ffn_up_exps.weight"), Some(17));
        assert_eq!(layer_number("blk.x.ffn_up_exps.weight"), None);
        assert_eq!(layer_number("output.weight"), None);
    }

    #[test]
    fn tiny_and_empty_tensors_have_fingerprints() {
        assert_eq!(fingerprint("a", [1, 1, 1, 1], &[7, 7, 7, 7]).len(), DIGITS);
        assert_eq!(fingerprint("a", [0, 1, 1, 1], &[]).len(), DIGITS);
    }
}
