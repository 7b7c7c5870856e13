//! From a byte budget to slots: how many each layer gets, and which experts fill them first.
//!
//! Every layer gets the same number of slots, the most that fit, since uneven shares gained little or lost wherever they
//! were measured. Left-over bytes buy at most one more slot per layer. Knows bytes and counts; where they come from,
//! and what is copied when, is not decided here.

use crate::units::{Bytes, Expert, Layer};
use std::cmp::Reverse;

/// One expert tensor of a layer as the device lays it out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorBytes {
    /// Bytes of one expert's part.
    pub per_expert: Bytes,
    /// Bytes the device wants behind the last slot, once per tensor.
    pub padding: Bytes,
}

/// Which of a layer's slots are kept for experts on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spare {
    /// None: the set is fixed.
    None,
    /// One, once there are a few: experts that stay are worth more than room for those that come (docs/policy.md, Spare slot).
    One,
}

impl Spare {
    /// Fewer slots than this are all needed for residents.
    const LEAST_SLOTS: u16 = 4;

    /// Spare ones among `slots` slots of a layer. What is left never falls as `slots` grows.
    pub fn of(self, slots: u16, n_expert: u16) -> u16 {
        let is_worth_it = self == Self::One && slots >= Self::LEAST_SLOTS && slots < n_expert;
        u16::from(is_worth_it)
    }
}

/// One layer's geometry, and how often each of its experts was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerDemand {
    /// Layer number. Planning uses it in messages only.
    pub layer: Layer,
    /// Experts in the layer.
    pub n_expert: u16,
    /// Experts that each token asks for (k).
    pub n_used: u16,
    /// The tensors that make up an expert: weights, biases, scales.
    pub tensors: Vec<TensorBytes>,
    /// Each tensor begins at a multiple of this. Zero means anywhere.
    pub alignment: Bytes,
    /// Which of its slots hold no expert of the plan.
    pub spare: Spare,
    /// Requests per expert from the profile, `[n_expert]`; `None` if the profile lacks this layer.
    pub counts: Option<Vec<u64>>,
}

impl LayerDemand {
    /// Device memory of a pool with this many slots.
    ///
    /// Sum over tensors of `per_expert * slots + padding`, each rounded up to `alignment`; nothing for 0 slots. Never
    /// falls as `slots` grows. [`Bytes::MAX`] stands for more than can be counted.
    pub fn pool_bytes(&self, slots: u16) -> Bytes {
        if slots == 0 {
            return Bytes::ZERO;
        }
        let tensor = |tensor: &TensorBytes| {
            let weights = tensor.per_expert.saturating_mul(slots.into());
            weights.saturating_add(tensor.padding).round_up(self.alignment)
        };
        self.tensors.iter().map(tensor).sum()
    }

    /// Slots in this layer when every layer has `even`.
    fn capped(&self, even: u16) -> u16 {
        even.min(self.n_expert)
    }

    /// Slots that hold a third of one token's requests.
    fn third(&self) -> u16 {
        self.capped(self.n_used.div_ceil(3))
    }
}

/// One layer's share of the budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerPlan {
    /// Layer number.
    pub layer: Layer,
    /// Slots in this layer's pool.
    pub slots: u16,
    /// Experts to fill, hottest first, at most `slots`. Empty if the profile lacks the layer or counts no request for it.
    pub experts: Vec<Expert>,
    /// Device memory of the pool.
    pub bytes: Bytes,
}

/// What to hold on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// In the order they were given.
    pub layers: Vec<LayerPlan>,
    /// Device memory of all pools together, at most the budget.
    pub bytes: Bytes,
    /// Every layer has at least this many slots, or one for each of its experts.
    pub slots_per_layer: u16,
    /// Share of a token's requests, 0 to 1, that the filled experts answer if the profile holds.
    ///
    /// A token makes `n_used` requests in every layer; a layer without counts answers none. `None` if no layer has counts.
    pub expected_hit_rate: Option<f64>,
    /// Every fill as (index into `layers`, expert) in the order to be done: hottest first over all layers.
    pub fills: Vec<(usize, Expert)>,
}

/// How many slots a plan must and may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotRule {
    /// As many as fit, and in every layer at least a third of the experts that a token asks for.
    AtLeastAThird,
    /// For tests: this many in every layer, fewer where it has fewer experts or the budget holds fewer. May be 0.
    Exactly(u16),
}

/// Why there is no plan.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Nothing to plan for.
    #[error("no layer with experts was found")]
    NoLayers,
    /// So few slots that copies would cost more than hits save.
    #[error(
        "{budget} hold {slots} {} per layer; expected at least {needed} (a third of {n_used} experts per token, {} MiB)",
        if *.slots == 1 { "slot" } else { "slots" },
        .needed_bytes.mib_up()
    )]
    TooFewSlots {
        /// Slots per layer that the budget holds.
        slots: u16,
        /// Slots per layer that are enough.
        needed: u16,
        /// Experts that each token asks for, in the layer that needs most.
        n_used: u16,
        /// Device memory offered.
        budget: Bytes,
        /// Device memory of `needed` slots in every layer.
        needed_bytes: Bytes,
    },
    /// A profile that counted another model's experts.
    #[error("layer {layer}: the profile counts {counts} experts; expected {n_expert}")]
    Counts {
        /// Layer number.
        layer: Layer,
        /// Experts counted.
        counts: usize,
        /// Experts in the layer.
        n_expert: u16,
    },
}

impl PlanError {
    /// The same in numbers that count what is needed besides the experts.
    pub fn beside(self, other: Bytes) -> Self {
        match self {
            Self::TooFewSlots { slots, needed, n_used, budget, needed_bytes } => {
                let (budget, needed_bytes) = (budget.saturating_add(other), needed_bytes.saturating_add(other));
                Self::TooFewSlots { slots, needed, n_used, budget, needed_bytes }
            }
            other => other,
        }
    }
}

impl Plan {
    /// Shares `budget` out among `layers` and ranks what to fill.
    ///
    /// Fails if no layer has experts, if a layer's counts are not one per expert, or if `rule` asks for more slots than the
    /// budget holds. A larger budget never gets fewer slots per layer, nor fewer expected hits.
    pub fn new(layers: &[LayerDemand], budget: Bytes, rule: SlotRule) -> Result<Self, PlanError> {
        let n_expert = layers.iter().map(|layer| layer.n_expert).max().filter(|&n| n > 0).ok_or(PlanError::NoLayers)?;
        let rankings = layers.iter().map(Ranking::new).collect::<Result<Vec<_>, _>>()?;
        let fit = largest(n_expert, |slots| fits(even_bytes(layers, slots), budget));
        let (slots_per_layer, slots) = match rule {
            SlotRule::AtLeastAThird => {
                require_a_third(layers, fit, budget)?;
                (fit, with_left_over(layers, &rankings, fit, budget))
            }
            SlotRule::Exactly(wanted) => {
                let even = wanted.min(fit);
                (even, even_slots(layers, even))
            }
        };
        Ok(Self::of(layers, &rankings, slots_per_layer, &slots))
    }

    fn of(layers: &[LayerDemand], rankings: &[Ranking], slots_per_layer: u16, slots: &[u16]) -> Self {
        let plan = |((layer, ranking), &slots): ((&LayerDemand, &Ranking), &u16)| LayerPlan {
            layer: layer.layer,
            slots,
            experts: ranking.hottest(slots).iter().map(|&(expert, _)| expert).collect(),
            bytes: layer.pool_bytes(slots),
        };
        let plans: Vec<_> = layers.iter().zip(rankings).zip(slots).map(plan).collect();
        Self {
            bytes: plans.iter().map(|plan| plan.bytes).sum(),
            layers: plans,
            slots_per_layer,
            expected_hit_rate: expected_hit_rate(rankings, slots),
            fills: fills(rankings, slots),
        }
    }
}

/// The experts of one layer that were asked for, hottest first.
struct Ranking {
    n_expert: u16,
    spare: Spare,
    /// With their requests, never 0. Ties by id.
    experts: Vec<(Expert, u64)>,
    /// Requests of all experts: at most 2^80, so it cannot overflow.
    total: u128,
    /// Requests that one token makes.
    n_used: u16,
}

impl Ranking {
    fn new(demand: &LayerDemand) -> Result<Self, PlanError> {
        let counts = demand.counts.as_deref().unwrap_or_default();
        if demand.counts.is_some() && counts.len() != usize::from(demand.n_expert) {
            return Err(PlanError::Counts { layer: demand.layer, counts: counts.len(), n_expert: demand.n_expert });
        }
        let mut experts: Vec<_> = (0..=u16::MAX).map(Expert).zip(counts.iter().copied()).collect();
        experts.retain(|&(_, count)| count > 0);
        experts.sort_by_key(|&(_, count)| Reverse(count));
        let total = counts.iter().copied().map(u128::from).sum();
        Ok(Self { experts, total, n_expert: demand.n_expert, n_used: demand.n_used, spare: demand.spare })
    }

    /// The experts that this many slots hold.
    fn hottest(&self, slots: u16) -> &[(Expert, u64)] {
        let residents = slots - self.spare.of(slots, self.n_expert);
        &self.experts[..self.experts.len().min(residents.into())]
    }

    /// Hits per token expected of experts with `count` requests, 0 to `n_used`.
    fn hits(&self, count: u128) -> f64 {
        match self.total {
            0 => 0.0,
            total => f64::from(self.n_used) * (count as f64 / total as f64),
        }
    }

    /// Hits per token expected of this many slots.
    fn hits_of_slots(&self, slots: u16) -> f64 {
        self.hits(self.hottest(slots).iter().map(|&(_, count)| u128::from(count)).sum())
    }

    /// Hits per token expected of one more slot.
    fn hits_of_next(&self, slots: u16) -> f64 {
        self.hits_of_slots(slots.saturating_add(1)) - self.hits_of_slots(slots)
    }
}

/// Whether `bytes` can be had. What cannot be counted never fits, not even into [`Bytes::MAX`].
fn fits(bytes: Bytes, budget: Bytes) -> bool {
    bytes <= budget && bytes < Bytes::MAX
}

/// The largest of `0..=max` that `fits`, where 0 does and every number below one that does.
fn largest(max: u16, fits: impl Fn(u16) -> bool) -> u16 {
    let (mut low, mut high) = (0, max);
    while low < high {
        let middle = high - (high - low) / 2;
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

/// Slots per layer, in order, when every layer has `even` as far as it has experts.
fn even_slots(layers: &[LayerDemand], even: u16) -> Vec<u16> {
    layers.iter().map(|layer| layer.capped(even)).collect()
}

fn even_bytes(layers: &[LayerDemand], even: u16) -> Bytes {
    layers.iter().map(|layer| layer.pool_bytes(layer.capped(even))).sum()
}

fn require_a_third(layers: &[LayerDemand], slots: u16, budget: Bytes) -> Result<(), PlanError> {
    let most = layers.iter().max_by_key(|layer| layer.third()).ok_or(PlanError::NoLayers)?;
    let needed = most.third();
    if slots >= needed {
        return Ok(());
    }
    Err(PlanError::TooFewSlots { slots, needed, n_used: most.n_used, budget, needed_bytes: even_bytes(layers, needed) })
}

/// Slots per layer when what `even` slots leave of the budget buys one more where it earns most hits per byte.
///
/// Layers are asked in the order of hits per byte, each takes its slot if it still fits. Expected hits never fall as the
/// budget grows. Take two budgets. If the larger holds more even slots, it has at least `even + 1` in every layer (or
/// all experts), which is the most that the smaller can have. If both hold the same, both ask the same layers in the same order; at the first
/// layer where they differ, the larger one buys a slot of `w` bytes and `h` hits, and the smaller has less than `w`
/// bytes left. No later layer earns more than `h / w` per byte, so all that the smaller can still buy earns less than `h`.
fn with_left_over(layers: &[LayerDemand], rankings: &[Ranking], even: u16, budget: Bytes) -> Vec<u16> {
    struct Offer {
        index: usize,
        bytes: Bytes,
        hits_per_byte: f64,
    }
    let mut slots = even_slots(layers, even);
    let mut left = budget.saturating_sub(even_bytes(layers, even));
    let mut offers = Vec::new();
    for (index, (layer, ranking)) in layers.iter().zip(rankings).enumerate() {
        let hits = ranking.hits_of_next(even);
        if even < layer.n_expert && hits > 0.0 {
            let more = layer.pool_bytes(even + 1);
            let bytes = if more < Bytes::MAX { more.saturating_sub(layer.pool_bytes(even)) } else { Bytes::MAX };
            // A slot that rounding up has paid for already costs nothing: infinite, and first.
            offers.push(Offer { index, bytes, hits_per_byte: hits / bytes.0 as f64 });
        }
    }
    offers.sort_by(|a, b| b.hits_per_byte.total_cmp(&a.hits_per_byte));
    for offer in offers {
        if fits(offer.bytes, left) {
            left = left.saturating_sub(offer.bytes);
            slots[offer.index] += 1;
        }
    }
    slots
}

fn expected_hit_rate(rankings: &[Ranking], slots: &[u16]) -> Option<f64> {
    let requests: f64 = rankings.iter().map(|ranking| f64::from(ranking.n_used)).sum();
    if requests == 0.0 || rankings.iter().all(|ranking| ranking.total == 0) {
        return None;
    }
    let hits: f64 = rankings.iter().zip(slots).map(|(ranking, &slots)| ranking.hits_of_slots(slots)).sum();
    Some(hits / requests)
}

/// Hottest first: hits per token, then layer, then the layer's own order.
fn fills(rankings: &[Ranking], slots: &[u16]) -> Vec<(usize, Expert)> {
    let mut fills = Vec::new();
    for (index, (ranking, &slots)) in rankings.iter().zip(slots).enumerate() {
        let of_layer = ranking.hottest(slots).iter();
        fills.extend(of_layer.map(|&(expert, count)| (ranking.hits(count.into()), index, expert)));
    }
    fills.sort_by(|(a, ..), (b, ..)| b.total_cmp(a));
    fills.into_iter().map(|(_, index, expert)| (index, expert)).collect()
}

#[cfg(test)]
mod tests;
