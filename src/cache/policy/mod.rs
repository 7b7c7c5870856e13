//! Which experts of one layer are worth a slot: policies that score experts, and the rule that decides on a copy.
//!
//! A [`Policy`] is told what was used and scores every expert. A [`ReplacementPolicy`] joins one with an [`AdmissionRule`], which says
//! whether a missed expert is worth its copy. Each layer has its own. All of it is pure and deterministic, and after
//! construction nothing here allocates. Knows no slots, copies, bytes or clocks: those are the caller's.

mod admission;
mod blend;
mod decayed;
mod ranks;
mod replacement;
mod transitions;

pub use admission::{AdmissionRule, CopyCost};
pub use blend::{Blend, Weights};
pub use decayed::Decayed;
pub use ranks::{ranks, worth_of_ranks};
pub use replacement::{Admission, ReplacementPolicy};
pub use transitions::Transitions;

use crate::units::Expert;

/// Scores the experts of one layer.
///
/// A **call** is one run of the layer's expert FFN: one token, or a small batch of them.
pub trait Policy {
    /// Takes note of one call: the experts it used, each once, in the router's order. Ids out of range are passed over.
    fn observe(&mut self, used: &[Expert]);

    /// What keeping each expert is worth now, `[n_expert]`; the higher the better.
    ///
    /// Scores of one moment can be compared with each other only. At most O(`n_expert` · k), and only after an `observe`.
    fn scores(&mut self) -> &[f32];

    /// What each expert is worth apart from the present moment, `[n_expert]`: what an earlier run is remembered by.
    fn long_term_scores(&self) -> &[f32];

    /// Begins with what an earlier run found: uses per call that are expected of each expert, 0 to 1, `[n_expert]`.
    ///
    /// It counts as much as a few calls do, see [`SEED_CALLS`], and decays like everything else.
    fn seed(&mut self, worth: &[f32]);
}

/// How many calls a seed counts for. Few: lifetime counts as they are cost hits (docs/policy.md, Ranks and seed).
pub const SEED_CALLS: f32 = 8.0;

impl<P: Policy + ?Sized> Policy for Box<P> {
    fn observe(&mut self, used: &[Expert]) {
        (**self).observe(used);
    }

    fn scores(&mut self) -> &[f32] {
        (**self).scores()
    }

    fn long_term_scores(&self) -> &[f32] {
        (**self).long_term_scores()
    }

    fn seed(&mut self, worth: &[f32]) {
        (**self).seed(worth);
    }
}
