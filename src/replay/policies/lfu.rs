//! Least frequently used, with counters that decay.

use crate::cache::policy::{Decayed, Policy};
use crate::units::Expert;

/// Scores experts by their decayed uses per call.
#[derive(Clone, Debug)]
pub struct Lfu {
    uses: Decayed,
    scores: Box<[f32]>,
}

impl Lfu {
    /// Per call; docs/policy.md, Reference hit rates.
    pub const DECAY: f32 = 0.93;

    /// Nothing used yet.
    pub fn new(n_expert: u16) -> Self {
        Self { uses: Decayed::new(n_expert, Self::DECAY), scores: vec![0.0; n_expert.into()].into() }
    }

    fn score(&mut self) {
        let scale = self.uses.per_call();
        for (score, count) in self.scores.iter_mut().zip(self.uses.counts()) {
            *score = count * scale;
        }
    }
}

impl Policy for Lfu {
    fn observe(&mut self, used: &[Expert]) {
        self.uses.add(used);
        self.score();
    }

    fn scores(&mut self) -> &[f32] {
        &self.scores
    }

    fn long_term_scores(&self) -> &[f32] {
        &self.scores
    }

    fn seed(&mut self, worth: &[f32]) {
        self.uses.seed(worth);
        self.score();
    }
}
