//! Memory that we own: device buffers, and host blocks that lanes read and write.

use super::{BufferType, Device, Level, Tensor, log, sys};
use crate::{Error, Result};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Once};

/// An owned buffer on some device, freed on drop.
pub struct Memory {
    raw: NonNull<sys::ggml_backend_buffer>,
    base: NonNull<c_void>,
    kind: BufferType,
}

// SAFETY: the handle is immutable, and ggml's buffer functions used here may be called from any thread.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// A new buffer of `size` bytes (at least 1); `None` if the device has no room for it.
    pub fn allocate(kind: BufferType, size: usize) -> Option<Self> {
        // SAFETY: the buffer type is registered.
        let raw = NonNull::new(unsafe { sys::ggml_backend_buft_alloc_buffer(kind.as_raw(), size.max(1)) })?;
        // SAFETY: the buffer is valid.
        let base = NonNull::new(unsafe { sys::ggml_backend_buffer_get_base(raw.as_ptr()) });
        let Some(base) = base else {
            // SAFETY: we own the buffer and nothing uses it.
            unsafe { sys::ggml_backend_buffer_free(raw.as_ptr()) };
            return None;
        };
        Some(Self { raw, base, kind })
    }

    /// Sets every byte to zero, padding included.
    pub fn clear(&self) {
        // SAFETY: the buffer is valid.
        unsafe { sys::ggml_backend_buffer_clear(self.raw.as_ptr(), 0) };
    }

    /// Size in bytes, as the device gave it.
    pub fn size(&self) -> usize {
        // SAFETY: the buffer is valid.
        unsafe { sys::ggml_backend_buffer_get_size(self.raw.as_ptr()) }
    }

    /// What kind of memory it is.
    pub fn buffer_type(&self) -> BufferType {
        self.kind
    }

    /// Alignment of tensors in it, in bytes.
    pub fn alignment(&self) -> usize {
        self.kind.alignment()
    }

    pub(super) fn as_raw(&self) -> sys::ggml_backend_buffer_t {
        self.raw.as_ptr()
    }

    /// The device's address of byte `offset`.
    pub(super) fn address(&self, offset: usize) -> *mut c_void {
        self.base.as_ptr().wrapping_byte_add(offset)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: we own the buffer; graphs that use it hold a reference.
        unsafe { sys::ggml_backend_buffer_free(self.raw.as_ptr()) };
    }
}

/// A block of host memory that is written and read by copying, never by reference: a device or a graph may use it
/// between our calls.
pub struct HostBlock {
    memory: Arc<Memory>,
}

impl HostBlock {
    /// A new block of zeros; `kind` must be host memory.
    pub fn allocate(kind: BufferType, size: usize) -> Result<Self> {
        if !kind.is_host() {
            return Err(Error::Ggml("a block of host memory"));
        }
        let memory = Memory::allocate(kind, size).ok_or(Error::Ggml("a block of host memory"))?;
        memory.clear();
        Ok(Self { memory: Arc::new(memory) })
    }

    /// A new block for rows and experts on their way to `device`: page-locked if the device offers that and `pinned` allows it.
    /// If the system then refuses, one line says so and the block is ordinary memory.
    pub fn for_copies(device: Device, size: usize, pinned: bool) -> Result<Self> {
        static ONCE: Once = Once::new();
        let plain = BufferType::cpu().ok_or(Error::Ggml("a CPU buffer type"))?;
        let Some(kind) = device.host_buffer_type().filter(|_| pinned) else { return Self::allocate(plain, size) };
        Self::allocate(kind, size).or_else(|_| {
            ONCE.call_once(|| log(Level::Info, "no page-locked memory was to be had: copies to the device are slower"));
            Self::allocate(plain, size)
        })
    }

    /// The buffer behind it, for graphs that are placed in it.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Size in bytes.
    pub fn size(&self) -> usize {
        self.memory.size()
    }

    /// Writes 32-bit ids at byte `offset`. Fails beyond the end.
    pub fn write_ids(&mut self, offset: usize, ids: &[i32]) -> Result<()> {
        let to = self.range(offset, size_of_val(ids))?;
        // SAFETY: `range` checked the bounds; the block is ours, and no reference to its bytes exists.
        unsafe { std::ptr::copy_nonoverlapping(ids.as_ptr().cast(), to, size_of_val(ids)) };
        Ok(())
    }

    /// Has `write` fill the first `len` bytes, which begin as whatever they were; returns what it returns. Fails beyond the end.
    pub fn write_with<R>(&mut self, len: usize, write: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        let to = self.range(0, len)?;
        // SAFETY: `range` checked the bounds, all bytes were initialised when the block was made, and no device or graph
        // uses it during this call: those that do borrow it.
        Ok(write(unsafe { std::slice::from_raw_parts_mut(to, len) }))
    }

    /// The first `len` bytes. Fails beyond the end.
    pub fn bytes(&self, len: usize) -> Result<&[u8]> {
        let from = self.range(0, len)?;
        // SAFETY: as above; whoever writes borrows the block mutably.
        Ok(unsafe { std::slice::from_raw_parts(from.cast_const(), len) })
    }

    /// Copies row `(i1, i2)` of an f32 tensor in host memory to `offset`. Fails beyond either's end.
    pub fn write_row(&mut self, offset: usize, from: &Tensor<'_>, i1: usize, i2: usize) -> Result<()> {
        let (row, len) = from.f32_row(i1, i2).ok_or(Error::Ggml("a row of numbers in host memory"))?;
        let to = self.range(offset, len)?;
        // SAFETY: `f32_row` and `range` checked the bounds; block and tensor are different memory.
        unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to, len) };
        Ok(())
    }

    /// Copies from `offset` to row `(i1, i2)` of an f32 tensor in host memory. Fails beyond either's end.
    pub fn read_row(&self, offset: usize, into: &Tensor<'_>, i1: usize, i2: usize) -> Result<()> {
        let (row, len) = into.f32_row(i1, i2).ok_or(Error::Ggml("a row of numbers in host memory"))?;
        let from = self.range(offset, len)?;
        // SAFETY: as for `write_row`; the split that `into` belongs to is used by this thread alone.
        unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), row.as_ptr(), len) };
        Ok(())
    }

    /// Where `len` bytes from `offset` lie.
    pub(super) fn range(&self, offset: usize, len: usize) -> Result<*mut u8> {
        match offset.checked_add(len) {
            Some(end) if end <= self.size() => Ok(self.memory.address(offset).cast()),
            _ => Err(Error::Ggml("a range inside a block of host memory")),
        }
    }
}
