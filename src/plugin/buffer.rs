//! Buffers: each wraps a host buffer of ggml's own and adds nothing but its type and a goodbye to the engine.
//!
//! A buffer's context is the wrapped buffer.

use super::guard::guard;
use crate::ggml::{BufferType, Device, open_buffer, sys};
use crate::runtime::runtime;
use std::ffi::c_void;
use std::ptr::null_mut;

const INTERFACE: sys::ggml_backend_buffer_i = sys::ggml_backend_buffer_i {
    free_buffer: Some(free_buffer),
    get_base: Some(get_base),
    init_tensor: None,
    memset_tensor: Some(memset_tensor),
    set_tensor: Some(set_tensor),
    get_tensor: Some(get_tensor),
    set_tensor_2d: None,
    get_tensor_2d: None,
    cpy_tensor: Some(cpy_tensor),
    clear: Some(clear),
    reset: None,
};

/// The GPU's page-locked memory, if there is such a GPU and the user has not ruled it out (`--no-host`).
pub(super) fn pinned_type() -> Option<BufferType> {
    if runtime().config().no_host { None } else { Device::gpu()?.host_buffer_type() }
}

/// New host memory: page-locked where possible, as stock does for experts, else plain. NULL if neither is to be had.
///
/// # Safety
/// `ours` is our buffer type.
pub(super) unsafe fn allocate(ours: sys::ggml_backend_buffer_type_t, size: usize) -> sys::ggml_backend_buffer_t {
    for kind in [pinned_type(), BufferType::cpu()].into_iter().flatten() {
        // SAFETY: the buffer type is registered.
        let inner = unsafe { sys::ggml_backend_buft_alloc_buffer(kind.as_raw(), size) };
        if !inner.is_null() {
            // SAFETY: `inner` is a new host buffer that nobody else owns; `ours` is passed on from the caller.
            return unsafe { wrap(ours, inner, None) };
        }
    }
    null_mut()
}

/// A buffer over the loader's memory map: nothing is read or copied.
///
/// # Safety
/// `ours` is our buffer type; `data` points to `size` bytes that outlive the buffer.
pub(super) unsafe fn from_host_memory(
    ours: sys::ggml_backend_buffer_type_t,
    data: *mut c_void,
    size: usize,
) -> sys::ggml_backend_buffer_t {
    // SAFETY: passed on from the caller.
    let inner = unsafe { sys::ggml_backend_cpu_buffer_from_ptr(data, size) };
    if inner.is_null() {
        return null_mut();
    }
    // SAFETY: `inner` is a new host buffer that nobody else owns; `ours` is passed on from the caller.
    unsafe { wrap(ours, inner, Some(data as usize)) }
}

/// # Safety
/// `ours` is our buffer type. `inner` is a valid host buffer; its ownership passes to the new buffer.
unsafe fn wrap(
    ours: sys::ggml_backend_buffer_type_t,
    inner: sys::ggml_backend_buffer_t,
    mapped_at: Option<usize>,
) -> sys::ggml_backend_buffer_t {
    // SAFETY: `inner` is valid; ggml owns and later deletes the struct it makes here. `free_buffer`, which ggml calls
    // before that, has the engine close the buffer.
    unsafe {
        let size = sys::ggml_backend_buffer_get_size(inner);
        let buffer = sys::ggml_backend_buffer_init(ours, INTERFACE, inner.cast(), size);
        open_buffer(buffer as usize);
        runtime().buffer_made(buffer as usize, mapped_at);
        buffer
    }
}

/// # Safety
/// `buffer` was made by [`wrap`] and is not freed yet.
unsafe fn inner(buffer: sys::ggml_backend_buffer_t) -> sys::ggml_backend_buffer_t {
    // SAFETY: `wrap` stored the inner buffer as context.
    unsafe { (*buffer).context.cast() }
}

unsafe extern "C" fn free_buffer(buffer: sys::ggml_backend_buffer_t) {
    guard("freeing a buffer", (), || {
        runtime().forget_buffer(buffer as usize);
        // SAFETY: ggml frees each of our buffers once; nothing reads the range after `forget_buffer`.
        unsafe { sys::ggml_backend_buffer_free(inner(buffer)) }
    });
}

unsafe extern "C" fn get_base(buffer: sys::ggml_backend_buffer_t) -> *mut c_void {
    // SAFETY: ggml calls this on a live buffer of ours.
    guard("asking for a buffer's address", null_mut(), || unsafe { sys::ggml_backend_buffer_get_base(inner(buffer)) })
}

unsafe extern "C" fn memset_tensor(
    buffer: sys::ggml_backend_buffer_t,
    tensor: *mut sys::ggml_tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    // SAFETY: ggml calls this on a live buffer of ours, with a tensor and a range inside it; the inner buffer is host memory.
    guard("filling a tensor", (), || unsafe {
        let inner = inner(buffer);
        if let Some(memset) = (*inner).iface.memset_tensor {
            memset(inner, tensor, value, offset, size);
        }
    });
}

unsafe extern "C" fn set_tensor(
    buffer: sys::ggml_backend_buffer_t,
    tensor: *mut sys::ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: as for `memset_tensor`; `data` holds `size` bytes.
    guard("writing a tensor", (), || unsafe {
        let inner = inner(buffer);
        if let Some(set) = (*inner).iface.set_tensor {
            set(inner, tensor, data, offset, size);
        }
    });
}

unsafe extern "C" fn get_tensor(
    buffer: sys::ggml_backend_buffer_t,
    tensor: *const sys::ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: as for `memset_tensor`; `data` has room for `size` bytes.
    guard("reading a tensor", (), || unsafe {
        let inner = inner(buffer);
        if let Some(get) = (*inner).iface.get_tensor {
            get(inner, tensor, data, offset, size);
        }
    });
}

unsafe extern "C" fn cpy_tensor(
    buffer: sys::ggml_backend_buffer_t,
    src: *const sys::ggml_tensor,
    dst: *mut sys::ggml_tensor,
) -> bool {
    // SAFETY: as for `memset_tensor`; `dst` is in this buffer, `src` is a valid tensor anywhere.
    guard("copying a tensor", false, || unsafe {
        let inner = inner(buffer);
        (*inner).iface.cpy_tensor.is_some_and(|copy| copy(inner, src, dst))
    })
}

unsafe extern "C" fn clear(buffer: sys::ggml_backend_buffer_t, value: u8) {
    // SAFETY: ggml calls this on a live buffer of ours.
    guard("clearing a buffer", (), || unsafe { sys::ggml_backend_buffer_clear(inner(buffer), value) });
}
