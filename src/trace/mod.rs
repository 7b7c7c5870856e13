//! Recorded routing: which experts each call of each layer used, in order. docs/traces.md describes both formats.
//!
//! Written by [`TraceWriter`] while a model runs; read whole, and trusting nothing, by [`Trace::read`].
#![forbid(unsafe_code)]

mod binary;
mod calls;
mod csv;
mod data;
mod error;
mod read;
#[cfg(test)]
mod tests;
mod writer;

pub use calls::Calls;
pub use data::{LayerInfo, LayerTrace, Trace};
pub use error::{TraceError, TraceWriteError};
pub use writer::TraceWriter;

pub(crate) use binary::MAGIC;
pub(crate) use data::MAX_MIB;
