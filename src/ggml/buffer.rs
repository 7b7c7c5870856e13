//! Buffers and buffer types, as far as their common fields go.

use super::sys;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A kind of memory; lives as long as the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BufferType(NonNull<sys::ggml_backend_buffer_type>);

// SAFETY: ggml's buffer types are immutable after creation and live as long as the process.
unsafe impl Send for BufferType {}
// SAFETY: as above; nothing is written through this handle.
unsafe impl Sync for BufferType {}

impl BufferType {
    /// Wraps a buffer type; `None` for NULL.
    ///
    /// # Safety
    /// `raw` is NULL or a registered buffer type.
    pub unsafe fn from_raw(raw: sys::ggml_backend_buffer_type_t) -> Option<Self> {
        NonNull::new(raw).map(Self)
    }

    /// ggml's plain CPU memory.
    pub fn cpu() -> Option<Self> {
        // SAFETY: ggml returns a pointer to its static CPU buffer type.
        unsafe { Self::from_raw(sys::ggml_backend_cpu_buffer_type()) }
    }

    pub(crate) fn as_raw(&self) -> sys::ggml_backend_buffer_type_t {
        self.0.as_ptr()
    }

    /// Alignment of tensors, in bytes.
    pub fn alignment(&self) -> usize {
        // SAFETY: the buffer type is valid.
        unsafe { sys::ggml_backend_buft_get_alignment(self.as_raw()) }
    }

    /// Largest buffer, in bytes.
    pub fn max_size(&self) -> usize {
        // SAFETY: the buffer type is valid.
        unsafe { sys::ggml_backend_buft_get_max_size(self.as_raw()) }
    }

    /// Whether tensors lie in host memory in ggml's own layout.
    pub fn is_host(&self) -> bool {
        // SAFETY: the buffer type is valid.
        unsafe { sys::ggml_backend_buft_is_host(self.as_raw()) }
    }
}

/// A buffer that someone else owns and that lives for `'a`.
#[derive(Clone, Copy)]
pub struct Buffer<'a> {
    raw: NonNull<sys::ggml_backend_buffer>,
    owner: PhantomData<&'a sys::ggml_backend_buffer>,
}

impl<'a> Buffer<'a> {
    /// Wraps a buffer; `None` for NULL.
    ///
    /// # Safety
    /// `raw` is NULL or a buffer that lives for `'a`.
    pub unsafe fn from_raw(raw: sys::ggml_backend_buffer_t) -> Option<Self> {
        let raw = NonNull::new(raw)?;
        Some(Self { raw, owner: PhantomData })
    }

    fn get(&self) -> &'a sys::ggml_backend_buffer {
        // SAFETY: `from_raw` promises a valid buffer for 'a.
        unsafe { self.raw.as_ref() }
    }

    /// What kind of memory it is; `None` for a buffer without a type.
    pub fn buffer_type(&self) -> Option<BufferType> {
        // SAFETY: the type of a valid buffer is NULL or registered.
        unsafe { BufferType::from_raw(self.get().buft) }
    }

    /// Size in bytes; 0 in the loader's probes and measuring passes.
    pub fn size(&self) -> usize {
        self.get().size
    }

    /// Whether the loader marked it as holding weights.
    pub fn holds_weights(&self) -> bool {
        self.get().usage == sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS
    }

    /// Whether the scheduler made it for the results of a graph.
    pub fn holds_results(&self) -> bool {
        self.get().usage == sys::GGML_BACKEND_BUFFER_USAGE_COMPUTE
    }

    /// Whether its memory is host memory.
    pub fn is_host(&self) -> bool {
        self.buffer_type().is_some_and(|kind| kind.is_host())
    }

    /// Address of the buffer itself, for use as an identity while it lives.
    pub fn address(&self) -> usize {
        self.raw.as_ptr() as usize
    }
}
