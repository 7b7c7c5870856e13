//! `moe-hot report`: a profile, and a trace if there is one, as one HTML file that needs nothing else.

mod curves;
mod figures;
mod heat;
mod page;

use super::failure::{Failure, OrFail, named_by_user};
use super::formats::{self, Recording};
use super::output::{OutputArgs, print, print_json};
use super::replay::check_profile;
use crate::trace::Trace;
use anyhow::{Context, Result, bail};
use clap::Args;
use figures::Figures;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Write a report of a profile that opens in any browser, offline: heat map, coverage, hit rate against budget
#[derive(Args, Debug)]
#[command(
    after_help = "With a trace the hit rates are those of a replay, policy by policy; without one, what the profile expects.\n\n\
    Examples:\n  moe-hot report experts.json -o report.html\n  \
    moe-hot report experts.json --trace routing.trace -o report.html --force"
)]
pub struct ReportArgs {
    /// The profile, in any format
    #[arg(value_name = "PROFILE")]
    profile: PathBuf,
    /// A trace of the same model
    #[arg(long, value_name = "TRACE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
    /// Print the report's numbers as JSON too
    #[arg(long)]
    json: bool,
}

/// What is printed with `--json`.
#[derive(Serialize)]
struct Printed<'a> {
    output: &'a Path,
    #[serde(flatten)]
    figures: &'a Figures,
}

fn read_trace(path: &Path) -> Result<Trace> {
    match formats::read(path)? {
        (Recording::Trace(trace), _) => Ok(trace),
        (Recording::Profile(_), format) => bail!("{}: is {}; expected a trace", path.display(), format.name()),
    }
}

/// Reads, draws and writes.
pub fn report(args: &ReportArgs) -> Result<(), Failure> {
    let inputs: Vec<&Path> =
        [Some(&args.profile), args.trace.as_ref()].into_iter().flatten().map(PathBuf::as_path).collect();
    args.output.check(&inputs)?;
    let profile = formats::read_profile(&args.profile).map_err(named_by_user)?;
    let trace = args.trace.as_deref().map(read_trace).transpose().context("--trace").map_err(named_by_user)?;
    if let (Some(trace), Some(path)) = (&trace, &args.trace) {
        let checked = check_profile(trace, &profile);
        checked.with_context(|| format!("--trace {}: is of another model: the profile", path.display())).or_input()?;
    }
    let figures = Figures::new(&args.profile, &profile, args.trace.as_deref().zip(trace.as_ref()));
    let page = page::page(&figures, &profile).context("drawing the report").or_internal()?;
    args.output.write(page.as_bytes())?;
    let output = args.output.path();
    if args.json {
        return print_json(&Printed { output, figures: &figures });
    }
    print(&format!("{}: open it in a browser\n", output.display()))
}
