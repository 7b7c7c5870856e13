//! The buffer type that expert tensors are placed in: host memory in ggml's own layout.

use super::buffer;
use super::guard::{NAME, guard};
use crate::ggml::{BufferType, sys};
use std::ffi::c_char;
use std::ptr::null_mut;

/// The buffer type of `device`. Lives as long as the process.
pub(super) fn make(device: sys::ggml_backend_dev_t) -> sys::ggml_backend_buffer_type_t {
    Box::into_raw(Box::new(sys::ggml_backend_buffer_type {
        iface: sys::ggml_backend_buffer_type_i {
            get_name: Some(get_name),
            alloc_buffer: Some(alloc_buffer),
            get_alignment: Some(get_alignment),
            get_max_size: Some(get_max_size),
            get_alloc_size: None,
            is_host: Some(is_host),
        },
        device,
        context: null_mut(),
    }))
}

unsafe extern "C" fn get_name(_: sys::ggml_backend_buffer_type_t) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn alloc_buffer(kind: sys::ggml_backend_buffer_type_t, size: usize) -> sys::ggml_backend_buffer_t {
    // SAFETY: ggml calls this on our buffer type.
    guard("allocating a buffer", null_mut(), || unsafe { buffer::allocate(kind, size) })
}

/// That of the memory we allocate from, so that ggml splits what is larger.
unsafe extern "C" fn get_max_size(_: sys::ggml_backend_buffer_type_t) -> usize {
    guard("asking for a size", usize::MAX, || buffer::pinned_type().map_or(usize::MAX, |pinned| pinned.max_size()))
}

unsafe extern "C" fn get_alignment(_: sys::ggml_backend_buffer_type_t) -> usize {
    const FALLBACK: usize = 64;
    guard("asking for an alignment", FALLBACK, || BufferType::cpu().map_or(FALLBACK, |cpu| cpu.alignment()))
}

unsafe extern "C" fn is_host(_: sys::ggml_backend_buffer_type_t) -> bool {
    true
}
