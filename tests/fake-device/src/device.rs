//! The device: what it says of itself, and which work it takes.

use crate::{Shared, backend, buffer_type, event, guard, memory, registry, settings, stats, sys};
use std::ffi::{CStr, c_char};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

pub(crate) const NAME: &CStr = c"FAKE0";
const DESCRIPTION: &CStr = c"a GPU that is not there";
const DEFAULT_OFFLOAD_MIN_BATCH: i64 = 32;

pub(crate) static DEVICE: Shared<sys::ggml_backend_device> = Shared::new(sys::ggml_backend_device {
    iface: sys::ggml_backend_device_i {
        get_name: Some(get_name),
        get_description: Some(get_description),
        get_memory: Some(get_memory),
        get_type: Some(get_type),
        get_props: Some(get_props),
        init_backend: Some(init_backend),
        get_buffer_type: Some(get_buffer_type),
        get_host_buffer_type: Some(get_host_buffer_type),
        buffer_from_host_ptr: None,
        supports_op: Some(supports_op),
        supports_buft: Some(supports_buft),
        offload_op: Some(offload_op),
        event_new: Some(event::new),
        event_free: Some(event::free),
        event_synchronize: Some(event::synchronize),
    },
    reg: registry::REGISTRY.get(),
    context: null_mut(),
});

/// ggml's CPU device; NULL before the CPU backend is loaded.
pub(crate) fn cpu() -> sys::ggml_backend_dev_t {
    // SAFETY: a look at the registry.
    unsafe { sys::ggml_backend_dev_by_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU) }
}

unsafe extern "C" fn get_name(_: sys::ggml_backend_dev_t) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn get_description(_: sys::ggml_backend_dev_t) -> *const c_char {
    DESCRIPTION.as_ptr()
}

unsafe extern "C" fn get_memory(_: sys::ggml_backend_dev_t, free: *mut usize, total: *mut usize) {
    let (free_now, in_all) = guard("asking for memory", (0, 0), memory::free_and_total);
    // SAFETY: ggml passes two valid pointers.
    unsafe {
        free.write(free_now);
        total.write(in_all);
    }
}

unsafe extern "C" fn get_type(_: sys::ggml_backend_dev_t) -> sys::ggml_backend_dev_type {
    if settings::INTEGRATED.is_on() { sys::GGML_BACKEND_DEVICE_TYPE_IGPU } else { sys::GGML_BACKEND_DEVICE_TYPE_GPU }
}

unsafe extern "C" fn get_props(device: sys::ggml_backend_dev_t, props: *mut sys::ggml_backend_dev_props) {
    stats::PROPERTY_QUERIES.add(1);
    let (memory_free, memory_total) = guard("asking for memory", (0, 0), memory::free_and_total);
    // SAFETY: ggml passes our device and a valid pointer to a struct that we fill whole.
    unsafe {
        props.write(sys::ggml_backend_dev_props {
            name: NAME.as_ptr(),
            description: DESCRIPTION.as_ptr(),
            memory_free,
            memory_total,
            type_: get_type(device),
            device_id: null(),
            caps: sys::ggml_backend_dev_caps {
                async_: true,
                host_buffer: settings::HOST_BUFFER.is_on(),
                buffer_from_host_ptr: false,
                events: true,
                mmap_support: true,
            },
        });
    }
}

unsafe extern "C" fn init_backend(_: sys::ggml_backend_dev_t, _: *const c_char) -> sys::ggml_backend_t {
    guard("creating a backend", null_mut(), backend::new)
}

unsafe extern "C" fn get_buffer_type(_: sys::ggml_backend_dev_t) -> sys::ggml_backend_buffer_type_t {
    buffer_type::DEVICE_TYPE.get()
}

unsafe extern "C" fn get_host_buffer_type(_: sys::ggml_backend_dev_t) -> sys::ggml_backend_buffer_type_t {
    if settings::HOST_BUFFER.is_on() { buffer_type::HOST_TYPE.get() } else { null_mut() }
}

/// What ggml's CPU device computes from memory in ggml's own layout, but for functions of the host's.
unsafe extern "C" fn supports_op(_: sys::ggml_backend_dev_t, op: *const sys::ggml_tensor) -> bool {
    const HOST_FUNCTIONS: [sys::ggml_op; 4] =
        [sys::GGML_OP_MAP_CUSTOM1, sys::GGML_OP_MAP_CUSTOM2, sys::GGML_OP_MAP_CUSTOM3, sys::GGML_OP_CUSTOM];
    // SAFETY: the host asks about a valid operation and does not change it during the call.
    guard("looking at an operation", false, || unsafe {
        let cpu = cpu();
        let is_repacked = |source: &*mut sys::ggml_tensor| {
            let buffer = source.as_ref().map_or(null_mut(), |source| source.buffer);
            !buffer.is_null()
                && sys::ggml_backend_buft_get_device((*buffer).buft) == cpu
                && !sys::ggml_backend_buffer_is_host(buffer)
        };
        let sources = (*op).src;
        !HOST_FUNCTIONS.contains(&(*op).op)
            && !cpu.is_null()
            && !sources.iter().any(is_repacked)
            && sys::ggml_backend_dev_supports_op(cpu, op)
    })
}

/// Its own memory; as CUDA, host memory of its own choice only where the GPU is an integrated one.
unsafe extern "C" fn supports_buft(_: sys::ggml_backend_dev_t, kind: sys::ggml_backend_buffer_type_t) -> bool {
    // SAFETY: the host asks about a valid buffer type.
    let is_ours = unsafe { buffer_type::is_ours(kind) };
    is_ours || (settings::INTEGRATED.is_on() && kind == buffer_type::HOST_TYPE.get())
}

/// CUDA's rule (ggml-cuda.cu, `get_op_batch_size`): large batches.
unsafe extern "C" fn offload_op(_: sys::ggml_backend_dev_t, op: *const sys::ggml_tensor) -> bool {
    // SAFETY: the host asks about a valid operation.
    guard("looking at an operation", false, || unsafe {
        let batch = match (*op).op {
            sys::GGML_OP_GET_ROWS => 0,
            sys::GGML_OP_MUL_MAT => (*op).ne[1],
            sys::GGML_OP_MUL_MAT_ID | sys::GGML_OP_ROPE | sys::GGML_OP_ROPE_BACK => (*op).ne[2],
            _ => sys::ggml_nrows(op),
        };
        batch >= offload_min_batch()
    })
}

fn offload_min_batch() -> i64 {
    static MIN_BATCH: OnceLock<i64> = OnceLock::new();
    *MIN_BATCH.get_or_init(|| {
        let text = std::env::var("GGML_OP_OFFLOAD_MIN_BATCH").unwrap_or_default();
        text.parse().unwrap_or(DEFAULT_OFFLOAD_MIN_BATCH)
    })
}
