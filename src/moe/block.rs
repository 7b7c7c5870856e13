//! The expert FFN inside a split: which nodes belong together and whether all of them are there.
//!
//! A block keeps node numbers, not pointers, so that it can be kept for as long as the split's `uid` is the same.

use crate::ggml::{Graph, Tensor, sys};

/// How complete a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Gate and up side by side, GLU, down.
    GateUpDown,
    /// Gate and up in one tensor, GLU over its two halves, down.
    FusedGateUpDown,
    /// Something else, or only a part: correct on the CPU, never on a device.
    Partial,
}

impl Shape {
    /// Its name in profiles.
    pub fn name(self) -> &'static str {
        match self {
            Shape::GateUpDown => "gate_up_down",
            Shape::FusedGateUpDown => "fused_gate_up_down",
            Shape::Partial => "partial",
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
                None => blocks.push(Block { shape: Shape::Partial, projections: vec![index] }),
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

    /// The expert weights `[n_in, n_out, n_expert]`, in execution order.
    pub fn weights<'a>(&self, graph: &Graph<'a>) -> impl Iterator<Item = Tensor<'a>> {
        self.projections.iter().filter_map(|&index| graph.node(index)?.src(0))
    }

    fn shape_in(&self, graph: &Graph<'_>) -> Shape {
        let nodes: Vec<_> = self.projections.iter().filter_map(|&index| graph.node(index)).collect();
        match nodes.as_slice() {
            [a, b, down] if is_glu_of(down, a, b) && shares_input(a, b) => Shape::GateUpDown,
            [gate_up, down] if is_glu_of(down, gate_up, gate_up) => Shape::FusedGateUpDown,
            _ => Shape::Partial,
        }
    }
}

fn shares_input(a: &Tensor<'_>, b: &Tensor<'_>) -> bool {
    matches!((a.src(1), b.src(1)), (Some(x), Some(y)) if x.is(&y))
}

/// Whether `down` multiplies a GLU whose two inputs are (views of) `a` and `b`, in either order.
fn is_glu_of(down: &Tensor<'_>, a: &Tensor<'_>, b: &Tensor<'_>) -> bool {
    let Some(glu) = down.src(1).filter(|input| input.op() == sys::GGML_OP_GLU) else { return false };
    let (Some(x), Some(y)) = (glu.src(0), glu.src(1)) else { return false };
    let (x, y) = (x.storage(), y.storage());
    (x.is(a) && y.is(b)) || (x.is(b) && y.is(a))
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
        assert_eq!(shapes(&b.graph(b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, ids))), [Shape::Partial]);
    }

    #[test]
    fn projections_with_other_ids_are_another_block() {
        let b = Builder::new();
        let x = b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, 1]);
        let one = b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, b.ids(2, N_EXPERT, 1));
        let two = b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, b.ids(2, N_EXPERT, 1));
        assert_eq!(shapes(&b.graph(b.mul(one, two))), [Shape::Partial, Shape::Partial]);
    }

    #[test]
    fn a_down_projection_of_something_else_is_partial() {
        let b = Builder::new();
        let (x, ids) = (b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, 1]), b.ids(2, N_EXPERT, 1));
        let up = b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, ids);
        let gate = b.mul_mat_id(experts(&b, N_EMBD, N_FF), x, ids);
        let graph = b.graph(b.mul_mat_id(experts(&b, N_FF, N_EMBD), b.mul(gate, up), ids));
        assert_eq!(shapes(&graph), [Shape::Partial]);
    }
}
