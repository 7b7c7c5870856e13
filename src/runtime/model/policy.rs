//! What one layer learns from its routing: which experts should be resident, and how fast that may change.

use crate::cache::{Admission, Blend, CopyCost, ReplacementPolicy, Slots};
use crate::options::UpdateRate;
use crate::units::Expert;

/// Tokens that an update rate is counted over.
const RATE_TOKENS: f32 = 1000.0;
/// Calls between two looks at what copies cost.
const CALLS_PER_PRICE: u32 = 64;
/// What copies are taken to cost before any was measured: as much as a miss, and late. Swaps that are made in haste while
/// copies seem free do not pay once they turn out to be dear.
const COST_BEFORE_MEASURED: CopyCost = CopyCost { price: 1.0, lag: 4 };

/// A layer's policy, and its allowance of replacements.
pub struct LayerPolicy {
    policy: ReplacementPolicy<Blend>,
    /// Calls observed.
    calls: u32,
    /// Replacements allowed per token; `None`: as many as pay.
    per_token: Option<f32>,
    allowance: f32,
    /// Whether a fetch is on its way to the fetcher.
    is_fetching: bool,
    has_fixed_cost: bool,
    /// Resident experts at most: the other slots are spare, for those on their way.
    max_resident: usize,
    /// Whether experts on their way have a slot of their own; else they take a victim's at once.
    has_spare: bool,
    /// The call's experts, each once.
    used: Vec<Expert>,
    /// Per expert: the last call that used it.
    last_call: Box<[u32]>,
}

impl LayerPolicy {
    /// Begins with what an earlier run found: uses per call of each expert, `[n_expert]`.
    pub fn new(worth: &[f32], n_slots: u16, n_spare: u16, n_used: u16, rate: Option<UpdateRate>) -> Self {
        let n_expert = u16::try_from(worth.len()).unwrap_or(u16::MAX);
        let mut policy = ReplacementPolicy::fitting(n_expert, COST_BEFORE_MEASURED);
        policy.seed(worth);
        let slots = f32::from(n_slots);
        Self {
            policy,
            calls: 0,
            per_token: rate.map(|rate| rate.0 * slots / RATE_TOKENS),
            allowance: 0.0,
            is_fetching: false,
            has_fixed_cost: false,
            has_spare: n_spare > 0,
            max_resident: usize::from(n_slots - n_spare),
            used: Vec::with_capacity(n_expert.max(n_used).into()),
            last_call: vec![0; n_expert.into()].into(),
        }
    }

    /// Calls observed so far.
    pub fn calls(&self) -> u32 {
        self.calls
    }

    /// Takes note of a call. Returns whether it is time to tell what copies cost.
    pub fn observe(&mut self, ids: impl Iterator<Item = i32>, n_tokens: usize) -> bool {
        self.calls = self.calls.wrapping_add(1).max(1);
        self.used.clear();
        for id in ids {
            let Ok(expert) = u16::try_from(id) else { continue };
            if let Some(last) = self.last_call.get_mut(usize::from(expert)).filter(|last| **last != self.calls) {
                *last = self.calls;
                self.used.push(Expert(expert));
            }
        }
        self.policy.observe(&self.used);
        if let Some(per_token) = self.per_token {
            // What is not used up is kept, but no more than a quarter of what 1,000 tokens bring.
            let most = (per_token * RATE_TOKENS / 4.0).max(1.0);
            self.allowance = (self.allowance + per_token * n_tokens as f32).min(most);
        }
        self.calls.is_multiple_of(CALLS_PER_PRICE)
    }

    /// Copies count as free, whatever they cost.
    #[must_use]
    pub fn with_free_copies(mut self) -> Self {
        self.policy.set_cost(CopyCost::NONE);
        self.has_fixed_cost = true;
        self
    }

    /// What copies cost now.
    pub fn set_cost(&mut self, cost: CopyCost) {
        if !self.has_fixed_cost {
            self.policy.set_cost(cost);
        }
    }

    /// The copy to start now, if one pays and is allowed. One at a time: [`LayerPolicy::end_fetch`] comes before the next.
    pub fn admission(&mut self, slots: &Slots) -> Option<Admission> {
        if self.is_fetching || !self.may_replace() || (self.has_spare && slots.n_free() == 0) {
            return None;
        }
        let has_room = self.has_room(slots);
        let missed = self.used.iter().copied().filter(|&expert| slots.is_cold(expert));
        let admission = self.policy.admission(missed, slots.staying(), has_room)?;
        self.is_fetching = true;
        Some(admission)
    }

    /// The fetch has been started, or will not be.
    pub fn end_fetch(&mut self, is_started: bool) {
        self.is_fetching = false;
        if is_started {
            self.spend();
        }
    }

    /// Whether one more resident may be replaced now.
    pub fn may_replace(&self) -> bool {
        self.per_token.is_none() || self.allowance >= 1.0
    }

    /// One has been.
    pub fn spend(&mut self) {
        if self.per_token.is_some() {
            self.allowance -= 1.0;
        }
    }

    /// Whether there is room for one more resident without a victim.
    pub fn has_room(&self, slots: &Slots) -> bool {
        slots.n_resident() + slots.n_filling() < self.max_resident
    }

    /// The expert to part with first.
    pub fn worst(&mut self, experts: impl Iterator<Item = Expert>) -> Option<Expert> {
        self.policy.worst(experts)
    }

    /// What a later run may begin with: each expert's rank, `[n_expert]`.
    pub fn ranks(&self) -> Vec<u16> {
        crate::cache::ranks(self.policy.long_term_scores())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const N_EXPERT: u16 = 16;
    const N_SLOTS: u16 = 8;

    /// Experts 0 to 6 resident, one slot spare.
    fn layer(rate: Option<f32>) -> (LayerPolicy, Slots) {
        let mut slots = Slots::new(N_EXPERT, N_SLOTS);
        for expert in 0..N_SLOTS - 1 {
            let slot = slots.start_fill(Expert(expert)).unwrap();
            slots.publish(slot);
        }
        let mut policy = LayerPolicy::new(&[0.1; N_EXPERT as usize], N_SLOTS, 1, 2, rate.map(UpdateRate));
        policy.set_cost(CopyCost::NONE);
        (policy, slots)
    }

    /// Lets a pair of experts that changes be used for `n` tokens and carries out every fetch at once; returns the copies.
    fn run(policy: &mut LayerPolicy, slots: &mut Slots, n: u16) -> usize {
        let mut copies = 0;
        for token in 0..n {
            let ids = [token / 4, token / 4 + 5].map(|id| i32::from(id % N_EXPERT));
            policy.observe(ids.into_iter(), 1);
            let Some(Admission { admit, evict }) = policy.admission(slots) else { continue };
            let slot = match evict {
                Some(evict) => slots.start_swap(admit, evict).unwrap(),
                None => slots.start_fill(admit).unwrap(),
            };
            slots.publish(slot);
            policy.end_fetch(true);
            copies += 1;
        }
        copies
    }

    #[test]
    fn residents_follow_the_routing_and_leave_the_spare_slot_free() {
        let (mut policy, mut slots) = layer(None);
        assert!(run(&mut policy, &mut slots, 200) > 50);
        assert_eq!((slots.n_resident(), slots.n_free()), (usize::from(N_SLOTS) - 1, 1));
    }

    #[test]
    fn a_rate_bounds_how_many_are_replaced() {
        for (rate, tokens) in [(1.0, 1000), (0.5, 2000), (0.125, 4000)] {
            let (mut policy, mut slots) = layer(Some(rate));
            let copies = run(&mut policy, &mut slots, tokens);
            let allowed = rate * f32::from(N_SLOTS) * f32::from(tokens) / RATE_TOKENS;
            assert!((1..=allowed as usize).contains(&copies), "{copies} copies at a rate of {rate}, {allowed} allowed");
        }
    }

    #[test]
    fn an_expert_that_several_tokens_use_is_used_once_by_their_call() {
        let (mut policy, slots) = layer(None);
        policy.observe([9, 9, 9, 3].into_iter(), 2);
        assert_eq!(policy.used, [Expert(9), Expert(3)]);
        assert_eq!(policy.admission(&slots).unwrap().admit, Expert(9), "the one that is missed");
    }

    #[test]
    fn ids_that_no_layer_has_are_passed_over() {
        let (mut policy, _) = layer(None);
        policy.observe([-1, 16, i32::MAX, 2].into_iter(), 1);
        assert_eq!(policy.used, [Expert(2)]);
    }

    #[test]
    fn nothing_is_fetched_while_no_slot_is_free() {
        let (mut policy, mut slots) = layer(None);
        slots.start_fill(Expert(15)).unwrap();
        policy.observe([9].into_iter(), 1);
        assert_eq!(policy.admission(&slots), None);
    }
}
