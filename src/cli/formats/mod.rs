//! Recorded routing in every format that is in use: told apart by what is in the file, never by its name.
//!
//! A profile says how often each expert was used, a trace says in which order.

mod counts;
mod imatrix;
mod perf;
mod route;
mod spark;
mod text;

use super::output::tell;
use crate::profile::{MAX_MIB, RecordedLayer, RecordedProfile};
use crate::trace::{self, Trace};
use crate::units::Expert;
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

pub use text::profile_of;

/// Writes a profile as our own JSON.
pub fn perf_json(profile: &RecordedProfile) -> Result<Vec<u8>> {
    perf::write(profile, false)
}

/// Enough of a file to tell its format by.
const SNIFFED_BYTES: u64 = 64 << 10;

/// Most experts of all layers together that are written one by one: the file stays below the limit for reading.
const MAX_CELLS: u64 = 4 << 20;

/// A format, by the name that it has on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// JSON, schema llama.cpp.moe_layer_perf.v1: our own
    PerfJson,
    /// JSON, schema llama.cpp.moe_layer_opt_perf.v1
    OptPerfJson,
    /// Spark's table of counts, one row per layer
    SparkCsv,
    /// CSV with the columns layer, expert and count
    CountsCsv,
    /// CSV with the columns phase, layer and expert: a trace
    RouteCsv,
    /// llama-imatrix's GGUF, of which the counts are read
    Imatrix,
    /// What --moe-trace-out writes
    #[value(skip)]
    Trace,
}

/// What a file holds.
#[derive(Debug)]
pub enum Recording {
    /// How often each expert was used.
    Profile(RecordedProfile),
    /// In which order experts were used.
    Trace(Trace),
}

impl Format {
    /// Its name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map_or("trace".to_owned(), |value| value.get_name().to_owned())
    }

    /// The names of all.
    pub fn names() -> String {
        Self::value_variants().iter().map(|format| format.name()).chain(["trace".into()]).collect::<Vec<_>>().join(", ")
    }

    /// The format of the file at `path`, by its content.
    fn of(path: &Path) -> Result<Self> {
        let mut start = Vec::new();
        open(path)?.take(SNIFFED_BYTES).read_to_end(&mut start)?;
        ensure!(!start.trim_ascii().is_empty(), "is empty; expected one of {}", Self::names());
        if start.starts_with(b"GGUF") {
            return Ok(Self::Imatrix);
        }
        if start.starts_with(trace::MAGIC) {
            return Ok(Self::Trace);
        }
        if start.trim_ascii_start().starts_with(b"{") {
            return Ok(Self::PerfJson);
        }
        let lines: Vec<_> = String::from_utf8_lossy(&start).lines().map(|line| line.trim().to_owned()).collect();
        if lines.first().is_some_and(|line| spark::is_first_line(line)) {
            return Ok(Self::SparkCsv);
        }
        let names = lines.iter().find(|line| !line.is_empty() && !line.starts_with('#'));
        let has = |wanted: &[&str]| {
            names.is_some_and(|names| {
                wanted.iter().all(|wanted| names.split(',').any(|name| name.trim().trim_matches('"') == *wanted))
            })
        };
        if has(&["phase", "layer", "expert"]) {
            Ok(Self::RouteCsv)
        } else if has(&["layer", "expert", "count"]) {
            Ok(Self::CountsCsv)
        } else {
            bail!("is in no known format; expected one of {}", Self::names())
        }
    }
}

/// Whether the file at `path` is a model: a GGUF file that is no imatrix.
pub fn is_model(path: &Path) -> Result<bool> {
    let mut start = Vec::new();
    let file = open(path).with_context(|| path.display().to_string())?;
    file.take(4).read_to_end(&mut start).with_context(|| path.display().to_string())?;
    Ok(start == b"GGUF" && !imatrix::is_imatrix(path))
}

/// Reads what is recorded in the file at `path`, whatever its format.
pub fn read(path: &Path) -> Result<(Recording, Format)> {
    read_unnamed(path).with_context(|| path.display().to_string())
}

/// Reads the file at `path` as a profile; of a trace the decoded tokens are counted.
pub fn read_profile(path: &Path) -> Result<RecordedProfile> {
    match read(path)?.0 {
        Recording::Profile(profile) => Ok(profile),
        Recording::Trace(trace) => profile_of_trace(&trace).with_context(|| path.display().to_string()),
    }
}

fn read_unnamed(path: &Path) -> Result<(Recording, Format)> {
    let format = Format::of(path)?;
    let profile = match format {
        Format::RouteCsv | Format::Trace => {
            let trace = Trace::from_slice(&text::read(path, trace::MAX_MIB)?)?;
            if trace.is_cut {
                tell(&format!("{}: ends in the middle of a record; taking what is before it", path.display()));
            }
            return Ok((Recording::Trace(trace), format));
        }
        Format::PerfJson | Format::OptPerfJson => {
            let (profile, format) = perf::read(&text::read(path, MAX_MIB)?)?;
            return Ok((Recording::Profile(profile), format));
        }
        Format::SparkCsv => spark::read(&text::read(path, MAX_MIB)?)?,
        Format::CountsCsv => counts::read(&text::read(path, MAX_MIB)?)?,
        Format::Imatrix => imatrix::read(path)?,
    };
    Ok((Recording::Profile(profile), format))
}

/// Opens a regular file, or what a symbolic link to one stands for. Waits for nothing.
fn open(path: &Path) -> Result<File> {
    let meta = fs::metadata(path)?;
    ensure!(!meta.is_dir(), "is a folder; expected a file");
    ensure!(meta.is_file(), "is a pipe, socket or device; expected a regular file");
    Ok(File::open(path)?)
}

/// Refuses a table with more cells than a file that is read may have.
fn check_cells(cells: u64) -> Result<()> {
    ensure!(cells <= MAX_CELLS, "has {cells} experts in all layers together; expected at most {MAX_CELLS}");
    Ok(())
}

/// Writes a recording in a format.
pub fn write(recording: &Recording, format: Format) -> Result<Vec<u8>> {
    let of_trace;
    let profile = match (recording, format) {
        (Recording::Trace(trace), Format::RouteCsv) => return route::write(trace),
        (_, Format::Trace) => bail!("expected one of {}", Format::names()),
        (Recording::Profile(_), Format::RouteCsv) => {
            bail!("a profile has counts and no order of tokens; expected a trace for route-csv")
        }
        (Recording::Trace(trace), _) => {
            of_trace = profile_of_trace(trace)?;
            &of_trace
        }
        (Recording::Profile(profile), _) => profile,
    };
    if matches!(format, Format::SparkCsv | Format::CountsCsv | Format::Imatrix) {
        check_cells(profile.layers.values().map(|layer| u64::from(n_expert(profile, layer))).sum())?;
    }
    match format {
        Format::SparkCsv => spark::write(profile),
        Format::CountsCsv => counts::write(profile),
        Format::Imatrix => imatrix::write(profile),
        Format::OptPerfJson => perf::write(profile, true),
        _ => perf::write(profile, false),
    }
}

/// How often each expert was used by the decoded tokens of a trace.
pub fn profile_of_trace(trace: &Trace) -> Result<RecordedProfile> {
    let mut layers = BTreeMap::new();
    for layer in &trace.layers {
        let mut counts = BTreeMap::<u32, u64>::new();
        layer.decode.iter().flatten().for_each(|&Expert(id)| *counts.entry(id.into()).or_default() += 1);
        let recorded = RecordedLayer {
            n_expert: Some(layer.info.n_expert.into()),
            n_used: Some(u32::from(layer.info.n_used)).filter(|&n| n > 0),
            calls: layer.decode.len() as u64,
            requests: counts.into_iter().collect(),
            ranks: Vec::new(),
            resident: Vec::new(),
        };
        layers.insert(layer.info.layer.into(), recorded);
    }
    let most = |number: fn(&RecordedLayer) -> Option<u32>| layers.values().filter_map(number).max();
    let (n_expert, n_used) = (most(|layer| layer.n_expert), most(|layer| layer.n_used));
    Ok(RecordedProfile { n_expert, n_used, model: None, layers })
}

/// Experts of a layer: what the profile says, else as many as the highest one that is counted.
pub fn n_expert(profile: &RecordedProfile, layer: &RecordedLayer) -> u32 {
    let counted = || layer.requests.last().map_or(1, |&(id, _)| id + 1);
    layer.n_expert.or(profile.n_expert).unwrap_or_else(counted)
}

/// Experts per token of a layer, if the profile says so.
pub fn n_used(profile: &RecordedProfile, layer: &RecordedLayer) -> Option<u32> {
    layer.n_used.or(profile.n_used)
}

#[cfg(test)]
mod tests;
