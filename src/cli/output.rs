//! What the commands print and the files they write: whole or not at all, and never over anything that is still wanted.

use super::failure::{Failure, OrFail, named_by_user, told};
use crate::files::{Claim, FileError, Replaced, claim, folder_of};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where a command writes its result.
#[derive(Args, Debug)]
pub struct OutputArgs {
    /// Write to FILE, which must not exist yet
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    path: PathBuf,
    /// Replace FILE if it exists
    #[arg(long)]
    force: bool,
}

impl OutputArgs {
    /// Where the result goes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses what could not be written, or would be lost, before any work is done.
    pub fn check(&self, inputs: &[&Path]) -> Result<(), Failure> {
        self.look(inputs).with_context(|| format!("--output {}", self.path.display())).map_err(named_by_user)
    }

    fn look(&self, inputs: &[&Path]) -> Result<()> {
        ensure!(self.path != Path::new("-"), "expected the name of a file");
        let folder = folder_of(&self.path);
        ensure!(folder.is_dir(), "no folder {}; expected an existing one", folder.display());
        let meta = match fs::metadata(&self.path) {
            Ok(meta) => meta,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        ensure!(!meta.is_dir(), "is a folder; expected the name of a file");
        ensure!(meta.is_file(), "is not a regular file; expected the name of a file");
        for input in inputs {
            let is_same = fs::metadata(input).is_ok_and(|input| (input.dev(), input.ino()) == (meta.dev(), meta.ino()));
            ensure!(!is_same, "is the input {}; expected another file", input.display());
        }
        ensure!(self.force, "exists; expected the name of a new file, or --force to replace it");
        Ok(())
    }

    /// Writes the file so that it is there whole or not at all.
    pub fn write(&self, bytes: &[u8]) -> Result<(), Failure> {
        write_file(&self.path, bytes, self.force)
            .with_context(|| format!("--output {}", self.path.display()))
            .map_err(named_by_user)
    }
}

/// Writes a file so that it is there whole or not at all, where the file system can do that; replaces what is there only if
/// asked to.
pub fn write_file(path: &Path, bytes: &[u8], replace: bool) -> Result<()> {
    let Claim::Ours(mut file) = claim(path).map_err(told)? else { bail!(FileError::Held) };
    ensure!(replace || file.present().is_none(), "exists by now");
    let replaced = file.replace(bytes).map_err(told)?;
    ensure!(replaced == Replaced::Done, "another file has come there meanwhile");
    file.take_notes().iter().for_each(|note| tell(&format!("{}: {note}", path.display())));
    Ok(())
}

/// Prints a result. A reader that has gone away has seen what it wanted.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done.context("standard output").or_internal(),
    }
}

/// Says a line beside the result. Where that cannot be said there is nobody to say it to.
pub fn tell(line: &str) {
    let _ = writeln!(io::stderr().lock(), "moe-hot: {line}");
}

/// Prints a result as JSON.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).context("JSON").or_internal()?;
    print(&(text + "\n"))
}

/// A table without lines; columns that begin with the number `first_number` hold numbers.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>, first_number: usize) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.iter().copied());
    table.add_rows(rows);
    for number in first_number..header.len() {
        if let Some(column) = table.column_mut(number) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt() + "\n"
}

/// `12.3 %`.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// A list of layers such as `0-3, 7`.
pub fn ranges(numbers: impl IntoIterator<Item = u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let show = |&(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    ranges.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// The same, cut short for a table where layers alternate: `0, 2, 4, … (24 layers)`.
pub fn short_ranges(numbers: &[u32]) -> String {
    const MOST: usize = 32;
    let text = ranges(numbers.iter().copied());
    let end = text.char_indices().take_while(|&(at, _)| at <= MOST).filter(|&(_, c)| c == ',').last();
    match end {
        Some((end, _)) if text.len() > MOST => format!("{}, … ({} layers)", &text[..end], numbers.len()),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_follow_each_other_are_one_range() {
        assert_eq!(ranges([0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(ranges([u32::MAX]), u32::MAX.to_string());
        assert_eq!(ranges([]), "");
        let every_second: Vec<u32> = (0..48).step_by(2).collect();
        assert_eq!(short_ranges(&every_second), "0, 2, 4, 6, 8, 10, 12, 14, 16, … (24 layers)");
        assert_eq!(short_ranges(&[0, 1, 2, 5]), "0-2, 5");
    }

    #[test]
    fn a_file_is_replaced_only_if_asked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        write_file(&path, b"1", false).unwrap();
        assert!(write_file(&path, b"2", false).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"1");
        write_file(&path, b"2", true).unwrap();
        assert_eq!((fs::read(&path).unwrap(), fs::read_dir(folder.path()).unwrap().count()), (b"2".to_vec(), 1));
    }
}
