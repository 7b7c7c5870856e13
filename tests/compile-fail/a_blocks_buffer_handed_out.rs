//! Nobody gets hold of the buffer behind scratch memory or a host block.

use ggml_moe_hot::ggml::{GraphBuilder, HostBlock, TensorIndex};

fn place(builder: &mut GraphBuilder, weights: TensorIndex, block: &HostBlock) {
    builder.place(weights, block.scratch(), 0).unwrap();
    builder.place(weights, block.scratch().memory(), 0).unwrap();
}

fn main() {}
