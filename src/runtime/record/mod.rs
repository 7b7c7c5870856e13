//! Saves profiles while the program runs and when a context ends. All file work of the plugin is here.

mod learnt;
pub mod trace;

use super::context::timing::LayerTimes;
use super::engine;
use super::model::{Model, Totals};
use crate::ggml::{Level, graphs_built, log};
use crate::options::Config;
use crate::profile::{Acquired, OutputFile, Profile, ratio};
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two saves while counts change.
const SAVE_INTERVAL: Duration = Duration::from_secs(5);

/// What caches have learnt is saved once in so many times: every minute.
const SAVES_PER_LEARNT: u32 = 12;

/// A thread that saves changed profiles every [`SAVE_INTERVAL`]; ends when dropped.
pub struct Recorder {
    stop: Option<Sender<()>>,
    /// `None` if the system refused a thread: profiles are then saved at the end only.
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Starts the thread.
    pub fn start() -> Self {
        let (stop, stopped) = channel::<()>();
        let run = move || {
            let mut n = 0u32;
            while stopped.recv_timeout(SAVE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                n = n.wrapping_add(1);
                engine().save(n.is_multiple_of(SAVES_PER_LEARNT));
            }
        };
        let thread = std::thread::Builder::new().name("moe-hot-save".into()).spawn(run);
        if let Err(error) = &thread {
            log(Level::Warn, &format!("no thread for saving while running ({error}): profiles are saved at the end"));
        }
        Self { stop: Some(stop), thread: thread.ok() }
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

/// One line on what became of the recording. `has_experts`: some expert weights are with us.
pub fn report(config: &Config, models: &[Arc<Model>], has_experts: bool) {
    let largest = config.offload_min_batch.saturating_sub(1);
    if models.is_empty() {
        let reason = if has_experts {
            format!("only batches of more than {largest} tokens were computed, which are llama.cpp's")
        } else {
            "no experts were placed with moe-hot (a dense model, or experts elsewhere)".into()
        };
        log(Level::Warn, &format!("nothing was recorded: {reason}"));
    }
    for model in models {
        report_cache(config, model);
        let recorded = model.recorded();
        let Some(file) = recorded.file() else { continue };
        let Totals { layers, calls, requests, .. } = model.totals();
        let path = file.path().display();
        log(
            Level::Warn,
            &format!("recorded {requests} (token, expert) requests in {calls} calls of {layers} layers: {path}"),
        );
    }
}

/// One line on what the cache has done.
fn report_cache(config: &Config, model: &Model) {
    let Totals { requests, hits, copied_bytes, .. } = model.totals();
    if !config.caches() || requests == 0 {
        return;
    }
    let misses = requests.saturating_sub(hits);
    let (rate, copied) = (100.0 * ratio(hits, requests), copied_bytes as f64 / f64::from(1 << 20));
    let graphs = graphs_built();
    log(
        Level::Warn,
        &format!(
            "hot cache: {hits} hits, {misses} misses, hit rate {rate:.1} %; {copied:.1} MiB copied, {graphs} graphs made"
        ),
    );
}

/// Writes what was timed, where a test has asked for it.
pub fn save_times(config: &Config, times: Option<LayerTimes>) {
    let (Some(path), Some(times)) = (&config.test_timings, times) else { return };
    let written = serde_json::to_vec(&times).map_err(std::io::Error::from).and_then(|text| std::fs::write(path, text));
    if let Err(error) = written {
        log(Level::Warn, &format!("{}: timings not written: {error}", path.display()));
    }
}

/// Saves what was recorded, if there is anything new.
pub fn save(config: &Config, model: &Model) {
    static FAILING: AtomicBool = AtomicBool::new(false);
    if let Some(asked) = &config.perf_out {
        // One file can be both: then what was learnt goes with what was recorded.
        let is_same = config.caches() && config.hot_cache.as_ref() == Some(asked);
        if is_same && !model.has_profile() {
            // The cache has not read it yet.
            return;
        }
        let is_both = config.learns() && is_same;
        let profile = || if is_both { learnt::profile(config, model) } else { model.profile(config.offload_min_batch) };
        model.recorded().save(asked, model.calls(), profile, &FAILING);
    }
}

/// Saves what the model's cache has learnt to the profile that it began with, if there is anything new.
pub fn save_learnt(config: &Config, model: &Model) {
    static FAILING: AtomicBool = AtomicBool::new(false);
    let Some(path) = config.hot_cache.as_ref().filter(|path| config.perf_out.as_ref() != Some(path)) else { return };
    if config.caches() && config.learns() && model.began_with().is_some_and(|demand| demand.model.is_some()) {
        model.learnt().save_in_place(path, model.calls(), || learnt::profile(config, model), &FAILING);
    }
}

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

    /// Writes the profile if there were calls since it was last written: to the file asked for or one beside it.
    fn save(&mut self, asked: &Path, calls: u64, profile: impl FnOnce() -> Profile, failing: &AtomicBool) {
        self.save_with(settle, asked, calls, profile, failing);
    }

    /// The same to this file and no other: if it is another model's, or held by someone, to none.
    fn save_in_place(&mut self, path: &Path, calls: u64, profile: impl FnOnce() -> Profile, failing: &AtomicBool) {
        let settle = |path: &Path, profile: &Profile| match OutputFile::acquire(path, profile)? {
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

    /// Tells the user of the first of several failures.
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
        let saved = match &mut self.output {
            Output::Nowhere => return,
            Output::File(file) => file.replace(&profile),
            Output::Unsettled => settle(asked, &profile).map(|settled| self.output = settled),
        };
        match saved {
            Ok(()) => {
                self.saved_calls = calls;
                failing.store(false, Relaxed);
            }
            Err(error) if !failing.swap(true, Relaxed) => {
                log(Level::Warn, &format!("profile not saved, will be tried again: {error}"));
            }
            Err(_) => {}
        }
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
fn settle(asked: &Path, profile: &Profile) -> Result<Output> {
    let tag = profile.model.as_ref().and_then(|id| id.fingerprint.get(..TAG_DIGITS)).unwrap_or("model");
    let asked_for = asked.display();
    match OutputFile::acquire(asked, profile)? {
        Acquired::File(file) => return Ok(Output::File(file)),
        Acquired::Taken => {}
        Acquired::NotAProfile(error) => {
            log(Level::Warn, &format!("nothing is recorded, this file is not replaced: {asked_for}: {error}"));
            return Ok(Output::Nowhere);
        }
    }
    for n in 1..=MAX_FILES_BESIDE {
        let path = beside(asked, tag, n);
        match OutputFile::acquire(&path, profile)? {
            Acquired::File(file) => {
                let path = path.display();
                log(
                    Level::Warn,
                    &format!("{asked_for} is taken (another model or program): this profile goes to {path}"),
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
