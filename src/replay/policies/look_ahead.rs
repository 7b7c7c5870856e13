//! Looking one layer ahead: the experts used at a layer tell which the next layer will use.
//!
//! Pays only where a copy is complete before the next layer is reached; docs/replay.md has the measurements.

use crate::cache::policy::{CopyCost, Transitions};
use crate::units::Expert;

/// What is learnt about one layer from the experts of the layer before it. Takes one byte per pair of experts.
#[derive(Clone, Debug)]
pub struct LookAhead {
    transitions: Transitions,
    chances: Box<[f32]>,
    /// A chance below this is not worth a copy.
    min_chance: f32,
}

impl LookAhead {
    /// Chance from which a copy at the price of one hit pays, per hit of its price.
    ///
    /// Chances are means over rows and so too low: those above .19 come true in .55, those above .3 in .77 of all cases
    /// (Qwen3, 16 slots, see docs/replay.md).
    const CHANCE_PER_PRICE: f32 = 0.3;

    /// For a layer of `n_expert` experts after one of `n_before`.
    pub fn new(n_before: u16, n_expert: u16, cost: CopyCost) -> Self {
        Self {
            transitions: Transitions::new(n_before, n_expert),
            chances: vec![0.0; n_expert.into()].into(),
            min_chance: Self::CHANCE_PER_PRICE * cost.price.max(0.0),
        }
    }

    /// The layer before used these, this layer those, in the same call.
    pub fn observe(&mut self, before: &[Expert], used: &[Expert]) {
        self.transitions.record(before, used);
    }

    /// The layer before has just used these: which expert that `is_cold` should be copied, if any, and in whose place.
    ///
    /// Answers (admit, evict). `scores`: the layer's own, `[n_expert]`, in uses per call; they are the prior. The evicted
    /// expert is the one of `held` that is least expected now and later; nobody goes for someone less likely now.
    pub fn admission(
        &mut self,
        before: &[Expert],
        scores: &[f32],
        is_cold: impl Fn(Expert) -> bool,
        held: impl IntoIterator<Item = Expert>,
    ) -> Option<(Expert, Expert)> {
        self.transitions.chances(before, scores, 1.0, &mut self.chances);
        let all = (0..).map(Expert).zip(self.chances.iter().copied());
        let cold = all.filter(|&(expert, _)| is_cold(expert));
        let (admit, chance) = cold.reduce(|best, next| if next.1 > best.1 { next } else { best })?;
        if chance < self.min_chance {
            return None;
        }
        let of = |values: &[f32], expert: Expert| values.get(usize::from(expert.0)).copied();
        let scored = held.into_iter().filter_map(|expert| {
            let now = of(&self.chances, expert)?;
            Some((expert, now, now + of(scores, expert)?))
        });
        let (evict, now, _) = scored.reduce(|least, next| if next.2 < least.2 { next } else { least })?;
        (chance > now).then_some((admit, evict))
    }
}
