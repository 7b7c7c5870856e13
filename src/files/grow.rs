//! A file that only grows.

use super::error::{FileError, Note};
use super::path::{regular_file_at, target_of};
use super::system::{FileSystem, Linux};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// So many bytes may wait in memory while the disk is full.
pub const MAX_WAITING_BYTES: usize = 64 << 20;

/// A file that only grows, and that this process alone writes to.
pub struct Growing<S: FileSystem = Linux> {
    system: S,
    path: PathBuf,
    file: File,
    /// Bytes written so far.
    n_bytes: u64,
    notes: Vec<Note>,
}

impl<S: FileSystem> Growing<S> {
    /// An empty file.
    pub(super) fn new(system: S, path: PathBuf, file: File, notes: Vec<Note>) -> Self {
        Self { system, path, file, n_bytes: 0, notes }
    }

    /// As the user calls it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the user should be told since this was last asked; each thing once.
    pub fn take_notes(&mut self) -> Vec<Note> {
        std::mem::take(&mut self.notes)
    }

    /// Writes what waits, and takes from it what has been written.
    ///
    /// After a full disk ([`FileError::is_full_disk`]) this can be tried again. Every other failure is the end; beyond the
    /// file-size limit as much has been written as it allows.
    pub fn append(&mut self, waiting: &mut Vec<u8>) -> Result<(), FileError> {
        if waiting.is_empty() {
            return Ok(());
        }
        self.check()?;
        let wanted = self.n_bytes.saturating_add(waiting.len() as u64);
        let limit = self.system.size_limit().unwrap_or(u64::MAX);
        let room = usize::try_from(limit.saturating_sub(self.n_bytes)).unwrap_or(usize::MAX);
        let n = room.min(waiting.len());
        let mut done = 0;
        let written = loop {
            match waiting.get(done..n) {
                Some(rest) if !rest.is_empty() => match self.system.write(&self.file, rest) {
                    Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
                    Ok(more) => done += more,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => break Err(error),
                },
                _ => break Ok(()),
            }
        };
        waiting.drain(..done);
        self.n_bytes += done as u64;
        written.map_err(FileError::system("cannot write"))?;
        if waiting.is_empty() { Ok(()) } else { Err(FileError::SizeLimit { bytes: wanted, limit }) }
    }

    /// Whether the file is still the one that we write to, as long as we left it.
    fn check(&self) -> Result<(), FileError> {
        let there = regular_file_at(&target_of(&self.path)?)?.ok_or(FileError::Gone)?;
        let ours = self.file.metadata().map_err(FileError::system("cannot look at it"))?;
        // By their lengths, since some network file systems make up numbers of files anew.
        if [there.len(), ours.len()] == [self.n_bytes; 2] { Ok(()) } else { Err(FileError::Gone) }
    }
}
