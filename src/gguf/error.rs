//! What can be wrong with a model file. Every error says what was found and what was expected.

use std::io;

/// Why a file cannot be read as a model.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The system's answer.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// A folder, a pipe, a device.
    #[error("is not a regular file")]
    NotRegular,
    /// Another kind of file.
    #[error("begins with {0:?}; expected \"GGUF\"")]
    Magic(String),
    /// Too old, too new, or of the other byte order.
    #[error("GGUF version {0}; expected 2 or 3")]
    Version(u32),
    /// The file ends, or the header does not.
    #[error("its header ends at byte {0}, in the middle, or is larger than 256 MiB")]
    Truncated(u64),
    /// A number above its limit.
    #[error("{what}: {value}; expected at most {max}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// What the file says.
        value: u64,
        /// What we read at most.
        max: u64,
    },
    /// A key or name.
    #[error("a key or tensor name is not UTF-8")]
    NotText,
    /// A metadata entry.
    #[error("key {key:?} has a value of type {kind}; expected {expected}")]
    Kind {
        /// The key.
        key: String,
        /// The value's type number.
        kind: u32,
        /// What it should be.
        expected: &'static str,
    },
    /// No power of two.
    #[error("general.alignment is {0}; expected a power of two")]
    Alignment(u64),
    /// A type that ggml does not have.
    #[error("tensor {name:?} has type {id}; expected a type of the pinned llama.cpp")]
    Type {
        /// Tensor.
        name: String,
        /// Its type's number.
        id: u32,
    },
    /// A shape that cannot be.
    #[error("tensor {name:?} has shape {shape:?}; expected whole blocks and a size below 2^63 bytes")]
    Shape {
        /// Tensor.
        name: String,
        /// Shape in ggml order.
        shape: [u64; 4],
    },
    /// Two of one name.
    #[error("tensor {0:?} is there twice")]
    Duplicate(String),
    /// Parts of a split model that are not there, or not named as llama.cpp names them.
    #[error(
        "is one of {expected} parts of a model, and {found} of them were found; expected the first part, named …-00001-of-{expected:05}.gguf, with the others beside it"
    )]
    Parts {
        /// Parts that were found.
        found: u64,
        /// Parts that the file says there are.
        expected: u64,
    },
    /// The file ends before its tensors do.
    #[error("ends at byte {len}; expected tensor {name:?} up to byte {end}: the file is cut off")]
    Data {
        /// Tensor.
        name: String,
        /// Where its data ends.
        end: u64,
        /// The file's length.
        len: u64,
    },
}
