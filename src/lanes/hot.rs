//! The hot lane: resident experts, computed on the device while the caller does something else.
//!
//! One upload, one graph, one download and one wait for a layer. It works on any ggml device.

use super::Requests;
use super::job::{Jobs, Rebuilt};
use super::requests::Form;
use crate::device::Pool;
use crate::ggml::{Backend, BufferType, Device, Graph, HostBlock, Memory, PROBE_BYTES, Status, Transfer, Upload};
use crate::moe::Ffn;
use crate::units::{Expert, Slot};
use crate::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One device backend instance with its scratch memory, owned by one llama.cpp context.
pub struct HotLane {
    /// Tells this lane's indices from those of the one before it.
    id: u64,
    device: Device,
    kind: BufferType,
    /// Whether rows may pass through page-locked memory.
    pinned: bool,
    scratch: Option<Arc<Memory>>,
    inputs: Option<HostBlock>,
    outputs: Option<HostBlock>,
    /// The last bytes of what was copied while a token waited, read back.
    probes: Option<HostBlock>,
    layers: Vec<HotLayer>,
    /// Goes last: nothing of the lane is on the device any more then.
    backend: Backend,
}

/// A layer's recipe over its pool.
struct HotLayer {
    pool: Arc<Pool>,
    ffn: Arc<Ffn>,
    /// First byte in the pool of each of the recipe's weights.
    offsets: Vec<usize>,
    jobs: Jobs,
}

/// A layer that a lane knows. Good for that lane only, see [`HotLane::knows`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotIndex {
    lane: u64,
    place: usize,
}

/// Why a lane cannot compute a recipe, or how much scratch memory it takes.
pub struct Trial {
    /// The first operation that the device cannot execute.
    pub unsupported: Option<String>,
    /// Bytes of scratch memory on the device for up to `max_rows` requests.
    pub scratch_bytes: usize,
}

/// Rebuilds a recipe without memory to see what the device says to it.
pub fn try_out(device: Device, ffn: &Ffn, max_rows: usize) -> Result<Trial> {
    let kind = device.buffer_type().ok_or(Error::Ggml("a buffer type of the device"))?;
    let mut trial = Trial { unsupported: None, scratch_bytes: 0 };
    for form in [Form::OneToken(ffn.n_used.min(max_rows)), Form::PerRow(max_rows)] {
        let rebuilt = Rebuilt::new(ffn, form, ffn.n_expert, kind.alignment())?;
        trial.unsupported = trial.unsupported.or_else(|| rebuilt.unsupported_by(device));
        trial.scratch_bytes = trial.scratch_bytes.max(rebuilt.scratch_bytes(kind));
    }
    Ok(trial)
}

impl HotLane {
    /// A new instance on `device`. `pinned`: whether rows may pass through page-locked memory.
    pub fn new(device: Device, pinned: bool) -> Result<Self> {
        let kind = device.buffer_type().ok_or(Error::Ggml("a buffer type of the device"))?;
        let backend = Backend::new(device)?;
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Relaxed),
            device,
            kind,
            pinned,
            scratch: None,
            inputs: None,
            outputs: None,
            probes: None,
            layers: Vec::new(),
            backend,
        })
    }

    /// Whether `layer` was added to this very lane.
    pub fn knows(&self, layer: HotIndex) -> bool {
        layer.lane == self.id
    }

    /// Bytes of scratch memory that it has on the device.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.as_ref().map_or(0, |scratch| scratch.size())
    }

    /// Gives its scratch memory back, and the graphs that are placed in it.
    pub fn drop_scratch(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.jobs.clear());
        self.scratch = None;
    }

    /// Takes `scratch_bytes` of scratch memory on the device in place of what it has. `false`: the device has no room.
    pub fn grow(&mut self, scratch_bytes: usize) -> bool {
        self.drop_scratch();
        let Some(scratch) = Memory::allocate(self.kind, scratch_bytes) else { return false };
        scratch.clear();
        self.scratch = Some(Arc::new(scratch));
        true
    }

    /// A layer's recipe over its pool; `tensors` gives the pool's tensor for each of the recipe's weights.
    pub fn add_layer(&mut self, pool: &Arc<Pool>, ffn: &Arc<Ffn>, tensors: &[usize]) -> HotIndex {
        let offsets: Vec<_> = tensors.iter().map(|&tensor| pool.offset(tensor)).collect();
        // Two adapters can have the same recipe over other tensors of the same pool.
        let is_it = |layer: &HotLayer| {
            Arc::ptr_eq(&layer.pool, pool) && Arc::ptr_eq(&layer.ffn, ffn) && layer.offsets == offsets
        };
        if let Some(known) = self.layers.iter().position(is_it) {
            return HotIndex { lane: self.id, place: known };
        }
        self.layers.push(HotLayer { pool: pool.clone(), ffn: ffn.clone(), offsets, jobs: Jobs::default() });
        HotIndex { lane: self.id, place: self.layers.len() - 1 }
    }

    /// Computes some of the split's requests on the device, and `meanwhile` on this thread; returns when both are done.
    ///
    /// `copies` says which experts to bring into which slots first. If the device refuses, `meanwhile` is not run and the status is returned. Nothing of the split is written before
    /// [`HotLane::write_rows`].
    pub fn compute_while<R>(
        &mut self,
        layer: HotIndex,
        split: &Graph<'_>,
        requests: &Requests,
        copies: &[(Expert, Slot)],
        meanwhile: impl FnOnce() -> R,
    ) -> Result<Result<R, Status>> {
        let form = requests.form();
        let HotLayer { pool, ffn, offsets, jobs } = &mut self.layers[layer.place];
        let scratch = self.scratch.as_ref().ok_or(Error::Ggml("scratch memory on the device"))?;
        let make = || {
            let rebuilt = Rebuilt::new(ffn, form, pool.slots().into(), self.kind.alignment())?;
            rebuilt.finish_placed(scratch, pool.memory(), offsets)
        };
        let job = jobs.get(form, make)?;
        let inputs = sized(&mut self.inputs, (self.device, self.pinned), job.inputs_bytes)?;
        let outputs = sized(&mut self.outputs, (self.device, self.pinned), job.output_bytes)?;
        let rows = ffn.input(split).ok_or(Error::Ggml("a split of this recipe"))?;
        requests.write_inputs(inputs, job.input_offset, ffn, form, &rows)?;
        let input = Transfer { tensor: job.inputs, len: job.inputs_bytes, block: &*inputs };
        let output = Transfer { tensor: job.output, len: job.output_bytes, block: outputs };
        let tensors = &job.weights;
        let weights =
            copies.iter().flat_map(|&copy| ffn.weights.iter().zip(tensors).enumerate().map(move |w| (copy, w)));
        let weights = weights.map(|((expert, slot), (index, (shape, &tensor)))| {
            let len = shape.expert_bytes;
            let bytes =
                ffn.weight(split, index).and_then(|weight| weight.weight_bytes(usize::from(expert.0) * len, len));
            let bytes = bytes.ok_or(Error::Ggml("an expert's bytes"))?;
            Ok(Upload { tensor, offset: usize::from(slot.0) * len, bytes })
        });
        let probes =
            sized(&mut self.probes, (self.device, self.pinned), copies.len() * ffn.weights.len() * PROBE_BYTES)?;
        self.backend.compute_while(&mut job.graph, weights, probes, input, output, meanwhile)
    }

    /// Whether experts of this layer can be copied while a token waits: the recipe's tensors are all that the pool holds,
    /// and their bytes are at hand.
    pub fn can_copy(&self, layer: HotIndex, split: &Graph<'_>) -> bool {
        let HotLayer { pool, ffn, .. } = &self.layers[layer.place];
        let is_at_hand = |index| ffn.weight(split, index).is_some_and(|tensor| tensor.weight_bytes(0, 0).is_some());
        pool.n_tensors() == ffn.weights.len() && (0..ffn.weights.len()).all(is_at_hand)
    }

    /// Writes the rows of the last [`HotLane::compute_while`] to where they belong in the split.
    pub fn write_rows(&self, layer: HotIndex, split: &Graph<'_>, requests: &Requests) -> Result<()> {
        let ffn = &self.layers[layer.place].ffn;
        let outputs = self.outputs.as_ref().ok_or(Error::Ggml("rows that have been computed"))?;
        let output = ffn.output(split).ok_or(Error::Ggml("a split of this recipe"))?;
        requests.read_outputs(outputs, 0, ffn, &output)
    }
}

/// The block, made larger if it is too small.
fn sized(block: &mut Option<HostBlock>, (device, pinned): (Device, bool), bytes: usize) -> Result<&mut HostBlock> {
    if block.as_ref().is_none_or(|block| block.size() < bytes) {
        *block = Some(HostBlock::for_copies(device, bytes.next_power_of_two(), pinned)?);
    }
    block.as_mut().ok_or(Error::Ggml("a block of host memory"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::sys;
    use crate::ggml::testing::{Builder, load_cpu};
    use crate::moe::Block;

    #[test]
    fn an_index_is_good_for_its_own_lane_only() {
        const N: i64 = 32;
        load_cpu();
        let b = Builder::new();
        let (x, ids) = (b.leaf(sys::GGML_TYPE_F32, [N, 1, 1]), b.ids(2, 4, 1));
        let weights = || b.leaf(sys::GGML_TYPE_F32, [N, N, 4]);
        let (gate, up) = (b.mul_mat_id(weights(), x, ids), b.mul_mat_id(weights(), x, ids));
        let graph = b.graph(b.mul_mat_id(weights(), b.swiglu(gate, up), ids));
        let ffn = Arc::new(Ffn::recognise(&graph, &Block::recognise(&graph)[0]).unwrap());
        let pool = Arc::new(
            Pool::allocate(
                BufferType::cpu().unwrap(),
                &ffn.weights.iter().map(crate::lanes::pool_tensor).collect::<Vec<_>>(),
                2,
            )
            .unwrap()
            .unwrap(),
        );
        let lane = || HotLane::new(Device::cpu().unwrap(), false).unwrap();
        let (mut old, mut new) = (lane(), lane());
        let index = old.add_layer(&pool, &ffn, &[0, 1, 2]);
        assert_eq!(old.add_layer(&pool, &ffn, &[0, 1, 2]), index, "added once");
        assert_ne!(old.add_layer(&pool, &ffn, &[1, 0, 2]), index, "the same recipe over other tensors");
        assert!(old.knows(index) && !new.knows(index));
        assert_ne!(new.add_layer(&pool, &ffn, &[0, 1, 2]), index);
    }
}
