//! Our own flags, which stand among the program's arguments.

use crate::config::PERF_OUT;
use crate::routing::{Profile, folder_of};
use anyhow::{Context, Result, anyhow};
use clap::{CommandFactory, Parser};
use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// What all of our flags begin with. No flag of llama.cpp does.
const PREFIX: &str = "--moe-";

/// The flags that moe-hot adds to llama.cpp's programs.
#[derive(Parser, Debug, Default, PartialEq, Eq)]
#[command(no_binary_name = true, disable_help_flag = true, args_override_self = true)]
pub struct MoeFlags {
    /// Record which experts are used and write the profile to FILE.
    #[arg(long = "moe-layer-perf-out", value_name = "FILE")]
    pub perf_out: Option<PathBuf>,
}

impl MoeFlags {
    /// Whether the plugin will take experts.
    pub fn take_experts(&self) -> bool {
        self.perf_out.is_some()
    }

    /// Adds what the environment says, checks what can be known before the program starts, and makes paths absolute.
    pub fn validate(&mut self) -> Result<()> {
        let from_environment = || env::var_os(PERF_OUT).filter(|path| !path.is_empty()).map(PathBuf::from);
        self.perf_out = self.perf_out.take().or_else(from_environment);
        if let Some(path) = &mut self.perf_out {
            *path = check_output(path).context("--moe-layer-perf-out")?;
        }
        Ok(())
    }
}

/// Parts a command line into our flags and the program's arguments, in their order.
pub fn take(args: Vec<OsString>) -> Result<(MoeFlags, Vec<OsString>)> {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        if !starts_with(&arg, PREFIX) {
            theirs.push(arg);
            continue;
        }
        let value = if takes_value(&arg) { args.next_if(|next| !starts_with(next, "-")) } else { None };
        ours.push(arg);
        ours.extend(value);
    }
    let flags =
        MoeFlags::try_parse_from(ours).map_err(|error| anyhow!("{}; our flags are {}", first_line(&error), list()))?;
    Ok((flags, theirs))
}

/// Our flags, one a line, for `--help`.
pub fn help() -> String {
    let line = |arg: &clap::Arg| {
        format!("  {}\n          {}", usage(arg), arg.get_help().map(ToString::to_string).unwrap_or_default())
    };
    let lines: Vec<_> = MoeFlags::command().get_arguments().map(line).collect();
    format!("Flags among the program's arguments:\n{}", lines.join("\n"))
}

fn list() -> String {
    MoeFlags::command().get_arguments().map(usage).collect::<Vec<_>>().join(", ")
}

fn usage(arg: &clap::Arg) -> String {
    let value = arg.get_value_names().and_then(|names| names.first()).map(|name| format!(" {name}"));
    format!("--{}{}", arg.get_long().unwrap_or_default(), value.unwrap_or_default())
}

/// Whether `arg` is one of our flags, written without `=`, that wants a value.
fn takes_value(arg: &OsStr) -> bool {
    let is_it = |known: &clap::Arg| known.get_long().is_some_and(|long| arg == OsStr::new(&format!("--{long}")));
    MoeFlags::command().get_arguments().any(|known| is_it(known) && known.get_action().takes_values())
}

fn starts_with(arg: &OsStr, prefix: &str) -> bool {
    arg.as_encoded_bytes().starts_with(prefix.as_bytes())
}

fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

/// A path where a profile may be written: absolute, in an existing writable folder, free or held by a profile.
fn check_output(path: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(path).with_context(|| format!("{path:?}: expected a file name"))?;
    Profile::read_if_any(&path).context("expected a new file or an earlier profile")?;
    let folder = folder_of(&path);
    tempfile::tempfile_in(&folder).with_context(|| {
        format!("{}: expected an existing folder that can be written to: {}", path.display(), folder.display())
    })?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(args: &[&str]) -> Result<(MoeFlags, Vec<OsString>)> {
        take(args.iter().map(OsString::from).collect())
    }

    #[test]
    fn our_flags_are_taken_out_and_the_rest_keeps_its_order() {
        for args in [
            &["-m", "a.gguf", "--moe-layer-perf-out", "e.json", "-c", "4096"][..],
            &["-m", "a.gguf", "--moe-layer-perf-out=e.json", "-c", "4096"],
        ] {
            let (flags, rest) = split(args).unwrap();
            assert_eq!(flags.perf_out.as_deref(), Some(Path::new("e.json")));
            assert_eq!(rest, ["-m", "a.gguf", "-c", "4096"]);
        }
    }

    #[test]
    fn the_last_of_several_counts_as_with_llama_cpps_own_flags() {
        let (flags, _) = split(&["--moe-layer-perf-out", "a", "--moe-layer-perf-out", "b"]).unwrap();
        assert_eq!(flags.perf_out.as_deref(), Some(Path::new("b")));
    }

    #[test]
    fn bad_flags_are_named_with_what_was_expected() {
        for (args, said) in [
            (&["--moe-nonsense"][..], "--moe-nonsense"),
            (&["--moe-layer-perf-out"], "value is required"),
            (&["--moe-layer-perf-out", "-m", "x"], "value is required"),
            (&["--moe-layer-perf-out="], "value is required"),
        ] {
            let message = split(args).unwrap_err().to_string();
            assert!(message.contains(said) && message.contains("--moe-layer-perf-out FILE"), "{args:?}: {message}");
            assert_eq!(message.lines().count(), 1);
        }
    }
}
