//! Predicted decode speed, by the formula of docs/policy.md ("Why hits, and what they are worth"):
//!
//! ```text
//! token time  =  other weights / W_v  +  max(h · B_e / W_v,  (1 − h) · B_e / W_r)  +  L · o
//! ```
//!
//! A cache computes hits and misses at the same time. Whole layers are computed one after the other, so their times add up.
//! Attention over a long context, which both have in common, is not counted.

/// What computes: bandwidths in bytes/s, times in s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// The GPU's memory (W_v).
    pub gpu: f64,
    /// RAM, as the CPU's kernels reach it (W_r).
    pub ram: f64,
    /// What a cached layer takes beside its reading (o).
    pub overhead: f64,
    /// The same of a layer whose experts stock computes on the CPU.
    pub stock_overhead: f64,
}

/// What one token reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Token {
    /// Weights besides experts, bytes.
    pub other: f64,
    /// Experts, all layers, bytes (B_e).
    pub experts: f64,
    /// Layers with experts (L).
    pub layers: f64,
}

impl Machine {
    /// Seconds per token with a cache that answers the share `hits` (by bytes) of requests.
    pub fn cached(&self, token: &Token, hits: f64) -> f64 {
        let lanes = (hits * token.experts / self.gpu).max((1.0 - hits) * token.experts / self.ram);
        token.other / self.gpu + lanes + token.layers * self.overhead
    }

    /// Seconds per token if `share` of the experts' bytes, in `on_cpu` layers less than all, are on the GPU as whole layers.
    pub fn whole_layers(&self, token: &Token, share: f64, on_cpu: f64) -> f64 {
        let lanes = share * token.experts / self.gpu + (1.0 - share) * token.experts / self.ram;
        token.other / self.gpu + lanes + on_cpu * self.stock_overhead
    }

    /// The hit rate from which on a cache is faster than `seconds`; `None` if none is.
    pub fn break_even(&self, token: &Token, seconds: f64) -> Option<f64> {
        let for_experts = seconds - token.other / self.gpu - token.layers * self.overhead;
        let hits = (1.0 - for_experts * self.ram / token.experts).max(0.0);
        // More hits help until both lanes take the same time; beyond that the GPU is the slower one.
        (for_experts > 0.0 && hits * token.experts / self.gpu <= for_experts).then_some(hits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the project's notes: Qwen3-30B Q4 on 800/60 GB/s, 1.1 GB of experts per token.
    fn example(overhead: f64) -> (Machine, Token) {
        let machine = Machine { gpu: 800e9, ram: 60e9, overhead, stock_overhead: 0.0 };
        (machine, Token { other: 0.9e9, experts: 1.1e9, layers: 48.0 })
    }

    #[test]
    fn hits_and_overhead_decide_the_speed() {
        let speed = |hits, overhead| {
            let (machine, token) = example(overhead);
            1.0 / machine.cached(&token, hits)
        };
        for (hits, overhead, expected) in [
            (0.5, 60e-6, 75.0),
            (0.8, 60e-6, 129.0),
            (0.95, 60e-6, 184.0),
            (0.5, 190e-6, 51.0),
            (0.8, 190e-6, 71.0),
            (0.95, 190e-6, 86.0),
        ] {
            let speed = speed(hits, overhead);
            assert!((speed / expected - 1.0).abs() < 0.03, "{hits} {overhead}: {speed}, expected {expected}");
        }
    }

    #[test]
    fn at_the_break_even_both_are_equally_fast() {
        for overhead in [20e-6, 60e-6, 190e-6] {
            let (machine, token) = example(overhead);
            for share in [0.0, 0.3, 0.6] {
                let seconds = machine.whole_layers(&token, share, 48.0 * (1.0 - share));
                let Some(hits) = machine.break_even(&token, seconds) else { continue };
                assert!((machine.cached(&token, hits) / seconds - 1.0).abs() < 1e-9, "{overhead} {share} {hits}");
            }
        }
    }

    #[test]
    fn nothing_breaks_even_with_what_takes_less_than_the_overhead() {
        let (machine, token) = example(1e-3);
        assert_eq!(machine.break_even(&token, machine.whole_layers(&token, 0.9, 5.0)), None);
    }
}
