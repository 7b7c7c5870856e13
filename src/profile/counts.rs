//! Counters of one layer. A short lock keeps ids and calls of one batch together; nothing waits while holding it.

use crate::{Error, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What one kind of batch asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Expert FFNs computed.
    pub calls: u64,
    /// Requests per expert, `[n_expert]`.
    pub experts: Box<[u64]>,
}

/// Batches are counted apart by size. Larger ones are stock's and not seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Batches of one token.
    pub single: Counter,
    /// Two tokens up to the op-offload threshold minus one.
    pub multi: Counter,
    /// Requests of both kinds whose expert was resident, per expert, `[n_expert]`.
    pub hot: Box<[u64]>,
}

impl Counts {
    /// What has been counted since `earlier`, a snapshot of the same layer.
    pub fn since(&self, earlier: &Self) -> Self {
        let less =
            |now: &[u64], then: &[u64]| now.iter().zip(then).map(|(now, then)| now.saturating_sub(*then)).collect();
        let counter = |now: &Counter, then: &Counter| Counter {
            calls: now.calls.saturating_sub(then.calls),
            experts: less(&now.experts, &then.experts),
        };
        Self {
            single: counter(&self.single, &earlier.single),
            multi: counter(&self.multi, &earlier.multi),
            hot: less(&self.hot, &earlier.hot),
        }
    }

    /// Calls of both kinds.
    pub fn calls(&self) -> u64 {
        self.single.calls + self.multi.calls
    }

    /// Requests per expert of both kinds, `[n_expert]`.
    pub fn experts(&self) -> impl Iterator<Item = u64> {
        self.single.experts.iter().zip(&self.multi.experts).map(|(a, b)| a + b)
    }
}

/// Requests per expert of one layer, counted by every context that decodes.
pub struct LayerCounts {
    layer: u32,
    n_expert: u32,
    counts: Mutex<Counts>,
}

impl LayerCounts {
    /// All zero.
    pub fn new(layer: u32, n_expert: u32) -> Self {
        let zeros: Box<[u64]> = vec![0; n_expert as usize].into();
        let zero = Counter { calls: 0, experts: zeros.clone() };
        Self { layer, n_expert, counts: Mutex::new(Counts { single: zero.clone(), multi: zero, hot: zeros }) }
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
    ///
    /// `requests` yields each id and whether it was resident. Returns the calls so far.
    pub fn add(&self, n_tokens: usize, requests: impl Iterator<Item = (i32, bool)>) -> u64 {
        let mut counts = self.lock();
        let Counts { single, multi, hot } = &mut *counts;
        let counter = if n_tokens == 1 { single } else { multi };
        for (id, is_hot) in requests {
            let Ok(expert) = usize::try_from(id) else { continue };
            if let (Some(count), Some(hot)) = (counter.experts.get_mut(expert), hot.get_mut(expert)) {
                *count += 1;
                *hot += u64::from(is_hot);
            }
        }
        counter.calls += 1;
        counts.calls()
    }

    /// Everything counted so far, with whole batches only.
    pub fn snapshot(&self) -> Counts {
        self.lock().clone()
    }

    /// Calls of both kinds so far.
    pub fn calls(&self) -> u64 {
        self.lock().calls()
    }

    /// Requests of both kinds so far, and those of them whose expert was resident.
    pub fn requests_and_hits(&self) -> (u64, u64) {
        let counts = self.lock();
        (counts.experts().sum(), counts.hot.iter().sum())
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks that every id names one of a layer's `n_expert` experts.
///
/// `ids` yields `(k, token, id)`, `k` being the index within the token's top-k. Fails with the first bad id.
pub fn check_ids(layer: u32, n_expert: u32, mut ids: impl Iterator<Item = (usize, usize, i32)>) -> Result<()> {
    match ids.find(|&(_, _, id)| !u32::try_from(id).is_ok_and(|id| id < n_expert)) {
        None => Ok(()),
        Some((k, token, id)) => Err(Error::ExpertId { layer, id, k, token, n_expert }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[i32]) -> impl Iterator<Item = (usize, usize, i32)> {
        ids.iter().enumerate().map(|(k, &id)| (k, 0, id))
    }

    fn cold(ids: &[i32]) -> impl Iterator<Item = (i32, bool)> {
        ids.iter().map(|&id| (id, false))
    }

    #[test]
    fn batches_of_one_and_of_more_are_counted_apart() {
        let counts = LayerCounts::new(3, 4);
        counts.add(1, cold(&[0, 3]));
        counts.add(5, [(3, true), (3, false), (1, true)].into_iter());
        let counts = counts.snapshot();
        assert_eq!(counts.hot, [0, 1, 0, 1].into());
        assert_eq!(counts.single, Counter { calls: 1, experts: [1, 0, 0, 1].into() });
        assert_eq!(counts.multi, Counter { calls: 1, experts: [0, 1, 0, 2].into() });
        assert_eq!((counts.calls(), counts.experts().collect::<Vec<_>>()), (2, vec![1, 1, 0, 3]));
    }

    #[test]
    fn what_came_after_a_snapshot_is_told_from_what_was_before() {
        let counts = LayerCounts::new(0, 2);
        counts.add(1, cold(&[0]));
        let before = counts.snapshot();
        counts.add(2, [(1, true), (0, false)].into_iter());
        let since = counts.snapshot().since(&before);
        assert_eq!((since.calls(), since.experts().collect::<Vec<_>>(), since.hot), (1, vec![1, 1], [0, 1].into()));
        assert_eq!(counts.requests_and_hits(), (3, 1));
    }

    #[test]
    fn an_id_outside_the_layer_is_an_error_that_names_it() {
        assert!(check_ids(7, 4, ids(&[0, 1, 2, 3])).is_ok());
        for bad in [4, -1, i32::MIN, i32::MAX] {
            let message = check_ids(7, 4, ids(&[0, bad])).unwrap_err().to_string();
            assert!(message.contains("layer 7") && message.contains(&format!("id {bad} ")), "{message}");
        }
    }

    #[test]
    fn a_snapshot_taken_while_others_count_holds_whole_batches_only() {
        const BATCHES: u64 = 20_000;
        let counts = LayerCounts::new(0, 8);
        std::thread::scope(|scope| {
            for first in [0, 4] {
                let counts = &counts;
                scope.spawn(move || {
                    for _ in 0..BATCHES {
                        counts.add(1, cold(&[first, first + 1, first + 2]));
                    }
                });
            }
            while counts.calls() < 2 * BATCHES {
                let seen = counts.snapshot();
                assert_eq!(seen.experts().sum::<u64>(), 3 * seen.calls());
            }
        });
    }
}
