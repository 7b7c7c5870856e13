//! `supports_op`: which operations the scheduler should hand to us.
//!
//! We claim MUL_MAT_ID on experts in our buffers for fewer tokens than stock's op-offload threshold, and what
//! lies between its projections, so that a layer's expert FFN becomes one split. The scheduler asks in three
//! states (loader's probe, measuring pass, real): the rules must be pure and cheap and must not look behind a buffer.

use crate::ggml::{Buffer, BufferType, Tensor, sys};

/// How deep we follow sources from a middle operation back to its MUL_MAT_ID.
const MAX_DEPTH: u32 = 8;

/// The rules, with all that they depend on.
#[derive(Clone, Copy, Debug)]
pub struct Claims {
    /// Our buffer type.
    pub buffer_type: BufferType,
    /// Batches of this many tokens and more are stock's.
    pub offload_min_batch: u32,
    /// Whether the loader may place experts with us.
    pub takes_experts: bool,
}

impl Claims {
    /// Whether `op` is ours.
    pub fn claims(&self, op: Tensor<'_>) -> bool {
        match op.op() {
            sys::GGML_OP_MUL_MAT_ID => self.claims_mul_mat_id(op),
            sys::GGML_OP_GLU => self.is_inside_block(op, MAX_DEPTH),
            _ => false,
        }
    }

    fn claims_mul_mat_id(&self, op: Tensor<'_>) -> bool {
        let Some(buffer) = op.src(0).and_then(|weights| self.weight_buffer(weights)) else { return false };
        if is_loader_probe(&buffer) {
            return self.takes_experts;
        }
        op.src(2).is_some_and(|ids| ids.ne(1) < self.offload_min_batch.into())
    }

    /// The buffer of `tensor` if it is a weight in our memory: a leaf, not a result or a copy made for a split.
    fn weight_buffer<'a>(&self, tensor: Tensor<'a>) -> Option<Buffer<'a>> {
        let storage = tensor.storage();
        let buffer = storage.buffer()?;
        let is_ours = buffer.buffer_type() == Some(self.buffer_type);
        (is_ours && storage.op() == sys::GGML_OP_NONE && !buffer.holds_results()).then_some(buffer)
    }

    fn is_inside_block(&self, tensor: Tensor<'_>, depth: u32) -> bool {
        let Some(depth) = depth.checked_sub(1) else { return false };
        let node = tensor.storage();
        let inside = |index| node.src(index).is_some_and(|source| self.is_inside_block(source, depth));
        match node.op() {
            sys::GGML_OP_MUL_MAT_ID => self.claims_mul_mat_id(node),
            sys::GGML_OP_GLU => inside(0) && (node.src(1).is_none() || inside(1)),
            _ => false,
        }
    }
}

/// The loader asks about a weight in an empty buffer that nobody has marked yet.
fn is_loader_probe(buffer: &Buffer<'_>) -> bool {
    buffer.size() == 0 && !buffer.holds_weights()
}
