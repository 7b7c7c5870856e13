//! Files that are ours, profiles and traces, on file systems as they are: one writer per file, no file half written, and the
//! next best where a file system cannot do what we ask of it. What the files hold is not known here.
//!
//! A file is [claimed](claim()) first. Then it is [replaced](Claimed::replace) as a whole, as a profile is, or
//! [grows](Claimed::grow), as a trace does.
#![forbid(unsafe_code)]

mod claim;
mod error;
mod grow;
mod open;
mod path;
mod system;
#[cfg(test)]
mod tests;

pub use claim::{Claim, Claimed, Replaced, check, claim};
pub use error::{FileError, Note};
pub use grow::{Growing, MAX_WAITING_BYTES};
pub use open::{is_younger, open_to_read, read_start};
pub use path::{beside, folder_of, is_same_file};
