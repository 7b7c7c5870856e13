//! Safe wrappers over ggml: tensors, graphs, buffers, devices, backends, the log.
//!
//! Three layers: `sys` is generated, each wrapper's constructor is `unsafe` and names what it relies on,
//! everything else is safe: whatever its arguments, it does what it says or fails. This module knows nothing of experts
//! but that ids pick them.

mod abi;
mod arena;
mod backend;
mod buffer;
#[cfg(test)]
mod contract_tests;
mod device;
mod graph;
mod host_library;
mod ids;
mod in_place;
mod live;
mod log;
mod memory;
mod operation;
mod own_graph;
mod revisions;
mod shadow;
mod tensor;
#[cfg(test)]
pub(crate) mod test_devices;
#[cfg(test)]
pub(crate) mod testing;

pub use abi::{is_our_commit, join_host};
pub use arena::{GraphBuilder, Inputs, TensorIndex};
pub use backend::{
    AbortCallback, Backend, HostBlocks, PIECE_BYTES, PIECES_IN_FLIGHT, PROBE_BYTES, PROBE_BYTES_PER_UPLOAD, Status,
    Upload,
};
pub use buffer::{Buffer, BufferType};
pub use device::Device;
pub use graph::Graph;
pub use host_library::HostLibrary;
pub use ids::{Ids, OwnIds};
pub use in_place::InPlace;
pub use live::{SharedWeights, close_buffer, is_of_weights, open_buffer};
pub use log::{Level, is_hosts_log, log, remember_hosts_log};
pub use memory::{HostBlock, Memory, Scratch};
pub use operation::{MAX_SOURCES, OpParams};
pub use own_graph::{OwnGraph, PlacedTensors, graphs_built};
pub use revisions::BackendApi;
#[allow(unused_imports)] // for the launcher's check
pub use revisions::{NOT_SERVED, is_served_build, served, served_revisions};
pub use shadow::Shadows;
pub use tensor::Tensor;

/// The generated bindings to ggml. No function is linked: all are looked up in the ggml that has loaded us, but for unit
/// tests, which have loaded none that way.
#[allow(missing_docs, dead_code, non_camel_case_types, non_snake_case, non_upper_case_globals)]
#[allow(unsafe_op_in_unsafe_fn, clippy::all, clippy::undocumented_unsafe_blocks)]
pub mod sys {
    include!(concat!(env!("OUT_DIR"), "/ggml.rs"));
    #[cfg(test)]
    include!(concat!(env!("OUT_DIR"), "/ggml_linked.rs"));
    #[cfg(not(test))]
    include!(concat!(env!("OUT_DIR"), "/ggml_looked_up.rs"));

    #[cfg(test)]
    pub fn look_up(
        _: impl Fn(&std::ffi::CStr) -> Option<std::ptr::NonNull<std::ffi::c_void>>,
    ) -> Option<&'static std::ffi::CStr> {
        None
    }

    #[cfg(test)]
    pub fn is_found(_: &std::ffi::CStr) -> bool {
        true
    }
}

/// Turns a C string that ggml owns into text; a NULL becomes the empty string.
///
/// # Safety
/// `text` is NULL or points to a NUL-terminated string that lives for `'a`.
pub(crate) unsafe fn c_text<'a>(text: *const std::ffi::c_char) -> std::borrow::Cow<'a, str> {
    if text.is_null() {
        return "".into();
    }
    // SAFETY: the caller promises a NUL-terminated string that outlives 'a.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy()
}
