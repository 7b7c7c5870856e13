//! The headers of GGUF model files: which tensors a model has, before anything loads it.
//!
//! Our own small reader, bounded by constants: it allocates nothing that a file merely claims, and skips what the
//! launcher does not ask for. Whether the program can load the model is the program's business.
#![forbid(unsafe_code)]

mod error;
mod header;
mod model;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod types;

pub use error::GgufError;
pub use header::{Fact, Header, TensorInfo};
pub use types::Type;

pub(crate) use model::ModelFile;
