//! A backend instance that we own: one stream of work on one device.

use super::own_graph::{BoundGraph, OwnGraph, PlacedTensors};
use super::{BufferType, Device, Graph, HostBlock, Memory, Scratch, Tensor, TensorIndex, sys};
use crate::{Error, Result};
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, RwLockReadGuard, RwLockWriteGuard};

/// What ggml answers to a computation (`sys::GGML_STATUS_…`).
pub type Status = sys::ggml_status;

/// The host's abort callback and its argument, passed through untouched.
#[derive(Clone, Copy)]
pub struct AbortCallback {
    function: sys::ggml_abort_callback,
    data: *mut c_void,
}

impl AbortCallback {
    /// `function` is asked before each node, with `data`; `true` ends the computation.
    ///
    /// # Safety
    /// `function` may be called with `data`, on any thread, until another callback takes its place in every backend that
    /// it was given to, or these backends are gone.
    pub unsafe fn new(function: sys::ggml_abort_callback, data: *mut c_void) -> Self {
        Self { function, data }
    }
}

type SetThreads = unsafe extern "C" fn(sys::ggml_backend_t, c_int);
type SetAbortCallback = unsafe extern "C" fn(sys::ggml_backend_t, sys::ggml_abort_callback, *mut c_void);

/// The host's side of a computation on a device.
pub struct HostBlocks<'a> {
    /// Begins with the graph's inputs.
    pub inputs: &'a HostBlock,
    /// Its start takes the output.
    pub outputs: &'a mut HostBlock,
    /// Takes what is read back of the weights: [`PROBE_BYTES_PER_UPLOAD`] for each.
    pub probes: &'a mut HostBlock,
}

/// Bytes for a tensor on a device.
pub struct Upload<'a> {
    /// Where they go.
    pub tensor: TensorIndex,
    /// First byte in the tensor.
    pub offset: usize,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// What is copied to a device in the background goes in pieces of at most this size: 10 µs of a bus of 25 GB/s.
pub const PIECE_BYTES: usize = 256 << 10;
/// And so many of them at a time.
pub const PIECES_IN_FLIGHT: usize = 2;

/// Bytes that are read back at each end of what was copied to a device, to see whether it has arrived.
pub const PROBE_BYTES: usize = 64;
/// Bytes that are read back of one upload.
pub const PROBE_BYTES_PER_UPLOAD: usize = 2 * PROBE_BYTES;

/// An owned backend instance, freed on drop. Used by one thread at a time.
pub struct Backend {
    raw: NonNull<sys::ggml_backend>,
    device: Device,
    /// The memory that its graphs lie in.
    kind: Option<BufferType>,
    is_cpu: bool,
    set_threads: Option<SetThreads>,
    set_abort_callback: Option<SetAbortCallback>,
}

// SAFETY: a backend instance may move between threads; `&mut self` keeps its use to one thread at a time.
unsafe impl Send for Backend {}

impl Backend {
    /// A new instance on `device`.
    pub fn new(device: Device) -> Result<Self> {
        // SAFETY: the device is registered; NULL parameters ask for defaults.
        let raw = NonNull::new(unsafe { sys::ggml_backend_dev_init(device.as_raw(), std::ptr::null()) })
            .ok_or(Error::Ggml("a backend"))?;
        // SAFETY: ggml documents these two names with exactly these signatures (ggml-backend.h).
        let set_threads = device
            .proc_address(c"ggml_backend_set_n_threads")
            .map(|f| unsafe { std::mem::transmute::<NonNull<c_void>, SetThreads>(f) });
        // SAFETY: as above.
        let set_abort_callback = device
            .proc_address(c"ggml_backend_set_abort_callback")
            .map(|f| unsafe { std::mem::transmute::<NonNull<c_void>, SetAbortCallback>(f) });
        let (kind, is_cpu) = (device.buffer_type(), device.is_cpu());
        Ok(Self { raw, device, kind, is_cpu, set_threads, set_abort_callback })
    }

    /// For `abi`, which compares its layout.
    pub(super) fn as_raw(&self) -> *const sys::ggml_backend {
        self.raw.as_ptr()
    }

    /// Threads to compute with, where the device has any say in it.
    pub fn set_threads(&mut self, n_threads: c_int) {
        if let Some(set) = self.set_threads {
            // SAFETY: the function belongs to this instance's device; ggml has no more threads than this.
            unsafe { set(self.raw.as_ptr(), n_threads.min(sys::GGML_MAX_N_THREADS as c_int)) };
        }
    }

    /// Whom to ask whether to stop.
    pub fn set_abort_callback(&mut self, callback: AbortCallback) {
        if let Some(set) = self.set_abort_callback {
            // SAFETY: the function belongs to this instance's device; whoever made the callback keeps it valid.
            unsafe { set(self.raw.as_ptr(), callback.function, callback.data) };
        }
    }

    /// Computes all nodes of `graph` and waits. Fails if an id points outside the experts, or on another device than the CPU.
    pub fn compute(&mut self, graph: &Graph<'_>) -> Status {
        if !self.is_cpu || !graph.has_valid_ids() {
            return sys::GGML_STATUS_FAILED;
        }
        // SAFETY: both are valid and this thread alone uses them; what kernels do not check themselves was checked.
        unsafe { sys::ggml_backend_graph_compute(self.raw.as_ptr(), graph.as_raw()) }
    }

    /// Computes a graph of ours on the CPU, on this thread, and waits. `scratch` is what it was placed in and holds its
    /// inputs; `live` are shown to its bound leaves, in their order.
    ///
    /// Fails for ids outside the experts, and for live tensors that do not fit.
    pub fn compute_own<'a>(
        &mut self,
        graph: &mut OwnGraph,
        scratch: &mut HostBlock,
        live: impl Iterator<Item = Tensor<'a>>,
    ) -> Result<Status> {
        if !self.is_cpu || !graph.shared().is_empty() || graph.has_ends() {
            return Err(Error::Contract("a graph for the CPU that is not one"));
        }
        graph.check_scratch(scratch.scratch())?;
        graph.check_supported(self.device)?;
        graph.check_ids(scratch, graph.inputs_offset(scratch.scratch())?)?;
        let graph = BoundGraph::new(graph, live)?;
        // SAFETY: every tensor has memory: the scratch memory, which is borrowed, or a live tensor's that outlasts this
        // call, which waits. Operations, shapes and ids were checked.
        Ok(unsafe { sys::ggml_backend_graph_compute(self.raw.as_ptr(), graph.as_raw()) })
    }

    /// Uploads, computes and downloads without waiting, runs `meanwhile` on this thread, then waits for the device.
    ///
    /// `scratch` is what the graph was placed in; `output` is the tensor that is downloaded. If the device refuses the graph
    /// `meanwhile` is not run, and the status is returned. `weights` go ahead of all else. Both ends of each are read back
    /// ([`PROBE_BYTES`] at most), since ggml's copies cannot report that they failed: fails with [`Error::CopyFailed`] if they
    /// differ.
    pub fn compute_while<'a, R>(
        &mut self,
        (graph, scratch): (&mut OwnGraph, &mut Scratch),
        weights: impl Iterator<Item = Result<Upload<'a>>> + Clone,
        output: TensorIndex,
        blocks: HostBlocks<'_>,
        meanwhile: impl FnOnce() -> R,
    ) -> Result<Result<R, Status>> {
        let raw = self.raw.as_ptr();
        let HostBlocks { inputs, outputs, probes } = blocks;
        let (input, input_len) = graph.inputs()?;
        let output_len = graph.n_bytes(output)?;
        let output = graph.range(output, 0, output_len)?;
        let is_late = outputs.is_pageable();
        let (from, to) = (inputs.range(0, input_len)?, outputs.range(0, output_len)?);
        if !graph.bound().is_empty() || graph.has_ends() {
            return Err(Error::Contract("a graph for a device whose leaves are not placed"));
        }
        graph.check_kind(self.kind)?;
        graph.check_scratch(scratch)?;
        graph.check_supported(self.device)?;
        graph.check_ids(inputs, 0)?;
        let graph = &*graph;
        let writes = weights.clone().next().is_some();
        let _locks = Locks::new(graph.shared(), writes);
        // An iterator that changes its mind must not make us write under a lock for reading.
        let weights = weights.take(if writes { usize::MAX } else { 0 });
        // Waits on every way out, a panic of `meanwhile` included: until then the device uses blocks and graph.
        let wait = WaitOnDrop(self);
        for upload in weights.clone() {
            let Upload { tensor, offset, bytes } = upload?;
            let tensor = graph.leaf_range(tensor, offset, bytes.len())?;
            // SAFETY: the range was checked; the bytes are borrowed for longer than this call, which waits.
            unsafe { sys::ggml_backend_tensor_set_async(raw, tensor, bytes.as_ptr().cast(), offset, bytes.len()) };
        }
        // SAFETY: ranges, operations, shapes and ids were checked; blocks, scratch and graph are borrowed until `wait` is
        // dropped.
        let status = unsafe {
            sys::ggml_backend_tensor_set_async(raw, input, from.cast(), 0, input_len);
            sys::ggml_backend_graph_compute_async(raw, graph.as_raw())
        };
        if status != sys::GGML_STATUS_SUCCESS {
            return Ok(Err(status));
        }
        let download = || -> Result<()> {
            // SAFETY: as above.
            unsafe { sys::ggml_backend_tensor_get_async(raw, output, to.cast(), 0, output_len) };
            for (place, upload) in weights.clone().enumerate() {
                let Upload { tensor, offset, bytes } = upload?;
                for (end, range) in ends(bytes.len()).into_iter().enumerate() {
                    let (start, len) = (offset + range.start, range.len());
                    let from = graph.leaf_range(tensor, start, len)?;
                    let to = probes.range((2 * place + end) * PROBE_BYTES, len)?;
                    // SAFETY: both ranges were checked, and the block is borrowed until `wait` is dropped.
                    unsafe { sys::ggml_backend_tensor_get_async(raw, from, to.cast(), start, len) };
                }
            }
            Ok(())
        };
        // A copy to ordinary memory keeps this thread until the graph is done: then `meanwhile` goes first.
        let result = if is_late {
            let result = meanwhile();
            download()?;
            result
        } else {
            download()?;
            meanwhile()
        };
        drop(wait);
        for (place, upload) in weights.enumerate() {
            let bytes = upload?.bytes;
            let found = probes.bytes((place + 1) * PROBE_BYTES_PER_UPLOAD)?;
            for (end, range) in ends(bytes.len()).into_iter().enumerate() {
                let at = (2 * place + end) * PROBE_BYTES;
                if found[at..at + range.len()] != bytes[range] {
                    return Err(Error::CopyFailed);
                }
            }
        }
        Ok(Ok(result))
    }

    /// Copies to the device and waits until all of it is there. In pieces, two at a time: the bus is everybody's, and the rows
    /// of a token wait behind what is under way.
    pub fn upload(&mut self, tensors: &PlacedTensors, uploads: &[Upload<'_>]) -> Result<()> {
        self.check_memory(tensors)?;
        for upload in uploads {
            tensors.range(upload.tensor, upload.offset, upload.bytes.len())?;
        }
        let raw = self.raw.as_ptr();
        let _locks = Locks::new(tensors.memories(), true);
        let _wait = WaitOnDrop(self);
        let mut in_flight = 0;
        for Upload { tensor, offset, bytes } in uploads {
            let tensor = tensors.range(*tensor, *offset, bytes.len())?;
            for (n, piece) in bytes.chunks(PIECE_BYTES).enumerate() {
                if in_flight == PIECES_IN_FLIGHT {
                    // SAFETY: the instance is valid.
                    unsafe { sys::ggml_backend_synchronize(raw) };
                    in_flight = 0;
                }
                let offset = offset + n * PIECE_BYTES;
                // SAFETY: the range was checked; the bytes are borrowed until `_wait` is dropped.
                unsafe { sys::ggml_backend_tensor_set_async(raw, tensor, piece.as_ptr().cast(), offset, piece.len()) };
                in_flight += 1;
            }
        }
        Ok(())
    }

    /// Copies from the device and waits.
    pub fn download(
        &mut self,
        tensors: &PlacedTensors,
        tensor: TensorIndex,
        offset: usize,
        into: &mut [u8],
    ) -> Result<()> {
        self.check_memory(tensors)?;
        let tensor = tensors.range(tensor, offset, into.len())?;
        let raw = self.raw.as_ptr();
        let _locks = Locks::new(tensors.memories(), false);
        let _wait = WaitOnDrop(self);
        // SAFETY: the range was checked; `into` is borrowed until `_wait` is dropped.
        unsafe { sys::ggml_backend_tensor_get_async(raw, tensor, into.as_mut_ptr().cast(), offset, into.len()) };
        Ok(())
    }

    /// Fails unless the tensors lie in this device's memory.
    fn check_memory(&self, tensors: &PlacedTensors) -> Result<()> {
        let is_ours = tensors.memories().iter().all(|memory| Some(memory.buffer_type()) == self.kind);
        if is_ours { Ok(()) } else { Err(Error::Contract("a copy to another device's memory")) }
    }
}

/// The ranges of `len` bytes that are read back: one if they are few, else the first and the last.
fn ends(len: usize) -> impl IntoIterator<Item = Range<usize>> {
    let last = (len > PROBE_BYTES).then(|| len - PROBE_BYTES..len);
    std::iter::once(0..len.min(PROBE_BYTES)).chain(last)
}

/// A lock of shared host memory, held while its bytes are read or written.
enum Lock<'a> {
    Reading { _guard: RwLockReadGuard<'a, ()> },
    Writing { _guard: RwLockWriteGuard<'a, ()> },
}

/// The locks of a graph's shared memories. A device with memory of its own has none, and graphs have one memory as a rule:
/// nothing is allocated for that.
struct Locks<'a> {
    _first: Option<Lock<'a>>,
    _others: Vec<Lock<'a>>,
}

impl<'a> Locks<'a> {
    fn new(memories: &'a [Arc<Memory>], writes: bool) -> Self {
        let lock = |memory: &'a Arc<Memory>| {
            if writes {
                memory.writing().map(|_guard| Lock::Writing { _guard })
            } else {
                memory.reading().map(|_guard| Lock::Reading { _guard })
            }
        };
        let mut locks = memories.iter().filter_map(lock);
        Self { _first: locks.next(), _others: locks.collect() }
    }
}

/// Waits for everything that an instance has begun.
struct WaitOnDrop<'a>(&'a mut Backend);

impl Drop for WaitOnDrop<'_> {
    fn drop(&mut self) {
        // SAFETY: the instance is valid.
        unsafe { sys::ggml_backend_synchronize(self.0.raw.as_ptr()) };
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: we own the instance and nothing uses it any more.
        unsafe { sys::ggml_backend_free(self.raw.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_of_a_copy_are_read_back() {
        let found = |len| ends(len).into_iter().map(|range| (range.start, range.end)).collect::<Vec<_>>();
        assert_eq!(found(0), [(0, 0)]);
        assert_eq!(found(PROBE_BYTES), [(0, PROBE_BYTES)]);
        assert_eq!(found(PROBE_BYTES + 1), [(0, PROBE_BYTES), (1, PROBE_BYTES + 1)]);
        assert_eq!(found(1000), [(0, PROBE_BYTES), (1000 - PROBE_BYTES, 1000)]);
    }
}
