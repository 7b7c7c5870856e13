//! Graphs of our own, being built: tensors, operations, and the places of both in memory.
//!
//! A [`GraphBuilder`] makes tensors without memory and places them; `own_graph` makes of them what is computed. Tensors are named by [`TensorIndex`], which is good for the graph it came from and refused by all others.

use super::operation::{Facts, MAX_SOURCES, OpParams, Role, check_operation, check_shape};
use super::{BufferType, Device, Memory, Scratch, c_text, sys};
use crate::{Error, Result};
use std::ops::Range;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Most tensors that a graph of ours can have.
const MAX_TENSORS: usize = 4096;

/// One tensor of a graph of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorIndex {
    graph: u64,
    place: usize,
}

/// A graph's ids and input rows, in one range of memory so that one copy brings both.
#[derive(Clone, Copy, Debug)]
pub struct Inputs {
    /// The whole range.
    pub whole: TensorIndex,
    /// `[k, n_tokens]`, at its start.
    pub ids: TensorIndex,
    /// The input rows.
    pub rows: TensorIndex,
    /// First byte of the rows in the range; `None`: they lie elsewhere.
    pub rows_offset: Option<usize>,
    /// Bytes of the range.
    pub bytes: usize,
}

/// Tensors and their order of execution, not computable yet.
pub struct GraphBuilder {
    /// Tells this graph's tensors from those of others.
    id: u64,
    context: NonNull<sys::ggml_context>,
    graph: NonNull<sys::ggml_cgraph>,
    tensors: Vec<(NonNull<sys::ggml_tensor>, Role)>,
    max_tensors: usize,
    inputs: Option<Inputs>,
    /// Ids must be below this, for every operation that reads them.
    n_experts: i64,
    /// Where results and inputs lie.
    scratch: Option<Arc<Memory>>,
    /// Where leaves lie.
    shared: Vec<Arc<Memory>>,
    /// Ranges that are taken, each with the address of its memory's handle.
    taken: Vec<(usize, Range<usize>)>,
}

impl GraphBuilder {
    /// Room for `max_tensors` tensors, views included.
    pub fn new(max_tensors: usize) -> Result<Self> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        if max_tensors > MAX_TENSORS {
            return Err(Error::Contract("a graph of too many tensors"));
        }
        // SAFETY: both take plain numbers.
        let overhead = unsafe {
            max_tensors * sys::ggml_tensor_overhead() + sys::ggml_graph_overhead_custom(max_tensors.max(1), false)
        };
        let params = sys::ggml_init_params { mem_size: overhead, mem_buffer: null_mut(), no_alloc: true };
        // SAFETY: plain parameters; ggml allocates the memory.
        let context = NonNull::new(unsafe { sys::ggml_init(params) }).ok_or(Error::Ggml("a context"))?;
        // SAFETY: the context is valid and has room for exactly this graph.
        let graph = NonNull::new(unsafe { sys::ggml_new_graph_custom(context.as_ptr(), max_tensors.max(1), false) });
        let Some(graph) = graph else {
            // SAFETY: we own the context and nothing in it is used.
            unsafe { sys::ggml_free(context.as_ptr()) };
            return Err(Error::Ggml("a graph"));
        };
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Relaxed),
            context,
            graph,
            tensors: Vec::new(),
            max_tensors,
            inputs: None,
            n_experts: i64::MAX,
            scratch: None,
            shared: Vec::new(),
            taken: Vec::new(),
        })
    }

    /// A tensor that is read only: shared weights, placed or bound. Shape in ggml order.
    pub fn leaf(&mut self, kind: sys::ggml_type, ne: [i64; 4]) -> Result<TensorIndex> {
        self.new_tensor(kind, ne, Role::Leaf)
    }

    /// The graph's ids `ids_ne` and input rows `rows_ne` (f32), the rows at the next multiple of `alignment` bytes. Once per graph.
    pub fn inputs(&mut self, ids_ne: [i64; 2], rows_ne: [i64; 3], alignment: usize) -> Result<Inputs> {
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            return Err(Error::Contract("a graph's inputs, wrongly aligned"));
        }
        self.new_inputs(ids_ne, rows_ne, |ids_bytes| Some(ids_bytes.next_multiple_of(alignment)))
    }

    /// The graph's ids `ids_ne` alone, and input rows `rows_ne` (f32) that lie elsewhere and are shown at each computation. Once
    /// per graph.
    pub fn inputs_with_rows_elsewhere(&mut self, ids_ne: [i64; 2], rows_ne: [i64; 3]) -> Result<Inputs> {
        self.new_inputs(ids_ne, rows_ne, |_| None)
    }

    fn new_inputs(
        &mut self,
        ids_ne: [i64; 2],
        rows_ne: [i64; 3],
        rows_behind: impl FnOnce(usize) -> Option<usize>,
    ) -> Result<Inputs> {
        if self.inputs.is_some() {
            return Err(Error::Contract("a graph's inputs, twice"));
        }
        let ids = self.new_tensor(sys::GGML_TYPE_I32, [ids_ne[0], ids_ne[1], 1, 1], Role::Ids)?;
        let rows = self.new_tensor(sys::GGML_TYPE_F32, [rows_ne[0], rows_ne[1], rows_ne[2], 1], Role::InputRows)?;
        let ids_bytes = self.n_bytes(ids)?;
        let rows_offset = rows_behind(ids_bytes);
        let bytes = match rows_offset {
            Some(offset) => offset + self.n_bytes(rows)?,
            None => ids_bytes,
        };
        let ne = i64::try_from(bytes).map_err(|_| Error::Contract("inputs that are too large"))?;
        let whole = self.new_tensor(sys::GGML_TYPE_I8, [ne, 1, 1, 1], Role::Inputs)?;
        let inputs = Inputs { whole, ids, rows, rows_offset, bytes };
        self.inputs = Some(inputs);
        Ok(inputs)
    }

    fn new_tensor(&mut self, kind: sys::ggml_type, ne: [i64; 4], role: Role) -> Result<TensorIndex> {
        check_shape(kind, ne)?;
        self.check_room()?;
        // SAFETY: the context is valid and, by the check above, has room; type and shape were checked.
        let raw = unsafe { sys::ggml_new_tensor(self.context.as_ptr(), kind, 4, ne.as_ptr()) };
        self.push(raw, role)
    }

    fn check_room(&self) -> Result<()> {
        if self.tensors.len() < self.max_tensors { Ok(()) } else { Err(Error::Contract("one tensor too many")) }
    }

    fn push(&mut self, raw: *mut sys::ggml_tensor, role: Role) -> Result<TensorIndex> {
        self.tensors.push((NonNull::new(raw).ok_or(Error::Ggml("a tensor"))?, role));
        Ok(TensorIndex { graph: self.id, place: self.tensors.len() - 1 })
    }

    /// The result of an operation: f32, shape in ggml order. Operations are executed in the order of these calls.
    ///
    /// Fails for operations that no expert FFN has, and for sources and shapes that do not fit the operation.
    pub fn result(
        &mut self,
        op: sys::ggml_op,
        params: &OpParams,
        ne: [i64; 4],
        sources: [Option<TensorIndex>; MAX_SOURCES],
    ) -> Result<TensorIndex> {
        let (mut facts, mut raws) = ([None; MAX_SOURCES], [null_mut(); MAX_SOURCES]);
        for (index, source) in sources.iter().enumerate() {
            if let Some(source) = *source {
                facts[index] = Some(self.facts(source)?);
                raws[index] = self.raw(source)?;
            }
        }
        let n_experts = check_operation(op, params, ne, facts)?;
        let index = self.new_tensor(sys::GGML_TYPE_F32, ne, Role::Result)?;
        let raw = self.raw(index)?;
        // SAFETY: `raw` is ours and nobody else has seen it; sources are tensors of the same context and fit the operation.
        unsafe {
            (*raw).op = op;
            (*raw).op_params = *params;
            (&mut (*raw).src)[..MAX_SOURCES].copy_from_slice(&raws);
            sys::ggml_build_forward_expand(self.graph.as_ptr(), raw);
        }
        self.n_experts = self.n_experts.min(n_experts);
        Ok(index)
    }

    fn facts(&self, tensor: TensorIndex) -> Result<Facts> {
        let (raw, role) = self.get(tensor)?;
        // SAFETY: tensors of our context are valid; ggml only reads it.
        let (tensor, contiguous) = unsafe { (raw.as_ref(), sys::ggml_is_contiguous(raw.as_ptr())) };
        Ok(Facts { kind: tensor.type_, ne: tensor.ne, role, contiguous })
    }

    /// `ne0` elements from byte `offset` of every row of `of`, which is the result of an operation.
    pub fn view(&mut self, of: TensorIndex, ne0: i64, offset: usize) -> Result<TensorIndex> {
        self.check_room()?;
        let (source, role) = self.get(of)?;
        // SAFETY: tensors of our context are valid.
        let (ne, nb) = unsafe { (source.as_ref().ne, source.as_ref().nb) };
        let end = usize::try_from(ne0).ok().and_then(|n| n.checked_mul(nb[0])?.checked_add(offset));
        let is_inside = ne0 > 0 && end.is_some_and(|end| end <= nb[1]) && offset.is_multiple_of(nb[0]);
        if role != Role::Result || !is_inside {
            return Err(Error::Contract("a view that is not a part of every row of a result"));
        }
        // SAFETY: by the check above a row of `of` holds `offset` and `ne0` elements; the context has room.
        let raw = unsafe {
            let context = self.context.as_ptr();
            sys::ggml_view_4d(context, source.as_ptr(), ne0, ne[1], ne[2], ne[3], nb[1], nb[2], nb[3], offset)
        };
        self.push(raw, Role::View)
    }

    /// Bytes that the tensor takes in memory of this kind, padding included.
    pub fn alloc_size(&self, tensor: TensorIndex, kind: BufferType) -> Result<usize> {
        let raw = self.raw(tensor)?;
        // SAFETY: buffer type and tensor are valid.
        Ok(unsafe { sys::ggml_backend_buft_get_alloc_size(kind.as_raw(), raw) })
    }

    /// Bytes of the tensor's elements.
    pub fn n_bytes(&self, tensor: TensorIndex) -> Result<usize> {
        let raw = self.raw(tensor)?;
        // SAFETY: the tensor is valid.
        Ok(unsafe { sys::ggml_nbytes(raw) })
    }

    /// Name of the tensor's operation, for messages.
    pub fn op_name(&self, tensor: TensorIndex) -> Result<String> {
        let raw = self.raw(tensor)?;
        // SAFETY: the tensor is valid; ggml returns a static string, since parameters that select one were checked.
        Ok(unsafe { c_text(sys::ggml_op_desc(raw)) }.into_owned())
    }

    /// Whether the device can execute the tensor's operation.
    pub fn supported_by(&self, device: Device, tensor: TensorIndex) -> Result<bool> {
        let raw = self.raw(tensor)?;
        // SAFETY: device and tensor are valid.
        Ok(unsafe { sys::ggml_backend_dev_supports_op(device.as_raw(), raw) })
    }

    /// Puts a leaf at `offset` bytes of shared `memory`. Fails if it does not fit, for a place that is taken, or twice.
    pub fn place(&mut self, tensor: TensorIndex, memory: &Arc<Memory>, offset: usize) -> Result<()> {
        if self.get(tensor)?.1 != Role::Leaf {
            return Err(Error::Contract("shared memory for a tensor that is written"));
        }
        let end = self.end_of(tensor, memory, offset)?;
        self.take(memory, offset..end)?;
        self.place_raw(tensor, memory, offset)?;
        if !self.shared.iter().any(|known| Arc::ptr_eq(known, memory)) {
            self.shared.push(memory.clone());
        }
        Ok(())
    }

    /// Puts a result with its views, or the inputs as a whole, at `offset` bytes of scratch memory: the same for all of a
    /// graph. Fails if it does not fit, for a place that is taken, or twice.
    pub fn place_in_scratch(&mut self, tensor: TensorIndex, scratch: &Scratch, offset: usize) -> Result<()> {
        let memory = scratch.memory();
        if self.scratch.as_ref().is_some_and(|known| !Arc::ptr_eq(known, memory)) {
            return Err(Error::Contract("a second scratch memory for a graph"));
        }
        let mut end = self.end_of(tensor, memory, offset)?;
        match (self.get(tensor)?.1, self.inputs) {
            (Role::Result, _) => {
                self.take(memory, offset..end)?;
                self.place_raw(tensor, memory, offset)?;
                self.place_views(tensor)?;
            }
            // Ids and rows share the range of the whole, and nothing else does.
            (Role::Inputs, Some(Inputs { ids, rows, rows_offset, .. })) => {
                let rows_at = rows_offset.map(|rows_offset| offset + rows_offset);
                if let Some(rows_at) = rows_at {
                    end = end.max(self.end_of(rows, memory, rows_at)?);
                }
                self.take(memory, offset..end)?;
                self.place_raw(tensor, memory, offset)?;
                self.place_raw(ids, memory, offset)?;
                rows_at.map_or(Ok(()), |rows_at| self.place_raw(rows, memory, rows_at))?;
            }
            _ => return Err(Error::Contract("scratch memory for a tensor that is not written on its own")),
        }
        self.scratch = Some(memory.clone());
        Ok(())
    }

    /// Where a tensor at `offset` ends. Fails if it does not fit.
    fn end_of(&self, tensor: TensorIndex, memory: &Memory, offset: usize) -> Result<usize> {
        let end = offset.checked_add(self.alloc_size(tensor, memory.buffer_type())?);
        let is_aligned = offset.is_multiple_of(memory.alignment().max(1));
        end.filter(|&end| end <= memory.size() && is_aligned).ok_or(Error::Contract("a tensor outside its memory"))
    }

    fn take(&mut self, memory: &Arc<Memory>, range: Range<usize>) -> Result<()> {
        let memory = Arc::as_ptr(memory) as usize;
        let overlaps =
            |(of, known): &(usize, Range<usize>)| *of == memory && known.start < range.end && range.start < known.end;
        if self.taken.iter().any(overlaps) {
            return Err(Error::Contract("two tensors in one place"));
        }
        self.taken.push((memory, range));
        Ok(())
    }

    /// The range has been checked and is taken.
    fn place_raw(&self, tensor: TensorIndex, memory: &Memory, offset: usize) -> Result<()> {
        let raw = self.raw(tensor)?;
        // SAFETY: `raw` is a valid tensor of our context.
        if unsafe { !(*raw).buffer.is_null() || !(*raw).data.is_null() || !(*raw).view_src.is_null() } {
            return Err(Error::Contract("a second place for a tensor"));
        }
        // SAFETY: the tensor has no place yet, and the range lies inside the buffer.
        let status = unsafe { sys::ggml_backend_tensor_alloc(memory.as_raw(), raw, memory.address(offset)) };
        if status == sys::GGML_STATUS_SUCCESS { Ok(()) } else { Err(Error::Ggml("a tensor in its buffer")) }
    }

    fn place_views(&self, of: TensorIndex) -> Result<()> {
        let of = self.raw(of)?;
        for (view, _) in &self.tensors {
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

    /// Fails unless every tensor has a place or is bound, and none is both.
    pub(super) fn check_places(&self, bound: &[TensorIndex]) -> Result<()> {
        for (place, (tensor, _)) in self.tensors.iter().enumerate() {
            // SAFETY: all tensors of our context are valid.
            let is_placed = unsafe { !tensor.as_ref().buffer.is_null() };
            let n_bound = bound.iter().filter(|leaf| leaf.place == place).count();
            if n_bound + usize::from(is_placed) != 1 {
                return Err(Error::Contract("a graph with tensors that have no place, or two"));
            }
        }
        Ok(())
    }

    fn get(&self, tensor: TensorIndex) -> Result<(NonNull<sys::ggml_tensor>, Role)> {
        let known = self.tensors.get(tensor.place).filter(|_| tensor.graph == self.id);
        known.copied().ok_or(Error::Contract("a tensor of another graph"))
    }

    pub(super) fn raw(&self, tensor: TensorIndex) -> Result<*mut sys::ggml_tensor> {
        Ok(self.get(tensor)?.0.as_ptr())
    }

    pub(super) fn as_raw(&self) -> *mut sys::ggml_cgraph {
        self.graph.as_ptr()
    }

    /// Whether there is nothing but leaves.
    pub(super) fn has_leaves_only(&self) -> bool {
        self.tensors.iter().all(|(_, role)| *role == Role::Leaf)
    }

    pub(super) fn results(&self) -> impl Iterator<Item = NonNull<sys::ggml_tensor>> {
        self.tensors.iter().filter(|(_, role)| *role == Role::Result).map(|&(raw, _)| raw)
    }

    pub(super) fn scratch(&self) -> Option<&Arc<Memory>> {
        self.scratch.as_ref()
    }

    pub(super) fn shared(&self) -> &[Arc<Memory>] {
        &self.shared
    }

    /// The graph's inputs, the number of ids for each token, and what ids must be below.
    pub(super) fn ids(&self) -> Option<(Inputs, usize, usize, i64)> {
        let inputs = self.inputs?;
        let raw = self.raw(inputs.ids).ok()?;
        // SAFETY: tensors of our context are valid.
        let [k, n_tokens, ..] = unsafe { (*raw).ne };
        Some((inputs, k as usize, n_tokens as usize, self.n_experts))
    }

    /// Whether it is the graph's input rows, and they lie elsewhere.
    pub(super) fn is_rows_elsewhere(&self, tensor: TensorIndex) -> bool {
        self.inputs.is_some_and(|inputs| inputs.rows == tensor && inputs.rows_offset.is_none())
    }

    /// Whether it is a result of this graph that no view is a part of.
    pub(super) fn is_whole_result(&self, tensor: TensorIndex) -> bool {
        let Ok((raw, Role::Result)) = self.get(tensor) else { return false };
        // SAFETY: all tensors of our context are valid.
        !self.tensors.iter().any(|(other, _)| unsafe { other.as_ref() }.view_src == raw.as_ptr())
    }

    /// Whether it is a leaf of this graph.
    pub(super) fn is_leaf(&self, tensor: TensorIndex) -> bool {
        self.get(tensor).is_ok_and(|(_, role)| role == Role::Leaf)
    }
}

/// Largest alignment that inputs can have, in bytes.
const MAX_ALIGNMENT: usize = 1 << 20;

impl Drop for GraphBuilder {
    fn drop(&mut self) {
        // SAFETY: we own the context, and all tensors and the graph live in it.
        unsafe { sys::ggml_free(self.context.as_ptr()) };
    }
}
