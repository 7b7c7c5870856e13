//! What the user asked for: one typed `Config`, read once from the environment that the launcher fills.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

/// Environment name of `--moe-layer-perf-out`.
pub const PERF_OUT: &str = "LLAMA_ARG_MOE_LAYER_PERF_OUT";
/// For tests only: claim operations whose weights are not in any buffer yet, as test-backend-ops asks.
pub const CLAIM_UNPLACED: &str = "MOE_HOT_TEST_CLAIM_UNPLACED";
/// llama.cpp's own: batches of at least this many tokens may be computed on the GPU from host weights.
pub const OFFLOAD_MIN_BATCH: &str = "GGML_OP_OFFLOAD_MIN_BATCH";
/// llama.cpp's own default for it.
const OFFLOAD_MIN_BATCH_DEFAULT: u32 = 32;

/// The resolved configuration of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where the profile is written; `None`: nothing is recorded.
    pub perf_out: Option<PathBuf>,
    /// Batches of this many tokens and more are stock's; we serve 1 to this minus 1.
    pub offload_min_batch: u32,
    /// See [`CLAIM_UNPLACED`].
    pub claim_unplaced: bool,
}

impl Config {
    /// Reads the process environment.
    pub fn from_env() -> Self {
        Self::from_lookup(|name| env::var_os(name))
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Self {
        let perf_out = lookup(PERF_OUT).filter(|path| !path.is_empty()).map(PathBuf::from);
        Self {
            perf_out: perf_out.map(|path| std::path::absolute(&path).unwrap_or(path)),
            claim_unplaced: lookup(CLAIM_UNPLACED).is_some_and(|value| value == "1"),
            offload_min_batch: lookup(OFFLOAD_MIN_BATCH).map_or(OFFLOAD_MIN_BATCH_DEFAULT, |text| threshold(&text)),
        }
    }

    /// Whether the user asked for anything that needs experts.
    pub fn takes_experts(&self) -> bool {
        self.perf_out.is_some()
    }
}

/// Reads a threshold as ggml's backends do (C's `atoi`): leading digits count, anything else is 0.
fn threshold(text: &OsString) -> u32 {
    let text = text.to_string_lossy();
    let text = text.trim_start();
    let digits = text.strip_prefix('+').unwrap_or(text);
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(vars: &[(&str, &str)]) -> Config {
        Config::from_lookup(|name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn nothing_set_means_nothing_taken() {
        let config = config(&[]);
        assert!(!config.takes_experts());
        assert_eq!(config.offload_min_batch, 32);
    }

    #[test]
    fn an_empty_path_is_no_path_and_a_relative_one_becomes_absolute() {
        assert_eq!(config(&[(PERF_OUT, "")]).perf_out, None);
        assert!(config(&[(PERF_OUT, "experts.json")]).perf_out.unwrap().is_absolute());
    }

    #[test]
    fn the_threshold_is_read_as_ggml_reads_it() {
        for (text, value) in [("8", 8), (" 16x", 16), ("+4", 4), ("-3", 0), ("many", 0)] {
            assert_eq!(config(&[(OFFLOAD_MIN_BATCH, text)]).offload_min_batch, value, "{text:?}");
        }
    }
}
