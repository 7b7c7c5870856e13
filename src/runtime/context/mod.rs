//! One llama.cpp context's side of the engine: what is done for each split.

mod dispatch;
mod splits;
pub mod timing;

use super::{Engine, engine};
use crate::ggml::{AbortCallback, Graph, Ids, Level, OwnIds, Status, graphs_built, log, sys};

use crate::profile::check_ids;
use crate::{Error, Result};
use dispatch::Lanes;
use splits::{Seen, Splits};
use timing::Stopwatch;

/// Computes the splits of one llama.cpp context. Used by one thread at a time.
pub struct Context {
    engine: &'static Engine,
    splits: Splits,
    lanes: Lanes,
    watch: Stopwatch,
    /// Those of the batch at hand.
    ids: OwnIds,
    /// Whether llama.cpp has decoded with it: it sets the threads then, and never while it measures.
    worked: bool,
}

impl Context {
    /// A new context. Starts no thread and touches no file: llama.cpp makes and frees contexts to measure.
    pub fn new() -> Result<Self> {
        let engine = engine();
        let context = Self {
            engine,
            splits: Splits::new(engine),
            lanes: Lanes::new()?,
            watch: Stopwatch::new(engine.config().test_timings.is_some()),
            ids: OwnIds::default(),
            worked: false,
        };
        engine.context_opened();
        Ok(context)
    }

    /// Computes one split and returns ggml's answer.
    ///
    /// A split with ids outside the layer fails and leaves everything as it was.
    pub fn compute(&mut self, split: &Graph<'_>) -> Status {
        self.watch.start(graphs_built());
        let n_forgotten = self.splits.n_forgotten();
        self.lanes.forget_recipes(n_forgotten);
        let (blocks, model) = self.splits.blocks(split);
        if let Err(error) = blocks.iter().try_for_each(|seen| check(split, seen)) {
            log(Level::Error, &error.to_string());
            return sys::GGML_STATUS_FAILED;
        }
        let [seen] = blocks else {
            for seen in blocks {
                if let Ok(ids) = ids_of(split, seen) {
                    self.ids.read(&ids);
                    count(seen, &self.ids, std::iter::repeat(false));
                }
            }
            return self.lanes.cold.compute(split);
        };
        match ids_of(split, seen) {
            Ok(ids) => self.ids.read(&ids),
            Err(_) => return sys::GGML_STATUS_FAILED,
        }
        let ids = &self.ids;
        let status = self.lanes.compute(split, seen, ids, self.engine.config(), &mut self.watch);
        if status != sys::GGML_STATUS_SUCCESS {
            return status;
        }
        let calls = count(seen, ids, self.lanes.served_hot());
        let hits = || self.lanes.served_hot().filter(|&hot| hot).count();
        self.watch.stop(graphs_built(), ids.ids().len(), hits);
        if let Some(model) = model.filter(|_| calls > 0) {
            self.engine.trace(model, &seen.layer, ids);
            self.engine.consider_fill(model, calls);
        }
        status
    }

    /// Threads to compute with.
    pub fn set_threads(&mut self, n_threads: i32) {
        if !self.worked {
            self.worked = true;
            self.engine.context_works();
        }
        self.lanes.cold.set_threads(n_threads);
    }

    /// Whom to ask whether to stop.
    pub fn set_abort_callback(&mut self, callback: AbortCallback) {
        self.lanes.cold.set_abort_callback(callback);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.engine.context_closed(self.worked, self.watch.times());
    }
}

fn ids_of<'a>(split: &Graph<'a>, seen: &Seen) -> Result<Ids<'a>> {
    let layer = seen.layer.counts.layer();
    seen.block.ids(split).and_then(|ids| ids.ids()).ok_or(Error::IdsTensor { layer })
}

/// Checks the ids of one block.
fn check(split: &Graph<'_>, seen: &Seen) -> Result<()> {
    check_ids(seen.layer.counts.layer(), seen.n_expert, ids_of(split, seen)?.iter())
}

/// Counts the ids of one block and returns the layer's calls so far; `is_hot` tells for each id whether it was resident.
fn count(seen: &Seen, ids: &OwnIds, is_hot: impl Iterator<Item = bool>) -> u64 {
    if !seen.counts || ids.n_tokens() == 0 {
        return 0;
    }
    seen.layer.counts.add(ids.n_tokens(), ids.ids().iter().copied().zip(is_hot))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::Tensor;
    use crate::ggml::testing::{Builder, load_cpu};

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
        let profile = context.splits.model.as_ref().unwrap().profile(32);
        let record = &profile.moe_hot.unwrap().layers[0];
        [&record.batch_1, &record.batch_2_up]
            .map(|counts| (counts.calls, counts.experts.iter().map(|(_, count)| count).sum()))
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

    /// Recognises, checks and counts; computes nothing.
    #[cfg(not(debug_assertions))]
    fn observe(context: &mut Context, split: &Graph<'_>) {
        for seen in context.splits.blocks(split).0 {
            check(split, seen).unwrap();
            context.ids.read(&ids_of(split, seen).unwrap());
            count(seen, &context.ids, std::iter::repeat(false));
        }
    }

    /// Nanoseconds of one call, over many calls.
    #[cfg(not(debug_assertions))]
    fn nanoseconds(mut call: impl FnMut()) -> i64 {
        const CALLS: u32 = 1_000;
        let start = std::time::Instant::now();
        (0..CALLS).for_each(|_| call());
        (start.elapsed().as_nanos() / u128::from(CALLS)) as i64
    }

    /// The median of some rounds, told with its spread.
    #[cfg(not(debug_assertions))]
    fn median_of_rounds(what: &str, round: impl FnMut() -> i64) -> i64 {
        const ROUNDS: usize = 25;
        let mut rounds: Vec<i64> = std::iter::repeat_with(round).take(ROUNDS).collect();
        rounds.sort_unstable();
        println!("{what}: median {} ns, {} to {} ns", rounds[ROUNDS / 2], rounds[0], rounds[ROUNDS - 1]);
        rounds[ROUNDS / 2]
    }

    /// The bars are the project's: recording costs under 1 µs per layer and token, all that we do under 5 µs.
    #[test]
    #[cfg(not(debug_assertions))]
    fn the_host_cost_of_a_layer_stays_below_its_bars() {
        load_cpu();
        let b = Builder::new();
        let (_, down) = block(&b, 0, 1);
        let graph = b.graph(down);
        b.set_uid(1);
        let mut context = Context::new().unwrap();
        context.set_threads(1);
        let known = median_of_rounds("check and count a known split", || {
            nanoseconds(|| observe(&mut context, std::hint::black_box(&graph)))
        });
        let mut uid = 1;
        let new = median_of_rounds("recognise, check and count a new split", || {
            nanoseconds(|| {
                uid += 1;
                b.set_uid(uid);
                observe(&mut context, std::hint::black_box(&graph));
            })
        });
        let all = median_of_rounds("all that we add to the CPU backend's computation", || {
            let ours = nanoseconds(|| assert_eq!(context.compute(&graph), sys::GGML_STATUS_SUCCESS));
            let inner = nanoseconds(|| assert_eq!(context.lanes.cold.compute(&graph), sys::GGML_STATUS_SUCCESS));
            ours - inner
        });
        assert!(known < 1_000, "counting takes {known} ns");
        assert!(new < 5_000, "recognising takes {new} ns");
        assert!(all < 5_000, "computing takes {all} ns more");
    }
}
