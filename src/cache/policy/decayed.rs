//! Counters that forget: each call counts less the longer ago it was.

use super::SEED_CALLS;
use crate::units::Expert;

/// Counters are scaled down once one call has grown to this.
const MAX_STEP: f32 = (1u64 << 40) as f32;
/// What scaling leaves below this is forgotten; keeps counters out of the denormal numbers, which are slow.
const FORGOTTEN: f32 = 1.0 / MAX_STEP;

/// One counter per expert and one for calls, all of which decay by the same factor per call.
///
/// Instead of making every counter smaller, each call counts more than the one before: a call touches the experts it
/// used and no others.
#[derive(Clone, Debug)]
pub struct Decayed {
    counts: Box<[f32]>,
    /// Decayed number of calls, in the same scale as `counts`.
    calls: f32,
    /// What the next call counts.
    step: f32,
    /// `step` grows by this per call: 1 / decay.
    growth: f32,
}

impl Decayed {
    /// All zero. `decay` per call, above 0 and at most 1.
    pub fn new(n_expert: u16, decay: f32) -> Self {
        Self { counts: vec![0.0; n_expert.into()].into(), calls: 0.0, step: 1.0, growth: 1.0 / decay }
    }

    /// Counts one call.
    pub fn add(&mut self, used: &[Expert]) {
        for expert in used {
            if let Some(count) = self.counts.get_mut(usize::from(expert.0)) {
                *count += self.step;
            }
        }
        self.calls += self.step;
        self.step *= self.growth;
        if self.step >= MAX_STEP {
            self.scale_down();
        }
    }

    /// Decayed uses per expert; divided by the decayed number of calls they are uses per call.
    pub fn counts(&self) -> &[f32] {
        &self.counts
    }

    /// What turns [`Self::counts`] into uses per call; 0 before the first call.
    pub fn per_call(&self) -> f32 {
        if self.calls > 0.0 { 1.0 / self.calls } else { 0.0 }
    }

    /// As if [`SEED_CALLS`] calls had used each expert as often as `worth` says, in uses per call.
    pub fn seed(&mut self, worth: &[f32]) {
        for (count, worth) in self.counts.iter_mut().zip(worth) {
            *count += SEED_CALLS * self.step * worth;
        }
        self.calls += SEED_CALLS * self.step;
    }

    fn scale_down(&mut self) {
        let scale = 1.0 / self.step;
        for count in &mut self.counts {
            *count *= scale;
            if *count < FORGOTTEN {
                *count = 0.0;
            }
        }
        self.calls *= scale;
        self.step = 1.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses_per_call(decayed: &Decayed, expert: usize) -> f32 {
        decayed.counts()[expert] * decayed.per_call()
    }

    #[test]
    fn counts_are_those_of_a_counter_that_is_multiplied_by_the_decay_each_call() {
        for decay in [0.5f32, 0.93, 1.0] {
            let mut lazy = Decayed::new(2, decay);
            let (mut count, mut calls) = (0.0f64, 0.0f64);
            for call in 0..5000 {
                let used: &[Expert] = if call % 3 == 0 { &[Expert(1)] } else { &[Expert(0)] };
                lazy.add(used);
                count = count * f64::from(decay) + f64::from(u8::from(call % 3 == 0));
                calls = calls * f64::from(decay) + 1.0;
                let difference = f64::from(uses_per_call(&lazy, 1)) - count / calls;
                assert!(difference.abs() < 1e-4, "call {call}: {difference}");
            }
        }
    }

    #[test]
    fn an_expert_unused_for_long_is_forgotten_entirely() {
        let mut decayed = Decayed::new(2, 0.9);
        decayed.add(&[Expert(0)]);
        (0..1000).for_each(|_| decayed.add(&[Expert(1)]));
        assert_eq!(decayed.counts()[0], 0.0);
        assert!((uses_per_call(&decayed, 1) - 1.0).abs() < 1e-5);
    }

    #[test]
    fn a_seed_fades() {
        let mut decayed = Decayed::new(2, 0.96);
        decayed.seed(&[0.5, 0.0]);
        assert_eq!(uses_per_call(&decayed, 0), 0.5);
        (0..200).for_each(|_| decayed.add(&[Expert(1)]));
        assert!(uses_per_call(&decayed, 0) < 0.001);
    }
}
