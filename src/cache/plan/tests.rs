use super::*;
use proptest::prelude::*;
use proptest::sample::select;

const K: u16 = 8;

/// A layer of one tensor with nothing but weights.
fn layer(number: u16, n_expert: u16, per_expert: Bytes, counts: Option<Vec<u64>>) -> LayerDemand {
    let tensors = vec![TensorBytes { per_expert, padding: Bytes::ZERO }];
    LayerDemand { layer: Layer(number), n_expert, n_used: K, tensors, alignment: Bytes(1), spare: Spare::None, counts }
}

/// `n` layers of 4 experts with 10 bytes each, where expert 2 is asked for most and expert 3 never.
fn small(n: u16) -> Vec<LayerDemand> {
    (0..n).map(|number| layer(number, 4, Bytes(10), Some(vec![10, 20, 70, 0]))).collect()
}

fn plan(layers: &[LayerDemand], budget: u64, rule: SlotRule) -> Plan {
    Plan::new(layers, Bytes(budget), rule).unwrap()
}

fn slots(plan: &Plan) -> Vec<u16> {
    plan.layers.iter().map(|layer| layer.slots).collect()
}

fn experts(ids: &[u16]) -> Vec<Expert> {
    ids.iter().copied().map(Expert).collect()
}

#[test]
fn a_pool_is_each_tensor_with_its_padding_rounded_up() {
    let tensors = [(100, 0), (30, 8)].map(|(weights, padding)| (Bytes(weights), Bytes(padding)));
    let tensors = tensors.map(|(per_expert, padding)| TensorBytes { per_expert, padding }).to_vec();
    let layer = LayerDemand { tensors, alignment: Bytes(32), ..layer(0, 4, Bytes::ZERO, None) };
    assert_eq!(layer.pool_bytes(0), Bytes(0), "no pool, no padding");
    assert_eq!(layer.pool_bytes(1), Bytes(128 + 64));
    assert_eq!(layer.pool_bytes(3), Bytes(320 + 128));
}

#[test]
fn no_budget_is_refused_unless_no_slots_are_wanted() {
    let refusal = Plan::new(&small(2), Bytes(0), SlotRule::AtLeastAThird).unwrap_err();
    assert!(matches!(refusal, PlanError::TooFewSlots { slots: 0, needed: 3, .. }), "{refusal}");
    let none = plan(&small(2), 0, SlotRule::Exactly(0));
    assert_eq!((slots(&none), none.bytes, none.fills.len()), (vec![0, 0], Bytes(0), 0));
    assert_eq!(none.expected_hit_rate, Some(0.0));
}

#[test]
fn one_slot_holds_each_layers_hottest_expert() {
    let plan = plan(&small(2), 1000, SlotRule::Exactly(1));
    assert_eq!((slots(&plan), plan.bytes, plan.slots_per_layer), (vec![1, 1], Bytes(20), 1));
    assert_eq!(plan.fills, [(0, Expert(2)), (1, Expert(2))]);
    assert_eq!(plan.expected_hit_rate, Some(0.7));
}

#[test]
fn a_budget_for_all_holds_all_and_a_larger_one_no_more() {
    for budget in [80, 81, u64::MAX] {
        let plan = plan(&small(2), budget, SlotRule::AtLeastAThird);
        assert_eq!((slots(&plan), plan.bytes, plan.slots_per_layer), (vec![4, 4], Bytes(80), 4));
        assert_eq!(plan.layers[0].experts, experts(&[2, 1, 0]), "an expert never asked for is not filled");
        assert_eq!(plan.expected_hit_rate, Some(1.0));
    }
}

#[test]
fn exactly_holds_fewer_where_the_budget_or_the_layer_does() {
    let mut layers = small(2);
    layers.push(layer(2, 1, Bytes(10), None));
    assert_eq!(slots(&plan(&layers, 1000, SlotRule::Exactly(3))), [3, 3, 1]);
    assert_eq!(slots(&plan(&layers, 69, SlotRule::Exactly(3))), [2, 2, 1], "and left-over bytes buy nothing");
}

#[test]
fn layers_of_mixed_quantisation_get_the_same_number_of_slots() {
    let layers = [10, 17, 10].map(|bytes| layer(0, 64, Bytes(bytes), None));
    let plan = plan(&layers, 37 * 5 + 36, SlotRule::AtLeastAThird);
    assert_eq!((slots(&plan), plan.bytes), (vec![5, 5, 5], Bytes(37 * 5)));
}

#[test]
fn a_layer_with_few_experts_does_not_hold_the_others_back() {
    let layers = [layer(0, 4, Bytes(10), None), layer(1, 64, Bytes(10), None)];
    let plan = plan(&layers, 40 + 200, SlotRule::AtLeastAThird);
    assert_eq!((slots(&plan), plan.slots_per_layer), (vec![4, 20], 20));
}

#[test]
fn a_layer_that_the_profile_lacks_keeps_its_slots_empty() {
    let mut layers = small(3);
    layers[1].counts = None;
    layers[2].counts = Some(vec![0; 4]);
    let plan = plan(&layers, 90, SlotRule::AtLeastAThird);
    assert_eq!(slots(&plan), [3, 3, 3]);
    assert_eq!(plan.layers.iter().map(|layer| layer.experts.len()).collect::<Vec<_>>(), [3, 0, 0]);
    assert_eq!(plan.expected_hit_rate, Some(1.0 / 3.0), "its requests count as misses");
}

#[test]
fn without_any_counts_no_hit_rate_is_expected() {
    let layers = [layer(0, 4, Bytes(10), None), layer(1, 4, Bytes(10), Some(vec![0; 4]))];
    assert_eq!(plan(&layers, 80, SlotRule::AtLeastAThird).expected_hit_rate, None);
}

#[test]
fn left_over_bytes_go_where_they_earn_most_hits_per_byte() {
    let layers = [
        layer(0, 5, Bytes(10), Some(vec![40, 30, 20, 10, 0])), // 0.8 hits for 10 bytes
        layer(1, 5, Bytes(20), Some(vec![25, 25, 25, 25, 0])), // 2.0 hits for 20 bytes
        layer(2, 5, Bytes(10), Some(vec![50, 30, 20, 0, 0])),  // nothing
    ];
    let bought = |left: u64| slots(&plan(&layers, 40 * 3 + left, SlotRule::AtLeastAThird));
    assert_eq!(bought(9), [3, 3, 3]);
    assert_eq!(bought(10), [4, 3, 3], "the better one does not fit");
    assert_eq!(bought(20), [3, 4, 3]);
    assert_eq!(bought(30), [4, 4, 3]);
    assert_eq!(bought(39), [4, 4, 3], "one more slot at most, and none for an expert never asked for");
}

#[test]
fn fills_begin_with_the_experts_that_a_token_asks_for_most() {
    let mut layers =
        [layer(7, 3, Bytes(1), Some(vec![1, 6, 3])), layer(8, 3, Bytes(1), Some(vec![5000, 2000, 3000]))].to_vec();
    let filled = |layers: &[LayerDemand]| plan(layers, 6, SlotRule::AtLeastAThird).fills;
    let expected = [(0, 1), (1, 0), (0, 2), (1, 2), (1, 1), (0, 0)].map(|(index, id)| (index, Expert(id)));
    assert_eq!(filled(&layers), expected, "shares count, not how long a layer was recorded");
    layers[1].n_used = 2 * K;
    let expected = [(1, 0), (0, 1), (1, 2), (1, 1), (0, 2), (0, 0)].map(|(index, id)| (index, Expert(id)));
    assert_eq!(filled(&layers), expected, "a layer that a token asks for twice as much counts double");
}

#[test]
fn equal_experts_are_filled_by_layer_and_id() {
    let layers = [0, 1].map(|number| layer(number, 3, Bytes(1), Some(vec![5, 5, 5])));
    let plan = plan(&layers, 6, SlotRule::AtLeastAThird);
    assert_eq!(plan.fills, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)].map(|(index, id)| (index, Expert(id))));
}

#[test]
fn less_than_a_third_of_a_tokens_experts_is_refused_with_numbers() {
    let layers: Vec<_> = (0..20).map(|number| layer(number, 64, Bytes(7 << 19), None)).collect();
    let refused = |mib| Plan::new(&layers, Bytes::from_mib(mib), SlotRule::AtLeastAThird).unwrap_err().to_string();
    assert_eq!(
        refused(100),
        "100 MiB hold 1 slot per layer; expected at least 3 (a third of 8 experts per token, 210 MiB)"
    );
    assert!(refused(32).starts_with("32 MiB hold 0 slots per layer"), "{}", refused(32));
    assert!(refused(209).starts_with("209 MiB hold 2 slots per layer"), "{}", refused(209));
    assert_eq!(slots(&plan(&layers, 210 << 20, SlotRule::AtLeastAThird)), [3; 20]);
}

#[test]
fn the_refusal_asks_for_enough_mib() {
    let layers = [layer(0, 64, Bytes((1 << 20) + 1), None)];
    let refusal = Plan::new(&layers, Bytes(0), SlotRule::AtLeastAThird).unwrap_err().to_string();
    assert!(refusal.ends_with("4 MiB)"), "{refusal}");
}

#[test]
fn a_layer_with_all_its_experts_has_enough() {
    let layers = [layer(0, 2, Bytes(10), None)];
    assert_eq!(slots(&plan(&layers, 20, SlotRule::AtLeastAThird)), [2]);
}

#[test]
fn no_layers_and_another_models_counts_are_refused() {
    let refused = |layers: &[LayerDemand]| Plan::new(layers, Bytes::MAX, SlotRule::Exactly(1)).unwrap_err();
    assert_eq!(refused(&[]), PlanError::NoLayers);
    assert_eq!(refused(&[layer(0, 0, Bytes(1), None)]), PlanError::NoLayers);
    let refusal = refused(&[layer(5, 4, Bytes(1), Some(vec![1; 8]))]).to_string();
    assert_eq!(refusal, "layer 5: the profile counts 8 experts; expected 4");
}

#[test]
fn what_cannot_be_counted_never_fits() {
    let layers = [0, 1].map(|number| layer(number, 4, Bytes(u64::MAX / 3), Some(vec![1; 4])));
    let plan = plan(&layers, u64::MAX, SlotRule::Exactly(4));
    assert_eq!((slots(&plan), plan.bytes), (vec![1, 1], Bytes(u64::MAX / 3 * 2)));
}

#[test]
fn the_largest_layers_and_counts_are_planned_for() {
    let layers = [0, 1].map(|number| layer(number, u16::MAX, Bytes(1 << 40), Some(vec![u64::MAX; u16::MAX.into()])));
    let plan = plan(&layers, u64::MAX, SlotRule::AtLeastAThird);
    assert_eq!((slots(&plan), plan.fills.len()), (vec![u16::MAX; 2], 2 * usize::from(u16::MAX)));
    assert_eq!(plan.expected_hit_rate, Some(1.0));
}

fn demand(
    n_expert: impl Strategy<Value = u16>,
    n_used: impl Strategy<Value = u16>,
    bytes: impl Strategy<Value = u64> + Clone,
    count: impl Strategy<Value = u64> + Clone,
) -> impl Strategy<Value = LayerDemand> {
    let tensor = (bytes.clone(), bytes.clone()).prop_map(|(per_expert, padding)| (Bytes(per_expert), Bytes(padding)));
    let tensor = tensor.prop_map(|(per_expert, padding)| TensorBytes { per_expert, padding });
    let tensors = prop::collection::vec(tensor, 0..4);
    let alignment = prop_oneof![select(vec![0, 1, 32, 256]), bytes];
    (n_expert, n_used, tensors, alignment, any::<u16>())
        .prop_flat_map(move |parts| {
            let counts = prop::collection::vec(count.clone(), usize::from(parts.0));
            (Just(parts), prop::option::weighted(0.8, counts))
        })
        .prop_map(|((n_expert, n_used, tensors, alignment, number), counts)| {
            let (layer, alignment) = (Layer(number), Bytes(alignment));
            let spare = if number % 2 == 0 { Spare::None } else { Spare::One };
            LayerDemand { layer, n_expert, n_used, tensors, alignment, spare, counts }
        })
}

/// Small enough for budgets of 0 to [`ENOUGH`] to make every kind of difference.
fn model() -> impl Strategy<Value = Vec<LayerDemand>> {
    let count = prop_oneof![1 => Just(0), 3 => 0..50_u64];
    prop::collection::vec(demand(0..12_u16, 0..9_u16, 0..500_u64, count), 1..6)
}

/// Small enough to try every budget that makes a difference.
fn tiny_model() -> impl Strategy<Value = Vec<LayerDemand>> {
    let drawn = (1..20_u64, prop::collection::vec(0..50_u64, 5));
    prop::collection::vec(drawn.prop_map(|(bytes, counts)| layer(0, 5, Bytes(bytes), Some(counts))), 1..5)
}

const ENOUGH: u64 = 60_000;

fn budget() -> impl Strategy<Value = u64> {
    prop_oneof![0..ENOUGH, 0..ENOUGH / 10]
}

fn rule() -> impl Strategy<Value = SlotRule> {
    prop_oneof![3 => Just(SlotRule::AtLeastAThird), 1 => (0..14_u16).prop_map(SlotRule::Exactly)]
}

fn extreme_model() -> impl Strategy<Value = Vec<LayerDemand>> {
    let extreme = || prop_oneof![Just(0), Just(1), Just(u64::MAX), Just(u64::MAX / 2 + 1), any::<u64>()];
    let layer = demand(select(vec![0, 1, 2, 7]), select(vec![0, 1, 8, u16::MAX]), extreme().boxed(), extreme().boxed());
    prop::collection::vec(layer, 0..5)
}

/// Requests of one layer's experts per its total, as the plan's own documentation defines hotness.
fn hotness(layer: &LayerDemand, expert: Expert) -> f64 {
    let counts = layer.counts.as_deref().unwrap();
    let total: u128 = counts.iter().map(|&count| u128::from(count)).sum();
    f64::from(layer.n_used) * (counts[usize::from(expert.0)] as f64 / total as f64)
}

fn expected_hits(plan: &Plan) -> f64 {
    plan.expected_hit_rate.unwrap_or(0.0)
}

/// Sums of the same hits in another order differ by this at most.
const ROUNDING: f64 = 1e-12;

/// Everything that holds for any plan of any model.
fn check(layers: &[LayerDemand], budget: Bytes, plan: &Plan) -> Result<(), TestCaseError> {
    prop_assert!(plan.bytes <= budget);
    prop_assert_eq!(plan.layers.len(), layers.len());
    prop_assert_eq!(plan.bytes, plan.layers.iter().map(|layer| layer.bytes).sum::<Bytes>());
    for (planned, layer) in plan.layers.iter().zip(layers) {
        prop_assert_eq!(planned.layer, layer.layer);
        prop_assert_eq!(planned.bytes, layer.pool_bytes(planned.slots));
        let even = plan.slots_per_layer.min(layer.n_expert);
        prop_assert!((even..=layer.n_expert.min(even.saturating_add(1))).contains(&planned.slots));
        prop_assert!(planned.experts.len() <= planned.slots.into());
        let by_count = |id: u16| (Reverse(layer.counts.as_ref().unwrap()[usize::from(id)]), id);
        prop_assert!(planned.experts.iter().all(|expert| expert.0 < layer.n_expert));
        prop_assert!(planned.experts.is_sorted_by(|a, b| by_count(a.0) < by_count(b.0)), "by count, then id, distinct");
    }
    let of_layer =
        |(index, layer): (usize, &LayerPlan)| layer.experts.iter().map(move |&expert| (index, expert)).collect();
    let mut wanted: Vec<_> = plan.layers.iter().enumerate().flat_map(of_layer as fn(_) -> Vec<_>).collect();
    let mut filled = plan.fills.clone();
    wanted.sort_unstable();
    filled.sort_unstable();
    prop_assert_eq!(filled, wanted);
    let hot = |&(index, expert): &(usize, Expert)| hotness(&layers[index], expert);
    prop_assert!(plan.fills.is_sorted_by(|a, b| hot(a) > hot(b) || (hot(a) == hot(b) && a.0 <= b.0)));
    prop_assert!(plan.expected_hit_rate.is_none_or(|rate| (0.0..=1.0 + ROUNDING).contains(&rate)));
    Ok(())
}

#[test]
fn a_spare_slot_holds_nobody() {
    assert_eq!([3, 4, 16, 63, 64].map(|slots| Spare::One.of(slots, 64)), [0, 1, 1, 1, 0]);
    let counts = Some((1..=8).rev().collect());
    let layer = LayerDemand { spare: Spare::One, ..layer(0, 8, Bytes(1), counts) };
    let plan = Plan::new(&[layer], Bytes(6), SlotRule::AtLeastAThird).unwrap();
    assert_eq!((plan.slots_per_layer, plan.layers[0].experts.len()), (6, 5));
}

proptest! {
    #[test]
    fn a_plan_keeps_to_its_budget_and_its_rules(layers in model(), budget in budget(), rule in rule()) {
        let plan = Plan::new(&layers, Bytes(budget), rule);
        if let Ok(plan) = &plan {
            check(&layers, Bytes(budget), plan)?;
        }
        prop_assert_eq!(Plan::new(&layers, Bytes(budget), rule), plan, "the same again");
    }

    #[test]
    fn extreme_sizes_and_counts_do_no_harm(layers in extreme_model(), budget in any::<u64>(), rule in rule()) {
        for budget in [Bytes::ZERO, Bytes(budget), Bytes::MAX] {
            match Plan::new(&layers, budget, rule) {
                Ok(plan) => check(&layers, budget, &plan)?,
                Err(refusal) => prop_assert!(!refusal.to_string().is_empty()),
            }
        }
    }

    #[test]
    fn a_pool_never_shrinks_with_more_slots(layers in prop_oneof![model(), extreme_model()]) {
        for layer in layers {
            let slots: Vec<_> = (0..layer.n_expert.min(100)).chain([u16::MAX]).collect();
            prop_assert!(slots.is_sorted_by_key(|&slots| layer.pool_bytes(slots)));
        }
    }

    #[test]
    fn more_budget_never_means_fewer_slots_or_hits(layers in model(), a in budget(), b in budget(), rule in rule()) {
        let (less, more) = (Bytes(a.min(b)), Bytes(a.max(b)));
        if let Ok(less) = Plan::new(&layers, less, rule) {
            let more = Plan::new(&layers, more, rule);
            prop_assert!(more.is_ok(), "a larger budget is not refused");
            let more = more.unwrap();
            prop_assert!(more.slots_per_layer >= less.slots_per_layer);
            prop_assert!(expected_hits(&more) >= expected_hits(&less) - ROUNDING);
        }
    }

    #[test]
    fn one_more_byte_never_means_fewer_hits(layers in tiny_model()) {
        let hits = |budget| Plan::new(&layers, Bytes(budget), SlotRule::AtLeastAThird).ok().map(|plan| expected_hits(&plan));
        let hits: Vec<_> = (0..400).filter_map(hits).collect();
        prop_assert!(hits.is_sorted_by(|less, more| *more >= less - ROUNDING));
    }

    #[test]
    fn a_plan_is_never_worse_than_an_even_split(layers in model(), budget in budget()) {
        if let Ok(plan) = Plan::new(&layers, Bytes(budget), SlotRule::AtLeastAThird) {
            for even in 0..=12 {
                let even = Plan::new(&layers, Bytes(budget), SlotRule::Exactly(even)).unwrap();
                prop_assert!(plan.slots_per_layer >= even.slots_per_layer);
                prop_assert!(expected_hits(&plan) >= expected_hits(&even));
            }
        }
    }

    #[test]
    fn left_over_bytes_are_used_where_a_hit_still_fits(layers in model(), budget in budget()) {
        if let Ok(plan) = Plan::new(&layers, Bytes(budget), SlotRule::AtLeastAThird) {
            for (planned, layer) in plan.layers.iter().zip(&layers) {
                let asked_for = layer.counts.iter().flatten().filter(|&&count| count > 0).count();
                let residents = |slots| slots - layer.spare.of(slots, layer.n_expert);
                let (now, then) = (residents(planned.slots), residents(planned.slots.saturating_add(1)));
                let would_hit = asked_for > now.into() && then > now && layer.n_used > 0;
                if planned.slots == plan.slots_per_layer && planned.slots < layer.n_expert && would_hit {
                    let others = plan.bytes.saturating_sub(planned.bytes);
                    prop_assert!(others.saturating_add(layer.pool_bytes(planned.slots + 1)) > Bytes(budget));
                }
            }
        }
    }
}
