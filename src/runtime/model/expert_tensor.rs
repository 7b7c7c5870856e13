//! One expert tensor of a layer: which one it is, its shape, and its bytes.

use crate::ggml::{SharedWeights, Tensor};
use crate::moe::WeightShape;

/// Which tensor of which live buffer.
pub type WeightKey = (usize, usize);

/// The key of an expert tensor; `None` without a buffer.
pub fn weight_key(weights: &Tensor<'_>) -> Option<WeightKey> {
    Some((weights.buffer()?.address(), weights.address()))
}

/// One expert tensor of a layer.
#[derive(Clone)]
pub struct ExpertTensor {
    /// Which tensor of which buffer.
    pub key: WeightKey,
    /// As the FFN template sees it.
    pub shape: WeightShape,
    /// All experts' bytes.
    pub weights: SharedWeights,
}
