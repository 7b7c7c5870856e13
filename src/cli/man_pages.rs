//! `moe-hot man-pages`: the manual pages that packages install.

use super::failure::{Failure, named_by_user};
use super::flags;
use anyhow::Context;
use clap::{Args, Command};
use std::path::PathBuf;

/// Write the manual pages of moe-hot and its commands to a folder
#[derive(Args, Debug)]
pub struct ManPagesArgs {
    /// An existing folder
    folder: PathBuf,
}

/// Writes the pages of `command`, in which our flags among a program's arguments are described too.
pub fn man_pages(args: &ManPagesArgs, command: Command) -> Result<(), Failure> {
    clap_mangen::generate_to(command.args(flags::for_manual()), &args.folder)
        .with_context(|| format!("{}: expected an existing folder", args.folder.display()))
        .map_err(named_by_user)
}
