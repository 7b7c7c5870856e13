//! Saves profiles while the program runs and when a context ends. All file work of the plugin is here.

use super::engine;
use super::model::{Destination, Model};
use crate::config::Config;
use crate::ggml::{Level, log};
use crate::routing::{Profile, folder_of};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two saves while counts change.
pub const SAVE_INTERVAL: Duration = Duration::from_secs(5);

/// A thread that saves changed profiles every [`SAVE_INTERVAL`]; ends when dropped.
pub struct Recorder {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Starts the thread; `None` if the system refuses one: profiles are then saved at the end only.
    pub fn start() -> Option<Self> {
        let (stop, stopped) = channel::<()>();
        let run = move || {
            while stopped.recv_timeout(SAVE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                for model in engine().models() {
                    save(engine().config(), &model);
                }
            }
        };
        match std::thread::Builder::new().name("moe-hot-save".into()).spawn(run) {
            Ok(thread) => Some(Self { stop: Some(stop), thread: Some(thread) }),
            Err(error) => {
                log(
                    Level::Warn,
                    &format!("no thread for saving while running ({error}): profiles are saved at the end"),
                );
                None
            }
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been reported by the panic hook and cost a save, no more.
            let _ = thread.join();
        }
    }
}

/// Saves the model's profile if there is anything new. Tells the user of the first of several failures.
pub fn save(config: &Config, model: &Model) {
    static SAVING: Mutex<Saving> = Mutex::new(Saving { failing: false });
    let mut saving = SAVING.lock().unwrap_or_else(PoisonError::into_inner);
    let (Some(asked), Some(calls)) = (&config.perf_out, model.unsaved_calls()) else { return };
    let _held = if model.destination().is_none() { lock_folder(asked) } else { None };
    let Destination::File(path) = model.destination().unwrap_or_else(|| settle(asked, model)) else { return };
    match model.profile(config.offload_min_batch).write(&path) {
        Ok(()) => {
            model.set_saved(calls);
            saving.failing = false;
        }
        Err(error) if !saving.failing => {
            log(Level::Warn, &format!("profile not saved, will be tried again: {error}"));
            saving.failing = true;
        }
        Err(_) => {}
    }
}

/// Held from the search for a free file until it is written: another process may have the same file in mind.
/// `None` where the file system knows no locks.
fn lock_folder(asked: &Path) -> Option<File> {
    let folder = File::open(folder_of(asked)).ok()?;
    folder.lock().ok()?;
    Some(folder)
}

/// One save at a time; two models may have the same file in mind.
struct Saving {
    failing: bool,
}

/// Chooses the model's file: the one asked for, or one beside it if that belongs to another model.
fn settle(asked: &Path, model: &Model) -> Destination {
    let id = model.id();
    let taken: Vec<_> = engine().models().iter().filter_map(|other| other.destination()).collect();
    let tag = id.fingerprint.get(..8).unwrap_or("model").to_owned();
    let candidates = std::iter::once(asked.to_path_buf()).chain((1..).map(|n| beside(asked, &tag, n)));
    let mut chosen = Destination::Nowhere;
    for candidate in candidates.take(MAX_CANDIDATES) {
        let file = Destination::File(candidate.clone());
        if taken.contains(&file) {
            continue;
        }
        match Profile::read_if_any(&candidate) {
            Ok(None) => chosen = file,
            Ok(Some(profile)) if profile.model.as_ref().is_some_and(|other| other.is_same_model(&id)) => chosen = file,
            Ok(Some(_)) => continue,
            Err(error) => log(Level::Warn, &format!("nothing is recorded, this file is not replaced: {error}")),
        }
        break;
    }
    if let Destination::File(path) = &chosen
        && path != asked
    {
        log(
            Level::Warn,
            &format!(
                "{} is taken by another model: the profile of this one goes to {}",
                asked.display(),
                path.display()
            ),
        );
    }
    model.set_destination(chosen.clone());
    chosen
}

/// Files tried before giving up.
const MAX_CANDIDATES: usize = 8;

/// `experts.json` → `experts-TAG.json`, then `experts-TAG-2.json` and so on.
fn beside(asked: &Path, tag: &str, n: usize) -> PathBuf {
    let stem = asked.file_stem().unwrap_or_default().to_string_lossy();
    let number = if n == 1 { String::new() } else { format!("-{n}") };
    let extension = asked.extension().map(|e| format!(".{}", e.to_string_lossy())).unwrap_or_default();
    asked.with_file_name(format!("{stem}-{tag}{number}{extension}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_models_file_stands_beside_the_first() {
        assert_eq!(beside(Path::new("/p/experts.json"), "ab12", 1), Path::new("/p/experts-ab12.json"));
        assert_eq!(beside(Path::new("/p/experts.json"), "ab12", 2), Path::new("/p/experts-ab12-2.json"));
        assert_eq!(beside(Path::new("/p/experts"), "ab12", 1), Path::new("/p/experts-ab12"));
    }
}
