//! What the user asked for: one typed `Config`, read once from the environment that the launcher fills.
#![forbid(unsafe_code)]

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

/// Environment name of `--moe-layer-perf-out`.
pub const PERF_OUT: &str = "LLAMA_ARG_MOE_LAYER_PERF_OUT";
/// For tests only: claim operations whose weights are not in any buffer yet, as test-backend-ops asks.
pub const CLAIM_UNPLACED: &str = "MOE_HOT_TEST_CLAIM_UNPLACED";
/// The launcher's word that the program was told not to use page-locked host memory (`--no-host`).
pub const NO_HOST: &str = "MOE_HOT_NO_HOST";
/// llama.cpp's own name for the same.
const LLAMA_NO_HOST: &str = "LLAMA_ARG_NO_HOST";
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
    /// Whether to keep away from page-locked host memory.
    pub no_host: bool,
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
            no_host: [NO_HOST, LLAMA_NO_HOST].iter().any(|name| lookup(name).is_some_and(|value| is_true(&value))),
            claim_unplaced: lookup(CLAIM_UNPLACED).is_some_and(|value| value == "1"),
            offload_min_batch: lookup(OFFLOAD_MIN_BATCH).map_or(OFFLOAD_MIN_BATCH_DEFAULT, |text| threshold(&text)),
        }
    }

    /// Whether the user asked for anything that needs experts.
    pub fn takes_experts(&self) -> bool {
        self.perf_out.is_some()
    }
}

/// llama.cpp's words for yes.
fn is_true(value: &OsString) -> bool {
    ["1", "on", "enabled", "true"].iter().any(|word| value == word)
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
    fn either_name_keeps_us_away_from_page_locked_memory() {
        assert!(!config(&[]).no_host);
        assert!(config(&[(NO_HOST, "1")]).no_host && config(&[(LLAMA_NO_HOST, "true")]).no_host);
        assert!(!config(&[(LLAMA_NO_HOST, "0")]).no_host);
    }

    #[test]
    fn the_threshold_is_read_as_ggml_reads_it() {
        for (text, value) in [("8", 8), (" 16x", 16), ("+4", 4), ("-3", 0), ("many", 0)] {
            assert_eq!(config(&[(OFFLOAD_MIN_BATCH, text)]).offload_min_batch, value, "{text:?}");
        }
    }
}
