//! The library's one error type: what went wrong, where, and the offending value.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

/// Everything that can go wrong in the library.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host's ggml cannot be used, or is not one that this plugin serves.
    #[error("{0}")]
    Host(String),
    /// Something of the host's ggml is laid out as in none that this plugin serves.
    #[error("the host has {0}")]
    Layout(&'static str),
    /// ggml has loaded no CPU backend before us.
    #[error("no CPU device in the ggml that has loaded this plugin: it must load its CPU backend first")]
    NoCpuDevice,
    /// ggml refused to create something.
    #[error("ggml could not create {0}")]
    Ggml(&'static str),
    /// Our own code asked for something that is not allowed: a fault of this library.
    #[error("internal error: {0}; please report it")]
    Contract(&'static str),
    /// The system refused a thread.
    #[error("the system refused a thread {0}")]
    Thread(&'static str),
    /// CUDA's driver refused something, or is missing.
    #[error("CUDA: {call}: {reason}")]
    Cuda {
        /// What was attempted, or the driver's function.
        call: &'static str,
        /// The driver's answer.
        reason: String,
    },
    /// What was copied to a device is not there.
    #[error("a copy to it failed")]
    CopyFailed,
    /// An expert id points outside the layer.
    #[error("layer {layer}: expert id {id} at k = {k} of token {token} is outside 0..{n_expert}")]
    ExpertId {
        /// Layer number.
        layer: u32,
        /// The id found.
        id: i32,
        /// Index within the token's top-k.
        k: usize,
        /// Token within the batch.
        token: usize,
        /// Experts in the layer.
        n_expert: u32,
    },
    /// The ids tensor cannot be read as expert ids.
    #[error("layer {layer}: expert ids must be 32-bit integers in host memory, [n_expert_used, n_tokens]")]
    IdsTensor {
        /// Layer number.
        layer: u32,
    },
    /// A file cannot be read, written, or used for what it was named for.
    #[error("{path}: {what}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, as the module says that reads or writes such files.
        what: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    /// What is wrong with the file at `path`.
    pub(crate) fn file(path: &Path, what: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::File { path: path.into(), what: Box::new(what) }
    }
}

/// `Result` with this library's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_of_our_own_is_told_from_a_refusal_of_ggml() {
        let ours = Error::Contract("a range outside its tensor").to_string();
        assert_eq!(ours, "internal error: a range outside its tensor; please report it");
        assert_eq!(Error::Ggml("a buffer").to_string(), "ggml could not create a buffer");
    }
}
