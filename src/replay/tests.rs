//! Rules that hold for every policy, on random routing.

use super::policies::{Belady, Fixed, Lfu, LookAhead, Lru};
use super::{Replay, Settings, Tally};
use crate::cache::policy::{
    Admission, AdmissionRule, Blend, CopyCost, Policy, ReplacementPolicy, Weights, ranks, worth_of_ranks,
};
use crate::trace::Calls;
use crate::units::Expert;
use proptest::prelude::*;

const N_EXPERT: u16 = 12;

/// Every policy that does not know the future, and the admission it comes with.
fn policies() -> Vec<(Box<dyn Policy>, AdmissionRule)> {
    let cost = CopyCost { price: 0.5, lag: 2 };
    vec![
        (Box::new(Lru::new(N_EXPERT)), AdmissionRule::ANY_BETTER),
        (Box::new(Lfu::new(N_EXPERT)), AdmissionRule::ANY_BETTER),
        (Box::new(Blend::new(N_EXPERT, Weights::QUICK)), AdmissionRule::ANY_BETTER),
        (Box::new(Blend::new(N_EXPERT, Weights::fitting(cost))), AdmissionRule::priced(cost)),
        (Box::new(Fixed::new(N_EXPERT)), AdmissionRule::NOBODY),
    ]
}

fn lru() -> (Box<dyn Policy>, AdmissionRule) {
    (Box::new(Lru::new(N_EXPERT)), AdmissionRule::ANY_BETTER)
}

fn belady(calls: &Calls, lag: u32) -> (Box<dyn Policy>, AdmissionRule) {
    (Box::new(Belady::new(N_EXPERT, calls.iter(), lag)), AdmissionRule::ANY_BETTER)
}

fn at_once(slots: u16) -> Settings {
    Settings { n_expert: N_EXPERT, slots, lag: 0, inserts: None }
}

fn play(calls: &Calls, settings: Settings, (policy, admission): (Box<dyn Policy>, AdmissionRule)) -> Tally {
    Replay::new(settings, ReplacementPolicy::new(policy, admission)).play(calls)
}

/// Calls of one to five distinct experts.
fn calls() -> impl Strategy<Value = Calls> {
    let call = prop::sample::subsequence((0..N_EXPERT).map(Expert).collect::<Vec<_>>(), 1..=5).prop_shuffle();
    prop::collection::vec(call, 0..120).prop_map(|all| {
        let mut calls = Calls::default();
        all.into_iter().for_each(|call| calls.push(1, call));
        calls
    })
}

proptest! {
    #[test]
    fn no_policy_has_more_hits_than_belady_when_copies_are_at_once(calls in calls(), slots in 0..=N_EXPERT) {
        let best = play(&calls, at_once(slots), belady(&calls, 0));
        for policy in policies() {
            prop_assert!(play(&calls, at_once(slots), policy).hits <= best.hits);
        }
    }

    #[test]
    fn never_more_experts_are_resident_than_there_are_slots(
        calls in calls(), slots in 0..=N_EXPERT, lag in 0u32..5, inserts in prop::option::of(1u32..3),
    ) {
        let settings = Settings { n_expert: N_EXPERT, slots, lag, inserts };
        for policy in policies().into_iter().chain([belady(&calls, lag)]) {
            let tally = play(&calls, settings, policy);
            prop_assert!(tally.most_resident <= slots.into());
            prop_assert!(tally.hits <= tally.requests && tally.requests == calls.n_requests() as u64);
            prop_assert!(inserts.is_none_or(|inserts| tally.copies <= u64::from(inserts) * calls.len() as u64));
        }
    }

    #[test]
    fn more_slots_never_lose_hits_under_lru(calls in calls()) {
        let hits: Vec<_> = (0..=N_EXPERT).map(|slots| play(&calls, at_once(slots), lru()).hits).collect();
        prop_assert!(hits.is_sorted(), "{:?}", hits);
    }

    #[test]
    fn the_same_calls_come_to_the_same(calls in calls(), slots in 0..=N_EXPERT, lag in 0u32..3) {
        let settings = Settings { n_expert: N_EXPERT, slots, lag, inserts: Some(1) };
        let run = || policies().into_iter().map(|policy| play(&calls, settings, policy)).collect::<Vec<_>>();
        prop_assert_eq!(run(), run());
    }

    #[test]
    fn ids_out_of_range_and_twice_in_a_call_do_no_harm(
        ids in prop::collection::vec(prop::collection::vec(0..N_EXPERT + 3, 0..8), 0..60), slots in 0..=N_EXPERT,
    ) {
        let mut calls = Calls::default();
        ids.into_iter().for_each(|ids| calls.push(2, ids.into_iter().map(Expert)));
        for policy in policies().into_iter().chain([belady(&calls, 0)]) {
            prop_assert!(play(&calls, at_once(slots), policy).most_resident <= slots.into());
        }
    }

    #[test]
    fn a_look_ahead_keeps_to_the_slots_and_to_one_copy_per_call(calls in calls(), slots in 0..=N_EXPERT) {
        let cost = CopyCost::NONE;
        let policy = ReplacementPolicy::fitting(N_EXPERT, cost);
        let replay = Replay::new(at_once(slots), policy).with_look_ahead(LookAhead::new(N_EXPERT, N_EXPERT, cost));
        let tally = replay.play_behind(Some(&calls), &calls);
        prop_assert!(tally.most_resident <= slots.into() && tally.ahead <= calls.len() as u64);
        prop_assert!(tally.ahead_used <= tally.ahead && tally.ahead <= tally.copies);
    }
}

#[test]
fn scores_of_the_default_are_in_uses_per_call() {
    let mut blend = Blend::new(4, Weights::fitting(CopyCost { price: 0.2, lag: 1 }));
    (0..200).for_each(|call| blend.observe(&[Expert(0), Expert(1 + call % 2)]));
    let scores = blend.scores();
    assert!((scores[0] - 1.0).abs() < 0.02 && scores[3] == 0.0, "{scores:?}");
    assert!((scores.iter().sum::<f32>() - 2.0).abs() < 0.05, "{scores:?}");
}

#[test]
fn a_dearer_copy_needs_a_better_newcomer() {
    let admits = |price| AdmissionRule::priced(CopyCost { price, lag: 0 }).admits(0.5, 0.35);
    assert!(admits(0.0) && admits(1.0) && !admits(4.0));
    assert!(!AdmissionRule::ANY_BETTER.admits(0.5, 0.5), "an equal is no reason for a copy");
}

#[test]
fn costs_measured_later_take_effect_and_keep_what_was_learnt() {
    let mut policy = ReplacementPolicy::fitting(3, CopyCost::NONE);
    (0..50).for_each(|_| policy.observe(&[Expert(0)]));
    policy.observe(&[Expert(1)]);
    let admission = |policy: &mut ReplacementPolicy<Blend>| policy.admission([Expert(1)], [Expert(2)], false);
    assert_eq!(admission(&mut policy), Some(Admission { admit: Expert(1), evict: Some(Expert(2)) }));
    policy.set_cost(CopyCost { price: 100.0, lag: 0 });
    assert_eq!(admission(&mut policy), None);
    assert_eq!(policy.worst((0..3).map(Expert)), Some(Expert(2)));
}

#[test]
fn a_free_slot_is_filled_with_the_best_and_nobody_is_evicted() {
    let mut policy = ReplacementPolicy::fitting(3, CopyCost::NONE);
    policy.observe(&[Expert(0), Expert(2)]);
    policy.observe(&[Expert(2)]);
    let admission = policy.admission([Expert(0), Expert(2)], [], true);
    assert_eq!(admission, Some(Admission { admit: Expert(2), evict: None }));
    assert_eq!(policy.admission([Expert(0)], [], false), None, "no slots at all");
    assert_eq!(policy.admission([], [], true), None);
}

#[test]
fn a_seed_decides_until_experts_are_used() {
    let worth = worth_of_ranks(&ranks(&[1.0, 9.0, 0.0, 4.0]), 1);
    for (mut policy, _) in policies() {
        policy.seed(&worth);
        let scores = policy.scores();
        assert!(scores[1] > scores[3] && scores[3] > scores[0] && scores[0] > scores[2]);
        assert_eq!(ranks(&policy.long_term_scores()[..4]), [1, 3, 0, 2]);
    }
}

#[test]
fn lru_knows_the_order_after_any_number_of_requests() {
    let mut lru = Lru::new(3);
    for call in 0..(20 << 20) {
        lru.observe(&[Expert(call as u16 % 2)]);
    }
    let scores = lru.scores();
    assert!(scores[1] > scores[0] && scores[0] > scores[2], "{scores:?}");
}
