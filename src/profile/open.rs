//! Opening a profile that somebody names: only a regular file, never for long, never more than its limit.

use super::error::ProfileError;
use super::format::MAX_MIB;
use crate::files::open_to_read;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::path::Path;

/// [`MAX_MIB`] in bytes.
const MAX_BYTES: u64 = MAX_MIB << 20;

/// Reads the file at `path`, which may be a symbolic link to one.
pub fn read_bytes(path: &Path) -> Result<Vec<u8>, ProfileError> {
    check(&fs::metadata(path).map_err(|error| missing(path, error))?)?;
    let file = open_to_read(path).map_err(unreadable)?;
    let opened = file.metadata().map_err(unreadable)?;
    check(&opened)?; // it may have been replaced meanwhile
    read_all(file)
}

fn check(meta: &Metadata) -> Result<(), ProfileError> {
    if meta.is_dir() {
        return Err(ProfileError::Folder);
    }
    if !meta.is_file() {
        return Err(ProfileError::NotRegular);
    }
    if meta.len() > MAX_BYTES { Err(ProfileError::TooLarge) } else { Ok(()) }
}

fn read_all(file: File) -> Result<Vec<u8>, ProfileError> {
    let mut text = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(unreadable)?;
    if text.len() as u64 > MAX_BYTES { Err(ProfileError::TooLarge) } else { Ok(text) }
}

/// Nothing, or a link that leads to nothing.
fn missing(path: &Path, error: io::Error) -> ProfileError {
    match fs::read_link(path) {
        Ok(target) if error.kind() == io::ErrorKind::NotFound => ProfileError::DanglingLink { target },
        _ => unreadable(error),
    }
}

fn unreadable(error: io::Error) -> ProfileError {
    match error.kind() {
        io::ErrorKind::NotFound => ProfileError::Missing,
        _ => ProfileError::Unreadable(error),
    }
}
