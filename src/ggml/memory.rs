//! Memory that we own: shared device buffers, scratch memory of graphs, and host blocks.
//!
//! Three types, so that no byte is written while somebody reads it:
//! [`Memory`] is shared and holds what graphs only read. [`Scratch`] holds what a graph writes, and has one owner: whoever
//! computes borrows it mutably. [`HostBlock`] is scratch in host memory, whose bytes our own code reads and writes as well.

use super::{BufferType, Device, Level, Tensor, log, sys};
use crate::{Error, Result};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Once, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// An owned buffer on some device, freed on drop.
pub struct Memory {
    raw: NonNull<sys::ggml_backend_buffer>,
    base: NonNull<c_void>,
    kind: BufferType,
    /// For host memory: read while a graph is computed, written while bytes are copied into it. A device with memory of
    /// its own puts copies and computations in order itself.
    lock: Option<RwLock<()>>,
}

// SAFETY: the handle is immutable, and ggml's buffer functions used here may be called from any thread.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// A new buffer of `size` bytes (at least 1), all of them zero; `None` if the device has no room for it.
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
        // SAFETY: the buffer is valid and nobody else knows it yet.
        unsafe { sys::ggml_backend_buffer_clear(raw.as_ptr(), 0) };
        let lock = kind.is_host().then(RwLock::default);
        Some(Self { raw, base, kind, lock })
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

    /// Whether it is ordinary host memory, whatever was asked for: backends whose page-locked memory is refused by the system
    /// give that instead, and do not say so.
    pub(super) fn is_pageable(&self) -> bool {
        // SAFETY: the buffer is valid.
        let kind = unsafe { sys::ggml_backend_buffer_get_type(self.raw.as_ptr()) };
        BufferType::cpu().is_some_and(|cpu| cpu.as_raw() == kind)
    }

    /// Alignment of tensors in it, in bytes.
    pub fn alignment(&self) -> usize {
        self.kind.alignment()
    }

    pub(super) fn as_raw(&self) -> sys::ggml_backend_buffer_t {
        self.raw.as_ptr()
    }

    /// The device's address of byte `offset`.
    pub fn address(&self, offset: usize) -> *mut c_void {
        self.base.as_ptr().wrapping_byte_add(offset)
    }

    /// Whether nobody reads or writes it now.
    #[cfg(test)]
    pub(super) fn is_free(&self) -> bool {
        self.lock.as_ref().is_some_and(|lock| lock.try_write().is_ok())
    }

    /// To be held while bytes of it are read.
    pub(super) fn reading(&self) -> Option<RwLockReadGuard<'_, ()>> {
        self.lock.as_ref().map(|lock| lock.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// To be held while bytes of it are written.
    pub(super) fn writing(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.lock.as_ref().map(|lock| lock.write().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: we own the buffer; graphs that use it hold a reference.
        unsafe { sys::ggml_backend_buffer_free(self.raw.as_ptr()) };
    }
}

/// Where one of the scheduler's tensors lies on a device.
#[derive(Clone, Copy)]
pub(super) struct DevicePlace {
    /// The device's address.
    pub(super) data: *mut c_void,
    pub(super) buffer: sys::ggml_backend_buffer_t,
    /// In bytes.
    pub(super) len: usize,
}

/// Memory for the inputs and results of graphs. Several graphs can be placed in it; one at a time can be computed, since
/// that takes a mutable borrow.
pub struct Scratch {
    memory: Arc<Memory>,
}

impl Scratch {
    /// A new buffer of `size` bytes (at least 1), all of them zero; `None` if the device has no room for it.
    pub fn allocate(kind: BufferType, size: usize) -> Option<Self> {
        Some(Self { memory: Arc::new(Memory::allocate(kind, size)?) })
    }

    /// Size in bytes, as the device gave it.
    pub fn size(&self) -> usize {
        self.memory.size()
    }

    /// What kind of memory it is.
    pub fn buffer_type(&self) -> BufferType {
        self.memory.buffer_type()
    }

    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

/// A block of host memory. While a graph that is placed in it is computed, or a device copies from or to it, it is borrowed:
/// nobody else reads or writes its bytes then.
pub struct HostBlock {
    scratch: Scratch,
}

impl HostBlock {
    /// A new block of zeros; `kind` must be host memory.
    pub fn allocate(kind: BufferType, size: usize) -> Result<Self> {
        if !kind.is_host() {
            return Err(Error::Contract("a host block in device memory"));
        }
        let scratch = Scratch::allocate(kind, size).ok_or(Error::Ggml("a block of host memory"))?;
        Ok(Self { scratch })
    }

    /// A new block for rows and experts on their way to `device`: page-locked if the device offers that and `pinned` allows it.
    /// If the system then refuses, one line says so and the block is ordinary memory.
    pub fn for_copies(device: Device, size: usize, pinned: bool) -> Result<Self> {
        static ONCE: Once = Once::new();
        let tell = || {
            ONCE.call_once(|| log(Level::Info, "no page-locked memory was to be had: copies to the device are slower"));
        };
        let plain = BufferType::cpu().ok_or(Error::Ggml("a CPU buffer type"))?;
        let Some(kind) = device.host_buffer_type().filter(|_| pinned) else { return Self::allocate(plain, size) };
        let block = Self::allocate(kind, size).or_else(|_| Self::allocate(plain, size))?;
        if block.is_pageable() {
            tell();
        }
        Ok(block)
    }

    /// Whether copies between it and a device keep their caller waiting: it is ordinary memory.
    pub fn is_pageable(&self) -> bool {
        self.scratch.memory.is_pageable()
    }

    /// The block as scratch memory, for graphs that are to be placed in it.
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// Size in bytes.
    pub fn size(&self) -> usize {
        self.scratch.size()
    }

    /// Writes 32-bit ids at byte `offset`. Fails beyond the end.
    pub fn write_ids(&mut self, offset: usize, ids: &[i32]) -> Result<()> {
        let to = self.range(offset, size_of_val(ids))?;
        // SAFETY: `range` checked the bounds; the block is ours, and no reference to its bytes exists.
        unsafe { std::ptr::copy_nonoverlapping(ids.as_ptr().cast(), to, size_of_val(ids)) };
        Ok(())
    }

    /// `n` 32-bit ids from byte `offset`. Fails beyond the end.
    pub(super) fn ids(&self, offset: usize, n: usize) -> Result<impl Iterator<Item = i32>> {
        let len = n.checked_mul(size_of::<i32>()).ok_or(Error::Contract("a range outside a block of host memory"))?;
        let from = self.range(offset, len)?.cast_const().cast::<i32>();
        // SAFETY: `range` checked the bounds; whoever writes borrows the block mutably.
        Ok((0..n).map(move |index| unsafe { from.add(index).read_unaligned() }))
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
        let (row, len) = from.f32_row(i1, i2).ok_or(Error::Contract("a row that is not numbers in host memory"))?;
        let to = self.range(offset, len)?;
        // SAFETY: `f32_row` and `range` checked the bounds; block and tensor are different memory.
        unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to, len) };
        Ok(())
    }

    /// Copies from `offset` to row `(i1, i2)` of an f32 result in host memory. Fails beyond either's end, and for memory
    /// that others may be reading: weights and leaves.
    pub fn read_row(&self, offset: usize, into: &Tensor<'_>, i1: usize, i2: usize) -> Result<()> {
        let (row, len) = into.f32_row(i1, i2).ok_or(Error::Contract("a row that is not numbers in host memory"))?;
        if !into.is_result() {
            return Err(Error::Contract("a row of a tensor that is read only"));
        }
        let from = self.range(offset, len)?;
        // SAFETY: as for `write_row`. The split that `into` belongs to is used by this thread alone, and nobody holds a
        // reference to a result's bytes: those are given out for weights only.
        unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), row.as_ptr(), len) };
        Ok(())
    }

    pub(super) fn as_raw(&self) -> sys::ggml_backend_buffer_t {
        self.scratch.memory.as_raw()
    }

    /// Where `len` bytes from `offset` lie.
    pub(super) fn range(&self, offset: usize, len: usize) -> Result<*mut u8> {
        match offset.checked_add(len) {
            Some(end) if end <= self.size() => Ok(self.scratch.memory.address(offset).cast()),
            _ => Err(Error::Contract("a range outside a block of host memory")),
        }
    }
}
