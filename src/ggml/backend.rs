//! A backend instance that we own: one stream of work on one device.

use super::{Device, Graph, HostBlock, OwnGraph, Tensor, TensorIndex, sys};
use crate::{Error, Result};
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

/// What ggml answers to a computation (`sys::GGML_STATUS_…`).
pub type Status = sys::ggml_status;

/// The host's abort callback and its argument, passed through untouched.
#[derive(Clone, Copy)]
pub struct AbortCallback {
    /// Asked before each node; `true` ends the computation.
    pub function: sys::ggml_abort_callback,
    /// Passed to the function.
    pub data: *mut c_void,
}

type SetThreads = unsafe extern "C" fn(sys::ggml_backend_t, c_int);
type SetAbortCallback = unsafe extern "C" fn(sys::ggml_backend_t, sys::ggml_abort_callback, *mut c_void);

/// Bytes of a graph's tensor that go from or to the start of a block of host memory.
pub struct Transfer<B> {
    /// The device's side.
    pub tensor: TensorIndex,
    /// Bytes to copy.
    pub len: usize,
    /// The host's side.
    pub block: B,
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

/// Bytes that are read back of what was copied to a device, to see whether it has arrived.
pub const PROBE_BYTES: usize = 64;

/// An owned backend instance, freed on drop. Used by one thread at a time.
pub struct Backend {
    raw: NonNull<sys::ggml_backend>,
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
        Ok(Self { raw, set_threads, set_abort_callback })
    }

    /// What our bindings read as the instance's device; `abi` compares it with ggml's own answer.
    pub(super) fn device_field(&self) -> usize {
        // SAFETY: the instance is valid.
        unsafe { self.raw.as_ref() }.device as usize
    }

    /// Threads to compute with, where the device has any say in it.
    pub fn set_threads(&mut self, n_threads: c_int) {
        if let Some(set) = self.set_threads {
            // SAFETY: the function belongs to this instance's device.
            unsafe { set(self.raw.as_ptr(), n_threads) };
        }
    }

    /// Whom to ask whether to stop.
    pub fn set_abort_callback(&mut self, callback: AbortCallback) {
        if let Some(set) = self.set_abort_callback {
            // SAFETY: the function belongs to this instance's device; the host keeps callback and data valid.
            unsafe { set(self.raw.as_ptr(), callback.function, callback.data) };
        }
    }

    /// Computes all nodes of `graph` and waits.
    pub fn compute(&mut self, graph: &Graph<'_>) -> Status {
        // SAFETY: both are valid and this thread alone uses them.
        unsafe { sys::ggml_backend_graph_compute(self.raw.as_ptr(), graph.as_raw()) }
    }

    /// Computes a graph of ours on this thread and waits; `live` are shown to its bound leaves, in their order.
    pub fn compute_own<'a>(
        &mut self,
        graph: &mut OwnGraph,
        mut live: impl Iterator<Item = Tensor<'a>>,
    ) -> Result<Status> {
        for leaf in 0..graph.bound().len() {
            graph.bind(leaf, &live.next().ok_or(Error::Ggml("a tensor for every leaf of a graph"))?)?;
        }
        // SAFETY: every tensor has memory: its own, or a live tensor's that outlasts this call, which waits.
        Ok(unsafe { sys::ggml_backend_graph_compute(self.raw.as_ptr(), graph.as_raw()) })
    }

    /// Uploads, computes and downloads without waiting, runs `meanwhile` on this thread, then waits for the device.
    ///
    /// If the device refuses the graph `meanwhile` is not run, and the status is returned. `weights` go ahead of all else;
    /// the last bytes of each are read back into `probes` ([`PROBE_BYTES`] each), since ggml's copies cannot report that they
    /// failed: fails with [`Error::CopyFailed`] if they differ.
    pub fn compute_while<'a, R>(
        &mut self,
        graph: &mut OwnGraph,
        weights: impl Iterator<Item = Result<Upload<'a>>> + Clone,
        probes: &mut HostBlock,
        input: Transfer<&HostBlock>,
        output: Transfer<&mut HostBlock>,
        meanwhile: impl FnOnce() -> R,
    ) -> Result<Result<R, Status>> {
        let raw = self.raw.as_ptr();
        let (from, to) = (input.block.range(0, input.len)?, output.block.range(0, output.len)?);
        if !graph.bound().is_empty() {
            return Err(Error::Ggml("a graph whose tensors all have a place"));
        }
        graph.check_range(input.tensor, 0, input.len)?;
        graph.check_range(output.tensor, 0, output.len)?;
        // Waits on every way out, a panic of `meanwhile` included: until then the device uses blocks and graph.
        let wait = WaitOnDrop(self);
        for upload in weights.clone() {
            let Upload { tensor, offset, bytes } = upload?;
            graph.check_range(tensor, offset, bytes.len())?;
            // SAFETY: the range was checked; the bytes are borrowed for longer than this call, which waits.
            unsafe {
                sys::ggml_backend_tensor_set_async(
                    raw,
                    graph.tensor(tensor),
                    bytes.as_ptr().cast(),
                    offset,
                    bytes.len(),
                );
            }
        }
        // SAFETY: ranges were checked; blocks and graph are borrowed until `wait` is dropped.
        let status = unsafe {
            sys::ggml_backend_tensor_set_async(raw, graph.tensor(input.tensor), from.cast(), 0, input.len);
            sys::ggml_backend_graph_compute_async(raw, graph.as_raw())
        };
        if status != sys::GGML_STATUS_SUCCESS {
            return Ok(Err(status));
        }
        // SAFETY: as above.
        unsafe { sys::ggml_backend_tensor_get_async(raw, graph.tensor(output.tensor), to.cast(), 0, output.len) };
        for (place, upload) in weights.clone().enumerate() {
            let Upload { tensor, offset, bytes } = upload?;
            let len = bytes.len().min(PROBE_BYTES);
            let to = probes.range(place * PROBE_BYTES, len)?;
            // SAFETY: both ranges were checked, and the block is borrowed until `wait` is dropped.
            unsafe {
                let start = offset + bytes.len() - len;
                sys::ggml_backend_tensor_get_async(raw, graph.tensor(tensor), to.cast(), start, len);
            }
        }
        let result = meanwhile();
        drop(wait);
        for (place, upload) in weights.enumerate() {
            let bytes = upload?.bytes;
            let last = &bytes[bytes.len() - bytes.len().min(PROBE_BYTES)..];
            if &probes.bytes((place + 1) * PROBE_BYTES)?[place * PROBE_BYTES..][..last.len()] != last {
                return Err(Error::CopyFailed);
            }
        }
        Ok(Ok(result))
    }

    /// Copies to the device and waits until all of it is there.
    pub fn upload(&mut self, graph: &OwnGraph, uploads: &[Upload<'_>]) -> Result<()> {
        for upload in uploads {
            graph.check_range(upload.tensor, upload.offset, upload.bytes.len())?;
        }
        let raw = self.raw.as_ptr();
        let _wait = WaitOnDrop(self);
        for Upload { tensor, offset, bytes } in uploads {
            // SAFETY: ranges were checked; the bytes are borrowed until `_wait` is dropped.
            unsafe {
                sys::ggml_backend_tensor_set_async(
                    raw,
                    graph.tensor(*tensor),
                    bytes.as_ptr().cast(),
                    *offset,
                    bytes.len(),
                );
            }
        }
        Ok(())
    }

    /// Copies from the device and waits.
    pub fn download(&mut self, graph: &OwnGraph, tensor: TensorIndex, offset: usize, into: &mut [u8]) -> Result<()> {
        graph.check_range(tensor, offset, into.len())?;
        let raw = self.raw.as_ptr();
        let _wait = WaitOnDrop(self);
        // SAFETY: the range was checked; `into` is borrowed until `_wait` is dropped.
        unsafe {
            sys::ggml_backend_tensor_get_async(raw, graph.tensor(tensor), into.as_mut_ptr().cast(), offset, into.len());
        }
        Ok(())
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
