//! Backend instances: one per llama.cpp context. Work is done when `graph_compute` returns.
//!
//! An instance's context is a boxed [`Context`].

use super::event;
use super::guard::{NAME, guard};
use crate::ggml::{AbortCallback, Graph, Level, log, sys};
use crate::runtime::Context;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

const INTERFACE: sys::ggml_backend_i = sys::ggml_backend_i {
    get_name: Some(get_name),
    free: Some(free),
    set_tensor_async: None,
    get_tensor_async: None,
    set_tensor_2d_async: None,
    get_tensor_2d_async: None,
    cpy_tensor_async: None,
    synchronize: Some(synchronize),
    graph_plan_create: None,
    graph_plan_free: None,
    graph_plan_update: None,
    graph_plan_compute: None,
    graph_compute: Some(graph_compute),
    event_record: Some(event::record),
    event_wait: Some(event::wait),
    graph_optimize: None,
};

/// Identifies our instances: `moe-hot v1 plugin`, in ASCII.
static GUID: sys::ggml_guid = *b"moe-hotv1-plugin";

/// A new instance on `device`; NULL only if ggml's CPU backend cannot be made.
pub(super) fn new(device: sys::ggml_backend_dev_t) -> sys::ggml_backend_t {
    match Context::new() {
        Ok(context) => Box::into_raw(Box::new(sys::ggml_backend {
            // ggml only reads it.
            guid: (&raw const GUID).cast_mut(),
            iface: INTERFACE,
            device,
            context: Box::into_raw(Box::new(context)).cast(),
        })),
        Err(error) => {
            log(Level::Error, &error.to_string());
            null_mut()
        }
    }
}

/// # Safety
/// `backend` was made by [`new`], is not freed yet, and is used by this thread alone.
unsafe fn context<'a>(backend: sys::ggml_backend_t) -> &'a mut Context {
    // SAFETY: `new` stored a boxed `Context`; the caller vouches for the rest.
    unsafe { &mut *(*backend).context.cast::<Context>() }
}

unsafe extern "C" fn get_name(_: sys::ggml_backend_t) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn free(backend: sys::ggml_backend_t) {
    guard("freeing a backend", (), || {
        // SAFETY: ggml frees each instance once; both boxes were made by `new`. The context's address is read before the
        // instance becomes a box, after which the pointer must not be used.
        unsafe {
            drop(Box::from_raw((*backend).context.cast::<Context>()));
            drop(Box::from_raw(backend));
        }
    });
}

/// Nothing is ever pending.
unsafe extern "C" fn synchronize(_: sys::ggml_backend_t) {}

unsafe extern "C" fn graph_compute(backend: sys::ggml_backend_t, graph: *mut sys::ggml_cgraph) -> sys::ggml_status {
    guard("computing experts", sys::GGML_STATUS_FAILED, || {
        // SAFETY: the scheduler hands a valid graph to a live instance, on the one thread that uses both.
        let (context, graph) = unsafe { (context(backend), Graph::from_raw(graph)) };
        graph.map_or(sys::GGML_STATUS_FAILED, |graph| context.compute(&graph))
    })
}

/// Found by llama.cpp under this name with `ggml_backend` in front.
pub(super) unsafe extern "C" fn set_n_threads(backend: sys::ggml_backend_t, n_threads: c_int) {
    // SAFETY: llama.cpp calls this on a live instance between computations.
    guard("setting threads", (), || unsafe { context(backend) }.set_threads(n_threads));
}

/// Found by llama.cpp under this name with `ggml_backend` in front.
pub(super) unsafe extern "C" fn set_abort_callback(
    backend: sys::ggml_backend_t,
    function: sys::ggml_abort_callback,
    data: *mut c_void,
) {
    guard("setting the abort callback", (), || {
        // SAFETY: as for `set_n_threads`. The host keeps function and data valid until it sets others or frees the instance.
        let (context, callback) = unsafe { (context(backend), AbortCallback::new(function, data)) };
        context.set_abort_callback(callback);
    });
}
