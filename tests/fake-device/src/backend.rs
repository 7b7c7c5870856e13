//! Backend instances: everything asynchronous goes into the instance's queue.
//!
//! An instance's context is a boxed [`Worker`].

use crate::queue::{Command, Direction, Queue, Worker};
use crate::snapshot::{Cpu, nodes_of};
use crate::{
    Shared, buffer_type, captures, device, event, faults, first_use, guard, memory, say, settings, stats, sys,
};
use std::ffi::{c_char, c_void};
use std::ptr::null_mut;

/// The most nodes of a graph that null compute, latency and faults may be restricted to.
const MAX_SMALL_GRAPH: usize = 32;

const INTERFACE: sys::ggml_backend_i = sys::ggml_backend_i {
    get_name: Some(get_name),
    free: Some(free),
    set_tensor_async: Some(set_tensor_async),
    get_tensor_async: Some(get_tensor_async),
    set_tensor_2d_async: None,
    get_tensor_2d_async: None,
    cpy_tensor_async: Some(cpy_tensor_async),
    synchronize: Some(synchronize),
    graph_plan_create: None,
    graph_plan_free: None,
    graph_plan_update: None,
    graph_plan_compute: None,
    graph_compute: Some(graph_compute),
    event_record: Some(event_record),
    event_wait: Some(event_wait),
    graph_optimize: None,
};

/// Identifies our instances, in ASCII.
static GUID: Shared<sys::ggml_guid> = Shared::new(*b"fake-device-v1!!");

/// A new instance; NULL if none can be made.
pub(crate) fn new() -> sys::ggml_backend_t {
    if faults::INIT.strikes() {
        return null_mut();
    }
    let Some(cpu) = Cpu::new() else {
        say("ggml's CPU backend is not loaded");
        return null_mut();
    };
    let worker = match Worker::start(cpu) {
        Ok(worker) => worker,
        Err(error) => {
            say(&format!("cannot start a thread: {error}"));
            return null_mut();
        }
    };
    stats::INSTANCES.add(1);
    let without =
        sys::ggml_backend_i { set_tensor_async: None, get_tensor_async: None, cpy_tensor_async: None, ..INTERFACE };
    Box::into_raw(Box::new(sys::ggml_backend {
        guid: GUID.get(),
        iface: if settings::NO_ASYNC.is_on() { without } else { INTERFACE },
        device: device::DEVICE.get(),
        context: Box::into_raw(Box::new(worker)).cast(),
    }))
}

/// # Safety
/// `backend` was made by [`new`] and is not freed yet.
unsafe fn queue<'a>(backend: sys::ggml_backend_t) -> &'a Queue {
    // SAFETY: `new` stored a boxed `Worker`; the caller vouches for the rest.
    unsafe { &(*(*backend).context.cast::<Worker>()).queue }
}

unsafe extern "C" fn get_name(_: sys::ggml_backend_t) -> *const c_char {
    device::NAME.as_ptr()
}

unsafe extern "C" fn free(backend: sys::ggml_backend_t) {
    guard("freeing a backend", (), || {
        // SAFETY: ggml frees each instance once; both boxes were made by `new`.
        unsafe {
            let backend = Box::from_raw(backend);
            drop(Box::from_raw(backend.context.cast::<Worker>()));
        }
        stats::write();
    });
}

unsafe extern "C" fn set_tensor_async(
    backend: sys::ggml_backend_t,
    tensor: *mut sys::ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    guard("writing a tensor", (), || {
        // SAFETY: ggml passes a live instance of ours and a valid tensor; `address` checks the range.
        let (queue, to) = unsafe {
            memory::insist_on_own_name(tensor);
            (queue(backend), memory::address(tensor, offset, size))
        };
        stats::SET_ASYNC_CALLS.add(1);
        stats::SET_ASYNC_BYTES.add(size as u64);
        stats::LARGEST_WRITE.raise_to(size as u64);
        if size as u64 >= settings::FAULT_MIN_BYTES.get() {
            stats::LARGE_WRITES.add(1);
            if settings::HOLD_WRITES.is_on() {
                queue.submit(Command::Held);
            }
            if faults::HANG.strikes() {
                return queue.submit(Command::Hang);
            }
            if faults::COPY.strikes() {
                return;
            }
        }
        queue.submit(Command::Copy { from: data.cast(), to, size, transfer: Some(Direction::ToDevice) });
        wait_if_pageable(queue, data);
    });
}

/// As CUDA does, which says nothing about it.
fn wait_if_pageable(queue: &Queue, data: *const c_void) {
    if settings::PAGEABLE_BLOCKS.is_on() && !buffer_type::is_page_locked(data) {
        stats::BLOCKING_COPIES.add(1);
        queue.synchronize();
    }
}

unsafe extern "C" fn get_tensor_async(
    backend: sys::ggml_backend_t,
    tensor: *const sys::ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    guard("reading a tensor", (), || {
        // SAFETY: as for `set_tensor_async`.
        let (queue, from) = unsafe {
            memory::insist_on_own_name(tensor);
            (queue(backend), memory::address(tensor, offset, size))
        };
        stats::GET_ASYNC_CALLS.add(1);
        stats::GET_ASYNC_BYTES.add(size as u64);
        queue.submit(Command::Copy { from, to: data.cast(), size, transfer: Some(Direction::ToHost) });
        wait_if_pageable(queue, data);
    });
}

/// Between our instances: the source's queue copies, the other one waits for that. As CUDA does.
unsafe extern "C" fn cpy_tensor_async(
    source: sys::ggml_backend_t,
    destination: sys::ggml_backend_t,
    src: *const sys::ggml_tensor,
    dst: *mut sys::ggml_tensor,
) -> bool {
    // SAFETY: ggml passes valid instances, and valid tensors of the same layout.
    guard("copying a tensor", false, || unsafe {
        let size = sys::ggml_nbytes(src);
        if (*source).guid != GUID.get() || (*destination).guid != GUID.get() {
            return false;
        }
        let (memory::Place::Ours(from), memory::Place::Ours(to)) =
            (memory::place(src, 0, size), memory::place(dst, 0, size))
        else {
            return false;
        };
        queue(source).submit(Command::Copy { from, to, size, transfer: None });
        if source != destination {
            let copied = std::sync::Arc::<event::Event>::default();
            let number = copied.issue();
            queue(source).submit(Command::Record(copied.clone(), number));
            queue(destination).submit(Command::Wait(copied, number));
        }
        true
    })
}

unsafe extern "C" fn synchronize(backend: sys::ggml_backend_t) {
    guard("synchronizing", (), || {
        stats::WAITS.add(1);
        // SAFETY: ggml passes a live instance of ours.
        unsafe { queue(backend) }.synchronize();
    });
}

unsafe extern "C" fn graph_compute(backend: sys::ggml_backend_t, graph: *mut sys::ggml_cgraph) -> sys::ggml_status {
    guard("computing a graph", sys::GGML_STATUS_FAILED, || {
        // SAFETY: the scheduler hands a valid graph to a live instance.
        let (queue, nodes) = unsafe { (queue(backend), nodes_of(graph)) };
        // SAFETY: the nodes of a valid graph are valid.
        let n_experts = nodes.iter().filter(|&&node| unsafe { (*node).op } == sys::GGML_OP_MUL_MAT_ID).count();
        let is_small_with_experts = n_experts > 0 && nodes.len() <= MAX_SMALL_GRAPH;
        if is_small_with_experts && faults::COMPUTE.strikes() {
            return sys::GGML_STATUS_FAILED;
        }
        if is_small_with_experts {
            // SAFETY: as above.
            unsafe { first_use::wait(nodes) };
        }
        stats::GRAPHS.add(1);
        stats::MUL_MAT_ID_NODES.add(n_experts as u64);
        stats::MUL_MAT_ID_GRAPHS.add(u64::from(n_experts > 0));

        let has_latency = is_small_with_experts || !settings::NULL_MUL_MAT_ID_ONLY.is_on();
        if has_latency && settings::NULL_COMPUTE.is_on() {
            queue.submit(Command::Compute { graph: None, has_latency });
            return sys::GGML_STATUS_SUCCESS;
        }
        let mut snapshot = queue.take_spare();
        // SAFETY: as above; the scheduler's tensors have valid buffers.
        if let Err(error) = unsafe { snapshot.take(graph) } {
            say(&error.to_string());
            queue.give_back(snapshot);
            return sys::GGML_STATUS_FAILED;
        }
        if is_small_with_experts {
            // SAFETY: as above.
            captures::replay(nodes[0] as usize, unsafe { (*graph).uid }, &mut snapshot);
        }
        queue.submit(Command::Compute { graph: Some(snapshot), has_latency });
        sys::GGML_STATUS_SUCCESS
    })
}

unsafe extern "C" fn event_record(backend: sys::ggml_backend_t, event: sys::ggml_backend_event_t) {
    guard("recording an event", (), || {
        // SAFETY: ggml passes a live instance and a live event of ours.
        let (queue, event) = unsafe { (queue(backend), event::get(event)) };
        let number = event.issue();
        queue.submit(Command::Record(event, number));
    });
}

unsafe extern "C" fn event_wait(backend: sys::ggml_backend_t, event: sys::ggml_backend_event_t) {
    guard("waiting for an event", (), || {
        // SAFETY: ggml passes a live instance; llama.cpp's scheduler waits for events of our device only.
        let (queue, event) = unsafe { (queue(backend), event::get(event)) };
        let number = event.issued();
        queue.submit(Command::Wait(event, number));
    });
}
