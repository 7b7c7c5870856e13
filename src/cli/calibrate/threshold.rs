//! From which batch size on copying experts to the GPU beats computing them on the CPU. Pure.

use crate::options::host::OFFLOAD_MIN_BATCH_DEFAULT;
use serde::{Deserialize, Serialize};

/// What a threshold must save at least, in all sizes together, as a share of one prompt's time: less is noise.
const LEAST_GAIN: f64 = 0.03;

/// One size of prompt, computed in both ways.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// Tokens, in one batch.
    pub n_tokens: u32,
    /// Milliseconds with the experts on the CPU, at best.
    pub cpu_ms: f64,
    /// Milliseconds with the experts copied to the GPU, at best.
    pub copied_ms: f64,
}

impl Prompt {
    /// What is lost by a choice, as a share of the better one's time.
    fn loss(&self, is_copied: bool) -> f64 {
        let chosen = if is_copied { self.copied_ms } else { self.cpu_ms };
        chosen / self.cpu_ms.min(self.copied_ms) - 1.0
    }
}

/// The threshold that loses least over these prompts, which are in order of their size.
///
/// Between the last size that is left to the CPU and the first that is copied it stands where the straight line through both
/// differences is zero. Never less than llama.cpp's own: smaller batches are the cache's. Never more than the largest size and one:
/// of what is larger nothing is known. Where nothing clear is won by another one, llama.cpp's own.
pub fn min_batch(prompts: &[Prompt]) -> u32 {
    let loss = |n_cpu: usize| -> f64 { prompts.iter().enumerate().map(|(at, prompt)| prompt.loss(at >= n_cpu)).sum() };
    let Some(n_cpu) = (0..=prompts.len()).min_by(|&a, &b| loss(a).total_cmp(&loss(b))) else {
        return OFFLOAD_MIN_BATCH_DEFAULT;
    };
    if loss(0) - loss(n_cpu) < LEAST_GAIN {
        return OFFLOAD_MIN_BATCH_DEFAULT;
    }
    let below = n_cpu.checked_sub(1).and_then(|at| prompts.get(at));
    let threshold = match (below, prompts.get(n_cpu)) {
        (Some(below), Some(above)) => between(below, above),
        (Some(last), None) => last.n_tokens.saturating_add(1),
        (None, _) => OFFLOAD_MIN_BATCH_DEFAULT,
    };
    threshold.max(OFFLOAD_MIN_BATCH_DEFAULT)
}

fn between(below: &Prompt, above: &Prompt) -> u32 {
    let gain = |prompt: &Prompt| prompt.cpu_ms - prompt.copied_ms; // of copying
    let (low, high) = (gain(below), gain(above));
    if low >= 0.0 || high <= 0.0 {
        return above.n_tokens; // a single size does not follow the others
    }
    let width = f64::from(above.n_tokens.saturating_sub(below.n_tokens));
    below.n_tokens.saturating_add((width * low / (low - high)).ceil() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [u32; 5] = [32, 64, 128, 256, 512];

    /// A layer of `n_expert` experts of `bytes` each, `n_used` per token, of which a CPU computes a row in `row_ns` after it has
    /// read the expert at 20 GB/s, and which a bus copies.
    fn prompts(n_expert: f64, n_used: f64, bytes: f64, row_ns: f64, bus_gb_per_s: f64) -> Vec<Prompt> {
        let prompt = |n_tokens| {
            let n = f64::from(n_tokens);
            let distinct = n_expert * (1.0 - (1.0 - n_used / n_expert).powf(n));
            let cpu_ns = (distinct * bytes / 20.0).max(n * n_used * row_ns);
            Prompt { n_tokens, cpu_ms: cpu_ns / 1e6, copied_ms: distinct * bytes / bus_gb_per_s / 1e6 }
        };
        SIZES.map(prompt).to_vec()
    }

    /// Qwen3-30B-A3B Q4: 128 experts of 2.7 MB, 8 per token; a row is 9.4 MFLOP, 300 GFLOP/s.
    fn qwen(bus_gb_per_s: f64) -> u32 {
        min_batch(&prompts(128.0, 8.0, 2.7e6, 31e3, bus_gb_per_s))
    }

    #[test]
    fn a_fast_bus_leaves_llama_cpps_own_and_slower_ones_raise_it() {
        let found = [100.0, 25.0, 6.0, 3.0, 1.5].map(qwen);
        assert_eq!(found[0], 32, "{found:?}");
        assert!(found.windows(2).all(|pair| pair[0] <= pair[1]), "{found:?}");
        // Copying takes 128 · 2.7 MB / B, the CPU n · 8 · 31 µs: equal at n = 1394 / (B in GB/s) where all experts are used.
        for (at, exact) in [(2, 232.0), (3, 465.0)] {
            assert!((f64::from(found[at]) / exact - 1.0).abs() < 0.1, "{found:?}");
        }
        assert_eq!(found[4], 513, "larger batches than were measured are llama.cpp's");
    }

    #[test]
    fn both_take_equally_long_at_the_threshold() {
        let line = |n_tokens: u32| Prompt { n_tokens, cpu_ms: f64::from(n_tokens), copied_ms: 100.0 };
        assert_eq!(min_batch(&SIZES.map(line)), 100);
    }

    #[test]
    fn one_size_that_was_disturbed_decides_little() {
        let line = |n_tokens: u32| Prompt {
            n_tokens,
            cpu_ms: if n_tokens == 32 { 110.0 } else { f64::from(n_tokens) },
            copied_ms: 100.0,
        };
        assert_eq!(min_batch(&SIZES.map(line)), 100);
    }

    #[test]
    fn what_is_equally_fast_changes_nothing() {
        let noise = |(at, n_tokens): (usize, u32)| Prompt {
            n_tokens,
            cpu_ms: 100.0 + [0.2, -0.4, 0.3, 0.0, -0.5][at],
            copied_ms: 100.0,
        };
        let noisy: Vec<_> = SIZES.into_iter().enumerate().map(noise).collect();
        assert_eq!([min_batch(&noisy), min_batch(&[])], [32, 32]);
    }
}
