//! Taking a file for this process alone, and replacing it as a whole.
//!
//! Whoever writes a file holds its lock. A new version is written beside the file, synced and locked, and takes the file's
//! place then: at any moment the path holds one version, whole, and a second program sees that it is taken.

use super::error::{FileError, Note, is_unsupported};
use super::grow::Growing;
use super::path::{folder_of, regular_file_at, target_of};
use super::system::{FileSystem, Linux};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::{NamedTempFile, TempPath};

/// Mode of a new file before the user's umask.
const FILE_MODE: u32 = 0o666;
/// The bits of a mode that are kept.
const PERMISSIONS: u32 = 0o7777;
/// How often a file may change while we look at it before we give up.
const MAX_TRIES: usize = 16;
/// Temporary files are called so, with six letters in between.
const PREFIX: &str = ".experts-";
const SUFFIX: &str = ".tmp";

/// What came of [`claim`].
pub enum Claim<S: FileSystem = Linux> {
    /// The file, or the path where none is yet, is ours.
    Ours(Claimed<S>),
    /// Another program holds it, or this one for something else.
    Taken,
}

/// What came of [`Claimed::replace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replaced {
    /// The new version is there.
    Done,
    /// Another file has come to the path meanwhile, which may be somebody's: claim it anew.
    Lost,
}

/// A file that this process alone writes to, as far as the file system knows locks.
pub struct Claimed<S: FileSystem = Linux> {
    system: S,
    /// As the user calls it.
    path: PathBuf,
    /// The version that stands there, with its lock; `None`: nothing is there.
    held: Option<File>,
    /// Whether a file can be known by its number. Some network file systems make them up anew.
    has_numbers: bool,
    /// Whether temporary files that were left behind have been looked for.
    is_tidy: bool,
    notes: Notes,
}

/// What is to be said, and what has been.
#[derive(Default)]
struct Notes {
    waiting: Vec<Note>,
    said_in_place: bool,
    said_no_locks: bool,
}

/// Takes the file at `path`: symbolic links are followed, and nothing may be there yet.
///
/// Fails where the system does not let us look at it or write to it, and if it is not a regular file.
pub fn claim(path: &Path) -> Result<Claim, FileError> {
    claim_in(Linux, path)
}

/// [`claim`] in any file system.
pub fn claim_in<S: FileSystem>(system: S, path: &Path) -> Result<Claim<S>, FileError> {
    let (mut notes, mut has_numbers) = (Notes::default(), true);
    for n in 1..=MAX_TRIES {
        let target = target_of(path)?;
        let mut held = None;
        if regular_file_at(&target)?.is_some() {
            // For writing too: over NFS others are not locked, and it may have to be overwritten where it is.
            match system.open(&target, OpenOptions::new().read(true).write(true)) {
                Ok(file) => held = Some(file),
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(FileError::system("cannot be opened for writing")(error)),
            }
        }
        if let Some(file) = &held {
            if !lock(&system, file, &mut notes) {
                return Ok(Claim::Taken);
            }
            if !system.stands_at(file, &target) {
                if n < MAX_TRIES {
                    continue;
                }
                // Nobody replaces it so often: here files have no lasting numbers to know them by.
                has_numbers = false;
            }
        }
        return Ok(Claim::Ours(Claimed { system, path: path.into(), held, has_numbers, is_tidy: false, notes }));
    }
    Ok(Claim::Taken)
}

/// Whether a file could be written at `path`, found out without changing anything there. Fails with why not.
///
/// A file that is there must be one that may be written to; its folder need not be.
pub fn check(path: &Path) -> Result<(), FileError> {
    let target = target_of(path)?;
    if regular_file_at(&target)?.is_some() {
        let opened = Linux.open(&target, OpenOptions::new().write(true));
        return opened.map(drop).map_err(FileError::system("cannot be opened for writing"));
    }
    // With a name: some systems know no files without one.
    let made = tempfile::Builder::new().prefix(PREFIX).suffix(SUFFIX).tempfile_in(folder_of(&target));
    made.map(drop).map_err(FileError::system("expected an existing folder that can be written to"))
}

/// Whether the lock is ours. A file system without locks gives every file to everybody, which is noted.
fn lock<S: FileSystem>(system: &S, file: &File, notes: &mut Notes) -> bool {
    system.lock(file).unwrap_or_else(|error| {
        notes.add(Note::NoLocks(error));
        true
    })
}

impl<S: FileSystem> Claimed<S> {
    /// As the user calls it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version that stands there, to be read from its start; `None`: nothing is there.
    pub fn present(&self) -> Option<&File> {
        self.held.as_ref()
    }

    /// What the user should be told since this was last asked; each thing once.
    pub fn take_notes(&mut self) -> Vec<Note> {
        std::mem::take(&mut self.notes.waiting)
    }

    /// Begins a file that grows; what was there is gone. `None`: another file has come to the path meanwhile.
    pub fn grow(mut self) -> Result<Option<Growing<S>>, FileError> {
        let failed = FileError::system("cannot be begun");
        let target = target_of(&self.path)?;
        let mut file = match self.held.take() {
            Some(held) => held,
            None => match self.create(&target) {
                Ok(created) => created,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
                Err(error) => return Err(FileError::system("cannot be created")(error)),
            },
        };
        if !lock(&self.system, &file, &mut self.notes) || (self.has_numbers && !self.system.stands_at(&file, &target)) {
            return Ok(None);
        }
        file.set_len(0).and_then(|()| file.rewind()).map_err(failed)?;
        Ok(Some(Growing::new(self.system, self.path, file, self.notes.waiting)))
    }

    /// Puts `bytes` in the place of what is there, so that at any moment the path holds the old version or the new one, whole.
    ///
    /// Where nothing can take its place it is overwritten, which is noted. On failure the old version is still there.
    pub fn replace(&mut self, bytes: &[u8]) -> Result<Replaced, FileError> {
        let target = target_of(&self.path)?;
        if let Some(held) = &self.held {
            if regular_file_at(&target)?.is_none() {
                self.held = None; // it has been removed
            } else if self.has_numbers && !self.system.stands_at(held, &target) {
                return Ok(Replaced::Lost);
            }
        }
        let n_bytes = bytes.len() as u64;
        if let Some(limit) = self.system.size_limit().filter(|&limit| n_bytes > limit) {
            return Err(FileError::SizeLimit { bytes: n_bytes, limit });
        }
        let done = match self.temporary(&target) {
            Ok((file, path)) => {
                self.fill(&file, bytes)?;
                self.put_in_place(&target, file, path, bytes)?
            }
            Err(error) if leaves_in_place(&error) => self.overwrite(&target, bytes, error)?,
            Err(error) => return Err(FileError::system("cannot create a temporary file beside it")(error)),
        };
        if done == Replaced::Done {
            // It is where it belongs; that its name is on the disk too is more than some file systems promise.
            let _ = self.system.sync_folder(&folder_of(&target));
            // Nobody else has replaced it yet: it is locked.
            self.has_numbers &= self.held.as_ref().is_some_and(|held| self.system.stands_at(held, &target));
            self.tidy(&folder_of(&target));
        }
        Ok(done)
    }

    /// A new file in the folder of `target`, locked.
    fn temporary(&mut self, target: &Path) -> io::Result<(File, TempPath)> {
        for _ in 0..MAX_TRIES {
            let make = |path: &Path| self.create(path);
            let made = tempfile::Builder::new().prefix(PREFIX).suffix(SUFFIX).make_in(folder_of(target), make);
            let (file, path) = NamedTempFile::into_parts(made?);
            // Else somebody who tidies has taken it for one that was left behind.
            if lock(&self.system, &file, &mut self.notes) && file.metadata()?.nlink() > 0 {
                return Ok((file, path));
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        self.system.open(path, options.read(true).write(true).create_new(true).mode(FILE_MODE))
    }

    fn fill(&self, file: &File, bytes: &[u8]) -> Result<(), FileError> {
        self.system.write_all(file, bytes).map_err(FileError::system("cannot write"))?;
        self.system.sync_if_known(file).map_err(FileError::system("cannot sync"))
    }

    /// The new version, whole in `file` at `path`, goes to `target`.
    fn put_in_place(&mut self, target: &Path, file: File, path: TempPath, bytes: &[u8]) -> Result<Replaced, FileError> {
        let moved = match &self.held {
            Some(held) => {
                self.keep_owner(held, &file);
                self.system.rename(&path, target)
            }
            None => match self.name_new(&path, target) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(Replaced::Lost),
                moved => moved,
            },
        };
        match moved {
            Ok(()) => {
                let _ = path.keep(); // nothing is there any more
                self.held = Some(file);
                Ok(Replaced::Done)
            }
            // `path` stays until the file has been overwritten: one of them is whole.
            Err(error) if leaves_in_place(&error) => self.overwrite(target, bytes, error),
            Err(error) => Err(FileError::system("cannot replace")(error)),
        }
    }

    /// Gives the file its name if nothing has it: at once where the file system can do that, else after a last look.
    fn name_new(&self, path: &Path, target: &Path) -> io::Result<()> {
        let is_taken = |error: &io::Error| error.kind() == io::ErrorKind::AlreadyExists;
        match self.system.rename_new(path, target) {
            Err(error) if !is_taken(&error) => {}
            done => return done,
        }
        match self.system.link(path, target) {
            Ok(()) => return fs::remove_file(path),
            Err(error) if is_taken(&error) => return Err(error),
            Err(_) => {}
        }
        match fs::symlink_metadata(target) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.system.rename(path, target),
            Err(error) => Err(error),
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
        }
    }

    /// Gives the new version the owner, as far as we may, and the mode of the old one.
    fn keep_owner(&self, old: &File, new: &File) {
        let (Ok(old), Ok(made)) = (old.metadata(), new.metadata()) else { return };
        let change = |user, group| self.system.change_owner(new, user, group);
        if (old.uid(), old.gid()) != (made.uid(), made.gid()) && change(Some(old.uid()), Some(old.gid())).is_err() {
            let _ = change(None, Some(old.gid()));
        }
        // After the owner, whose change may take bits away. Some file systems have no modes.
        let _ = new.set_permissions(Permissions::from_mode(old.mode() & PERMISSIONS));
    }

    /// Writes over what is there. If that fails what was there is written again.
    fn overwrite(&mut self, target: &Path, bytes: &[u8], why: io::Error) -> Result<Replaced, FileError> {
        let failed = FileError::system("cannot be overwritten");
        let is_new = self.held.is_none();
        let file = match self.held.take() {
            Some(held) => held,
            None => match self.create(target) {
                Ok(created) if lock(&self.system, &created, &mut self.notes) => created,
                Ok(_) => return Ok(Replaced::Lost),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(Replaced::Lost),
                Err(error) => return Err(FileError::system("cannot be created")(error)),
            },
        };
        let written = self.overwrite_file(&file, bytes).map_err(failed);
        if written.is_err() && is_new {
            let _ = fs::remove_file(target);
        } else {
            self.held = Some(file);
        }
        written?;
        self.notes.add(Note::InPlace(why));
        Ok(Replaced::Done)
    }

    fn overwrite_file(&self, file: &File, bytes: &[u8]) -> io::Result<()> {
        let mut old = Vec::new();
        let mut reader = file;
        reader.rewind()?;
        reader.read_to_end(&mut old)?;
        self.system.reserve_if_known(file, bytes.len() as u64)?;
        let write = |bytes: &[u8]| {
            io::Seek::rewind(&mut &*file)?;
            self.system.write_all(file, bytes)?;
            file.set_len(bytes.len() as u64)
        };
        match write(bytes).and_then(|()| self.system.sync_if_known(file)) {
            Ok(()) => Ok(()),
            Err(error) => write(&old).and(Err(error)),
        }
    }

    /// Removes temporary files of programs that were killed: those that nobody holds any more. Once.
    fn tidy(&mut self, folder: &Path) {
        if std::mem::replace(&mut self.is_tidy, true) || self.notes.said_no_locks {
            return;
        }
        let Ok(entries) = fs::read_dir(folder) else { return };
        let is_ours = |name: &str| {
            let middle = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
            middle.is_some_and(|middle| middle.len() == 6 && middle.bytes().all(|byte| byte.is_ascii_alphanumeric()))
        };
        for entry in entries.flatten() {
            let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
            if is_file && entry.file_name().to_str().is_some_and(is_ours) {
                let path = entry.path();
                let Ok(file) = self.system.open(&path, OpenOptions::new().read(true).write(true)) else { continue };
                if self.system.lock(&file).is_ok_and(|is_locked| is_locked) && self.system.stands_at(&file, &path) {
                    let _ = fs::remove_file(&path);
                }
            }
        }
    }
}

/// Whether an error says that nothing new can come to a place, so that what is there can only be overwritten: a mount
/// point, a folder that is not ours to write to, a name that leaves no room.
fn leaves_in_place(error: &io::Error) -> bool {
    const ERRORS: [i32; 7] =
        [libc::EBUSY, libc::EXDEV, libc::EACCES, libc::EPERM, libc::EROFS, libc::ENAMETOOLONG, libc::ETXTBSY];
    is_unsupported(error) || error.raw_os_error().is_some_and(|number| ERRORS.contains(&number))
}

impl Notes {
    fn add(&mut self, note: Note) {
        let said = match note {
            Note::InPlace(_) => &mut self.said_in_place,
            Note::NoLocks(_) => &mut self.said_no_locks,
        };
        if !std::mem::replace(said, true) {
            self.waiting.push(note);
        }
    }
}
