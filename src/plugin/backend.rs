//! Backend instances: one per llama.cpp context. Work is done when `graph_compute` returns.
//!
//! Inputs come without a wait where their backend can read without one: it is waited for once, when they are needed.
//!
//! An instance's context is a boxed [`Instance`].

use super::event;
use super::guard::{NAME, guard};
use super::sources::{Sources, have_equal_layouts, is_in_host_memory};
use crate::ggml::{AbortCallback, Graph, Level, log, sys};
use crate::runtime::Context;
use std::ffi::{c_char, c_int};
use std::ptr::null_mut;

const INTERFACE: sys::ggml_backend_i = sys::ggml_backend_i {
    get_name: Some(get_name),
    free: Some(free),
    set_tensor_async: None,
    get_tensor_async: None,
    set_tensor_2d_async: None,
    get_tensor_2d_async: None,
    cpy_tensor_async: Some(cpy_tensor_async),
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

/// Behind a backend instance of ours.
struct Instance {
    context: Context,
    sources: Sources,
}

/// A new instance on `device`; NULL only if ggml's CPU backend cannot be made.
pub(super) fn new(device: sys::ggml_backend_dev_t) -> sys::ggml_backend_t {
    match Context::new() {
        Ok(context) => Box::into_raw(Box::new(sys::ggml_backend {
            // ggml only reads it.
            guid: (&raw const GUID).cast_mut(),
            iface: INTERFACE,
            device,
            context: Box::into_raw(Box::new(Instance { context, sources: Sources::NONE })).cast(),
        })),
        Err(error) => {
            log(Level::Error, &error.to_string());
            null_mut()
        }
    }
}

/// # Safety
/// `backend` was made by [`new`], is not freed yet, and is used by this thread alone.
unsafe fn instance<'a>(backend: sys::ggml_backend_t) -> &'a mut Instance {
    // SAFETY: `new` stored a boxed `Instance`; the caller vouches for the rest.
    unsafe { &mut *(*backend).context.cast::<Instance>() }
}

unsafe extern "C" fn get_name(_: sys::ggml_backend_t) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn free(backend: sys::ggml_backend_t) {
    guard("freeing a backend", (), || {
        // SAFETY: ggml frees each instance once; both boxes were made by `new`. The context's address is read before the
        // instance becomes a box, after which the pointer must not be used.
        unsafe {
            drop(Box::from_raw((*backend).context.cast::<Instance>()));
            drop(Box::from_raw(backend));
        }
    });
}

/// Takes an input of a split from another backend. `false`: the host is to copy it, and waits for it.
unsafe extern "C" fn cpy_tensor_async(
    source: sys::ggml_backend_t,
    backend: sys::ggml_backend_t,
    src: *const sys::ggml_tensor,
    dst: *mut sys::ggml_tensor,
) -> bool {
    guard("taking an input", false, || {
        // SAFETY: the scheduler passes live instances, ours last, and valid tensors with memory: `src` is the source's, `dst`
        // lies in host memory, the only kind that we support, and stays until the split has been computed.
        unsafe {
            let can_read = (*source).iface.get_tensor_async.is_some() && !is_in_host_memory(src);
            if !can_read || !is_in_host_memory(dst) || !have_equal_layouts(src, dst) {
                return false;
            }
            if !instance(backend).sources.add(source) {
                return false;
            }
            sys::ggml_backend_tensor_get_async(source, src, (*dst).data, 0, sys::ggml_nbytes(src));
        }
        true
    })
}

/// Nothing of ours is ever pending. Inputs may be, which is their backends' work: the scheduler calls this before each input
/// that it hands over, and a wait there would be one too many. It waits for their backends itself before anybody but
/// [`graph_compute`] looks at them.
unsafe extern "C" fn synchronize(_: sys::ggml_backend_t) {}

unsafe extern "C" fn graph_compute(backend: sys::ggml_backend_t, graph: *mut sys::ggml_cgraph) -> sys::ggml_status {
    guard("computing experts", sys::GGML_STATUS_FAILED, || {
        // SAFETY: the scheduler hands a valid graph to a live instance, on the one thread that uses both.
        let (instance, graph) = unsafe { (instance(backend), Graph::from_raw(graph)) };
        // SAFETY: the scheduler took this split's inputs from live backends.
        unsafe { instance.sources.wait() };
        graph.map_or(sys::GGML_STATUS_FAILED, |graph| instance.context.compute(&graph))
    })
}

/// Threads to compute with.
///
/// # Safety
/// `backend` is one of these instances, alive, and used by this thread alone.
pub(super) unsafe fn set_threads(backend: sys::ggml_backend_t, n_threads: c_int) {
    // SAFETY: passed on from the caller.
    unsafe { instance(backend) }.context.set_threads(n_threads);
}

/// Whom to ask whether to stop.
///
/// # Safety
/// As for [`set_threads`].
pub(super) unsafe fn set_abort_callback(backend: sys::ggml_backend_t, callback: AbortCallback) {
    // SAFETY: passed on from the caller.
    unsafe { instance(backend) }.context.set_abort_callback(callback);
}
