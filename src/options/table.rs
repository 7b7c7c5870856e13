//! The table of options: what can be set, how it is called everywhere, and what it does.
//!
//! The launcher's parser and help, the environment that it hands to the program, the plugin's configuration and the README's
//! table are made from here.

use super::values::{Budget, InvalidValue, Reserve, UpdateRate};
use crate::units::MissRule;
use std::ffi::OsStr;

/// An option of moe-hot.
#[derive(Debug, PartialEq, Eq)]
pub struct OptionSpec {
    /// On the command line, with its dashes.
    pub flag: &'static str,
    /// In the environment.
    pub variable: &'static str,
    /// What stands for its value in help texts.
    pub value_name: &'static str,
    /// What it does, in one sentence that the default can follow.
    pub help: &'static str,
    /// What holds without it, in words.
    pub default: &'static str,
    /// What its value must be.
    pub kind: Kind,
    /// Who acts on it.
    pub readers: Readers,
    /// Whether it only steers a cache: it does nothing without `--moe-hot-cache`.
    pub needs_cache: bool,
}

/// What a value must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file's path.
    Path,
    /// Text, not empty.
    Text,
    /// A [`Budget`].
    Budget,
    /// A [`Reserve`].
    Reserve,
    /// An [`UpdateRate`].
    UpdateRate,
    /// A [`MissRule`].
    MissRule,
}

/// Who acts on an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// The plugin alone; the launcher checks the value and passes it on.
    Plugin,
    /// The launcher too: it looks at the file, or leaves room for the cache.
    LauncherAndPlugin,
}

impl OptionSpec {
    /// The option's key in llama.cpp's INI files: the flag without its dashes.
    pub fn ini_key(&self) -> &'static str {
        self.flag.trim_start_matches('-')
    }

    /// Whether a value can be a negative number.
    pub fn is_number(&self) -> bool {
        matches!(self.kind, Kind::Budget | Kind::Reserve)
    }

    /// Checks a value. The error says what was expected.
    pub fn check(&self, value: &OsStr) -> Result<(), InvalidValue> {
        let text = || value.to_str().ok_or(InvalidValue::NotText);
        match self.kind {
            Kind::Path => Ok(()),
            Kind::Text => text().map(drop),
            Kind::Budget => text()?.parse::<Budget>().map(drop),
            Kind::Reserve => text()?.parse::<Reserve>().map(drop),
            Kind::UpdateRate => text()?.parse::<UpdateRate>().map(drop),
            Kind::MissRule => text()?.parse::<MissRule>().map(drop),
        }
    }
}

/// Where the profile is written.
pub const PERF_OUT: OptionSpec = OptionSpec {
    flag: "--moe-layer-perf-out",
    variable: "LLAMA_ARG_MOE_LAYER_PERF_OUT",
    value_name: "FILE",
    help: "record which experts are used and write the profile to FILE",
    default: "nothing is recorded",
    kind: Kind::Path,
    readers: Readers::LauncherAndPlugin,
    needs_cache: false,
};

/// The profile that says which experts to keep on a device, a [`CacheProfile`](super::CacheProfile).
pub const HOT_CACHE: OptionSpec = OptionSpec {
    flag: "--moe-hot-cache",
    variable: "LLAMA_ARG_MOE_HOT_CACHE",
    value_name: "FILE",
    help: "keep the experts that are used most on a GPU: `auto` learns which, and keeps that in a file beside the model; FILE: \
           those of this profile",
    default: "no cache",
    kind: Kind::Path,
    readers: Readers::LauncherAndPlugin,
    needs_cache: false,
};

/// How much of the device's memory experts may take.
pub const HOT_CACHE_MAX_MIB: OptionSpec = OptionSpec {
    flag: "--moe-hot-cache-max-mib",
    variable: "LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB",
    value_name: "N",
    help: "GPU memory for experts in MiB; 0: no cache, -1: what is free, less the reserve",
    default: "-1",
    kind: Kind::Budget,
    readers: Readers::LauncherAndPlugin,
    needs_cache: true,
};

/// What an automatic budget leaves free.
pub const HOT_CACHE_AUTO_RESERVE_MIB: OptionSpec = OptionSpec {
    flag: "--moe-hot-cache-auto-reserve-mib",
    variable: "LLAMA_ARG_MOE_HOT_CACHE_AUTO_RESERVE_MIB",
    value_name: "N",
    help: "MiB of GPU memory that the automatic size leaves free",
    default: "1024",
    kind: Kind::Reserve,
    readers: Readers::Plugin,
    needs_cache: true,
};

/// The device to cache on.
pub const HOT_CACHE_DEVICE: OptionSpec = OptionSpec {
    flag: "--moe-hot-cache-device",
    variable: "LLAMA_ARG_MOE_HOT_CACHE_DEVICE",
    value_name: "NAME",
    help: "the device to keep experts on, as --list-devices names it",
    default: "the first GPU of this machine with memory of its own; RPC devices only when named",
    kind: Kind::Text,
    readers: Readers::LauncherAndPlugin,
    needs_cache: true,
};

/// How fast the set of residents may change.
pub const HOT_CACHE_UPDATE_RATE: OptionSpec = OptionSpec {
    flag: "--moe-hot-cache-update-rate",
    variable: "LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE",
    value_name: "F",
    help: "largest share of a layer's slots that may be replaced per 1,000 tokens, 0 to 1; 0: the set is fixed and the \
           profile is left as it is",
    default: "as many as pay",
    kind: Kind::UpdateRate,
    readers: Readers::Plugin,
    needs_cache: true,
};

/// Where a missed expert is computed.
pub const HOT_CACHE_MISS: OptionSpec = OptionSpec {
    flag: "--moe-hot-cache-miss",
    variable: "LLAMA_ARG_MOE_HOT_CACHE_MISS",
    value_name: "RULE",
    help: "where a missed expert is computed: `cpu`, `copy` (copied at once, then on the device), or `auto`: whichever is \
           cheaper by what both have taken so far",
    default: "auto",
    kind: Kind::MissRule,
    readers: Readers::Plugin,
    needs_cache: true,
};

/// Where every token's routing is written.
pub const TRACE_OUT: OptionSpec = OptionSpec {
    flag: "--moe-trace-out",
    variable: "LLAMA_ARG_MOE_TRACE_OUT",
    value_name: "FILE",
    help: "write every token's experts to FILE, for `moe-hot replay`",
    default: "no trace",
    kind: Kind::Path,
    readers: Readers::LauncherAndPlugin,
    needs_cache: false,
};

/// Every option, in the order in which they are shown.
pub const OPTIONS: [&OptionSpec; 8] = [
    &PERF_OUT,
    &HOT_CACHE,
    &HOT_CACHE_MAX_MIB,
    &HOT_CACHE_AUTO_RESERVE_MIB,
    &HOT_CACHE_DEVICE,
    &HOT_CACHE_UPDATE_RATE,
    &HOT_CACHE_MISS,
    &TRACE_OUT,
];

/// A setting for tests. It does nothing unless set, and no flag stands for it.
pub struct TestSetting {
    /// In the environment.
    pub variable: &'static str,
}

/// So many slots per layer (as far as the budget allows), filled before the next batch is computed.
pub const TEST_SLOTS: TestSetting = TestSetting { variable: "MOE_HOT_TEST_SLOTS" };
/// Copies count as free, so that residents are swapped as often as can be.
pub const TEST_FREE_COPIES: TestSetting = TestSetting { variable: "MOE_HOT_TEST_FREE_COPIES" };
/// A cache that loses is not noticed, so that tests of answers and hits do not depend on times.
pub const TEST_NO_GUARD: TestSetting = TestSetting { variable: "MOE_HOT_TEST_NO_GUARD" };
/// Tokens wait until their context's lane is ready, so that tests of answers and hits do not depend on times.
pub const TEST_WAIT: TestSetting = TestSetting { variable: "MOE_HOT_TEST_WAIT" };
/// Splits lie in host memory, also where they could lie on the device.
pub const TEST_HOST_SPLITS: TestSetting = TestSetting { variable: "MOE_HOT_TEST_HOST_SPLITS" };
/// `1`: rows of splits on the device pass through host memory all the same.
pub const TEST_HOST_ROWS: TestSetting = TestSetting { variable: "MOE_HOT_TEST_HOST_ROWS" };
/// A file that timings are written to.
pub const TEST_TIMINGS: TestSetting = TestSetting { variable: "MOE_HOT_TEST_TIMINGS" };
/// Claim operations whose weights are not in any buffer yet, as test-backend-ops asks.
pub const TEST_CLAIM_UNPLACED: TestSetting = TestSetting { variable: "MOE_HOT_TEST_CLAIM_UNPLACED" };
