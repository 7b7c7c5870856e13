//! Read access to tensors that the host owns.

use super::{Buffer, OpParams, c_text, sys};
use std::borrow::Cow;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A tensor of a graph that lives for `'a`. Shapes are in ggml order: `ne(0)` is the innermost dimension.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    raw: NonNull<sys::ggml_tensor>,
    graph: PhantomData<&'a sys::ggml_tensor>,
}

impl<'a> Tensor<'a> {
    /// Wraps a tensor; `None` for NULL.
    ///
    /// # Safety
    /// `raw` is NULL or points to a tensor that ggml has made, which, with its sources and buffers, stays valid for `'a`:
    /// if it has memory, all of its elements lie in its buffer, and only views overlap others outside buffers for results.
    /// For `'a` no other thread changes the tensor or its bytes, and nobody writes to buffers that hold weights.
    pub unsafe fn from_raw(raw: *const sys::ggml_tensor) -> Option<Self> {
        let raw = NonNull::new(raw.cast_mut())?;
        Some(Self { raw, graph: PhantomData })
    }

    fn get(&self) -> &'a sys::ggml_tensor {
        // SAFETY: `from_raw` promises a valid tensor for 'a.
        unsafe { self.raw.as_ref() }
    }

    pub(super) fn as_raw(&self) -> *mut sys::ggml_tensor {
        self.raw.as_ptr()
    }

    /// The operation that makes this tensor (`sys::GGML_OP_…`).
    pub fn op(&self) -> sys::ggml_op {
        self.get().op
    }

    /// The operation's parameters.
    pub fn op_params(&self) -> OpParams {
        self.get().op_params
    }

    /// Bytes from the start of the tensor that this one is a view of.
    pub fn view_offset(&self) -> usize {
        self.get().view_offs
    }

    /// Whether the host wants to read it after the graph.
    pub fn is_output(&self) -> bool {
        self.get().flags & sys::GGML_TENSOR_FLAG_OUTPUT as i32 != 0
    }

    /// Whether its elements lie one after the other without gaps.
    pub fn is_contiguous(&self) -> bool {
        // SAFETY: the tensor is valid; ggml only reads it.
        unsafe { sys::ggml_is_contiguous(self.raw.as_ptr()) }
    }

    /// Element type (`sys::GGML_TYPE_…`).
    pub fn element_type(&self) -> sys::ggml_type {
        self.get().type_
    }

    /// Name of the element type as in GGUF files, for example `q4_K`.
    pub fn type_name(&self) -> Cow<'static, str> {
        // SAFETY: ggml returns a static string for every type that a tensor can have.
        unsafe { c_text(sys::ggml_type_name(self.element_type())) }
    }

    /// Elements along dimension `dim` (0 to 3).
    pub fn ne(&self, dim: usize) -> u64 {
        self.get().ne[dim].max(0) as u64
    }

    /// Bytes from one element to the next along dimension `dim` (0 to 3).
    pub fn nb(&self, dim: usize) -> usize {
        self.get().nb[dim]
    }

    /// Size in bytes, as `ggml_nbytes` counts it.
    pub fn n_bytes(&self) -> usize {
        // SAFETY: the tensor is valid; ggml only reads it.
        unsafe { sys::ggml_nbytes(self.raw.as_ptr()) }
    }

    /// The tensor's name.
    pub fn name(&self) -> Cow<'a, str> {
        // SAFETY: ggml keeps names NUL-terminated inside the tensor, which lives for 'a.
        unsafe { c_text(self.get().name.as_ptr()) }
    }

    /// Source number `index` of the operation.
    pub fn src(&self, index: usize) -> Option<Tensor<'a>> {
        let raw = *self.get().src.get(index)?;
        // SAFETY: sources of a valid tensor are NULL or valid tensors of the same graph.
        unsafe { Tensor::from_raw(raw) }
    }

    /// The tensor whose memory this one shows: the source of a view, else itself.
    pub fn storage(&self) -> Tensor<'a> {
        // SAFETY: as for `src`; `view_src` of a valid tensor is NULL or valid.
        unsafe { Tensor::from_raw(self.get().view_src) }.unwrap_or(*self)
    }

    /// The buffer that holds the tensor's memory; `None` before allocation.
    pub fn buffer(&self) -> Option<Buffer<'a>> {
        // SAFETY: the buffer of a valid tensor is NULL or lives as long as the tensor.
        unsafe { Buffer::from_raw(self.storage().get().buffer) }
    }

    pub(super) fn get_buffer(&self) -> sys::ggml_backend_buffer_t {
        self.get().buffer
    }

    /// Address and length in bytes of row `(i1, i2)` of an f32 tensor in host memory.
    pub(super) fn f32_row(&self, i1: usize, i2: usize) -> Option<(NonNull<u8>, usize)> {
        let is_inside = (i1 as u64) < self.ne(1) && (i2 as u64) < self.ne(2);
        let is_f32 = self.element_type() == sys::GGML_TYPE_F32 && self.nb(0) == size_of::<f32>();
        if !is_inside || !is_f32 || !self.is_in_host_memory() {
            return None;
        }
        let data = NonNull::new(self.get().data.cast::<u8>())?;
        // SAFETY: row and plane are below the tensor's, so the row's start lies inside the tensor.
        let row = unsafe { data.byte_add(i1 * self.nb(1) + i2 * self.nb(2)) };
        Some((row, self.ne(0) as usize * size_of::<f32>()))
    }

    /// Whether it is what an operation writes, or a part of it: no weight, and nothing else that is read only.
    pub(super) fn is_result(&self) -> bool {
        let is_weight = self.buffer().is_none_or(|buffer| buffer.holds_weights());
        self.storage().op() != sys::GGML_OP_NONE && !is_weight
    }

    /// Address of the data, for use as an identity.
    pub fn address(&self) -> usize {
        self.get().data as usize
    }

    /// Whether both are the same tensor (not merely equal ones).
    pub fn is(&self, other: &Tensor<'_>) -> bool {
        self.raw == other.raw
    }

    /// `len` bytes of a weight's data from `offset`; `None` for anything but weights in host memory, or beyond its end.
    pub fn weight_bytes(&self, offset: usize, len: usize) -> Option<&'a [u8]> {
        let data = NonNull::new(self.get().data.cast::<u8>())?;
        let end = offset.checked_add(len)?;
        if end > self.n_bytes() || !self.is_in_host_memory() || !self.buffer()?.holds_weights() {
            return None;
        }
        // SAFETY: the range lies inside the tensor's allocated host memory; nobody writes to a buffer that holds weights:
        // neither the host, as `from_raw` demands, nor we (`HostBlock::read_row` refuses it).
        Some(unsafe { std::slice::from_raw_parts(data.as_ptr().add(offset), len) })
    }

    pub(super) fn is_in_host_memory(&self) -> bool {
        self.buffer().is_some_and(|buffer| buffer.is_host())
    }
}
