//! The device: of type ACCEL, so that it stands between GPUs and CPU and is not counted as a GPU.

use super::guard::{NAME, guard};
use super::{backend, buffer, buffer_type, event};
use crate::ggml::{BackendApi, BufferType, Tensor, sys};
use crate::runtime::runtime;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};

/// A device of `registry` with its buffer type, which is its context. Lives as long as the process.
pub(super) fn make(registry: sys::ggml_backend_reg_t, api: BackendApi) -> sys::ggml_backend_dev_t {
    let device = Box::into_raw(Box::new(sys::ggml_backend_device {
        iface: sys::ggml_backend_device_i {
            get_name: Some(get_name),
            get_description: Some(get_description),
            get_memory: Some(get_memory),
            get_type: Some(get_type),
            get_props: Some(get_props),
            init_backend: Some(init_backend),
            get_buffer_type: Some(get_buffer_type),
            get_host_buffer_type: None,
            buffer_from_host_ptr: Some(buffer_from_host_ptr),
            supports_op: Some(supports_op),
            supports_buft: Some(supports_buft),
            offload_op: None,
            event_new: Some(event::new),
            event_free: Some(event::free),
            event_synchronize: Some(event::synchronize),
        },
        reg: registry,
        context: null_mut(),
    }));
    // SAFETY: nobody else knows the device yet.
    unsafe { (*device).context = buffer_type::make(device, api) };
    device
}

/// # Safety
/// `device` was made by [`make`].
pub(super) unsafe fn buffer_type(device: sys::ggml_backend_dev_t) -> sys::ggml_backend_buffer_type_t {
    // SAFETY: `make` stored the buffer type as context.
    unsafe { (*device).context.cast() }
}

const DESCRIPTION: &CStr = {
    const WITH_NUL: &str =
        concat!("moe-hot ", env!("CARGO_PKG_VERSION"), ": hot experts on the GPU, cold ones on the CPU\0");
    match CStr::from_bytes_with_nul(WITH_NUL.as_bytes()) {
        Ok(text) => text,
        Err(_) => NAME,
    }
};

unsafe extern "C" fn get_name(_: sys::ggml_backend_dev_t) -> *const c_char {
    NAME.as_ptr()
}

pub(super) unsafe extern "C" fn get_description(_: sys::ggml_backend_dev_t) -> *const c_char {
    DESCRIPTION.as_ptr()
}

/// No memory of our own to report: experts lie in host memory.
pub(super) unsafe extern "C" fn get_memory(_: sys::ggml_backend_dev_t, free: *mut usize, total: *mut usize) {
    // SAFETY: ggml passes two valid pointers.
    unsafe {
        free.write(0);
        total.write(0);
    }
}

pub(super) unsafe extern "C" fn get_type(_: sys::ggml_backend_dev_t) -> sys::ggml_backend_dev_type {
    sys::GGML_BACKEND_DEVICE_TYPE_ACCEL
}

/// `async` and `events` are claimed, with trivial events, so that a model on two GPUs keeps pipeline parallelism.
pub(super) unsafe extern "C" fn get_props(_: sys::ggml_backend_dev_t, props: *mut sys::ggml_backend_dev_props) {
    let ours = sys::ggml_backend_dev_props {
        name: NAME.as_ptr(),
        description: DESCRIPTION.as_ptr(),
        memory_free: 0,
        memory_total: 0,
        type_: sys::GGML_BACKEND_DEVICE_TYPE_ACCEL,
        device_id: null(),
        caps: sys::ggml_backend_dev_caps {
            async_: true,
            host_buffer: false,
            buffer_from_host_ptr: true,
            events: true,
            mmap_support: true,
        },
    };
    // SAFETY: ggml passes a valid pointer to a struct that we fill whole.
    unsafe { props.write(ours) };
}

unsafe extern "C" fn init_backend(device: sys::ggml_backend_dev_t, _: *const c_char) -> sys::ggml_backend_t {
    guard("creating a backend", null_mut(), || backend::new(device))
}

unsafe extern "C" fn get_buffer_type(device: sys::ggml_backend_dev_t) -> sys::ggml_backend_buffer_type_t {
    // SAFETY: ggml calls this on our device.
    guard("asking for a buffer type", null_mut(), || unsafe { buffer_type(device) })
}

unsafe extern "C" fn buffer_from_host_ptr(
    device: sys::ggml_backend_dev_t,
    data: *mut c_void,
    size: usize,
    _max_tensor_size: usize,
) -> sys::ggml_backend_buffer_t {
    // SAFETY: ggml calls this on our device; the loader passes a range of its memory map that outlives the buffer.
    guard("mapping weights", null_mut(), || unsafe { buffer::from_host_memory(buffer_type(device), data, size) })
}

unsafe extern "C" fn supports_op(device: sys::ggml_backend_dev_t, op: *const sys::ggml_tensor) -> bool {
    guard("looking at an operation", false, || {
        // SAFETY: the host asks our device about a valid tensor and does not change it during the call.
        let asked = unsafe { (BufferType::from_raw(buffer_type(device)), Tensor::from_raw(op)) };
        matches!(asked, (Some(ours), Some(op)) if runtime().claims(ours, op))
    })
}

unsafe extern "C" fn supports_buft(_: sys::ggml_backend_dev_t, kind: sys::ggml_backend_buffer_type_t) -> bool {
    guard("looking at a buffer type", false, || {
        // SAFETY: the host passes a registered buffer type. Ours is of host type too.
        unsafe { BufferType::from_raw(kind) }.is_some_and(|kind| kind.is_host())
    })
}
