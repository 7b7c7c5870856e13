//! Finding a llama.cpp program and learning what it is: from its own `--version`, `--help` and `--list-devices`.

use super::devices::{self, Device};
use super::failure::{Failure, named_by_user};
use super::question::{self, Answer};
use crate::ggml::{NOT_SERVED, is_our_commit, is_served_build};
use crate::options::host::{self, BACKEND_PATH, CONFIG_HOME, Syntax};
use anyhow::{Context, Result, anyhow, bail};
use goblin::elf::Elf;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Where `scripts/setup` builds stock llama.cpp, seen from our own executable in `target/release`.
const STOCK: &str = "../../build/stock/bin";
/// How long a program may take to say what it is.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
const LIST_DEVICES: &str = "--list-devices";
/// In the help of the program `llama`, which is all others in one.
const COMMANDS: &str = "Available commands:";
/// The one command of `llama` that does its work whatever follows, `--help` too.
const UPDATE: &str = "update";

/// A program, as it says of itself.
pub struct Program {
    path: PathBuf,
    identity: Identity,
    /// Of the program `llama`: which of its commands, such as `serve`. It stands before all flags.
    command: Option<OsString>,
    /// What it reads.
    pub syntax: Syntax,
}

enum Identity {
    /// Of llama.cpp, with this version.
    Version(String),
    /// It names no version, and is linked with llama.cpp's libraries.
    Linked,
    /// Neither: a wrapper such as `taskset`, or anything else.
    Unknown,
}

/// Finds `name`: a path as it is, a bare name beside us, in our own build of stock llama.cpp, or in PATH.
pub fn find(name: &OsStr, own_folder: &Path) -> Result<PathBuf> {
    let is_path = name.as_encoded_bytes().contains(&b'/');
    let folders = [own_folder.to_path_buf(), own_folder.join(STOCK)];
    let found = if is_path {
        which::which(name).ok()
    } else {
        folders.iter().find_map(|folder| which::which(folder.join(name)).ok()).or_else(|| which::which(name).ok())
    };
    match found {
        Some(path) => Ok(path),
        None if is_path => {
            bail!("{}: no such program; expected the path of an executable file", Path::new(name).display())
        }
        None => {
            // An installed moe-hot has no such folder.
            let stock = if folders[1].is_dir() { format!("{} or ", folders[1].display()) } else { String::new() };
            bail!(
                "{}: no such program in {stock}PATH; expected a llama.cpp program such as llama-server",
                Path::new(name).display()
            )
        }
    }
}

impl Program {
    /// Asks a program what it is. `first` is the first of its arguments.
    pub fn learn(path: PathBuf, first: Option<&OsStr>) -> Result<Self, Failure> {
        let identity = match version_line(&ask_whole(&path, &["--version".into()])?) {
            Some(version) => Identity::Version(version.to_owned()),
            None if is_linked_with_llama(&path) => Identity::Linked,
            None => Identity::Unknown,
        };
        let mut program = Self { path, identity, command: None, syntax: Syntax::default() };
        if matches!(program.identity, Identity::Unknown) {
            return Ok(program);
        }
        let mut help = ask_whole(&program.path, &["--help".into()])?;
        if help.lines().any(|line| line == COMMANDS) {
            help.clear();
            program.command = first.filter(|command| !is_flag(command) && *command != UPDATE).map(OsStr::to_owned);
            if let Some(command) = &program.command {
                help = ask_whole(&program.path, &[command.clone(), "--help".into()])?;
            }
        }
        program.syntax = Syntax::parse(&help);
        Ok(program)
    }

    /// Its version, such as `0.5.0 (build 11312, commit 0c1e57098)`; `None` if it does not say.
    pub fn version(&self) -> Option<&str> {
        if let Identity::Version(version) = &self.identity { Some(version) } else { None }
    }

    /// Refuses a program that is not llama.cpp's, or whose llama.cpp the plugin does not serve.
    ///
    /// Of builds that are not known the plugin itself is asked, which looks at their layouts. Where a program cannot be asked it
    /// is let through: the plugin looks again when it is loaded.
    pub fn check(&self, name: &OsStr, args: &[OsString], plugin: &Path) -> Result<(), Failure> {
        match &self.identity {
            Identity::Version(version) if !is_served(version) => self.ask_plugin(version, plugin),
            Identity::Version(_) | Identity::Linked => Ok(()),
            Identity::Unknown => Err(Failure::Input(anyhow!(
                "{} does not answer as a program of llama.cpp's does; expected moe-hot directly in front of one, as in: {}",
                self.path.display(),
                behind_wrapper(name, args)
            ))),
        }
    }

    /// Has the program load the plugin, and refuses it if the plugin does.
    fn ask_plugin(&self, version: &str, plugin: &Path) -> Result<(), Failure> {
        if !self.syntax.knows(LIST_DEVICES) {
            return Ok(());
        }
        let question: Vec<_> = self.command.iter().cloned().chain([LIST_DEVICES.into()]).collect();
        let mut command = question_to(&self.path, &question);
        command.env(BACKEND_PATH, plugin);
        let answer = answer_of(command, &self.path)?.text;
        match answer.lines().find_map(|line| line.split_once(NOT_SERVED)) {
            Some((_, why)) => Err(Failure::Input(anyhow!("{} is llama.cpp {version}: {why}", self.path.display()))),
            None => Ok(()),
        }
    }

    /// The devices that the program has with these servers, given as `--rpc` each; `None` if it does not say.
    pub fn devices(&self, servers: &[&OsStr]) -> Result<Option<Vec<Device>>, Failure> {
        if !self.syntax.knows(LIST_DEVICES) {
            return Ok(None);
        }
        let servers = servers.iter().flat_map(|servers| ["--rpc".into(), (*servers).to_owned()]);
        let question: Vec<_> = self.command.iter().cloned().chain(servers).chain([LIST_DEVICES.into()]).collect();
        Ok(devices::parse(&ask(&self.path, &question)?.text))
    }
}

/// Asks a program that must answer in time.
fn ask_whole(path: &Path, arguments: &[OsString]) -> Result<String, Failure> {
    let answer = ask(path, arguments)?;
    if !answer.is_whole {
        let question: Vec<_> = arguments.iter().map(|argument| argument.display().to_string()).collect();
        let (path, question, limit) = (path.display(), question.join(" "), ANSWER_LIMIT.as_secs());
        return Err(Failure::Input(anyhow!(
            "{path} {question}: no answer that ends within {limit} s and 4 MiB; expected a llama.cpp program, or a script that hands its arguments \
             on to one"
        )));
    }
    Ok(answer.text)
}

/// What a program prints when started with these arguments, without the plugin, and without any other setting: some would
/// make it download a model, or fail, before it answers.
fn ask(path: &Path, arguments: &[OsString]) -> Result<Answer, Failure> {
    answer_of(question_to(path, arguments), path)
}

fn question_to(path: &Path, arguments: &[OsString]) -> Command {
    let mut command = Command::new(path);
    command.args(arguments).env_remove(BACKEND_PATH).env(CONFIG_HOME, "/dev/null");
    host::option_variables().for_each(|variable| {
        command.env_remove(variable);
    });
    command
}

fn answer_of(command: Command, path: &Path) -> Result<Answer, Failure> {
    let arguments: Vec<_> = command.get_args().map(OsStr::to_owned).collect();
    let failed = || format!("{}: cannot be started with {arguments:?}", path.display());
    question::ask(command, ANSWER_LIMIT).with_context(failed).map_err(named_by_user)
}

fn is_flag(arg: &OsStr) -> bool {
    arg.as_encoded_bytes().starts_with(b"-")
}

/// The rest of the line `version: 0.5.0 (build 11312, commit 0c1e57098)`.
fn version_line(output: &str) -> Option<&str> {
    output.lines().filter_map(|line| line.strip_prefix("version: ")).find(|version| version.contains('('))
}

/// Whether a version such as `0.5.0 (build 11312, commit 0c1e57098)`, or `11312 (0c1e57098)`, is of a build that is known to be
/// served.
fn is_served(version: &str) -> bool {
    let mut words = version.split(|c: char| !c.is_ascii_alphanumeric());
    if words.clone().any(is_our_commit) {
        return true;
    }
    let number = match words.clone().position(|word| word == "build") {
        Some(at) => words.nth(at + 1),
        None => words.next(),
    };
    number.and_then(|number| number.parse().ok()).is_some_and(is_served_build)
}

/// Whether an executable file needs one of llama.cpp's libraries.
fn is_linked_with_llama(path: &Path) -> bool {
    let Ok(bytes) = fs::read(path) else { return false };
    let is_of_llama = |library: &&str| library.starts_with("libllama") || library.starts_with("libggml");
    Elf::parse(&bytes).is_ok_and(|elf| elf.libraries.iter().any(is_of_llama))
}

/// What to type where moe-hot stands in front of a wrapper: the same with moe-hot behind it, as far as that can be seen.
fn behind_wrapper(name: &OsStr, args: &[OsString]) -> String {
    let is_llama = |arg: &OsString| {
        let first = arg.to_string_lossy().split(' ').next().map(PathBuf::from);
        first.is_some_and(|path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"llama")))
    };
    let name = name.display();
    match args.iter().position(is_llama) {
        Some(at) => {
            let words =
                args[..at].iter().map(|arg| format!(" {}", quoted(&arg.display().to_string()))).collect::<String>();
            let program = args[at].display().to_string();
            // What has a blank in it is a command for a shell.
            let command = format!("moe-hot {program}");
            let command = if program.contains(' ') { quoted(&command) } else { command };
            format!("{name}{words} {command} …")
        }
        None => format!("{name} … moe-hot llama-server …"),
    }
}

fn quoted(word: &str) -> String {
    if word.contains(' ') { format!("'{word}'") } else { word.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_or_a_build_number_tells_what_is_served() {
        for version in [
            "0.5.0-dev (build 1, commit 0c1e57098)",
            "1 (0c1e57098bba)",
            "0.26.0 (build 11434, commit 79c1160b0)",
            "11400 (79c1160b0)",
        ] {
            assert!(is_served(version), "{version}");
        }
        for version in
            ["0.5.0-dev (build 0, commit unknown)", "0.4.9 (build 10000, commit 1234567ab)", "6123 (79c1160b0)", "x"]
        {
            assert!(!is_served(version), "the plugin is asked: {version}");
        }
    }

    #[test]
    fn the_version_is_found_among_other_lines() {
        assert_eq!(version_line("load_backend: loaded\nversion: 7 (abc)\nbuilt with"), Some("7 (abc)"));
        assert_eq!(version_line("usage: …"), None);
        assert_eq!(version_line("version: 3.2"), None, "another program's");
    }

    #[test]
    fn what_is_typed_instead_has_moe_hot_behind_the_wrapper() {
        let typed = |args: &str| {
            let words: Vec<_> = args.split(' ').map(OsString::from).collect();
            behind_wrapper(&words[0], &words[1..])
        };
        assert_eq!(typed("taskset -c 0 llama-server -m x"), "taskset -c 0 moe-hot llama-server …");
        assert_eq!(typed("env A=1 /opt/llama serve"), "env A=1 moe-hot /opt/llama …");
        let shell = ["-c", "llama-server -m a/x"].map(OsString::from);
        assert_eq!(behind_wrapper(OsStr::new("sh"), &shell), "sh -c 'moe-hot llama-server -m a/x' …");
        assert_eq!(typed("bash start.sh"), "bash … moe-hot llama-server …");
    }

    #[test]
    fn libraries_tell_a_program_of_llama_cpps() {
        assert!(is_linked_with_llama(Path::new("/proc/self/exe")), "these tests are linked with ggml");
        assert!(!is_linked_with_llama(Path::new("/bin/sh")) && !is_linked_with_llama(Path::new("/dev/null")));
    }
}
