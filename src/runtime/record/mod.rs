//! What is kept of a session: profiles, traces, timings. All file work of the plugin is here.

mod profile;
mod report;
mod sink;
pub mod trace;

use super::model::{Model, UnusableProfile};
use super::timing::LayerTimes;
use crate::Error;
use crate::files::{self, is_same_file};
use crate::ggml::{Level, log};
use crate::options::{CacheProfile, Config};
use crate::profile::{MayReplace, ModelId, replace_keeping_old};
use sink::{Sink, tell};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

pub use report::{Experts, report};

/// Time between two saves while counts change.
const SAVE_INTERVAL: Duration = Duration::from_secs(5);

/// What caches have learnt is saved once in so many times: every minute.
const SAVES_PER_LEARNT: u32 = 12;

/// Saves profiles: each model's recording, and what its cache has learnt.
#[derive(Default)]
pub struct Profiles {
    /// Held for as long as a save takes. No token waits for it.
    sinks: Mutex<Vec<ModelSinks>>,
    is_recording_failing: AtomicBool,
    is_learnt_failing: AtomicBool,
    /// Whether the file that what is learnt goes to has been looked at.
    is_learnt_checked: AtomicBool,
}

/// Where one model's profiles go.
struct ModelSinks {
    model: Arc<Model>,
    recorded: Sink,
    learnt: Sink,
}

impl Profiles {
    /// Saves what was recorded of these models and, if `with_learnt`, what their caches have learnt, where there is anything
    /// new. The first model gets the file that was asked for.
    pub fn save(&self, config: &Config, models: &[Arc<Model>], with_learnt: bool) {
        let mut sinks = self.lock();
        for model in models {
            let sinks = of_model(&mut sinks, model);
            self.save_recorded(config, model, models, &mut sinks.recorded);
            self.save_learnt(config, model, models, with_learnt.then_some(&mut sinks.learnt));
        }
    }

    /// Says so if the recording cannot be written where it should be.
    pub fn check_recording(&self, path: &Path) {
        check_file(path, &self.is_recording_failing);
    }

    fn save_recorded(&self, config: &Config, model: &Model, models: &[Arc<Model>], sink: &mut Sink) {
        let Some(asked) = &config.perf_out else { return };
        if config.caches() && model.may_be_kept_at(asked, config) {
            // What is there already is read first: it is to be added to.
            let _ = model.begin(config);
        }
        // One file can be both: then what was learnt goes with what was recorded.
        let is_same = config.caches() && is_one_file(config, model);
        let is_both = config.learns() && is_same;
        let made = || if is_both { profile::learnt(config, model) } else { profile::recorded(config, model) };
        if is_same && !sink.is_settled() && !may_replace(asked, model) {
            sink.save_beside(asked, model.calls(), made, &self.is_recording_failing);
        } else {
            let or_of = if is_both { began_with(model, models) } else { None };
            // A router's program that has been started again adds to what is learnt, and records beside the first one.
            let may = MayReplace { or_of: or_of.as_ref(), older_than: config.session_began.filter(|_| !is_both) };
            sink.save(asked, may, model.calls(), made, &self.is_recording_failing);
        }
    }

    /// Saves what the model's cache has learnt to the profile that it began with, if there is a sink for it.
    fn save_learnt(&self, config: &Config, model: &Model, models: &[Arc<Model>], sink: Option<&mut Sink>) {
        let Some(path) = model.profile_file(config) else { return };
        if !config.caches() || !config.learns() || is_one_file(config, model) {
            return;
        }
        let began_with = began_with(model, models);
        // One file for each model is made, beside one that names no model; a file that the user has named is there.
        let is_named = model.starting().in_file().is_some_and(|(profile, _)| profile.model.is_some());
        let is_new = config.hot_cache == Some(CacheProfile::Auto) && !is_named;
        if began_with.is_none() && !is_new {
            return;
        }
        if !self.is_learnt_checked.swap(true, Relaxed) {
            check_file(path, &self.is_learnt_failing);
        }
        if let Some(sink) = sink {
            let made = || profile::learnt(config, model);
            sink.save_in_place(path, began_with.as_ref(), model.calls(), made, &self.is_learnt_failing);
        }
    }

    /// Puts `text` in the place of a profile that may be ours, then does what else belongs to it; returns where the old one is
    /// kept. No save comes in between, and the next one takes the file anew.
    pub fn replace_keeping_old(&self, path: &Path, text: &[u8], then: impl FnOnce()) -> crate::Result<Option<PathBuf>> {
        let mut sinks = self.lock();
        for sinks in sinks.iter_mut() {
            [&mut sinks.recorded, &mut sinks.learnt].into_iter().for_each(|sink| sink.release(path));
        }
        let old = replace_keeping_old(path, text)?;
        then();
        Ok(old)
    }

    /// The file that a model's recording goes to, once it is ours.
    pub fn file_of(&self, model: &Arc<Model>) -> Option<PathBuf> {
        Some(of_model(&mut self.lock(), model).recorded.file()?.path().to_owned())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ModelSinks>> {
        self.sinks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether one file is both the cache's profile and the recording's output.
fn is_one_file(config: &Config, model: &Model) -> bool {
    let files = model.profile_file(config).zip(config.perf_out.as_deref());
    files.is_some_and(|(cache, output)| is_same_file(cache, output))
}

/// The model that the profile is of which a model's cache began with, if what is learnt may take that profile's place.
///
/// Not so where the profile is of another quantisation that is loaded too, such as the model whose draft this is.
fn began_with(model: &Model, models: &[Arc<Model>]) -> Option<ModelId> {
    let (profile, is_other_quantisation) = model.starting().in_file()?;
    let recorded = profile.model.clone()?;
    let is_of = |other: &Arc<Model>| recorded.is_same_model(&other.id());
    let is_anothers = is_other_quantisation && models.iter().any(is_of);
    (!is_anothers).then_some(recorded)
}

/// Says so at the start if a file cannot be written, not at the end.
fn check_file(path: &Path, failing: &AtomicBool) {
    if let Err(error) = files::check(path) {
        tell(&Error::file(path, error), failing);
    }
}

/// Whether a file that is a cache's profile and the recording's output may be replaced: the model's starting profile has been
/// read, or there is none.
fn may_replace(path: &Path, model: &Model) -> bool {
    match model.start_from(path) {
        // Another model's is not replaced: the sink sees to that.
        Ok(_) | Err(UnusableProfile::OtherModel(_)) => true,
        Err(UnusableProfile::Unreadable(_)) => !path.exists(),
    }
}

fn of_model<'a>(sinks: &'a mut Vec<ModelSinks>, model: &Arc<Model>) -> &'a mut ModelSinks {
    let place = sinks.iter().position(|sinks| Arc::ptr_eq(&sinks.model, model)).unwrap_or_else(|| {
        sinks.push(ModelSinks { model: model.clone(), recorded: Sink::default(), learnt: Sink::default() });
        sinks.len() - 1
    });
    &mut sinks[place]
}

/// A thread that saves every [`SAVE_INTERVAL`]; ends when dropped.
pub struct SaveThread {
    stop: Option<Sender<()>>,
    /// `None` if the system refused a thread: profiles are then saved at the end only.
    thread: Option<JoinHandle<()>>,
}

impl SaveThread {
    /// Starts the thread. `save` is told whether it is time to save what was learnt too.
    pub fn start(save: impl Fn(bool) + Send + 'static) -> Self {
        let (stop, stopped) = channel::<()>();
        let run = move || {
            let mut n = 0u32;
            while stopped.recv_timeout(SAVE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                n = n.wrapping_add(1);
                save(n.is_multiple_of(SAVES_PER_LEARNT));
            }
        };
        let thread = std::thread::Builder::new().name("moe-hot-save".into()).spawn(run);
        if let Err(error) = &thread {
            log(Level::Warn, &format!("no thread for saving while running ({error}): profiles are saved at the end"));
        }
        Self { stop: Some(stop), thread: thread.ok() }
    }
}

impl Drop for SaveThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been reported by the panic hook and cost a save, no more.
            let _ = thread.join();
        }
    }
}

/// Writes what was timed, where a test has asked for it.
pub fn save_times(config: &Config, times: Option<LayerTimes>) {
    let (Some(path), Some(times)) = (&config.test_timings, times) else { return };
    let written = serde_json::to_vec(&times).map_err(std::io::Error::from).and_then(|text| std::fs::write(path, text));
    if let Err(error) = written {
        log(Level::Warn, &format!("{}: timings not written: {error}", path.display()));
    }
}
