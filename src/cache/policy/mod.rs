//! Which experts of one layer are worth a slot: policies that score experts, and the rule that decides on a copy.
//!
//! A [`Policy`] is told what was used and scores every expert. A [`Decider`] joins one with an [`Admission`], which says
//! whether a missed expert is worth its copy. Each layer has its own. All of it is pure and deterministic, and after
//! construction nothing here allocates. Knows no slots, copies, bytes or clocks: those are the caller's.

mod admission;
mod belady;
mod blend;
mod decayed;
mod decider;
mod fixed;
mod lfu;
mod look_ahead;
mod lru;
mod standing;
#[cfg(test)]
mod tests;
mod transitions;

pub use admission::{Admission, CopyCost};
pub use belady::Belady;
pub use blend::{Blend, Weights};
pub use decider::{Decider, Wish};
pub use fixed::Fixed;
pub use lfu::Lfu;
pub use look_ahead::LookAhead;
pub use lru::Lru;
pub use standing::{ranks, worth_of_ranks};

use super::Expert;

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
    fn standing(&self) -> &[f32];

    /// Begins with what an earlier run found: uses per call that are expected of each expert, 0 to 1, `[n_expert]`.
    ///
    /// It counts as much as a few calls do, see [`SEED_CALLS`], and decays like everything else.
    fn seed(&mut self, worth: &[f32]);
}

/// How many calls a seed counts for. Few: lifetime counts as they are cost hits (field.md, lesson 6).
pub const SEED_CALLS: f32 = 8.0;

impl<P: Policy + ?Sized> Policy for Box<P> {
    fn observe(&mut self, used: &[Expert]) {
        (**self).observe(used);
    }

    fn scores(&mut self) -> &[f32] {
        (**self).scores()
    }

    fn standing(&self) -> &[f32] {
        (**self).standing()
    }

    fn seed(&mut self, worth: &[f32]) {
        (**self).seed(worth);
    }
}
