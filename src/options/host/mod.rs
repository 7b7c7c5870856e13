//! What we read of llama.cpp's own settings, as llama.cpp reads them (common/arg.cpp, common/preset.cpp, tools/llama-bench at
//! the pinned revision).
//!
//! All programs but llama-bench share one parser. It applies, one after the other:
//!
//! 1. `/etc/llama.cpp/config.ini`, then `config.ini` in `$XDG_CONFIG_HOME/llama.cpp` (else `~/.config/llama.cpp`); of each file
//!    the section `[*]`, then `[default]` and what stands before any section. Keys are flags without their dashes, or
//!    variables. A switch counts whatever its value is. Keys that the program does not know are skipped.
//! 2. The variables that its help names as `(env: …)`. A switch counts if its value is a word for yes. An empty value of any
//!    other option is a value.
//! 3. The command line. In words that begin with `--`, `_` stands for `-`. A value is always the next word, whatever it looks
//!    like; there is no `--flag=value`, and nothing ends the flags.
//!
//! Later values replace earlier ones, but for placements (`-ot`, `-cmoe`, `-ncmoe`) and servers (`--rpc`), which add up: of
//! the placements that match a tensor the first one counts.
//!
//! A server without a model starts one child for each model that is asked for (*router*). The child reads 1 and 2 by itself.
//! Its command line is made from the INI file that `--models-preset` names: `[*]`, over it the model's own section, over it the
//! router's command line, of which each option keeps only its last value. There a switch counts unless its value is a word
//! for no.
//!
//! llama-bench reads its command line and nothing else. Its values are lists, separated by `,` or given by repeating the flag,
//! and each value is a test of its own; several overrides of one test are separated by `;`.

mod ini;
mod settings;
mod syntax;

pub use settings::{Settings, Source, Target};
pub use syntax::Syntax;

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// One of llama.cpp's options.
#[derive(Debug, PartialEq, Eq)]
pub struct HostOption {
    /// Its spellings on the command line; without their dashes they are keys of INI files.
    pub flags: &'static [&'static str],
    /// What stands for it in the environment, and is a key of INI files too; empty where nothing does.
    pub variable: &'static str,
    /// Whether it takes a value; where it does not, to give it is to switch something on.
    pub takes_value: bool,
}

/// The model's file.
pub const MODEL: HostOption = value(&["-m", "--model"], "LLAMA_ARG_MODEL");
/// A repository that the model is in; wins over [`MODEL`].
pub const HF_REPO: HostOption = value(&["-hf", "-hfr", "--hf-repo"], "LLAMA_ARG_HF_REPO");
/// Another kind of repository; wins over [`MODEL`].
pub const DOCKER_REPO: HostOption = value(&["-dr", "--docker-repo"], "LLAMA_ARG_DOCKER_REPO");
/// Servers whose devices are used too.
pub const RPC: HostOption = value(&["-rpc", "--rpc"], "LLAMA_ARG_RPC");
/// Which devices are used.
pub const DEVICE: HostOption = value(&["-dev", "--device"], "LLAMA_ARG_DEVICE");
/// Whether to fit unset arguments to the devices' memory.
pub const FIT: HostOption = value(&["-fit", "--fit"], "LLAMA_ARG_FIT");
/// What to leave free of it, in MiB.
pub const FIT_TARGET: HostOption = value(&["-fitt", "--fit-target"], "LLAMA_ARG_FIT_TARGET");
/// All experts stay on the CPU.
pub const CPU_MOE: HostOption = switch(&["-cmoe", "--cpu-moe"], "LLAMA_ARG_CPU_MOE");
/// The experts of the first N layers stay on the CPU.
pub const N_CPU_MOE: HostOption = value(&["-ncmoe", "--n-cpu-moe"], "LLAMA_ARG_N_CPU_MOE");
/// Where tensors go, by pattern.
pub const OVERRIDE_TENSOR: HostOption = value(&["-ot", "--override-tensor"], "LLAMA_ARG_OVERRIDE_TENSOR");
/// Whether to keep away from page-locked host memory.
pub const NO_HOST: HostOption = switch(&["--no-host"], "LLAMA_ARG_NO_HOST");
/// Threads that compute.
pub const THREADS: HostOption = value(&["-t", "--threads"], "LLAMA_ARG_THREADS");
/// Threads that compute prompts; as many as [`THREADS`] unless given. No variable stands for it.
pub const THREADS_BATCH: HostOption = value(&["-tb", "--threads-batch"], "");
/// How many layers go to GPUs.
pub const GPU_LAYERS: HostOption = value(&["-ngl", "--gpu-layers", "--n-gpu-layers"], "LLAMA_ARG_N_GPU_LAYERS");
/// How the model's file is read.
pub const LOAD_MODE: HostOption = value(&["-lm", "--load-mode"], "LLAMA_ARG_LOAD_MODE");
/// Nothing is copied to a GPU only to be computed there. No variable stands for it.
pub const NO_OP_OFFLOAD: HostOption = switch(&["-nopo", "--no-op-offload"], "");
/// The INI file of a router's models.
pub const MODELS_PRESET: HostOption = value(&["--models-preset"], "LLAMA_ARG_MODELS_PRESET");
/// The expert cache that later revisions of llama.cpp have themselves, in MiB.
pub const MOE_CACHE_MIB: HostOption = value(&["--moe-cache-mib"], "LLAMA_ARG_MOE_CACHE_MIB");

/// Every option that we look at.
const HOST_OPTIONS: [&HostOption; 18] = [
    &MODEL,
    &HF_REPO,
    &DOCKER_REPO,
    &RPC,
    &DEVICE,
    &FIT,
    &FIT_TARGET,
    &CPU_MOE,
    &N_CPU_MOE,
    &OVERRIDE_TENSOR,
    &NO_HOST,
    &THREADS,
    &THREADS_BATCH,
    &GPU_LAYERS,
    &LOAD_MODE,
    &NO_OP_OFFLOAD,
    &MODELS_PRESET,
    &MOE_CACHE_MIB,
];

/// Where llama.cpp looks for one backend from elsewhere.
pub const BACKEND_PATH: &str = "GGML_BACKEND_PATH";
/// The launcher's word that the program was told `--no-host`.
pub const LAUNCHER_NO_HOST: &str = "MOE_HOT_NO_HOST";
/// The launcher's word that it has placed the experts and left room for the cache.
pub const PREPARED: &str = "MOE_HOT_PREPARED";
/// Has ggml's CUDA backend allocate memory that host and device share; it then reports what the host has free.
pub const UNIFIED_MEMORY: &str = "GGML_CUDA_ENABLE_UNIFIED_MEMORY";
/// What llama.cpp's variables for options begin with.
const VARIABLES: &str = "LLAMA_ARG_";
/// Where programs look for a user's configuration first.
pub const CONFIG_HOME: &str = "XDG_CONFIG_HOME";
/// Batches of at least this many tokens may be computed on the GPU from host weights.
pub const OFFLOAD_MIN_BATCH: &str = "GGML_OP_OFFLOAD_MIN_BATCH";
/// Our word that we have set it, by measurement.
pub const MEASURED_MIN_BATCH: &str = "MOE_HOT_MEASURED_MIN_BATCH";
/// llama.cpp's own default for it.
pub const OFFLOAD_MIN_BATCH_DEFAULT: u32 = 32;

const fn value(flags: &'static [&'static str], variable: &'static str) -> HostOption {
    HostOption { flags, variable, takes_value: true }
}

const fn switch(flags: &'static [&'static str], variable: &'static str) -> HostOption {
    HostOption { flags, variable, takes_value: false }
}

impl HostOption {
    /// The option with this spelling, as [`spelling`] gives it.
    fn of_flag(flag: &str) -> Option<&'static Self> {
        HOST_OPTIONS.into_iter().find(|option| option.flags.contains(&flag))
    }

    /// The option with this key in an INI file.
    fn of_key(key: &str) -> Option<&'static Self> {
        let is_key = |flag: &&str| flag.trim_start_matches('-') == key;
        HOST_OPTIONS.into_iter().find(|option| option.variable == key || option.flags.iter().any(is_key))
    }
}

/// A flag as llama.cpp compares it: `_` is `-` in words that begin with `--`. `None` for what is no text.
pub fn spelling(arg: &OsStr) -> Option<String> {
    let text = arg.to_str()?;
    Some(if text.starts_with("--") { text.replace('_', "-") } else { text.to_owned() })
}

/// A variable of this process's environment, if it is set and not empty.
pub fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Whether a variable is set in this process's environment, be it empty.
pub fn is_set(name: &str) -> bool {
    env::var_os(name).is_some()
}

/// The variables of this process that set options of llama.cpp's.
pub fn option_variables() -> impl Iterator<Item = OsString> {
    env::vars_os().map(|(name, _)| name).filter(|name| name.as_encoded_bytes().starts_with(VARIABLES.as_bytes()))
}

/// The configuration files that llama.cpp reads, in its order.
fn config_files() -> Vec<PathBuf> {
    let own = variable(CONFIG_HOME).map(PathBuf::from).or_else(|| Some(env::home_dir()?.join(".config")));
    let folders = [Some(PathBuf::from("/etc")), own];
    folders.into_iter().flatten().map(|folder| folder.join("llama.cpp/config.ini")).collect()
}

/// llama.cpp's words for yes.
pub fn is_yes(value: &OsStr) -> bool {
    ["1", "on", "enabled", "true"].iter().any(|word| value == *word)
}

/// llama.cpp's words for no.
pub fn is_no(value: &OsStr) -> bool {
    ["off", "disabled", "false", "0"].iter().any(|word| value == *word)
}

/// Reads a whole number as C++'s `stoi` and `stoull` do: what follows the digits is ignored. `None` where there are none,
/// which ends the program, and for negative numbers, which no option here has.
pub fn whole_number(text: &str) -> Option<u64> {
    let text = text.trim_start();
    let digits = text.strip_prefix('+').unwrap_or(text);
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

/// Reads a threshold as ggml's backends do (C's `atoi`): as above, and anything else is 0.
pub fn threshold(text: &OsStr) -> u32 {
    whole_number(&text.to_string_lossy()).and_then(|number| number.try_into().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_ggml_and_cpp_read_them() {
        for (text, value) in [("8", 8), (" 16x", 16), ("+4", 4), ("-3", 0), ("many", 0), ("99999999999999999999", 0)] {
            assert_eq!(threshold(OsStr::new(text)), value, "{text:?}");
        }
        assert_eq!([whole_number("512M"), whole_number(""), whole_number("-1")], [Some(512), None, None]);
    }

    #[test]
    fn keys_of_ini_files_are_flags_without_dashes_and_variables() {
        for key in ["cpu-moe", "cmoe", "LLAMA_ARG_CPU_MOE"] {
            assert_eq!(HostOption::of_key(key), Some(&CPU_MOE));
        }
        assert_eq!([HostOption::of_key("cpu_moe"), HostOption::of_key("--cpu-moe")], [None, None]);
    }
}
