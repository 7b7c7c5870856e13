//! Notices that llama.cpp decodes and hands us no expert layer, though experts lie in our memory: a cache of its own has them.
//!
//! Before each batch llama.cpp sets every context's threads. For each graph that it builds anew, it asks about the operations
//! on our weights, large batches' too, which are not ours. So batches that go by without such a question are computed by other
//! means, or with a graph of a large batch that is used again.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// So many batches in a row without a question are worth a line. More than a draft without experts makes between two batches of
/// its main model, fewer than llama.cpp decodes with one graph (256 tokens).
pub(super) const MAX_UNASKED_BATCHES: u32 = 128;

/// Counts what llama.cpp decodes without a question about our weights.
#[derive(Default)]
pub(super) struct Bypass {
    /// Batches since the last question.
    unasked: AtomicU32,
    /// Whether ever more than the one batch that a question was about went by.
    has_unasked: AtomicBool,
}

impl Bypass {
    /// A batch is about to be computed. Whether there have now been `MAX_UNASKED_BATCHES` since the last question.
    pub fn count_batch(&self) -> bool {
        let unasked = self.unasked.fetch_add(1, Relaxed).saturating_add(1);
        if unasked == 2 {
            self.has_unasked.store(true, Relaxed);
        }
        unasked == MAX_UNASKED_BATCHES
    }

    /// llama.cpp has asked about an operation on weights of ours.
    pub fn asked(&self) {
        self.unasked.store(0, Relaxed);
    }

    /// Whether a batch was computed that llama.cpp has asked nothing about.
    pub fn has_unasked(&self) -> bool {
        self.has_unasked.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_batches_without_a_question_are_noticed_once() {
        let bypass = Bypass::default();
        let noticed = (1..1000).filter(|_| bypass.count_batch()).count();
        assert_eq!((noticed, bypass.has_unasked()), (1, true));
    }

    #[test]
    fn batches_that_are_asked_about_are_not() {
        let bypass = Bypass::default();
        for _ in 0..1000 {
            bypass.asked();
            assert!(!bypass.count_batch());
        }
        assert!(!bypass.has_unasked());
    }
}
