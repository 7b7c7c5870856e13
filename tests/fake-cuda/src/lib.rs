//! A CUDA driver for tests: the functions of the driver API that moe-hot uses, by the names they have in `libcuda.so`.
//!
//! "Device memory" is host memory of the caller's. Streams have a queue and a thread each; a copy's bytes arrive when it
//! ends. It is stricter than the real driver: a thread without a current context is refused, and memory that is freed
//! while a copy uses it counts as misuse. `fake_cuda_set` and `fake_cuda_stat` change settings and read counters.
#![allow(non_snake_case)] // the driver's names

mod code;
mod settings;
mod state;
mod stream;

use code::Code;
use state::{Handle, Needs, call};
use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use stream::{Command, Event, Stream};

const DEVICES: usize = 2;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const DEVICE_ORDINAL: c_uint = 9;
const PAGE: usize = 4096;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuInit(_: c_uint) -> Code {
    call("cuInit", Needs::Nothing, |state| {
        state.is_initialised = true;
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Code {
    call("cuDeviceGet", Needs::Init, |_| match usize::try_from(ordinal) {
        Ok(number) if number < DEVICES => {
            // SAFETY: the caller passes a valid pointer.
            unsafe { device.write(ordinal) };
            code::SUCCESS
        }
        _ => code::INVALID_DEVICE,
    })
}

/// All memory is that of the device that the setting `owner` names.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttribute(answer: *mut c_void, attribute: c_uint, _: u64) -> Code {
    call("cuPointerGetAttribute", Needs::Init, |_| {
        if attribute != DEVICE_ORDINAL {
            return code::INVALID_VALUE;
        }
        // SAFETY: the caller passes a valid pointer to an int.
        unsafe { answer.cast::<c_int>().write(settings::OWNER.get() as c_int) };
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) -> Code {
    call("cuDevicePrimaryCtxRetain", Needs::Init, |state| {
        let ordinal = device as usize;
        state.contexts[ordinal].retained += 1;
        // SAFETY: the caller passes a valid pointer.
        unsafe { context.write(state::context_handle(ordinal)) };
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Code {
    call("cuDevicePrimaryCtxRelease_v2", Needs::Init, |state| {
        let context = &mut state.contexts[device as usize];
        if context.retained == 0 {
            return code::INVALID_CONTEXT;
        }
        context.retained -= 1;
        if context.retained == 0 {
            context.error.store(code::SUCCESS);
        }
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxSetCurrent(context: Handle) -> Code {
    call("cuCtxSetCurrent", Needs::Init, |state| state.set_current(context))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut Handle, flags: c_uint) -> Code {
    call("cuStreamCreate", Needs::Context, |state| {
        if flags != NON_BLOCKING {
            return code::INVALID_VALUE;
        }
        let new = Arc::new(Stream::start(state.current_error()));
        let handle = state.new_handle();
        state.streams.insert(handle, new);
        // SAFETY: the caller passes a valid pointer.
        unsafe { stream.write(handle) };
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamQuery(stream: Handle) -> Code {
    call("cuStreamQuery", Needs::Context, |state| match state.streams.get(&stream) {
        Some(stream) if stream.is_idle() => code::SUCCESS,
        Some(_) => code::NOT_READY,
        None => code::INVALID_HANDLE,
    })
}

/// Does not wait, like the real one: the stream ends when its work is done.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamDestroy_v2(stream: Handle) -> Code {
    call("cuStreamDestroy_v2", Needs::Context, |state| state::removed(&mut state.streams, stream))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(memory: *mut *mut c_void, size: usize, _: c_uint) -> Code {
    call("cuMemHostAlloc", Needs::Context, |state| {
        let layout = Layout::from_size_align(size, PAGE).ok().filter(|layout| layout.size() > 0);
        let Some(layout) = layout else { return code::INVALID_VALUE };
        // SAFETY: the size is not 0. What it holds is nobody's promise, so nothing is written to it.
        let address = unsafe { alloc(layout) };
        state.page_locked.insert(address as usize, size);
        // SAFETY: the caller passes a valid pointer.
        unsafe { memory.write(address.cast()) };
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeHost(memory: *mut c_void) -> Code {
    call("cuMemFreeHost", Needs::Context, |state| {
        let Some(size) = state.page_locked.remove(&(memory as usize)) else { return code::INVALID_VALUE };
        if state.is_used_by_a_copy(memory as usize, size) {
            settings::MISUSES.add();
            return code::INVALID_VALUE;
        }
        // SAFETY: allocated by `cuMemHostAlloc` with the same layout, and no copy uses it.
        unsafe { dealloc(memory.cast(), Layout::from_size_align_unchecked(size, PAGE)) };
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, size: usize, stream: Handle) -> Code {
    call("cuMemcpyHtoDAsync_v2", Needs::Context, |state| {
        let Some(stream) = state.streams.get(&stream) else { return code::INVALID_HANDLE };
        let (from, to) = (from.cast::<u8>(), to as *mut u8);
        // Pageable memory has been read when the real driver's function returns; page-locked memory has not.
        let bytes = (!state.is_page_locked(from as usize, size)).then(|| {
            // SAFETY: the caller passes `size` bytes that live during this call.
            unsafe { std::slice::from_raw_parts(from, size) }.to_vec()
        });
        stream.submit(Command::Copy { from, to, size, bytes });
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, size: usize, stream: Handle) -> Code {
    call("cuMemcpyDtoHAsync_v2", Needs::Context, |state| {
        let Some(stream) = state.streams.get(&stream) else { return code::INVALID_HANDLE };
        stream.submit(Command::ReadBack { from: from as *const u8, to: to.cast(), size });
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut Handle, _: c_uint) -> Code {
    call("cuEventCreate", Needs::Context, |state| {
        let handle = state.new_handle();
        state.events.insert(handle, Event::default());
        // SAFETY: the caller passes a valid pointer.
        unsafe { event.write(handle) };
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> Code {
    call("cuEventRecord", Needs::Context, |state| match (state.events.get_mut(&event), state.streams.get(&stream)) {
        (Some(event), Some(stream)) => {
            stream.submit(event.record());
            code::SUCCESS
        }
        _ => code::INVALID_HANDLE,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventQuery(event: Handle) -> Code {
    call("cuEventQuery", Needs::Context, |state| match state.events.get(&event) {
        Some(event) if event.is_reached() => code::SUCCESS,
        Some(_) => code::NOT_READY,
        None => code::INVALID_HANDLE,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventDestroy_v2(event: Handle) -> Code {
    call("cuEventDestroy_v2", Needs::Context, |state| state::removed(&mut state.events, event))
}

/// Changes a setting or makes a function fail (`settings`); false if there is none of that name.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_set(name: *const c_char, value: i64) -> bool {
    // SAFETY: the caller passes a NUL-terminated name.
    settings::set(&unsafe { CStr::from_ptr(name) }.to_string_lossy(), value)
}

/// What is live, or was counted: `contexts`, `streams`, `events`, `page_locked_bytes`, `misuses`, `largest_copy` and
/// `most_queued` (bytes of copies to a device, one and all of a stream that have not ended), or calls of a function;
/// `u64::MAX` if there is none of that name.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_stat(name: *const c_char) -> u64 {
    // SAFETY: the caller passes a NUL-terminated name.
    state::stat(&unsafe { CStr::from_ptr(name) }.to_string_lossy()).unwrap_or(u64::MAX)
}
