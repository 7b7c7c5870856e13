//! Never slower: compares layer calls with and without the cache as the session goes, bounds what may be lost while that is
//! not known, and says when the cache loses.
//!
//! Pure: times are told, in nanoseconds. Kept by each context. docs/policy.md, Never slower, has the reasons for the figures.

use crate::units::Bytes;

/// Where a layer has at most so many experts for each that a token uses, all are used all the time (Mixtral: 2 of 8).
const MAX_EXPERTS_PER_USED: u16 = 4;
/// Bytes of an expert that is large: a miss costs the reading of it, beside which nothing that a cache saves counts.
const MIN_LARGE_EXPERT: Bytes = Bytes::from_mib(32);

/// Whether a layer has so few and large experts that no cache of some of them gains anything (docs/policy.md, Few large experts).
pub fn gains_nothing(n_used: u16, n_expert: u16, expert_bytes: Bytes) -> bool {
    n_used.saturating_mul(MAX_EXPERTS_PER_USED) >= n_expert && expert_bytes >= MIN_LARGE_EXPERT
}

/// Tokens whose time may be lost in all before the cache has shown that it pays.
const GRACE_TOKENS: f64 = 6.0;
/// And this share of all time after that.
const MAX_LOSS: f64 = 0.005;
/// A gain can be lost again up to so many times the grace.
const MAX_BALANCE: f64 = 1.0;
/// A cache that makes calls slower by less than this is not said to lose.
const MIN_SLOWDOWN: f64 = 1.03;
/// Calls of either kind that must be known before anything is concluded from their averages ...
const MIN_CALLS: f64 = 24.0;
/// ... which must differ by so many of their standard errors.
const MIN_ERRORS: f64 = 4.0;
/// Of a cache that is far slower, so many calls are enough, ...
const FEW_CALLS: f64 = 3.0;
/// ... if even the fastest of them takes so many times as long as an all-cold one.
const FAR_SLOWER: f64 = 1.5;
/// A cache that has paid is given up after so many calls that lost. Until then it is hardly used.
const LOST_CALLS: u32 = 4096;
/// Calls that averages remember.
const MEMORY: f64 = 512.0;
/// Of so many calls one is computed all-cold, to know what that takes: at first, ...
const REFERENCE_AT_FIRST: u32 = 5;
/// ... where the cache gains less than a tenth, so that a comparison costs little, ...
const REFERENCE_IF_EVEN: u32 = 8;
/// ... and where it gains more.
const REFERENCE_IF_PAYING: u32 = 251;
const EVEN: f64 = 0.9;
/// Batches of a size that is less than one in so many are rare.
const RARE: u32 = 20;

/// An average that follows, and how far single values are from it.
#[derive(Clone, Copy, Debug, Default)]
struct Average {
    n: f64,
    mean: f64,
    variance: f64,
    min: f64,
}

impl Average {
    fn add(&mut self, value: f64) {
        self.min = if self.n == 0.0 { value } else { self.min.min(value) };
        self.n = (self.n + 1.0).min(MEMORY);
        let weight = 1.0 / self.n;
        let off = value - self.mean;
        self.mean += weight * off;
        self.variance = (1.0 - weight) * (self.variance + weight * off * off);
    }

    /// The square of its standard error.
    fn error2(&self) -> f64 {
        self.variance / self.n.max(1.0)
    }
}

/// Calls with batches of about one size.
#[derive(Clone, Debug, Default)]
struct Class {
    ours: Average,
    cold: Average,
    /// What all-cold calls take was measured while the cache was being prepared: there was nothing better.
    is_cold_disturbed: bool,
    /// The cache is being prepared, or has been: the next all-cold call that is not disturbed begins anew.
    is_cold_old: bool,
    /// The cache has been faster beyond doubt.
    has_paid: bool,
    lost_calls: u32,
    is_off: bool,
    n_calls: u32,
    /// Calls that the device had a part in.
    n_on_device: u32,
    /// Calls in a row in which the device would have had more to do than it can in time.
    n_too_large: u32,
}

impl Class {
    /// How many standard errors calls with the cache are slower.
    fn errors(&self) -> f64 {
        let error = (self.ours.error2() + self.cold.error2()).sqrt();
        (self.ours.mean - self.cold.mean) / error.max(f64::MIN_POSITIVE)
    }

    fn is_known(&self) -> bool {
        self.ours.n >= MIN_CALLS && self.cold.n >= MIN_CALLS
    }

    fn loses(&self) -> bool {
        let is_slower = self.ours.mean > MIN_SLOWDOWN * self.cold.mean;
        let is_far_slower =
            self.ours.n >= FEW_CALLS && self.cold.n >= FEW_CALLS && self.ours.min > FAR_SLOWER * self.cold.mean;
        is_far_slower || is_slower && self.is_known() && self.errors() > MIN_ERRORS
    }

    fn reference_every(&self) -> u32 {
        if self.cold.n < MIN_CALLS || self.ours.n < MEMORY {
            REFERENCE_AT_FIRST
        } else if self.ours.mean > EVEN * self.cold.mean {
            REFERENCE_IF_EVEN
        } else {
            REFERENCE_IF_PAYING
        }
    }
}

/// The judgement of one context.
#[derive(Clone, Debug, Default)]
pub struct RegressionGuard {
    /// By size of batch: 1, 2, 3 to 4, 5 to 8 tokens and so on.
    classes: [Class; 6],
    /// Nanoseconds that may still be lost; `None`: nothing is known yet.
    balance_ns: Option<f64>,
    /// MoE layers of the model.
    n_layers: usize,
    /// Of a generator of numbers that look random.
    seed: u32,
}

/// The cache has lost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loss {
    /// Nanoseconds of a layer call with the cache.
    pub ours_ns: f64,
    /// Nanoseconds of an all-cold one.
    pub cold_ns: f64,
    /// Whether batches of another size are common, with which it has not lost: it is then used for those.
    pub is_used_elsewhere: bool,
}

impl RegressionGuard {
    /// Whether the next call may use the device. If not, it is to be computed all-cold: for comparison, or since the cache has
    /// lost as much as it may. `n_layers`: MoE layers of the model.
    pub fn may_use_device(&mut self, n_tokens: usize, n_layers: usize) -> bool {
        self.n_layers = n_layers;
        let balance = self.balance_ns.unwrap_or(0.0);
        let number = self.next_number();
        let class = self.class(n_tokens);
        class.n_calls = class.n_calls.saturating_add(1);
        // The first few calls tell most.
        let is_in_debt = balance < 0.0 && class.n_on_device >= FEW_CALLS as u32;
        let is_reference = class.cold.n == 0.0 || number.is_multiple_of(class.reference_every());
        !(is_in_debt || is_reference || class.is_off)
    }

    /// An all-cold call took so long. `is_undisturbed`: no cache was being filled and no lane made ready beside it. Calls
    /// beside that take longer, and count only if nothing else is known. What came before it counts until it is over: the first
    /// calls of a session take longer, too.
    pub fn was_cold(&mut self, n_tokens: usize, ns: f64, is_undisturbed: bool) {
        let class = self.class(n_tokens);
        if is_undisturbed {
            if std::mem::take(&mut class.is_cold_old) {
                class.cold = Average::default();
            }
            class.is_cold_disturbed = false;
            class.cold.add(ns);
        } else {
            class.is_cold_old = true;
            class.is_cold_disturbed |= class.cold.n < FEW_CALLS;
            if class.is_cold_disturbed {
                class.cold.add(ns);
            }
        }
        self.pay(n_tokens, MAX_LOSS * ns);
    }

    /// A call with the cache took so long. `is_filled`: whether the cache is as it is to be; until then nothing is concluded.
    /// `Some` when it has lost; it is told once.
    pub fn was_partitioned(&mut self, n_tokens: usize, ns: f64, is_filled: bool) -> Option<Loss> {
        let class = self.class(n_tokens);
        class.n_on_device = class.n_on_device.saturating_add(1);
        class.n_too_large = 0;
        let cold_ns = class.cold.mean;
        self.pay(n_tokens, MAX_LOSS * ns - (ns - cold_ns));
        if !is_filled {
            return None;
        }
        let class = self.class(n_tokens);
        class.ours.add(ns);
        class.has_paid |= class.is_known() && class.errors() < -MIN_ERRORS;
        class.lost_calls = if class.loses() { class.lost_calls + 1 } else { 0 };
        let most = if class.has_paid { LOST_CALLS } else { 1 };
        if class.lost_calls < most || class.is_off {
            return None;
        }
        let ours_ns = class.ours.mean;
        Some(self.loss(n_tokens, ours_ns))
    }

    /// Whether the cache is not used for so many tokens any more.
    pub fn has_given_up(&mut self, n_tokens: usize) -> bool {
        self.class(n_tokens).is_off
    }

    /// From how many nanoseconds on the device alone is far slower than an all-cold call; `None`: not known yet.
    pub fn limit_ns(&mut self, n_tokens: usize) -> Option<f64> {
        let cold = &self.class(n_tokens).cold;
        (cold.n >= FEW_CALLS).then_some(FAR_SLOWER * cold.mean)
    }

    /// A call was computed all-cold, since the device would have taken at least so long. `Some` if that has been so, and far
    /// longer than an all-cold call, for many tokens in a row; it is told once.
    pub fn was_too_large(&mut self, n_tokens: usize, ns: f64) -> Option<Loss> {
        let most = MIN_CALLS * self.n_layers.max(1) as f64;
        let class = self.class(n_tokens);
        class.n_too_large = if ns > FAR_SLOWER * class.cold.mean { class.n_too_large.saturating_add(1) } else { 0 };
        (f64::from(class.n_too_large) >= most && !class.is_off).then(|| self.loss(n_tokens, ns))
    }

    /// Forgets what calls with a cache took: there is another one now.
    pub fn forget_cache(&mut self) {
        for class in &mut self.classes {
            *class = Class {
                cold: class.cold,
                is_cold_disturbed: class.is_cold_disturbed,
                is_cold_old: class.is_cold_old,
                n_calls: class.n_calls,
                ..Class::default()
            };
        }
        self.balance_ns = None;
    }

    /// The device alone takes at least so long for a call, as was measured before any token used it. `Some` if that is far
    /// longer than an all-cold call; it is told once.
    pub fn device_takes(&mut self, n_tokens: usize, ns: f64) -> Option<Loss> {
        let class = self.class(n_tokens);
        let is_hopeless = class.cold.n >= FEW_CALLS && ns > FAR_SLOWER * class.cold.mean;
        (is_hopeless && !class.is_off).then(|| self.loss(n_tokens, ns))
    }

    fn loss(&mut self, n_tokens: usize, ours_ns: f64) -> Loss {
        let class = self.class(n_tokens);
        class.is_off = true;
        let cold_ns = class.cold.mean;
        let n_calls: u32 = self.classes.iter().map(|class| class.n_calls).sum();
        let is_common = |class: &Class| class.n_calls > n_calls / RARE;
        let is_used_elsewhere = self.classes.iter().any(|class| !class.is_off && is_common(class));
        Loss { ours_ns, cold_ns, is_used_elsewhere }
    }

    /// Adds to what may still be lost.
    fn pay(&mut self, n_tokens: usize, ns: f64) {
        let token_ns = self.class(n_tokens).cold.mean * self.n_layers as f64 / n_tokens.max(1) as f64;
        let grace = GRACE_TOKENS * token_ns;
        if self.n_layers == 0 {
            return;
        }
        let balance = self.balance_ns.unwrap_or(grace) + ns;
        self.balance_ns = Some(balance.min(MAX_BALANCE * grace));
    }

    fn class(&mut self, n_tokens: usize) -> &mut Class {
        let index = n_tokens.max(1).next_power_of_two().trailing_zeros() as usize;
        let last = self.classes.len() - 1;
        &mut self.classes[index.min(last)]
    }

    fn next_number(&mut self) -> u32 {
        // A linear congruential generator; its upper bits are the better ones. (Numerical Recipes, 2nd edition, 7.1.)
        self.seed = self.seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.seed >> 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const N_LAYERS: usize = 6;
    const COLD_NS: f64 = 100e3;

    /// What a session of so many tokens took, in all-cold tokens, and after how many tokens the cache was given up.
    struct Session {
        cost: f64,
        lost_after: Option<usize>,
    }

    /// Calls that take as long as `ours` and `cold` say, each 20 % more or less.
    fn session(n_tokens: usize, ours: impl Fn(usize) -> f64, seed: u64) -> Session {
        let (mut guard, mut total, mut lost_after) = (RegressionGuard::default(), 0.0, None);
        let mut noise = fastrand::Rng::with_seed(seed);
        for token in 0..n_tokens {
            for _ in 0..N_LAYERS {
                let spread = 0.8 + 0.4 * noise.f64();
                // Filled after three calls, as caches are.
                if token >= 3 && lost_after.is_none() && guard.may_use_device(1, N_LAYERS) {
                    let ns = ours(token) * COLD_NS * spread;
                    total += ns;
                    if guard.was_partitioned(1, ns, true).is_some() {
                        lost_after = Some(token);
                    }
                } else {
                    total += COLD_NS * spread;
                    guard.was_cold(1, COLD_NS * spread, true);
                }
            }
        }
        Session { cost: total / (COLD_NS * N_LAYERS as f64), lost_after }
    }

    fn seeds() -> std::ops::Range<u64> {
        0..20
    }

    #[test]
    fn a_loss_of_a_quarter_and_more_is_seen_within_64_tokens() {
        for slowdown in [1.25, 1.5, 2.5, 24.0] {
            for seed in seeds() {
                let lost_after = session(500, |_| slowdown, seed).lost_after;
                assert!(lost_after.is_some_and(|token| token < 64), "{slowdown} times: {lost_after:?}");
            }
        }
    }

    #[test]
    fn a_loss_above_three_percent_is_seen_within_500_tokens() {
        for slowdown in [1.06, 1.1] {
            let seen = seeds().filter(|&seed| session(500, |_| slowdown, seed).lost_after.is_some()).count();
            assert!(seen >= 18, "{slowdown} times: {seen} of 20");
        }
    }

    #[test]
    fn whatever_the_cache_costs_500_tokens_take_no_more_than_three_percent_longer() {
        for slowdown in [1.0, 1.02, 1.04, 1.1, 1.25, 1.5, 2.5, 10.0, 24.0] {
            for seed in seeds() {
                let cost = session(500, |_| slowdown, seed).cost / session(500, |_| 1.0, seed).cost;
                assert!(cost < 1.03, "{slowdown} times: {cost}");
            }
        }
    }

    #[test]
    fn a_cache_that_pays_is_kept_and_hardly_disturbed() {
        for seed in seeds() {
            let Session { cost, lost_after } = session(500, |_| 0.5, seed);
            assert_eq!(lost_after, None);
            assert!(cost < 0.56 * 500.0, "{cost}");
        }
        assert!(seeds().all(|seed| session(2000, |_| 0.97, seed).lost_after.is_none()), "a small gain");
    }

    #[test]
    fn a_device_that_is_far_slower_by_itself_is_not_tried() {
        let mut guard = RegressionGuard::default();
        assert_eq!(guard.device_takes(1, 10.0 * COLD_NS), None, "nothing to compare with");
        (0..10).for_each(|_| guard.was_cold(1, COLD_NS, true));
        assert_eq!(guard.device_takes(1, COLD_NS), None, "both work at once");
        let loss = guard.device_takes(1, 10.0 * COLD_NS).unwrap();
        assert_eq!((loss.ours_ns, loss.cold_ns.round()), (10.0 * COLD_NS, COLD_NS));
        assert!((0..100).all(|_| !guard.may_use_device(1, N_LAYERS)));
        assert_eq!(guard.device_takes(1, 10.0 * COLD_NS), None, "told once");
    }

    #[test]
    fn a_device_that_is_too_slow_for_most_calls_is_given_up() {
        let mut guard = RegressionGuard::default();
        assert_eq!(guard.limit_ns(4), None);
        (0..10).for_each(|_| guard.was_cold(4, COLD_NS, true));
        assert_eq!((guard.limit_ns(1), guard.limit_ns(4)), (None, Some(FAR_SLOWER * COLD_NS)));
        guard.may_use_device(4, N_LAYERS);
        assert!((0..1000).all(|_| guard.was_too_large(4, 1.2 * COLD_NS).is_none()), "both work at once");
        let mut too_large = |n: usize| (0..n).find_map(|_| guard.was_too_large(4, 2.0 * COLD_NS));
        assert_eq!(too_large(24 * N_LAYERS - 1), None);
        assert_eq!(too_large(1).map(|loss| loss.ours_ns), Some(2.0 * COLD_NS));
        assert_eq!(too_large(1000), None, "told once");
        assert!((0..100).all(|_| !guard.may_use_device(4, N_LAYERS)));
        assert!(guard.has_given_up(4) && !guard.has_given_up(1));
        guard.forget_cache();
        assert!((0..100).any(|_| guard.may_use_device(4, N_LAYERS)), "another cache");
        let mut guard = RegressionGuard::default();
        (0..10).for_each(|_| guard.was_cold(4, COLD_NS, true));
        for n in 0..500 {
            assert_eq!(guard.was_too_large(4, 2.0 * COLD_NS), None);
            if n % 20 == 0 {
                guard.was_partitioned(4, COLD_NS, false);
            }
        }
    }

    #[test]
    fn single_slow_calls_are_no_loss() {
        // One token in 50 takes ten times as long, as when the system does something else.
        let ours = |token: usize| if token.is_multiple_of(50) { 6.0 } else { 0.6 };
        assert!(seeds().all(|seed| session(1000, ours, seed).lost_after.is_none()));
    }

    #[test]
    fn a_cache_that_has_paid_survives_a_bad_moment_which_costs_little() {
        let ours = |token: usize| if (400..600).contains(&token) { 3.0 } else { 0.5 };
        for seed in seeds() {
            let Session { cost, lost_after } = session(1000, ours, seed);
            assert_eq!(lost_after, None);
            // 800 tokens at half the price, 200 all-cold, and what was lost before that was noticed.
            assert!(cost < 0.55 * 800.0 + 200.0 + 30.0, "{cost}");
        }
    }

    #[test]
    fn batches_are_judged_by_size() {
        let mut guard = RegressionGuard::default();
        let mut losses = Vec::new();
        for _ in 0..4000 {
            for (n_tokens, ours) in [(1, 0.5), (4, 2.0)] {
                let cold = COLD_NS * n_tokens as f64;
                if guard.may_use_device(n_tokens, N_LAYERS) {
                    losses.extend(guard.was_partitioned(n_tokens, ours * cold, true).map(|loss| (n_tokens, loss)));
                } else {
                    guard.was_cold(n_tokens, cold, true);
                }
            }
        }
        let [(4, Loss { is_used_elsewhere: true, .. })] = losses[..] else { panic!("{losses:?}") };
        assert!((0..100).any(|_| guard.may_use_device(1, N_LAYERS)));
        assert!((0..100).all(|_| !guard.may_use_device(4, N_LAYERS)));
    }

    #[test]
    fn nothing_is_concluded_before_the_cache_is_filled() {
        let mut guard = RegressionGuard::default();
        (0..100).for_each(|_| guard.was_cold(1, COLD_NS, true));
        assert!((0..1000).all(|_| guard.was_partitioned(1, 2.0 * COLD_NS, false).is_none()));
        assert!(!guard.may_use_device(1, N_LAYERS), "it has cost enough");
    }

    #[test]
    fn calls_beside_the_preparation_of_the_cache_are_not_what_it_is_compared_with() {
        for seed in seeds() {
            let mut guard = RegressionGuard::default();
            let mut noise = fastrand::Rng::with_seed(seed);
            let mut spread = || 0.8 + 0.4 * noise.f64();
            // The first calls of the session, then those beside the fill.
            let n_first = if seed % 2 == 0 { 0 } else { 20 };
            (0..n_first).for_each(|_| guard.was_cold(1, 1.2 * COLD_NS * spread(), true));
            (0..200).for_each(|_| guard.was_cold(1, 3.0 * COLD_NS * spread(), false));
            let takes = guard.limit_ns(1).unwrap() / FAR_SLOWER / COLD_NS;
            let expected = if n_first == 0 { 3.0 } else { 1.2 };
            assert!((takes / expected - 1.0).abs() < 0.2, "what is known as long as there is nothing better: {takes}");
            let mut lost = 0.0;
            let has_lost = (0..500 * N_LAYERS).any(|_| {
                let ns = COLD_NS * spread();
                if guard.may_use_device(1, N_LAYERS) {
                    lost += 0.5 * ns;
                    return guard.was_partitioned(1, 1.5 * ns, true).is_some();
                }
                guard.was_cold(1, ns, true);
                false
            });
            assert!(has_lost && lost < 0.03 * 500.0 * N_LAYERS as f64 * COLD_NS, "{has_lost}, {lost}");
        }
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
}
