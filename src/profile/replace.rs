//! Replacing a profile by a text that the user has sent, the old one kept.

use crate::files::{FileError, folder_of};
use crate::{Error, Result};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Puts `text` in the place of the file at `path`, so that at any moment one of both stands there, whole. What stood there is
/// kept beside it, in the place of an earlier one; returns where, if there was anything.
pub fn replace_keeping_old(path: &Path, text: &[u8]) -> Result<Option<PathBuf>> {
    replace(path, text).map_err(|error| Error::file(path, FileError::System { action: "cannot replace", error }))
}

fn replace(path: &Path, text: &[u8]) -> io::Result<Option<PathBuf>> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.into());
    let old = match fs::read(&target) {
        Ok(old) => Some(old),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let mode = fs::metadata(&target).ok().map(|meta| meta.permissions());
    let put = |to: &Path, bytes: &[u8]| -> io::Result<()> {
        let mut file = NamedTempFile::new_in(folder_of(to))?;
        file.write_all(bytes)?;
        if let Some(mode) = &mode {
            file.as_file().set_permissions(mode.clone())?;
        }
        file.as_file().sync_all()?;
        file.persist(to).map(drop).map_err(|error| error.error)
    };
    let mut kept = target.clone().into_os_string();
    kept.push(".bak");
    let kept = old.map(|old| put(Path::new(&kept), &old).map(|()| PathBuf::from(&kept))).transpose()?;
    put(&target, text)?;
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
