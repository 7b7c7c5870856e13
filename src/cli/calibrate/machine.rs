//! The stored figures of a machine.

use super::threshold::Prompt;
use crate::cli::output::write_file;
use crate::gguf::ModelFile;
use crate::options::host::OFFLOAD_MIN_BATCH_DEFAULT;
use anyhow::{Context, Result, ensure};
use etcetera::{BaseStrategy, choose_base_strategy};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;

/// Our folder in the user's configuration directory.
const FOLDER: &str = "moe-hot";
const FILE: &str = "calibration.json";
/// The file is far smaller.
const MAX_BYTES: u64 = 64 << 10;
/// What a cached layer takes beside its reading unless told: a launch, a wait, and two small copies on a common GPU.
/// Assumed; docs/commands.md says from what.
pub const LAYER_OVERHEAD_US: f64 = 60.0;

/// What is known of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Version of this file.
    pub format: u32,
    /// When RAM was measured.
    pub date: String,
    /// Which machine it was.
    pub machine: String,
    /// Threads that read.
    pub threads: usize,
    /// What they read in one pass.
    pub buffer_bytes: u64,
    /// Passes that count.
    pub passes: usize,
    /// RAM as the CPU reads it: the median of the passes ...
    pub ram_gb_per_s: Figure,
    /// ... the slowest ...
    pub ram_least_gb_per_s: f64,
    /// ... and the fastest.
    pub ram_most_gb_per_s: f64,
    /// The GPU's memory.
    pub gpu_gb_per_s: Option<Figure>,
    /// The bus to the GPU.
    pub bus_gb_per_s: Option<Figure>,
    /// What a cached layer takes beside its reading.
    pub layer_overhead_us: Option<Figure>,
    /// From which batch size on experts are worth copying, by model.
    #[serde(default)]
    pub prompts: Vec<Prompts>,
}

/// How fast the prompts of one model are, and what follows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prompts {
    /// [`model_key`].
    pub model: String,
    /// When they were measured.
    pub date: String,
    /// Threads that computed.
    pub n_threads: u32,
    /// Whether the user gave their number; else it is what llama.cpp chooses.
    pub are_threads_given: bool,
    /// Batches of so many tokens and more are worth a copy.
    pub min_batch: u32,
    /// What was measured.
    pub prompts: Vec<Prompt>,
}

/// What of a model decides how long its experts take: its kind, how many experts there are, how many are used, and their bytes.
/// `None` if it has no experts.
pub fn model_key(model: &ModelFile) -> Option<String> {
    let bytes = model.expert_bytes()?;
    let kind = model.text("general.architecture").unwrap_or("unknown");
    let n_expert = model.experts().map(|tensor| tensor.n_expert).max()?;
    let n_used = model.number("expert_used_count").unwrap_or(0);
    Some(format!("{kind}, {n_used} of {n_expert} experts, {bytes} bytes"))
}

/// A number and where it is from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// The number.
    pub value: f64,
    /// Where it is from.
    pub source: Source,
}

/// Where a figure is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// By `moe-hot calibrate`, here.
    Measured,
    /// The user has said so.
    Given,
    /// Nobody has.
    Assumed,
}

impl Calibration {
    /// The version that we read and write.
    pub const FORMAT: u32 = 1;

    /// Where it is stored: in the user's configuration directory (XDG), since it holds what the user has given.
    pub fn path() -> Result<PathBuf> {
        let strategy =
            choose_base_strategy().context("finding your configuration directory; expected HOME to be set")?;
        Ok(strategy.config_dir().join(FOLDER).join(FILE))
    }

    /// What is stored; `None` if nothing is.
    pub fn load(path: &Path) -> Result<Option<Self>> {
        let mut text = Vec::new();
        match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
            Ok(meta) => ensure!(meta.is_file(), "is not a regular file; expected what moe-hot calibrate has written"),
        }
        File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut text)?;
        let wrong = "is not what moe-hot calibrate writes; run it again";
        let calibration: Self = serde_json::from_slice(&text).context(wrong)?;
        let figures = [Some(calibration.ram_gb_per_s), calibration.gpu_gb_per_s, calibration.bus_gb_per_s];
        let is_known = figures.iter().flatten().all(|figure| figure.value.is_finite() && figure.value > 0.0)
            && calibration.layer_overhead_us.is_none_or(|figure| figure.value.is_finite() && figure.value >= 0.0)
            && calibration.prompts.iter().all(|prompts| prompts.min_batch >= OFFLOAD_MIN_BATCH_DEFAULT)
            && calibration.format == Self::FORMAT;
        ensure!(is_known, wrong);
        Ok(Some(calibration))
    }

    /// Stores it: the old figures or the new ones are there, whole.
    pub fn store(&self, path: &Path) -> Result<()> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).context("creating its folder")?;
        }
        let text = serde_json::to_string_pretty(self).context("JSON")?;
        write_file(path, (text + "\n").as_bytes(), true)
    }
}

/// This machine, as far as bandwidth depends on it: its CPU and how much of it we have.
pub fn this_machine() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let n_cpus = available_parallelism().map_or(1, NonZero::get);
    format!("{}, {n_cpus} CPUs", name.map_or("unknown CPU", |(_, name)| name.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::copy::testing::in_a_process_of_its_own;

    #[test]
    fn what_is_stored_is_read_back_and_nothing_else_is_taken_for_it() {
        // Children that other tests start would hold the lock of a file that has just been written.
        in_a_process_of_its_own(|| {
            let figure = |value| Figure { value, source: Source::Given };
            let calibration = Calibration {
                format: Calibration::FORMAT,
                date: "2026-11-30T00:00:00Z".into(),
                machine: this_machine(),
                threads: 2,
                buffer_bytes: 1,
                passes: 1,
                ram_gb_per_s: Figure { value: 1.5, source: Source::Measured },
                ram_least_gb_per_s: 1.0,
                ram_most_gb_per_s: 2.0,
                gpu_gb_per_s: Some(figure(3.0)),
                bus_gb_per_s: None,
                layer_overhead_us: Some(figure(0.0)),
                prompts: vec![Prompts {
                    model: "kind, 2 of 8 experts, 5 bytes".into(),
                    date: "2026-11-30T00:00:00Z".into(),
                    n_threads: 4,
                    are_threads_given: false,
                    min_batch: 77,
                    prompts: vec![Prompt { n_tokens: 32, cpu_ms: 2.5, copied_ms: 7.5 }],
                }],
            };
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a/b/calibration.json");
            assert_eq!(Calibration::load(&path).unwrap(), None);
            calibration.store(&path).unwrap();
            calibration.store(&path).unwrap();
            assert_eq!(Calibration::load(&path).unwrap(), Some(calibration));
            let good = fs::read_to_string(&path).unwrap();
            for (old, new) in [
                ("1.5", "0.0"),
                ("1.5", "-1.0"),
                ("3.0", "1e999"),
                ("\"format\": 1", "\"format\": 9"),
                ("77", "7"),
                ("{", ""),
            ] {
                fs::write(&path, good.replacen(old, new, 1)).unwrap();
                assert!(Calibration::load(&path).is_err(), "{old} {new}");
            }
            assert!(Calibration::load(folder.path()).is_err());
        });
    }
}
