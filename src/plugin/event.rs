//! Events: always over, since a computation is complete when it returns.

use super::guard::guard;
use crate::ggml::sys;
use std::ptr::null_mut;

pub(super) unsafe extern "C" fn new(device: sys::ggml_backend_dev_t) -> sys::ggml_backend_event_t {
    guard("creating an event", null_mut(), || {
        Box::into_raw(Box::new(sys::ggml_backend_event { device, context: null_mut() }))
    })
}

pub(super) unsafe extern "C" fn free(_: sys::ggml_backend_dev_t, event: sys::ggml_backend_event_t) {
    // SAFETY: ggml frees each event once; it was boxed by `new`.
    guard("freeing an event", (), || drop(unsafe { Box::from_raw(event) }));
}

pub(super) unsafe extern "C" fn synchronize(_: sys::ggml_backend_dev_t, _: sys::ggml_backend_event_t) {}

pub(super) unsafe extern "C" fn record(_: sys::ggml_backend_t, _: sys::ggml_backend_event_t) {}

pub(super) unsafe extern "C" fn wait(_: sys::ggml_backend_t, _: sys::ggml_backend_event_t) {}
