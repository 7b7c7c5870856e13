//! Replacing a profile by a text that the user has sent, the old one kept.

use crate::files::{Claim, Claimed, FileError, Replaced, claim};
use crate::{Error, Result};
use std::fs;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

/// Puts `text` in the place of the file at `path`, so that at any moment one of both stands there, whole, where the file system
/// can do that. What stood there is kept beside it, in the place of an earlier one; returns where, if there was anything.
///
/// Fails if another program holds one of the files, or the system refuses to write.
pub fn replace_keeping_old(path: &Path, text: &[u8]) -> Result<Option<PathBuf>> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.into());
    let failed = |path: &Path, error: FileError| Error::file(path, error);
    let hold = |path: &Path| match claim(path).map_err(|error| failed(path, error))? {
        Claim::Ours(file) => Ok(file),
        Claim::Taken => Err(failed(path, FileError::Held)),
    };
    let put = |path: &Path, mut file: Claimed, bytes: &[u8]| match file.replace(bytes) {
        Ok(Replaced::Done) => Ok(()),
        Ok(Replaced::Lost) => Err(failed(path, FileError::Gone)),
        Err(error) => Err(failed(path, error)),
    };
    let file = hold(&target)?;
    let mut kept = None;
    if let Some(mut held) = file.present() {
        let mut old = Vec::new();
        let read = held.rewind().and_then(|()| held.read_to_end(&mut old));
        read.map_err(|error| failed(path, FileError::System { action: "cannot be read", error }))?;
        let mut backup = target.clone().into_os_string();
        backup.push(".bak");
        let backup = PathBuf::from(backup);
        put(&backup, hold(&backup)?, &old)?;
        kept = Some(backup);
    }
    put(&target, file, text)?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_one_is_kept_beside_the_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("experts.json");
        assert_eq!(replace_keeping_old(&path, b"first").unwrap(), None);
        let kept = replace_keeping_old(&path, b"second").unwrap().unwrap();
        assert_eq!(kept, folder.path().canonicalize().unwrap().join("experts.json.bak"));
        assert_eq!((fs::read(&path).unwrap(), fs::read(kept).unwrap()), (b"second".to_vec(), b"first".to_vec()));
        assert!(replace_keeping_old(&folder.path().join("missing/x"), b"text").is_err());
    }
}
