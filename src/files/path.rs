//! Names: where a path leads, and what a file beside another one is called.

use super::error::FileError;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Links that are followed, one after the other, as the system does.
const MAX_LINKS: usize = 40;
/// The longest name of a file, in bytes, on almost every file system.
const MAX_NAME_BYTES: usize = 255;

/// The folder that holds `path`; the current one for a bare name.
pub fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.into(),
        _ => PathBuf::from("."),
    }
}

/// What `path` leads to through symbolic links, whether it is there or not.
pub fn target_of(path: &Path) -> Result<PathBuf, FileError> {
    let failed = FileError::system("cannot look at it");
    let mut target = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        match fs::symlink_metadata(&target) {
            Ok(meta) if meta.is_symlink() => {
                let link = fs::read_link(&target).map_err(&failed)?;
                let next = folder_of(&target).join(link);
                if fs::symlink_metadata(&next).is_err() && fs::metadata(&target).is_ok() {
                    return Ok(target); // a link of /proc, which leads to a file without a name
                }
                target = next;
            }
            Ok(_) => return Ok(target),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(target),
            Err(error) => return Err(failed(error)),
        }
    }
    Err(failed(io::Error::from_raw_os_error(libc::ELOOP)))
}

/// What stands at `target`, if anything; fails if it is not a regular file, or one that the program prints to.
pub fn regular_file_at(target: &Path) -> Result<Option<Metadata>, FileError> {
    match fs::metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::system("cannot look at it")(error)),
        Ok(meta) if meta.is_dir() => Err(FileError::Folder),
        Ok(meta) if is_standard_stream(&meta) => Err(FileError::StandardStream),
        Ok(meta) if !meta.is_file() => Err(FileError::NotRegular),
        Ok(meta) => Ok(Some(meta)),
    }
}

fn is_standard_stream(meta: &Metadata) -> bool {
    let (input, output, errors) = (io::stdin(), io::stdout(), io::stderr());
    let is = |stream| rustix::fs::fstat(stream).is_ok_and(|stream| (stream.st_dev, stream.st_ino) == identity(meta));
    meta.is_file() && [input.as_fd(), output.as_fd(), errors.as_fd()].into_iter().any(is)
}

fn identity(meta: &Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

/// Whether `file` is what stands at `path` now, not an earlier version.
pub fn stands_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(a), Ok(b)) => identity(&a) == identity(&b),
        _ => false,
    }
}

/// Whether two paths lead to one file, which need not be there yet.
pub fn is_same_file(a: &Path, b: &Path) -> bool {
    if let (Ok(a), Ok(b)) = (fs::metadata(a), fs::metadata(b)) {
        return identity(&a) == identity(&b);
    }
    let place = |path| {
        let target = target_of(path).ok()?;
        Some((fs::canonicalize(folder_of(&target)).ok()?, target.file_name()?.to_owned()))
    };
    match (place(a), place(b)) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

/// `experts.json` and `TAG` → `experts-TAG.json`. A name that would be too long loses the end of its first part.
pub fn beside(path: &Path, tag: &str) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default();
    let mut end = OsString::from(format!("-{tag}"));
    if let Some(extension) = path.extension() {
        end.push(".");
        end.push(extension);
    }
    let room = MAX_NAME_BYTES.saturating_sub(end.len());
    let mut name = shortened(stem, room);
    name.push(end);
    path.with_file_name(name)
}

/// The first bytes of a name, whole characters where it is text.
fn shortened(name: &OsStr, n_bytes: usize) -> OsString {
    if name.len() <= n_bytes {
        return name.to_owned();
    }
    match name.to_str() {
        Some(text) => text[..text.floor_char_boundary(n_bytes)].into(),
        None => OsString::from_vec(name.as_bytes()[..n_bytes].to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_beside_another_has_a_name_of_its_own_that_is_not_too_long() {
        assert_eq!(beside(Path::new("/p/experts.json"), "ab12"), Path::new("/p/experts-ab12.json"));
        assert_eq!(beside(Path::new("/p/trace"), "2"), Path::new("/p/trace-2"));
        let longest = format!("/p/{}é.json", "n".repeat(248));
        let name = beside(Path::new(&longest), "ab12").file_name().unwrap().to_owned();
        assert_eq!(name.to_str().unwrap(), format!("{}-ab12.json", "n".repeat(245)));
        let cut_in_a_character = format!("/p/{}éé.json", "n".repeat(244));
        let name = beside(Path::new(&cut_in_a_character), "ab12").file_name().unwrap().to_owned();
        assert_eq!(name.to_str().unwrap(), format!("{}-ab12.json", "n".repeat(244)));
    }

    #[test]
    fn links_are_followed_to_what_is_there_or_may_come_there() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, at(name)).unwrap();
        fs::write(at("file"), "").unwrap();
        link("file", "one");
        link("one", "two");
        link("nothing", "dangling");
        link("circle-b", "circle-a");
        link("circle-a", "circle-b");
        assert_eq!(target_of(&at("two")).unwrap(), at("file"));
        assert_eq!(target_of(&at("dangling")).unwrap(), at("nothing"));
        assert!(target_of(&at("circle-a")).unwrap_err().to_string().contains("symbolic links"));
        for (a, b, is_same) in [
            ("file", "two", true),
            ("dangling", "nothing", true),
            ("./nothing", "nothing", true),
            ("file", "nothing", false),
            ("no folder/x", "no folder/x", true),
        ] {
            assert_eq!(is_same_file(&at(a), &at(b)), is_same, "{a} {b}");
        }
    }
}
