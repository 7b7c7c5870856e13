//! A profile's way to its file: which file it may take, and when there is something new to write.

use crate::files::{Replaced, beside, is_same_file};
use crate::ggml::{Level, log};
use crate::profile::{Acquired, MayReplace, ModelId, OutputFile, Profile};
use crate::{Error, Result};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A profile's way to its file.
#[derive(Default)]
pub struct Sink {
    output: Output,
    /// Calls that the last saved version holds.
    saved_calls: u64,
}

impl Sink {
    /// The file, once it is ours.
    pub fn file(&self) -> Option<&OutputFile> {
        match &self.output {
            Output::File(file) => Some(file),
            Output::Unsettled | Output::Nowhere => None,
        }
    }

    /// Whether it is decided which file it writes, if any.
    pub fn is_settled(&self) -> bool {
        !matches!(self.output, Output::Unsettled)
    }

    /// Writes the profile if there were calls since it was last written: to the file asked for or, if that is not one whose place
    /// it may take or held by someone, to one beside it.
    pub fn save(
        &mut self,
        asked: &Path,
        may: MayReplace<'_>,
        calls: u64,
        profile: impl FnOnce() -> Profile,
        failing: &AtomicBool,
    ) {
        self.save_with(|asked, profile| settle(asked, profile, may), asked, calls, profile, failing);
    }

    /// The same to a file beside the one asked for, which holds what cannot be read.
    pub fn save_beside(&mut self, asked: &Path, calls: u64, profile: impl FnOnce() -> Profile, failing: &AtomicBool) {
        self.save_with(
            |asked, profile| settle_beside(asked, profile, MayReplace::default()),
            asked,
            calls,
            profile,
            failing,
        );
    }

    /// The same to this file and no other: if it is another model's (than this one and `or_of`), or held by someone, to none.
    pub fn save_in_place(
        &mut self,
        path: &Path,
        or_of: Option<&ModelId>,
        calls: u64,
        profile: impl FnOnce() -> Profile,
        failing: &AtomicBool,
    ) {
        let settle = |path: &Path, profile: &Profile| match OutputFile::acquire(
            path,
            profile,
            MayReplace { or_of, older_than: None },
        )? {
            Acquired::File(file) => Ok(Output::File(file)),
            Acquired::Taken => {
                let path = path.display();
                log(Level::Info, &format!("{path} is held by another program or model: what is learnt is not kept"));
                Ok(Output::Nowhere)
            }
            Acquired::NotAProfile(error) => Err(Error::file(path, error)),
        };
        self.save_with(settle, path, calls, profile, failing);
    }

    fn save_with(
        &mut self,
        settle: impl FnOnce(&Path, &Profile) -> Result<Output>,
        asked: &Path,
        calls: u64,
        profile: impl FnOnce() -> Profile,
        failing: &AtomicBool,
    ) {
        if calls <= self.saved_calls || matches!(self.output, Output::Nowhere) {
            return;
        }
        let profile = profile();
        let replaced = match &mut self.output {
            Output::Nowhere => return,
            Output::File(file) => file.replace(&profile),
            Output::Unsettled => Ok(Replaced::Lost),
        };
        let saved = match replaced {
            Ok(Replaced::Done) => Ok(()),
            Ok(Replaced::Lost) => {
                self.let_go();
                settle(asked, &profile).map(|settled| self.output = settled)
            }
            Err(error) => Err(error),
        };
        if let Output::File(file) = &mut self.output {
            for note in file.take_notes() {
                log(Level::Warn, &format!("{}: {note}", file.path().display()));
            }
        }
        match saved {
            Ok(()) => {
                self.saved_calls = calls;
                failing.store(false, Relaxed);
            }
            Err(error) => tell(&error, failing),
        }
    }

    /// Gives this file up, if it is the one, until the next save.
    pub fn release(&mut self, path: &Path) {
        if self.file().is_some_and(|file| is_same_file(file.path(), path)) {
            self.output = Output::Unsettled;
        }
    }

    /// Forgets a file in whose place another one has come.
    fn let_go(&mut self) {
        if let Output::File(file) = std::mem::take(&mut self.output) {
            log(Level::Warn, &format!("{}: another file has come in its place", file.path().display()));
        }
    }
}

/// Tells the user of the first of several failures.
pub fn tell(error: &Error, failing: &AtomicBool) {
    if !failing.swap(true, Relaxed) {
        log(Level::Warn, &format!("profile not saved, will be tried again: {error}"));
    }
}

/// Where a model's profile goes.
#[derive(Default)]
enum Output {
    /// Not decided yet.
    #[default]
    Unsettled,
    /// To this file, which we hold.
    File(OutputFile),
    /// Nowhere: the file that the user named is not ours to replace.
    Nowhere,
}

/// Writes the profile for the first time: to the file asked for, or to one beside it if that is taken.
fn settle(asked: &Path, profile: &Profile, may: MayReplace<'_>) -> Result<Output> {
    match OutputFile::acquire(asked, profile, may)? {
        Acquired::File(file) => Ok(Output::File(file)),
        Acquired::Taken => settle_beside(asked, profile, may),
        Acquired::NotAProfile(error) => {
            let asked = asked.display();
            log(Level::Warn, &format!("nothing is recorded, this file is not replaced: {asked}: {error}"));
            Ok(Output::Nowhere)
        }
    }
}

/// Writes the profile for the first time: to a file beside the one asked for.
fn settle_beside(asked: &Path, profile: &Profile, may: MayReplace<'_>) -> Result<Output> {
    let tag = profile.model.as_ref().and_then(|id| id.fingerprint.get(..TAG_DIGITS)).unwrap_or("model");
    let asked_for = asked.display();
    for n in 1..=MAX_FILES_BESIDE {
        let path = beside(asked, &if n == 1 { tag.to_owned() } else { format!("{tag}-{n}") });
        match OutputFile::acquire(&path, profile, MayReplace { or_of: None, ..may })? {
            Acquired::File(file) => {
                let path = path.display();
                log(
                    Level::Warn,
                    &format!(
                        "{asked_for} is taken (another model or program, or damaged): this profile goes to {path}"
                    ),
                );
                return Ok(Output::File(file));
            }
            Acquired::Taken | Acquired::NotAProfile(_) => {}
        }
    }
    log(Level::Warn, &format!("nothing is recorded: {asked_for} and {MAX_FILES_BESIDE} files beside it are taken"));
    Ok(Output::Nowhere)
}

/// Files beside the one asked for that are tried before giving up.
const MAX_FILES_BESIDE: usize = 8;
/// Hex digits of the model's fingerprint in such a file's name.
const TAG_DIGITS: usize = 8;
