//! Device memory: pools of slots, and the engines that copy experts into them.
//!
//! Knows bytes and slots; must not know models, nor what an expert is worth.

pub mod copy;
pub mod cuda;
#[cfg(test)]
mod machine_tests;
mod memory;
mod pool;

pub use memory::{DeviceMemory, Limit, Reservation};
pub use pool::{Pool, PoolTensor, PoolWriter, padding};
