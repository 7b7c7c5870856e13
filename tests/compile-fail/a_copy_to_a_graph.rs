//! Bytes are copied to tensors that have no operations, while graphs are computed by their owner.

use ggml_moe_hot::ggml::{Backend, OwnGraph, Upload};

fn upload(backend: &mut Backend, graph: &OwnGraph, uploads: &[Upload<'_>]) {
    backend.upload(graph, uploads).unwrap();
}

fn main() {}
