//! Does the cache pay? Compares layer calls with and without it, as the session goes, and says when it loses for long.
//!
//! Pure: times are told, in nanoseconds. Kept by each context for its single-token calls.

use crate::units::Bytes;

/// Where a layer has at most so many experts for each that a token uses, all are used all the time (Mixtral: 2 of 8).
const MAX_EXPERTS_PER_USED: u16 = 4;
/// Bytes of an expert that is large: a miss costs the reading of it, beside which nothing that a cache saves counts.
const MIN_LARGE_EXPERT: Bytes = Bytes::from_mib(32);

/// Whether a layer has so few and large experts that no cache of some of them gains anything (docs/policy.md, Few large experts).
pub fn gains_nothing(n_used: u16, n_expert: u16, expert_bytes: Bytes) -> bool {
    n_used.saturating_mul(MAX_EXPERTS_PER_USED) >= n_expert && expert_bytes >= MIN_LARGE_EXPERT
}

/// Calls that are judged together.
const WINDOW: u32 = 2048;
/// Windows in a row that must be lost before the cache is given up.
const LOST_WINDOWS: u32 = 4;
/// A window is lost if its calls took this many times as long as all-cold ones would have.
const MAX_SLOWDOWN: f64 = 1.05;
/// After so many calls one is computed all-cold, to know what that takes now. A prime, so that it falls on every layer.
const REFERENCE_EVERY: u32 = 251;
/// All-cold calls that must be known before anything is judged.
const MIN_REFERENCES: u32 = 8;
/// The weight of a new all-cold call.
const WEIGHT: f64 = 0.1;

/// The judgement of one context.
#[derive(Clone, Debug, Default)]
pub struct RegressionGuard {
    /// Nanoseconds of an all-cold call.
    cold_ns: f64,
    n_cold: u32,
    calls_since_reference: u32,
    window_ns: f64,
    window_calls: u32,
    lost_windows: u32,
}

/// The cache has lost for long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loss {
    /// Nanoseconds of a layer call with the cache.
    pub ours_ns: f64,
    /// Nanoseconds of an all-cold one.
    pub cold_ns: f64,
}

impl RegressionGuard {
    /// Whether the next call should be computed all-cold, for comparison.
    pub fn wants_reference(&mut self) -> bool {
        self.calls_since_reference += 1;
        if self.calls_since_reference < REFERENCE_EVERY {
            return false;
        }
        self.calls_since_reference = 0;
        true
    }

    /// An all-cold call took so long.
    pub fn was_cold(&mut self, ns: f64) {
        self.n_cold = self.n_cold.saturating_add(1);
        let weight = WEIGHT.max(1.0 / f64::from(self.n_cold));
        self.cold_ns += weight * (ns - self.cold_ns);
    }

    /// A call with the cache took so long. `Some` when it has lost for long; it is told once per loss.
    pub fn was_partitioned(&mut self, ns: f64) -> Option<Loss> {
        self.window_ns += ns;
        self.window_calls += 1;
        if self.window_calls < WINDOW {
            return None;
        }
        let ours_ns = self.window_ns / f64::from(self.window_calls);
        (self.window_ns, self.window_calls) = (0.0, 0);
        let is_lost = self.n_cold >= MIN_REFERENCES && ours_ns > MAX_SLOWDOWN * self.cold_ns;
        self.lost_windows = if is_lost { self.lost_windows + 1 } else { 0 };
        if self.lost_windows < LOST_WINDOWS {
            return None;
        }
        self.lost_windows = 0;
        Some(Loss { ours_ns, cold_ns: self.cold_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(ours_ns: f64, cold_ns: f64, n_calls: u32) -> (RegressionGuard, Option<Loss>) {
        let mut guard = RegressionGuard::default();
        (0..MIN_REFERENCES).for_each(|_| guard.was_cold(cold_ns));
        for _ in 0..n_calls {
            if guard.wants_reference() {
                guard.was_cold(cold_ns);
            } else if let Some(loss) = guard.was_partitioned(ours_ns) {
                return (guard, Some(loss));
            }
        }
        (guard, None)
    }

    const LONG: u32 = 2 * LOST_WINDOWS * WINDOW;

    #[test]
    fn a_cache_that_loses_for_long_is_told_with_both_times() {
        let (_, loss) = session(900.0, 500.0, LONG);
        assert_eq!(loss, Some(Loss { ours_ns: 900.0, cold_ns: 500.0 }));
    }

    #[test]
    fn a_cache_that_wins_or_is_even_is_left_alone() {
        assert_eq!(session(300.0, 500.0, LONG).1, None);
        assert_eq!(session(510.0, 500.0, LONG).1, None, "within noise");
    }

    #[test]
    fn a_bad_moment_is_not_a_loss() {
        let (mut guard, loss) = session(900.0, 500.0, (LOST_WINDOWS - 1) * WINDOW);
        assert_eq!(loss, None);
        assert!((0..LONG).all(|_| guard.was_partitioned(300.0).is_none()));
    }

    #[test]
    fn few_large_experts_are_recognised() {
        let mib = Bytes::from_mib;
        assert!(gains_nothing(2, 8, mib(95)), "Mixtral 8x7B, Q4_K");
        assert!(gains_nothing(4, 16, mib(60)), "DBRX");
        for (n_used, n_expert, expert_bytes) in [(8, 128, mib(2)), (4, 32, mib(13)), (1, 16, mib(80)), (2, 8, mib(1))] {
            assert!(!gains_nothing(n_used, n_expert, expert_bytes), "{n_used} of {n_expert}, {expert_bytes}");
        }
    }

    #[test]
    fn nothing_is_judged_before_all_cold_calls_are_known() {
        let mut guard = RegressionGuard::default();
        assert!((0..LONG).all(|_| guard.was_partitioned(900.0).is_none()));
    }
}
