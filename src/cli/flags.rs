//! Our own flags, which stand among the program's arguments.

use super::failure::{Failure, OrFail, named_by_user};
use super::same_model::check_model;
use crate::Error;
use crate::gguf::ModelFile;
use crate::options::host;
use crate::options::{Config, HOT_CACHE, InvalidVariable, Kind, OPTIONS, OptionSpec, PERF_OUT, TRACE_OUT};
use crate::profile::{OutputFile, RecordedProfile, folder_of};
use crate::trace::MAGIC;
use anyhow::{Context, Result, anyhow, bail};
use clap::builder::{NonEmptyStringValueParser, PathBufValueParser, TypedValueParser, ValueParser};
use clap::{Arg, Command};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// What all of our flags begin with. No flag of llama.cpp does.
const PREFIX: &str = "--moe-";

/// What the user has said of our options, on the command line or in the environment.
#[derive(Debug, Default)]
pub struct Flags {
    /// By option, each once.
    given: Vec<(&'static OptionSpec, OsString)>,
}

impl Flags {
    /// What was given otherwise than in the environment, values checked.
    pub fn of(given: Vec<(&'static OptionSpec, OsString)>) -> Self {
        Self { given }
    }

    fn value(&self, option: &OptionSpec) -> Option<&OsStr> {
        self.given.iter().find(|(known, _)| *known == option).map(|(_, value)| value.as_os_str())
    }

    /// What it comes to, without what is for the plugin alone to find out.
    pub fn config(&self) -> Config {
        let value = |name: &str| self.given.iter().find(|(option, _)| option.variable == name);
        Config::from_lookup(|name| value(name).map(|(_, value)| value.clone()))
    }

    /// Adds what the environment says, checks what can be known before the program starts, and makes paths absolute.
    ///
    /// `model` is the model's file, where the program's arguments name one.
    pub fn validate(&mut self, model: Option<&ModelFile>) -> Result<(), Failure> {
        let on_command_line = self.given.iter().find(|(option, _)| option.needs_cache).map(|(option, _)| option.flag);
        self.add_environment(host::variable).or_input()?;
        if let (None, Some(flag)) = (self.value(&HOT_CACHE), on_command_line) {
            return Err(Failure::Input(anyhow!(
                "{flag} does nothing without a profile; expected {} {} too",
                HOT_CACHE.flag,
                HOT_CACHE.value_name
            )));
        }
        for (option, value) in &mut self.given {
            let path = Path::new(value.as_os_str());
            let checked = match *option {
                option if *option == PERF_OUT => check_output(path),
                option if *option == TRACE_OUT => check_trace(path),
                option if *option == HOT_CACHE => check_input(path, model),
                _ => continue,
            };
            *value = checked.context(option.flag).map_err(named_by_user)?.into_os_string();
        }
        Ok(())
    }

    /// The environment that tells the plugin all this.
    pub fn environment(&self) -> impl Iterator<Item = (&'static str, &OsStr)> {
        self.given.iter().map(|(option, value)| (option.variable, value.as_os_str()))
    }

    /// Takes from the environment what was not given as a flag.
    fn add_environment(&mut self, variable: impl Fn(&str) -> Option<OsString>) -> Result<(), InvalidVariable> {
        for option in OPTIONS {
            if self.value(option).is_some() {
                continue;
            }
            let Some(value) = variable(option.variable) else { continue };
            match option.check(&value) {
                Ok(()) => self.given.push((option, value)),
                Err(expected) => return Err(InvalidVariable { variable: option.variable, value, expected }),
            }
        }
        Ok(())
    }
}

/// The parser of our flags, made from the table of options. Of several values the last one counts.
fn parser() -> Command {
    let arg = |option: &'static OptionSpec| {
        let value_parser: ValueParser = match option.kind {
            Kind::Path => PathBufValueParser::new().map(PathBuf::into_os_string).into(),
            _ => NonEmptyStringValueParser::new()
                .try_map(|text| option.check(text.as_ref()).map(|()| OsString::from(text)))
                .into(),
        };
        Arg::new(option.flag)
            .long(option.ini_key())
            .value_name(option.value_name)
            .allow_negative_numbers(option.is_number())
            .value_parser(value_parser)
    };
    Command::new("flags").no_binary_name(true).disable_help_flag(true).args_override_self(true).args(OPTIONS.map(arg))
}

/// Parts a command line into our flags and the program's arguments, in their order.
pub fn take(args: Vec<OsString>) -> Result<(Flags, Vec<OsString>)> {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        if !starts_with(&arg, PREFIX) {
            theirs.push(arg);
            continue;
        }
        // Written without `=`, its value comes next.
        let option = OPTIONS.iter().find(|option| arg == option.flag);
        let value = option.and_then(|option| args.next_if(|next| is_value(option, next)));
        ours.push(arg);
        ours.extend(value);
    }
    let mut matches = parser()
        .try_get_matches_from(ours)
        .map_err(|error| anyhow!("{}; our flags are {}", first_line(&error), list()))?;
    let given = OPTIONS.into_iter().filter_map(|option| Some((option, matches.remove_one::<OsString>(option.flag)?)));
    Ok((Flags { given: given.collect() }, theirs))
}

/// Our flags, each with what it does, for `--help`.
pub fn help() -> String {
    let line =
        |option: &OptionSpec| format!("  {}\n          {} (default: {})", usage(option), option.help, option.default);
    format!("Flags among the program's arguments:\n{}", OPTIONS.map(line).join("\n"))
}

fn list() -> String {
    OPTIONS.map(usage).join(", ")
}

fn usage(option: &OptionSpec) -> String {
    format!("{} {}", option.flag, option.value_name)
}

/// Whether what follows a flag is its value; `-1` can be, `-m` never is.
fn is_value(option: &OptionSpec, next: &OsStr) -> bool {
    let is_negative = next.as_encoded_bytes().get(1).is_some_and(u8::is_ascii_digit);
    !starts_with(next, "-") || (is_negative && option.is_number())
}

fn starts_with(arg: &OsStr, prefix: &str) -> bool {
    arg.as_encoded_bytes().starts_with(prefix.as_bytes())
}

fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

/// A path where a trace may be written: absolute, in an existing writable folder, free or a regular file.
fn check_trace(path: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(path).with_context(|| format!("{path:?}: expected a file name"))?;
    if !is_free_or_trace(&path).with_context(|| format!("{}: cannot be read", path.display()))? {
        bail!("{}: expected a new file or an earlier trace", path.display());
    }
    check_folder_of(&path)?;
    Ok(path)
}

/// Whether nothing is there, or an empty file, or what begins as a trace does.
fn is_free_or_trace(path: &Path) -> io::Result<bool> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
        Ok(meta) if !meta.is_file() => return Ok(false),
        Ok(_) => {}
    }
    let mut start = Vec::new();
    File::open(path)?.take(MAGIC.len() as u64).read_to_end(&mut start)?;
    Ok(start.is_empty() || start == MAGIC)
}

fn check_folder_of(path: &Path) -> Result<()> {
    let folder = folder_of(path);
    tempfile::tempfile_in(&folder).map(drop).with_context(|| {
        format!("{}: expected an existing folder that can be written to: {}", path.display(), folder.display())
    })
}

/// A path where a profile may be written: absolute, in an existing writable folder, free or held by a profile.
fn check_output(path: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(path).with_context(|| format!("{path:?}: expected a file name"))?;
    OutputFile::check(&path).context("expected a new file or an earlier profile")?;
    check_folder_of(&path)?;
    Ok(path)
}

/// A profile to read: absolute, whole, and of this model.
fn check_input(path: &Path, model: Option<&ModelFile>) -> Result<PathBuf> {
    let path = std::path::absolute(path).with_context(|| format!("{path:?}: expected a file name"))?;
    let profile = RecordedProfile::read(&path)?;
    if let Some(model) = model {
        check_model(&profile, model).map_err(|error| Error::file(&path, error))?;
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Budget;

    fn split(args: &[&str]) -> Result<(Flags, Vec<OsString>)> {
        take(args.iter().map(OsString::from).collect())
    }

    #[test]
    fn our_flags_are_taken_out_and_the_rest_keeps_its_order() {
        for args in [
            &["-m", "a.gguf", "--moe-layer-perf-out", "e.json", "-c", "4096"][..],
            &["-m", "a.gguf", "--moe-layer-perf-out=e.json", "-c", "4096"],
        ] {
            let (flags, rest) = split(args).unwrap();
            assert_eq!(flags.value(&PERF_OUT), Some(OsStr::new("e.json")));
            assert_eq!(rest, ["-m", "a.gguf", "-c", "4096"]);
        }
    }

    #[test]
    fn the_last_of_several_counts_as_with_llama_cpps_own_flags() {
        let (flags, _) = split(&["--moe-layer-perf-out", "a", "--moe-layer-perf-out", "b"]).unwrap();
        assert_eq!(flags.value(&PERF_OUT), Some(OsStr::new("b")));
    }

    #[test]
    fn a_negative_number_is_a_value_where_numbers_are_expected() {
        for args in [&["--moe-hot-cache-max-mib", "-1", "-m", "x"][..], &["--moe-hot-cache-max-mib=-1", "-m", "x"]] {
            let (flags, rest) = split(args).unwrap();
            assert_eq!(flags.config().max_mib, Budget::Automatic);
            assert_eq!(rest, ["-m", "x"]);
        }
        assert!(split(&["--moe-hot-cache", "-1"]).is_err(), "a file may be called that, but is more likely forgotten");
    }

    #[test]
    fn a_cache_takes_experts_unless_it_is_off() {
        let takes = |args: &[&str]| split(args).unwrap().0.config().takes_experts();
        assert!(takes(&["--moe-hot-cache", "e.json"]));
        assert!(!takes(&["--moe-hot-cache", "e.json", "--moe-hot-cache-max-mib", "0"]));
        assert!(takes(&["--moe-hot-cache=e.json", "--moe-hot-cache-max-mib=0", "--moe-layer-perf-out=e.json"]));
    }

    #[test]
    fn every_flag_becomes_its_environment_variable() {
        let args = "--moe-hot-cache /e --moe-hot-cache-max-mib 7 --moe-hot-cache-auto-reserve-mib 8 \
                    --moe-hot-cache-device CUDA0 --moe-layer-perf-out /o";
        let (flags, _) = split(&args.split_whitespace().collect::<Vec<_>>()).unwrap();
        let values: Vec<_> = flags.environment().map(|(_, value)| value).collect();
        assert_eq!(values, ["/o", "/e", "7", "8", "CUDA0"]);
        assert_eq!(Flags::default().environment().count(), 0);
    }

    #[test]
    fn bad_flags_are_named_with_what_was_expected() {
        for (args, said) in [
            (&["--moe-nonsense"][..], "--moe-nonsense"),
            (&["--moe-layer-perf-out"], "value is required"),
            (&["--moe-layer-perf-out", "-m", "x"], "value is required"),
            (&["--moe-layer-perf-out="], "value is required"),
            (&["--moe-hot-cache-max-mib", "-2"], "'-2' for '--moe-hot-cache-max-mib <N>': expected a whole number"),
            (&["--moe-hot-cache-max-mib", "99999999999999999999"], "expected a whole number"),
            (&["--moe-hot-cache-auto-reserve-mib=-1"], "from 0"),
            (&["--moe-hot-cache-device="], "value is required"),
            (&["--moe-hot-cache", "-1"], "value is required"),
        ] {
            let message = split(args).unwrap_err().to_string();
            assert!(message.contains(said) && message.contains("--moe-layer-perf-out FILE"), "{args:?}: {message}");
            assert_eq!(message.lines().count(), 1);
        }
    }

    #[test]
    fn a_flag_wins_over_its_variable_and_a_bad_variable_is_named() {
        let (mut flags, _) = split(&["--moe-hot-cache-max-mib", "7"]).unwrap();
        let environment = |name: &str| match name {
            "LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB" => Some(OsString::from("9")),
            "LLAMA_ARG_MOE_HOT_CACHE_DEVICE" => Some(OsString::from("CUDA0")),
            _ => None,
        };
        flags.add_environment(environment).unwrap();
        assert_eq!((flags.config().max_mib, flags.config().device.as_deref()), (Budget::Mib(7), Some("CUDA0")));
        let bad = |name: &str| (name == "LLAMA_ARG_MOE_HOT_CACHE_MISS").then(|| OsString::from("gpu"));
        let message = flags.add_environment(bad).unwrap_err().to_string();
        assert_eq!(message, "LLAMA_ARG_MOE_HOT_CACHE_MISS is \"gpu\": expected cpu, copy or auto");
    }

    #[test]
    fn help_names_every_option_with_its_default() {
        let help = help();
        for option in OPTIONS {
            assert!(help.contains(option.flag) && help.contains(option.help) && help.contains(option.default));
        }
    }
}
