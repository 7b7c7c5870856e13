//! The `moe-hot` command: takes our flags out of a llama.cpp command line and starts the program with the plugin.
//!
//! Bad input ends with exit code 2, a failure with 1, each with one line that says what was expected.
#![forbid(unsafe_code)]

mod devices;
mod failure;
mod fit;
mod flags;
mod launch;
mod native;
mod program;
mod replay;
mod same_model;

use anyhow::anyhow;
use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use failure::Failure;

pub(crate) use native::prepare;

use std::ffi::OsString;
use std::process::ExitCode;

/// Runs a llama.cpp program with the moe-hot plugin.
#[derive(Parser)]
#[command(name = "moe-hot", version, about, override_usage = "moe-hot PROGRAM [ARGS…]\n       moe-hot replay TRACE…", after_help = flags::help(),
    disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Replay(replay::ReplayArgs),
    /// Any llama.cpp program, by name or path, with its own arguments.
    #[command(external_subcommand)]
    Program(Vec<OsString>),
}

/// What the command does; the exit code says how it went.
pub fn main() -> ExitCode {
    let done = match parse() {
        Ok(Command::Program(command)) => Err(launch::launch(command)),
        Ok(Command::Replay(args)) => replay::replay(&args),
        Err(failure) => Err(failure),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("moe-hot: {}", failure.line());
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
