//! Splits whose tensors lie on a device, computed as if they lay in host memory.
//!
//! Each of the scheduler's buffers has a [`Shadow`]: host memory of the same layout. Inputs are read into it, the split's
//! tensors are moved there for as long as it is computed, and results go from there to the device. All that goes to and from
//! the device is queued on one instance of it, which puts it in order with that instance's own graphs.

use super::in_place::{InPlace, Moved, Taken};
use super::memory::DevicePlace;
use super::{BufferType, Device, Graph, HostBlock, Tensor, sys};
use crate::{Error, Result};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Buffers whose shadows are kept: llama.cpp makes a new one when a graph needs more, and has one, as a rule, and 16 at most.
const MAX_SHADOWS: usize = 32;

/// Host memory in the layout of a buffer of the scheduler's.
struct Shadow {
    buffer: sys::ggml_backend_buffer_t,
    base: *mut c_void,
    size: usize,
    block: HostBlock,
}

/// The shadows of one context's buffers.
pub struct Shadows {
    device: Device,
    /// The memory of the device's own tensors.
    device_kind: BufferType,
    /// The same memory by the name under which the scheduler has it for us.
    split_kind: BufferType,
    pinned: bool,
    shadows: Vec<Shadow>,
    moved: Vec<Moved>,
    /// Inputs of the next split that lie where the stream has made them.
    taken: Vec<Taken>,
}

// SAFETY: the pointers are those of the context's tensors and buffers, and are used by whoever computes with it: one thread at
// a time.
unsafe impl Send for Shadows {}

/// Puts a split's tensors back where they were.
struct MoveBack<'a>(&'a mut Vec<Moved>);

impl Drop for MoveBack<'_> {
    fn drop(&mut self) {
        for Moved { tensor, data, buffer } in self.0.drain(..) {
            // SAFETY: the tensor was moved by `Shadows::on_host`, which lives no longer than its graph.
            unsafe { ((*tensor).data, (*tensor).buffer) = (data, buffer) };
        }
    }
}

impl Shadows {
    /// None yet. `split_kind`: memory of `device` under another name, which the scheduler has for our splits.
    pub fn new(device: Device, device_kind: BufferType, split_kind: BufferType, pinned: bool) -> Self {
        Self { device, device_kind, split_kind, pinned, shadows: Vec::new(), moved: Vec::new(), taken: Vec::new() }
    }

    /// The device that the splits lie on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether a tensor lies in memory of our splits.
    ///
    /// # Safety
    /// `tensor` is valid, as is its buffer.
    pub unsafe fn has(&self, tensor: *const sys::ggml_tensor) -> bool {
        // SAFETY: passed on from the caller.
        let buffer = unsafe { buffer_of(tensor) };
        // SAFETY: as above.
        !buffer.is_null() && unsafe { (*buffer).buft } == self.split_kind.as_raw()
    }

    /// Where a tensor of our splits is in host memory.
    ///
    /// # Safety
    /// `tensor` is valid and lies in a live buffer; the answer is valid until the next buffer is seen.
    pub unsafe fn place(&mut self, tensor: *const sys::ggml_tensor) -> Result<*mut c_void> {
        // SAFETY: passed on from the caller.
        unsafe {
            let shadow = self.shadow_of(buffer_of(tensor))?;
            shadow.place(tensor)
        }
    }

    /// # Safety
    /// `buffer` is live.
    unsafe fn shadow_of(&mut self, buffer: sys::ggml_backend_buffer_t) -> Result<&Shadow> {
        // SAFETY: passed on from the caller.
        let (base, size) = unsafe { (sys::ggml_backend_buffer_get_base(buffer), (*buffer).size) };
        let is_its = |shadow: &Shadow| shadow.buffer == buffer && shadow.base == base && shadow.size == size;
        if let Some(known) = self.shadows.iter().position(is_its) {
            return Ok(&self.shadows[known]);
        }
        self.shadows.retain(|shadow| shadow.buffer != buffer);
        if self.shadows.len() == MAX_SHADOWS {
            self.shadows.remove(0);
        }
        let block = HostBlock::for_copies(self.device, size, self.pinned)?;
        self.shadows.push(Shadow { buffer, base, size, block });
        self.shadows.last().ok_or(Error::Contract("a shadow that is not there"))
    }

    /// Runs `compute` on a graph whose tensors are in host memory meanwhile. `stream`: an instance of our device that it may leave
    /// the result to, in its place on the device; NULL: none. Returns whether it has, too.
    ///
    /// # Safety
    /// `graph` is a valid graph of the scheduler's that this thread alone uses, and all of its tensors have memory. Nothing is
    /// copied to or from its shadows meanwhile. `stream` is NULL or alive, has been waited for, and is used by this thread alone.
    pub unsafe fn on_host<R>(
        &mut self,
        graph: *mut sys::ggml_cgraph,
        stream: sys::ggml_backend_t,
        compute: impl FnOnce(&Graph<'_>, Option<&InPlace<'_>>) -> R,
    ) -> Result<(R, bool)> {
        const NO_GRAPH: Error = Error::Contract("a graph that is none");
        let mut moved = std::mem::take(&mut self.moved);
        moved.clear();
        let back = MoveBack(&mut moved);
        // SAFETY: passed on from the caller; tensors are moved one by one, and no reference to one is alive.
        let result = unsafe {
            let graph = graph.as_mut().ok_or(NO_GRAPH)?;
            for index in 0..graph.n_nodes.max(0) as usize {
                let node = *graph.nodes.add(index);
                self.move_to_host(node, back.0)?;
                for source in (*node).src {
                    self.move_to_host(source, back.0)?;
                }
            }
            let place = (self.device, self.device_kind);
            let in_place = NonNull::new(stream).map(|stream| InPlace::new(stream, place, back.0, &self.taken));
            let result = compute(&Graph::from_raw(graph).ok_or(NO_GRAPH)?, in_place.as_ref());
            (result, in_place.is_some_and(|place| place.is_done()))
        };
        drop(back);
        self.moved = moved;
        Ok(result)
    }

    /// # Safety
    /// As for [`Self::on_host`]; `tensor` is one of the graph's, or NULL.
    unsafe fn move_to_host(&mut self, tensor: *mut sys::ggml_tensor, moved: &mut Vec<Moved>) -> Result<()> {
        // SAFETY: passed on from the caller. What has been moved lies in another kind of memory, so that it is not moved again.
        unsafe {
            if tensor.is_null() {
                return Ok(());
            }
            let buffer = (*tensor).buffer;
            if !buffer.is_null() && (*buffer).buft == self.split_kind.as_raw() {
                let shadow = self.shadow_of(buffer)?;
                let (data, host) = (shadow.place(tensor)?, shadow.block.as_raw());
                moved.push(Moved { tensor, data: (*tensor).data, buffer });
                ((*tensor).data, (*tensor).buffer) = (data, host);
            }
            self.move_view_source(tensor, moved)
        }
    }

    /// # Safety
    /// As for [`Self::move_to_host`].
    unsafe fn move_view_source(&mut self, tensor: *mut sys::ggml_tensor, moved: &mut Vec<Moved>) -> Result<()> {
        // SAFETY: passed on from the caller. The source of a view is never a view.
        unsafe { if (*tensor).view_src.is_null() { Ok(()) } else { self.move_to_host((*tensor).view_src, moved) } }
    }

    /// The inputs that were taken are those of a split that is over.
    pub fn forget_inputs(&mut self) {
        self.taken.clear();
    }

    /// Notes that an input lies where it was made as long as its split is computed, if it is in the device's own memory.
    ///
    /// # Safety
    /// As for [`Self::queue_read`].
    unsafe fn note_input(&mut self, src: *const sys::ggml_tensor, dst: *const sys::ggml_tensor) {
        // SAFETY: passed on from the caller.
        unsafe {
            let buffer = buffer_of(src);
            if !buffer.is_null() && (*buffer).buft == self.device_kind.as_raw() {
                let source = DevicePlace { data: (*src).data, buffer, len: sys::ggml_nbytes(src) };
                self.taken.push(Taken { input: dst, source });
            }
        }
    }

    /// Queues the read of an input on `stream`, from memory of its device, to where `dst` has its shadow.
    ///
    /// # Safety
    /// `stream` is a live instance that reads asynchronously, `src` a tensor in its memory, `dst` one of the same layout in ours.
    /// The shadow is left alone until `stream` has been waited for.
    pub unsafe fn queue_read(
        &mut self,
        stream: sys::ggml_backend_t,
        src: *const sys::ggml_tensor,
        dst: *const sys::ggml_tensor,
    ) -> Result<()> {
        // SAFETY: passed on from the caller.
        unsafe {
            let to = self.place(dst)?;
            let size = sys::ggml_nbytes(src);
            if self.has(src) {
                let (mut owner, mut alias) = self.alias(src);
                alias.buffer = &raw mut owner;
                sys::ggml_backend_tensor_get_async(stream, &raw const alias, to, 0, size);
            } else {
                sys::ggml_backend_tensor_get_async(stream, src, to, 0, size);
                self.note_input(src, dst);
            }
        }
        Ok(())
    }

    /// Writes a computed split's results: those that others read, or all, and its inputs, for a callback that may look at anything.
    /// Queued on `stream`; if that is NULL, at once.
    ///
    /// # Safety
    /// `graph` is what was computed, its tensors are where they were; `stream` is NULL or a live instance of our device. The
    /// shadows are left alone until it has been waited for.
    pub unsafe fn write_results(
        &mut self,
        stream: sys::ggml_backend_t,
        graph: *mut sys::ggml_cgraph,
        for_callback: bool,
    ) -> Result<()> {
        // SAFETY: passed on from the caller.
        let graph = unsafe { Graph::from_raw(graph) }.ok_or(Error::Contract("a graph that is none"))?;
        for node in graph.nodes() {
            if for_callback {
                // Inputs of the split alone: others may have put results of theirs into memory of ours.
                let sources = (0..sys::GGML_MAX_SRC as usize).filter_map(|source| node.src(source));
                for input in sources.filter(|source| source.op() == sys::GGML_OP_NONE && source.storage().is(source)) {
                    // SAFETY: passed on from the caller.
                    unsafe { self.write(stream, &input) }?;
                }
            }
            if node.storage().is(&node) && (for_callback || is_read_elsewhere(&graph, &node)) {
                // SAFETY: passed on from the caller.
                if !unsafe { self.write(stream, &node) }? {
                    return Err(Error::Contract("a result that is read on the device and does not lie there"));
                }
            }
        }
        Ok(())
    }

    /// `false`, and nothing, for a tensor that is not in our memory.
    ///
    /// # Safety
    /// As for [`Self::write_results`]; `tensor` is no view.
    unsafe fn write(&mut self, stream: sys::ggml_backend_t, tensor: &Tensor<'_>) -> Result<bool> {
        let raw = tensor.as_raw();
        // SAFETY: passed on from the caller.
        unsafe {
            if !self.has(raw) {
                return Ok(false);
            }
            let from = self.place(raw)?;
            if stream.is_null() {
                sys::ggml_backend_tensor_set(raw, from, 0, tensor.n_bytes());
            } else {
                let (mut owner, mut alias) = self.alias(raw);
                alias.buffer = &raw mut owner;
                sys::ggml_backend_tensor_set_async(stream, &raw mut alias, from, 0, tensor.n_bytes());
            }
        }
        Ok(true)
    }

    /// A tensor of our splits as one of the device's own: backends insist on their own kind of memory, by its address, where
    /// they copy. The first of the two becomes the buffer of the second.
    ///
    /// # Safety
    /// `tensor` is valid, as is its buffer.
    unsafe fn alias(&self, tensor: *const sys::ggml_tensor) -> (sys::ggml_backend_buffer, sys::ggml_tensor) {
        // SAFETY: passed on from the caller; both are plain data.
        unsafe {
            let mut owner = std::ptr::read(buffer_of(tensor));
            owner.buft = self.device_kind.as_raw();
            let mut alias = std::ptr::read(tensor);
            (alias.view_src, alias.view_offs) = (std::ptr::null_mut(), 0);
            (owner, alias)
        }
    }
}

impl Shadow {
    /// # Safety
    /// `tensor` is valid and in the buffer.
    unsafe fn place(&self, tensor: *const sys::ggml_tensor) -> Result<*mut c_void> {
        // SAFETY: passed on from the caller.
        let (address, len) = unsafe { ((*tensor).data as usize, sys::ggml_nbytes(tensor)) };
        let offset = address.checked_sub(self.base as usize).ok_or(Error::Contract("a tensor outside its buffer"))?;
        Ok(self.block.range(offset, len)?.cast())
    }
}

/// # Safety
/// `tensor` is valid.
unsafe fn buffer_of(tensor: *const sys::ggml_tensor) -> sys::ggml_backend_buffer_t {
    // SAFETY: passed on from the caller.
    unsafe { if (*tensor).view_src.is_null() { (*tensor).buffer } else { (*(*tensor).view_src).buffer } }
}

/// Whether anything but operations of the same split reads the memory of `node`.
fn is_read_elsewhere(graph: &Graph<'_>, node: &Tensor<'_>) -> bool {
    graph.nodes().filter(|shown| shown.storage().is(node)).any(|shown| {
        let is_it = |source: usize, user: &Tensor<'_>| user.src(source).is_some_and(|tensor| tensor.is(&shown));
        let here: usize =
            graph.nodes().map(|user| (0..sys::GGML_MAX_SRC as usize).filter(|&n| is_it(n, &user)).count()).sum();
        shown.is_output() || graph.use_count(&shown).is_none_or(|all| all as usize > here)
    })
}
