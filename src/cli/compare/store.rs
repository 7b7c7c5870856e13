//! The folder of a comparison: `results.json`, which is written anew after every step, logs, and what the runs need.
//!
//! A step that is in the file is not done again. Other settings in the same folder are refused, and so is a second process.

use super::outcome::Outcome;
use super::settings::Settings;
use super::summary::Summary;
use crate::cli::failure::{Failure, OrFail, named_by_user};
use crate::cli::output::write_file;
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

/// The version of the file that we read and write.
pub const SCHEMA: &str = "moe-hot.compare.v1";
const LOCK: &str = "lock";
const RESULTS: &str = "results.json";
/// Far more than a comparison writes.
const MAX_BYTES: u64 = 1 << 30;

/// The whole file.
#[derive(Debug, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: String,
    /// What was asked.
    pub settings: Settings,
    /// The machine, and when it began.
    pub machine: Machine,
    /// Finished steps by key.
    pub steps: BTreeMap<String, Outcome>,
    /// What came of it; once there is something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
    /// Whether all steps are finished.
    pub complete: bool,
}

/// Where it runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// CPU and how many of them.
    pub cpu: String,
    /// What the device is, as `--list-devices` says; empty in files of older versions.
    #[serde(default)]
    pub device: String,
    /// Its memory, likewise.
    pub device_total_mib: u64,
    /// What of it was free at the beginning.
    pub device_free_mib: u64,
    /// When the comparison began (UTC).
    pub began: String,
}

/// The folder, held by this process.
pub struct Store {
    folder: PathBuf,
    /// Everything so far.
    pub results: Results,
    _lock: File,
}

impl Store {
    /// Opens a folder, or makes it. What is there is gone on with if it has the same settings.
    pub fn open(folder: &Path, settings: Settings, machine: Machine) -> Result<Self, Failure> {
        let what = || format!("--output {}", folder.display());
        let lock = prepare(folder).with_context(what).map_err(named_by_user)?;
        let results = match load(folder).with_context(what).or_input()? {
            None => Results {
                schema: SCHEMA.into(),
                settings,
                machine,
                steps: BTreeMap::new(),
                summary: None,
                complete: false,
            },
            Some(results) => {
                if let Some((flag, before, now)) = results.settings.difference(&settings) {
                    return Err(Failure::Input(anyhow!(
                        "{}: was begun with {flag} {before}, and now it is {now}; expected the same settings, or another folder",
                        what()
                    )));
                }
                if results.machine.cpu != machine.cpu {
                    return Err(Failure::Input(anyhow!(
                        "{}: was begun on another machine ({}); expected another folder",
                        what(),
                        results.machine.cpu
                    )));
                }
                if (&results.machine.device, results.machine.device_total_mib)
                    != (&machine.device, machine.device_total_mib)
                {
                    let shown = |machine: &Machine| format!("{}, {} MiB", machine.device, machine.device_total_mib);
                    return Err(Failure::Input(anyhow!(
                        "{}: was begun on the device {}, and now it is {}; expected the same, or another folder",
                        what(),
                        shown(&results.machine),
                        shown(&machine)
                    )));
                }
                results
            }
        };
        Ok(Self { folder: folder.into(), results, _lock: lock })
    }

    /// A file or folder of this name in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Where a step's log goes.
    pub fn log(&self, key: &str) -> PathBuf {
        self.folder.join("logs").join(format!("{key}.log"))
    }

    /// What a step has brought, if it is finished.
    pub fn step(&self, key: &str) -> Option<&Outcome> {
        self.results.steps.get(key)
    }

    /// Keeps what a step has brought.
    pub fn finish(&mut self, key: String, outcome: Outcome) -> Result<()> {
        self.results.steps.insert(key, outcome);
        self.save()
    }

    /// Writes everything.
    pub fn save(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.results).context("JSON")?;
        self.write(RESULTS, &(text + "\n"))
    }

    /// Writes a file of the folder, whole or not at all.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path(name);
        write_file(&path, text.as_bytes(), true).with_context(|| path.display().to_string())
    }
}

/// Makes the folder, unless something else is there, and holds it.
fn prepare(folder: &Path) -> Result<File> {
    ensure!(!folder.exists() || folder.is_dir(), "is a file; expected a folder");
    let is_begun = load(folder)?.is_some();
    if let Ok(entries) = fs::read_dir(folder)
        && !is_begun
    {
        // What an attempt leaves that ended before the first result: an empty lock.
        let is_ours = |entry: fs::DirEntry| match entry.file_name().to_str() {
            Some(LOCK) => entry.metadata().is_ok_and(|meta| meta.is_file() && meta.len() == 0),
            Some("logs" | "work") => folder.join(LOCK).exists(),
            _ => false,
        };
        let has_others = entries.flatten().any(|entry| !is_ours(entry));
        ensure!(!has_others, "has other files in it; expected a new folder, or one of moe-hot compare");
    }
    for folder in [folder.to_path_buf(), folder.join("logs"), folder.join("work")] {
        fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    }
    let lock = OpenOptions::new().create(true).truncate(false).write(true).open(folder.join(LOCK))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => bail!("another moe-hot compare works in it; expected another folder"),
        Err(TryLockError::Error(_)) => Ok(lock), // a file system without locks
    }
}

fn load(folder: &Path) -> Result<Option<Results>> {
    let path = folder.join(RESULTS);
    let Ok(meta) = fs::metadata(&path) else { return Ok(None) };
    ensure!(meta.is_file() && meta.len() <= MAX_BYTES, "{RESULTS} is not what moe-hot compare writes");
    let text = fs::read(&path)?;
    let schema = serde_json::from_slice::<serde_json::Value>(&text).ok();
    let schema = schema.as_ref().and_then(|value| value.get("schema")?.as_str());
    ensure!(
        schema == Some(SCHEMA),
        "{RESULTS} has the schema {}; expected {SCHEMA}: another folder",
        schema.map_or_else(|| "of no comparison".to_owned(), |schema| format!("{schema:?}"))
    );
    let results =
        serde_json::from_slice(&text).with_context(|| format!("{RESULTS} is damaged; expected another folder"))?;
    Ok(Some(results))
}

#[cfg(test)]
mod tests {
    use super::super::settings::testing::settings;
    use super::*;

    fn machine() -> Machine {
        Machine {
            cpu: "x, 2 CPUs".into(),
            device: "GPU".into(),
            device_total_mib: 1,
            device_free_mib: 1,
            began: "now".into(),
        }
    }

    fn refusal(folder: &Path, settings: Settings) -> String {
        let failure = Store::open(folder, settings, machine()).err().unwrap();
        assert_eq!(failure.code(), 2);
        failure.line()
    }

    #[test]
    fn what_is_finished_is_there_for_the_next_call() {
        let folder = tempfile::tempdir().unwrap();
        let here = folder.path().join("new/folder");
        let mut store = Store::open(&here, settings(), machine()).unwrap();
        assert_eq!(store.step("x"), None);
        let outcome = Outcome { seconds: 1.5, commands: vec!["a b".into()], ..Outcome::default() };
        store.finish("x".into(), outcome.clone()).unwrap();
        drop(store);
        let again = Store::open(&here, settings(), machine()).unwrap();
        assert_eq!(again.step("x"), Some(&outcome));
        assert_eq!(again.step("y"), None);
    }

    #[test]
    fn other_settings_are_refused_in_one_line() {
        let folder = tempfile::tempdir().unwrap();
        Store::open(folder.path(), settings(), machine()).unwrap().save().unwrap();
        let said = refusal(folder.path(), Settings { tg: 99, ..settings() });
        assert!(said.contains("was begun with --tg 16, and now it is 99; expected the same settings"), "{said}");
        let said = refusal(folder.path(), Settings { revision: "11434 (79c1160b0)".into(), ..settings() });
        assert!(said.contains("the revision of llama.cpp 11312 (0c1e57098), and now it is 11434"), "{said}");
        let other = Machine { cpu: "y".into(), ..machine() };
        let failure = Store::open(folder.path(), settings(), other).err().unwrap();
        assert!(failure.line().contains("another machine (x, 2 CPUs)") && failure.code() == 2);
        let other = Machine { device: "GPU 2".into(), ..machine() };
        let failure = Store::open(folder.path(), settings(), other).err().unwrap();
        assert!(failure.line().contains("the device GPU, 1 MiB, and now it is GPU 2, 1 MiB") && failure.code() == 2);
        let said = refusal(folder.path(), Settings { moe_hot_build: "01".into(), ..settings() });
        assert!(said.contains("was begun with the build of moe-hot 00, and now it is 01"), "{said}");
    }

    #[test]
    fn a_folder_that_is_not_ours_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("letter.txt"), "x").unwrap();
        assert!(refusal(folder.path(), settings()).contains("has other files in it"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let file = folder.path().join("letter.txt");
        assert!(refusal(&file, settings()).contains("is a file; expected a folder"));
    }

    #[test]
    fn results_that_are_damaged_or_of_another_version_are_refused() {
        for (text, said) in [
            ("{", "the schema of no comparison"),
            ("{\"schema\": \"moe-hot.compare.v9\"}", "the schema \"moe-hot.compare.v9\"; expected moe-hot.compare.v1"),
            ("{\"schema\": \"moe-hot.compare.v1\"}", "is damaged"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join(RESULTS), text).unwrap();
            let line = refusal(folder.path(), settings());
            assert!(line.contains(said), "{line}");
        }
    }

    #[test]
    fn two_processes_do_not_share_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let _first = Store::open(folder.path(), settings(), machine()).unwrap();
        assert!(refusal(folder.path(), settings()).contains("another moe-hot compare works in it"));
    }
}
