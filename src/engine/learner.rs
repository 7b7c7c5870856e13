//! What one layer learns from its routing: which experts should be resident, and how fast that may change.

use crate::cache::{Blend, CopyCost, Decider, Expert, Slots};
use crate::config::UpdateRate;

/// Tokens that an update rate is counted over.
const RATE_TOKENS: f32 = 1000.0;
/// Calls between two looks at what copies cost.
const CALLS_PER_PRICE: u32 = 64;
/// What copies are taken to cost before any was measured: as much as a miss, and late. What is swapped in haste while copies
/// seem free is not won back once they turn out to be dear.
const UNKNOWN: CopyCost = CopyCost { price: 1.0, lag: 4 };

/// A layer's policy, and its allowance of replacements.
pub struct Learner {
    decider: Decider<Blend>,
    /// Calls seen.
    calls: u32,
    /// Replacements allowed per token; `None`: as many as pay.
    per_token: Option<f32>,
    allowance: f32,
    /// Resident experts at most: the other slots are spare, for those on their way.
    max_resident: usize,
    /// The call's experts, each once.
    used: Vec<Expert>,
    /// Per expert: the last call that used it.
    last_call: Box<[u32]>,
}

impl Learner {
    /// Begins with what an earlier run found: uses per call of each expert, `[n_expert]`.
    pub fn new(worth: &[f32], n_slots: u16, n_spare: u16, n_used: u16, rate: Option<UpdateRate>) -> Self {
        let n_expert = u16::try_from(worth.len()).unwrap_or(u16::MAX);
        let mut decider = Decider::fitting(n_expert, UNKNOWN);
        decider.seed(worth);
        let slots = f32::from(n_slots);
        Self {
            decider,
            calls: 0,
            per_token: rate.map(|rate| rate.0 * slots / RATE_TOKENS),
            allowance: 0.0,
            max_resident: usize::from(n_slots - n_spare),
            used: Vec::with_capacity(n_expert.max(n_used).into()),
            last_call: vec![0; n_expert.into()].into(),
        }
    }

    /// Calls seen so far.
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
        self.decider.observe(&self.used);
        if let Some(per_token) = self.per_token {
            // What is not used up is kept, but no more than a quarter of what 1,000 tokens bring.
            let most = (per_token * RATE_TOKENS / 4.0).max(1.0);
            self.allowance = (self.allowance + per_token * n_tokens as f32).min(most);
        }
        self.calls.is_multiple_of(CALLS_PER_PRICE)
    }

    /// What copies cost now.
    pub fn set_cost(&mut self, cost: CopyCost) {
        self.decider.set_cost(cost);
    }

    /// The copy to start now, if one pays and is allowed: who comes, and who goes for it.
    pub fn wish(&mut self, slots: &Slots) -> Option<(Expert, Option<Expert>)> {
        if slots.n_free() == 0 || (self.per_token.is_some() && self.allowance < 1.0) {
            return None;
        }
        let has_room = self.has_room(slots);
        let missed = self.used.iter().copied().filter(|&expert| slots.is_cold(expert));
        let wish = self.decider.wish(missed, slots.staying(), has_room)?;
        if self.per_token.is_some() {
            self.allowance -= 1.0;
        }
        Some((wish.admit, wish.evict))
    }

    /// Whether there is room for one more resident without a victim.
    pub fn has_room(&self, slots: &Slots) -> bool {
        slots.n_resident() + slots.n_filling() < self.max_resident
    }

    /// The expert to part with first.
    pub fn worst(&mut self, experts: impl Iterator<Item = Expert>) -> Option<Expert> {
        self.decider.worst(experts)
    }

    /// What a later run may begin with: each expert's rank, `[n_expert]`.
    pub fn ranks(&self) -> Vec<u16> {
        crate::cache::ranks(self.decider.standing())
    }
}
