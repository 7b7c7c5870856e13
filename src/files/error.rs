//! What a file system can refuse, and what is said where the next best is done.

use std::fmt;
use std::io;

/// Why a file cannot be ours.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system refused something.
    #[error("{action}: {error}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// The system's answer.
        error: io::Error,
    },
    /// A folder.
    #[error("it is a folder; expected a file")]
    Folder,
    /// A pipe, a device or the like.
    #[error("it is a pipe, socket or device, not a regular file")]
    NotRegular,
    /// What the program reads or prints to.
    #[error("it is this program's own input or output; expected another file")]
    StandardStream,
    /// The file would be larger than the process may write.
    #[error("file-size limit: {bytes} bytes, and ulimit -f allows {limit}")]
    SizeLimit {
        /// How large it would be.
        bytes: u64,
        /// How large it may be.
        limit: u64,
    },
    /// Somebody else has it.
    #[error("another program writes to it")]
    Held,
    /// Somebody has removed, replaced or changed the file while it was ours.
    #[error("it has been removed, replaced or changed by another program")]
    Gone,
}

impl FileError {
    /// What was attempted when the system refused.
    pub(super) fn system(action: &'static str) -> impl Fn(io::Error) -> Self {
        move |error| Self::System { action, error }
    }

    /// Whether there was no room on the disk, which may change.
    pub fn is_full_disk(&self) -> bool {
        matches!(self, Self::System { error, .. } if is_full(error))
    }
}

/// Whether there is no room on the disk, or for this user.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Whether the system or the file system does not know a call, or not with these flags.
pub fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP))
}

/// What a user should know of a file that is written in another way than the usual one.
#[derive(Debug)]
pub enum Note {
    /// The file system knows no locks.
    NoLocks(io::Error),
    /// No new file can take the place of the old one.
    InPlace(io::Error),
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLocks(error) => {
                write!(f, "cannot be locked ({error}): let no other program write to it meanwhile")
            }
            Self::InPlace(error) => {
                write!(f, "no other file can take its place ({error}): it is overwritten where it is")
            }
        }
    }
}
