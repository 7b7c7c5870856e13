//! What the user asked for: the [table](OPTIONS) of options, and one typed [`Config`] made from it. The environment is read
//! here and nowhere else.
#![forbid(unsafe_code)]

pub mod host;
pub mod launcher;
mod table;
mod values;

pub use table::{
    HOT_CACHE, HOT_CACHE_AUTO_RESERVE_MIB, HOT_CACHE_DEVICE, HOT_CACHE_MAX_MIB, HOT_CACHE_MISS, HOT_CACHE_UPDATE_RATE,
    Kind, OPTIONS, OptionSpec, PERF_OUT, TEST_CLAIM_UNPLACED, TEST_FREE_COPIES, TEST_HOST_ROWS, TEST_HOST_SPLITS,
    TEST_NO_GUARD, TEST_SLOTS, TEST_TIMINGS, TEST_WAIT, TRACE_OUT,
};
pub use values::{Budget, CacheProfile, InvalidValue, Reserve, UpdateRate};

use crate::units::MissRule;
use host::{
    LAUNCHER_NO_HOST, MEASURED_MIN_BATCH, NO_HOST, OFFLOAD_MIN_BATCH, OFFLOAD_MIN_BATCH_DEFAULT, UNIFIED_MEMORY,
    is_yes, threshold,
};
use launcher::{MODEL_FILE, SAID_QUANTISATION, SESSION_BEGAN, session_began};
use std::env;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::SystemTime;

/// Bounds the scratch memory on the device where the threshold for stock's batches has been raised.
const MAX_HOT_TOKENS: u32 = 64;

/// A variable whose value cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable} is {value:?}: {expected}")]
pub struct InvalidVariable {
    /// Its name.
    pub variable: &'static str,
    /// Its value.
    pub value: OsString,
    /// What was expected.
    pub expected: InvalidValue,
}

/// The resolved configuration of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where the profile is written; `None`: nothing is recorded.
    pub perf_out: Option<PathBuf>,
    /// The profile that says which experts to keep on a device; `None`: no cache.
    pub hot_cache: Option<CacheProfile>,
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
    /// See [`TEST_NO_GUARD`].
    pub test_no_guard: bool,
    /// See [`TEST_WAIT`].
    pub test_wait: bool,
    /// See [`TEST_HOST_SPLITS`].
    pub test_host_splits: bool,
    /// See [`TEST_HOST_ROWS`].
    pub test_host_rows: bool,
    /// See [`TEST_TIMINGS`].
    pub test_timings: Option<PathBuf>,
    /// Values that could not be read and were replaced by their defaults.
    pub invalid: Vec<InvalidVariable>,
    /// Batches of this many tokens and more are stock's; we serve 1 to this minus 1.
    pub offload_min_batch: u32,
    /// Batches of this many tokens and more, if they are ours, are only computed, on the CPU: a threshold that we have raised by
    /// measurement changes nothing of what is cached, counted and learnt.
    pub plain_min_batch: u32,
    /// Whether to keep away from page-locked host memory.
    pub no_host: bool,
    /// Whether the memory of CUDA's devices is the host's too.
    pub unified_memory: bool,
    /// See [`TEST_CLAIM_UNPLACED`].
    pub claim_unplaced: bool,
    /// The model's file as the user calls it, where the launcher knows it.
    pub model_file: Option<PathBuf>,
    /// When the launcher was started, if it was.
    pub session_began: Option<SystemTime>,
    /// Whether the user knows that the profile is of another quantisation.
    pub said_quantisation: bool,
}

impl Config {
    /// Reads the process environment.
    pub fn from_env() -> Self {
        Self::from_lookup(|name| env::var_os(name))
    }

    /// Reads variables by name.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Self {
        let mut reader = Reader { lookup, invalid: Vec::new() };
        let offload_min_batch =
            (reader.lookup)(OFFLOAD_MIN_BATCH).map_or(OFFLOAD_MIN_BATCH_DEFAULT, |text| threshold(&text));
        let is_measured = reader.is_one(MEASURED_MIN_BATCH);
        Self {
            perf_out: reader.path(PERF_OUT.variable),
            hot_cache: reader.cache_profile(HOT_CACHE.variable),
            max_mib: reader.value(HOT_CACHE_MAX_MIB.variable).unwrap_or_default(),
            auto_reserve_mib: reader.value::<Reserve>(HOT_CACHE_AUTO_RESERVE_MIB.variable).unwrap_or_default().0,
            device: reader.text(HOT_CACHE_DEVICE.variable),
            update_rate: reader.value(HOT_CACHE_UPDATE_RATE.variable),
            miss: reader.value(HOT_CACHE_MISS.variable).unwrap_or(MissRule::Auto),
            trace_out: reader.path(TRACE_OUT.variable),
            test_slots: reader.number(TEST_SLOTS.variable),
            test_free_copies: reader.is_one(TEST_FREE_COPIES.variable),
            test_no_guard: reader.is_one(TEST_NO_GUARD.variable),
            test_wait: reader.is_one(TEST_WAIT.variable),
            test_host_splits: reader.is_one(TEST_HOST_SPLITS.variable),
            test_host_rows: reader.is_one(TEST_HOST_ROWS.variable),
            test_timings: reader.path(TEST_TIMINGS.variable),
            no_host: [LAUNCHER_NO_HOST, NO_HOST.variable]
                .iter()
                .any(|name| reader.given(name).is_some_and(|value| is_yes(&value))),
            // As ggml reads it: set to whatever.
            unified_memory: (reader.lookup)(UNIFIED_MEMORY).is_some(),
            claim_unplaced: reader.is_one(TEST_CLAIM_UNPLACED.variable),
            model_file: reader.path(MODEL_FILE),
            session_began: reader.given(SESSION_BEGAN).and_then(|value| session_began(&value)),
            said_quantisation: reader.is_one(SAID_QUANTISATION),
            offload_min_batch,
            plain_min_batch: if is_measured {
                offload_min_batch.min(OFFLOAD_MIN_BATCH_DEFAULT)
            } else {
                offload_min_batch
            },
            invalid: reader.invalid,
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

    /// Whether tokens wait until their context's lane is ready, as in tests only.
    pub fn waits_for_lanes(&self) -> bool {
        self.test_wait || self.test_slots.is_some()
    }

    /// Whether a cache that makes calls slower is held back and given up.
    pub fn is_guarded(&self) -> bool {
        !self.test_no_guard && self.test_slots.is_none()
    }

    /// Largest batch, in tokens, whose resident experts run on the device.
    pub fn max_hot_tokens(&self) -> usize {
        self.plain_min_batch.saturating_sub(1).clamp(1, MAX_HOT_TOKENS) as usize
    }

    /// Most requests of one layer call with `n_used` experts per token that run on the device.
    pub fn max_hot_rows(&self, n_used: usize) -> usize {
        self.max_hot_tokens() * n_used
    }

    /// An option's value as it was understood, in words.
    pub fn shown(&self, option: &OptionSpec) -> String {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let value = match option.flag {
            flag if flag == PERF_OUT.flag => path(&self.perf_out),
            flag if flag == HOT_CACHE.flag => self.hot_cache.as_ref().map(|profile| match profile {
                CacheProfile::Auto => CacheProfile::AUTO.into(),
                CacheProfile::File(path) => path.display().to_string(),
            }),
            flag if flag == TRACE_OUT.flag => path(&self.trace_out),
            flag if flag == HOT_CACHE_MAX_MIB.flag => Some(match self.max_mib {
                Budget::Automatic => "-1".into(),
                Budget::Off => "0".into(),
                Budget::Mib(mib) => mib.to_string(),
            }),
            flag if flag == HOT_CACHE_AUTO_RESERVE_MIB.flag => Some(self.auto_reserve_mib.to_string()),
            flag if flag == HOT_CACHE_DEVICE.flag => self.device.clone(),
            flag if flag == HOT_CACHE_UPDATE_RATE.flag => self.update_rate.map(|rate| rate.0.to_string()),
            flag if flag == HOT_CACHE_MISS.flag => Some(self.miss.to_string()),
            _ => None,
        };
        value.unwrap_or_else(|| option.default.into())
    }

    /// Whether the user asked for a cache.
    pub fn caches(&self) -> bool {
        self.hot_cache.is_some() && self.max_mib != Budget::Off
    }
}

/// Reads variables one after the other. An empty one counts as not given; what cannot be read is noted.
struct Reader<F> {
    lookup: F,
    invalid: Vec<InvalidVariable>,
}

impl<F: Fn(&str) -> Option<OsString>> Reader<F> {
    fn given(&self, variable: &str) -> Option<OsString> {
        (self.lookup)(variable).filter(|value| !value.is_empty())
    }

    fn path(&self, variable: &str) -> Option<PathBuf> {
        self.given(variable).map(PathBuf::from).map(|path| std::path::absolute(&path).unwrap_or(path))
    }

    fn cache_profile(&self, variable: &str) -> Option<CacheProfile> {
        match self.given(variable)? {
            auto if auto == CacheProfile::AUTO => Some(CacheProfile::Auto),
            _ => self.path(variable).map(CacheProfile::File),
        }
    }

    fn is_one(&self, variable: &str) -> bool {
        self.given(variable).is_some_and(|value| value == "1")
    }

    fn text(&mut self, variable: &'static str) -> Option<String> {
        self.read(variable, |text| Ok(text.to_owned()))
    }

    fn number(&mut self, variable: &'static str) -> Option<u32> {
        self.read(variable, |text| text.parse().map_err(|_| InvalidValue::Number))
    }

    fn value<T: FromStr<Err = InvalidValue>>(&mut self, variable: &'static str) -> Option<T> {
        self.read(variable, str::parse)
    }

    fn read<T>(&mut self, variable: &'static str, read: impl FnOnce(&str) -> Result<T, InvalidValue>) -> Option<T> {
        let value = self.given(variable)?;
        match text_of(&value).and_then(read) {
            Ok(value) => Some(value),
            Err(expected) => {
                self.invalid.push(InvalidVariable { variable, value, expected });
                None
            }
        }
    }
}

fn text_of(value: &OsStr) -> Result<&str, InvalidValue> {
    value.to_str().ok_or(InvalidValue::NotText)
}

#[cfg(test)]
mod tests;
