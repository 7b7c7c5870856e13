//! The `moe-hot` command: takes our flags out of a llama.cpp command line and starts the program with the plugin.
//!
//! Bad input ends with exit code 2, a failure with 1, each with one line that says what was expected.
#![forbid(unsafe_code)]

mod args;
mod devices;
mod fit;
mod flags;
mod launch;
mod program;

use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::process::ExitCode;

/// Runs a llama.cpp program with the moe-hot plugin.
#[derive(Parser)]
#[command(name = "moe-hot", version, about, override_usage = "moe-hot PROGRAM [ARGS…]", after_help = flags::help())]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Any llama.cpp program, by name or path, with its own arguments.
    #[command(external_subcommand)]
    Program(Vec<OsString>),
}

/// Why the command ends.
enum Failure {
    /// The user can mend it by typing something else.
    Input(anyhow::Error),
    /// Something that should work did not.
    Internal(anyhow::Error),
}

/// What the command does; the exit code says how it went.
pub fn main() -> ExitCode {
    let Command::Program(command) = Cli::parse().command;
    let (code, error) = match launch::launch(command) {
        Failure::Input(error) => (2, error),
        Failure::Internal(error) => (1, error),
    };
    eprintln!("moe-hot: {}", one_line(&format!("{error:#}")));
    ExitCode::from(code)
}

/// The text with control characters written out, whatever a file is called.
fn one_line(text: &str) -> String {
    let written = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(written).collect()
}
