//! What an expert FFN looks like in a graph: which operations are ours to claim, and which nodes form a block.
//!
//! Everything is recognised by operation and buffer, never by an architecture's or tensor's name. No I/O here.
#![forbid(unsafe_code)]

mod block;
mod claim;
mod template;

pub use block::{Block, Shape};
pub use claim::Claims;
pub use template::{FfnTemplate, Rows, Source, WeightShape};
