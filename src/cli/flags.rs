//! Our own flags, which stand among the program's arguments.

use super::same_model::check_model;
use crate::Error;
use crate::gguf::ModelFile;
use crate::options::{
    self, Budget, HOT_CACHE, HOT_CACHE_AUTO_RESERVE_MIB, HOT_CACHE_DEVICE, HOT_CACHE_MAX_MIB, HOT_CACHE_MISS,
    HOT_CACHE_UPDATE_RATE, PERF_OUT, Reserve, TRACE_OUT, UpdateRate,
};
use crate::profile::{OutputFile, RecordedProfile, folder_of};
use crate::trace::MAGIC;
use crate::units::MissRule;
use anyhow::{Context, Result, anyhow, bail};
use clap::builder::NonEmptyStringValueParser;
use clap::{CommandFactory, Parser};
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
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
    /// Keep the experts that this profile counts most on a GPU.
    #[arg(long = "moe-hot-cache", value_name = "FILE")]
    pub hot_cache: Option<PathBuf>,
    /// GPU memory for experts in MiB; 0: none, -1: what is free (default: -1)
    #[arg(long = "moe-hot-cache-max-mib", value_name = "N", allow_negative_numbers = true)]
    pub max_mib: Option<Budget>,
    /// MiB of GPU memory that an automatic size leaves free (default: 1024)
    #[arg(long = "moe-hot-cache-auto-reserve-mib", value_name = "N", allow_negative_numbers = true)]
    pub auto_reserve_mib: Option<Reserve>,
    /// The GPU to keep experts on, as --list-devices names it (default: chosen by moe-hot)
    #[arg(long = "moe-hot-cache-device", value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub device: Option<String>,
    /// Largest share of a layer's experts on the GPU that may be replaced per 1000 tokens; 0: none (default: as it pays)
    #[arg(long = "moe-hot-cache-update-rate", value_name = "F", allow_negative_numbers = true)]
    pub update_rate: Option<UpdateRate>,
    /// Where an expert is computed that is not on the GPU: cpu, copy (on the GPU, after a copy), or auto (default: auto)
    #[arg(long = "moe-hot-cache-miss", value_name = "RULE")]
    pub miss: Option<MissRule>,
    /// Write the experts of every token to FILE, for moe-hot replay.
    #[arg(long = "moe-trace-out", value_name = "FILE")]
    pub trace_out: Option<PathBuf>,
}

impl MoeFlags {
    /// Whether the plugin will take experts.
    pub fn take_experts(&self) -> bool {
        self.perf_out.is_some() || self.trace_out.is_some() || self.cache()
    }

    /// Whether the plugin will keep experts on a device.
    pub fn cache(&self) -> bool {
        self.hot_cache.is_some() && self.max_mib != Some(Budget::Off)
    }

    /// Adds what the environment says, checks what can be known before the program starts, and makes paths absolute.
    ///
    /// `model` is the model's file, where the program's arguments name one.
    pub fn validate(&mut self, model: Option<&ModelFile>) -> Result<()> {
        let options = self.cache_options();
        self.add_environment()?;
        if let (None, Some(flag)) = (&self.hot_cache, options) {
            bail!("{flag} does nothing without a profile; expected --moe-hot-cache FILE too");
        }
        if let Some(path) = &mut self.perf_out {
            *path = check_output(path).context("--moe-layer-perf-out")?;
        }
        if let Some(path) = &mut self.trace_out {
            *path = check_trace(path).context("--moe-trace-out")?;
        }
        if let Some(path) = &mut self.hot_cache {
            *path = check_input(path, model).context("--moe-hot-cache")?;
        }
        Ok(())
    }

    /// The environment that tells the plugin all this.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        let path = |path: &Option<PathBuf>| path.clone().map(PathBuf::into_os_string);
        let all = [
            (PERF_OUT, path(&self.perf_out)),
            (HOT_CACHE, path(&self.hot_cache)),
            (HOT_CACHE_MAX_MIB, self.max_mib.map(|budget| budget.to_string().into())),
            (HOT_CACHE_AUTO_RESERVE_MIB, self.auto_reserve_mib.map(|reserve| reserve.0.to_string().into())),
            (HOT_CACHE_DEVICE, self.device.clone().map(OsString::from)),
            (HOT_CACHE_UPDATE_RATE, self.update_rate.map(|rate| rate.0.to_string().into())),
            (HOT_CACHE_MISS, self.miss.map(|rule| rule.to_string().into())),
            (TRACE_OUT, path(&self.trace_out)),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }

    /// A flag on the command line that only steers a cache.
    fn cache_options(&self) -> Option<&'static str> {
        let given = [
            (self.max_mib.is_some(), "--moe-hot-cache-max-mib"),
            (self.auto_reserve_mib.is_some(), "--moe-hot-cache-auto-reserve-mib"),
            (self.device.is_some(), "--moe-hot-cache-device"),
            (self.update_rate.is_some(), "--moe-hot-cache-update-rate"),
            (self.miss.is_some(), "--moe-hot-cache-miss"),
        ];
        given.into_iter().find_map(|(is_given, flag)| is_given.then_some(flag))
    }

    fn add_environment(&mut self) -> Result<()> {
        fill(&mut self.perf_out, PERF_OUT, |_, path| Ok(path.into()))?;
        fill(&mut self.hot_cache, HOT_CACHE, |_, path| Ok(path.into()))?;
        fill(&mut self.max_mib, HOT_CACHE_MAX_MIB, options::parse)?;
        fill(&mut self.auto_reserve_mib, HOT_CACHE_AUTO_RESERVE_MIB, options::parse)?;
        fill(&mut self.device, HOT_CACHE_DEVICE, options::parse)?;
        fill(&mut self.update_rate, HOT_CACHE_UPDATE_RATE, options::parse)?;
        fill(&mut self.miss, HOT_CACHE_MISS, options::parse)?;
        fill(&mut self.trace_out, TRACE_OUT, |_, path| Ok(path.into()))
    }
}

/// Takes from the environment what was not given as a flag.
fn fill<T>(flag: &mut Option<T>, name: &str, read: impl Fn(&str, &OsStr) -> Result<T, String>) -> Result<()> {
    let Some(value) = env::var_os(name).filter(|value| !value.is_empty() && flag.is_none()) else { return Ok(()) };
    *flag = Some(read(name, &value).map_err(|complaint| anyhow!(complaint))?);
    Ok(())
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
        let value = flag_with_value(&arg).and_then(|flag| args.next_if(|next| is_value(&flag, next)));
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

/// Which of our flags `arg` is, if it is written without `=` and wants a value.
fn flag_with_value(arg: &OsStr) -> Option<clap::Arg> {
    let is_it = |known: &clap::Arg| known.get_long().is_some_and(|long| arg == OsStr::new(&format!("--{long}")));
    MoeFlags::command().get_arguments().find(|known| is_it(known) && known.get_action().takes_values()).cloned()
}

/// Whether what follows a flag is its value; `-1` can be, `-m` never is.
fn is_value(flag: &clap::Arg, next: &OsStr) -> bool {
    let is_negative = next.as_encoded_bytes().get(1).is_some_and(u8::is_ascii_digit);
    !starts_with(next, "-") || (is_negative && flag.is_allow_negative_numbers_set())
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
    fn a_negative_number_is_a_value_where_numbers_are_expected() {
        for args in [&["--moe-hot-cache-max-mib", "-1", "-m", "x"][..], &["--moe-hot-cache-max-mib=-1", "-m", "x"]] {
            let (flags, rest) = split(args).unwrap();
            assert_eq!(flags.max_mib, Some(Budget::Automatic));
            assert_eq!(rest, ["-m", "x"]);
        }
        assert!(split(&["--moe-hot-cache", "-1"]).is_err(), "a file may be called that, but is more likely forgotten");
    }

    #[test]
    fn a_cache_takes_experts_unless_it_is_off() {
        let takes = |args: &[&str]| split(args).unwrap().0.take_experts();
        assert!(takes(&["--moe-hot-cache", "e.json"]));
        assert!(!takes(&["--moe-hot-cache", "e.json", "--moe-hot-cache-max-mib", "0"]));
        assert!(takes(&["--moe-hot-cache=e.json", "--moe-hot-cache-max-mib=0", "--moe-layer-perf-out=e.json"]));
    }

    #[test]
    fn every_flag_becomes_its_environment_variable() {
        let args = "--moe-hot-cache /e --moe-hot-cache-max-mib 7 --moe-hot-cache-auto-reserve-mib 8 \
                    --moe-hot-cache-device CUDA0 --moe-layer-perf-out /o";
        let (flags, _) = split(&args.split_whitespace().collect::<Vec<_>>()).unwrap();
        let values: Vec<_> = flags.environment().into_iter().map(|(_, value)| value).collect();
        assert_eq!(values, ["/o", "/e", "7", "8", "CUDA0"]);
        assert_eq!(MoeFlags::default().environment(), []);
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
}
