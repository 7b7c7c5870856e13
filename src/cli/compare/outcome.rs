//! What one finished step has brought: the part of `results.json` that is measured.
//!
//! Plain data, written and read by serde; docs/compare.md describes it. No field is ever made up: what could not be measured
//! is missing.

use super::said::CacheSaid;
use serde::{Deserialize, Serialize};

/// One finished step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// When it began (UTC).
    pub started: String,
    /// How long it took, loading included.
    pub seconds: f64,
    /// The command lines, in their order.
    pub commands: Vec<String>,
    /// llama.cpp's revision, as the program said in its results.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// What llama.cpp said of the device: its description, and its place on the bus where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// llama-bench's tests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tests: Vec<Test>,
    /// Answers of the server.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub turns: Vec<Turn>,
    /// Device memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// What moe-hot said of its cache; only where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheSaid>,
    /// Comparison of logits with stock's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logits: Option<Logits>,
    /// Times of layers; only patched servers say them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerTimes>,
    /// Why the rest of this step was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_measured: Option<String>,
}

/// One test of llama-bench.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Test {
    /// Tokens of the prompt; 0 for decoding.
    pub prompt: u32,
    /// Tokens decoded; 0 for prompts.
    pub decode: u32,
    /// Tokens in the context before it.
    pub depth: u32,
    /// `-t`.
    pub threads: u16,
    /// `-ub`.
    pub ubatch: u32,
    /// `-ncmoe`.
    pub n_cpu_moe: u32,
    /// Weights on the device, MiB.
    pub model_mib: f64,
    /// Tokens per second of each repetition, the warm-up first; it counts for nothing.
    pub samples: Vec<f64>,
}

impl Test {
    /// The speed that counts: the mean of all repetitions behind the warm-up.
    pub fn speed(&self) -> Option<f64> {
        let counted = self.samples.get(1..)?;
        (!counted.is_empty()).then(|| counted.iter().sum::<f64>() / counted.len() as f64)
    }
}

/// One answer of the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// The conversation that it is in.
    pub conversation: String,
    /// The kind of its prompt.
    pub kind: String,
    /// Tokens of the prompt that were computed.
    pub prompt: u32,
    /// Tokens of the prompt that were still there from the turn before.
    pub cached: u32,
    /// From the request to the first token, ms, as a client sees it.
    pub first_token_ms: f64,
    /// Tokens per second from the second token on, by the server's clock.
    pub decode: Option<f64>,
    /// The answer's tokens.
    pub tokens: Vec<u32>,
    /// The answer.
    pub text: String,
    /// Requests and hits while it was decoded; only patched servers say them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
    /// See `requests`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hits: Option<u64>,
}

/// Device memory of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// llama.cpp's weights there, MiB.
    pub model_mib: f64,
    /// llama.cpp's context and scratch memory there, MiB.
    pub context_mib: f64,
    /// moe-hot's cache, MiB, rounded up.
    pub cache_mib: u64,
    /// How much less was free during the run than before it, by the device itself; missing where it cannot be asked meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_mib: Option<i64>,
    /// By how much the device's own figure is uncertain: what was free before and after differ by so much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_noise_mib: Option<i64>,
}

impl Memory {
    /// What llama.cpp and moe-hot say that they took.
    pub fn said_mib(&self) -> f64 {
        self.model_mib + self.context_mib + self.cache_mib as f64
    }
}

/// Comparison of logits with those of stock `--cpu-moe`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Logits {
    /// Mean Kullback-Leibler divergence.
    pub mean_kld: f64,
    /// The largest of any token.
    pub max_kld: f64,
    /// Share of tokens with the same likeliest next token, 0 to 1.
    pub same_top: f64,
}

/// One layer's times, by a patched server: microseconds of all calls together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerTimes {
    /// The N of `blk.N.`.
    pub layer: u32,
    /// Calls.
    pub calls: u64,
    /// Computing on the CPU.
    pub cpu_us: u64,
    /// Computing on the device.
    pub device_us: u64,
    /// The CPU waiting for the device.
    pub wait_us: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warm_up_counts_for_nothing() {
        let test = |samples: &[f64]| Test {
            prompt: 0,
            decode: 8,
            depth: 0,
            threads: 1,
            ubatch: 512,
            n_cpu_moe: 0,
            model_mib: 0.0,
            samples: samples.to_vec(),
        };
        assert_eq!(test(&[1.0, 10.0, 20.0]).speed(), Some(15.0));
        assert_eq!((test(&[1.0]).speed(), test(&[]).speed()), (None, None));
    }
}
