//! What happens when llama.cpp calls: the one place that joins `moe`, `lanes`, `cache` and `device`.
//!
//! One [`registry::Runtime`] per process knows the models; one [`Context`] per llama.cpp context computes. Nothing here
//! knows vtables. Once a graph is known, nothing on a token's path allocates, logs or does I/O, and no lock is
//! held for longer than it takes to look up, count or learn a layer's ids, or to copy its counts.
#![forbid(unsafe_code)]

mod background;
mod bypass;
mod claims;
mod context;
mod control;
mod hot_device;
mod model;
mod record;
mod registry;
mod timing;
mod view;

pub use context::Context;
pub use registry::runtime;
