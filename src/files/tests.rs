//! Files on file systems that cannot do everything, or not now: a table of behaviours, and what else happens to files.

use super::claim::{claim, claim_in};
use super::system::{FileSystem, Linux};
use super::{Claim, Claimed, FileError, Growing, Note, Replaced, check};
use libc::*;
use std::cell::RefCell;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A call and the error that it gives.
type Fault = (&'static str, i32);

/// A file system whose calls fail as told. `once …` holds for one call. A write to a temporary file is `write`, one to the file
/// itself `overwrite`.
#[derive(Clone, Default)]
struct Faulty {
    faults: Rc<RefCell<Vec<Fault>>>,
    limit: Option<u64>,
    /// Bytes that one call writes at most.
    short: Option<usize>,
}

impl Faulty {
    fn new(faults: &[Fault]) -> Self {
        Self { faults: Rc::new(RefCell::new(faults.to_vec())), ..Self::default() }
    }

    fn fail(&self, call: &str) -> io::Result<()> {
        let mut faults = self.faults.borrow_mut();
        let is_hit = |fault: &Fault| fault.0.strip_prefix("once ").unwrap_or(fault.0) == call;
        match faults.iter().position(is_hit) {
            Some(n) => {
                let (name, error) = faults[n];
                if name.starts_with("once ") {
                    faults.remove(n);
                }
                Err(io::Error::from_raw_os_error(error))
            }
            None => Ok(()),
        }
    }
}

fn is_temporary(path: &Path) -> bool {
    path.file_name().unwrap().to_str().unwrap().starts_with(".experts-")
}

impl FileSystem for Faulty {
    fn open(&self, path: &Path, options: &OpenOptions) -> io::Result<File> {
        self.fail(if is_temporary(path) { "temporary" } else { "open" })?;
        Linux.open(path, options)
    }

    fn lock(&self, file: &File) -> io::Result<bool> {
        self.fail("lock")?;
        Linux.lock(file)
    }

    fn write(&self, file: &File, bytes: &[u8]) -> io::Result<usize> {
        use std::os::fd::AsRawFd;
        let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        self.fail(if is_temporary(&path) { "write" } else { "overwrite" })?;
        Linux.write(file, &bytes[..self.short.unwrap_or(usize::MAX).min(bytes.len())])
    }

    fn reserve(&self, file: &File, n_bytes: u64) -> io::Result<()> {
        self.fail("reserve")?;
        Linux.reserve(file, n_bytes)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        self.fail("sync")?;
        Linux.sync(file)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.fail("sync folder")?;
        Linux.sync_folder(folder)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.fail("rename")?;
        Linux.rename(from, to)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.fail("rename new")?;
        Linux.rename_new(from, to)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.fail("link")?;
        Linux.link(from, to)
    }

    fn change_owner(&self, file: &File, user: Option<u32>, group: Option<u32>) -> io::Result<()> {
        self.fail("change owner")?;
        Linux.change_owner(file, user, group)
    }

    fn stands_at(&self, file: &File, path: &Path) -> bool {
        self.fail("number").is_ok() && Linux.stands_at(file, path)
    }

    fn size_limit(&self) -> Option<u64> {
        self.limit
    }
}

const OLD: &str = "what was there before";
const NEW: &str = "the new version, which is a little longer";

fn claimed<S: FileSystem>(system: S, path: &Path) -> Claimed<S> {
    match claim_in(system, path).unwrap() {
        Claim::Ours(claimed) => claimed,
        Claim::Taken => panic!("{} is taken", path.display()),
    }
}

fn is_taken(path: &Path) -> bool {
    matches!(claim(path).unwrap(), Claim::Taken)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// What a user is told, by kind.
fn told(notes: &[Note]) -> Vec<&'static str> {
    let kind = |note: &Note| match note {
        Note::NoLocks(_) => "no locks",
        Note::InPlace(_) => "in place",
    };
    notes.iter().map(kind).collect()
}

/// What a file system cannot do, and what the user is told.
const SAVED_ALL_THE_SAME: &[(&str, &[Fault], &[&str])] = &[
    ("nothing amiss", &[], &[]),
    ("no links, no flags (gcsfuse)", &[("link", EPERM), ("rename new", EINVAL)], &[]),
    ("an old kernel", &[("link", EOPNOTSUPP), ("rename new", ENOSYS)], &[]),
    ("flags forbidden", &[("rename new", EPERM)], &[]),
    ("links across users", &[("link", EPERM), ("rename new", EOPNOTSUPP)], &[]),
    ("a folder that cannot be synced", &[("sync folder", EINVAL)], &[]),
    ("a folder that cannot be read", &[("sync folder", EACCES)], &[]),
    ("a file that need not be synced", &[("sync", EINVAL)], &[]),
    ("no sync at all", &[("sync", ENOSYS), ("sync folder", ENOSYS)], &[]),
    ("no locks (NFS)", &[("lock", ENOLCK)], &["no locks"]),
    ("no locks (9p)", &[("lock", EOPNOTSUPP)], &["no locks"]),
    ("no locks (old FUSE)", &[("lock", ENOSYS)], &["no locks"]),
    ("a mount point", &[("rename", EBUSY)], &["in place"]),
    ("a mount point on another disk", &[("rename", EXDEV)], &["in place"]),
    ("somebody else's file in a sticky folder", &[("rename", EPERM)], &["in place"]),
    ("a folder that may not be written to", &[("temporary", EACCES)], &["in place"]),
    ("a read-only folder with a file mounted into it", &[("temporary", EROFS)], &["in place"]),
    ("a path with no room for another name", &[("temporary", ENAMETOOLONG)], &["in place"]),
    ("a mount point that reserves nothing", &[("rename", EBUSY), ("reserve", EOPNOTSUPP)], &["in place"]),
    ("all of it", &[("lock", ENOLCK), ("rename", EBUSY), ("sync", EINVAL)], &["no locks", "in place"]),
    ("files whose numbers change (SMB)", &[("number", 0)], &[]),
    ("a signal while it writes", &[("once write", EINTR)], &[]),
];

#[test]
fn what_a_file_system_cannot_do_costs_no_file_and_is_told_once() {
    for &(name, faults, expected) in SAVED_ALL_THE_SAME {
        for is_there in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("file");
            if is_there {
                fs::write(&path, OLD).unwrap();
            }
            let mut file = claimed(Faulty { short: Some(3), ..Faulty::new(faults) }, &path);
            let mut notes = Vec::new();
            for version in [NEW, "shorter", NEW] {
                assert_eq!(file.replace(version.as_bytes()).unwrap(), Replaced::Done, "{name}");
                assert_eq!(fs::read_to_string(&path).unwrap(), version, "{name}");
                assert_eq!(names(folder.path()), ["file"], "{name}");
                let has_locks = !faults.iter().any(|fault| fault.0 == "lock");
                assert_eq!(is_taken(&path), has_locks, "{name}");
                notes.extend(file.take_notes());
            }
            assert_eq!(told(&notes), expected, "{name}, is there: {is_there}");
        }
    }
}

#[test]
fn a_failure_leaves_the_old_version_whole_and_can_be_tried_again() {
    for (faults, said) in [
        (&[("once write", ENOSPC)][..], "cannot write: No space left"),
        (&[("once write", EDQUOT)], "cannot write: Disk quota"),
        (&[("once sync", EIO)], "cannot sync: Input/output"),
        (&[("once temporary", ENOSPC)], "temporary file beside it: No space left"),
        (&[("once temporary", EMFILE)], "temporary file beside it: Too many open files"),
        (&[("once rename", EIO)], "cannot replace: Input/output"),
        (&[("rename", EBUSY), ("once reserve", ENOSPC)], "cannot be overwritten: No space left"),
        (&[("rename", EBUSY), ("once overwrite", ENOSPC)], "cannot be overwritten: No space left"),
        (&[("temporary", EROFS), ("once overwrite", EIO)], "cannot be overwritten: Input/output"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, OLD).unwrap();
        let mut file = claimed(Faulty::new(faults), &path);
        let error = file.replace(NEW.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(said), "{faults:?}: {error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), OLD, "{faults:?}");
        assert_eq!(names(folder.path()), ["file"], "{faults:?}");
        assert!(is_taken(&path), "still ours");
        assert_eq!(file.replace(NEW.as_bytes()).unwrap(), Replaced::Done, "{faults:?}");
        assert_eq!(fs::read_to_string(&path).unwrap(), NEW, "{faults:?}");
    }
}

#[test]
fn a_first_version_that_fails_leaves_nothing() {
    for faults in [&[("once write", ENOSPC)][..], &[("temporary", EROFS), ("once overwrite", ENOSPC)]] {
        let folder = tempfile::tempdir().unwrap();
        let mut file = claimed(Faulty::new(faults), &folder.path().join("file"));
        assert!(file.replace(NEW.as_bytes()).unwrap_err().is_full_disk());
        assert_eq!(names(folder.path()), [""; 0], "{faults:?}");
        assert_eq!(file.replace(NEW.as_bytes()).unwrap(), Replaced::Done);
    }
}

#[test]
fn nothing_is_written_beyond_the_file_size_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, OLD).unwrap();
    let mut file = claimed(Faulty { limit: Some(NEW.len() as u64 - 1), ..Faulty::default() }, &path);
    let error = file.replace(NEW.as_bytes()).unwrap_err().to_string();
    assert!(error.starts_with("file-size limit") && error.contains("ulimit -f"), "{error}");
    assert_eq!((fs::read_to_string(&path).unwrap().as_str(), names(folder.path()).len()), (OLD, 1));
    assert_eq!(file.replace(&NEW.as_bytes()[1..]).unwrap(), Replaced::Done);
}

#[test]
fn links_stay_and_what_they_lead_to_is_replaced() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (name, is_there) in [("file", true), ("new", false)] {
        let (target, link) = (elsewhere.path().join(name), folder.path().join(name));
        if is_there {
            fs::write(&target, OLD).unwrap();
        }
        symlink(&target, &link).unwrap();
        check(&link).unwrap();
        let mut file = claimed(Linux, &link);
        for version in [NEW, OLD] {
            assert_eq!(file.replace(version.as_bytes()).unwrap(), Replaced::Done);
            assert_eq!(fs::read_to_string(&target).unwrap(), version);
            assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
            assert!(is_taken(&target) && is_taken(&link));
        }
    }
    assert_eq!(names(elsewhere.path()), ["file", "new"]);
}

#[test]
fn mode_and_owner_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, OLD).unwrap();
    for mode in [0o600, 0o664, 0o640] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let before = fs::metadata(&path).unwrap();
        claimed(Linux, &path).replace(NEW.as_bytes()).unwrap();
        let after = fs::metadata(&path).unwrap();
        assert_ne!(before.ino(), after.ino());
        assert_eq!(before.mode(), after.mode());
    }
    if !rustix::process::geteuid().is_root() {
        return; // nobody else may give files away
    }
    const OTHER: u32 = 65_534;
    let owner = || fs::metadata(&path).map(|meta| (meta.uid(), meta.gid())).unwrap();
    std::os::unix::fs::chown(&path, Some(OTHER), Some(OTHER)).unwrap();
    claimed(Linux, &path).replace(NEW.as_bytes()).unwrap();
    assert_eq!(owner(), (OTHER, OTHER));
    claimed(Faulty::new(&[("change owner", EPERM)]), &path).replace(OLD.as_bytes()).unwrap();
    assert_eq!(owner().0, 0, "ours now, but written");
}

#[test]
fn what_is_no_file_to_write_to_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    symlink("circle", at("circle")).unwrap();
    fs::write(at("file"), "").unwrap();
    for (path, said) in [
        (folder.path().to_path_buf(), "is a folder"),
        (at("socket"), "is a pipe, socket or device"),
        (at("pipe"), "is a pipe, socket or device"),
        (PathBuf::from("/dev/null"), "is a pipe, socket or device"),
        (at("circle"), "symbolic links"),
        (at("file/below"), "Not a directory"),
    ] {
        let refused = [check(&path).unwrap_err(), claim(&path).err().unwrap()];
        assert!(refused.iter().all(|error| error.to_string().contains(said)), "{}: {refused:?}", path.display());
    }
    assert!(check(&at("nowhere/file")).unwrap_err().to_string().contains("existing folder"));
    check(&at("new")).unwrap();
    assert_eq!(names(folder.path()), ["circle", "file", "pipe", "socket"], "looking changes nothing");
}

#[test]
fn a_file_that_is_removed_is_made_again_and_one_that_is_replaced_is_not_ours() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let mut file = claimed(Linux, &path);
    file.replace(OLD.as_bytes()).unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(file.replace(NEW.as_bytes()).unwrap(), Replaced::Done);
    assert_eq!(fs::read_to_string(&path).unwrap(), NEW);
    fs::write(folder.path().join("other"), "another's").unwrap();
    fs::rename(folder.path().join("other"), &path).unwrap();
    assert_eq!(file.replace(NEW.as_bytes()).unwrap(), Replaced::Lost);
    assert_eq!(fs::read_to_string(&path).unwrap(), "another's");
}

#[test]
fn a_folder_that_goes_and_comes_back_costs_the_saves_between() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("folder");
    fs::create_dir(&folder).unwrap();
    let mut file = claimed(Linux, &folder.join("file"));
    file.replace(OLD.as_bytes()).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    assert!(file.replace(NEW.as_bytes()).unwrap_err().to_string().contains("No such file"));
    fs::create_dir(&folder).unwrap();
    assert_eq!(file.replace(NEW.as_bytes()).unwrap(), Replaced::Done);
}

#[test]
fn two_that_begin_at_once_where_nothing_can_be_made_atomically_do_not_share_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let faulty = || Faulty::new(&[("link", EPERM), ("rename new", EINVAL)]);
    let (mut first, mut second) = (claimed(faulty(), &path), claimed(faulty(), &path));
    assert_eq!(first.replace(NEW.as_bytes()).unwrap(), Replaced::Done);
    assert_eq!(second.replace(OLD.as_bytes()).unwrap(), Replaced::Lost);
    assert_eq!(fs::read_to_string(&path).unwrap(), NEW);
}

#[test]
fn what_a_killed_program_left_is_removed_and_nothing_else_is() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let others = [".experts-kept.tmp", ".experts-A1b2C.tmp", ".experts-A1b2C3.json", "experts-A1b2C3.tmp"];
    for name in others.into_iter().chain([".experts-A1b2C3.tmp", ".experts-LOCKED.tmp"]) {
        fs::write(at(name), "").unwrap();
    }
    fs::create_dir(at(".experts-FOLDER.tmp")).unwrap();
    let held = File::open(at(".experts-LOCKED.tmp")).unwrap();
    held.lock().unwrap();
    claimed(Linux, &at("file")).replace(NEW.as_bytes()).unwrap();
    let mut expected: Vec<_> =
        others.into_iter().chain([".experts-LOCKED.tmp", ".experts-FOLDER.tmp", "file"]).collect();
    expected.sort_unstable();
    assert_eq!(names(folder.path()), expected);
    // Without locks nobody can be known to be dead.
    drop(held);
    claimed(Faulty::new(&[("lock", ENOLCK)]), &at("file")).replace(OLD.as_bytes()).unwrap();
    assert_eq!(names(folder.path()), expected);
}

#[test]
fn the_longest_name_there_can_be_is_written_to() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("n".repeat(255));
    claimed(Linux, &path).replace(NEW.as_bytes()).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), NEW);
}

fn growing<S: FileSystem>(system: S, path: &Path) -> Growing<S> {
    claimed(system, path).grow().unwrap().unwrap()
}

#[test]
fn a_file_that_grows_is_held_and_keeps_what_could_not_be_written_for_later() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, OLD).unwrap();
    let system = Faulty { short: Some(2), ..Faulty::default() };
    let mut file = growing(system.clone(), &path);
    let mut waiting = b"12345".to_vec();
    file.append(&mut waiting).unwrap();
    assert!(is_taken(&path) && waiting.is_empty());
    system.faults.borrow_mut().push(("once overwrite", ENOSPC));
    waiting.extend(b"678");
    assert!(file.append(&mut waiting).unwrap_err().is_full_disk());
    waiting.extend(b"9");
    file.append(&mut waiting).unwrap();
    assert_eq!((fs::read(&path).unwrap(), waiting.len()), (b"123456789".to_vec(), 0));
    let limited = Faulty { limit: Some(4), ..Faulty::default() };
    drop(file);
    let error = growing(limited, &path).append(&mut b"123456".to_vec()).unwrap_err();
    assert!(matches!(error, FileError::SizeLimit { bytes: 6, limit: 4 }));
    assert_eq!(fs::read(&path).unwrap(), b"1234");
}

#[test]
fn a_file_that_grows_and_is_removed_replaced_or_changed_has_ended() {
    for change in [
        (|path| fs::remove_file(path).unwrap()) as fn(&Path),
        |path| fs::rename(path, path.with_extension("old")).unwrap(),
        |path| {
            fs::remove_file(path).unwrap();
            fs::write(path, "another's, longer than ours").unwrap();
        },
        |path| fs::write(path, "another's, longer than ours").unwrap(),
        |path| fs::write(path, "").unwrap(),
        |path| fs::remove_dir_all(path.parent().unwrap()).unwrap(),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut file = growing(Linux, &path);
        file.append(&mut b"123".to_vec()).unwrap();
        change(&path);
        assert!(matches!(file.append(&mut b"4".to_vec()), Err(FileError::Gone)));
    }
}
