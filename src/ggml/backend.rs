//! A backend instance that we own: one stream of work on one device.

use super::{Device, Graph, sys};
use crate::{Error, Result};
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

/// What ggml answers to a computation (`sys::GGML_STATUS_…`).
pub type Status = sys::ggml_status;

/// The host's abort callback and its argument, passed through untouched.
#[derive(Clone, Copy)]
pub struct AbortCallback {
    /// Asked before each node; `true` ends the computation.
    pub function: sys::ggml_abort_callback,
    /// Passed to the function.
    pub data: *mut c_void,
}

type SetThreads = unsafe extern "C" fn(sys::ggml_backend_t, c_int);
type SetAbortCallback = unsafe extern "C" fn(sys::ggml_backend_t, sys::ggml_abort_callback, *mut c_void);

/// An owned backend instance, freed on drop. Used by one thread at a time.
pub struct Backend {
    raw: NonNull<sys::ggml_backend>,
    set_threads: Option<SetThreads>,
    set_abort_callback: Option<SetAbortCallback>,
}

// SAFETY: a backend instance may move between threads; `&mut self` keeps its use to one thread at a time.
unsafe impl Send for Backend {}

impl Backend {
    /// A new instance on `device`.
    pub fn new(device: Device) -> Result<Self> {
        // SAFETY: the device is registered; NULL parameters ask for defaults.
        let raw = NonNull::new(unsafe { sys::ggml_backend_dev_init(device.as_raw(), std::ptr::null()) })
            .ok_or(Error::Ggml("a backend"))?;
        // SAFETY: ggml documents these two names with exactly these signatures (ggml-backend.h).
        let set_threads = device
            .proc_address(c"ggml_backend_set_n_threads")
            .map(|f| unsafe { std::mem::transmute::<NonNull<c_void>, SetThreads>(f) });
        // SAFETY: as above.
        let set_abort_callback = device
            .proc_address(c"ggml_backend_set_abort_callback")
            .map(|f| unsafe { std::mem::transmute::<NonNull<c_void>, SetAbortCallback>(f) });
        Ok(Self { raw, set_threads, set_abort_callback })
    }

    /// What our bindings read as the instance's device; `abi` compares it with ggml's own answer.
    pub(super) fn device_field(&self) -> usize {
        // SAFETY: the instance is valid.
        unsafe { self.raw.as_ref() }.device as usize
    }

    /// Threads to compute with, where the device has any say in it.
    pub fn set_threads(&mut self, n_threads: c_int) {
        if let Some(set) = self.set_threads {
            // SAFETY: the function belongs to this instance's device.
            unsafe { set(self.raw.as_ptr(), n_threads) };
        }
    }

    /// Whom to ask whether to stop.
    pub fn set_abort_callback(&mut self, callback: AbortCallback) {
        if let Some(set) = self.set_abort_callback {
            // SAFETY: the function belongs to this instance's device; the host keeps callback and data valid.
            unsafe { set(self.raw.as_ptr(), callback.function, callback.data) };
        }
    }

    /// Computes all nodes of `graph` and waits.
    pub fn compute(&mut self, graph: &Graph<'_>) -> Status {
        // SAFETY: both are valid and this thread alone uses them.
        unsafe { sys::ggml_backend_graph_compute(self.raw.as_ptr(), graph.as_raw()) }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: we own the instance and nothing uses it any more.
        unsafe { sys::ggml_backend_free(self.raw.as_ptr()) };
    }
}
