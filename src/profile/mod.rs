//! Which experts were used: counters on the token's path, and the profile file they end up in.
#![forbid(unsafe_code)]

mod compare;
mod counts;
mod error;
mod fingerprint;
mod format;
mod head;
mod json;
mod open;
mod output;
mod read;
#[cfg(test)]
mod read_tests;
mod replace;
#[cfg(test)]
mod testing;
mod write;

pub use compare::{ExpertShape, ModelMismatchError, ModelShape};
pub use counts::LayerCounts;
pub use error::ProfileError;
pub use fingerprint::ModelId;
pub use format::Count;
pub use read::{RecordedLayer, RecordedProfile};

pub(crate) use compare::other_quantisation;
pub(crate) use counts::{Counter, Counts, check_ids};
pub(crate) use fingerprint::{TensorId, combine_fingerprints, fingerprint_in_file};
pub(crate) use format::{MAX_COUNT, MAX_EXPERTS, MAX_LAYER, MAX_MIB, OPT_SCHEMA, SCHEMA};
pub(crate) use output::{Acquired, MayReplace, OutputFile};
pub(crate) use replace::replace_keeping_old;
pub(crate) use write::{BatchCounts, LayerPerf, LayerRecord, MoeHot, Profile, Summary, ratio, without_zeros};
