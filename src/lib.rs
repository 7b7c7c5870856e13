//! moe-hot: keeps the experts a mixture-of-experts model really uses on the GPU, as one more ggml backend.
//!
//! llama.cpp loads this library through `GGML_BACKEND_PATH`. Its buffer type holds the expert tensors, so
//! llama.cpp's scheduler hands us each layer's expert FFN as one small graph. See `CONTRIBUTING.md` for a map.

pub mod cache;
pub mod cli;
mod device;
mod error;
mod files;
#[cfg(not(feature = "compile-fail-tests"))]
mod ggml;
#[cfg(feature = "compile-fail-tests")]
#[doc(hidden)]
pub mod ggml;
pub mod gguf;
mod lanes;
mod moe;
mod options;
mod plugin;
pub mod profile;
pub mod replay;
mod runtime;
pub mod trace;
pub mod units;

pub use error::{Error, Result};
