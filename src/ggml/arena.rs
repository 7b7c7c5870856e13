//! Graphs of our own: built once, placed in memory once, computed many times.
//!
//! A [`GraphBuilder`] makes tensors without memory; [`GraphBuilder::finish`] turns them into an [`OwnGraph`] that keeps
//! the memory it was placed in alive. Tensors are named by [`TensorIndex`], which is good for the graph it came from.

use super::{BufferType, Device, Memory, Tensor, c_text, sys};
use crate::{Error, Result};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// An operation's parameters, copied verbatim.
pub type OpParams = [i32; (sys::GGML_MAX_OP_PARAMS as usize) / size_of::<i32>()];

/// Most sources that our operations have.
pub const MAX_SOURCES: usize = 3;

/// One tensor of a graph of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorIndex(usize);

/// Graphs built so far in this process. In steady state it stands still.
static BUILT: AtomicU64 = AtomicU64::new(0);

/// How many graphs have been built so far.
pub fn graphs_built() -> u64 {
    BUILT.load(Relaxed)
}

/// Tensors and their order of execution, not computable yet.
pub struct GraphBuilder {
    context: NonNull<sys::ggml_context>,
    graph: NonNull<sys::ggml_cgraph>,
    tensors: Vec<NonNull<sys::ggml_tensor>>,
    memories: Vec<Arc<Memory>>,
    max_tensors: usize,
}

impl GraphBuilder {
    /// Room for `max_tensors` tensors, views included.
    pub fn new(max_tensors: usize) -> Result<Self> {
        // SAFETY: both take plain numbers.
        let overhead =
            unsafe { max_tensors * sys::ggml_tensor_overhead() + sys::ggml_graph_overhead_custom(max_tensors, false) };
        let params = sys::ggml_init_params { mem_size: overhead, mem_buffer: null_mut(), no_alloc: true };
        // SAFETY: plain parameters; ggml allocates the memory.
        let context = NonNull::new(unsafe { sys::ggml_init(params) }).ok_or(Error::Ggml("a context"))?;
        // SAFETY: the context is valid and has room for exactly this graph.
        let graph = unsafe { sys::ggml_new_graph_custom(context.as_ptr(), max_tensors, false) };
        let graph = NonNull::new(graph).ok_or(Error::Ggml("a graph"))?;
        Ok(Self { context, graph, tensors: Vec::new(), memories: Vec::new(), max_tensors })
    }

    fn push(&mut self, raw: *mut sys::ggml_tensor) -> Result<TensorIndex> {
        self.tensors.push(NonNull::new(raw).ok_or(Error::Ggml("a tensor"))?);
        Ok(TensorIndex(self.tensors.len() - 1))
    }

    /// A tensor without an operation, shape in ggml order.
    pub fn leaf(&mut self, kind: sys::ggml_type, ne: [i64; 4]) -> Result<TensorIndex> {
        if self.tensors.len() >= self.max_tensors {
            return Err(Error::Ggml("one more tensor"));
        }
        // SAFETY: the context is valid and, by the check above, has room.
        let raw = unsafe { sys::ggml_new_tensor(self.context.as_ptr(), kind, 4, ne.as_ptr()) };
        self.push(raw)
    }

    /// The result of an operation: f32, shape in ggml order. Operations are executed in the order of these calls.
    ///
    /// The caller vouches for shapes that fit the operation, as those copied from a valid graph do.
    pub fn result(
        &mut self,
        op: sys::ggml_op,
        params: &OpParams,
        ne: [i64; 4],
        sources: [Option<TensorIndex>; MAX_SOURCES],
    ) -> Result<TensorIndex> {
        let index = self.leaf(sys::GGML_TYPE_F32, ne)?;
        let sources = sources.map(|source| source.map_or(null_mut(), |source| self.raw(source)));
        let raw = self.raw(index);
        // SAFETY: `raw` is ours and nobody else has seen it; sources are tensors of the same context.
        unsafe {
            (*raw).op = op;
            (*raw).op_params = *params;
            (&mut (*raw).src)[..MAX_SOURCES].copy_from_slice(&sources);
            sys::ggml_build_forward_expand(self.graph.as_ptr(), raw);
        }
        Ok(index)
    }

    /// `ne0` elements from byte `offset` of every row of `of`.
    pub fn view(&mut self, of: TensorIndex, ne0: i64, offset: usize) -> Result<TensorIndex> {
        if self.tensors.len() >= self.max_tensors {
            return Err(Error::Ggml("one more tensor"));
        }
        let source = self.raw(of);
        // SAFETY: tensors of our context are valid; a row of `of` holds `offset` and `ne0` elements, checked below.
        let raw = unsafe {
            let [_, ne1, ne2, ne3] = (*source).ne;
            let [nb0, nb1, nb2, nb3] = (*source).nb;
            if ne0 < 0 || offset + ne0 as usize * nb0 > nb1 {
                return Err(Error::Ggml("a view inside its source"));
            }
            sys::ggml_view_4d(self.context.as_ptr(), source, ne0, ne1, ne2, ne3, nb1, nb2, nb3, offset)
        };
        self.push(raw)
    }

    /// Bytes that the tensor takes in memory of this kind, padding included.
    pub fn alloc_size(&self, tensor: TensorIndex, kind: BufferType) -> usize {
        // SAFETY: buffer type and tensor are valid.
        unsafe { sys::ggml_backend_buft_get_alloc_size(kind.as_raw(), self.raw(tensor)) }
    }

    /// Bytes of the tensor's elements.
    pub fn n_bytes(&self, tensor: TensorIndex) -> usize {
        // SAFETY: the tensor is valid.
        unsafe { sys::ggml_nbytes(self.raw(tensor)) }
    }

    /// Name of the tensor's operation, for messages.
    pub fn op_name(&self, tensor: TensorIndex) -> String {
        // SAFETY: the tensor is valid; ggml returns a static string.
        unsafe { c_text(sys::ggml_op_desc(self.raw(tensor))) }.into_owned()
    }

    /// Whether the device can execute the tensor's operation.
    pub fn supported_by(&self, device: Device, tensor: TensorIndex) -> bool {
        // SAFETY: device and tensor are valid.
        unsafe { sys::ggml_backend_dev_supports_op(device.as_raw(), self.raw(tensor)) }
    }

    /// Puts a tensor at `offset` bytes of `memory`, and its views with it. Fails if it does not fit, or twice.
    pub fn place(&mut self, tensor: TensorIndex, memory: &Arc<Memory>, offset: usize) -> Result<()> {
        let raw = self.raw(tensor);
        let end = offset.checked_add(self.alloc_size(tensor, memory.buffer_type()));
        // SAFETY: `raw` is a valid tensor of our context.
        let is_placed = unsafe { !(*raw).buffer.is_null() || !(*raw).data.is_null() || !(*raw).view_src.is_null() };
        if is_placed || end.is_none_or(|end| end > memory.size()) || !offset.is_multiple_of(memory.alignment()) {
            return Err(Error::Ggml("a place for a tensor"));
        }
        // SAFETY: the tensor has no place yet and, by the check above, the range lies inside the buffer.
        let status = unsafe { sys::ggml_backend_tensor_alloc(memory.as_raw(), raw, memory.address(offset)) };
        if status != sys::GGML_STATUS_SUCCESS {
            return Err(Error::Ggml("a tensor in its buffer"));
        }
        if !self.memories.iter().any(|known| Arc::ptr_eq(known, memory)) {
            self.memories.push(memory.clone());
        }
        self.place_views(raw)
    }

    fn place_views(&self, of: *mut sys::ggml_tensor) -> Result<()> {
        for view in &self.tensors {
            // SAFETY: all tensors of our context are valid; a view is initialised once, after its source.
            let status = unsafe {
                if view.as_ref().view_src != of {
                    continue;
                }
                sys::ggml_backend_view_init(view.as_ptr())
            };
            if status != sys::GGML_STATUS_SUCCESS {
                return Err(Error::Ggml("a view in its buffer"));
            }
        }
        Ok(())
    }

    /// The graph, with tensors in `bound` (leaves without memory) to be shown live tensors at each computation.
    ///
    /// Fails if any other tensor has no place.
    pub fn finish(self, bound: Vec<TensorIndex>) -> Result<OwnGraph> {
        let is_bound = |index: usize| bound.iter().any(|leaf| leaf.0 == index);
        for (index, tensor) in self.tensors.iter().enumerate() {
            // SAFETY: all tensors of our context are valid.
            let is_placed = unsafe { !tensor.as_ref().buffer.is_null() };
            if is_placed == is_bound(index) {
                return Err(Error::Ggml("a graph whose tensors all have a place"));
            }
        }
        // SAFETY: the graph is ours.
        unsafe { (*self.graph.as_ptr()).uid = sys::ggml_graph_next_uid() };
        BUILT.fetch_add(1, Relaxed);
        Ok(OwnGraph { parts: self, bound })
    }

    pub(super) fn raw(&self, tensor: TensorIndex) -> *mut sys::ggml_tensor {
        self.tensors[tensor.0].as_ptr()
    }
}

impl Drop for GraphBuilder {
    fn drop(&mut self) {
        // SAFETY: we own the context, and all tensors and the graph live in it.
        unsafe { sys::ggml_free(self.context.as_ptr()) };
    }
}

/// A graph of ours with memory behind its tensors. Used by one thread at a time.
pub struct OwnGraph {
    parts: GraphBuilder,
    bound: Vec<TensorIndex>,
}

// SAFETY: the ggml context and everything in it belong to this graph alone; memories are shared and immutable handles.
unsafe impl Send for OwnGraph {}
// SAFETY: through a shared reference nothing of it is changed, neither by us nor by ggml's copies to and from its tensors.
unsafe impl Sync for OwnGraph {}

impl OwnGraph {
    /// Leaves that are shown a live tensor at each computation.
    pub fn bound(&self) -> &[TensorIndex] {
        &self.bound
    }

    /// Shows a bound leaf where its bytes are. Fails if the tensor is of another type or shape.
    ///
    /// The caller computes before `tensor` ends; [`super::Backend::compute_own`] sees to it.
    pub(super) fn bind(&mut self, leaf: usize, tensor: &Tensor<'_>) -> Result<()> {
        let raw = self.bound.get(leaf).map(|&leaf| self.parts.raw(leaf)).ok_or(Error::Ggml("a leaf to bind"))?;
        // SAFETY: both tensors are valid; the leaf is ours.
        unsafe {
            let (ours, theirs) = (&mut *raw, &*tensor.as_raw());
            if ours.type_ != theirs.type_ || sys::ggml_nbytes(ours) != sys::ggml_nbytes(theirs) {
                return Err(Error::Ggml("a leaf of the tensor's shape"));
            }
            ours.data = theirs.data;
            ours.buffer = tensor.storage().get_buffer();
        }
        Ok(())
    }

    /// The device's address of a tensor.
    pub fn address(&self, tensor: TensorIndex) -> usize {
        // SAFETY: the tensor is ours and valid.
        unsafe { (*self.parts.raw(tensor)).data as usize }
    }

    /// Fails unless the tensor is placed and has `len` bytes from `offset`.
    pub(super) fn check_range(&self, tensor: TensorIndex, offset: usize, len: usize) -> Result<()> {
        // SAFETY: the tensor is ours and valid.
        let is_placed = unsafe { !(*self.parts.raw(tensor)).data.is_null() };
        match offset.checked_add(len) {
            Some(end) if is_placed && end <= self.parts.n_bytes(tensor) => Ok(()),
            _ => Err(Error::Ggml("a range inside a tensor")),
        }
    }

    pub(super) fn as_raw(&self) -> *mut sys::ggml_cgraph {
        self.parts.graph.as_ptr()
    }

    pub(super) fn tensor(&self, tensor: TensorIndex) -> *mut sys::ggml_tensor {
        self.parts.raw(tensor)
    }
}
