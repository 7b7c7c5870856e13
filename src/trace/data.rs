//! What a trace holds, whichever format it was read from.

use super::calls::Calls;

/// Larger files are not read: 20 bytes per request and CSV row leave room for 50 million requests.
pub const MAX_MIB: u64 = 1024;
/// The most experts a layer may have; known models have up to 512.
pub const MAX_EXPERTS: u16 = 4096;
/// The most layers.
pub const MAX_LAYERS: usize = 1024;

/// What a trace says of a layer itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerInfo {
    /// Layer number.
    pub layer: u16,
    /// Experts in the layer, 1 to 4,096.
    pub n_expert: u16,
    /// Experts per token.
    pub n_used: u16,
    /// Bytes of one expert's weights, if known.
    pub expert_bytes: Option<u64>,
}

/// One layer's part of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerTrace {
    /// The layer.
    pub info: LayerInfo,
    /// Calls before the first decoded token.
    pub prompt: Calls,
    /// All others.
    pub decode: Calls,
}

/// A whole trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Of the model, 16 hex digits, if the trace says so.
    pub fingerprint: Option<String>,
    /// In the order of their numbers; at least one.
    pub layers: Vec<LayerTrace>,
    /// Whether the file ends in the middle of a record, as it does when its program was killed; the rest is sound.
    pub is_cut: bool,
}

impl Trace {
    /// Decoded tokens: those of the layer that has most.
    pub fn n_tokens(&self) -> u64 {
        self.layers.iter().map(|layer| layer.decode.n_tokens()).max().unwrap_or(0)
    }
}
