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
use crate::ggml::Device;
use crate::{Error, Result};
use std::ffi::{CString, c_int};

/// ggml's registry of CUDA devices, and the beginning of its devices' names (`GGML_CUDA_NAME`; HIP and MUSA have others).
const CUDA: &str = "CUDA";

/// Which of the driver's devices a ggml device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceId {
    /// By its PCI bus id, such as `0000:01:00.0`.
    Bus(CString),
    /// By its number, which is the same for ggml and the driver in one process.
    Ordinal(c_int),
}

impl DeviceId {
    /// Reads ggml's name for a device (`CUDA0`) and its bus id, if it tells that.
    pub fn read(name: &str, bus_id: Option<&str>) -> Result<Self> {
        let unknown = || Error::Cuda { call: "finding the device", reason: format!("{name} is of no known form") };
        if let Some(id) = bus_id.and_then(|id| id.split("-v").next()) {
            // What ggml adds to tell virtual devices apart is gone.
            return CString::new(id).map(Self::Bus).map_err(|_| unknown());
        }
        let ordinal = name.strip_prefix(CUDA).and_then(|number| number.parse().ok());
        ordinal.map(Self::Ordinal).ok_or_else(unknown)
    }
}

/// An engine for experts of up to `expert_bytes` on a CUDA device; `None` for any other device.
///
/// Staging is page-locked if `pinned`, and if the driver can. Fails without a driver, or where it refuses anything else.
pub fn engine_for(device: Device, expert_bytes: usize, pinned: bool) -> Option<Result<Box<dyn CopyEngine>>> {
    if device.registry_name() != CUDA {
        return None;
    }
    let id = DeviceId::read(&device.name(), device.bus_id().as_deref());
    let engine = id.and_then(|id| CudaEngine::new(&id, expert_bytes, pinned));
    Some(engine.map(|engine| Box::new(engine) as Box<dyn CopyEngine>))
}
