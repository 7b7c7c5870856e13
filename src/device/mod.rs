//! Device memory: pools of slots, and the engines that copy experts into them.
//!
//! Knows bytes and slots; must not know models, nor what an expert is worth.

pub mod copy;
pub mod cuda;
mod pool;

pub use pool::{Pool, PoolTensor, PoolWriter, padding};
