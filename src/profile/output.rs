//! The file that a running program writes its profile to.
//!
//! It is ours from the first write on, so that a second program (or a second model) that has the same file in mind sees
//! that it is taken.

use super::error::NotAProfileError;
use super::fingerprint::ModelId;
use super::head::{Found, look};
use super::write::Profile;
use crate::files::{self, Claim, Claimed, FileError, Note, Replaced, is_younger, open_to_read};
use crate::{Error, Result};
use std::io;
use std::path::Path;
use std::time::SystemTime;

/// How often the file may change while we look at it before we give up.
const MAX_TRIES: usize = 16;

/// A profile's file, held by this process.
pub struct OutputFile(Claimed);

/// Which profiles, besides those of the same model, another one may take the place of.
#[derive(Clone, Copy, Default)]
pub struct MayReplace<'a> {
    /// Of this model too.
    pub or_of: Option<&'a ModelId>,
    /// Only those that were written before: what another program has written since is of this session too.
    pub older_than: Option<SystemTime>,
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
    /// Takes `path` and writes the profile there, if nothing, an empty file, or a profile is there whose place it may take.
    ///
    /// Fails where the system does not let us look or write.
    pub fn acquire(path: &Path, profile: &Profile, may: MayReplace<'_>) -> Result<Acquired> {
        let text = encode(path, profile)?;
        for _ in 0..MAX_TRIES {
            let mut file = match files::claim(path).map_err(|error| Error::file(path, error))? {
                Claim::Ours(file) => file,
                Claim::Taken => return Ok(Acquired::Taken),
            };
            match look(file.present()) {
                Found::NotAProfile(error) => return Ok(Acquired::NotAProfile(error)),
                Found::Profile(theirs) if !is_of(theirs.as_ref(), profile.model.as_ref(), may.or_of) => {
                    return Ok(Acquired::Taken);
                }
                Found::Profile(_) if file.present().is_some_and(|present| is_younger(present, may.older_than)) => {
                    return Ok(Acquired::Taken);
                }
                Found::Profile(_) | Found::Nothing => {}
            }
            match file.replace(&text).map_err(|error| Error::file(path, error))? {
                Replaced::Done => return Ok(Acquired::File(Self(file))),
                Replaced::Lost => {} // something has come there meanwhile
            }
        }
        Ok(Acquired::Taken)
    }

    /// Fails if something other than a profile is at `path`, so that nothing could be written there.
    pub fn check(path: &Path) -> Result<()> {
        let found = match open_to_read(path) {
            Ok(file) => look(Some(&file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Nothing,
            Err(error) => Found::NotAProfile(error.into()),
        };
        match found {
            Found::Nothing | Found::Profile(_) => Ok(()),
            Found::NotAProfile(error) => Err(Error::file(path, error)),
        }
    }

    /// Writes the profile so that at any moment the path holds the old version or the new one, whole; where the file system
    /// cannot do that, in place.
    ///
    /// [`Replaced::Lost`]: another file has come to the path, which has to be acquired anew.
    pub fn replace(&mut self, profile: &Profile) -> Result<Replaced> {
        let text = encode(self.path(), profile)?;
        self.0.replace(&text).map_err(|error| Error::file(self.0.path(), error))
    }

    /// What the user should be told of this file since this was last asked.
    pub fn take_notes(&mut self) -> Vec<Note> {
        self.0.take_notes()
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

fn encode(path: &Path, profile: &Profile) -> Result<Vec<u8>> {
    let text = serde_json::to_vec(profile).map_err(io::Error::from);
    text.map_err(|error| Error::file(path, FileError::System { action: "cannot encode", error }))
}

/// Whether a profile is of this model, or of that one. One that names no model is not known to be.
fn is_of(theirs: Option<&ModelId>, ours: Option<&ModelId>, or_of: Option<&ModelId>) -> bool {
    let same = |other: Option<&ModelId>| theirs.zip(other).is_some_and(|(theirs, other)| theirs.is_same_model(other));
    same(ours) || same(or_of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::read::RecordedProfile;
    use crate::profile::testing::profile;
    use std::fs;

    fn acquire_or(path: &Path, fingerprint: &str, count: u64, or_of: Option<&ModelId>) -> Option<OutputFile> {
        let may = MayReplace { or_of, ..MayReplace::default() };
        match OutputFile::acquire(path, &profile(fingerprint, count), may).unwrap() {
            Acquired::File(file) => Some(file),
            Acquired::Taken => None,
            Acquired::NotAProfile(error) => panic!("{error}"),
        }
    }

    fn acquire(path: &Path, fingerprint: &str, count: u64) -> Option<OutputFile> {
        acquire_or(path, fingerprint, count, None)
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
        assert!(acquire_or(&path, "b", 2, profile("a", 1).model.as_ref()).is_some(), "of a model that will do too");
        assert_eq!(read(&path), ("b".into(), 2));
        fs::write(&path, "").unwrap();
        assert!(acquire(&path, "c", 1).is_some());
    }

    #[test]
    fn what_another_program_has_written_in_this_session_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("experts.json");
        drop(acquire(&path, "a", 1));
        let written = fs::metadata(&path).unwrap().modified().unwrap();
        let acquire_at = |began: SystemTime| {
            let may = MayReplace { older_than: Some(began), ..MayReplace::default() };
            OutputFile::acquire(&path, &profile("a", 2), may).unwrap()
        };
        assert!(matches!(acquire_at(written), Acquired::Taken));
        assert_eq!(read(&path), ("a".into(), 1));
        assert!(matches!(acquire_at(written + std::time::Duration::from_nanos(1)), Acquired::File(_)));
        assert_eq!(read(&path), ("a".into(), 2));
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
        let acquired = OutputFile::acquire(&path, &profile("a", 1), MayReplace::default()).unwrap();
        assert!(matches!(acquired, Acquired::NotAProfile(NotAProfileError::NotJson(_))));
        assert_eq!(fs::read(&path).unwrap(), b"GGUF....");
        assert!(OutputFile::check(&path).unwrap_err().to_string().contains("not a routing profile"));
    }
}
