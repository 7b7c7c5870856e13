//! Our own flags, which stand among the program's arguments.

use super::failure::{Failure, OrFail, named_by_user};
use super::own_files;
use super::same_model::RecordedFrom;
use crate::gguf::ModelFile;
use crate::options::host::{self, MOE_CACHE_MIB, Syntax, spelling};
use crate::options::launcher;
use crate::options::{
    CacheProfile, Config, HOT_CACHE, InvalidVariable, Kind, OPTIONS, OptionSpec, PERF_OUT, TRACE_OUT,
};
use anyhow::{Context, Result, anyhow};
use clap::builder::{NonEmptyStringValueParser, PathBufValueParser, TypedValueParser, ValueParser};
use clap::{Arg, Command};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What all of our flags begin with. Of llama.cpp's only [`MOE_CACHE_MIB`] does.
const PREFIX: &str = "--moe-";

/// What the user has said of our options, on the command line or in the environment.
#[derive(Debug, Default)]
pub struct Flags {
    /// By option, each once.
    given: Vec<(&'static OptionSpec, OsString)>,
    /// What the plugin should know besides, as variables.
    from_launcher: Vec<(&'static str, OsString)>,
}

impl Flags {
    /// What was given otherwise than in the environment, values checked.
    pub fn of(given: Vec<(&'static OptionSpec, OsString)>) -> Self {
        Self { given, ..Self::default() }
    }

    /// Whether the user has said nothing.
    pub fn are_none(&self) -> bool {
        self.given.is_empty()
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
        let (learns, mut said_quantisation) = (self.config().learns(), false);
        for (option, value) in &mut self.given {
            let path = Path::new(value.as_os_str());
            let checked = match *option {
                option if *option == PERF_OUT => own_files::profile_to_write(path),
                option if *option == TRACE_OUT => own_files::trace_to_write(path),
                option if *option == HOT_CACHE && value.as_os_str() != CacheProfile::AUTO => {
                    own_files::profile_to_read(path, model, learns).map(|(path, from)| {
                        said_quantisation = from == RecordedFrom::OtherQuantisation;
                        path
                    })
                }
                _ => continue,
            };
            *value = checked.context(option.flag).map_err(named_by_user)?.into_os_string();
        }
        own_files::check_apart(&self.config()).or_input()?;
        let file = model.filter(|_| self.config().hot_cache == Some(CacheProfile::Auto)).map(ModelFile::path);
        self.from_launcher = launcher::facts(said_quantisation, file.and_then(|file| std::path::absolute(file).ok()));
        Ok(())
    }

    /// The environment that tells the plugin all this.
    pub fn environment(&self) -> impl Iterator<Item = (&'static str, &OsStr)> {
        let given = self.given.iter().map(|(option, value)| (option.variable, value.as_os_str()));
        given.chain(self.facts())
    }

    /// What of it the plugin should know besides what the user has said.
    pub fn facts(&self) -> impl Iterator<Item = (&'static str, &OsStr)> {
        self.from_launcher.iter().map(|(variable, value)| (*variable, value.as_os_str()))
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

/// Whether the user has said anything of moe-hot's. Without that nothing is asked of the program, and nothing added.
pub fn are_given(args: &[OsString]) -> bool {
    args.iter().any(|arg| ours(arg).is_some()) || OPTIONS.iter().any(|option| host::variable(option.variable).is_some())
}

/// The first of the program's arguments.
pub fn first_of_theirs(args: &[OsString]) -> Option<OsString> {
    part(args.to_vec(), &Syntax::default()).1.into_iter().next()
}

/// Parts a command line into our flags and the program's arguments, in their order.
///
/// The value of one of the program's flags is the program's, even if it looks like a flag of ours.
pub fn take(args: Vec<OsString>, syntax: &Syntax) -> Result<(Flags, Vec<OsString>)> {
    let (ours, theirs) = part(args, syntax);
    let mut matches = parser()
        .try_get_matches_from(ours)
        .map_err(|error| anyhow!("{}; our flags are {}", first_line(&error), list()))?;
    let given = OPTIONS.into_iter().filter_map(|option| Some((option, matches.remove_one::<OsString>(option.flag)?)));
    Ok((Flags { given: given.collect(), ..Flags::default() }, theirs))
}

fn part(args: Vec<OsString>, syntax: &Syntax) -> (Vec<OsString>, Vec<OsString>) {
    let (mut mine, mut theirs) = (Vec::new(), Vec::new());
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        let Some(arg) = ours(&arg) else {
            let n_values = syntax.values_of(&arg).unwrap_or(0);
            theirs.push(arg);
            theirs.extend(args.by_ref().take(n_values));
            continue;
        };
        // Written without `=`, its value comes next.
        let option = OPTIONS.iter().find(|option| arg == option.flag);
        let value = option.and_then(|option| args.next_if(|next| is_value(option, next)));
        mine.push(arg);
        mine.extend(value);
    }
    (mine, theirs)
}

/// A flag of ours with its dashes as we write them, and its value if that stands behind a `=`.
fn ours(arg: &OsStr) -> Option<OsString> {
    let bytes = arg.as_bytes();
    let (flag, value) = bytes.split_at(bytes.iter().position(|&byte| byte == b'=').unwrap_or(bytes.len()));
    let mut flag = OsString::from(spelling(OsStr::from_bytes(flag))?);
    let is_ours = starts_with(&flag, PREFIX) && !MOE_CACHE_MIB.flags.iter().any(|theirs| flag == *theirs);
    flag.push(OsStr::from_bytes(value));
    is_ours.then_some(flag)
}

/// What stands above our flags where all are described.
const HEADING: &str = "Flags among the program's arguments";

/// Our flags, each with what it does, for `--help`.
pub fn help() -> String {
    let line = |option: &OptionSpec| format!("  {}\n          {}", usage(option), explained(option));
    format!("{HEADING}:\n{}", OPTIONS.map(line).join("\n"))
}

/// Our flags as if they were options of our own, for the manual page.
pub fn for_manual() -> impl Iterator<Item = Arg> {
    OPTIONS.into_iter().map(|option| {
        Arg::new(option.flag)
            .long(option.ini_key())
            .value_name(option.value_name)
            .env(option.variable)
            .help(explained(option))
            .help_heading(HEADING)
    })
}

fn explained(option: &OptionSpec) -> String {
    format!("{} (default: {})", option.help, option.default)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Budget;

    fn split(args: &[&str]) -> Result<(Flags, Vec<OsString>)> {
        split_for("", args)
    }

    fn split_for(help: &str, args: &[&str]) -> Result<(Flags, Vec<OsString>)> {
        take(args.iter().map(OsString::from).collect(), &Syntax::parse(help))
    }

    #[test]
    fn our_flags_are_taken_out_and_the_rest_keeps_its_order() {
        for args in [
            &["-m", "a.gguf", "--moe-layer-perf-out", "e.json", "-c", "4096"][..],
            &["-m", "a.gguf", "--moe-layer-perf-out=e.json", "-c", "4096"],
            &["-m", "a.gguf", "--moe_layer_perf_out", "e.json", "-c", "4096"],
            &["-m", "a.gguf", "--moe_layer-perf_out=e.json", "-c", "4096"],
        ] {
            let (flags, rest) = split(args).unwrap();
            assert_eq!(flags.value(&PERF_OUT), Some(OsStr::new("e.json")));
            assert_eq!(rest, ["-m", "a.gguf", "-c", "4096"]);
        }
    }

    #[test]
    fn the_programs_own_values_and_its_own_cache_stay() {
        let prompt = ["-p", "--moe-hot-cache", "-m", "x"];
        assert_eq!(split_for("-p, --prompt PROMPT   text", &prompt).unwrap().1, prompt);
        assert!(
            split(&["--moe-hot-cache=e_1.json", "-m", "x"]).unwrap().0.value(&HOT_CACHE)
                == Some(OsStr::new("e_1.json"))
        );
        let cache = ["--moe-cache-mib", "9", "--moe_cache_mib", "8"];
        assert_eq!(split(&cache).unwrap().1, cache);
        assert!(!are_given(&cache.map(OsString::from)) && are_given(&["--moe_hot_cache=x".into()]));
        let first = |args: &[&str]| first_of_theirs(&args.iter().map(OsString::from).collect::<Vec<_>>());
        assert_eq!(first(&["--moe-hot-cache", "x", "--moe-trace-out=t", "serve", "-m"]).unwrap(), "serve");
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
