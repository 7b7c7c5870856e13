//! A slice of a host block does not live while a graph that is placed in it is computed.

use ggml_moe_hot::ggml::{Backend, HostBlock, OwnGraph};

fn compute(backend: &mut Backend, graph: &mut OwnGraph, scratch: &mut HostBlock) {
    let bytes = scratch.bytes(16).unwrap();
    backend.compute_own(graph, scratch, std::iter::empty()).unwrap();
    println!("{bytes:?}");
}

fn main() {}
