//! Which experts follow which: learnt counts from one set of experts to the next.

use crate::units::Expert;
use std::hint::black_box;

/// How many uses the prior counts for: docs/policy.md, Score.
const PRIOR_USES: f32 = 2.0;
/// Uses of an expert that are remembered. What followed more of them belongs to an older text: with 255 a switch of text was
/// not made up for within 100 tokens (tests/e2e/test_learning_server.py); 16, 32 and 64 are alike on all traces.
const MAX_USES: u8 = 64;
/// In bytes.
const CACHE_LINE: usize = 64;

/// For each expert i: how often it was used, and how often each expert e was used after it.
///
/// Counts are one byte each, `[n_from, n_to]`: 64 KiB for 256 experts, 3 MiB for 48 such layers. When an expert's uses
/// reach their limit its row is halved, so old habits fade without a pass over all rows.
#[derive(Clone, Debug)]
pub struct Transitions {
    counts: Box<[u8]>,
    uses: Box<[u8]>,
    n_to: usize,
}

impl Transitions {
    /// Nothing learnt yet, for `n_from` experts that are followed by `n_to` others.
    pub fn new(n_from: u16, n_to: u16) -> Self {
        let (n_from, n_to) = (usize::from(n_from), usize::from(n_to));
        Self { counts: vec![0; n_from * n_to].into(), uses: vec![0; n_from].into(), n_to }
    }

    /// Takes note that `next` followed `now`. Ids out of range are passed over.
    pub fn record(&mut self, now: &[Expert], next: &[Expert]) {
        for expert in now {
            let Some(uses) = self.uses.get_mut(usize::from(expert.0)) else { continue };
            let row = &mut self.counts[usize::from(expert.0) * self.n_to..][..self.n_to];
            if *uses >= MAX_USES {
                *uses /= 2;
                row.iter_mut().for_each(|count| *count /= 2);
            }
            *uses += 1;
            for follower in next {
                if let Some(count) = row.get_mut(usize::from(follower.0)) {
                    *count = count.saturating_add(1);
                }
            }
        }
    }

    /// Reads one byte of each cache line of the rows at hand, so that they come from memory together and not one by one.
    ///
    /// Between two tokens a model's weights drive these rows out of the caches.
    fn touch(&self, now: &[Expert]) {
        let rows = now.iter().map(|expert| usize::from(expert.0)).filter(|&row| row < self.uses.len());
        let lines = rows.flat_map(|row| self.counts[row * self.n_to..][..self.n_to].iter().step_by(CACHE_LINE));
        black_box(lines.fold(0, |all, &count| all | count));
    }

    /// Writes to `chances` how likely each expert comes next, 0 to 1, `[n_to]`:
    ///
    /// the mean over the experts i used now of (M\[i\]\[e\] + 2·prior(e)) / (n\[i\] + 2), see docs/policy.md, Score.
    /// `prior` times `scale` is the uses per call of each expert; it stands alone where nothing was used now.
    pub fn chances(&self, now: &[Expert], prior: &[f32], scale: f32, chances: &mut [f32]) {
        let rows = || now.iter().filter_map(|expert| Some((expert, *self.uses.get(usize::from(expert.0))?)));
        self.touch(now);
        let n_rows = rows().count().max(1) as f32;
        let weight = |uses: u8| 1.0 / ((f32::from(uses) + PRIOR_USES) * n_rows);
        let of_prior: f32 = rows().map(|(_, uses)| PRIOR_USES * weight(uses)).sum();
        let of_prior = scale * if of_prior > 0.0 { of_prior } else { 1.0 };
        for (chance, prior) in chances.iter_mut().zip(prior) {
            *chance = prior * of_prior;
        }
        for (expert, uses) in rows() {
            let weight = weight(uses);
            let row = &self.counts[usize::from(expert.0) * self.n_to..][..self.n_to];
            for (chance, &count) in chances.iter_mut().zip(row) {
                *chance += f32::from(count) * weight;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chances(transitions: &Transitions, now: &[u16], prior: &[f32]) -> Vec<f32> {
        let now: Vec<_> = now.iter().copied().map(Expert).collect();
        let mut chances = vec![9.0; prior.len()];
        transitions.chances(&now, prior, 1.0, &mut chances);
        chances
    }

    #[test]
    fn chances_are_those_of_the_formula() {
        let mut transitions = Transitions::new(2, 3);
        transitions.record(&[Expert(0), Expert(1)], &[Expert(2)]);
        transitions.record(&[Expert(0)], &[Expert(1), Expert(2)]);
        let expected = [(0.2, 0.2), (1.2, 0.2), (2.2, 1.2)].map(|(of_0, of_1)| (of_0 / 4.0 + of_1 / 3.0) / 2.0);
        for (found, expected) in chances(&transitions, &[0, 1], &[0.1; 3]).into_iter().zip(expected) {
            assert!((found - expected as f32).abs() < 1e-6, "{found} {expected}");
        }
    }

    #[test]
    fn without_experts_the_prior_stands_alone() {
        assert_eq!(chances(&Transitions::new(2, 2), &[], &[0.5, 0.25]), [0.5, 0.25]);
        assert_eq!(chances(&Transitions::new(2, 2), &[7], &[0.5, 0.25]), [0.5, 0.25], "out of range");
    }

    #[test]
    fn a_new_habit_replaces_an_old_one() {
        let mut transitions = Transitions::new(1, 2);
        (0..1000).for_each(|_| transitions.record(&[Expert(0)], &[Expert(0)]));
        (0..1000).for_each(|_| transitions.record(&[Expert(0)], &[Expert(1)]));
        let chances = chances(&transitions, &[0], &[0.0; 2]);
        assert!(chances[0] < 0.02 && chances[1] > 0.9, "{chances:?}");
    }
}
