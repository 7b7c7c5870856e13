//! Weights that other threads may read for as long as their buffer lives.
//!
//! The plugin's buffers are registered when made and closed before they are freed; closing waits for readers. So a
//! [`SharedWeights`] can outlive its buffer without harm: it then has no bytes any more.

use super::{Buffer, Tensor, sys};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock};

/// Whether a buffer's memory is still there. Readers hold the lock while they read.
type Open = RwLock<bool>;

/// Live buffers of ours by address.
static LIVE: LazyLock<Mutex<HashMap<usize, Arc<Open>>>> = LazyLock::new(Mutex::default);

fn live() -> MutexGuard<'static, HashMap<usize, Arc<Open>>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a new buffer's weights readable by other threads.
///
/// # Safety
/// [`close_buffer`] is called with the same address before the buffer's memory goes. Unless the buffer is for results, no
/// leaf in it is written once graphs with that leaf are computed.
pub unsafe fn open_buffer(address: usize) {
    live().insert(address, Arc::new(RwLock::new(true)));
}

/// Ends all reading of a buffer's weights; returns when nobody reads any more.
pub fn close_buffer(address: usize) {
    let open = live().remove(&address);
    if let Some(open) = open {
        *open.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// Whether the loader has marked a live buffer of ours as holding weights. `false` for any other address.
pub fn is_of_weights(address: usize) -> bool {
    let live = live();
    if !live.contains_key(&address) {
        return false;
    }
    let buffer = address as *const sys::ggml_backend_buffer;
    // SAFETY: the buffer is not freed before it is closed, for which the lock is taken that is held here. The field is a plain
    // number, which the loader sets once.
    let usage = unsafe { std::ptr::read_volatile(&raw const (*buffer).usage) };
    usage == sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS
}

/// One tensor's bytes in a buffer of ours.
#[derive(Clone)]
pub struct SharedWeights {
    data: NonNull<u8>,
    len: usize,
    open: Arc<Open>,
}

// SAFETY: the bytes are only read, and only under the lock that says that they are there.
unsafe impl Send for SharedWeights {}
// SAFETY: as above.
unsafe impl Sync for SharedWeights {}

impl SharedWeights {
    /// The bytes of a leaf in a live buffer of ours; `None` for anything else.
    pub fn of(tensor: &Tensor<'_>) -> Option<Self> {
        let buffer: Buffer<'_> = tensor.buffer()?;
        // Results, and inputs beside them, are written while graphs run.
        if buffer.holds_results() || tensor.storage().op() != sys::GGML_OP_NONE {
            return None;
        }
        let data = NonNull::new(tensor.address() as *mut u8)?;
        let open = live().get(&buffer.address())?.clone();
        Some(Self { data, len: tensor.n_bytes(), open })
    }

    /// Runs `read` on `len` bytes from `offset`; `None` if they are gone or there are not so many.
    pub fn with_bytes<R>(&self, offset: usize, len: usize, read: impl FnOnce(&[u8]) -> R) -> Option<R> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        if !*open {
            return None;
        }
        // SAFETY: the buffer is open and stays so while the lock is held; the range lies inside the tensor, a leaf outside
        // buffers for results, which is not written any more (`open_buffer`).
        let bytes = unsafe { std::slice::from_raw_parts(self.data.as_ptr().add(offset), len) };
        Some(read(bytes))
    }
}
