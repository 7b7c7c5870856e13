//! What can be wrong with a profile that is read, and with the file that one is written to.
//!
//! Every error about input says what was found and what was expected.

use super::format::{MAX_DEPTH, MAX_EXPERTS, MAX_LAYER, MAX_MIB, SCHEMA};
use std::io;
use std::path::PathBuf;

/// Why a file cannot be used as a profile.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Nothing is there.
    #[error("no such file; expected a profile that --moe-layer-perf-out has written")]
    Missing,
    /// The system does not let us read it.
    #[error("cannot be read: {0}; expected a readable file")]
    Unreadable(io::Error),
    /// A symbolic link to nothing.
    #[error("is a symbolic link to {target:?}, where nothing is; expected a file")]
    DanglingLink {
        /// What it points to.
        target: PathBuf,
    },
    /// A folder.
    #[error("is a folder; expected a file")]
    Folder,
    /// A pipe, a device or the like.
    #[error("is a pipe, socket or device; expected a regular file")]
    NotRegular,
    /// More than 64 MiB.
    #[error("is larger than {MAX_MIB} MiB; expected a profile, which is smaller")]
    TooLarge,
    /// No byte, or white space only.
    #[error("is empty; expected JSON")]
    Empty,
    /// Not text.
    #[error("byte {offset} is not UTF-8; expected JSON text")]
    NotText {
        /// Where, from 0.
        offset: usize,
    },
    /// A byte that no text has.
    #[error("byte {offset} is NUL; expected JSON text")]
    Nul {
        /// Where, from 0.
        offset: usize,
    },
    /// JSON that ends too early.
    #[error("ends in line {line}, column {column}, in the middle of its JSON; expected the whole file")]
    Truncated {
        /// From 1.
        line: usize,
        /// From 1.
        column: usize,
    },
    /// JSON within JSON within JSON.
    #[error("is nested too deeply; expected JSON of at most {MAX_DEPTH} levels")]
    TooDeep,
    /// What some editors put before a text; JSON has none.
    #[error("is not JSON: it begins with a byte-order mark; expected an object with \"schema\" and \"layers\"")]
    ByteOrderMark,
    /// No JSON.
    #[error("is not JSON: {0}; expected an object with \"schema\" and \"layers\"")]
    NotJson(String),
    /// A field is missing, there twice, or of another kind.
    #[error("{0}; expected the fields of {SCHEMA}")]
    Field(String),
    /// The schema of something else.
    #[error("its schema is {0:?}; expected {SCHEMA:?}")]
    Schema(String),
    /// `layers` is `[]`.
    #[error("its list of layers is empty; expected at least one")]
    NoLayers,
    /// Every count is zero or missing.
    #[error("counts no request in any layer; expected a profile of a run that decoded something")]
    NoCounts,
    /// A layer number that cannot be.
    #[error("{section}[{index}].layer is {value}; expected a whole number from 0 to {MAX_LAYER}")]
    LayerNumber {
        /// The list it is in.
        section: &'static str,
        /// Where in the list.
        index: usize,
        /// What it is.
        value: String,
    },
    /// Two entries for one layer.
    #[error("{section}: layer {layer} is there twice; expected each layer once")]
    DuplicateLayer {
        /// The list they are in.
        section: &'static str,
        /// Layer number.
        layer: u32,
    },
    /// A number of experts that cannot be.
    #[error("n_expert is {value}; expected a whole number up to {MAX_EXPERTS}")]
    ExpertsOfModel {
        /// What it is.
        value: String,
    },
    /// A layer's number of experts that cannot be.
    #[error("moe_hot.layers: layer {layer}: n_expert is {value}; expected a whole number from 1 to {MAX_EXPERTS}")]
    ExpertsOfLayer {
        /// Layer number.
        layer: u32,
        /// What it is.
        value: String,
    },
    /// An expert that the layer does not have.
    #[error("layer {layer}: {list} has expert {id}; expected a whole number below {n_expert}")]
    ExpertId {
        /// Layer number.
        layer: u32,
        /// The list it is in.
        list: &'static str,
        /// What it is.
        id: String,
        /// Experts in the layer.
        n_expert: u32,
    },
    /// An expert twice in one list.
    #[error("layer {layer}: {list} has expert {id} twice; expected each expert once")]
    DuplicateExpert {
        /// Layer number.
        layer: u32,
        /// The list it is in.
        list: &'static str,
        /// Expert id.
        id: u32,
    },
    /// A count that cannot be.
    #[error("layer {layer}: {list} counts {count} requests of expert {id}; expected a whole number from 0 to 2^53")]
    Count {
        /// Layer number.
        layer: u32,
        /// The list it is in.
        list: &'static str,
        /// Expert id.
        id: u32,
        /// What it is.
        count: String,
    },
    /// A rank that cannot be.
    #[error("layer {layer}: ranks gives expert {id} the rank {rank}; expected a whole number from 1 to 65535")]
    Rank {
        /// Layer number.
        layer: u32,
        /// Expert id as it stands there.
        id: String,
        /// What it is.
        rank: String,
    },
    /// All counts together are too many.
    #[error("layer {layer}: the sum of all counts up to here is above 2^64; expected less")]
    Overflow {
        /// Layer number at which it happens.
        layer: u32,
    },
}

/// Why a file is not a profile, so that no profile may take its place.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum NotAProfileError {
    /// The system does not let us read it.
    #[error("not a routing profile: cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    /// More than 64 MiB.
    #[error("not a routing profile: larger than {MAX_MIB} MiB")]
    TooLarge,
    /// No JSON, or without the fields of a profile.
    #[error("not a routing profile: {0}")]
    NotJson(#[from] serde_json::Error),
    /// The schema of something else.
    #[error("not a routing profile: schema is {0:?}, expected {SCHEMA:?}")]
    Schema(String),
}
