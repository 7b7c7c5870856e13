//! The buffer type that expert tensors are placed in: host memory in ggml's own layout.

use super::buffer;
use super::guard::{NAME, guard};
use crate::ggml::{BackendApi, BufferType, sys};
use std::ffi::{c_char, c_void};
use std::mem::offset_of;
use std::ptr::null_mut;

/// ggml's `ggml_backend_buffer_type`, with the interface of one version.
#[repr(C)]
pub(super) struct Versioned<I> {
    pub(super) iface: I,
    device: sys::ggml_backend_dev_t,
    context: *mut c_void,
}

type GetName = unsafe extern "C" fn(sys::ggml_backend_buffer_type_t) -> *const c_char;
type AllocBuffer = unsafe extern "C" fn(sys::ggml_backend_buffer_type_t, usize) -> sys::ggml_backend_buffer_t;
type GetSize = unsafe extern "C" fn(sys::ggml_backend_buffer_type_t) -> usize;
type IsHost = unsafe extern "C" fn(sys::ggml_backend_buffer_type_t) -> bool;
/// An entry that we leave to ggml's default.
type Unset = Option<unsafe extern "C" fn()>;

/// `ggml_backend_buffer_type_i` in version 2.
#[repr(C)]
pub(super) struct InterfaceV2 {
    get_name: GetName,
    pub(super) alloc_buffer: AllocBuffer,
    get_alignment: GetSize,
    get_max_size: GetSize,
    get_alloc_size: Unset,
    is_host: IsHost,
}

/// And in version 3.
#[repr(C)]
pub(super) struct InterfaceV3 {
    get_name: GetName,
    pub(super) alloc_buffer: AllocBuffer,
    pub(super) alloc_buffer_n: Unset,
    get_alignment: GetSize,
    get_max_size: GetSize,
    get_alloc_size: Unset,
    get_alloc_size_n: Unset,
    is_host: IsHost,
}

/// The headers that we are built with have one of these layouts.
const _: () = {
    type Theirs = sys::ggml_backend_buffer_type_i;
    let [size, alignment, max_size, is_host] = match sys::GGML_BACKEND_API_VERSION {
        2 => [
            size_of::<InterfaceV2>(),
            offset_of!(InterfaceV2, get_alignment),
            offset_of!(InterfaceV2, get_max_size),
            offset_of!(InterfaceV2, is_host),
        ],
        3 => [
            size_of::<InterfaceV3>(),
            offset_of!(InterfaceV3, get_alignment),
            offset_of!(InterfaceV3, get_max_size),
            offset_of!(InterfaceV3, is_host),
        ],
        _ => panic!("a backend API that moe-hot does not know: see docs/revisions.md"),
    };
    assert!(size == size_of::<Theirs>());
    assert!(alignment == offset_of!(Theirs, get_alignment) && max_size == offset_of!(Theirs, get_max_size));
    assert!(is_host == offset_of!(Theirs, is_host));
};

/// The buffer type of `device`, which becomes its context. Lives as long as the process.
pub(super) fn make(device: sys::ggml_backend_dev_t, api: BackendApi) -> *mut c_void {
    match api {
        BackendApi::V2 => place(
            device,
            InterfaceV2 { get_name, alloc_buffer, get_alignment, get_max_size, get_alloc_size: None, is_host },
        ),
        BackendApi::V3 => place(
            device,
            InterfaceV3 {
                get_name,
                alloc_buffer,
                alloc_buffer_n: None,
                get_alignment,
                get_max_size,
                get_alloc_size: None,
                get_alloc_size_n: None,
                is_host,
            },
        ),
    }
}

fn place<I>(device: sys::ggml_backend_dev_t, iface: I) -> *mut c_void {
    Box::into_raw(Box::new(Versioned { iface, device, context: null_mut() })).cast()
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
