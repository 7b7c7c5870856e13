//! Where the inputs of a split come from.

use crate::ggml::sys;
use std::ptr::null_mut;

/// Backends that are still reading inputs for us. As a rule there is one.
pub(super) struct Sources {
    backends: [sys::ggml_backend_t; MAX_SOURCES],
    len: usize,
}

/// Inputs of one split that come from more backends are waited for.
const MAX_SOURCES: usize = 4;

impl Sources {
    pub(super) const NONE: Self = Self { backends: [null_mut(); MAX_SOURCES], len: 0 };

    /// Notes a backend. `false`: there are too many.
    pub(super) fn add(&mut self, backend: sys::ggml_backend_t) -> bool {
        if self.has(backend) {
            return true;
        }
        let Some(place) = self.backends.get_mut(self.len) else { return false };
        *place = backend;
        self.len += 1;
        true
    }

    /// Whether it has been noted since the last wait.
    pub(super) fn has(&self, backend: sys::ggml_backend_t) -> bool {
        self.backends[..self.len].contains(&backend)
    }

    /// Waits until all inputs are there.
    ///
    /// # Safety
    /// The backends noted since the last call are alive.
    pub(super) unsafe fn wait(&mut self) {
        for backend in &self.backends[..std::mem::take(&mut self.len)] {
            // SAFETY: passed on from the caller.
            unsafe { sys::ggml_backend_synchronize(*backend) };
        }
    }
}

/// # Safety
/// `tensor` is valid and has memory.
pub(super) unsafe fn is_in_host_memory(tensor: *const sys::ggml_tensor) -> bool {
    // SAFETY: passed on from the caller.
    unsafe {
        let owner = if (*tensor).view_src.is_null() { tensor } else { (*tensor).view_src };
        !(*owner).buffer.is_null() && sys::ggml_backend_buffer_is_host((*owner).buffer)
    }
}

/// Whether both hold the same elements at the same places, without gaps.
///
/// # Safety
/// Both are valid.
pub(super) unsafe fn have_equal_layouts(a: *const sys::ggml_tensor, b: *const sys::ggml_tensor) -> bool {
    // SAFETY: passed on from the caller.
    unsafe { (*a).type_ == (*b).type_ && (*a).ne == (*b).ne && (*a).nb == (*b).nb && sys::ggml_is_contiguous(a) }
}
