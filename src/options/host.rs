//! What we read of llama.cpp's own settings, as llama.cpp reads them.

use std::env;
use std::ffi::{OsStr, OsString};

/// One of llama.cpp's options that take a value.
pub struct ValueOption {
    /// Its spellings on the command line.
    pub flags: &'static [&'static str],
    /// What stands for it in the environment.
    pub variable: &'static str,
}

/// The model's file.
pub const MODEL: ValueOption = ValueOption { flags: &["-m", "--model"], variable: "LLAMA_ARG_MODEL" };
/// Servers whose devices are used too.
pub const RPC: ValueOption = ValueOption { flags: &["--rpc", "-rpc"], variable: "LLAMA_ARG_RPC" };
/// Which devices are used.
pub const DEVICE: ValueOption = ValueOption { flags: &["-dev", "--device"], variable: "LLAMA_ARG_DEVICE" };
/// Whether to fit unset arguments to the devices' memory.
pub const FIT: ValueOption = ValueOption { flags: &["-fit", "--fit"], variable: "LLAMA_ARG_FIT" };
/// What to leave free of it, in MiB.
pub const FIT_TARGET: ValueOption = ValueOption { flags: &["-fitt", "--fit-target"], variable: "LLAMA_ARG_FIT_TARGET" };

/// Flags that say where experts go.
pub const PLACEMENT_FLAGS: [&str; 6] = ["--cpu-moe", "-cmoe", "--n-cpu-moe", "-ncmoe", "--override-tensor", "-ot"];
/// Variables that say where experts go.
pub const PLACEMENT_VARIABLES: [&str; 3] = ["LLAMA_ARG_CPU_MOE", "LLAMA_ARG_N_CPU_MOE", "LLAMA_ARG_OVERRIDE_TENSOR"];

/// Where llama.cpp looks for one backend from elsewhere.
pub const BACKEND_PATH: &str = "GGML_BACKEND_PATH";
/// Whether to keep away from page-locked host memory (`--no-host`).
pub const LLAMA_NO_HOST: &str = "LLAMA_ARG_NO_HOST";
/// The launcher's word that the program was given `--no-host`.
pub const NO_HOST: &str = "MOE_HOT_NO_HOST";
/// The launcher's word that it has placed the experts and left room for the cache.
pub const PREPARED: &str = "MOE_HOT_PREPARED";
/// Batches of at least this many tokens may be computed on the GPU from host weights.
pub const OFFLOAD_MIN_BATCH: &str = "GGML_OP_OFFLOAD_MIN_BATCH";
/// llama.cpp's own default for it.
pub const OFFLOAD_MIN_BATCH_DEFAULT: u32 = 32;

/// A variable of this process's environment, if it is set and not empty.
pub fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Whether a variable is set, to whatever.
pub fn is_set(name: &str) -> bool {
    env::var_os(name).is_some()
}

impl ValueOption {
    /// The value on the command line, else in the environment.
    pub fn value(&self, args: &[OsString]) -> Option<OsString> {
        self.given(args).or_else(|| variable(self.variable))
    }

    /// The value on the command line: the last one counts.
    pub fn given(&self, args: &[OsString]) -> Option<OsString> {
        let last = args.windows(2).rev().find(|pair| self.is(&pair[0]));
        last.map(|pair| pair[1].clone())
    }

    /// The command line without this option.
    pub fn remove_from(&self, args: Vec<OsString>) -> Vec<OsString> {
        let mut kept = Vec::new();
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            if self.is(&arg) {
                args.next();
            } else {
                kept.push(arg);
            }
        }
        kept
    }

    /// Whether `arg` is one of its spellings; llama.cpp takes `_` for `-` in long ones.
    fn is(&self, arg: &OsStr) -> bool {
        let text = arg.to_string_lossy();
        let text = if text.starts_with("--") { text.replace('_', "-") } else { text.into_owned() };
        self.flags.contains(&text.as_str())
    }
}

/// llama.cpp's words for yes.
pub fn is_yes(value: &OsStr) -> bool {
    ["1", "on", "enabled", "true"].iter().any(|word| value == *word)
}

/// llama.cpp's words for no.
pub fn is_no(value: &OsStr) -> bool {
    ["off", "disabled", "false", "0"].iter().any(|word| value == *word)
}

/// Reads a threshold as ggml's backends do (C's `atoi`): leading digits count, anything else is 0.
pub fn threshold(text: &OsStr) -> u32 {
    let text = text.to_string_lossy();
    let text = text.trim_start();
    let digits = text.strip_prefix('+').unwrap_or(text);
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str) -> Vec<OsString> {
        text.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn the_last_value_counts_and_all_are_removed() {
        let args = args("-fitt 1 -c 9 --fit_target 2 -m x");
        assert_eq!(FIT_TARGET.given(&args).unwrap(), "2");
        assert_eq!(FIT_TARGET.remove_from(args), ["-c", "9", "-m", "x"]);
    }

    #[test]
    fn a_flag_without_value_gives_nothing() {
        assert_eq!(MODEL.given(&args("-c 9 -m")), None);
        assert_eq!(MODEL.given(&args("--model=x --models y")), None, "llama.cpp knows no such spelling");
    }

    #[test]
    fn the_threshold_is_read_as_ggml_reads_it() {
        for (text, value) in [("8", 8), (" 16x", 16), ("+4", 4), ("-3", 0), ("many", 0)] {
            assert_eq!(threshold(OsStr::new(text)), value, "{text:?}");
        }
    }
}
