//! `supports_op`: which operations the scheduler should hand to us.
//!
//! We claim MUL_MAT_ID on experts in our buffers for fewer tokens than stock's op-offload threshold, and what
//! lies between its projections, so that a layer's expert FFN becomes one split. The scheduler asks in three
//! states (loader's probe, measuring pass, real): the rules must be pure and cheap and must not look behind a buffer.

use crate::ggml::{Buffer, BufferType, Tensor, sys};

/// How deep we follow sources from a middle operation back to its MUL_MAT_ID.
const MAX_DEPTH: u32 = 8;
/// How deep we follow the rows that go into a MUL_MAT_ID back to a weight that they are made with.
const MAX_ROWS_DEPTH: u32 = 12;

/// The rules, with all that they depend on.
#[derive(Clone, Copy, Debug)]
pub struct Claims {
    /// Our buffer type.
    pub buffer_type: BufferType,
    /// Batches of this many tokens and more are stock's.
    pub offload_min_batch: u32,
    /// Whether the loader may place experts with us.
    pub takes_experts: bool,
    /// Only what rows go into that are made in this memory; `None`: whatever rows.
    pub rows_from: Option<BufferType>,
    /// Whether scales that are repeated for every token are ours: nothing in them tells whose rows they are for.
    pub takes_scales: bool,
    /// For tests only: whether weights without a buffer count as ours.
    pub unplaced: bool,
}

impl Claims {
    /// Whether `op` is ours.
    pub fn claims(&self, op: Tensor<'_>) -> bool {
        match op.op() {
            sys::GGML_OP_MUL_MAT_ID => self.claims_by_weight(op, 0),
            sys::GGML_OP_ADD_ID => self.claims_biases(op),
            sys::GGML_OP_REPEAT => self.takes_scales && self.is_repeated_scale(op),
            sys::GGML_OP_GET_ROWS => self.is_scale_per_request(op),
            sys::GGML_OP_NONE | sys::GGML_OP_VIEW => self.unplaced,
            _ => self.is_inside_block(op, MAX_DEPTH),
        }
    }

    /// Whether `op` multiplies by experts that are placed with us, whoever is to compute it.
    pub fn is_on_our_experts(&self, op: Tensor<'_>) -> bool {
        let buffer = || self.weight_buffer(op.src(0)?);
        op.op() == sys::GGML_OP_MUL_MAT_ID && buffer().is_some_and(|buffer| !is_loader_probe(&buffer))
    }

    /// An operation that picks experts out of source `weight` by the ids in source 2.
    fn claims_by_weight(&self, op: Tensor<'_>, weight: usize) -> bool {
        let Some(weights) = op.src(weight) else { return false };
        if self.unplaced && weights.buffer().is_none() {
            return true;
        }
        let Some(buffer) = self.weight_buffer(weights) else { return false };
        if is_loader_probe(&buffer) {
            return self.takes_experts;
        }
        let is_small = op.src(2).is_some_and(|ids| ids.ne(1) < self.offload_min_batch.into());
        is_small && self.has_wanted_rows(op)
    }

    /// Biases for rows of ours: where rows may lie elsewhere, their sum could be put in their place.
    fn claims_biases(&self, op: Tensor<'_>) -> bool {
        let are_rows_ours = || op.src(0).is_some_and(|rows| self.is_inside_block(rows, MAX_DEPTH));
        self.claims_by_weight(op, 1) && (self.rows_from.is_none() || are_rows_ours())
    }

    /// Whether both rows and ids of an operation are made in the memory that is asked for.
    fn has_wanted_rows(&self, op: Tensor<'_>) -> bool {
        let rows = usize::from(op.op() == sys::GGML_OP_MUL_MAT_ID);
        self.is_made_there(op.src(rows)) && self.is_made_there(op.src(2))
    }

    fn is_made_there(&self, rows: Option<Tensor<'_>>) -> bool {
        self.rows_from.is_none_or(|wanted| rows.and_then(|rows| memory_behind(rows, MAX_ROWS_DEPTH)) == Some(wanted))
    }

    /// The buffer of `tensor` if it is a weight in our memory: a leaf, not a result or a copy made for a split.
    fn weight_buffer<'a>(&self, tensor: Tensor<'a>) -> Option<Buffer<'a>> {
        let storage = tensor.storage();
        let buffer = storage.buffer()?;
        let is_ours = buffer.buffer_type() == Some(self.buffer_type);
        (is_ours && storage.op() == sys::GGML_OP_NONE && !buffer.holds_results()).then_some(buffer)
    }

    /// Per-expert scales `[1, n_expert, n_tokens]`: one weight, repeated for every token.
    fn is_repeated_scale(&self, op: Tensor<'_>) -> bool {
        op.op() == sys::GGML_OP_REPEAT
            && op.ne(2) < self.offload_min_batch.into()
            && op.src(0).is_some_and(|scale| self.weight_buffer(scale).is_some())
    }

    /// Per-expert scales `[1, n_expert_used, n_tokens]`: those of the experts in the ids.
    fn is_scale_per_request(&self, op: Tensor<'_>) -> bool {
        op.op() == sys::GGML_OP_GET_ROWS
            && op.src(0).is_some_and(|scales| self.is_repeated_scale(scales))
            && self.is_made_there(op.src(1))
    }

    /// Whether `tensor` is computed from the results of our MUL_MAT_IDs alone, row by row.
    fn is_inside_block(&self, tensor: Tensor<'_>, depth: u32) -> bool {
        let Some(depth) = depth.checked_sub(1) else { return false };
        let node = tensor.storage();
        let inside = |index| node.src(index).is_some_and(|source| self.is_inside_block(source, depth));
        let is_view = |index| node.src(index).is_some_and(|source| source.op() == sys::GGML_OP_VIEW);
        match node.op() {
            sys::GGML_OP_MUL_MAT_ID => self.claims_by_weight(node, 0),
            sys::GGML_OP_ADD_ID => self.claims_biases(node),
            sys::GGML_OP_GLU => inside(0) && (node.src(1).is_none() || inside(1)),
            sys::GGML_OP_UNARY | sys::GGML_OP_SQR | sys::GGML_OP_CLAMP | sys::GGML_OP_SCALE => inside(0),
            // By something of the block, or by its scales; never by the router's weights.
            sys::GGML_OP_MUL => inside(0) && (inside(1) || node.src(1).is_some_and(|s| self.is_scale_per_request(s))),
            // LoRA's delta. The sum over a token's experts adds views: that one stays with the main backend.
            sys::GGML_OP_ADD => !is_view(0) && !is_view(1) && inside(0) && inside(1),
            _ => false,
        }
    }
}

/// The memory of the first weight, apart from experts, that `tensor` is made with; `None`: it is an input, or none was found.
fn memory_behind(tensor: Tensor<'_>, depth: u32) -> Option<BufferType> {
    let depth = depth.checked_sub(1)?;
    let node = tensor.storage();
    if node.op() == sys::GGML_OP_NONE {
        return node.buffer().filter(Buffer::holds_weights)?.buffer_type();
    }
    let first = usize::from(node.op() == sys::GGML_OP_MUL_MAT_ID);
    (first..sys::GGML_MAX_SRC as usize).find_map(|index| memory_behind(node.src(index)?, depth))
}

/// The loader asks about a weight in an empty buffer that nobody has marked yet.
fn is_loader_probe(buffer: &Buffer<'_>) -> bool {
    buffer.size() == 0 && !buffer.holds_weights()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::testing::Builder;

    const N_EXPERT: i64 = 8;

    /// Rules for a buffer type that, for the test, is called ours.
    fn rules(takes_experts: bool) -> Claims {
        Claims {
            buffer_type: BufferType::cpu().unwrap(),
            offload_min_batch: 32,
            takes_experts,
            rows_from: None,
            takes_scales: true,
            unplaced: false,
        }
    }

    fn projection(b: &Builder, usage: sys::ggml_backend_buffer_usage, n_tokens: i64) -> Tensor<'_> {
        let weights = b.leaf(sys::GGML_TYPE_F32, [64, 32, N_EXPERT]);
        b.place(weights, rules(true).buffer_type, usage);
        b.mul_mat_id(weights, b.leaf(sys::GGML_TYPE_F32, [64, 1, n_tokens]), b.ids(2, N_EXPERT, n_tokens))
    }

    #[test]
    fn the_loaders_probe_is_answered_by_whether_experts_are_wanted() {
        let b = Builder::new();
        let probe = projection(&b, sys::GGML_BACKEND_BUFFER_USAGE_ANY, 512);
        assert!(rules(true).claims(probe));
        assert!(!rules(false).claims(probe));
    }

    #[test]
    fn the_measuring_pass_is_answered_as_for_real() {
        let b = Builder::new();
        for (n_tokens, ours) in [(0, true), (1, true), (31, true), (32, false), (512, false)] {
            let op = projection(&b, sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS, n_tokens);
            assert_eq!(rules(false).claims(op), ours, "{n_tokens} tokens");
        }
    }

    #[test]
    fn large_batches_are_on_our_experts_too() {
        let b = Builder::new();
        for (usage, n_tokens, ours) in [
            (sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS, 1, true),
            (sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS, 512, true),
            (sys::GGML_BACKEND_BUFFER_USAGE_ANY, 512, false),
            (sys::GGML_BACKEND_BUFFER_USAGE_COMPUTE, 1, false),
        ] {
            assert_eq!(
                rules(true).is_on_our_experts(projection(&b, usage, n_tokens)),
                ours,
                "{usage}, {n_tokens} tokens"
            );
        }
    }

    #[test]
    fn results_and_weights_elsewhere_are_not_ours() {
        let b = Builder::new();
        assert!(!rules(true).claims(projection(&b, sys::GGML_BACKEND_BUFFER_USAGE_COMPUTE, 1)));
        let unplaced = b.leaf(sys::GGML_TYPE_F32, [64, 32, N_EXPERT]);
        let op = b.mul_mat_id(unplaced, b.leaf(sys::GGML_TYPE_F32, [64, 1, 1]), b.ids(2, N_EXPERT, 1));
        assert!(!rules(true).claims(op));
    }

    #[test]
    fn a_glu_is_ours_if_both_its_sources_are_and_the_batch_is_small() {
        let b = Builder::new();
        let weights = sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
        for (n_tokens, ours) in [(1, true), (32, false)] {
            let (gate, up) = (projection(&b, weights, n_tokens), projection(&b, weights, n_tokens));
            assert_eq!(rules(true).claims(b.swiglu(gate, up)), ours);
            let fused = projection(&b, weights, n_tokens);
            assert_eq!(rules(true).claims(b.swiglu(b.half(fused, 0), b.half(fused, 1))), ours);
        }
        let foreign = b.leaf(sys::GGML_TYPE_F32, [32, 2, 1]);
        assert!(!rules(true).claims(b.swiglu(projection(&b, weights, 1), foreign)));
    }

    #[test]
    fn the_multiplication_by_router_weights_stays_with_the_main_backend() {
        let b = Builder::new();
        let down = projection(&b, sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS, 1);
        assert!(!rules(true).claims(b.mul(down, b.leaf(sys::GGML_TYPE_F32, [1, 2, 1]))));
    }

    #[test]
    fn a_long_chain_of_operations_ends() {
        let b = Builder::new();
        let mut glu = projection(&b, sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS, 1);
        for _ in 0..40 {
            glu = b.swiglu(glu, glu);
        }
        assert!(!rules(true).claims(glu), "given up, not followed forever");
    }
}
