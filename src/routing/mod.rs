//! Which experts were used: counters on the token's path, and the profile file they end up in.
#![forbid(unsafe_code)]

mod compare;
mod counts;
mod fault;
mod fingerprint;
mod input;
mod output;
mod profile;
#[cfg(test)]
pub(crate) mod testing;
pub mod trace;
mod validate;
#[cfg(test)]
mod validate_tests;

pub use compare::Mismatch;
pub use counts::{Counter, Counts, LayerCounts, check_ids};
pub use fault::ProfileFault;
pub use fingerprint::{TensorId, combine as combine_fingerprints, layer_number};
pub use output::{OutputFile, folder_of};
pub use profile::{BatchCounts, Count, LayerPerf, LayerRecord, ModelId, MoeHot, Profile, SCHEMA, Summary, ratio};
pub use validate::{Demand, LayerDemand};
