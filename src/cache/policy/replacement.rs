//! Policy and admission together: what the engine, and replay, ask after each call of a layer.

use super::Policy;
use super::admission::{AdmissionRule, CopyCost};
use super::blend::{Blend, Weights};
use crate::units::Expert;

/// A copy that is worth its price.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The expert to copy.
    pub admit: Expert,
    /// The expert that it outdoes; `None` if a slot is free.
    ///
    /// Whoever keeps it serving until the copy is complete should ask [`ReplacementPolicy::worst`] again then.
    pub evict: Option<Expert>,
}

/// Decides for one layer. Per call: [`Self::observe`] once, then [`Self::admission`] for each copy that may start.
#[derive(Clone, Debug)]
pub struct ReplacementPolicy<P> {
    policy: P,
    admission: AdmissionRule,
}

impl ReplacementPolicy<Blend> {
    /// The default policy.
    pub fn fitting(n_expert: u16, cost: CopyCost) -> Self {
        Self::new(Blend::new(n_expert, Weights::fitting(cost)), AdmissionRule::priced(cost))
    }

    /// Copies turned out to cost this much. What was learnt stays.
    pub fn set_cost(&mut self, cost: CopyCost) {
        self.policy.set_weights(Weights::fitting(cost));
        self.admission = AdmissionRule::priced(cost);
    }
}

impl<P: Policy> ReplacementPolicy<P> {
    /// Joins the two.
    pub fn new(policy: P, admission: AdmissionRule) -> Self {
        Self { policy, admission }
    }

    /// Takes note of one call: the experts it used, each once, in the router's order.
    pub fn observe(&mut self, used: &[Expert]) {
        self.policy.observe(used);
    }

    /// The copy to start now, if one pays: the best of the `missed` experts, and what it replaces.
    ///
    /// `missed`: experts of the call that are neither resident nor on their way. `held`: those that are. One pass over both.
    pub fn admission(
        &mut self,
        missed: impl IntoIterator<Item = Expert>,
        held: impl IntoIterator<Item = Expert>,
        has_free_slot: bool,
    ) -> Option<Admission> {
        let (admit, newcomer) = self.best(missed)?;
        if has_free_slot {
            return Some(Admission { admit, evict: None });
        }
        let (evict, resident) = self.least(held)?;
        self.admission.admits(newcomer, resident).then_some(Admission { admit, evict: Some(evict) })
    }

    /// The expert to evict: the first with the lowest score. `None` if `held` is empty.
    pub fn worst(&mut self, held: impl IntoIterator<Item = Expert>) -> Option<Expert> {
        self.least(held).map(|(expert, _)| expert)
    }

    /// The scores, `[n_expert]`.
    pub fn scores(&mut self) -> &[f32] {
        self.policy.scores()
    }

    /// What an earlier run is remembered by; [`super::ranks()`] makes it fit for a profile.
    pub fn long_term_scores(&self) -> &[f32] {
        self.policy.long_term_scores()
    }

    /// Begins with what an earlier run found, see [`Policy::seed`] and [`super::worth_of_ranks`].
    pub fn seed(&mut self, worth: &[f32]) {
        self.policy.seed(worth);
    }

    /// The first with the highest score.
    fn best(&mut self, experts: impl IntoIterator<Item = Expert>) -> Option<(Expert, f32)> {
        self.first(experts, |score, best| score > best)
    }

    /// The first with the lowest score.
    fn least(&mut self, experts: impl IntoIterator<Item = Expert>) -> Option<(Expert, f32)> {
        self.first(experts, |score, least| score < least)
    }

    fn first(
        &mut self,
        experts: impl IntoIterator<Item = Expert>,
        is_before: impl Fn(f32, f32) -> bool,
    ) -> Option<(Expert, f32)> {
        let mut experts = experts.into_iter().peekable();
        experts.peek()?; // scores are worked out only where they are wanted
        let scores = self.policy.scores();
        let scored = experts.filter_map(|expert| Some((expert, *scores.get(usize::from(expert.0))?)));
        scored.reduce(|chosen, next| if is_before(next.1, chosen.1) { next } else { chosen })
    }
}
