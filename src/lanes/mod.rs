//! Where expert FFNs are computed: the cold lane on the CPU, the hot lane on a device, and how their rows meet.
//!
//! They run what they are given and choose nothing.
#![forbid(unsafe_code)]

mod cold;
mod hot;
mod requests;
mod template_graph;

pub use cold::ColdLane;
pub use hot::{HotIndex, HotLane, TooSlow, Width, try_out};
pub use requests::{Form, Requests};

use crate::device::PoolTensor;
use crate::moe::WeightShape;

/// The pool's tensor for an expert tensor: a slot for each of its experts.
pub fn pool_tensor(shape: &WeightShape) -> PoolTensor {
    PoolTensor { kind: shape.kind, ne: shape.ne, slot_dim: shape.expert_dim, slot_bytes: shape.expert_bytes }
}
