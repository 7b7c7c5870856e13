//! When a model's cache is to be filled: at first, and again when what belongs in it has changed.

use crate::ggml::{Level, log};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// How often one model's cache is filled anew at most: adapters that come and go must not keep the bus busy.
const MAX_REFILLS: u64 = 64;

/// Whether a model's cache is to be filled, and from when on.
#[derive(Debug)]
pub struct Refill {
    is_wanted: AtomicBool,
    /// A fill has been begun, and its memory is not taken yet.
    is_under_way: AtomicBool,
    /// How often a refill has been asked for.
    n_refills: AtomicU64,
    /// Set when a fill is asked for: the first layer that computes after that is the one whose calls are counted.
    is_new: AtomicBool,
    /// That layer's number.
    counted: AtomicU32,
    /// Its calls when the fill was asked for.
    calls_before: AtomicU64,
}

impl Default for Refill {
    /// A first fill is wanted.
    fn default() -> Self {
        Self {
            is_wanted: AtomicBool::new(true),
            is_under_way: AtomicBool::new(false),
            n_refills: AtomicU64::new(0),
            is_new: AtomicBool::new(true),
            counted: AtomicU32::new(0),
            calls_before: AtomicU64::new(0),
        }
    }
}

impl Refill {
    /// Asks for another fill. A bounded number of times: the last one says that there will be no more.
    pub fn want(&self) {
        if self.is_wanted.load(Relaxed) {
            self.is_new.store(true, Relaxed);
            return;
        }
        match self.n_refills.fetch_add(1, Relaxed) {
            n if n < MAX_REFILLS => {
                self.is_new.store(true, Relaxed);
                self.is_wanted.store(true, Relaxed);
            }
            MAX_REFILLS => log(
                Level::Warn,
                &format!(
                    "no hot cache any more for this model: it was filled anew {MAX_REFILLS} times (adapters that come and \
                     go); experts run on the CPU"
                ),
            ),
            _ => {}
        }
    }

    /// Asks for another fill because the user wants one: as often as he does.
    pub fn want_again(&self) {
        self.is_new.store(true, Relaxed);
        self.is_wanted.store(true, Relaxed);
    }

    /// Whether the cache is still to be filled.
    pub fn is_wanted(&self) -> bool {
        self.is_wanted.load(Relaxed)
    }

    /// Whether its memory is still to be taken.
    pub fn is_pending(&self) -> bool {
        self.is_wanted() || self.is_under_way.load(Relaxed)
    }

    /// The memory has been taken, or will not be.
    pub fn settle(&self) {
        self.is_under_way.store(false, Relaxed);
    }

    /// Whether the cache is to be filled now: once, with the `n`-th call of a layer since it was asked for. `calls`: of this
    /// layer so far.
    pub fn take(&self, layer: u32, calls: u64, n: u64) -> bool {
        if !self.is_wanted.load(Relaxed) {
            return false;
        }
        if self.is_new.swap(false, Relaxed) {
            self.counted.store(layer, Relaxed);
            self.calls_before.store(calls.saturating_sub(1), Relaxed);
        }
        let is_now = self.counted.load(Relaxed) == layer
            && calls >= n.saturating_add(self.calls_before.load(Relaxed))
            && self.is_wanted.swap(false, Relaxed);
        if is_now {
            self.is_under_way.store(true, Relaxed);
        }
        is_now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fill_is_taken_once_and_after_so_many_calls() {
        let refill = Refill::default();
        assert_eq!([1, 2, 3, 4].map(|calls| refill.take(0, calls, 3)), [false, false, true, false]);
    }

    #[test]
    fn one_layer_counts_whatever_others_have_computed() {
        let refill = Refill::default();
        assert!(!refill.take(1, 1, 3));
        assert!(!refill.take(2, 9, 3));
        assert!(refill.take(1, 3, 3));
    }

    #[test]
    fn a_refill_waits_for_as_many_calls_again() {
        let refill = Refill::default();
        assert!(refill.take(0, 3, 1));
        refill.want();
        assert_eq!([10, 11, 12, 13].map(|calls| refill.take(0, calls, 3)), [false, false, true, false]);
    }

    #[test]
    fn asking_again_before_the_fill_does_not_count() {
        let refill = Refill::default();
        (0..2 * MAX_REFILLS).for_each(|_| refill.want());
        assert!(refill.take(0, 0, 0), "it was never filled anew");
    }

    #[test]
    fn there_is_an_end_to_refills() {
        let refill = Refill::default();
        assert!(refill.take(0, 0, 0), "the first fill");
        for _ in 0..MAX_REFILLS {
            refill.want();
            assert!(refill.take(0, 0, 0));
        }
        refill.want();
        assert!(!refill.take(0, u64::MAX, 0));
    }
}
