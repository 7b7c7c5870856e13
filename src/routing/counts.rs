//! Counters of one layer: relaxed atomics, since several contexts may decode at once. No locks, no allocation.

use crate::{Error, Result};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Batches that are counted apart. Larger ones are stock's and not seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchKind {
    /// One token.
    Single,
    /// Two tokens up to the op-offload threshold minus one.
    Multi,
}

impl BatchKind {
    fn of(n_tokens: usize) -> Self {
        if n_tokens == 1 { Self::Single } else { Self::Multi }
    }
}

struct Counter {
    calls: AtomicU64,
    experts: Box<[AtomicU64]>,
}

impl Counter {
    fn new(n_expert: u32) -> Self {
        Self { calls: AtomicU64::new(0), experts: (0..n_expert).map(|_| AtomicU64::new(0)).collect() }
    }
}

/// Requests per expert of one layer.
pub struct LayerCounts {
    layer: u32,
    n_expert: u32,
    single: Counter,
    multi: Counter,
}

impl LayerCounts {
    /// All zero.
    pub fn new(layer: u32, n_expert: u32) -> Self {
        Self { layer, n_expert, single: Counter::new(n_expert), multi: Counter::new(n_expert) }
    }

    /// Layer number.
    pub fn layer(&self) -> u32 {
        self.layer
    }

    /// Experts in the layer.
    pub fn n_expert(&self) -> u32 {
        self.n_expert
    }

    /// Counts one call with `n_tokens` tokens. Ids outside the layer are passed over.
    pub fn add(&self, n_tokens: usize, ids: impl Iterator<Item = (usize, usize, i32)>) {
        let counter = self.counter(BatchKind::of(n_tokens));
        for (_, _, id) in ids {
            if let Some(count) = usize::try_from(id).ok().and_then(|id| counter.experts.get(id)) {
                count.fetch_add(1, Relaxed);
            }
        }
        counter.calls.fetch_add(1, Relaxed);
    }

    /// Calls counted so far.
    pub fn calls(&self, kind: BatchKind) -> u64 {
        self.counter(kind).calls.load(Relaxed)
    }

    /// Requests per expert so far, `[n_expert]`.
    pub fn experts(&self, kind: BatchKind) -> Vec<u64> {
        self.counter(kind).experts.iter().map(|count| count.load(Relaxed)).collect()
    }

    fn counter(&self, kind: BatchKind) -> &Counter {
        match kind {
            BatchKind::Single => &self.single,
            BatchKind::Multi => &self.multi,
        }
    }
}

/// Checks that every id names one of a layer's `n_expert` experts.
///
/// `ids` yields `(slot, token, id)`. Fails with the first bad id.
pub fn check_ids(layer: u32, n_expert: u32, mut ids: impl Iterator<Item = (usize, usize, i32)>) -> Result<()> {
    match ids.find(|&(_, _, id)| !u32::try_from(id).is_ok_and(|id| id < n_expert)) {
        None => Ok(()),
        Some((slot, token, id)) => Err(Error::ExpertId { layer, id, slot, token, n_expert }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[i32]) -> impl Iterator<Item = (usize, usize, i32)> {
        ids.iter().enumerate().map(|(slot, &id)| (slot, 0, id))
    }

    #[test]
    fn batches_of_one_and_of_more_are_counted_apart() {
        let counts = LayerCounts::new(3, 4);
        counts.add(1, ids(&[0, 3]));
        counts.add(5, ids(&[3, 3, 1]));
        assert_eq!(counts.experts(BatchKind::Single), [1, 0, 0, 1]);
        assert_eq!(counts.experts(BatchKind::Multi), [0, 1, 0, 2]);
        assert_eq!((counts.calls(BatchKind::Single), counts.calls(BatchKind::Multi)), (1, 1));
    }

    #[test]
    fn an_id_outside_the_layer_is_an_error_that_names_it() {
        assert!(check_ids(7, 4, ids(&[0, 1, 2, 3])).is_ok());
        for bad in [4, -1, i32::MIN, i32::MAX] {
            let message = check_ids(7, 4, ids(&[0, bad])).unwrap_err().to_string();
            assert!(message.contains("layer 7") && message.contains(&format!("id {bad} ")), "{message}");
        }
    }
}
