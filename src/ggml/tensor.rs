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
    /// `raw` is NULL or points to a tensor that, with its sources and buffers, stays valid and is not
    /// changed by another thread for `'a`.
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
        // SAFETY: the range lies inside the tensor's allocated host memory; weights are not written while graphs run.
        Some(unsafe { std::slice::from_raw_parts(data.as_ptr().add(offset), len) })
    }

    fn is_in_host_memory(&self) -> bool {
        self.buffer().is_some_and(|buffer| buffer.is_host())
    }

    /// The tensor's data as expert ids, if it is a 2-D tensor of 32-bit integers in host memory.
    pub fn ids(&self) -> Option<Ids<'a>> {
        let flat = self.ne(2) == 1 && self.ne(3) == 1;
        if self.element_type() != sys::GGML_TYPE_I32 || !flat || !self.is_aligned_i32() {
            return None;
        }
        let [n_used, n_tokens] = [self.ne(0) as usize, self.ne(1) as usize];
        if n_used == 0 || n_tokens == 0 {
            return Some(Ids { data: NonNull::dangling(), n_used, n_tokens: 0, strides: [0; 2], memory: PhantomData });
        }
        if !self.is_in_host_memory() {
            return None;
        }
        Some(Ids {
            data: NonNull::new(self.get().data.cast())?,
            n_used,
            n_tokens,
            strides: [self.nb(0), self.nb(1)],
            memory: PhantomData,
        })
    }

    fn is_aligned_i32(&self) -> bool {
        [self.address(), self.nb(0), self.nb(1)].iter().all(|n| n % align_of::<i32>() == 0)
    }
}

/// A copy of a batch's expert ids. ggml may use their memory again once the split's last reader is done.
#[derive(Default)]
pub struct OwnIds {
    ids: Vec<i32>,
    n_used: usize,
    n_tokens: usize,
}

impl OwnIds {
    /// Takes a copy; allocates only for a batch larger than all before.
    pub fn read(&mut self, ids: &Ids<'_>) {
        (self.n_used, self.n_tokens) = (ids.n_used(), ids.n_tokens());
        self.ids.clear();
        self.ids.extend(ids.iter().map(|(_, _, id)| id));
    }

    /// Experts per token.
    pub fn n_used(&self) -> usize {
        self.n_used
    }

    /// Tokens in the batch; 0 is normal.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// All ids, token by token.
    pub fn ids(&self) -> &[i32] {
        &self.ids
    }

    /// All ids as `(slot, token, id)`, token by token.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize, i32)> {
        let n_used = self.n_used.max(1);
        self.ids.iter().enumerate().map(move |(place, &id)| (place % n_used, place / n_used, id))
    }
}

/// Expert ids `[n_expert_used, n_tokens]`, usually a strided view of a longer argsort result.
pub struct Ids<'a> {
    data: NonNull<i32>,
    n_used: usize,
    n_tokens: usize,
    /// Bytes from id to id and from token to token.
    strides: [usize; 2],
    memory: PhantomData<&'a [i32]>,
}

impl<'a> Ids<'a> {
    /// Experts per token.
    pub fn n_used(&self) -> usize {
        self.n_used
    }

    /// Tokens in the batch; 0 is normal.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// All ids as `(slot, token, id)`, token by token.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize, i32)> {
        (0..self.n_tokens).flat_map(move |token| (0..self.n_used).map(move |slot| (slot, token, self.at(slot, token))))
    }

    fn at(&self, slot: usize, token: usize) -> i32 {
        let offset = slot * self.strides[0] + token * self.strides[1];
        // SAFETY: `Tensor::ids` checked alignment and that the tensor, all n_used x n_tokens of it, lies in host memory;
        // a plain read, so it does not matter who writes there at other times.
        unsafe { self.data.byte_add(offset).read() }
    }
}
