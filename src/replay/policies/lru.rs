//! Least recently used: what every cache is compared with.

use crate::cache::policy::Policy;
use crate::units::Expert;

/// Where stamps start again from half: above this, floats no longer tell neighbours apart.
const MAX_STAMP: f32 = (1u32 << 24) as f32;

/// Scores experts by when they were last used. Within a call the last of the list counts as the latest.
#[derive(Clone, Debug)]
pub struct Lru {
    /// Number of the last request of each expert; 0: never.
    stamps: Box<[f32]>,
    requests: f32,
}

impl Lru {
    /// Nothing used yet.
    pub fn new(n_expert: u16) -> Self {
        Self { stamps: vec![0.0; n_expert.into()].into(), requests: 0.0 }
    }

    fn stamp(&mut self, expert: usize) {
        let Some(stamp) = self.stamps.get_mut(expert) else { return };
        self.requests += 1.0;
        *stamp = self.requests;
        if self.requests >= MAX_STAMP {
            self.requests -= MAX_STAMP / 2.0;
            self.stamps.iter_mut().for_each(|stamp| *stamp = (*stamp - MAX_STAMP / 2.0).max(0.0));
        }
    }
}

impl Policy for Lru {
    fn observe(&mut self, used: &[Expert]) {
        used.iter().for_each(|expert| self.stamp(usize::from(expert.0)));
    }

    fn scores(&mut self) -> &[f32] {
        &self.stamps
    }

    fn long_term_scores(&self) -> &[f32] {
        &self.stamps
    }

    /// As if the experts had been used in the order of their worth, the best last.
    fn seed(&mut self, worth: &[f32]) {
        let mut order: Vec<usize> = (0..worth.len()).filter(|&expert| worth[expert] > 0.0).collect();
        order.sort_by(|&a, &b| worth[a].total_cmp(&worth[b]).then(b.cmp(&a)));
        order.into_iter().for_each(|expert| self.stamp(expert));
    }
}
