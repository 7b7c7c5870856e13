//! `moe-hot import` and `moe-hot export`: recorded routing from one format to another.

use super::failure::{Failure, OrFail, named_by_user};
use super::formats::{self, Format, Recording, n_expert};
use super::output::{OutputArgs, print, print_json};
use crate::profile::RecordedProfile;
use anyhow::Context;
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Turn another program's profile or a trace into a profile (experts.json). The format is told by the content
#[derive(Args, Debug)]
#[command(
    after_help = "Formats: perf-json, opt-perf-json, spark-csv, counts-csv, route-csv, imatrix (GGUF), trace\n\n\
    Examples:\n  moe-hot import hotness.csv -o experts.json\n  moe-hot import imatrix.gguf -o experts.json"
)]
pub struct ImportArgs {
    /// A profile or trace in any of the formats below
    #[arg(value_name = "FILE")]
    input: PathBuf,
    #[command(flatten)]
    output: OutputArgs,
    /// Say what was done as JSON
    #[arg(long)]
    json: bool,
}

/// Write a profile or trace in another program's format
#[derive(Args, Debug)]
#[command(after_help = "A profile can be written in every format but route-csv, a trace in every format.\n\n\
    Examples:\n  moe-hot export experts.json --to spark-csv -o hotness.csv\n  \
    moe-hot export routing.trace --to route-csv -o routing.csv")]
pub struct ExportArgs {
    /// A profile or trace in any format; the format is told by the content
    #[arg(value_name = "FILE")]
    input: PathBuf,
    /// The format to write
    #[arg(long, value_name = "FORMAT")]
    to: Format,
    #[command(flatten)]
    output: OutputArgs,
    /// Say what was done as JSON
    #[arg(long)]
    json: bool,
}

/// What was done.
#[derive(Debug, Serialize)]
pub struct Written {
    /// The formats of what was read.
    pub from: Vec<String>,
    /// The format written.
    pub to: String,
    /// Layers with experts.
    pub layers: usize,
    /// Experts of the largest layer.
    pub n_expert: u32,
    /// (token, expert) pairs, all layers.
    pub requests: u64,
    /// The file written.
    pub output: PathBuf,
}

impl Written {
    /// What is said of a profile that was written to a file.
    pub fn new(profile: &RecordedProfile, from: Vec<String>, to: Format, output: &OutputArgs) -> Self {
        let layers = profile.layers.values();
        Self {
            from,
            to: to.name(),
            layers: profile.layers.len(),
            n_expert: layers.clone().map(|layer| n_expert(profile, layer)).max().unwrap_or(0),
            requests: layers.flat_map(|layer| &layer.requests).map(|&(_, count)| count).sum(),
            output: output.path().into(),
        }
    }

    /// Says it.
    pub fn print(&self, json: bool) -> Result<(), Failure> {
        if json {
            return print_json(self);
        }
        let Self { from, to, layers, n_expert, requests, output } = self;
        let from = from.join(", ");
        let output = output.display();
        print(&format!("{output}: {to}, from {from}: {layers} layers, {n_expert} experts each, {requests} requests\n"))
    }
}

/// Reads any format and writes a profile.
pub fn import(args: &ImportArgs) -> Result<(), Failure> {
    convert(&args.input, Format::PerfJson, &args.output, args.json)
}

/// Reads any format and writes any.
pub fn export(args: &ExportArgs) -> Result<(), Failure> {
    convert(&args.input, args.to, &args.output, args.json)
}

fn convert(input: &Path, to: Format, output: &OutputArgs, json: bool) -> Result<(), Failure> {
    output.check(&[input])?;
    let (recording, from) = formats::read(input).map_err(named_by_user)?;
    let counted = match &recording {
        Recording::Profile(profile) => profile.clone(),
        Recording::Trace(trace) => formats::profile_of_trace(trace).or_input()?,
    };
    let bytes = formats::write(&recording, to)
        .with_context(|| format!("{}: is {}", input.display(), from.name()))
        .or_input()?;
    output.write(&bytes)?;
    Written::new(&counted, vec![from.name()], to, output).print(json)
}
