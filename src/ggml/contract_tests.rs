//! What safe code must not get away with. Each test asks for it, and shows that it is refused.

use super::test_devices::FakeDevice;
use super::testing::{Builder, load_cpu};
use super::*;
use crate::device::copy::testing::in_a_process_of_its_own;
use crate::{Error, Result};
use std::sync::Arc;

const N: i64 = 32;
const K: i64 = 2;
const N_EXPERTS: i64 = 4;
const NO_PARAMS: OpParams = [0; 16];
const F32: sys::ggml_type = sys::GGML_TYPE_F32;
const MUL_MAT_ID: sys::ggml_op = sys::GGML_OP_MUL_MAT_ID;

/// Fails unless it was refused as a violation of a contract.
#[track_caller]
fn assert_refused<T>(result: Result<T>) {
    match result {
        Err(Error::Contract(_)) => {}
        Err(other) => panic!("refused for another reason: {other}"),
        Ok(_) => panic!("not refused"),
    }
}

fn cpu() -> BufferType {
    BufferType::cpu().unwrap()
}

fn block(size: usize) -> HostBlock {
    HostBlock::allocate(cpu(), size).unwrap()
}

/// One projection of the rows of one token.
struct Projection {
    builder: GraphBuilder,
    inputs: Inputs,
    weights: TensorIndex,
    result: TensorIndex,
}

impl Projection {
    fn new() -> Self {
        Self::with(|builder| builder.inputs([K, 1], [N, 1, 1], 256).unwrap())
    }

    fn with_rows_elsewhere() -> Self {
        Self::with(|builder| builder.inputs_with_rows_elsewhere([K, 1], [N, 1, 1]).unwrap())
    }

    fn with(inputs: impl FnOnce(&mut GraphBuilder) -> Inputs) -> Self {
        let mut builder = GraphBuilder::new(64).unwrap();
        let inputs = inputs(&mut builder);
        let weights = builder.leaf(F32, [N, N, N_EXPERTS, 1]).unwrap();
        let sources = [weights, inputs.rows, inputs.ids].map(Some);
        let result = builder.result(MUL_MAT_ID, &NO_PARAMS, [N, K, 1, 1], sources).unwrap();
        Self { builder, inputs, weights, result }
    }

    /// Inputs at 0, the result at 1024 bytes.
    fn place(&mut self, scratch: &Scratch) {
        self.builder.place_in_scratch(self.inputs.whole, scratch, 0).unwrap();
        self.builder.place_in_scratch(self.result, scratch, 1024).unwrap();
    }

    fn bound(mut self, scratch: &HostBlock) -> OwnGraph {
        self.place(scratch.scratch());
        let weights = vec![self.weights];
        self.builder.finish(weights).unwrap()
    }

    fn placed(mut self, scratch: &Scratch, memory: &Arc<Memory>) -> (OwnGraph, TensorIndex, TensorIndex) {
        self.place(scratch);
        self.builder.place(self.weights, memory, 0).unwrap();
        (self.builder.finish(Vec::new()).unwrap(), self.weights, self.result)
    }
}

fn cpu_backend() -> Backend {
    load_cpu();
    Backend::new(Device::cpu().unwrap()).unwrap()
}

#[test]
fn types_and_shapes_that_ggml_cannot_make_are_refused() {
    let mut builder = GraphBuilder::new(64).unwrap();
    assert!(builder.leaf(sys::GGML_TYPE_Q4_0, [64, 2, 1, 1]).is_ok());
    for kind in [sys::GGML_TYPE_COUNT, u32::MAX, 4, 5] {
        assert_refused(builder.leaf(kind, [64, 1, 1, 1]));
    }
    assert_refused(builder.leaf(sys::GGML_TYPE_Q4_0, [33, 1, 1, 1]));
    for ne in [[0, 1, 1, 1], [-1, 1, 1, 1], [1, 0, 1, 1], [i64::MAX, 1, 1, 1], [1, 1 << 16, 1 << 16, 1]] {
        assert_refused(builder.leaf(F32, ne));
    }
    assert_refused(GraphBuilder::new(usize::MAX));
    let mut full = GraphBuilder::new(1).unwrap();
    full.leaf(F32, [1; 4]).unwrap();
    assert_refused(full.leaf(F32, [1; 4]));
}

#[test]
fn operations_that_no_expert_ffn_has_are_refused() {
    let Projection { mut builder, inputs, weights, result } = Projection::new();
    let sources = [Some(weights), Some(inputs.rows), None];
    for op in [sys::GGML_OP_MUL_MAT, sys::GGML_OP_SOFT_MAX, sys::GGML_OP_SET_ROWS, sys::GGML_OP_CUSTOM, u32::MAX] {
        assert_refused(builder.result(op, &NO_PARAMS, [N, 1, 1, 1], sources));
        assert_refused(builder.result(op, &NO_PARAMS, [N, K, 1, 1], [Some(result), None, None]));
    }
}

#[test]
fn sources_and_shapes_must_fit_their_operation() {
    let Projection { mut builder, inputs, weights, result } = Projection::new();
    let Inputs { whole, ids, rows, .. } = inputs;
    let ne = [N, K, 1, 1];
    let mut leaf = |kind, ne| builder.leaf(kind, ne).unwrap();
    let (narrow, no_product) = (leaf(F32, [N / 2, N, N_EXPERTS, 1]), leaf(sys::GGML_TYPE_Q8_1, [N, N, N_EXPERTS, 1]));
    let (many, other_ids) = (leaf(F32, [N, 1, i64::from(i32::MAX), 1]), leaf(sys::GGML_TYPE_I32, [K, 1, 1, 1]));
    let (biases, scales) = (leaf(F32, [N, N_EXPERTS, 1, 1]), leaf(F32, [1, N_EXPERTS, 1, 1]));
    let mut is_right = |op, ne, [a, b, c]: [Option<TensorIndex>; 3]| match builder.result(op, &NO_PARAMS, ne, [a, b, c])
    {
        Ok(_) => true,
        Err(Error::Contract(_)) => false,
        Err(other) => panic!("{other}"),
    };
    let some = |sources: [TensorIndex; 3]| sources.map(Some);

    assert!(is_right(MUL_MAT_ID, ne, some([weights, rows, ids])));
    assert!(!is_right(MUL_MAT_ID, [N, K, 2, 1], some([weights, rows, ids])), "another shape");
    assert!(!is_right(MUL_MAT_ID, ne, [Some(weights), Some(rows), None]), "no ids");
    assert!(!is_right(MUL_MAT_ID, ne, [None; 3]), "no sources");
    assert!(!is_right(MUL_MAT_ID, ne, some([weights, rows, other_ids])), "ids that are not checked");
    assert!(!is_right(MUL_MAT_ID, ne, some([narrow, rows, ids])), "rows of another length");
    assert!(!is_right(MUL_MAT_ID, ne, some([no_product, rows, ids])), "a type without a product");
    assert!(!is_right(MUL_MAT_ID, ne, some([whole, rows, ids])), "bytes as experts");
    assert!(!is_right(MUL_MAT_ID, ne, some([weights, weights, ids])), "experts as rows");
    assert!(!is_right(MUL_MAT_ID, [1, K, 1, 1], some([many, rows, ids])), "a table that would be too large");

    let add_id = sys::GGML_OP_ADD_ID;
    assert!(is_right(add_id, ne, some([result, biases, ids])));
    assert!(!is_right(add_id, ne, some([result, scales, ids])));
    assert!(!is_right(add_id, ne, some([result, biases, other_ids])));
    assert!(!is_right(add_id, ne, some([result, weights, ids])));

    let get_rows = sys::GGML_OP_GET_ROWS;
    assert!(is_right(get_rows, [1, K, 1, 1], [Some(scales), Some(ids), None]));
    assert!(!is_right(get_rows, [1, K, 1, 1], [Some(scales), Some(other_ids), None]));
    assert!(!is_right(get_rows, [1, K + 1, 1, 1], [Some(scales), Some(ids), None]));

    assert!(is_right(sys::GGML_OP_REPEAT, [1, N_EXPERTS, 3, 1], [Some(scales), None, None]));
    assert!(!is_right(sys::GGML_OP_REPEAT, [1, N_EXPERTS + 1, 1, 1], [Some(scales), None, None]));

    let glu = sys::GGML_OP_GLU;
    assert!(is_right(glu, ne, [Some(result), Some(result), None]));
    assert!(is_right(glu, [N / 2, K, 1, 1], [Some(result), None, None]));
    assert!(!is_right(glu, ne, [Some(result), None, None]));
    assert!(!is_right(glu, ne, [Some(result), Some(rows), None]));

    for op in [sys::GGML_OP_UNARY, sys::GGML_OP_SQR, sys::GGML_OP_CLAMP, sys::GGML_OP_SCALE] {
        assert!(is_right(op, ne, [Some(result), None, None]));
        assert!(!is_right(op, [2 * N, K, 1, 1], [Some(result), None, None]));
        assert!(!is_right(op, [K, 1, 1, 1], [Some(ids), None, None]), "ids as numbers");
        assert!(!is_right(op, ne, [Some(result), Some(result), None]), "a source too many");
    }
    for op in [sys::GGML_OP_ADD, sys::GGML_OP_MUL] {
        assert!(is_right(op, ne, [Some(result), Some(rows), None]));
        assert!(!is_right(op, ne, [Some(rows), Some(result), None]));
        assert!(!is_right(op, ne, [Some(result), Some(biases), None]));
    }
}

#[test]
fn parameters_that_select_a_kernel_must_be_in_its_table() {
    let Projection { mut builder, result, .. } = Projection::new();
    for (op, count) in [(sys::GGML_OP_GLU, sys::GGML_GLU_OP_COUNT), (sys::GGML_OP_UNARY, sys::GGML_UNARY_OP_COUNT)] {
        let second = (op == sys::GGML_OP_GLU).then_some(result);
        let mut with = |selected: i32| {
            let mut params = NO_PARAMS;
            params[0] = selected;
            builder.result(op, &params, [N, K, 1, 1], [Some(result), second, None])
        };
        assert!(with(count as i32 - 1).is_ok());
        for selected in [count as i32, -1, i32::MAX, i32::MIN] {
            assert_refused(with(selected));
        }
    }
}

#[test]
fn a_view_stays_inside_every_row_of_a_result() {
    let Projection { mut builder, weights, result, .. } = Projection::new();
    let half = builder.view(result, N / 2, 64).unwrap();
    for (ne0, offset) in [(N, 4), (0, 0), (-1, 0), (1, 128), (1, 2), (i64::MAX, 0), (1, usize::MAX - 3)] {
        assert_refused(builder.view(result, ne0, offset));
    }
    assert_refused(builder.view(half, N / 2, 64));
    assert_refused(builder.view(weights, 1, 0));
}

#[test]
fn an_index_is_good_for_the_graph_it_came_from() {
    let Projection { builder: other, weights: foreign, result, .. } = Projection::new();
    let mut ours = Projection::new();
    let memory = Arc::new(Memory::allocate(cpu(), 1 << 16).unwrap());
    let scratch = Scratch::allocate(cpu(), 4096).unwrap();
    assert_refused(ours.builder.n_bytes(foreign));
    assert_refused(ours.builder.alloc_size(foreign, cpu()));
    assert_refused(ours.builder.op_name(result));
    load_cpu();
    assert_refused(ours.builder.supported_by(Device::cpu().unwrap(), result));
    assert_refused(ours.builder.view(result, 1, 0));
    assert_refused(ours.builder.place(foreign, &memory, 0));
    assert_refused(ours.builder.place_in_scratch(result, &scratch, 0));
    let sources = [foreign, ours.inputs.rows, ours.inputs.ids].map(Some);
    assert_refused(ours.builder.result(MUL_MAT_ID, &NO_PARAMS, [N, K, 1, 1], sources));
    assert_refused(ours.builder.finish(vec![foreign]));
    drop(other);

    let mut builder = GraphBuilder::new(1).unwrap();
    let leaf = builder.leaf(F32, [N, 1, 1, 1]).unwrap();
    builder.place(leaf, &memory, 0).unwrap();
    let tensors = builder.finish_tensors().unwrap();
    assert!(tensors.address(leaf).is_ok());
    assert_refused(tensors.address(foreign));
    let mut backend = cpu_backend();
    assert_refused(backend.upload(&tensors, &[Upload { tensor: foreign, offset: 0, bytes: &[0; 4] }]));
    assert_refused(backend.download(&tensors, foreign, 0, &mut [0; 4]));
}

#[test]
fn no_two_tensors_share_a_place() {
    let mut ours = Projection::new();
    let scratch = Scratch::allocate(cpu(), 4096).unwrap();
    let memory = Arc::new(Memory::allocate(cpu(), 1 << 16).unwrap());
    ours.builder.place_in_scratch(ours.inputs.whole, &scratch, 0).unwrap();
    assert_refused(ours.builder.place_in_scratch(ours.result, &scratch, 256));
    assert_refused(ours.builder.place_in_scratch(ours.inputs.ids, &scratch, 2048));
    assert_refused(ours.builder.place_in_scratch(ours.inputs.rows, &scratch, 2048));
    assert_refused(ours.builder.place_in_scratch(ours.weights, &scratch, 2048));
    assert_refused(ours.builder.place(ours.result, &memory, 0));
    assert_refused(ours.builder.place_in_scratch(ours.result, &scratch, 1025));
    assert_refused(ours.builder.place_in_scratch(ours.result, &scratch, 4096));
    assert_refused(ours.builder.place_in_scratch(ours.result, &scratch, usize::MAX - 31));
    assert_refused(ours.builder.place_in_scratch(ours.result, &Scratch::allocate(cpu(), 4096).unwrap(), 1024));
    ours.builder.place_in_scratch(ours.result, &scratch, 1024).unwrap();
    assert_refused(ours.builder.place_in_scratch(ours.result, &scratch, 2048));
    ours.builder.place(ours.weights, &memory, 0).unwrap();
    let more = ours.builder.leaf(F32, [N, 1, 1, 1]).unwrap();
    assert_refused(ours.builder.place(more, &memory, 64));
    assert_refused(ours.builder.finish(Vec::new()));
}

#[test]
fn what_is_bound_is_a_leaf_without_a_place() {
    let scratch = block(4096);
    for wrong in [|graph: &Projection| graph.result, |graph: &Projection| graph.inputs.ids] {
        let mut graph = Projection::new();
        graph.place(scratch.scratch());
        let bound = vec![graph.weights, wrong(&graph)];
        assert_refused(graph.builder.finish(bound));
    }
    let mut graph = Projection::new();
    graph.place(scratch.scratch());
    let twice = vec![graph.weights; 2];
    assert_refused(graph.builder.finish(twice));
    assert_refused(Projection::new().builder.finish_tensors());
}

#[test]
fn ids_outside_the_experts_do_not_reach_the_cpu() {
    let mut backend = cpu_backend();
    let mut scratch = block(4096);
    let mut graph = Projection::new().bound(&scratch);
    let b = Builder::new();
    let live = b.leaf(F32, [N, N, N_EXPERTS]);
    b.allocate();
    let mut compute = |ids: [i32; 2]| {
        scratch.write_ids(0, &ids).unwrap();
        backend.compute_own(&mut graph, &mut scratch, [live].into_iter())
    };
    assert_eq!(compute([0, 3]).unwrap(), sys::GGML_STATUS_SUCCESS);
    for ids in [[0, 4], [-1, 0], [i32::MAX, 0], [0, i32::MIN], [2, 2]] {
        assert_refused(compute(ids));
    }
    assert_eq!(compute([3, 1]).unwrap(), sys::GGML_STATUS_SUCCESS);
}

#[test]
fn ids_outside_the_experts_do_not_reach_a_device() {
    let mut backend = cpu_backend();
    let mut scratch = Scratch::allocate(cpu(), 4096).unwrap();
    let memory = Arc::new(Memory::allocate(cpu(), 1 << 16).unwrap());
    let (mut graph, weights, result) = Projection::new().placed(&scratch, &memory);
    let [mut inputs, mut outputs, mut probes] = [(); 3].map(|()| block(4096));
    let bytes = [0; 4];
    let mut compute = |ids: [i32; 2], copies: &[Upload<'_>]| {
        inputs.write_ids(0, &ids).unwrap();
        let blocks = HostBlocks { inputs: &inputs, outputs: &mut outputs, probes: &mut probes };
        let copies = copies.iter().map(|copy| Ok(Upload { ..*copy }));
        backend.compute_while((&mut graph, &mut scratch), copies, result, blocks, || memory.is_free())
    };
    assert!(!compute([0, 3], &[]).unwrap().unwrap(), "nobody may write the weights meanwhile");
    assert_refused(compute([0, 4], &[]));
    assert_refused(compute([1, 1], &[]));
    let end = (N * N * N_EXPERTS * 4) as usize;
    assert!(!compute([0, 3], &[Upload { tensor: weights, offset: end - 4, bytes: &bytes }]).unwrap().unwrap());
    assert_refused(compute([0, 3], &[Upload { tensor: weights, offset: end - 3, bytes: &bytes }]));
    assert_refused(compute([0, 3], &[Upload { tensor: result, offset: 0, bytes: &bytes }]));
    assert!(memory.is_free());
}

#[test]
fn ids_outside_the_experts_fail_the_hosts_graphs() {
    let mut backend = cpu_backend();
    let b = Builder::new();
    let (x, ids) = (b.leaf(F32, [N, 1, 2]), b.ids(K, N_EXPERTS, 2));
    let [few, more] = [N_EXPERTS - 1, N_EXPERTS].map(|n| b.leaf(F32, [N, N, n]));
    let graph = b.graph(b.mul(b.mul_mat_id(more, x, ids), b.mul_mat_id(few, x, ids)));
    b.allocate();
    let mut compute = |id: i32| {
        b.fill(ids.storage(), &[id]);
        backend.compute(&graph)
    };
    assert_eq!(compute(N_EXPERTS as i32 - 2), sys::GGML_STATUS_SUCCESS);
    for id in [N_EXPERTS as i32 - 1, N_EXPERTS as i32, -1, i32::MAX] {
        assert_eq!(compute(id), sys::GGML_STATUS_FAILED, "id {id}: one of the tensors has no such expert");
    }
}

#[test]
fn a_graph_is_computed_in_the_memory_it_was_placed_in() {
    let mut backend = cpu_backend();
    let (scratch, mut other) = (block(4096), block(4096));
    let mut graph = Projection::new().bound(&scratch);
    let b = Builder::new();
    let live = b.leaf(F32, [N, N, N_EXPERTS]);
    b.allocate();
    other.write_ids(0, &[0, 1]).unwrap();
    let refused = backend.compute_own(&mut graph, &mut other, [live].into_iter());
    assert!(matches!(refused, Err(Error::Contract("a graph that was placed in other memory"))));

    let [placed_in, mut other] = [(); 2].map(|()| Scratch::allocate(cpu(), 4096).unwrap());
    let memory = Arc::new(Memory::allocate(cpu(), 1 << 16).unwrap());
    let (mut graph, _, result) = Projection::new().placed(&placed_in, &memory);
    let [mut inputs, mut outputs, mut probes] = [(); 3].map(|()| block(4096));
    inputs.write_ids(0, &[0, 1]).unwrap();
    let blocks = HostBlocks { inputs: &inputs, outputs: &mut outputs, probes: &mut probes };
    assert_refused(backend.compute_while((&mut graph, &mut other), std::iter::empty(), result, blocks, || ()));
}

#[test]
fn live_tensors_fit_their_leaf_and_lie_in_host_memory() {
    let mut backend = cpu_backend();
    let mut scratch = block(4096);
    scratch.write_ids(0, &[0, 1]).unwrap();
    let mut graph = Projection::new().bound(&scratch);
    let (placed, empty) = (Builder::new(), Builder::new());
    let shapes = [[N, N, N_EXPERTS], [N, N, N_EXPERTS - 1], [N / 2, 2 * N, N_EXPERTS]];
    let [right, few, narrow] = shapes.map(|ne| placed.leaf(F32, ne));
    let half = placed.leaf(sys::GGML_TYPE_F16, [N, N, N_EXPERTS]);
    let wide = placed.leaf(F32, [2 * N, N, N_EXPERTS]);
    let gaps = placed.half(wide, 0);
    placed.allocate();
    let unplaced = empty.leaf(F32, [N, N, N_EXPERTS]);
    let mut compute = |live| backend.compute_own(&mut graph, &mut scratch, [live].into_iter());
    assert_eq!(compute(right).unwrap(), sys::GGML_STATUS_SUCCESS);
    for wrong in [few, narrow, half, gaps, unplaced] {
        assert_refused(compute(wrong));
    }
    assert_eq!(compute(right).unwrap(), sys::GGML_STATUS_SUCCESS);
}

#[test]
fn device_memory_is_not_used_as_host_memory_nor_by_another_device() {
    in_a_process_of_its_own(|| {
        let mut cpu_backend = cpu_backend();
        let device = FakeDevice::load().device;
        let kind = device.buffer_type().unwrap();
        let mut fake = Backend::new(device).unwrap();
        assert_refused(HostBlock::allocate(kind, 64));

        let mut block = block(4096);
        block.write_ids(0, &[0, 1]).unwrap();
        let mut graph = Projection::new().bound(&block);
        let b = Builder::new();
        let live = b.leaf(F32, [N, N, N_EXPERTS]);
        b.allocate_in(kind);
        assert_refused(cpu_backend.compute_own(&mut graph, &mut block, [live].into_iter()));
        assert_refused(fake.compute_own(&mut graph, &mut block, [live].into_iter()));
        assert_refused(block.write_row(0, &live, 0, 0));
        assert!(live.weight_bytes(0, 4).is_none());
        assert_eq!(fake.compute(&b.graph(live)), sys::GGML_STATUS_FAILED, "the host's graphs are the CPU's");

        let memory = Arc::new(Memory::allocate(kind, 1 << 16).unwrap());
        let mut scratch = Scratch::allocate(kind, 4096).unwrap();
        let (mut graph, _, result) = Projection::new().placed(&scratch, &memory);
        let [mut inputs, mut outputs, mut probes] = [(); 3].map(|()| self::block(4096));
        inputs.write_ids(0, &[0, 1]).unwrap();
        let mut compute = |backend: &mut Backend| {
            let blocks = HostBlocks { inputs: &inputs, outputs: &mut outputs, probes: &mut probes };
            backend.compute_while((&mut graph, &mut scratch), std::iter::empty(), result, blocks, || ())
        };
        assert_refused(compute(&mut cpu_backend));
        assert_eq!(compute(&mut fake).unwrap(), Ok(()));

        let mut builder = GraphBuilder::new(1).unwrap();
        let tensor = builder.leaf(F32, [N, 1, 1, 1]).unwrap();
        builder.place(tensor, &memory, 0).unwrap();
        let tensors = builder.finish_tensors().unwrap();
        let upload = || [Upload { tensor, offset: 0, bytes: &[0; 4] }];
        assert_refused(cpu_backend.upload(&tensors, &upload()));
        assert_refused(cpu_backend.download(&tensors, tensor, 0, &mut [0; 4]));
        fake.upload(&tensors, &upload()).unwrap();
    });
}

#[test]
fn the_ends_of_a_graph_are_its_rows() {
    let scratch = Scratch::allocate(cpu(), 4096).unwrap();
    let memory = Arc::new(Memory::allocate(cpu(), 1 << 16).unwrap());
    let placed = |mut graph: Projection| {
        graph.builder.place_in_scratch(graph.inputs.whole, &scratch, 0).unwrap();
        graph.builder.place(graph.weights, &memory, 0).unwrap();
        graph
    };
    let graph = placed(Projection::with_rows_elsewhere());
    assert!(graph.builder.finish_in_place(graph.inputs.rows, graph.result).is_ok());
    for wrong in [|graph: &Projection| graph.weights, |graph: &Projection| graph.inputs.ids] {
        let graph = placed(Projection::with_rows_elsewhere());
        let wrong = wrong(&graph);
        assert_refused(graph.builder.finish_in_place(graph.inputs.rows, wrong));
        let graph = placed(Projection::with_rows_elsewhere());
        assert_refused(graph.builder.finish_in_place(wrong, graph.result));
    }
    let graph = placed(Projection::new());
    assert_refused(graph.builder.finish_in_place(graph.inputs.rows, graph.result));
    let mut graph = placed(Projection::with_rows_elsewhere());
    graph.builder.view(graph.result, N / 2, 0).unwrap();
    assert_refused(graph.builder.finish_in_place(graph.inputs.rows, graph.result));
    let mut graph = placed(Projection::with_rows_elsewhere());
    let between = graph.result;
    let result = graph.builder.result(sys::GGML_OP_SQR, &NO_PARAMS, [N, K, 1, 1], [Some(between), None, None]).unwrap();
    assert_refused(graph.builder.finish_in_place(graph.inputs.rows, result));
    assert_refused(placed(Projection::with_rows_elsewhere()).builder.finish(Vec::new()));
}

#[test]
fn rows_of_a_split_stay_in_their_place_if_they_fit() {
    in_a_process_of_its_own(|| {
        load_cpu();
        let device = FakeDevice::load().device;
        let kind = device.buffer_type().unwrap();
        let stream = Backend::new(device).unwrap();
        let b = Builder::new();
        let [made, copy, long, unknown] = [N, N, 2 * N, N].map(|n| b.leaf(F32, [n, 1, 1]));
        let split = b.mul_mat_id(b.leaf(F32, [N, N, N_EXPERTS]), copy, b.ids(K, N_EXPERTS, 1));
        let elsewhere = b.mul(made, made);
        b.allocate_in(kind);
        b.mark_results();
        b.fill(made, &[0.5_f32; N as usize]);

        let memory = Arc::new(Memory::allocate(kind, 1 << 16).unwrap());
        let mut scratch = Scratch::allocate(kind, 4096).unwrap();
        let mut graph = Projection::with_rows_elsewhere();
        graph.builder.place_in_scratch(graph.inputs.whole, &scratch, 0).unwrap();
        graph.builder.place(graph.weights, &memory, 0).unwrap();
        let mut graph = graph.builder.finish_in_place(graph.inputs.rows, graph.result).unwrap();
        let mut tensors = GraphBuilder::new(1).unwrap();
        let weights = tensors.leaf(F32, [N, N, N_EXPERTS, 1]).unwrap();
        tensors.place(weights, &memory, 0).unwrap();
        let bytes: Vec<u8> =
            (0..N_EXPERTS).flat_map(|expert| [expert as f32; (N * N) as usize]).flat_map(f32::to_ne_bytes).collect();
        let upload = [Upload { tensor: weights, offset: 0, bytes: &bytes }];
        Backend::new(device).unwrap().upload(&tensors.finish_tensors().unwrap(), &upload).unwrap();

        let at = |tensor: &Tensor<'_>| memory::DevicePlace {
            data: tensor.address() as *mut _,
            // SAFETY: the tensor is valid.
            buffer: unsafe { (*tensor.as_raw()).buffer },
            len: tensor.n_bytes(),
        };
        let moved = [split, made].map(|tensor| in_place::Moved {
            tensor: tensor.as_raw(),
            data: at(&tensor).data,
            buffer: at(&tensor).buffer,
        });
        let taken = [(copy, made), (long, long)]
            .map(|(input, source)| in_place::Taken { input: input.as_raw(), source: at(&source) });
        let raw = std::ptr::NonNull::new(stream.as_raw().cast_mut()).unwrap();
        // SAFETY: the instance is alive and used by this thread alone; all tensors are valid and lie in memory of that kind, where
        // nothing is computed meanwhile.
        let in_place = unsafe { InPlace::new(raw, (device, kind), &moved, &taken) };
        assert!(in_place.has_input(&copy) && !in_place.has_input(&unknown));

        let mut ids = block(64);
        let mut compute = |(rows, output): (&Tensor<'_>, &Tensor<'_>), experts: [i32; K as usize]| {
            ids.write_ids(0, &experts).unwrap();
            in_place.compute_while((&mut graph, &mut scratch), (rows, output), &ids, || 7)
        };
        assert_refused(compute((&unknown, &split), [3, 1]));
        assert_refused(compute((&long, &split), [3, 1]));
        assert_refused(compute((&copy, &made), [3, 1]));
        assert_refused(compute((&copy, &elsewhere), [3, 1]));
        assert_refused(compute((&copy, &split), [3, N_EXPERTS as i32]));
        assert!(!in_place.is_done());
        assert_eq!(compute((&copy, &split), [3, 1]).unwrap(), Ok(7));
        assert!(in_place.is_done());
        let sum = N as f32 * 0.5;
        let expected: Vec<f32> = [3.0, 1.0].iter().flat_map(|expert| [expert * sum; N as usize]).collect();
        assert_eq!(b.read(split), expected);

        let mut other = Scratch::allocate(kind, 4096).unwrap();
        assert_refused(in_place.compute_while((&mut graph, &mut other), (&copy, &split), &ids, || ()));
        let [mut outputs, mut probes] = [(); 2].map(|()| block(4096));
        let blocks = HostBlocks { inputs: &ids, outputs: &mut outputs, probes: &mut probes };
        let mut backend = Backend::new(device).unwrap();
        assert_refused(backend.compute_while((&mut graph, &mut scratch), std::iter::empty(), weights, blocks, || ()));
    });
}

#[test]
fn rows_are_written_to_results_only() {
    let b = Builder::new();
    let (weights, x) = (b.leaf(F32, [N, N, N_EXPERTS]), b.leaf(F32, [N, 1, 1]));
    let result = b.mul(x, x);
    b.allocate();
    let mut block = block(4096);
    for read_only in [weights, x, b.half(weights, 0), result] {
        // The test's buffer is marked as holding weights, so this result may be read by others as well.
        assert_refused(block.read_row(0, &read_only, 0, 0));
    }
    b.mark_results();
    for leaf in [weights, x] {
        assert_refused(block.read_row(0, &leaf, 0, 0));
    }
    block.read_row(0, &result, 0, 0).unwrap();
    assert_refused(block.read_row(0, &result, 1, 0));
    assert_refused(block.read_row(4096, &result, 0, 0));
    assert_refused(block.write_row(4096 - 64, &x, 0, 0));
    assert_refused(block.write_row(usize::MAX, &x, 0, 0));
    assert_refused(block.write_ids(4096, &[0]));
    assert_refused(block.bytes(4097));
}

#[test]
fn inputs_of_a_batch_are_not_shared_as_weights() {
    let b = Builder::new();
    let x = b.leaf(F32, [N, 1, 1]);
    let result = b.mul(x, x);
    b.allocate();
    let buffer = x.buffer().unwrap().address();
    // SAFETY: the test's buffer is never freed, and nothing is computed.
    unsafe { open_buffer(buffer) };
    assert!(SharedWeights::of(&x).is_some());
    assert!(SharedWeights::of(&result).is_none(), "a result is written");
    b.mark_results();
    assert!(SharedWeights::of(&x).is_none(), "its memory is used again");
    close_buffer(buffer);
}
