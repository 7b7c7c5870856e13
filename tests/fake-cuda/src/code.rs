//! The driver's answers (`CUresult`) that occur here.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

pub(crate) type Code = u32;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;
pub(crate) const UNKNOWN: Code = 999;

/// What the function of this name answers where it is to fail.
pub(crate) fn of_fault(function: &str) -> Code {
    match function {
        "cuInit" => NO_DEVICE,
        "cuDeviceGet" => INVALID_DEVICE,
        "cuDevicePrimaryCtxRetain" | "cuMemHostAlloc" => OUT_OF_MEMORY,
        "cuCtxSetCurrent" => INVALID_CONTEXT,
        _ => UNKNOWN,
    }
}

/// The error that a context has run into, after which it answers nothing else.
#[derive(Default)]
pub(crate) struct LastingError(AtomicU32);

impl LastingError {
    pub(crate) fn store(&self, code: Code) {
        self.0.store(code, SeqCst);
    }

    pub(crate) fn load(&self) -> Code {
        self.0.load(SeqCst)
    }
}
