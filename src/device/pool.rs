//! A layer's pool: device memory with a slot for each resident expert, all of its tensors side by side.

use crate::Result;
use crate::ggml::{
    Backend, BufferType, GraphBuilder, HostBlock, Memory, PROBE_BYTES, PlacedTensors, TensorIndex, Upload, sys,
};
use std::sync::Arc;

/// One of a pool's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolTensor {
    /// Element type (`sys::GGML_TYPE_…`).
    pub kind: sys::ggml_type,
    /// Shape in ggml order, whatever the number of slots.
    pub ne: [i64; 4],
    /// The dimension that counts slots; those beyond it are 1.
    pub slot_dim: usize,
    /// Bytes from one slot to the next.
    pub slot_bytes: usize,
}

impl PoolTensor {
    /// Its shape with room for `n` slots.
    pub(crate) fn ne_for(&self, n: i64) -> [i64; 4] {
        let mut ne = self.ne;
        ne[self.slot_dim] = n;
        ne
    }
}

/// Device memory of one layer: for each expert tensor one of its own type with room for `slots` experts.
pub struct Pool {
    memory: Arc<Memory>,
    slots: u16,
    shapes: Vec<PoolTensor>,
    /// First byte of each tensor.
    offsets: Vec<usize>,
    /// What its owner wants to go when it goes.
    _keeps: Option<Box<dyn Send + Sync>>,
}

/// What a tensor takes on a device besides its experts.
pub fn padding(shape: &PoolTensor, kind: BufferType) -> Result<usize> {
    let mut builder = GraphBuilder::new(1)?;
    let one = builder.leaf(shape.kind, shape.ne_for(1))?;
    Ok(builder.alloc_size(one, kind)?.saturating_sub(builder.n_bytes(one)?))
}

impl Pool {
    /// Allocates and zeroes (padding must be finite). `None` if the device has no room.
    pub fn allocate(kind: BufferType, shapes: &[PoolTensor], slots: u16) -> Result<Option<Self>> {
        let mut builder = GraphBuilder::new(shapes.len())?;
        let (mut offsets, mut end) = (Vec::with_capacity(shapes.len()), 0usize);
        for shape in shapes {
            let tensor = builder.leaf(shape.kind, shape.ne_for(slots.into()))?;
            offsets.push(end);
            end += builder.alloc_size(tensor, kind)?.next_multiple_of(kind.alignment());
        }
        let Some(memory) = Memory::allocate(kind, end) else { return Ok(None) };
        Ok(Some(Self { memory: Arc::new(memory), slots, shapes: shapes.to_vec(), offsets, _keeps: None }))
    }

    /// The same, which drops `keeps` when its memory has gone back to the device.
    #[must_use]
    pub fn keeping(mut self, keeps: impl Send + Sync + 'static) -> Self {
        self._keeps = Some(Box::new(keeps));
        self
    }

    /// Its memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Experts that it has room for.
    pub fn slots(&self) -> u16 {
        self.slots
    }

    /// Tensors of each expert.
    pub fn n_tensors(&self) -> usize {
        self.shapes.len()
    }

    /// First byte of tensor number `index`.
    pub fn offset(&self, index: usize) -> usize {
        self.offsets[index]
    }
}

/// Handles to a pool's tensors, for the one thread that copies into it.
pub struct PoolWriter {
    _pool: Arc<Pool>,
    tensors: PlacedTensors,
    index: Vec<TensorIndex>,
    /// The device's address of each tensor.
    addresses: Vec<usize>,
    expert_bytes: Vec<usize>,
    slots: u16,
}

impl PoolWriter {
    /// Handles to `pool`, which they keep alive.
    pub fn new(pool: &Arc<Pool>) -> Result<Self> {
        let mut builder = GraphBuilder::new(pool.shapes.len())?;
        let mut index = Vec::with_capacity(pool.shapes.len());
        for (shape, &offset) in pool.shapes.iter().zip(&pool.offsets) {
            let tensor = builder.leaf(shape.kind, shape.ne_for(pool.slots.into()))?;
            builder.place(tensor, &pool.memory, offset)?;
            index.push(tensor);
        }
        let expert_bytes = pool.shapes.iter().map(|shape| shape.slot_bytes).collect();
        let tensors = builder.finish_tensors()?;
        let addresses = index.iter().map(|&tensor| tensors.address(tensor)).collect::<Result<_>>()?;
        Ok(Self { _pool: pool.clone(), tensors, index, addresses, expert_bytes, slots: pool.slots })
    }

    /// Address on the device and length in bytes of each tensor's part of a slot, in the order of the expert's bytes.
    /// `None` if the pool has no such slot.
    pub fn ranges(&self, slot: u16) -> Option<impl Iterator<Item = (usize, usize)> + Clone> {
        let parts = self.addresses.iter().zip(&self.expert_bytes);
        let range = move |(&address, &len)| (address + usize::from(slot) * len, len);
        (slot < self.slots).then(|| parts.map(range))
    }

    /// Bytes of one expert in all of its tensors.
    pub fn expert_bytes(&self) -> usize {
        self.expert_bytes.iter().sum()
    }

    /// Copies an expert into a slot and waits; `staging` begins with the bytes of its tensors, one after the other.
    ///
    /// Reads back both ends of each tensor: ggml's copies cannot report that they failed. `false` if they differ.
    pub fn fill(&self, backend: &mut Backend, slot: u16, staging: &HostBlock) -> Result<bool> {
        let mut rest = staging.bytes(self.expert_bytes())?;
        let mut uploads = Vec::with_capacity(self.index.len());
        for (&tensor, &len) in self.index.iter().zip(&self.expert_bytes) {
            let (bytes, after) = rest.split_at(len);
            uploads.push(Upload { tensor, offset: usize::from(slot) * len, bytes });
            rest = after;
        }
        backend.upload(&self.tensors, &uploads)?;
        uploads.iter().try_fold(true, |same, upload| Ok(same && self.has_arrived(backend, upload)?))
    }

    fn has_arrived(&self, backend: &mut Backend, upload: &Upload<'_>) -> Result<bool> {
        let mut found = [0; PROBE_BYTES];
        let len = PROBE_BYTES.min(upload.bytes.len());
        let last = upload.bytes.len() - len;
        for start in [0, last] {
            backend.download(&self.tensors, upload.tensor, upload.offset + start, &mut found[..len])?;
            if found[..len] != upload.bytes[start..start + len] {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
