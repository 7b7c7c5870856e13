//! The `moe-hot` command: takes our flags out of a llama.cpp command line and starts the program with the plugin.
//!
//! Bad input ends with exit code 2, a failure with 1, each with one line that says what was expected.
#![forbid(unsafe_code)]

mod backend_path;
mod calibrate;
mod compare;
mod completions;
mod devices;
mod failure;
mod fit;
mod flags;
mod formats;
mod import;
mod inspect;
mod launch;
mod man_pages;
mod merge;
mod model;
mod native;
mod output;
mod own_files;
mod page;
mod placement;
mod plan;
mod program;
mod question;
mod replay;
mod report;
mod same_model;
mod size;
mod threshold;
mod two_caches;

use crate::ggml::served_revisions;
use anyhow::anyhow;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use failure::Failure;
use std::ffi::OsString;
use std::process::ExitCode;

pub(crate) use native::prepare;

/// What the usage line cannot say.
const NAMES: &str = "Any other name is that of a llama.cpp program, which is started with the plugin. A program that has the name of a command is \
    started by its path, such as ./plan.";

/// Runs a llama.cpp program with the moe-hot plugin.
#[derive(Parser)]
#[command(name = "moe-hot", version, long_version = long_version(), propagate_version = true, about,
    override_usage = "moe-hot PROGRAM [ARGS…]\n       moe-hot COMMAND …",
    after_help = format!("{}\n\n{}", notes(), flags::help()), disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The way from a model to a cache.
const EXAMPLES: [&str; 4] = [
    "moe-hot inspect model.gguf",
    "moe-hot llama-server -m model.gguf --moe-layer-perf-out experts.json",
    "moe-hot plan model.gguf --profile experts.json --vram 12GiB",
    "moe-hot llama-server -m model.gguf --moe-hot-cache experts.json",
];

/// The version, and which llama.cpp it is for.
fn long_version() -> String {
    format!("{}\nserves {}", env!("CARGO_PKG_VERSION"), served_revisions())
}

/// What stands below the commands and options, in the help and in the manual page.
fn notes() -> String {
    format!("{NAMES}\n\nExamples:\n  {}", EXAMPLES.join("\n  "))
}

#[derive(Subcommand)]
enum Command {
    Inspect(inspect::InspectArgs),
    Plan(plan::PlanArgs),
    Calibrate(calibrate::CalibrateArgs),
    Compare(compare::CompareArgs),
    Import(import::ImportArgs),
    Export(import::ExportArgs),
    Merge(merge::MergeArgs),
    Report(report::ReportArgs),
    Replay(replay::ReplayArgs),
    Completions(completions::CompletionsArgs),
    #[command(hide = true)]
    ManPages(man_pages::ManPagesArgs),
    /// Any llama.cpp program, by name or path, with its own arguments.
    #[command(external_subcommand)]
    Program(Vec<OsString>),
}

/// What the command does; the exit code says how it went.
pub fn main() -> ExitCode {
    let done = match parse() {
        Ok(Command::Program(command)) => Err(launch::launch(command)),
        Ok(Command::Inspect(args)) => inspect::inspect(&args),
        Ok(Command::Plan(args)) => plan::plan(&args),
        Ok(Command::Calibrate(args)) => calibrate::calibrate(&args),
        Ok(Command::Compare(args)) => compare::compare(&args),
        Ok(Command::Import(args)) => import::import(&args),
        Ok(Command::Export(args)) => import::export(&args),
        Ok(Command::Merge(args)) => merge::merge(&args),
        Ok(Command::Report(args)) => report::report(&args),
        Ok(Command::Replay(args)) => replay::replay(&args),
        Ok(Command::Completions(args)) => completions::completions(&args, Cli::command()),
        Ok(Command::ManPages(args)) => man_pages::man_pages(&args, Cli::command().after_help(notes())),
        Err(failure) => Err(failure),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output::tell(&failure.line());
            failure.exit_code()
        }
    }
}

/// The command line. Help and version are printed from here, and end the process.
fn parse() -> Result<Command, Failure> {
    Cli::try_parse().map(|cli| cli.command).map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            error.exit()
        }
        _ => Failure::Input(anyhow!(complaint(&error))),
    })
}

/// What the argument parser says is wrong and was expected, without its advice.
fn complaint(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines: Vec<_> = text.lines().take_while(|line| !line.is_empty()).map(str::trim).collect();
    lines.join(" ").trim_start_matches("error: ").to_owned()
}
