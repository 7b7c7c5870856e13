//! Plays recorded routing through cache policies, without a model. Nothing of this is on the token's path.
#![forbid(unsafe_code)]

pub mod policies;
mod simulator;
#[cfg(test)]
mod tests;

pub use simulator::{Replay, Settings, Tally};
