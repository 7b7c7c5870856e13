//! The dispatch with lanes that do as a test says.

use super::*;
use crate::cache::Call;
use crate::ggml::testing::Builder;
use crate::runtime::model::layer_cache::testing;
use crate::runtime::model::policy::LayerPolicy;

const N_EXPERT: u16 = 8;
const N_SLOTS: u16 = 4;

/// Experts 0 to 2 resident.
fn cache(policy: Option<LayerPolicy>) -> LayerCache {
    let cache = testing::with_policy(&testing::handle(), N_EXPERT, N_SLOTS, policy);
    for expert in 0..3 {
        let mut state = cache.state();
        let slot = state.slots.start_fill(Expert(expert)).unwrap();
        state.slots.publish(slot);
    }
    cache
}

fn learning() -> LayerCache {
    cache(Some(LayerPolicy::new(&[0.0; N_EXPERT as usize], N_SLOTS, 1, 2, None)))
}

/// Ids of `n_tokens` tokens, one after the other.
fn ids(list: &[i32], n_tokens: usize) -> OwnIds {
    let builder = Builder::new();
    let n_used = list.len() / n_tokens;
    let tensor = builder.leaf(sys::GGML_TYPE_I32, [n_used as i64, n_tokens as i64, 1]);
    builder.allocate();
    builder.fill(tensor, list);
    let mut ids = OwnIds::default();
    ids.read(&tensor.ids().unwrap());
    ids
}

fn no_copies() -> bool {
    panic!("nobody should ask whether copies are possible")
}

/// Number of users of each slot.
fn released(cache: &LayerCache) -> bool {
    (0..3).all(|expert| cache.state().slots.is_unused(Expert(expert)))
}

/// The device takes experts while a token waits.
fn can_copy() -> bool {
    true
}

#[test]
fn resident_experts_go_to_the_device_and_the_others_to_the_cpu() {
    let (cache, mut partition) = (learning(), Partition::default());
    partition.set(&ids(&[1, 5, 2, 7], 1), &cache, MissRule::Cpu, no_copies);
    assert_eq!((partition.hot.len(), partition.cold.len()), (2, 2));
    assert_eq!(partition.served_hot().collect::<Vec<_>>(), [true, false, true, false]);
    assert!(!released(&cache), "slots are held while the call runs");
    partition.settle(&cache, true);
    assert!(released(&cache));
}

#[test]
fn all_requests_of_one_expert_go_to_one_lane() {
    let (cache, mut partition) = (learning(), Partition::default());
    partition.set(&ids(&[1, 5, 5, 1], 2), &cache, MissRule::Copy, no_copies);
    let lanes: Vec<_> = partition.served_hot().collect();
    assert_eq!(lanes, [true, false, false, true]);
    assert_eq!(partition.hot.form(), Form::PerRow(2));
    partition.settle(&cache, true);
    assert!(released(&cache), "acquired twice, released twice");
}

#[test]
fn an_expert_that_is_being_copied_is_a_miss() {
    let (cache, mut partition) = (learning(), Partition::default());
    cache.state().slots.start_fill(Expert(6)).unwrap();
    partition.set(&ids(&[6], 1), &cache, MissRule::Cpu, no_copies);
    assert_eq!((partition.hot.len(), partition.cold.len()), (0, 1));
}

#[test]
fn a_miss_is_copied_first_where_the_rule_says_so_and_serves_once_it_has_landed() {
    for has_landed in [true, false] {
        let (cache, mut partition) = (learning(), Partition::default());
        partition.set(&ids(&[1, 5], 1), &cache, MissRule::Copy, can_copy);
        assert_eq!((partition.hot.len(), partition.cold.len(), partition.copies.len()), (2, 0, 1));
        assert_eq!(partition.served_hot().collect::<Vec<_>>(), [true, false], "a copied miss is no hit");
        assert!(cache.state().slots.resident(Expert(5)).is_none(), "not before it has landed");
        partition.settle(&cache, has_landed);
        assert_eq!(cache.state().slots.resident(Expert(5)).is_some(), has_landed);
    }
}

#[test]
fn a_call_that_is_cancelled_leaves_no_slot_taken() {
    let (cache, mut partition) = (learning(), Partition::default());
    let n_free = cache.state().slots.n_free();
    partition.set(&ids(&[1, 5], 1), &cache, MissRule::Copy, can_copy);
    assert_eq!(partition.copies.len(), 1);
    partition.cancel(&cache);
    let slots = &cache.state().slots;
    assert!(slots.is_unused(Expert(1)));
    assert_eq!((slots.n_free(), slots.resident(Expert(5))), (n_free + 1, None), "the evicted expert is gone");
}

#[test]
fn nothing_is_copied_while_a_token_waits_where_it_cannot_be() {
    let several = (ids(&[5, 6], 2), learning(), MissRule::Copy);
    let fixed = (ids(&[5], 1), cache(None), MissRule::Copy);
    let not_asked = (ids(&[5], 1), learning(), MissRule::Cpu);
    for (ids, cache, rule) in [several, fixed, not_asked] {
        let mut partition = Partition::default();
        partition.set(&ids, &cache, rule, no_copies);
        assert_eq!((partition.hot.len(), partition.cold.len()), (0, ids.ids().len()));
    }
    let (cache, mut partition) = (learning(), Partition::default());
    partition.set(&ids(&[5], 1), &cache, MissRule::Copy, || false);
    assert_eq!(partition.cold.len(), 1, "the lane cannot");
}

#[test]
fn auto_leaves_misses_to_the_cpu_until_copies_were_timed_and_then_shares_them() {
    let (cache, mut partition) = (learning(), Partition::default());
    let miss = ids(&[5], 1);
    partition.set(&miss, &cache, MissRule::Auto, can_copy);
    assert_eq!(partition.copies.len(), 0);
    {
        let mut costs = cache.handle.device.costs();
        costs.learn(&Call {
            n_cold: 1,
            cold_ns: 100e3,
            n_copied: 0,
            device_ns: 100e3,
            waited: false,
            beside_copies: false,
        });
        costs.learn_background(0.0, Some(1e3));
    }
    partition.set(&miss, &cache, MissRule::Auto, can_copy);
    assert_eq!(partition.copies.len(), 1);
}

/// What the lanes were asked for, and what they answer.
struct Scripted {
    both: Option<Result<Status, LaneError>>,
    write: Option<Error>,
    whole: Status,
    calls: Vec<&'static str>,
}

impl Scripted {
    fn answering(both: Result<Status, LaneError>) -> Self {
        Self { both: Some(both), write: None, whole: sys::GGML_STATUS_SUCCESS, calls: Vec::new() }
    }
}

impl Lanes for Scripted {
    fn compute_whole(&mut self, _: &Graph<'_>) -> Status {
        self.calls.push("whole");
        self.whole
    }

    fn compute_both(&mut self, _: &Graph<'_>, _: &Partition, meanwhile: impl FnOnce()) -> Result<Status, LaneError> {
        self.calls.push("both");
        meanwhile();
        self.both.take().unwrap()
    }

    fn write_rows(&mut self, _: &Graph<'_>, _: &Partition) -> Result<()> {
        self.calls.push("write");
        self.write.take().map_or(Ok(()), Err)
    }
}

/// Computes a call of one hit and one miss; returns what came of it, what the lanes were asked for, and the hits counted.
fn run(mut lanes: Scripted) -> (Computed, Vec<&'static str>, usize) {
    let (cache, mut partition) = (learning(), Partition::default());
    partition.set(&ids(&[1, 5], 1), &cache, MissRule::Cpu, no_copies);
    let builder = Builder::new();
    let graph = builder.graph(builder.leaf(sys::GGML_TYPE_F32, [1, 1, 1]));
    let computed = compute(&mut lanes, &graph, &mut partition, || {});
    (computed, lanes.calls, partition.served_hot().filter(|&hot| hot).count())
}

const OK: Status = sys::GGML_STATUS_SUCCESS;
const FAILED: Status = sys::GGML_STATUS_FAILED;
const ABORTED: Status = sys::GGML_STATUS_ABORTED;

#[test]
fn both_lanes_compute_and_then_all_rows_are_written() {
    let (computed, calls, hits) = run(Scripted::answering(Ok(OK)));
    assert_eq!(computed, Computed { status: OK, has_landed: true, fault: None });
    assert_eq!((calls, hits), (vec!["both", "write"], 1));
}

#[test]
fn a_device_that_refuses_or_fails_costs_the_device_and_the_cpu_computes_all() {
    let cases = [(LaneError::Refused(FAILED), "refused"), (LaneError::Device(Error::CopyFailed), "copy")];
    for (error, reason) in cases {
        let (computed, calls, hits) = run(Scripted::answering(Err(error)));
        assert_eq!((computed.status, computed.has_landed), (OK, false));
        assert!(matches!(computed.fault, Some(LaneFault::Device(why)) if why.contains(reason)));
        assert_eq!((calls, hits), (vec!["both", "whole"], 0), "no hit is counted");
    }
}

#[test]
fn an_error_on_the_cpu_does_not_cost_the_device() {
    let (computed, calls, hits) = run(Scripted::answering(Err(LaneError::Cpu(Error::NoCpuDevice))));
    assert_eq!((computed.status, computed.has_landed), (OK, true));
    assert!(matches!(computed.fault, Some(LaneFault::Cpu(_))));
    assert_eq!((calls, hits), (vec!["both", "whole"], 0));
}

#[test]
fn the_cpus_own_answer_is_the_calls() {
    let (computed, calls, _) = run(Scripted::answering(Ok(ABORTED)));
    assert_eq!(computed, Computed { status: ABORTED, has_landed: true, fault: None });
    assert_eq!(calls, ["both"], "nothing is written");
}

#[test]
fn rows_that_cannot_be_written_fail_the_call_and_nothing_is_computed_from_memory_that_may_be_shared() {
    let lanes = Scripted { write: Some(Error::NoCpuDevice), ..Scripted::answering(Ok(OK)) };
    let (computed, calls, _) = run(lanes);
    assert_eq!(computed, Computed { status: FAILED, has_landed: true, fault: None });
    assert_eq!(calls, ["both", "write"]);
}

#[test]
fn a_failure_of_the_whole_split_is_the_calls() {
    let lanes = Scripted { whole: ABORTED, ..Scripted::answering(Err(LaneError::Device(Error::CopyFailed))) };
    assert_eq!(run(lanes).0.status, ABORTED);
}
