//! What we ask of a file system, call by call, so that tests can have any of them fail.

use super::error::{is_full, is_unsupported};
use super::open::open;
use super::path::stands_at;
use rustix::fs::{CWD, FallocateFlags, RenameFlags, fallocate, renameat_with};
use rustix::process::{Resource, getrlimit};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::fchown;
use std::path::Path;

/// The calls. Each is the system's own unless a test says otherwise.
pub trait FileSystem: Clone {
    /// Opens a file on a descriptor above 2.
    fn open(&self, path: &Path, options: &OpenOptions) -> io::Result<File> {
        open(path, options)
    }

    /// Whether the file is locked for us now; no: another one has it.
    fn lock(&self, file: &File) -> io::Result<bool> {
        match file.try_lock() {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Writes some of `bytes` where the file's position is; how many.
    fn write(&self, mut file: &File, bytes: &[u8]) -> io::Result<usize> {
        file.write(bytes)
    }

    /// Makes room for so many bytes in all.
    fn reserve(&self, file: &File, n_bytes: u64) -> io::Result<()> {
        Ok(fallocate(file, FallocateFlags::KEEP_SIZE, 0, n_bytes)?)
    }

    /// Waits until the file is on the disk.
    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    /// Waits until the folder's names are on the disk.
    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.open(folder, OpenOptions::new().read(true))?.sync_all()
    }

    /// Gives a file another name, in the place of whatever has it.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    /// Gives a file another name unless something has it.
    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
    }

    /// Gives a file one more name unless something has it.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    /// Gives a file to another user or group.
    fn change_owner(&self, file: &File, user: Option<u32>, group: Option<u32>) -> io::Result<()> {
        fchown(file, user, group)
    }

    /// How large a file may become that this process writes. Beyond that the system ends the process.
    fn size_limit(&self) -> Option<u64> {
        getrlimit(Resource::Fsize).current
    }

    /// Whether `file` is what stands at `path` now, not an earlier version.
    fn stands_at(&self, file: &File, path: &Path) -> bool {
        stands_at(file, path)
    }

    /// Writes all of `bytes` where the file's position is.
    fn write_all(&self, file: &File, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.write(file, bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// [`sync`](Self::sync), where the file system knows such a thing.
    fn sync_if_known(&self, file: &File) -> io::Result<()> {
        match self.sync(file) {
            Err(error) if is_unsupported(&error) => Ok(()),
            done => done,
        }
    }

    /// [`reserve`](Self::reserve), where the file system knows such a thing. Fails only for want of room.
    fn reserve_if_known(&self, file: &File, n_bytes: u64) -> io::Result<()> {
        match self.reserve(file, n_bytes) {
            Err(error) if is_full(&error) => Err(error),
            _ => Ok(()),
        }
    }
}

/// The system itself.
#[derive(Clone, Debug)]
pub struct Linux;

impl FileSystem for Linux {}
