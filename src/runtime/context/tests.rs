//! Contexts in this process, with graphs of our own and the CPU as the hot device.

use super::*;
use crate::ggml::Tensor;
use crate::ggml::testing::{Builder, load_cpu};
use crate::options::{CacheProfile, Config};
use std::sync::Arc;

const N_EXPERT: i64 = 256;
const N_USED: i64 = 8;

/// One layer's block for `n_tokens` tokens in memory of its own; returns builder, ids and down.
fn block<'a>(b: &'a Builder, layer: u32, n_tokens: i64) -> (Tensor<'a>, Tensor<'a>) {
    const N: i64 = 32;
    let x = b.leaf(sys::GGML_TYPE_F32, [N, 1, n_tokens]);
    let ids = b.ids(N_USED, N_EXPERT, n_tokens);
    let weights = |part: &str| {
        let weights = b.leaf(sys::GGML_TYPE_F32, [N, N, N_EXPERT]);
        b.name(weights, &format!("blk.{layer}.ffn_{part}_exps.weight"));
        weights
    };
    let (gate, up) = (b.mul_mat_id(weights("gate"), x, ids), b.mul_mat_id(weights("up"), x, ids));
    let down = b.mul_mat_id(weights("down"), b.swiglu(gate, up), ids);
    b.allocate();
    (ids, down)
}

/// Calls and requests of the first layer, for batches of one token and of more.
fn counted(context: &Context) -> [(u64, u64); 2] {
    let counts = context.splits.model.as_ref().unwrap().layers()[0].counts.snapshot();
    [counts.single, counts.multi].map(|counter| (counter.calls, counter.experts.iter().sum()))
}

#[test]
fn a_block_is_computed_and_counted_and_a_bad_id_fails_that_call_only() {
    load_cpu();
    let b = Builder::new();
    let (ids, down) = block(&b, 3, 2);
    let graph = b.graph(down);
    let mut context = Context::new().unwrap();
    assert_eq!(context.compute(&graph), sys::GGML_STATUS_SUCCESS);
    for bad in [256, -1, i32::MAX] {
        b.fill(ids.storage(), &[bad]);
        assert_eq!(context.compute(&graph), sys::GGML_STATUS_FAILED, "id {bad}");
    }
    b.fill(ids.storage(), &[255]);
    assert_eq!(context.compute(&graph), sys::GGML_STATUS_SUCCESS);
    assert_eq!(counted(&context), [(0, 0), (2, 2 * 2 * N_USED as u64)], "the failed calls are not counted");
}

#[test]
fn no_tokens_are_a_success_and_count_nothing() {
    load_cpu();
    let b = Builder::new();
    let (_, down) = block(&b, 0, 0);
    let mut context = Context::new().unwrap();
    assert_eq!(context.compute(&b.graph(down)), sys::GGML_STATUS_SUCCESS);
    assert_eq!(counted(&context), [(0, 0); 2]);
}

#[test]
fn a_layer_that_comes_one_node_at_a_time_is_counted_once() {
    load_cpu();
    let b = Builder::new();
    let (_, down) = block(&b, 0, 1);
    let (gate, up) = (down.src(1).unwrap().src(0).unwrap(), down.src(1).unwrap().src(1).unwrap());
    let mut context = Context::new().unwrap();
    for node in [gate, up, down] {
        let alone = Builder::new();
        assert_eq!(context.compute(&alone.graph_of_one(node)), sys::GGML_STATUS_SUCCESS);
    }
    assert_eq!(counted(&context), [(1, N_USED as u64), (0, 0)]);
}

#[test]
fn a_layer_that_fails_on_the_cpu_is_not_counted_even_where_a_split_holds_several_blocks() {
    load_cpu();
    let b = Builder::new();
    let ids = [0, 1].map(|layer| {
        let (ids, down) = block(&b, layer, 1);
        b.graph(down);
        ids
    });
    let graph = b.whole_graph();
    let mut context = Context::new().unwrap();
    assert_eq!(context.compute(&graph), sys::GGML_STATUS_SUCCESS);
    assert_eq!(counted(&context), [(1, N_USED as u64), (0, 0)]);
    b.fill(ids[1].storage(), &[-1]);
    assert_eq!(context.compute(&graph), sys::GGML_STATUS_FAILED);
    assert_eq!(counted(&context), [(1, N_USED as u64), (0, 0)], "the other block is not counted either");
}

#[test]
fn a_split_is_resolved_once_for_as_long_as_llama_cpp_uses_its_graph_again() {
    load_cpu();
    let b = Builder::new();
    let (_, down) = block(&b, 0, 1);
    let graph = b.graph(down);
    let mut context = Context::new().unwrap();
    for (uid, n_known) in [(1, 1), (1, 1), (2, 2), (1, 2)] {
        b.set_uid(uid);
        assert_eq!(context.compute(&graph), sys::GGML_STATUS_SUCCESS);
        assert_eq!(context.splits.n_known(), n_known, "uid {uid}");
    }
}

/// Experts, experts per token and slots of the layers below.
const FEW: i64 = 8;
const FEW_USED: i64 = 2;
const SLOTS: u32 = 4;

/// A layer with weights that differ, in memory that a cache may copy from.
struct SmallLayer<'a> {
    ids: Tensor<'a>,
    down: Tensor<'a>,
    graph: Graph<'a>,
}

impl<'a> SmallLayer<'a> {
    /// Weights are made by `w`, everything else by `b`.
    fn new(b: &'a Builder, w: &'a Builder) -> Self {
        const N: i64 = 32;
        let x = b.leaf(sys::GGML_TYPE_F32, [N, 1, 1]);
        let ids = b.leaf(sys::GGML_TYPE_I32, [FEW_USED, 1, 1]);
        let weights = ["gate", "up", "down"].map(|part| {
            let weights = w.leaf(sys::GGML_TYPE_F32, [N, N, FEW]);
            w.name(weights, &format!("blk.0.ffn_{part}_exps.weight"));
            weights
        });
        let (gate, up) = (b.mul_mat_id(weights[0], x, ids), b.mul_mat_id(weights[1], x, ids));
        let down = b.mul_mat_id(weights[2], b.swiglu(gate, up), ids);
        w.allocate_shared(weights[0]);
        b.allocate();
        b.mark_results();
        for (n, tensor) in [x, weights[0], weights[1], weights[2]].into_iter().enumerate() {
            let value = |i: u64| ((i * 31 + n as u64 * 7) % 61) as f32 / 61.0 - 0.5;
            let elements = (tensor.n_bytes() / size_of::<f32>()) as u64;
            b.fill(tensor, &(0..elements).map(value).collect::<Vec<_>>());
        }
        let graph = b.graph(down);
        Self { ids, down, graph }
    }

    /// Computes a token that uses these experts; returns its rows, and how many of them came from the device.
    fn token(&self, b: &Builder, context: &mut Context, experts: [i32; FEW_USED as usize]) -> (Vec<f32>, usize) {
        b.fill(self.ids, &experts);
        assert_eq!(context.compute(&self.graph), sys::GGML_STATUS_SUCCESS);
        let hits = context.lanes.partition.served_hot().filter(|&hot| hot).count();
        (b.read(self.down), hits)
    }
}

/// A process of its own, as far as the runtime knows, with a cache on the CPU's memory and this profile.
fn runtime_with(profile: &std::path::Path, change: impl FnOnce(&mut Config)) -> &'static Runtime {
    load_cpu();
    let mut config = Config::from_env();
    config.hot_cache = Some(CacheProfile::File(profile.into()));
    config.device = Some("CPU".into());
    config.test_slots = Some(SLOTS);
    change(&mut config);
    Box::leak(Box::new(Runtime::new(config)))
}

/// A profile that counts experts 0 to 3 of layer 0.
fn profile() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":0,"experts":[[0,9],[1,8],[2,7],[3,6]]}]}"#;
    std::fs::write(file.path(), text).unwrap();
    file
}

#[test]
fn a_cache_is_filled_after_some_calls_and_the_rows_stay_the_same() {
    let (b, w, profile) = (Builder::new(), Builder::new(), profile());
    let runtime = runtime_with(profile.path(), |_| {});
    let mut context = Context::of(runtime).unwrap();
    let layer = SmallLayer::new(&b, &w);
    let tokens = [[0, 1], [2, 7], [6, 5]];
    let cold = tokens.map(|experts| layer.token(&b, &mut context, experts));
    assert_eq!(cold.clone().map(|(_, hits)| hits), [0, 0, 0], "nothing is resident yet");
    let hot = tokens.map(|experts| layer.token(&b, &mut context, experts));
    assert_eq!(hot.clone().map(|(_, hits)| hits), [2, 1, 0]);
    assert_eq!(hot.map(|(rows, _)| rows), cold.map(|(rows, _)| rows), "bit for bit");
}

#[test]
fn without_a_profile_there_is_no_cache_and_the_file_may_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("experts.json");
    let (b, w) = (Builder::new(), Builder::new());
    // Both flags name one file, which is not there.
    let runtime = runtime_with(&path, |config| config.perf_out = Some(path.clone()));
    let mut context = Context::of(runtime).unwrap();
    context.set_threads(1);
    let layer = SmallLayer::new(&b, &w);
    for _ in 0..5 {
        assert_eq!(layer.token(&b, &mut context, [0, 1]).1, 0);
    }
    drop(context);
    assert!(path.exists(), "the recording is saved");
}

/// Computes `n` tokens of experts 0 and 1 in a process that records to its cache's profile.
fn session(path: &std::path::Path, n: usize) {
    let (b, w) = (Builder::new(), Builder::new());
    let both = |config: &mut Config| {
        config.perf_out = Some(path.into());
        config.test_slots = None;
    };
    let mut context = Context::of(runtime_with(path, both)).unwrap();
    context.set_threads(1);
    let layer = SmallLayer::new(&b, &w);
    (0..n).for_each(|_| drop(layer.token(&b, &mut context, [0, 1])));
}

/// What a profile counts of experts 0 and 1.
fn requests(path: &std::path::Path) -> Vec<(u32, u64)> {
    crate::profile::RecordedProfile::read(path).unwrap().layers[&0].requests.clone()
}

#[test]
fn what_earlier_sessions_knew_is_kept_by_a_session_that_ends_before_its_cache_is_filled() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("experts.json");
    session(&path, 2);
    assert_eq!(requests(&path), [(0, 2), (1, 2)]);
    // A copy: the first session of this process still holds its file.
    let copy = folder.path().join("copy.json");
    std::fs::copy(&path, &copy).unwrap();
    session(&copy, 1);
    assert_eq!(requests(&copy), [(0, 3), (1, 3)]);
}

#[test]
fn a_profile_that_cannot_be_read_is_not_replaced_and_the_recording_goes_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("experts.json");
    session(&path, 2);
    // The head is whole, a layer is not.
    let damaged = std::fs::read_to_string(&path).unwrap().replacen("\"experts\":[[0,", "\"experts\":[[-7,", 1);
    let others = tempfile::tempdir().unwrap();
    let path = others.path().join("experts.json");
    std::fs::write(&path, &damaged).unwrap();
    assert!(crate::profile::RecordedProfile::read(&path).is_err());
    session(&path, 1);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), damaged);
    let beside =
        std::fs::read_dir(others.path()).unwrap().map(|entry| entry.unwrap().path()).find(|file| *file != path);
    assert_eq!(requests(&beside.unwrap()), [(0, 1), (1, 1)]);
}

#[test]
fn idle_contexts_give_the_device_their_memory_back_when_the_cache_is_given_up() {
    let (b, w, profile) = (Builder::new(), Builder::new(), profile());
    let runtime = runtime_with(profile.path(), |_| {});
    let (mut idle, mut busy) = (Context::of(runtime).unwrap(), Context::of(runtime).unwrap());
    let layer = SmallLayer::new(&b, &w);
    for _ in 0..4 {
        layer.token(&b, &mut idle, [0, 1]);
    }
    assert_eq!(layer.token(&b, &mut idle, [0, 1]).1, 2);
    assert_eq!(layer.token(&b, &mut busy, [0, 1]).1, 2);
    let cache = idle.splits.model.as_ref().unwrap().layers()[0].cache().unwrap();
    let (pool, handle) = (Arc::downgrade(&cache.pool), cache.handle.clone());
    drop(cache);
    handle.give_up("a test says so");
    let rows = layer.token(&b, &mut busy, [0, 1]);
    assert_eq!(rows.1, 0, "the CPU computes");
    while pool.upgrade().is_some() {
        std::thread::yield_now(); // until the cache's thread has given it back
    }
}

#[test]
fn a_device_that_is_turned_off_costs_no_answer() {
    let (b, w, profile) = (Builder::new(), Builder::new(), profile());
    let mut context = Context::of(runtime_with(profile.path(), |_| {})).unwrap();
    let layer = SmallLayer::new(&b, &w);
    let cold = layer.token(&b, &mut context, [0, 1]);
    (0..4).for_each(|_| drop(layer.token(&b, &mut context, [0, 1])));
    let cache = context.splits.model.as_ref().unwrap().layers()[0].cache().unwrap();
    cache.handle.device.turn_off("a test says so");
    assert_eq!(layer.token(&b, &mut context, [0, 1]), (cold.0, 0));
}

#[test]
fn a_device_that_is_not_there_makes_the_plugin_inert() {
    let profile = profile();
    let runtime = runtime_with(profile.path(), |config| config.device = Some("CUDA7".into()));
    assert!(!runtime.takes_experts() && !runtime.caches());
}

#[test]
fn a_cache_whose_thread_never_ran_holds_nobody_up() {
    let (b, w, profile) = (Builder::new(), Builder::new(), profile());
    let runtime = runtime_with(profile.path(), |config| config.test_slots = None);
    let mut context = Context::of(runtime).unwrap();
    SmallLayer::new(&b, &w).token(&b, &mut context, [0, 1]);
    let model = context.splits.model.clone().unwrap();
    let handle = crate::runtime::background::testing::dropped_before_it_ran(&model, runtime.config());
    assert!(handle.is_over());
    handle.queue.wait_filled();
}
