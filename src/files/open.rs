//! Opening files so that none of ours is a standard stream.
//!
//! Where a program has closed its descriptors 0 to 2, the next file that is opened gets one of them, and what the program
//! prints ends up in it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::SystemTime;

/// The highest descriptor of a standard stream.
const LAST_STREAM: RawFd = 2;

/// Opens a file on a descriptor above 2, closed on exec. Opening does not wait for a pipe's other end.
pub fn open(path: &Path, options: &OpenOptions) -> io::Result<File> {
    // While this opens, other files stand where streams are missing: between opening and moving a file, another thread
    // might print into it.
    let _places = fill_streams();
    let file = options.clone().custom_flags(libc::O_NONBLOCK).open(path)?;
    // Without /dev/null there were none. A copy of a descriptor is made above 2, and closed on exec.
    if file.as_raw_fd() > LAST_STREAM { Ok(file) } else { file.try_clone() }
}

/// Opens a file for reading.
pub fn open_to_read(path: &Path) -> io::Result<File> {
    open(path, OpenOptions::new().read(true))
}

/// The first `n` bytes, fewer if the file is shorter. Whoever reads on does so from there.
pub fn read_start(mut file: &File, n: usize) -> io::Result<Vec<u8>> {
    let mut start = Vec::new();
    io::Seek::rewind(&mut file)?;
    file.take(n as u64).read_to_end(&mut start)?;
    Ok(start)
}

/// Whether a file has been written since `began`; not known to be without that.
pub fn is_younger(file: &File, began: Option<SystemTime>) -> bool {
    let written = file.metadata().and_then(|meta| meta.modified());
    began.zip(written.ok()).is_some_and(|(began, written)| written >= began)
}

/// Files that take the places of closed standard streams as long as they live.
fn fill_streams() -> Vec<File> {
    let mut places = Vec::new();
    while let Ok(null) = OpenOptions::new().read(true).write(true).open("/dev/null") {
        if null.as_raw_fd() > LAST_STREAM {
            break;
        }
        places.push(null);
    }
    places
}
