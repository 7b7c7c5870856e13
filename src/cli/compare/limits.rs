//! How long a program may run before it is taken for one that hangs.
//!
//! Pure. Once a step of the same kind is finished, its time says what is usual. Before that, the tokens that are computed do, at
//! speeds with which nobody would compare.

use super::commands::Tests;
use super::outcome::Outcome;
use super::steps::Step;
use std::collections::BTreeMap;
use std::time::Duration;

/// A run may take so many times as long as the longest finished step of its kind ...
const TIMES: f64 = 10.0;
/// ... and this besides, since files may have left main memory meanwhile, and a backend may compile kernels that only one arm uses.
const SPARE: Duration = Duration::from_secs(1800);
/// How long loading a model may take where nothing is known.
pub const LOAD_LIMIT: Duration = Duration::from_secs(3600);
/// The slowest speeds that are waited for where nothing is known, tokens per second.
const SLOWEST_PROMPT: f64 = 2.0;
const SLOWEST_DECODE: f64 = 0.1;

/// Tokens that a run computes, warm-ups included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Of prompts.
    pub prompt: u64,
    /// Decoded one by one.
    pub decode: u64,
}

impl Tokens {
    /// Of llama-bench's tests: before each test at a depth so many tokens are computed as in a prompt.
    pub fn of(tests: &Tests) -> Self {
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let sum = |values: &[u32]| values.iter().map(|&n| u64::from(n)).sum::<u64>();
        // Each repetition, and one warm-up of each.
        let runs = u64::from(tests.repetitions) + 1;
        let settings = count(tests.threads.len() * tests.ubatch.len());
        let (n_depth, depths) = (count(tests.depth.len()), sum(&tests.depth));
        let n_tests = count(tests.pp.len()) + u64::from(tests.tg > 0);
        let times = runs.saturating_mul(settings);
        Self {
            prompt: times.saturating_mul(sum(&tests.pp).saturating_mul(n_depth) + depths.saturating_mul(n_tests)),
            decode: times.saturating_mul(u64::from(tests.tg).saturating_mul(n_depth)),
        }
    }
}

/// How long a program of a step may run.
pub fn limit(step: Step, done: &[(Step, &Outcome)], tokens: Tokens) -> Duration {
    let like = done.iter().filter(|(other, outcome)| step.is_like(*other) && outcome.not_measured.is_none());
    let seconds = match like.map(|(_, outcome)| outcome.seconds).reduce(f64::max) {
        Some(longest) => SPARE.as_secs_f64() + TIMES * longest,
        None => {
            let computing = tokens.prompt as f64 / SLOWEST_PROMPT + tokens.decode as f64 / SLOWEST_DECODE;
            LOAD_LIMIT.as_secs_f64() + computing
        }
    };
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// Finished steps with their outcomes.
pub fn finished<'a>(plan: &[Step], done: &'a BTreeMap<String, Outcome>) -> Vec<(Step, &'a Outcome)> {
    plan.iter().filter_map(|&step| Some((step, done.get(&step.key())?))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::arm::Arm;
    use super::*;

    #[test]
    fn all_tokens_of_llama_benchs_tests_count() {
        let tests = Tests {
            pp: vec![64, 128],
            tg: 16,
            depth: vec![0, 32],
            repetitions: 2,
            threads: vec![1, 2],
            ubatch: vec![512],
        };
        // Three runs with each of two numbers of threads: both prompts at both depths, and 32 tokens before three tests.
        assert_eq!(Tokens::of(&tests), Tokens { prompt: 6 * (2 * 192 + 3 * 32), decode: 6 * 2 * 16 });
    }

    #[test]
    fn what_is_usual_decides_and_before_that_the_tokens() {
        let seconds = |seconds: f64| Outcome { seconds, ..Outcome::default() };
        let (short, long, other) = (seconds(50.0), seconds(60.0), seconds(1e6));
        let skipped = Outcome { not_measured: Some("x".into()), ..seconds(0.0) };
        let tokens = Tokens { prompt: 100, decode: 10 };
        let step = Step::Bench(1, Arm::HotCold);
        let none = [(Step::Server(0, Arm::Fit), &other), (Step::Bench(0, Arm::MoeCacheMib), &skipped)];
        assert_eq!(limit(step, &none, tokens), Duration::from_secs(3600 + 50 + 100));
        let some = [none[0], (Step::Bench(0, Arm::Fit), &long), (Step::Bench(0, Arm::CpuMoe), &short)];
        assert_eq!(limit(step, &some, tokens), Duration::from_secs(1800 + 600));
        assert_eq!(limit(step, &[], Tokens { prompt: u64::MAX, decode: u64::MAX }), Duration::MAX);
    }
}
