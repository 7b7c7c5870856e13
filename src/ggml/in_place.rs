//! Our graphs between a split's own rows, where the scheduler has them on a device.
//!
//! Such a graph runs on the instance that has made the rows and that reads the results: its order takes the place of copies.

use super::memory::DevicePlace;
use super::{BufferType, Device, HostBlock, OwnGraph, Scratch, Status, Tensor, sys};
use crate::{Error, Result};
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::NonNull;

/// A tensor that is in host memory now, and where it was.
pub(super) struct Moved {
    pub(super) tensor: *mut sys::ggml_tensor,
    pub(super) data: *mut c_void,
    pub(super) buffer: sys::ggml_backend_buffer_t,
}

/// An input of a split, and where it came from.
pub(super) struct Taken {
    pub(super) input: *const sys::ggml_tensor,
    pub(super) source: DevicePlace,
}

/// Where a split's rows lie on its device, while the split is computed in host memory.
pub struct InPlace<'a> {
    stream: NonNull<sys::ggml_backend>,
    device: Device,
    /// The memory of the device's own tensors.
    kind: BufferType,
    moved: &'a [Moved],
    taken: &'a [Taken],
    is_done: Cell<bool>,
}

impl<'a> InPlace<'a> {
    /// # Safety
    /// For `'a`: `stream` is a live instance on `device`, whose own memory is of `kind`, and this thread alone uses it; tensors
    /// and places are valid, and all of `taken` have been made by what `stream` was given before. Each of `moved` is the
    /// split's and lies nowhere else; nobody but `stream` uses its place.
    pub(super) unsafe fn new(
        stream: NonNull<sys::ggml_backend>,
        (device, kind): (Device, BufferType),
        moved: &'a [Moved],
        taken: &'a [Taken],
    ) -> Self {
        Self { stream, device, kind, moved, taken, is_done: Cell::new(false) }
    }

    /// The device that the split lies on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether the split's result lies in its place on the device now, and only there.
    pub fn is_done(&self) -> bool {
        self.is_done.get()
    }

    /// Whether these rows, an input of the split, can be read where they were made.
    pub fn has_input(&self, rows: &Tensor<'_>) -> bool {
        self.input(rows).is_some()
    }

    /// Computes a graph between the split's `rows` and its result `output`, runs `meanwhile` on this thread, then waits. The graph's
    /// ids are at the start of `ids`; `scratch` is what it was placed in.
    ///
    /// If the device refuses, `meanwhile` is not run, the status is returned, and nothing is written.
    pub fn compute_while<R>(
        &self,
        (graph, scratch): (&mut OwnGraph, &mut Scratch),
        (rows, output): (&Tensor<'_>, &Tensor<'_>),
        ids: &HostBlock,
        meanwhile: impl FnOnce() -> R,
    ) -> Result<Result<R, Status>> {
        let places = [self.input(rows).ok_or(NOT_THERE)?, self.result(output).ok_or(NOT_THERE)?];
        let (input, input_len) = graph.inputs()?;
        let from = ids.range(0, input_len)?;
        graph.check_kind(Some(self.kind))?;
        graph.check_scratch(scratch)?;
        graph.check_supported(self.device)?;
        graph.check_ids(ids, 0)?;
        graph.show_ends(places)?;
        // Waits on every way out, a panic of `meanwhile` included: until then the device uses block and graph.
        let wait = WaitOnDrop(self.stream);
        // SAFETY: the instance is alive; the range, operations, shapes and ids were checked, and so was that the rows are as long
        // as the graph's; block, scratch and graph are borrowed until `wait` is dropped. Memory of a device has no locks.
        let status = unsafe {
            sys::ggml_backend_tensor_set_async(self.stream.as_ptr(), input, from.cast(), 0, input_len);
            sys::ggml_backend_graph_compute_async(self.stream.as_ptr(), graph.as_raw())
        };
        if status != sys::GGML_STATUS_SUCCESS {
            return Ok(Err(status));
        }
        let result = meanwhile();
        drop(wait);
        self.is_done.set(true);
        Ok(Ok(result))
    }

    fn input(&self, rows: &Tensor<'_>) -> Option<DevicePlace> {
        let taken = self.taken.iter().find(|taken| std::ptr::eq(taken.input, rows.as_raw()))?;
        is_plain(rows).then_some(taken.source)
    }

    fn result(&self, output: &Tensor<'_>) -> Option<DevicePlace> {
        let Moved { data, buffer, .. } = self.moved.iter().find(|moved| std::ptr::eq(moved.tensor, output.as_raw()))?;
        (is_plain(output) && output.is_result()).then_some(DevicePlace {
            data: *data,
            buffer: *buffer,
            len: output.n_bytes(),
        })
    }
}

const NOT_THERE: Error = Error::Contract("rows that do not lie on the split's device");

/// Whether these are f32 rows without gaps.
fn is_plain(rows: &Tensor<'_>) -> bool {
    rows.element_type() == sys::GGML_TYPE_F32 && rows.is_contiguous()
}

/// Waits for everything that an instance has begun.
struct WaitOnDrop(NonNull<sys::ggml_backend>);

impl Drop for WaitOnDrop {
    fn drop(&mut self) {
        // SAFETY: the instance is alive for as long as the split is computed.
        unsafe { sys::ggml_backend_synchronize(self.0.as_ptr()) };
    }
}
