//! Finding a llama.cpp program and learning what it is from its own `--version` and `--help`.

use super::devices::{self, Device};
use super::failure::{Failure, OrFail, named_by_user};
use super::fit::Fitting;
use crate::ggml::{COMMIT, is_commit, is_our_commit};
use crate::options::host::{BACKEND_PATH, PLACEMENT_FLAGS, PLACEMENT_VARIABLES, RPC};
use anyhow::{Context, Result, anyhow, bail};
use std::cell::OnceCell;
use std::ffi::{OsStr, OsString};
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use wait_timeout::ChildExt;

/// Where `scripts/setup` builds stock llama.cpp, seen from our own executable in `target/release`.
const STOCK: &str = "../../build/stock/bin";
/// How long a program may take to say what it is.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// A program found on this machine.
pub struct Program {
    pub path: PathBuf,
    help: OnceCell<String>,
}

impl Program {
    /// Finds `name`: a path as it is, a bare name beside us, in our own build of stock llama.cpp, or in PATH.
    pub fn find(name: &OsStr, own_folder: &Path) -> Result<Self> {
        let is_path = name.as_encoded_bytes().contains(&b'/');
        let folders = [own_folder.to_path_buf(), own_folder.join(STOCK)];
        let found = if is_path {
            which::which(name).ok()
        } else {
            folders.iter().find_map(|folder| which::which(folder.join(name)).ok()).or_else(|| which::which(name).ok())
        };
        match found {
            Some(path) => Ok(Self { path, help: OnceCell::new() }),
            None if is_path => {
                bail!("{}: no such program; expected the path of an executable file", Path::new(name).display())
            }
            None => bail!(
                "{}: no such program in {} or PATH; expected a llama.cpp program such as llama-server",
                Path::new(name).display(),
                folders[1].display()
            ),
        }
    }

    /// Refuses a program that says it is of another llama.cpp revision than the plugin.
    ///
    /// Programs that do not say are let through: the plugin compares again when it is loaded.
    pub fn check_revision(&self) -> Result<(), Failure> {
        let Some(version) = version_line(&self.ask(&["--version".into()])?).map(str::to_owned) else { return Ok(()) };
        if is_other_revision(&version) {
            return Err(Failure::Input(anyhow!(
                "{} is llama.cpp {version}; expected commit {}: build that revision (scripts/setup does) or moe-hot for yours",
                self.path.display(),
                &COMMIT[..9]
            )));
        }
        Ok(())
    }

    /// The arguments that keep all experts off the GPUs, in this program's words; none if it has none.
    pub fn all_experts_on_cpu(&self) -> Result<&'static [&'static str], Failure> {
        Ok(if self.knows("--cpu-moe")? {
            &["--cpu-moe"]
        } else if self.knows("--n-cpu-moe")? {
            &["-ncmoe", "999"]
        } else {
            &[]
        })
    }

    /// Whether and when the program fits a model to its devices.
    pub fn fitting(&self) -> Result<Fitting, Failure> {
        Ok(match (self.knows("--fit-target")?, self.knows("--fit")?) {
            (false, _) => Fitting::Never,
            (true, false) => Fitting::OnDemand,
            (true, true) => Fitting::Automatic,
        })
    }

    /// The devices that the program has with the user's arguments; `None` if it does not say.
    pub fn devices(&self, args: &[OsString]) -> Result<Option<Vec<Device>>, Failure> {
        if !self.knows("--list-devices")? {
            return Ok(None);
        }
        let rpc = RPC.given(args).map(|servers| ["--rpc".into(), servers]);
        let question: Vec<_> = rpc.into_iter().flatten().chain(["--list-devices".into()]).collect();
        Ok(devices::parse(&self.ask(&question)?))
    }

    /// Whether the program's help names a flag.
    fn knows(&self, flag: &str) -> Result<bool, Failure> {
        let help = match self.help.get() {
            Some(help) => help,
            None => {
                let help = self.ask(&["--help".into()])?;
                self.help.get_or_init(|| help)
            }
        };
        Ok(help.split(|c: char| c.is_whitespace() || c == ',').any(|word| word == flag))
    }

    /// What the program prints when started with these arguments and without the plugin.
    fn ask(&self, arguments: &[OsString]) -> Result<String, Failure> {
        let failed = || format!("{}: cannot be started with {arguments:?}", self.path.display());
        let mut output = tempfile::tempfile().context("a temporary file").or_internal()?;
        let mut command = Command::new(&self.path);
        command.args(arguments).env_remove(BACKEND_PATH).stdin(Stdio::null());
        for set in [Command::stdout, Command::stderr] {
            set(&mut command, output.try_clone().or_internal()?);
        }
        let mut child = command.spawn().with_context(failed).map_err(named_by_user)?;
        let answered = child.wait_timeout(ANSWER_TIMEOUT).with_context(failed).or_internal()?;
        if answered.is_none() {
            child.kill().and_then(|()| child.wait()).with_context(failed).or_internal()?;
        }
        let mut text = Vec::new();
        output.rewind().and_then(|()| output.read_to_end(&mut text)).with_context(failed).or_internal()?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// The rest of the line that begins with `version: `.
fn version_line(output: &str) -> Option<&str> {
    output.lines().find_map(|line| line.strip_prefix("version: "))
}

/// Whether a version such as `0.5.0 (build 11312, commit 0c1e57098)` names a commit that is not ours.
fn is_other_revision(version: &str) -> bool {
    let commit = version.split(|c: char| !c.is_ascii_alphanumeric()).rfind(|word| is_commit(word));
    commit.is_some_and(|commit| !is_our_commit(commit))
}

/// Whether the user has said where experts go, on the command line or in llama.cpp's environment.
pub fn places_experts(args: &[OsString], env: impl Fn(&str) -> bool) -> bool {
    args.iter().any(|arg| PLACEMENT_FLAGS.iter().any(|flag| arg == flag))
        || PLACEMENT_VARIABLES.iter().any(|name| env(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_in_a_version_decides() {
        assert!(!is_other_revision("0.5.0-dev (build 11312, commit 0c1e57098)"));
        assert!(!is_other_revision("11312 (0c1e57098bba)"));
        assert!(!is_other_revision("0.5.0-dev (build 0, commit unknown)"), "left to the plugin");
        assert!(is_other_revision("0.4.9 (build 10000, commit 1234567ab)"));
        assert!(is_other_revision("6123 (79c1160b0)"));
    }

    #[test]
    fn the_version_is_found_among_other_lines() {
        assert_eq!(version_line("load_backend: loaded\nversion: 7 (abc)\nbuilt with"), Some("7 (abc)"));
        assert_eq!(version_line("usage: …"), None);
    }

    #[test]
    fn a_users_own_placement_is_seen() {
        let args = |args: &[&str]| args.iter().map(OsString::from).collect::<Vec<_>>();
        let none = |_: &str| false;
        assert!(!places_experts(&args(&["-m", "x", "-cmoed"]), none), "the draft model's is another matter");
        for given in [&["-cmoe"][..], &["--n-cpu-moe", "7"], &["-ot", "exps=CPU"]] {
            assert!(places_experts(&args(given), none), "{given:?}");
        }
        assert!(places_experts(&[], |name| name == "LLAMA_ARG_N_CPU_MOE"));
    }
}
