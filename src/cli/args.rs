//! Reading the program's own arguments as llama.cpp reads them: `--flag value`, the last one counts.

use std::env;
use std::ffi::{OsStr, OsString};

/// One of llama.cpp's options that take a value.
pub struct ValueOption {
    flags: &'static [&'static str],
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

impl ValueOption {
    /// The value on the command line, else in the environment.
    pub fn value(&self, args: &[OsString]) -> Option<OsString> {
        self.given(args).or_else(|| env::var_os(self.variable).filter(|value| !value.is_empty()))
    }

    /// The value on the command line.
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
}
