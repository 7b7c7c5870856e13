//! What the user has said to a program, over all that it reads. The rules stand in [the folder's page](super).

use super::ini::{self, Sections};
use super::{
    DOCKER_REPO, HF_REPO, HOST_OPTIONS, HostOption, MODEL, MODELS_PRESET, Syntax, config_files, is_no, is_yes,
};
use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;

/// Options in the order in which a program applies them. A switch is there if it is on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    given: Vec<(&'static HostOption, OsString)>,
}

/// A process that loads a model, and what it is told.
#[derive(Debug)]
pub struct Target {
    /// The section of the router's INI file that it is started from.
    pub section: Option<String>,
    /// What it is told.
    pub settings: Settings,
}

/// Where a program's settings come from.
pub struct Source<'a> {
    /// What the program reads.
    pub syntax: &'a Syntax,
    /// Its command line.
    pub args: &'a [OsString],
}

/// What is read besides the command line.
struct Surroundings<V> {
    variable: V,
    /// The contents of configuration files, in their order.
    configs: Vec<Sections>,
}

/// What stands for the value of a switch.
const ON: &str = "1";

impl Settings {
    /// What a program has read by itself, in its order.
    pub fn of(given: Vec<(&'static HostOption, OsString)>) -> Self {
        Self { given }
    }

    /// The value that counts: the last one.
    pub fn last(&self, option: &HostOption) -> Option<&OsStr> {
        self.all(option).last()
    }

    /// All values, in order.
    pub fn all(&self, option: &HostOption) -> impl Iterator<Item = &OsStr> {
        self.given.iter().filter(move |(known, _)| *known == option).map(|(_, value)| value.as_os_str())
    }

    /// Whether a switch is on.
    pub fn has(&self, option: &HostOption) -> bool {
        self.all(option).next().is_some()
    }

    /// The path of the model's file; `None` where none is named, or the program fetches the model from elsewhere.
    pub fn model(&self) -> Option<&Path> {
        let is_given = |option| self.last(option).is_some_and(|value| !value.is_empty());
        let path = self.last(&MODEL).filter(|path| !path.is_empty())?;
        (!is_given(&HF_REPO) && !is_given(&DOCKER_REPO)).then_some(Path::new(path))
    }

    fn has_model(&self) -> bool {
        [&MODEL, &HF_REPO, &DOCKER_REPO].iter().any(|option| self.last(option).is_some_and(|value| !value.is_empty()))
    }

    fn push(&mut self, option: &'static HostOption, value: impl Into<OsString>) {
        self.given.push((option, value.into()));
    }
}

impl Source<'_> {
    /// What the program is told, or what each of a router's children is.
    ///
    /// Models of a router that have no section are told what stands in `[*]`; they are a target of their own only where there
    /// are no sections.
    pub fn targets(&self) -> Vec<Target> {
        let configs = config_files().iter().filter_map(|path| read_ini(path)).collect();
        self.targets_in(&Surroundings { variable: |name: &str| env::var_os(name), configs })
    }

    fn targets_in<V: Fn(&str) -> Option<OsString>>(&self, surroundings: &Surroundings<V>) -> Vec<Target> {
        let outer = self.outer(surroundings);
        let mut whole = outer.clone();
        whole.given.extend(self.on_command_line());
        let preset = if self.syntax.knows("--models-preset") && !whole.has_model() {
            whole.last(&MODELS_PRESET).and_then(|path| read_ini(Path::new(path)))
        } else {
            None
        };
        match preset {
            None => vec![Target { section: None, settings: whole }],
            Some(sections) => self.children(&outer, &sections),
        }
    }

    /// What comes before the command line.
    fn outer<V: Fn(&str) -> Option<OsString>>(&self, surroundings: &Surroundings<V>) -> Settings {
        let mut settings = Settings::default();
        if !self.syntax.reads_environment() {
            return settings;
        }
        let sections = surroundings.configs.iter().flat_map(|file| [file.get(ini::ALL), file.get(ini::DEFAULT)]);
        for (option, value) in sections.flatten().flat_map(options_of) {
            settings.push(option, if option.takes_value { value } else { ON.into() });
        }
        for option in HOST_OPTIONS.into_iter().filter(|option| self.syntax.reads_variable(option)) {
            match (surroundings.variable)(option.variable) {
                Some(value) if option.takes_value || is_yes(&value) => settings.push(option, value),
                _ => {}
            }
        }
        settings
    }

    fn on_command_line(&self) -> impl Iterator<Item = (&'static HostOption, OsString)> {
        self.syntax.flags(self.args).into_iter().filter(|given| !given.is_cut).filter_map(|given| {
            let option = HostOption::of_flag(given.flag.as_deref()?)?;
            match given.values.first() {
                None => Some((option, ON.into())),
                // llama-bench's `--no-host 0,1`
                Some(values) if !option.takes_value && !has_yes(values) => None,
                Some(value) => Some((option, value.clone())),
            }
        })
    }

    /// What each child of a router is told.
    fn children(&self, outer: &Settings, sections: &Sections) -> Vec<Target> {
        let ours: BTreeMap<_, _> = self.on_command_line().map(|(option, value)| (option.flags, value)).collect();
        let child = |section: Option<&String>| {
            let names = [Some(ini::ALL), section.map(String::as_str)];
            let mut merged = BTreeMap::new();
            for (option, value) in
                names.into_iter().flatten().filter_map(|name| sections.get(name)).flat_map(options_of)
            {
                merged.insert(option.flags, value);
            }
            merged.extend(ours.iter().map(|(flags, value)| (*flags, value.clone())));
            let mut settings = outer.clone();
            for option in HOST_OPTIONS {
                match merged.remove(option.flags) {
                    Some(value) if option.takes_value || !is_no(&value) => settings.push(option, value),
                    _ => {}
                }
            }
            Target { section: section.cloned(), settings }
        };
        let names: Vec<_> = sections.keys().filter(|name| *name != ini::ALL && !sections[*name].is_empty()).collect();
        if names.is_empty() { vec![child(None)] } else { names.into_iter().map(|name| child(Some(name))).collect() }
    }
}

/// The options of a section: each once, with the value that llama.cpp takes last.
fn options_of(section: &BTreeMap<String, String>) -> impl Iterator<Item = (&'static HostOption, OsString)> {
    let known = |(key, value): (&String, &String)| Some((HostOption::of_key(key)?, OsString::from(value)));
    let values: Vec<_> = section.iter().filter_map(known).collect();
    HOST_OPTIONS.into_iter().filter_map(move |option| values.iter().rfind(|(known, _)| *known == option).cloned())
}

/// `None` where it cannot be read as llama.cpp would, which ends the program.
fn read_ini(path: &Path) -> Option<Sections> {
    ini::parse(&String::from_utf8_lossy(&fs::read(path).ok()?))
}

fn has_yes(values: &OsStr) -> bool {
    values.to_string_lossy().split(',').any(|value| is_yes(OsStr::new(value)))
}

#[cfg(test)]
mod tests {
    use super::super::{CPU_MOE, FIT_TARGET, N_CPU_MOE, NO_HOST, OVERRIDE_TENSOR, RPC};
    use super::*;

    const HELP: &str = "-m,    --model FNAME\n  (env: LLAMA_ARG_MODEL)\n-cmoe, --cpu-moe\n  (env: LLAMA_ARG_CPU_MOE)\n\
        -ncmoe, --n-cpu-moe N\n  (env: LLAMA_ARG_N_CPU_MOE)\n--rpc SERVERS\n  (env: LLAMA_ARG_RPC)\n-hf,   --hf-repo R\n  \
        (env: LLAMA_ARG_HF_REPO)\n-fitt, --fit-target MiB0\n  (env: LLAMA_ARG_FIT_TARGET)\n--no-host\n  (env: LLAMA_ARG_NO_HOST)\n\
        -ot,   --override-tensor <p>=<b>\n  (env: LLAMA_ARG_OVERRIDE_TENSOR)\n-p,    --prompt P\n--models-preset PATH\n";

    fn targets(help: &str, args: &str, variables: &[(&str, &str)], config: &str) -> Vec<Target> {
        let args: Vec<_> = args.split_whitespace().map(OsString::from).collect();
        let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        let configs = ini::parse(config).into_iter().collect();
        Source { syntax: &Syntax::parse(help), args: &args }.targets_in(&Surroundings { variable, configs })
    }

    fn settings(args: &str, variables: &[(&str, &str)], config: &str) -> Settings {
        targets(HELP, args, variables, config).remove(0).settings
    }

    #[test]
    fn the_command_line_wins_over_the_environment_and_that_over_files() {
        let last = |args, variables, config| {
            settings(args, variables, config).last(&FIT_TARGET).map(|value| value.to_str().unwrap().to_owned())
        };
        let variable = [("LLAMA_ARG_FIT_TARGET", "2")];
        assert_eq!(last("-fitt 3 --fit_target 4", &variable, "fitt = 1").as_deref(), Some("4"));
        assert_eq!(last("", &variable, "fitt = 1").as_deref(), Some("2"));
        assert_eq!(last("", &[], "fitt = 1\n[*]\nfit-target = 9").as_deref(), Some("1"), "[*] comes first");
        assert_eq!(last("", &[("LLAMA_ARG_FIT_TARGET", "")], "fitt = 1").as_deref(), Some(""), "an empty value is one");
        assert_eq!(last("-p -fitt -fitt", &[], ""), None);
    }

    #[test]
    fn placements_and_servers_add_up() {
        let settings = settings(
            "--rpc c --rpc d -ot x=CPU",
            &[("LLAMA_ARG_RPC", "b")],
            "rpc = a\nLLAMA_ARG_OVERRIDE_TENSOR = y=CPU",
        );
        assert_eq!(settings.all(&RPC).collect::<Vec<_>>(), ["a", "b", "c", "d"]);
        assert_eq!(settings.all(&OVERRIDE_TENSOR).collect::<Vec<_>>(), ["y=CPU", "x=CPU"]);
    }

    #[test]
    fn a_switch_is_on_by_the_rule_of_its_source() {
        for value in ["1", "on", "enabled", "true"] {
            assert!(settings("", &[("LLAMA_ARG_CPU_MOE", value)], "").has(&CPU_MOE), "{value}");
        }
        for value in ["", "0", "off", "false", "disabled", "yes", "TRUE", "2"] {
            assert!(!settings("", &[("LLAMA_ARG_CPU_MOE", value)], "").has(&CPU_MOE), "{value:?}");
            assert!(settings("", &[], &format!("cpu-moe = {value}")).has(&CPU_MOE), "a file's switch is on: {value:?}");
        }
        assert!(settings("-cmoe", &[], "").has(&CPU_MOE) && !settings("-p -cmoe", &[], "").has(&CPU_MOE));
    }

    #[test]
    fn a_model_from_elsewhere_has_no_path() {
        assert_eq!(settings("-m x", &[], "").model(), Some(Path::new("x")));
        assert_eq!(settings("-m x -hf y", &[], "").model(), None);
        assert_eq!(settings("-hf y", &[("LLAMA_ARG_MODEL", "x")], "").model(), None);
        assert_eq!(settings("-m x", &[("LLAMA_ARG_HF_REPO", "")], "").model(), Some(Path::new("x")));
    }

    #[test]
    fn llama_bench_reads_its_command_line_alone() {
        const BENCH: &str = "  -ncmoe, --n-cpu-moe <n>      x\n  --no-host <0|1>   x\n";
        let bench = |args: &str| {
            targets(BENCH, args, &[("LLAMA_ARG_N_CPU_MOE", "3"), ("LLAMA_ARG_CPU_MOE", "1")], "rpc = a")
                .remove(0)
                .settings
        };
        assert_eq!(bench(""), Settings::default());
        assert_eq!(bench("-ncmoe 0,2").last(&N_CPU_MOE).unwrap(), "0,2");
        assert!(bench("--no-host 0,1").has(&NO_HOST) && !bench("--no-host 0").has(&NO_HOST));
    }

    #[test]
    fn a_routers_children_are_told_what_their_sections_say_and_the_router_wins() {
        let folder = tempfile::tempdir().unwrap();
        let preset = folder.path().join("models.ini");
        let text =
            "[*]\nrpc = x\nfitt = 1\n[a]\nm = a.gguf\ncpu-moe = off\n[b]\nm = b.gguf\nncmoe = 3\nfitt = 2\ncpu-moe =\n";
        fs::write(&preset, text).unwrap();
        let args = |more: &str| format!("--models-preset {} {more}", preset.display());
        let [a, b] = targets(HELP, &args("--rpc y --rpc z"), &[], "").try_into().unwrap();
        assert_eq!((a.section.as_deref(), a.settings.model()), (Some("a"), Some(Path::new("a.gguf"))));
        assert_eq!(a.settings.all(&RPC).collect::<Vec<_>>(), ["z"], "of the router's own each option's last");
        assert!(!a.settings.has(&CPU_MOE) && b.settings.has(&CPU_MOE), "off, and empty");
        assert_eq!(b.settings.all(&N_CPU_MOE).chain(b.settings.last(&FIT_TARGET)).collect::<Vec<_>>(), ["3", "2"]);
        let one = targets(HELP, &args("-m x"), &[], "");
        assert!(one.len() == 1 && one[0].section.is_none(), "a server with a model is no router");
        fs::write(&preset, "[*]\nncmoe = 3\n").unwrap();
        let all = targets(HELP, &args(""), &[], "");
        assert!(all.len() == 1 && all[0].settings.has(&N_CPU_MOE));
    }
}
