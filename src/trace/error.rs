//! What can be wrong with a trace, read or written. Every error says what was found and what was expected.

use super::data::{MAX_EXPERTS, MAX_LAYERS, MAX_MIB};
use crate::units::Expert;
use std::io;

/// Why a file cannot be used as a trace.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The system does not let us read it.
    #[error("cannot read: {0}")]
    Unreadable(#[from] io::Error),
    /// A folder, a pipe or the like.
    #[error("is not a regular file; expected a trace")]
    NotRegular,
    /// More than 1,024 MiB.
    #[error("is larger than {MAX_MIB} MiB; expected a shorter trace")]
    TooLarge,
    /// Neither format.
    #[error("is no trace; expected what --moe-trace-out writes, or CSV with the columns phase, layer and expert")]
    NotATrace,
    /// Nothing to replay.
    #[error("holds no decoded token; expected at least one")]
    NoDecode,
    /// A line of CSV.
    #[error("line {line}: {column} is {value:?}; expected {expected}")]
    Field {
        /// From 1.
        line: usize,
        /// The column's name.
        column: &'static str,
        /// What it is.
        value: String,
        /// What it should be.
        expected: String,
    },
    /// A line of CSV that is no line.
    #[error("line {line}: is too long or not text; expected comma-separated numbers")]
    Line {
        /// From 1.
        line: usize,
    },
    /// An expert that was used already.
    #[error("line {line}: expert {expert} is there twice; expected each expert once per token and layer")]
    Twice {
        /// From 1.
        line: usize,
        /// Its id.
        expert: u16,
    },
    /// More layers than any model has.
    #[error("has more than {MAX_LAYERS} layers; expected fewer")]
    TooManyLayers,
    /// A kind of record that does not exist.
    #[error("byte {offset}: a record of kind {kind}; expected 77 (model), 76 (layer) or 66 (batch)")]
    Kind {
        /// Where, from 0.
        offset: usize,
        /// What it is.
        kind: u8,
    },
    /// A model's fingerprint that is none.
    #[error("byte {offset}: the model's fingerprint is not 16 hex digits")]
    Fingerprint {
        /// Where, from 0.
        offset: usize,
    },
    /// A layer that cannot be.
    #[error(
        "byte {offset}: layer {layer} has {n_expert} experts, {n_used} per token; expected 1 to {MAX_EXPERTS} and no more per token"
    )]
    Layer {
        /// Where, from 0.
        offset: usize,
        /// Layer number.
        layer: u16,
        /// What it says.
        n_expert: u16,
        /// What it says.
        n_used: u16,
    },
    /// A layer that is defined twice.
    #[error("byte {offset}: layer {layer} is defined again; expected once")]
    LayerTwice {
        /// Where, from 0.
        offset: usize,
        /// Layer number.
        layer: u16,
    },
    /// A batch of a layer that is not defined before it.
    #[error("byte {offset}: a batch of layer {layer}, which is not defined; expected its definition first")]
    UnknownLayer {
        /// Where, from 0.
        offset: usize,
        /// Layer number.
        layer: u16,
    },
    /// A batch without tokens.
    #[error("byte {offset}: a batch of layer {layer} without tokens; expected at least one")]
    NoTokens {
        /// Where, from 0.
        offset: usize,
        /// Layer number.
        layer: u16,
    },
    /// An expert that the layer does not have.
    #[error("byte {offset}: layer {layer}: expert {expert}; expected a number below {n_expert}")]
    Expert {
        /// Where the batch begins, from 0.
        offset: usize,
        /// Layer number.
        layer: u16,
        /// What it is.
        expert: u16,
        /// Experts in the layer.
        n_expert: u16,
    },
}

/// Why a record was not written.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum TraceWriteError {
    /// The system did not let us write.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A model's fingerprint that is none.
    #[error("fingerprint {0:?}; expected 16 hex digits")]
    Fingerprint(String),
    /// A layer that cannot be.
    #[error(
        "layer {layer} has {n_expert} experts, {n_used} per token; expected 1 to {MAX_EXPERTS} and no more per token"
    )]
    Layer {
        /// Layer number.
        layer: u16,
        /// Its experts.
        n_expert: u16,
        /// Its experts per token.
        n_used: u16,
    },
    /// An expert that the layer does not have.
    #[error("layer {layer}: expert {expert}; expected a number below {n_expert}")]
    Expert {
        /// Layer number.
        layer: u16,
        /// What it is.
        expert: Expert,
        /// Experts in the layer.
        n_expert: u16,
    },
    /// Ids missing or left over.
    #[error("layer {layer}: {n_ids} ids; expected {n_tokens} tokens of {n_used}")]
    Ids {
        /// Layer number.
        layer: u16,
        /// Ids given.
        n_ids: usize,
        /// Tokens of the call.
        n_tokens: u16,
        /// Experts per token.
        n_used: u16,
    },
}
