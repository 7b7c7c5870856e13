//! The expert FFN inside a split: which nodes belong together and whether all of them are there.
//!
//! A block keeps node numbers, not pointers, so that it can be kept for as long as the split's `uid` is the same.

use crate::ggml::{Graph, Tensor, sys};

/// How complete a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Gate and up side by side, a gated activation, down.
    GateUpDown,
    /// Gate and up in one tensor, a gated activation over its two halves, down.
    FusedGateUpDown,
    /// No gate: up, an activation, down.
    UpDown,
    /// Not a whole expert FFN: correct on the CPU, never on a device. Says why.
    Partial(&'static str),
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Shape::GateUpDown => f.write_str("gate_up_down"),
            Shape::FusedGateUpDown => f.write_str("fused_gate_up_down"),
            Shape::UpDown => f.write_str("up_down"),
            Shape::Partial(reason) => write!(f, "partial: {reason}"),
        }
    }
}

/// The MUL_MAT_ID nodes of one split that share their ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    shape: Shape,
    /// Node numbers of the MUL_MAT_IDs, in execution order; never empty.
    projections: Vec<usize>,
}

impl Block {
    /// All blocks of a split. One, as a rule.
    pub fn recognise(graph: &Graph<'_>) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        let is_projection = |(_, node): &(usize, Tensor<'_>)| node.op() == sys::GGML_OP_MUL_MAT_ID;
        for (index, node) in graph.nodes().enumerate().filter(is_projection) {
            let shares_ids = |block: &&mut Block| match (block.ids(graph), node.src(2)) {
                (Some(a), Some(b)) => a.is(&b),
                _ => false,
            };
            match blocks.iter_mut().find(shares_ids) {
                Some(block) => block.projections.push(index),
                None => blocks.push(Block { shape: Shape::Partial(NOT_LOOKED_AT), projections: vec![index] }),
            }
        }
        for block in &mut blocks {
            block.shape = block.shape_in(graph);
        }
        blocks
    }

    /// How complete it is.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The ids tensor `[n_expert_used, n_tokens]` that all projections share.
    pub fn ids<'a>(&self, graph: &Graph<'a>) -> Option<Tensor<'a>> {
        graph.node(*self.projections.first()?)?.src(2)
    }

    /// The model's expert weights `[n_in, n_out, n_expert]`, in execution order. LoRA factors are passed over.
    pub fn weights<'a>(&self, graph: &Graph<'a>) -> impl Iterator<Item = Tensor<'a>> {
        self.nodes(graph).filter(is_no_adapter).filter_map(|node| node.src(0))
    }

    /// Experts that every projection has, LoRA factors included: ids must be below this.
    pub fn n_expert(&self, graph: &Graph<'_>) -> Option<u64> {
        self.nodes(graph).filter_map(|node| Some(node.src(0)?.ne(2))).min()
    }

    fn nodes<'a>(&self, graph: &Graph<'a>) -> impl Iterator<Item = Tensor<'a>> {
        self.projections.iter().filter_map(|&index| graph.node(index))
    }

    /// Tells the shape from how the projections hang together. LoRA factors are passed over.
    fn shape_in(&self, graph: &Graph<'_>) -> Shape {
        let projections = self.nodes(graph).filter(is_no_adapter);
        let is_node = |tensor: &Tensor<'_>| graph.nodes().any(|node| node.is(tensor));
        let (inner, outer): (Vec<_>, Vec<_>) =
            projections.partition(|node| node.src(1).is_some_and(|x| is_node(&x.storage())));
        if inner.len() != 1 {
            return Shape::Partial(if inner.is_empty() { "no down projection" } else { "several down projections" });
        }
        match outer.as_slice() {
            [up] if graph.nodes().any(|node| is_glu_of_halves(&node, up)) => Shape::FusedGateUpDown,
            [up] if inner[0].src(1).is_some_and(|x| x.storage().is(up)) => Shape::Partial("no activation"),
            [_] => Shape::UpDown,
            [a, b] if shares_input(a, b) => Shape::GateUpDown,
            [_, _] => Shape::Partial("gate and up have different inputs"),
            [] => Shape::Partial("no up projection"),
            _ => Shape::Partial("more than two projections of the input"),
        }
    }
}

const NOT_LOOKED_AT: &str = "not looked at";
/// How many operations may lie between a fused gate_up and its activation.
const MAX_STEPS: usize = 4;

/// Adapters are loaded beside the model: their buffers are not marked as weights.
fn is_no_adapter(projection: &Tensor<'_>) -> bool {
    let weights = projection.src(0).and_then(|weights| weights.buffer());
    weights.is_none_or(|buffer| buffer.holds_weights())
}

fn shares_input(a: &Tensor<'_>, b: &Tensor<'_>) -> bool {
    matches!((a.src(1), b.src(1)), (Some(x), Some(y)) if x.is(&y))
}

/// Whether `node` is a gated activation over two views of what became of `gate_up` (biased, scaled, adapted).
fn is_glu_of_halves(node: &Tensor<'_>, gate_up: &Tensor<'_>) -> bool {
    let (Some(x), Some(y)) = (node.src(0), node.src(1)) else { return false };
    let (mut whole, other) = (x.storage(), y.storage());
    if node.op() != sys::GGML_OP_GLU || !whole.is(&other) {
        return false;
    }
    for _ in 0..MAX_STEPS {
        if whole.is(gate_up) {
            return true;
        }
        let Some(source) = whole.src(0) else { return false };
        whole = source.storage();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::testing::Builder;

    const N_EMBD: i64 = 64;
    const N_FF: i64 = 32;
    const N_EXPERT: i64 = 8;

    fn experts(b: &Builder, n_in: i64, n_out: i64) -> Tensor<'_> {
        b.leaf(sys::GGML_TYPE_F32, [n_in, n_out, N_EXPERT])
    }

    fn shapes(graph: &Graph<'_>) -> Vec<Shape> {
        Block::recognise(graph).iter().map(Block::shape).collect()
    }

    #[test]
    fn gate_up_and_down_are_one_block_in_either_order() {
        for gate_first in [true, false] {
            let b = Builder::new();
            let (x, ids) = (b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, 5]), b.ids(2, N_EXPERT, 5));
            let one = b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, ids);
            let two = b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, ids);
            let glu = if gate_first { b.swiglu(one, two) } else { b.swiglu(two, one) };
            let graph = b.graph(b.mul_mat_id(experts(&b, N_FF, N_EMBD), glu, ids));
            assert_eq!(shapes(&graph), [Shape::GateUpDown]);
            let block = &Block::recognise(&graph)[0];
            assert!(block.ids(&graph).unwrap().is(&ids));
            assert_eq!(block.weights(&graph).count(), 3);
        }
    }

    #[test]
    fn a_fused_gate_up_is_one_block() {
        let b = Builder::new();
        let (x, ids) = (b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, 1]), b.ids(2, N_EXPERT, 1));
        let gate_up = b.mul_mat_id(experts(&b, N_EMBD, 2 * N_FF), x, ids);
        let glu = b.swiglu(b.half(gate_up, 0), b.half(gate_up, 1));
        let graph = b.graph(b.mul_mat_id(experts(&b, N_FF, N_EMBD), glu, ids));
        assert_eq!(shapes(&graph), [Shape::FusedGateUpDown]);
    }

    #[test]
    fn a_lone_projection_is_partial() {
        let b = Builder::new();
        let (x, ids) = (b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, 1]), b.ids(2, N_EXPERT, 1));
        assert_eq!(
            shapes(&b.graph(b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, ids))),
            [Shape::Partial("no down projection")]
        );
    }

    #[test]
    fn projections_with_other_ids_are_another_block() {
        let b = Builder::new();
        let x = b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, 1]);
        let one = b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, b.ids(2, N_EXPERT, 1));
        let two = b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, b.ids(2, N_EXPERT, 1));
        assert_eq!(shapes(&b.graph(b.mul(one, two))), [Shape::Partial("no down projection"); 2]);
    }

    #[test]
    fn without_a_gate_or_with_another_activation_it_is_whole_too() {
        let b = Builder::new();
        let (x, ids) = (b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, 1]), b.ids(2, N_EXPERT, 1));
        let up = b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, ids);
        let graph = b.graph(b.mul_mat_id(experts(&b, N_FF, N_EMBD), b.mul(up, up), ids));
        assert_eq!(shapes(&graph), [Shape::UpDown]);

        let b = Builder::new();
        let (x, ids) = (b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, 1]), b.ids(2, N_EXPERT, 1));
        let up = b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, ids);
        let gate = b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, ids);
        let graph = b.graph(b.mul_mat_id(experts(&b, N_FF, N_EMBD), b.mul(gate, up), ids));
        assert_eq!(shapes(&graph), [Shape::GateUpDown]);
    }

    #[test]
    fn two_projections_in_a_row_are_no_expert_ffn() {
        let b = Builder::new();
        let (x, ids) = (b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, 1]), b.ids(2, N_EXPERT, 1));
        let up = b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, ids);
        let graph = b.graph(b.mul_mat_id(experts(&b, N_FF, N_EMBD), up, ids));
        assert_eq!(shapes(&graph), [Shape::Partial("no activation")]);
    }

    #[test]
    fn inputs_that_differ_make_it_partial() {
        let b = Builder::new();
        let ids = b.ids(2, N_EXPERT, 1);
        let x = || b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, 1]);
        let (gate, up) =
            (b.mul_mat_id(experts(&b, N_EMBD, N_FF), x(), ids), b.mul_mat_id(experts(&b, N_EMBD, N_FF), x(), ids));
        let graph = b.graph(b.mul_mat_id(experts(&b, N_FF, N_EMBD), b.swiglu(gate, up), ids));
        assert_eq!(shapes(&graph), [Shape::Partial("gate and up have different inputs")]);
    }
}
