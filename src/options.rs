//! What the user asked for: one typed `Config`, read once from the environment that the launcher fills.
#![forbid(unsafe_code)]

use crate::units::MissRule;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Environment name of `--moe-layer-perf-out`.
pub const PERF_OUT: &str = "LLAMA_ARG_MOE_LAYER_PERF_OUT";
/// Environment name of `--moe-hot-cache`.
pub const HOT_CACHE: &str = "LLAMA_ARG_MOE_HOT_CACHE";
/// Environment name of `--moe-hot-cache-max-mib`.
pub const HOT_CACHE_MAX_MIB: &str = "LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB";
/// Environment name of `--moe-hot-cache-auto-reserve-mib`.
pub const HOT_CACHE_AUTO_RESERVE_MIB: &str = "LLAMA_ARG_MOE_HOT_CACHE_AUTO_RESERVE_MIB";
/// Environment name of `--moe-hot-cache-device`.
pub const HOT_CACHE_DEVICE: &str = "LLAMA_ARG_MOE_HOT_CACHE_DEVICE";
/// Environment name of `--moe-hot-cache-update-rate`.
pub const HOT_CACHE_UPDATE_RATE: &str = "LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE";
/// Environment name of `--moe-hot-cache-miss`.
pub const HOT_CACHE_MISS: &str = "LLAMA_ARG_MOE_HOT_CACHE_MISS";
/// Environment name of `--moe-trace-out`.
pub const TRACE_OUT: &str = "LLAMA_ARG_MOE_TRACE_OUT";
/// For tests only: so many slots per layer (as far as the budget allows), filled before the next batch is computed.
pub const TEST_SLOTS: &str = "MOE_HOT_TEST_SLOTS";
/// For tests only: copies count as free, so that residents are swapped as often as can be.
pub const TEST_FREE_COPIES: &str = "MOE_HOT_TEST_FREE_COPIES";
/// For tests only: a file that timings are written to.
pub const TEST_TIMINGS: &str = "MOE_HOT_TEST_TIMINGS";
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

/// Bounds the scratch memory on the device where the threshold for stock's batches has been raised.
const MAX_HOT_TOKENS: u32 = 64;

/// The largest number of MiB that still is a number of bytes.
pub const MAX_MIB: u64 = u64::MAX >> 20;

/// How much of a device's memory experts may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Budget {
    /// What the device has left, less the reserve.
    #[default]
    Automatic,
    /// Nothing: no cache.
    Off,
    /// At most so many MiB, 1 to [`MAX_MIB`].
    Mib(u64),
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected a whole number of MiB up to {MAX_MIB}, 0 for off or -1 for automatic");
        match text {
            "-1" => Ok(Self::Automatic),
            _ => match text.parse().map_err(|_| expected())? {
                0 => Ok(Self::Off),
                mib if mib <= MAX_MIB => Ok(Self::Mib(mib)),
                _ => Err(expected()),
            },
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Automatic => write!(f, "-1"),
            Self::Off => write!(f, "0"),
            Self::Mib(mib) => write!(f, "{mib}"),
        }
    }
}

/// MiB that an automatic budget leaves free, 0 to [`MAX_MIB`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserve(pub u64);

impl Default for Reserve {
    fn default() -> Self {
        Self(1024)
    }
}

impl FromStr for Reserve {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mib = text.parse().ok().filter(|&mib| mib <= MAX_MIB);
        mib.map(Self).ok_or_else(|| format!("expected a whole number of MiB from 0 to {MAX_MIB}"))
    }
}

/// The largest share of a layer's slots that may be replaced per 1,000 tokens, 0 to 1; 0: none ever.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateRate(pub f32);

impl Eq for UpdateRate {}

impl FromStr for UpdateRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rate = text.parse().ok().filter(|rate| (0.0..=1.0).contains(rate));
        rate.map(Self).ok_or_else(|| "expected a number from 0 to 1".into())
    }
}

impl FromStr for MissRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "copy" => Ok(Self::Copy),
            "auto" => Ok(Self::Auto),
            _ => Err("expected cpu, copy or auto".into()),
        }
    }
}

impl fmt::Display for MissRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Copy => "copy",
            Self::Auto => "auto",
        })
    }
}

/// The resolved configuration of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where the profile is written; `None`: nothing is recorded.
    pub perf_out: Option<PathBuf>,
    /// The profile that says which experts to keep on a device; `None`: no cache.
    pub hot_cache: Option<PathBuf>,
    /// How much of the device's memory the cache may take.
    pub max_mib: Budget,
    /// MiB of the device's memory that an automatic budget leaves free.
    pub auto_reserve_mib: u64,
    /// The device to cache on, by ggml's name; `None`: the plugin chooses.
    pub device: Option<String>,
    /// How fast the set of resident experts may change; `None`: as fast as it pays.
    pub update_rate: Option<UpdateRate>,
    /// What to do with an expert that is not resident.
    pub miss: MissRule,
    /// Where the routing of every batch is written; `None`: nowhere.
    pub trace_out: Option<PathBuf>,
    /// See [`TEST_SLOTS`].
    pub test_slots: Option<u32>,
    /// See [`TEST_FREE_COPIES`].
    pub test_free_copies: bool,
    /// See [`TEST_TIMINGS`].
    pub test_timings: Option<PathBuf>,
    /// Values that could not be read and were replaced by their defaults, one line each.
    pub complaints: Vec<String>,
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
        let given = |name| lookup(name).filter(|value| !value.is_empty());
        let path = |name| given(name).map(PathBuf::from).map(|path| std::path::absolute(&path).unwrap_or(path));
        let mut complaints = Vec::new();
        let max_mib = read(HOT_CACHE_MAX_MIB, given, &mut complaints);
        let reserve: Option<Reserve> = read(HOT_CACHE_AUTO_RESERVE_MIB, given, &mut complaints);
        Self {
            perf_out: path(PERF_OUT),
            hot_cache: path(HOT_CACHE),
            max_mib: max_mib.unwrap_or_default(),
            auto_reserve_mib: reserve.unwrap_or_default().0,
            device: read(HOT_CACHE_DEVICE, given, &mut complaints),
            update_rate: read(HOT_CACHE_UPDATE_RATE, given, &mut complaints),
            miss: read(HOT_CACHE_MISS, given, &mut complaints).unwrap_or(MissRule::Auto),
            trace_out: path(TRACE_OUT),
            test_slots: read(TEST_SLOTS, given, &mut complaints),
            test_free_copies: lookup(TEST_FREE_COPIES).is_some_and(|value| value == "1"),
            test_timings: path(TEST_TIMINGS),
            complaints,
            no_host: [NO_HOST, LLAMA_NO_HOST].iter().any(|name| lookup(name).is_some_and(|value| is_true(&value))),
            claim_unplaced: lookup(CLAIM_UNPLACED).is_some_and(|value| value == "1"),
            offload_min_batch: lookup(OFFLOAD_MIN_BATCH).map_or(OFFLOAD_MIN_BATCH_DEFAULT, |text| threshold(&text)),
        }
    }

    /// Whether the user asked for anything that needs experts.
    pub fn takes_experts(&self) -> bool {
        self.perf_out.is_some() || self.trace_out.is_some() || self.caches()
    }

    /// Whether the set of residents follows the text. Tests fix it with their number of slots, unless they give a rate too.
    pub fn learns(&self) -> bool {
        match self.update_rate {
            Some(UpdateRate(rate)) => rate > 0.0,
            None => self.test_slots.is_none(),
        }
    }

    /// Largest batch, in tokens, whose resident experts run on the device.
    pub fn max_hot_tokens(&self) -> usize {
        self.offload_min_batch.saturating_sub(1).clamp(1, MAX_HOT_TOKENS) as usize
    }

    /// Most requests of one layer call with `n_used` experts per token that run on the device.
    pub fn max_hot_rows(&self, n_used: usize) -> usize {
        self.max_hot_tokens() * n_used
    }

    /// Whether the user asked for a cache.
    pub fn caches(&self) -> bool {
        self.hot_cache.is_some() && self.max_mib != Budget::Off
    }
}

/// Reads one variable; what cannot be read is complained about and counts as not given.
fn read<T: FromStr<Err: fmt::Display>>(
    name: &'static str,
    given: impl Fn(&'static str) -> Option<OsString>,
    complaints: &mut Vec<String>,
) -> Option<T> {
    match parse(name, &given(name)?) {
        Ok(value) => Some(value),
        Err(complaint) => {
            complaints.push(format!("{complaint}; the default is used"));
            None
        }
    }
}

/// Reads the value of the environment variable `name`. The error names both and says what was expected.
pub fn parse<T: FromStr<Err: fmt::Display>>(name: &str, value: &OsStr) -> Result<T, String> {
    let text = value.to_str().ok_or_else(|| format!("{name} is {value:?}: expected UTF-8"))?;
    text.parse().map_err(|expected| format!("{name} is {text:?}: {expected}"))
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
    fn a_cache_takes_experts_unless_it_is_off() {
        assert!(config(&[(HOT_CACHE, "experts.json")]).takes_experts());
        assert!(config(&[(HOT_CACHE, "experts.json"), (HOT_CACHE_MAX_MIB, "1")]).takes_experts());
        assert!(!config(&[(HOT_CACHE, "experts.json"), (HOT_CACHE_MAX_MIB, "0")]).takes_experts());
        assert!(!config(&[(HOT_CACHE, "")]).takes_experts());
        assert!(!config(&[(HOT_CACHE_MAX_MIB, "100")]).takes_experts());
    }

    #[test]
    fn the_caches_options_have_defaults_and_are_read() {
        let none = config(&[]);
        assert_eq!((none.max_mib, none.auto_reserve_mib, none.device), (Budget::Automatic, 1024, None));
        let all = config(&[
            (HOT_CACHE_MAX_MIB, "700"),
            (HOT_CACHE_AUTO_RESERVE_MIB, "0"),
            (HOT_CACHE_DEVICE, "CUDA0"),
            (HOT_CACHE_UPDATE_RATE, "0.25"),
            (HOT_CACHE_MISS, "copy"),
            (TRACE_OUT, "/trace"),
            (TEST_SLOTS, "4"),
            (TEST_TIMINGS, "/t"),
        ]);
        assert_eq!((all.max_mib, all.auto_reserve_mib), (Budget::Mib(700), 0));
        assert_eq!((all.device.as_deref(), all.test_slots), (Some("CUDA0"), Some(4)));
        assert_eq!((all.test_timings, all.complaints), (Some(PathBuf::from("/t")), Vec::new()));
    }

    #[test]
    fn a_budget_is_a_number_of_mib_that_fits_into_bytes() {
        assert_eq!("-1".parse(), Ok(Budget::Automatic));
        assert_eq!("0".parse(), Ok(Budget::Off));
        assert_eq!("17592186044415".parse(), Ok(Budget::Mib(MAX_MIB)));
        for bad in ["-2", "17592186044416", "99999999999999999999", "1.5", "1G", "", " 1"] {
            assert!(bad.parse::<Budget>().is_err(), "{bad:?}");
        }
        assert!("-1".parse::<Reserve>().is_err() && "17592186044416".parse::<Reserve>().is_err());
    }

    #[test]
    fn what_cannot_be_read_becomes_the_default_and_a_complaint() {
        let config = config(&[(HOT_CACHE_MAX_MIB, "much"), (HOT_CACHE_AUTO_RESERVE_MIB, "-5"), (TEST_SLOTS, "x")]);
        assert_eq!((config.max_mib, config.auto_reserve_mib, config.test_slots), (Budget::Automatic, 1024, None));
        assert_eq!(config.complaints.len(), 3);
        assert!(config.complaints[0].contains(HOT_CACHE_MAX_MIB) && config.complaints[0].contains("\"much\""));
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
