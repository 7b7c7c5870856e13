//! The two buffer types: the device's memory, and host memory of the device's choice (`FAKE_HOST_BUFFER`).

use crate::{Shared, device, guard, lock, memory, sys};
use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, OnceLock};

const ALIGNMENT: usize = 128;
/// As CUDA does: quantized rows are padded, in memory, to a multiple of this many weights.
const ROW_PADDING: i64 = 512;

/// A buffer type as the headers have it that we are built with (API 2), with room for the larger one of API 3.
#[repr(C)]
struct Table {
    api_2: sys::ggml_backend_buffer_type,
    room: [usize; 2],
}

/// `ggml_backend_buffer_type` of API 3.
#[repr(C)]
struct TableOfApi3 {
    get_name: Option<unsafe extern "C" fn(sys::ggml_backend_buffer_type_t) -> *const c_char>,
    alloc_buffer: Option<unsafe extern "C" fn(sys::ggml_backend_buffer_type_t, usize) -> sys::ggml_backend_buffer_t>,
    alloc_buffer_n: usize,
    get_alignment: Option<unsafe extern "C" fn(sys::ggml_backend_buffer_type_t) -> usize>,
    get_max_size: Option<unsafe extern "C" fn(sys::ggml_backend_buffer_type_t) -> usize>,
    get_alloc_size: Option<unsafe extern "C" fn(sys::ggml_backend_buffer_type_t, *const sys::ggml_tensor) -> usize>,
    get_alloc_size_n: usize,
    is_host: Option<unsafe extern "C" fn(sys::ggml_backend_buffer_type_t) -> bool>,
    device: sys::ggml_backend_dev_t,
    context: *mut c_void,
}

const _: () = assert!(size_of::<TableOfApi3>() == size_of::<Table>());

/// A static buffer type.
pub(crate) struct BufferType(Shared<Table>);

impl BufferType {
    const fn new(api_2: sys::ggml_backend_buffer_type) -> Self {
        Self(Shared::new(Table { api_2, room: [0; 2] }))
    }

    pub(crate) const fn get(&self) -> sys::ggml_backend_buffer_type_t {
        self.0.get().cast()
    }

    /// Rewrites the table for a host of API 3.
    ///
    /// # Safety
    /// Nobody has seen the table yet, and it is rewritten once.
    pub(crate) unsafe fn become_api_3(&self) {
        // SAFETY: the caller vouches for the table, which has room for either.
        unsafe {
            let sys::ggml_backend_buffer_type { iface, device, context } = std::ptr::read(self.get());
            let table = TableOfApi3 {
                get_name: iface.get_name,
                alloc_buffer: iface.alloc_buffer,
                alloc_buffer_n: 0,
                get_alignment: iface.get_alignment,
                get_max_size: iface.get_max_size,
                get_alloc_size: iface.get_alloc_size,
                get_alloc_size_n: 0,
                is_host: iface.is_host,
                device,
                context,
            };
            std::ptr::write(self.get().cast(), table);
        }
    }
}

pub(crate) static DEVICE_TYPE: BufferType = BufferType::new(sys::ggml_backend_buffer_type {
    iface: sys::ggml_backend_buffer_type_i {
        get_name: Some(get_name),
        alloc_buffer: Some(alloc_buffer),
        get_alignment: Some(get_alignment),
        get_max_size: None,
        get_alloc_size: Some(get_alloc_size),
        is_host: None,
    },
    device: device::DEVICE.get(),
    context: null_mut(),
});

pub(crate) static HOST_TYPE: BufferType = BufferType::new(sys::ggml_backend_buffer_type {
    iface: sys::ggml_backend_buffer_type_i {
        get_name: Some(get_host_name),
        alloc_buffer: Some(alloc_host_buffer),
        get_alignment: Some(get_host_alignment),
        get_max_size: None,
        get_alloc_size: None,
        is_host: Some(is_host),
    },
    device: device::DEVICE.get(),
    context: null_mut(),
});

/// Whether it is the device's memory, under whatever name: as CUDA and Vulkan tell it, by a function of the type's.
///
/// # Safety
/// `kind` is a valid buffer type.
pub(crate) unsafe fn is_ours(kind: sys::ggml_backend_buffer_type_t) -> bool {
    // SAFETY: passed on from the caller; the first entry is the same in both versions of the table.
    let names = unsafe { [kind, DEVICE_TYPE.get()].map(|kind| (*kind).iface.get_name.map(|name| name as usize)) };
    names[0] == names[1]
}

unsafe extern "C" fn get_name(_: sys::ggml_backend_buffer_type_t) -> *const c_char {
    device::NAME.as_ptr()
}

unsafe extern "C" fn alloc_buffer(_: sys::ggml_backend_buffer_type_t, size: usize) -> sys::ggml_backend_buffer_t {
    guard("allocating a buffer", null_mut(), || memory::allocate(size))
}

unsafe extern "C" fn get_alignment(_: sys::ggml_backend_buffer_type_t) -> usize {
    ALIGNMENT
}

unsafe extern "C" fn get_alloc_size(_: sys::ggml_backend_buffer_type_t, tensor: *const sys::ggml_tensor) -> usize {
    // SAFETY: ggml asks about a valid tensor.
    guard("asking for a size", 0, || unsafe {
        let remainder = (*tensor).ne[0] % ROW_PADDING;
        let is_padded = sys::ggml_is_quantized((*tensor).type_) && remainder != 0;
        let padding = if is_padded { sys::ggml_row_size((*tensor).type_, ROW_PADDING - remainder) } else { 0 };
        sys::ggml_nbytes(tensor) + padding
    })
}

unsafe extern "C" fn get_host_name(_: sys::ggml_backend_buffer_type_t) -> *const c_char {
    c"Fake_Host".as_ptr()
}

/// Address ranges of host buffers.
static PAGE_LOCKED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

type Free = unsafe extern "C" fn(sys::ggml_backend_buffer_t);

/// How the CPU frees its buffers.
fn free_of_cpu() -> &'static OnceLock<Option<Free>> {
    static FREE: OnceLock<Option<Free>> = OnceLock::new();
    &FREE
}

/// Whether an address is in a host buffer.
pub(crate) fn is_page_locked(data: *const c_void) -> bool {
    lock(&PAGE_LOCKED).iter().any(|(start, end)| (start..end).contains(&&(data as usize)))
}

unsafe extern "C" fn free_host_buffer(buffer: sys::ggml_backend_buffer_t) {
    // SAFETY: ggml frees each buffer once; it is one of the CPU's but for its type.
    guard("freeing a host buffer", (), || unsafe {
        let start = sys::ggml_backend_buffer_get_base(buffer) as usize;
        lock(&PAGE_LOCKED).retain(|range| range.0 != start);
        if let Some(free) = free_of_cpu().get().copied().flatten() {
            free(buffer);
        }
    });
}

/// ggml's own host buffer under our type, as CUDA's are.
unsafe extern "C" fn alloc_host_buffer(_: sys::ggml_backend_buffer_type_t, size: usize) -> sys::ggml_backend_buffer_t {
    // SAFETY: the CPU's buffer type is registered; the buffer is new and nobody else's.
    guard("allocating a host buffer", null_mut(), || unsafe {
        let buffer = sys::ggml_backend_buft_alloc_buffer(sys::ggml_backend_cpu_buffer_type(), size);
        if !buffer.is_null() {
            (*buffer).buft = HOST_TYPE.get();
            free_of_cpu().get_or_init(|| (*buffer).iface.free_buffer);
            (*buffer).iface.free_buffer = Some(free_host_buffer);
            let start = sys::ggml_backend_buffer_get_base(buffer) as usize;
            lock(&PAGE_LOCKED).push((start, start + sys::ggml_backend_buffer_get_size(buffer)));
        }
        buffer
    })
}

unsafe extern "C" fn get_host_alignment(_: sys::ggml_backend_buffer_type_t) -> usize {
    // SAFETY: the CPU's buffer type is a static of ggml's.
    guard("asking for an alignment", ALIGNMENT, || unsafe {
        sys::ggml_backend_buft_get_alignment(sys::ggml_backend_cpu_buffer_type())
    })
}

unsafe extern "C" fn is_host(_: sys::ggml_backend_buffer_type_t) -> bool {
    true
}
