//! A second device of ours, for splits whose tensors lie on the hot device.
//!
//! Where a layer's rows are made on the hot device and its results are read there, host memory between the two costs waits. So
//! there is a second device, before the first in the scheduler's order. It is registered for its instances only: the loader sees
//! no memory in it. Its instances belong to a device struct that is not registered, whose memory is the hot device's own under
//! another name ([`memory`]): under its own name the scheduler would take our nodes for the hot device's.
//!
//! What it does not take, the first device does: rows that are made elsewhere, and all of them where the hot device does not take
//! memory under another name for its own.

mod backend;
mod memory;

use super::guard::{NAME_ON_DEVICE, guard};
use super::{device, event};
use crate::ggml::{BackendApi, BufferType, Tensor, sys};
use crate::runtime::runtime;
pub(super) use backend::{instance, is_ours as is_instance};
use memory::SplitMemory;
use std::cell::Cell;
use std::ffi::c_char;
use std::ptr::null_mut;
use std::sync::OnceLock;

thread_local! {
    /// Whether the last operation on experts that this thread has asked about is ours: a scheduler asks on one thread.
    static TOOK_LAST: Cell<bool> = const { Cell::new(false) };
}

/// What both device structs have as their context. Lives as long as the process.
struct OnDevice {
    api: BackendApi,
    /// The first device's memory, which experts lie in.
    experts: sys::ggml_backend_buffer_type_t,
    /// The device struct that instances belong to.
    of_instances: sys::ggml_backend_dev_t,
    /// Looked for when the first instance is asked; `None`: there is no such device.
    memory: OnceLock<Option<SplitMemory>>,
}

impl OnDevice {
    fn memory(&self) -> Option<&SplitMemory> {
        self.memory.get_or_init(|| SplitMemory::of(runtime().split_device()?, self.api)).as_ref()
    }

    fn claims(&self, op: Tensor<'_>) -> bool {
        // SAFETY: the first device's buffer type lives as long as the process.
        let (Some(memory), Some(ours)) = (self.memory(), unsafe { BufferType::from_raw(self.experts) }) else {
            return false;
        };
        let is_ours = runtime().claims_on_device(ours, memory.device_kind(), TOOK_LAST.get(), op);
        if op.op() == sys::GGML_OP_MUL_MAT_ID {
            TOOK_LAST.set(is_ours);
        }
        is_ours
    }
}

/// The device of `registry` that stands before `first`.
pub(super) fn make(
    registry: sys::ggml_backend_reg_t,
    first: sys::ggml_backend_dev_t,
    api: BackendApi,
) -> sys::ggml_backend_dev_t {
    let registered = sys::ggml_backend_device_i {
        get_name: Some(get_name),
        get_description: Some(device::get_description),
        get_memory: Some(device::get_memory),
        get_type: Some(device::get_type),
        get_props: Some(get_props),
        init_backend: Some(init_backend),
        get_buffer_type: Some(get_no_buffer_type),
        get_host_buffer_type: None,
        buffer_from_host_ptr: None,
        supports_op: Some(supports_no_op),
        supports_buft: Some(supports_buft),
        offload_op: None,
        event_new: Some(event::new),
        event_free: Some(event::free),
        event_synchronize: Some(event::synchronize),
    };
    let of_instances = sys::ggml_backend_device_i {
        get_buffer_type: Some(get_buffer_type),
        supports_op: Some(supports_op),
        ..registered
    };
    let leak = |iface| Box::into_raw(Box::new(sys::ggml_backend_device { iface, reg: registry, context: null_mut() }));
    let (registered, of_instances) = (leak(registered), leak(of_instances));
    // SAFETY: `first` is our first device; nobody else knows the new ones yet.
    unsafe {
        let shared = Box::into_raw(Box::new(OnDevice {
            api,
            experts: device::buffer_type(first),
            of_instances,
            memory: OnceLock::new(),
        }));
        (*registered).context = shared.cast();
        (*of_instances).context = shared.cast();
    }
    registered
}

/// # Safety
/// `device` is one of those that were made by [`make`].
unsafe fn shared(device: sys::ggml_backend_dev_t) -> &'static OnDevice {
    // SAFETY: `make` stored it, and never frees it.
    unsafe { &*(*device).context.cast::<OnDevice>() }
}

unsafe extern "C" fn get_name(_: sys::ggml_backend_dev_t) -> *const c_char {
    NAME_ON_DEVICE.as_ptr()
}

unsafe extern "C" fn get_props(device: sys::ggml_backend_dev_t, props: *mut sys::ggml_backend_dev_props) {
    // SAFETY: ggml passes a valid pointer, which the first device's function fills whole.
    unsafe {
        device::get_props(device, props);
        (*props).name = NAME_ON_DEVICE.as_ptr();
        (*props).caps.buffer_from_host_ptr = false;
    }
}

unsafe extern "C" fn init_backend(device: sys::ggml_backend_dev_t, _: *const c_char) -> sys::ggml_backend_t {
    // SAFETY: ggml calls this on our device.
    guard("creating a backend", null_mut(), || unsafe {
        let shared = shared(device);
        backend::new(shared.of_instances, shared.memory())
    })
}

/// That of the CPU, which the loader passes over.
unsafe extern "C" fn get_no_buffer_type(_: sys::ggml_backend_dev_t) -> sys::ggml_backend_buffer_type_t {
    guard("asking for a buffer type", null_mut(), || BufferType::cpu().map_or(null_mut(), |cpu| cpu.as_raw()))
}

unsafe extern "C" fn get_buffer_type(device: sys::ggml_backend_dev_t) -> sys::ggml_backend_buffer_type_t {
    guard("asking for a buffer type", null_mut(), || {
        // SAFETY: ggml calls this on our device.
        let memory = unsafe { shared(device) }.memory().map(SplitMemory::split_kind);
        memory.or_else(BufferType::cpu).map_or(null_mut(), |kind| kind.as_raw())
    })
}

unsafe extern "C" fn supports_no_op(_: sys::ggml_backend_dev_t, _: *const sys::ggml_tensor) -> bool {
    false
}

unsafe extern "C" fn supports_op(device: sys::ggml_backend_dev_t, op: *const sys::ggml_tensor) -> bool {
    guard("looking at an operation", false, || {
        // SAFETY: the host asks our device about a valid tensor and does not change it during the call.
        let (shared, op) = unsafe { (shared(device), Tensor::from_raw(op)) };
        op.is_some_and(|op| shared.claims(op))
    })
}

/// Host memory, which experts lie in, and that of our splits; not the hot device's own, so that inputs are handed over.
unsafe extern "C" fn supports_buft(device: sys::ggml_backend_dev_t, kind: sys::ggml_backend_buffer_type_t) -> bool {
    guard("looking at a buffer type", false, || {
        // SAFETY: the host passes a registered buffer type, or that of our splits.
        let (shared, kind) = unsafe { (shared(device), BufferType::from_raw(kind)) };
        kind.is_some_and(|kind| {
            kind.is_host()
                || shared.memory.get().is_some_and(|memory| memory.as_ref().is_some_and(|m| m.split_kind() == kind))
        })
    })
}
