//! Which experts were used: counters on the token's path, and the profile file they end up in.
#![forbid(unsafe_code)]

mod counts;
mod fault;
mod file;
mod fingerprint;
mod input;
mod output;
#[cfg(test)]
pub(crate) mod testing;
mod validate;
#[cfg(test)]
mod validate_tests;

pub use counts::{Counter, Counts, LayerCounts, check_ids};
pub use fault::ProfileFault;
pub use file::{BatchCounts, Count, LayerPerf, LayerRecord, ModelId, MoeHot, Profile, SCHEMA, Summary, ratio};
pub use fingerprint::{TensorId, combine as combine_fingerprints, layer_number};
pub use output::{OutputFile, folder_of};
pub use validate::{Demand, LayerDemand};
