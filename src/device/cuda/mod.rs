//! The copy engine for CUDA: page-locked staging, a stream of its own, and events that tell when a copy has arrived.
//!
//! Written against the driver API, which is loaded at run time: without a driver there is no engine, and the portable one
//! serves. It writes straight to the addresses that pools have in ggml's CUDA buffers, in the device's primary context,
//! which is the one that ggml uses. Three layers, as in cudarc: its functions, `driver` around them, and the engine. It
//! knows bytes and slots; what is copied, and why, is for others.

mod driver;
mod engine;
mod staging;
#[cfg(test)]
pub(crate) mod tests;

pub use engine::CudaEngine;

use crate::device::copy::CopyEngine;
use crate::ggml::{Device, Memory};
use crate::{Error, Result};

/// ggml's registry of CUDA devices (HIP and MUSA have others).
const CUDA: &str = "CUDA";
/// Enough for an address.
const SAMPLE_BYTES: usize = 256;

/// An engine for experts of up to `expert_bytes` on a CUDA device; `None` for any other device.
///
/// Staging is page-locked if `pinned`, and if the driver can. Fails without a driver, or where it refuses anything else.
pub fn engine_for(device: Device, expert_bytes: usize, pinned: bool) -> Option<Result<Box<dyn CopyEngine>>> {
    if device.registry_name() != CUDA {
        return None;
    }
    let engine = sample(device).and_then(|sample| CudaEngine::new(sample.address(0) as usize, expert_bytes, pinned));
    Some(engine.map(|engine| Box::new(engine) as Box<dyn CopyEngine>))
}

/// A little of the device's memory: the driver knows whose it is. Names and bus ids do not tell: parts of one GPU (MIG, and
/// ggml's virtual devices) share them.
fn sample(device: Device) -> Result<Memory> {
    let memory = device.buffer_type().and_then(|kind| Memory::allocate(kind, SAMPLE_BYTES));
    memory.ok_or(Error::Ggml("a little of the device's memory"))
}
