//! What a [`GraphBuilder`] ends in: a graph that is built once and computed many times, or tensors that are copied only.

use super::arena::{GraphBuilder, TensorIndex};
use super::memory::DevicePlace;
use super::{BufferType, Device, HostBlock, Memory, Scratch, Tensor, sys};
use crate::{Error, Result};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Graphs built so far in this process. In steady state it stands still.
static BUILT: AtomicU64 = AtomicU64::new(0);

/// How many graphs have been built so far.
pub fn graphs_built() -> u64 {
    BUILT.load(Relaxed)
}

impl GraphBuilder {
    /// The graph, with leaves in `bound` to be shown live tensors at each computation.
    ///
    /// Fails if any other tensor has no place.
    pub fn finish(self, bound: Vec<TensorIndex>) -> Result<OwnGraph> {
        if !bound.iter().all(|&leaf| self.is_leaf(leaf)) {
            return Err(Error::Contract("a bound tensor that is not a leaf"));
        }
        self.check_places(&bound)?;
        Ok(self.numbered(bound, None))
    }

    /// The graph from input rows that lie elsewhere to `output`, which does, too: both are shown at each computation.
    ///
    /// Fails if any other tensor has no place.
    pub fn finish_in_place(self, rows: TensorIndex, output: TensorIndex) -> Result<OwnGraph> {
        if !self.is_rows_elsewhere(rows) || !self.is_whole_result(output) {
            return Err(Error::Contract("ends of a graph that are not its rows"));
        }
        self.check_places(&[rows, output])?;
        Ok(self.numbered(Vec::new(), Some([rows, output])))
    }

    fn numbered(self, bound: Vec<TensorIndex>, ends: Option<[TensorIndex; 2]>) -> OwnGraph {
        // SAFETY: the graph is ours.
        unsafe { (*self.as_raw()).uid = sys::ggml_graph_next_uid() };
        BUILT.fetch_add(1, Relaxed);
        OwnGraph { parts: self, bound, ends, checked_for: None }
    }

    /// The tensors alone, to be copied to and from. Fails if there are operations or inputs, or a tensor has no place.
    pub fn finish_tensors(self) -> Result<PlacedTensors> {
        if !self.has_leaves_only() {
            return Err(Error::Contract("operations among tensors that are copied only"));
        }
        self.check_places(&[])?;
        Ok(PlacedTensors(self))
    }
}

/// A graph of ours with memory behind its tensors. Used by one thread at a time.
pub struct OwnGraph {
    parts: GraphBuilder,
    bound: Vec<TensorIndex>,
    /// Rows that go in and come out, where they lie on the device; `None`: they have places of their own.
    ends: Option<[TensorIndex; 2]>,
    /// The device that is known to execute all operations.
    checked_for: Option<Device>,
}

// SAFETY: the ggml context and everything in it belong to this graph alone; memories are shared and immutable handles.
unsafe impl Send for OwnGraph {}

impl OwnGraph {
    /// Leaves that are shown a live tensor at each computation.
    pub fn bound(&self) -> &[TensorIndex] {
        &self.bound
    }

    /// Shows a bound leaf where its bytes are. Fails unless the tensor is of the leaf's type and shape, without gaps, in
    /// host memory.
    fn bind(&mut self, leaf: usize, tensor: &Tensor<'_>) -> Result<()> {
        let leaf = *self.bound.get(leaf).ok_or(Error::Contract("a leaf that is not bound"))?;
        let raw = self.parts.raw(leaf)?;
        // SAFETY: both tensors are valid; the leaf is ours.
        let (ours, theirs) = unsafe { (&mut *raw, &*tensor.as_raw()) };
        if ours.type_ != theirs.type_ || ours.ne != theirs.ne || !tensor.is_contiguous() {
            return Err(Error::Contract("a live tensor that is not of its leaf's shape"));
        }
        let buffer = tensor.storage().get_buffer();
        if theirs.data.is_null() || buffer.is_null() || !tensor.is_in_host_memory() {
            return Err(Error::Contract("a live tensor that is not in host memory"));
        }
        (ours.data, ours.buffer) = (theirs.data, buffer);
        Ok(())
    }

    /// Shows the graph where its rows go in and come out. Devices re-use what they know of a graph by its number: it gets a new
    /// one when these are other places. Fails unless both are as long as the graph's rows.
    pub(super) fn show_ends(&mut self, places: [DevicePlace; 2]) -> Result<()> {
        let ends = self.ends.ok_or(Error::Contract("a graph whose rows have places of their own"))?;
        let mut is_new = false;
        for (end, DevicePlace { data, buffer, len }) in ends.into_iter().zip(places) {
            if self.parts.n_bytes(end)? != len {
                return Err(Error::Contract("rows that are not as long as the graph's"));
            }
            let raw = self.parts.raw(end)?;
            // SAFETY: the tensor is ours and valid.
            let ours = unsafe { &mut *raw };
            is_new |= (ours.data, ours.buffer) != (data, buffer);
            (ours.data, ours.buffer) = (data, buffer);
        }
        if is_new {
            // SAFETY: the graph is ours.
            unsafe { (*self.parts.as_raw()).uid = sys::ggml_graph_next_uid() };
        }
        Ok(())
    }

    /// Whether it has to be shown where its rows lie.
    pub(super) fn has_ends(&self) -> bool {
        self.ends.is_some()
    }

    /// Takes the live tensors' addresses back.
    fn unbind(&mut self) {
        for raw in self.bound.iter().filter_map(|&leaf| self.parts.raw(leaf).ok()) {
            // SAFETY: the leaf is ours and valid.
            unsafe { ((*raw).data, (*raw).buffer) = (null_mut(), null_mut()) };
        }
    }

    /// Fails unless the device executes all operations. Asked once for each device.
    pub(super) fn check_supported(&mut self, device: Device) -> Result<()> {
        if self.checked_for == Some(device) {
            return Ok(());
        }
        for node in self.parts.results() {
            // SAFETY: device and tensor are valid.
            if !unsafe { sys::ggml_backend_dev_supports_op(device.as_raw(), node.as_ptr()) } {
                return Err(Error::Contract("an operation that its device cannot execute"));
            }
        }
        self.checked_for = Some(device);
        Ok(())
    }

    /// Fails unless `scratch` is what the graph was placed in.
    pub(super) fn check_scratch(&self, scratch: &Scratch) -> Result<()> {
        let is_it = self.parts.scratch().is_none_or(|known| Arc::ptr_eq(known, scratch.memory()));
        if is_it { Ok(()) } else { Err(Error::Contract("a graph that was placed in other memory")) }
    }

    /// Fails unless all of the graph's memory is of this kind.
    pub(super) fn check_kind(&self, kind: Option<BufferType>) -> Result<()> {
        let mut memories = self.parts.scratch().into_iter().chain(self.parts.shared());
        let is_it = memories.all(|memory| Some(memory.buffer_type()) == kind);
        if is_it { Ok(()) } else { Err(Error::Contract("a graph in another device's memory")) }
    }

    /// Fails unless the ids at `offset` bytes of `block` are experts of all tensors that they pick from, and differ
    /// within a token: kernels check neither.
    pub(super) fn check_ids(&self, block: &HostBlock, offset: usize) -> Result<()> {
        let Some((_, k, n_tokens, n_experts)) = self.parts.ids() else { return Ok(()) };
        let ids = |token: usize, n| block.ids(offset + token * k * size_of::<i32>(), n);
        for token in 0..n_tokens {
            for (place, id) in ids(token, k)?.enumerate() {
                if id < 0 || i64::from(id) >= n_experts || ids(token, place)?.any(|other| other == id) {
                    return Err(Error::Contract("ids outside the experts, or twice for a token"));
                }
            }
        }
        Ok(())
    }

    /// The inputs as a whole, and their bytes.
    pub(super) fn inputs(&self) -> Result<(*mut sys::ggml_tensor, usize)> {
        let (inputs, ..) = self.parts.ids().ok_or(Error::Contract("a graph without inputs"))?;
        Ok((self.parts.raw(inputs.whole)?, inputs.bytes))
    }

    /// First byte of the inputs in `scratch`, which is what they were placed in.
    pub(super) fn inputs_offset(&self, scratch: &Scratch) -> Result<usize> {
        let Some((inputs, ..)) = self.parts.ids() else { return Ok(0) };
        let raw = self.parts.raw(inputs.whole)?;
        // SAFETY: the tensor is ours, valid and placed.
        Ok(unsafe { (*raw).data } as usize - scratch.memory().address(0) as usize)
    }

    /// The tensor. Fails unless it is placed and has `len` bytes from `offset`.
    pub(super) fn range(&self, tensor: TensorIndex, offset: usize, len: usize) -> Result<*mut sys::ggml_tensor> {
        if self.ends.is_some_and(|ends| ends.contains(&tensor)) {
            return Err(Error::Contract("a copy to or from rows that lie elsewhere"));
        }
        range(&self.parts, &self.bound, tensor, offset, len)
    }

    /// The same for a leaf in shared memory.
    pub(super) fn leaf_range(&self, tensor: TensorIndex, offset: usize, len: usize) -> Result<*mut sys::ggml_tensor> {
        if !self.parts.is_leaf(tensor) {
            return Err(Error::Contract("a copy to a tensor that is not a leaf"));
        }
        self.range(tensor, offset, len)
    }

    pub(super) fn shared(&self) -> &[Arc<Memory>] {
        self.parts.shared()
    }

    /// Bytes of the tensor's elements.
    pub(super) fn n_bytes(&self, tensor: TensorIndex) -> Result<usize> {
        self.parts.n_bytes(tensor)
    }

    pub(super) fn as_raw(&self) -> *mut sys::ggml_cgraph {
        self.parts.as_raw()
    }
}

/// A graph whose bound leaves are shown live tensors. Takes their addresses back when it goes.
pub(super) struct BoundGraph<'g>(&'g mut OwnGraph);

impl<'g> BoundGraph<'g> {
    /// Binds all leaves, in their order. Fails if a tensor does not fit its leaf, or there are too few.
    pub(super) fn new<'a>(graph: &'g mut OwnGraph, mut live: impl Iterator<Item = Tensor<'a>>) -> Result<Self> {
        let bound = Self(graph);
        for leaf in 0..bound.0.bound.len() {
            let tensor = live.next().ok_or(Error::Contract("too few live tensors for a graph's leaves"))?;
            bound.0.bind(leaf, &tensor)?;
        }
        Ok(bound)
    }

    pub(super) fn as_raw(&self) -> *mut sys::ggml_cgraph {
        self.0.as_raw()
    }
}

impl Drop for BoundGraph<'_> {
    fn drop(&mut self) {
        self.0.unbind();
    }
}

/// Tensors in shared memory without any operations: they are copied to and from, by any thread.
pub struct PlacedTensors(GraphBuilder);

// SAFETY: the ggml context and everything in it belong to this value alone; memories are shared and immutable handles.
unsafe impl Send for PlacedTensors {}
// SAFETY: nothing of the tensors is changed any more. Their bytes are copied under their memory's lock, or by a device with
// memory of its own, which puts its copies in order.
unsafe impl Sync for PlacedTensors {}

impl PlacedTensors {
    /// The device's address of a tensor.
    pub fn address(&self, tensor: TensorIndex) -> Result<usize> {
        let raw = self.0.raw(tensor)?;
        // SAFETY: the tensor is ours and valid.
        Ok(unsafe { (*raw).data } as usize)
    }

    /// The tensor. Fails unless it has `len` bytes from `offset`.
    pub(super) fn range(&self, tensor: TensorIndex, offset: usize, len: usize) -> Result<*mut sys::ggml_tensor> {
        range(&self.0, &[], tensor, offset, len)
    }

    pub(super) fn memories(&self) -> &[Arc<Memory>] {
        self.0.shared()
    }
}

fn range(
    parts: &GraphBuilder,
    bound: &[TensorIndex],
    tensor: TensorIndex,
    offset: usize,
    len: usize,
) -> Result<*mut sys::ggml_tensor> {
    let raw = parts.raw(tensor)?;
    // SAFETY: the tensor is ours and valid.
    let is_placed = !bound.contains(&tensor) && unsafe { !(*raw).data.is_null() };
    match offset.checked_add(len) {
        Some(end) if is_placed && end <= parts.n_bytes(tensor)? => Ok(raw),
        _ => Err(Error::Contract("a range outside its tensor")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::testing::{Builder, load_cpu};

    const N: i64 = 32;

    /// Compiles only if `T` is not `Sync`: else there are two implementations to choose from.
    trait IsNotSync<Choice> {
        fn holds() {}
    }
    impl<T> IsNotSync<()> for T {}
    impl<T: Sync> IsNotSync<u8> for T {}

    #[test]
    fn a_graph_is_used_by_one_thread_at_a_time() {
        <OwnGraph as IsNotSync<_>>::holds();
        fn is_sync<T: Sync>() {}
        is_sync::<PlacedTensors>();
    }

    #[test]
    fn a_leaf_forgets_its_live_tensor_on_every_way_out() {
        load_cpu();
        let b = Builder::new();
        let [one, another, small] = [N, N, N / 2].map(|n| b.leaf(sys::GGML_TYPE_F32, [n, N, 4]));
        b.allocate();
        let mut builder = GraphBuilder::new(2).unwrap();
        let leaves = [(); 2].map(|()| builder.leaf(sys::GGML_TYPE_F32, [N, N, 4, 1]).unwrap());
        let mut graph = builder.finish(leaves.to_vec()).unwrap();
        let is_bound = |graph: &OwnGraph| {
            leaves.map(|leaf| {
                // SAFETY: the tensor is the graph's and valid.
                unsafe {
                    !(*graph.parts.raw(leaf).unwrap()).data.is_null()
                        || !(*graph.parts.raw(leaf).unwrap()).buffer.is_null()
                }
            })
        };
        let bound = BoundGraph::new(&mut graph, [one, another].into_iter()).unwrap();
        assert_eq!(is_bound(bound.0), [true; 2]);
        assert!(bound.0.range(leaves[0], 0, 1).is_err(), "a live tensor is not ours to copy to");
        drop(bound);
        assert_eq!(is_bound(&graph), [false; 2]);
        assert!(BoundGraph::new(&mut graph, [one].into_iter()).is_err(), "one is missing");
        assert_eq!(is_bound(&graph), [false; 2]);
        assert!(BoundGraph::new(&mut graph, [one, small].into_iter()).is_err(), "the second does not fit");
        assert_eq!(is_bound(&graph), [false; 2]);
    }
}
