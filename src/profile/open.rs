//! Opening a profile that somebody names: only a regular file, never for long, never more than its limit.

use super::error::ProfileError;
use super::format::MAX_MIB;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// [`MAX_MIB`] in bytes.
const MAX_BYTES: u64 = MAX_MIB << 20;
/// Opening neither waits for a pipe's other end nor follows a link that has just been put there.
const FLAGS: i32 = libc::O_NONBLOCK | libc::O_NOFOLLOW;

/// Reads the file at `path`. A symbolic link is refused; its folders may be links.
pub fn read_bytes(path: &Path) -> Result<Vec<u8>, ProfileError> {
    check(path, &fs::symlink_metadata(path).map_err(unreadable)?)?;
    let file = OpenOptions::new().read(true).custom_flags(FLAGS).open(path).map_err(unreadable)?;
    let opened = file.metadata().map_err(unreadable)?;
    check(path, &opened)?; // it may have been replaced meanwhile
    read_all(file)
}

fn check(path: &Path, meta: &Metadata) -> Result<(), ProfileError> {
    let kind = meta.file_type();
    if kind.is_symlink() {
        let target = fs::read_link(path).map_err(unreadable)?;
        return Err(match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => ProfileError::DanglingLink { target },
            _ => ProfileError::Link { target },
        });
    }
    if kind.is_dir() {
        return Err(ProfileError::Folder);
    }
    if !kind.is_file() {
        return Err(ProfileError::NotRegular);
    }
    if meta.len() > MAX_BYTES { Err(ProfileError::TooLarge) } else { Ok(()) }
}

fn read_all(file: File) -> Result<Vec<u8>, ProfileError> {
    let mut text = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(unreadable)?;
    if text.len() as u64 > MAX_BYTES { Err(ProfileError::TooLarge) } else { Ok(text) }
}

fn unreadable(error: io::Error) -> ProfileError {
    match error.kind() {
        io::ErrorKind::NotFound => ProfileError::Missing,
        _ => ProfileError::Unreadable(error),
    }
}
