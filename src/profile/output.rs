//! The file that a running program writes its profile to.
//!
//! It is ours from the first write on: every version is locked before it takes its place, so that a second program
//! (or a second model) that has the same file in mind sees that it is taken, and nothing is left behind by a kill.

use super::error::{NotAProfileError, OutputError};
use super::fingerprint::ModelId;
use super::head::{Found, look};
use super::write::Profile;
use crate::{Error, Result};
use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Mode of a new file before the user's umask.
const FILE_MODE: u32 = 0o666;
/// How often the file may change while we look at it before we give up.
const MAX_TRIES: usize = 16;

/// A profile's file, held by this process.
pub struct OutputFile {
    path: PathBuf,
    /// The version that stands at `path`; holds the lock.
    _held: File,
}

/// What came of [`OutputFile::acquire`].
pub enum Acquired {
    /// The profile was written; the file is ours from now on.
    File(OutputFile),
    /// The file belongs to another model, or another program or model holds it.
    Taken,
    /// Something other than a profile is there, which stays.
    NotAProfile(NotAProfileError),
}

impl OutputFile {
    /// Takes `path` and writes the profile there, if nothing, an empty file, or a profile of the same model is there.
    ///
    /// Fails where the system does not let us look or write.
    pub fn acquire(path: &Path, profile: &Profile) -> Result<Acquired> {
        acquire(path, profile).map_err(|error| Error::file(path, error))
    }

    /// Fails if something other than a profile is at `path`, so that nothing could be written there.
    pub fn check(path: &Path) -> Result<()> {
        match look(path).map_err(|error| Error::file(path, error))? {
            Found::Nothing | Found::Profile(_) => Ok(()),
            Found::NotAProfile(error) => Err(Error::file(path, error)),
        }
    }

    /// Writes the profile so that at any moment the path holds the old version or the new one, whole.
    pub fn replace(&mut self, profile: &Profile) -> Result<()> {
        self._held = replace(&self.path, profile).map_err(|error| Error::file(&self.path, error))?;
        Ok(())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn acquire(path: &Path, profile: &Profile) -> Result<Acquired, OutputError> {
    for _ in 0..MAX_TRIES {
        match look(path)? {
            Found::NotAProfile(error) => return Ok(Acquired::NotAProfile(error)),
            Found::Profile(theirs) if !is_same_model(theirs.as_ref(), profile.model.as_ref()) => {
                return Ok(Acquired::Taken);
            }
            Found::Profile(_) | Found::Nothing => {}
        }
        let held = match File::open(path) {
            Ok(present) if is_locked(&present) => return Ok(Acquired::Taken),
            Ok(present) if !stands_at(&present, path) => continue,
            Ok(_present) => Some(replace(path, profile)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => create(path, profile)?,
            Err(error) => return Err(OutputError { action: "cannot open", error }),
        };
        if let Some(held) = held {
            return Ok(Acquired::File(OutputFile { path: path.into(), _held: held }));
        }
    }
    Ok(Acquired::Taken)
}

/// A profile that names no model is not known to be of the same one.
fn is_same_model(theirs: Option<&ModelId>, ours: Option<&ModelId>) -> bool {
    theirs.zip(ours).is_some_and(|(theirs, ours)| theirs.is_same_model(ours))
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
fn create(path: &Path, profile: &Profile) -> Result<Option<File>, OutputError> {
    match prepare(path, profile)?.persist_noclobber(path) {
        Ok(held) => sync_folder(path).map(|()| Some(held)),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(OutputError { action: "cannot create", error: error.error }),
    }
}

/// Puts the profile in the place of what is there; through a symbolic link, of what it points to.
fn replace(path: &Path, profile: &Profile) -> Result<File, OutputError> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.into());
    let persisted = prepare(&target, profile)?.persist(&target);
    let held = persisted.map_err(|error| OutputError { action: "cannot replace", error: error.error })?;
    sync_folder(&target)?;
    Ok(held)
}

/// The profile in a synced and locked temporary file in the folder of `target`.
fn prepare(target: &Path, profile: &Profile) -> Result<NamedTempFile, OutputError> {
    let failed = |action| move |error| OutputError { action, error };
    let text = serde_json::to_vec(profile).map_err(|error| failed("cannot encode")(error.into()))?;
    let mut temporary = tempfile::Builder::new()
        .prefix(".experts-")
        .suffix(".tmp")
        .permissions(Permissions::from_mode(FILE_MODE))
        .tempfile_in(folder_of(target))
        .map_err(failed("cannot create a temporary file beside it"))?;
    temporary.write_all(&text).map_err(failed("cannot write"))?;
    temporary.as_file().sync_all().map_err(failed("cannot sync"))?;
    is_locked(temporary.as_file());
    Ok(temporary)
}

fn sync_folder(path: &Path) -> Result<(), OutputError> {
    let synced = File::open(folder_of(path)).and_then(|folder| folder.sync_all());
    synced.map_err(|error| OutputError { action: "cannot sync its folder", error })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::read::RecordedProfile;
    use crate::profile::testing::profile;

    fn acquire(path: &Path, fingerprint: &str, count: u64) -> Option<OutputFile> {
        match OutputFile::acquire(path, &profile(fingerprint, count)).unwrap() {
            Acquired::File(file) => Some(file),
            Acquired::Taken => None,
            Acquired::NotAProfile(error) => panic!("{error}"),
        }
    }

    /// The model's fingerprint and the requests of expert 7 in the profile at `path`.
    fn read(path: &Path) -> (String, u64) {
        let recorded = RecordedProfile::read(path).unwrap();
        (recorded.model.unwrap().fingerprint, recorded.layers[&0].requests[0].1)
    }

    #[test]
    fn a_profile_is_read_back_as_written_and_leaves_no_other_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("experts.json");
        let mut file = acquire(&path, "a", 1).unwrap();
        assert_eq!(read(&path), ("a".into(), 1));
        file.replace(&profile("a", 2)).unwrap();
        assert_eq!(read(&path), ("a".into(), 2));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_held_file_is_taken_and_a_released_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("experts.json");
        let mut first = acquire(&path, "a", 1).unwrap();
        assert!(acquire(&path, "a", 2).is_none());
        first.replace(&profile("a", 3)).unwrap();
        assert!(acquire(&path, "a", 2).is_none(), "the new version is held too");
        drop(first);
        assert!(acquire(&path, "a", 2).is_some());
        assert_eq!(read(&path), ("a".into(), 2));
    }

    #[test]
    fn another_models_profile_is_taken_and_an_empty_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("experts.json");
        drop(acquire(&path, "a", 1));
        assert!(acquire(&path, "b", 1).is_none());
        assert_eq!(read(&path), ("a".into(), 1));
        fs::write(&path, "").unwrap();
        assert!(acquire(&path, "b", 1).is_some());
    }

    #[test]
    fn many_that_want_one_file_at_once_agree_on_one_owner() {
        let folder = tempfile::tempdir().unwrap();
        let path = &folder.path().join("experts.json");
        for round in 0..20 {
            let acquired: Vec<_> = std::thread::scope(|scope| {
                let start = |n| scope.spawn(move || (n, acquire(path, "a", n)));
                let threads: Vec<_> = (1..=4).map(start).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let owners: Vec<_> = acquired.iter().filter(|(_, file)| file.is_some()).map(|(n, _)| *n).collect();
            assert_eq!(owners.len(), 1, "round {round}");
            assert_eq!(read(path), ("a".into(), owners[0]));
        }
    }

    #[test]
    fn what_is_no_profile_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, "GGUF....").unwrap();
        let acquired = OutputFile::acquire(&path, &profile("a", 1)).unwrap();
        assert!(matches!(acquired, Acquired::NotAProfile(NotAProfileError::NotJson(_))));
        assert_eq!(fs::read(&path).unwrap(), b"GGUF....");
    }

    #[test]
    fn writing_through_a_symbolic_link_keeps_the_link() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real.json"), folder.path().join("link.json"));
        drop(acquire(&real, "a", 1));
        std::os::unix::fs::symlink(&real, &link).unwrap();
        acquire(&link, "a", 2).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(read(&real), ("a".into(), 2));
    }
}
