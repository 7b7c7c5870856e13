//! Buffers. A tensor's `data` points into a range that nobody may touch; the bytes lie elsewhere, and only this module
//! knows where. New memory holds 0xFF, so that floats nobody has written are no numbers.
//!
//! A buffer's context is a boxed [`Memory`].

use crate::{buffer_type, faults, guard, queue, say, settings, stats, sys};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Mutex;

const MIB: usize = 1 << 20;
const FRESH: u8 = 0xFF;

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

/// Total of all buffers, in bytes. Locked while one is made.
static ALLOCATED: Mutex<usize> = Mutex::new(0);

/// One buffer's two ranges, of `size` bytes each.
pub(crate) struct Memory {
    device: *mut u8,
    real: *mut u8,
    size: usize,
}

impl Memory {
    /// `None` if the system has no memory left.
    fn new(size: usize) -> Option<Self> {
        let device = map(size, libc::PROT_NONE)?;
        let Some(real) = map(size, libc::PROT_READ | libc::PROT_WRITE) else {
            // SAFETY: mapped above, and nobody knows of it.
            unsafe { libc::munmap(device.cast(), size) };
            return None;
        };
        if !settings::NULL_COMPUTE.is_on() {
            // SAFETY: a new mapping of `size` bytes.
            unsafe { real.write_bytes(FRESH, size) };
        }
        Some(Self { device, real, size })
    }

    /// Where `size` bytes at device address `address` lie; `None` if not all of them are in this buffer.
    fn real(&self, address: *const u8, size: usize) -> Option<*mut u8> {
        let offset = (address as usize).checked_sub(self.device as usize)?;
        // SAFETY: `offset` is inside the mapping, or one past its end.
        (offset.checked_add(size)? <= self.size).then(|| unsafe { self.real.add(offset) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: both were mapped by `new` with this size, and the owner is gone.
        unsafe {
            libc::munmap(self.device.cast(), self.size);
            libc::munmap(self.real.cast(), self.size);
        }
    }
}

fn map(size: usize, protection: i32) -> Option<*mut u8> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the system's choice.
    let address = unsafe { libc::mmap(null_mut(), size, protection, flags, -1, 0) };
    (address != libc::MAP_FAILED).then_some(address.cast())
}

/// Where a tensor's bytes are.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// In a buffer of ours: the real address.
    Ours(*mut u8),
    /// In host memory.
    Host,
    /// In another device's memory, or outside the buffer it names.
    Foreign,
}

/// Looks up `size` bytes from `offset` of a tensor.
///
/// # Safety
/// `tensor` is valid, as is its buffer.
pub(crate) unsafe fn place(tensor: *const sys::ggml_tensor, offset: usize, size: usize) -> Place {
    // SAFETY: the caller vouches for the tensor and its buffer; a buffer of our type and non-zero size is `wrap`'s.
    unsafe {
        let owner = if (*tensor).view_src.is_null() { tensor } else { (*tensor).view_src };
        let buffer = (*owner).buffer;
        if buffer.is_null() {
            return Place::Host;
        }
        if !buffer_type::is_ours((*buffer).buft) {
            return if sys::ggml_backend_buffer_is_host(buffer) { Place::Host } else { Place::Foreign };
        }
        let address = (*tensor).data.cast::<u8>().wrapping_add(offset);
        match memory(buffer).and_then(|memory| memory.real(address, size)) {
            Some(real) => Place::Ours(real),
            None => Place::Foreign,
        }
    }
}

/// As CUDA and Vulkan do where they copy asynchronously: memory under another name than its own ends the process.
///
/// # Safety
/// `tensor` is valid, as is its buffer.
pub(crate) unsafe fn insist_on_own_name(tensor: *const sys::ggml_tensor) {
    // SAFETY: passed on from the caller.
    let kind = unsafe {
        let owner = if (*tensor).view_src.is_null() { tensor } else { (*tensor).view_src };
        (*(*owner).buffer).buft
    };
    if kind != buffer_type::DEVICE_TYPE.get() {
        say("unsupported buffer type");
        std::process::abort();
    }
}

/// Free and total bytes.
pub(crate) fn free_and_total() -> (usize, usize) {
    let total = settings::CAPACITY_MIB.get() as usize * MIB;
    let free = total.saturating_sub(*crate::lock(&ALLOCATED));
    stats::MEMORY_QUERIES.add(1);
    (free.saturating_sub(jump()), total)
}

/// What a report of free memory is too small by: another number each time.
fn jump() -> usize {
    /// Steps between none and all of what is set.
    const STEPS: u64 = 1 << 16;
    /// Of a generator that visits all steps before it repeats one.
    static STATE: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let step = STATE.fetch_add(40_503, std::sync::atomic::Ordering::Relaxed) % STEPS;
    (settings::FREE_JUMPS_MIB.get() * step * MIB as u64 / STEPS) as usize
}

/// A new buffer; NULL if it does not fit, or is not to fit.
pub(crate) fn allocate(size: usize) -> sys::ggml_backend_buffer_t {
    let mut allocated = crate::lock(&ALLOCATED);
    let total = *allocated + size;
    let limit = settings::FAULT_ALLOC_OVER_MIB.get() as usize * MIB;
    let is_over_limit = limit > 0 && total > limit;
    if is_over_limit {
        stats::FAULTS.add(1);
    }
    if faults::ALLOC.strikes() || is_over_limit || total > settings::CAPACITY_MIB.get() as usize * MIB {
        return null_mut();
    }
    let Some(memory) = Memory::new(size) else { return null_mut() };
    *allocated = total;
    stats::ALLOCATIONS.add(1);
    stats::ALLOCATED_BYTES.set(total as u64);
    stats::PEAK_BYTES.raise_to(total as u64);
    let context = Box::into_raw(Box::new(memory)).cast();
    // SAFETY: ggml owns and later deletes the struct it makes here.
    unsafe { sys::ggml_backend_buffer_init(buffer_type::DEVICE_TYPE.get(), INTERFACE, context, size) }
}

/// Takes memory behind everybody's back.
pub(crate) fn take_for_good(size: usize) {
    let mut allocated = crate::lock(&ALLOCATED);
    *allocated += size;
    if *allocated > settings::CAPACITY_MIB.get() as usize * MIB {
        say("out of memory");
        std::process::abort();
    }
}

/// # Safety
/// `buffer` is a live buffer of our device type.
unsafe fn memory<'a>(buffer: sys::ggml_backend_buffer_t) -> Option<&'a Memory> {
    // SAFETY: `allocate` stored a boxed `Memory`; ggml's own dummy of size 0 has none.
    unsafe { (*buffer).context.cast::<Memory>().as_ref() }
}

/// The real address of a range, which must be in a buffer of ours.
///
/// # Safety
/// As for [`place`].
pub(crate) unsafe fn address(tensor: *const sys::ggml_tensor, offset: usize, size: usize) -> *mut u8 {
    // SAFETY: passed on from the caller.
    match unsafe { place(tensor, offset, size) } {
        Place::Ours(real) => real,
        Place::Host | Place::Foreign => outside(tensor),
    }
}

/// Ends in the panic that the caller's guard reports: a host that does this would crash a real device.
#[allow(clippy::panic)]
fn outside(tensor: *const sys::ggml_tensor) -> ! {
    panic!("the tensor at {tensor:p} is not inside a buffer of this device")
}

unsafe extern "C" fn free_buffer(buffer: sys::ggml_backend_buffer_t) {
    guard("freeing a buffer", (), || {
        queue::drain_all();
        // SAFETY: ggml frees each buffer once; the context was boxed by `allocate`, and no queue uses it any more.
        let memory = unsafe { Box::from_raw((*buffer).context.cast::<Memory>()) };
        let mut allocated = crate::lock(&ALLOCATED);
        *allocated -= memory.size;
        stats::ALLOCATED_BYTES.set(*allocated as u64);
        drop(allocated);
        // What a program gives back while it goes on is seen by that.
        stats::write();
    });
}

unsafe extern "C" fn get_base(buffer: sys::ggml_backend_buffer_t) -> *mut c_void {
    // SAFETY: ggml calls this on a live buffer of ours.
    guard("asking for a buffer's address", null_mut(), || unsafe {
        memory(buffer).map_or(null_mut(), |memory| memory.device.cast())
    })
}

unsafe extern "C" fn memset_tensor(
    _: sys::ggml_backend_buffer_t,
    tensor: *mut sys::ggml_tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    // SAFETY: ggml calls this with a valid tensor; `address` checks the range.
    guard("filling a tensor", (), || unsafe { address(tensor, offset, size).write_bytes(value, size) });
}

unsafe extern "C" fn set_tensor(
    _: sys::ggml_backend_buffer_t,
    tensor: *mut sys::ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    guard("writing a tensor", (), || {
        stats::BLOCKING_COPIES.add(1);
        let deadline = queue::end_of_copy(queue::Direction::ToDevice, std::time::Instant::now(), size);
        // SAFETY: as for `memset_tensor`; `data` holds `size` bytes of host memory.
        unsafe { address(tensor, offset, size).copy_from(data.cast(), size) };
        queue::wait_until(deadline);
    });
}

unsafe extern "C" fn get_tensor(
    _: sys::ggml_backend_buffer_t,
    tensor: *const sys::ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    guard("reading a tensor", (), || {
        stats::BLOCKING_COPIES.add(1);
        let deadline = queue::end_of_copy(queue::Direction::ToHost, std::time::Instant::now(), size);
        // SAFETY: as for `memset_tensor`; `data` has room for `size` bytes of host memory.
        unsafe { address(tensor, offset, size).copy_to(data.cast(), size) };
        queue::wait_until(deadline);
    });
}

/// From a buffer of ours only; ggml itself copies to and from host memory.
unsafe extern "C" fn cpy_tensor(
    _: sys::ggml_backend_buffer_t,
    src: *const sys::ggml_tensor,
    dst: *mut sys::ggml_tensor,
) -> bool {
    // SAFETY: ggml calls this with valid tensors of the same layout, `dst` in a buffer of ours.
    guard("copying a tensor", false, || unsafe {
        let size = sys::ggml_nbytes(src);
        match place(src, 0, size) {
            Place::Ours(from) => {
                address(dst, 0, size).copy_from(from, size);
                true
            }
            Place::Host | Place::Foreign => false,
        }
    })
}

unsafe extern "C" fn clear(buffer: sys::ggml_backend_buffer_t, value: u8) {
    // SAFETY: ggml calls this on a live buffer of ours; the range is its own.
    guard("clearing a buffer", (), || unsafe {
        if let Some(memory) = memory(buffer) {
            memory.real.write_bytes(value, memory.size);
        }
    });
}
