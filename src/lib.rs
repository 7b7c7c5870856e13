//! moe-hot: keeps the experts a mixture-of-experts model really uses on the GPU, as one more ggml backend.
//!
//! llama.cpp loads this library through `GGML_BACKEND_PATH`. Its buffer type holds the expert tensors, so
//! llama.cpp's scheduler hands us each layer's expert FFN as one small graph. See `CONTRIBUTING.md` for a map.

pub mod cache;
pub mod cli;
pub mod config;
pub mod copy;
pub mod cuda;
pub mod engine;
mod error;
pub mod ggml;
pub mod gguf;
pub mod lanes;
pub mod moe;
pub mod perf;
pub mod plugin;
pub mod routing;

pub use error::{Error, Result};
