//! A pool to copy into, what its tensors hold, and experts with bytes of their own.

use crate::device::PoolTensor;
use crate::device::{Pool, PoolWriter};
use crate::ggml::testing::type_facts;
use crate::ggml::{Backend, Device, GraphBuilder, PlacedTensors, TensorIndex, sys};
use std::sync::Arc;

/// An expert's bytes, one tensor after the other.
pub(crate) type Bytes = [u8];

/// An expert tensor of this type; `ne` is one expert's part of it, in ggml order.
pub(crate) fn tensor(kind: sys::ggml_type, ne: &[i64]) -> PoolTensor {
    let (_, block, bytes) = type_facts(kind).unwrap();
    let elements: i64 = ne.iter().product();
    let mut whole = [1; 4];
    whole[..ne.len()].copy_from_slice(ne);
    PoolTensor { kind, ne: whole, slot_dim: ne.len(), slot_bytes: (elements as u64 / block * bytes) as usize }
}

/// A pool of zeros, and handles to it.
pub(crate) struct Target {
    pub(crate) writer: Arc<PoolWriter>,
    device: Device,
    tensors: PlacedTensors,
    index: Vec<TensorIndex>,
    expert_bytes: Vec<usize>,
    slots: u16,
}

/// What a pool's tensors should hold.
pub(crate) struct Expected {
    tensors: Vec<Vec<u8>>,
    expert_bytes: Vec<usize>,
}

impl Target {
    pub(crate) fn new(device: Device, shapes: &[PoolTensor], slots: u16) -> Self {
        let pool = Pool::allocate(device.buffer_type().unwrap(), shapes, slots).unwrap().unwrap();
        let mut builder = GraphBuilder::new(shapes.len()).unwrap();
        let mut index = Vec::new();
        for (number, shape) in shapes.iter().enumerate() {
            let tensor = builder.leaf(shape.kind, shape.ne_for(slots.into())).unwrap();
            builder.place(tensor, pool.memory(), pool.offset(number)).unwrap();
            index.push(tensor);
        }
        let tensors = builder.finish_tensors().unwrap();
        let expert_bytes = shapes.iter().map(|shape| shape.slot_bytes).collect();
        let writer = Arc::new(PoolWriter::new(&Arc::new(pool)).unwrap());
        Self { writer, device, tensors, index, expert_bytes, slots }
    }

    pub(crate) fn expert_bytes(&self) -> usize {
        self.expert_bytes.iter().sum()
    }

    /// Bytes that differ by expert and by place, none of which is zero.
    pub(crate) fn expert(&self, number: u64) -> Vec<u8> {
        // A prime, so that no two tensors or slots begin alike.
        const PERIOD: usize = 65_521;
        let byte = |at: usize| ((7 * at + (at >> 8) + 13 * number as usize) % 255) as u8 + 1;
        let pattern: Vec<_> = (0..PERIOD.min(self.expert_bytes())).map(byte).collect();
        let mut bytes = vec![0; self.expert_bytes()];
        bytes.chunks_mut(PERIOD).for_each(|chunk| chunk.copy_from_slice(&pattern[..chunk.len()]));
        bytes
    }

    /// What a fresh pool holds.
    pub(crate) fn zeros(&self) -> Expected {
        let tensors = self.expert_bytes.iter().map(|&len| vec![0; len * usize::from(self.slots)]).collect();
        Expected { tensors, expert_bytes: self.expert_bytes.clone() }
    }

    /// Reads every byte of every tensor back.
    pub(crate) fn assert_holds(&self, expected: &Expected) {
        let mut backend = Backend::new(self.device).unwrap();
        for (number, (&tensor, expected)) in self.index.iter().zip(&expected.tensors).enumerate() {
            let mut found = vec![0; expected.len()];
            backend.download(&self.tensors, tensor, 0, &mut found).unwrap();
            if found != *expected {
                let first = found.iter().zip(expected).position(|(found, expected)| found != expected);
                panic!("tensor {number} is wrong from byte {first:?}");
            }
        }
    }
}

impl Expected {
    pub(crate) fn put(&mut self, slot: u16, expert: &Bytes) {
        let mut rest = expert;
        for (tensor, &len) in self.tensors.iter_mut().zip(&self.expert_bytes) {
            let (part, after) = rest.split_at(len);
            tensor[usize::from(slot) * len..][..len].copy_from_slice(part);
            rest = after;
        }
    }
}
