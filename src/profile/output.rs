//! The file that a running program writes its profile to.
//!
//! It is ours from the first write on: every version is locked before it takes its place, so that a second program
//! (or a second model) that has the same file in mind sees that it is taken, and nothing is left behind by a kill.

use super::Profile;
use crate::{Error, Result};
use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Mode of a new file before the user's umask.
const FILE_MODE: u32 = 0o666;
/// How often a file may change under our eyes while we look at it.
const MAX_TRIES: usize = 16;

/// A profile's file, held by this process.
pub struct OutputFile {
    path: PathBuf,
    /// The version that stands at `path`; holds the lock.
    _held: File,
}

impl OutputFile {
    /// Takes `path` and writes the profile there, if nothing, an empty file, or a profile of the same model is there.
    ///
    /// `None` if the file belongs to another model or is held by someone. Fails where it is no profile at all.
    pub fn claim(path: &Path, profile: &Profile) -> Result<Option<Self>> {
        let is_same_model = |other: &Profile| match (&other.model, &profile.model) {
            (Some(theirs), Some(ours)) => theirs.is_same_model(ours),
            _ => false,
        };
        for _ in 0..MAX_TRIES {
            if let Some(other) = Profile::read_if_any(path)?
                && !is_same_model(&other)
            {
                return Ok(None);
            }
            let held = match File::open(path) {
                Ok(present) if is_locked(&present) => return Ok(None),
                Ok(present) if !stands_at(&present, path) => continue,
                Ok(_present) => Some(replace(path, profile)?),
                Err(error) if error.kind() == io::ErrorKind::NotFound => create(path, profile)?,
                Err(source) => return Err(Error::Io { path: path.into(), action: "cannot open", error: source }),
            };
            if let Some(held) = held {
                return Ok(Some(Self { path: path.into(), _held: held }));
            }
        }
        Ok(None)
    }

    /// Writes the profile so that at any moment the path holds the old version or the new one, whole.
    pub fn replace(&mut self, profile: &Profile) -> Result<()> {
        self._held = replace(&self.path, profile)?;
        Ok(())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The folder that holds `path`; the current one for a bare name.
pub fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.into(),
        _ => PathBuf::from("."),
    }
}

/// Takes the lock if it is free. File systems without locks count as free.
fn is_locked(file: &File) -> bool {
    matches!(file.try_lock(), Err(TryLockError::WouldBlock))
}

/// Whether `file` is what `path` names now, not an earlier version.
fn stands_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// Puts the profile where nothing is; `None` if something has come there meanwhile.
fn create(path: &Path, profile: &Profile) -> Result<Option<File>> {
    match prepare(path, profile)?.persist_noclobber(path) {
        Ok(held) => sync_folder(path).map(|()| Some(held)),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(Error::Io { path: path.into(), action: "cannot create", error: error.error }),
    }
}

/// Puts the profile in the place of what is there; through a symbolic link, of what it points to.
fn replace(path: &Path, profile: &Profile) -> Result<File> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.into());
    let persisted = prepare(&target, profile)?.persist(&target);
    let held = persisted.map_err(|e| Error::Io { path: path.into(), action: "cannot replace", error: e.error })?;
    sync_folder(&target)?;
    Ok(held)
}

/// The profile in a synced and locked temporary file in the folder of `target`.
fn prepare(target: &Path, profile: &Profile) -> Result<NamedTempFile> {
    let io = |action| move |source| Error::Io { path: target.into(), action, error: source };
    let text = serde_json::to_vec(profile).map_err(|error| io("cannot encode")(error.into()))?;
    let mut temporary = tempfile::Builder::new()
        .prefix(".experts-")
        .suffix(".tmp")
        .permissions(Permissions::from_mode(FILE_MODE))
        .tempfile_in(folder_of(target))
        .map_err(io("cannot create a temporary file beside it"))?;
    temporary.write_all(&text).map_err(io("cannot write"))?;
    temporary.as_file().sync_all().map_err(io("cannot sync"))?;
    is_locked(temporary.as_file());
    Ok(temporary)
}

fn sync_folder(path: &Path) -> Result<()> {
    let synced = File::open(folder_of(path)).and_then(|folder| folder.sync_all());
    synced.map_err(|source| Error::Io { path: path.into(), action: "cannot sync its folder", error: source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::testing::profile;

    #[test]
    fn a_profile_is_read_back_as_written_and_leaves_no_other_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("experts.json");
        let mut file = OutputFile::claim(&path, &profile("a", 1)).unwrap().unwrap();
        assert_eq!(Profile::read(&path).unwrap(), profile("a", 1));
        file.replace(&profile("a", 2)).unwrap();
        assert_eq!(Profile::read(&path).unwrap(), profile("a", 2));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_held_file_is_taken_and_a_released_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("experts.json");
        let mut first = OutputFile::claim(&path, &profile("a", 1)).unwrap().unwrap();
        assert!(OutputFile::claim(&path, &profile("a", 2)).unwrap().is_none());
        first.replace(&profile("a", 3)).unwrap();
        assert!(OutputFile::claim(&path, &profile("a", 2)).unwrap().is_none(), "the new version is held too");
        drop(first);
        assert!(OutputFile::claim(&path, &profile("a", 2)).unwrap().is_some());
        assert_eq!(Profile::read(&path).unwrap(), profile("a", 2));
    }

    #[test]
    fn another_models_profile_is_taken_and_an_empty_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("experts.json");
        drop(OutputFile::claim(&path, &profile("a", 1)).unwrap());
        assert!(OutputFile::claim(&path, &profile("b", 1)).unwrap().is_none());
        assert_eq!(Profile::read(&path).unwrap(), profile("a", 1));
        fs::write(&path, "").unwrap();
        assert!(OutputFile::claim(&path, &profile("b", 1)).unwrap().is_some());
    }

    #[test]
    fn many_that_want_one_file_at_once_agree_on_one_owner() {
        let folder = tempfile::tempdir().unwrap();
        let path = &folder.path().join("experts.json");
        for round in 0..20 {
            let claims: Vec<_> = std::thread::scope(|scope| {
                let claim = |n| scope.spawn(move || (n, OutputFile::claim(path, &profile("a", n)).unwrap()));
                let threads: Vec<_> = (0..4).map(claim).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let owners: Vec<_> = claims.iter().filter(|(_, file)| file.is_some()).map(|(n, _)| *n).collect();
            assert_eq!(owners.len(), 1, "round {round}");
            assert_eq!(Profile::read(path).unwrap(), profile("a", owners[0]));
        }
    }

    #[test]
    fn what_is_no_profile_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, "GGUF....").unwrap();
        assert!(matches!(OutputFile::claim(&path, &profile("a", 1)), Err(Error::NotAProfile { .. })));
        assert_eq!(fs::read(&path).unwrap(), b"GGUF....");
    }

    #[test]
    fn writing_through_a_symbolic_link_keeps_the_link() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real.json"), folder.path().join("link.json"));
        drop(OutputFile::claim(&real, &profile("a", 1)).unwrap());
        std::os::unix::fs::symlink(&real, &link).unwrap();
        OutputFile::claim(&link, &profile("a", 2)).unwrap().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(Profile::read(&real).unwrap(), profile("a", 2));
    }
}
