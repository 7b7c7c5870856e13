//! A list that never changes: what static placements do.

use crate::cache::policy::Policy;
use crate::units::Expert;

/// Scores experts by what it was seeded with, whatever is used.
#[derive(Clone, Debug)]
pub struct Fixed {
    worth: Box<[f32]>,
}

impl Fixed {
    /// All experts alike.
    pub fn new(n_expert: u16) -> Self {
        Self { worth: vec![0.0; n_expert.into()].into() }
    }
}

impl Policy for Fixed {
    fn observe(&mut self, _used: &[Expert]) {}

    fn scores(&mut self) -> &[f32] {
        &self.worth
    }

    fn long_term_scores(&self) -> &[f32] {
        &self.worth
    }

    fn seed(&mut self, worth: &[f32]) {
        for (own, worth) in self.worth.iter_mut().zip(worth) {
            *own = *worth;
        }
    }
}
