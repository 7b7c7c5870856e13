//! Two graphs that share scratch memory are not computed at once.

use ggml_moe_hot::ggml::{Backend, HostBlocks, OwnGraph, Scratch, TensorIndex};

fn compute(
    [one, two]: [&mut Backend; 2],
    [first, second]: [&mut OwnGraph; 2],
    scratch: &mut Scratch,
    [some, others]: [HostBlocks<'_>; 2],
    [output, other_output]: [TensorIndex; 2],
) {
    let none = std::iter::empty();
    let meanwhile = || two.compute_while((second, scratch), none.clone(), other_output, others, || ());
    let _ = one.compute_while((first, scratch), none.clone(), output, some, meanwhile);
}

fn main() {}
