//! Recent use, lasting use, and what tends to follow the experts used now, in one score: docs/policy.md, Score.

use super::Policy;
use super::admission::CopyCost;
use super::decayed::Decayed;
use super::transitions::Transitions;
use crate::units::Expert;

/// Decay per call of the counter for recent use: docs/policy.md, Score.
const FAST_DECAY: f32 = 0.5;
/// Decay per call of the counter for lasting use, which is the prior of the transitions too: docs/policy.md, Score.
const SLOW_DECAY: f32 = 0.96;

/// How much each part counts. They add up to 1, so that a score is in uses per call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Recent use.
    pub fast: f32,
    /// Lasting use.
    pub slow: f32,
    /// Following the experts used now.
    pub transition: f32,
}

impl Weights {
    /// 0.3, 0.7 and 2 (docs/policy.md, Score), divided by their sum. Best where copies are free and at once.
    pub const QUICK: Self = Self { fast: 0.1, slow: 0.7 / 3.0, transition: 2.0 / 3.0 };
    /// Best where copies are dear or late: what holds for the next call only is no reason for a copy.
    ///
    /// Picked with both traces in view; none was held out, see docs/replay.md.
    pub const STEADY: Self = Self { fast: 0.0, slow: 2.0 / 3.0, transition: 1.0 / 3.0 };

    /// Between [`Self::QUICK`] and [`Self::STEADY`], as copies are on this machine.
    pub fn fitting(cost: CopyCost) -> Self {
        let steady = cost.steadiness();
        let between = |quick: f32, last: f32| quick + (last - quick) * steady;
        Self {
            fast: between(Self::QUICK.fast, Self::STEADY.fast),
            slow: between(Self::QUICK.slow, Self::STEADY.slow),
            transition: between(Self::QUICK.transition, Self::STEADY.transition),
        }
    }
}

/// The policy with these three parts.
#[derive(Clone, Debug)]
pub struct Blend {
    weights: Weights,
    fast: Decayed,
    slow: Decayed,
    transitions: Transitions,
    /// The experts of the last call, at most `n_expert`.
    now: Vec<Expert>,
    scores: Box<[f32]>,
    is_stale: bool,
}

impl Blend {
    /// Nothing used yet. Takes `n_expert`² bytes.
    pub fn new(n_expert: u16, weights: Weights) -> Self {
        Self {
            weights,
            fast: Decayed::new(n_expert, FAST_DECAY),
            slow: Decayed::new(n_expert, SLOW_DECAY),
            transitions: Transitions::new(n_expert, n_expert),
            now: Vec::with_capacity(n_expert.into()),
            scores: vec![0.0; n_expert.into()].into(),
            is_stale: false,
        }
    }

    /// Other weights from now on; what was learnt stays.
    pub fn set_weights(&mut self, weights: Weights) {
        self.weights = weights;
        self.is_stale = true;
    }

    fn score(&mut self) {
        let Weights { fast, slow, transition } = self.weights;
        let per_call = self.slow.per_call();
        self.transitions.chances(&self.now, self.slow.counts(), per_call, &mut self.scores);
        let (fast, slow) = (fast * self.fast.per_call(), slow * per_call);
        for ((score, count_fast), count_slow) in self.scores.iter_mut().zip(self.fast.counts()).zip(self.slow.counts())
        {
            *score = transition * *score + fast * count_fast + slow * count_slow;
        }
    }
}

impl Policy for Blend {
    fn observe(&mut self, used: &[Expert]) {
        self.fast.add(used);
        self.slow.add(used);
        self.transitions.record(&self.now, used);
        self.now.clear();
        self.now.extend(used.iter().take(self.scores.len()));
        self.is_stale = true;
    }

    fn scores(&mut self) -> &[f32] {
        if std::mem::take(&mut self.is_stale) {
            self.score();
        }
        &self.scores
    }

    fn long_term_scores(&self) -> &[f32] {
        self.slow.counts()
    }

    fn seed(&mut self, worth: &[f32]) {
        self.slow.seed(worth);
        self.is_stale = true;
    }
}
