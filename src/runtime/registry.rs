//! The process's models, its contexts, and the threads that serve them.

use super::background::Background;
use super::bypass::{Bypass, MAX_UNASKED_BATCHES};
use super::hot_device::{HotDevice, NoDevice};
use super::model::Model;
use super::model::layer::Layer;
use super::model::name::{are_several, mapped_file, name_of};
use super::record::trace::TraceFile;
use super::record::{self, Experts, Profiles, SaveThread};
use super::timing::LayerTimes;
use super::view::View;
use crate::ggml::{Device, Level, OwnIds, Tensor, close_buffer, is_hosts_log, is_of_weights, log};
use crate::options::host::OFFLOAD_MIN_BATCH;
use crate::options::{Budget, Config};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError};

/// Calls of a layer before its model's cache is filled. llama-server computes two batches for itself (warm-up, and a
/// look at its cache) before it makes the contexts of draft models and projectors, which need memory first.
const CALLS_BEFORE_FILL: u64 = 3;

/// What recording without a cache means.
const ON_THE_CPU: &str = "experts run on the CPU as with --no-repack (without a GPU slower than stock, which repacks them, \
                          and rounded otherwise)";

/// Calls of a layer after which a model does not wait any longer for one that was loaded before it. Many more than a draft
/// makes before its main model has computed a few small batches.
const MAX_CALLS_IN_TURN: u64 = 256;

/// A buffer of ours that llama.cpp has had made.
struct KnownBuffer {
    /// Its address.
    address: usize,
    /// The file of a model that it is a map of.
    file: Option<PathBuf>,
}

/// The process's models, who uses them, and what saves their counts.
pub struct Runtime {
    config: Config,
    state: Mutex<State>,
    /// Buffers of ours that are alive.
    live_buffers: AtomicUsize,
    /// Where hot experts go, or why nowhere; decided when experts are placed.
    hot_device: OnceLock<Result<Arc<HotDevice>, NoDevice>>,
    trace: OnceLock<Option<TraceFile>>,
    profiles: Profiles,
    /// Whether saving has begun. Asked for each new split only.
    is_recording: AtomicBool,
    said_inert: Once,
    said_recording: Once,
    said_bypassed: Once,
    bypass: Bypass,
    view: View,
}

/// A panic while the lock was held left no half-made state: every change is a single insert or remove. Nothing is opened,
/// logged, started or waited for under it.
#[derive(Default)]
struct State {
    /// Every model that has appeared, also those that are unloaded: they may come back.
    models: Vec<Arc<Model>>,
    /// Live buffers of ours, in the order in which they were made.
    buffers: Vec<KnownBuffer>,
    /// Which model a live buffer belongs to, by the buffer's address.
    by_buffer: HashMap<usize, Arc<Model>>,
    live_contexts: usize,
    /// Whether any has decoded since there was none.
    has_worked: bool,
    save_thread: Option<SaveThread>,
    background: Vec<Background>,
    times: Option<LayerTimes>,
}

/// The process's runtime; reads the configuration when first asked for.
pub fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Runtime::new(Config::from_env()))
}

impl Runtime {
    /// Nothing loaded yet.
    pub(super) fn new(config: Config) -> Self {
        Self {
            config,
            state: Mutex::default(),
            live_buffers: AtomicUsize::new(0),
            hot_device: OnceLock::new(),
            trace: OnceLock::new(),
            profiles: Profiles::default(),
            is_recording: AtomicBool::new(false),
            said_inert: Once::new(),
            said_recording: Once::new(),
            said_bypassed: Once::new(),
            bypass: Bypass::default(),
            view: View::default(),
        }
    }

    /// What the user asked for.
    pub fn config(&self) -> &Config {
        &self.config
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the loader may place experts with us.
    pub fn takes_experts(&self) -> bool {
        self.inert().is_none()
    }

    /// Whether experts are cached on a device.
    pub(super) fn caches(&self) -> bool {
        self.config.caches() && self.hot_device().is_ok()
    }

    /// Whether the hot device has been given up.
    pub(super) fn has_device_failed(&self) -> bool {
        self.hot_device().as_ref().is_ok_and(|device| device.is_off())
    }

    pub(super) fn hot_device(&self) -> &Result<Arc<HotDevice>, NoDevice> {
        self.hot_device.get_or_init(|| HotDevice::choose(&self.config))
    }

    /// Why there is nothing to win, and whether the user should hear of it unasked.
    fn inert(&self) -> Option<(Level, String)> {
        let warn = |reason: String| Some((Level::Warn, reason));
        if !self.config.takes_experts() {
            return if self.config.hot_cache.is_some() && self.config.max_mib == Budget::Off {
                warn("the hot cache is off (--moe-hot-cache-max-mib 0); experts stay with llama.cpp".into())
            } else {
                let reason = "neither --moe-layer-perf-out nor --moe-hot-cache given; experts stay with llama.cpp";
                Some((Level::Info, reason.into()))
            };
        }
        if self.config.offload_min_batch <= 1 {
            let threshold = self.config.offload_min_batch;
            return warn(format!(
                "{OFFLOAD_MIN_BATCH} is {threshold}, so every batch is llama.cpp's; nothing is recorded or cached"
            ));
        }
        // A device that the user has named is his own choice.
        if let (None, Some(device)) = (&self.config.device, Device::shared_memory_gpu()) {
            let name = device.name();
            return warn(format!(
                "{name} shares the host's memory: nothing to win, nothing is recorded or cached; run without moe-hot"
            ));
        }
        match (self.config.perf_out.is_some(), self.config.caches(), self.hot_device()) {
            (false, true, Err(reason)) => warn(format!("no hot cache: {reason}; experts stay with llama.cpp")),
            _ => None,
        }
    }

    /// llama.cpp has made a context.
    pub(super) fn context_opened(&self) {
        self.state().live_contexts += 1;
        if self.live_buffers.load(Relaxed) > 0 || !is_hosts_log() {
            return;
        }
        if let Some((level, reason)) = self.inert() {
            self.said_inert.call_once(|| log(level, &format!("inert: {reason}")));
        }
    }

    /// What tells whether llama.cpp decodes without us.
    pub(super) fn bypass(&self) -> &Bypass {
        &self.bypass
    }

    /// llama.cpp is about to compute a batch with one of its contexts.
    pub(super) fn batch_begins(&self) {
        if self.bypass.count_batch() && self.has_unused_experts() && self.takes_experts() {
            self.said_bypassed.call_once(|| {
                let largest = self.config.plain_min_batch.saturating_sub(1);
                log(
                    Level::Warn,
                    &format!(
                        "inert: llama.cpp keeps the experts to itself (its own cache, --moe-cache-mib, or only batches of more \
                         than {largest} tokens): no expert layer has reached moe-hot in {MAX_UNASKED_BATCHES} batches; nothing is \
                         recorded or cached"
                    ),
                );
            });
        }
    }

    /// Whether weights are placed with us and none of them has ever been computed here.
    fn has_unused_experts(&self) -> bool {
        let state = self.state();
        state.models.is_empty() && state.buffers.iter().any(|buffer| is_of_weights(buffer.address))
    }

    /// Saves what has been learnt. With the last context ends the saving, and says what became of the recording.
    ///
    /// `worked`: llama.cpp has decoded with the context; it makes others only to measure. `times`: what it has timed.
    pub(super) fn context_closed(&self, worked: bool, times: Option<LayerTimes>) {
        self.save(true);
        let (is_last, ended, times, worked) = {
            let mut state = self.state();
            state.live_contexts -= 1;
            state.has_worked |= worked;
            if let Some(times) = &times {
                state.times.get_or_insert_default().add(times);
            }
            let is_last = state.live_contexts == 0;
            // The last one to go need not be one that has decoded.
            let worked = if is_last { std::mem::take(&mut state.has_worked) } else { worked };
            // A cache goes on with the next context, as long as its model is loaded.
            let is_over = is_last && self.live_buffers.load(Relaxed) == 0;
            let background = if is_over { std::mem::take(&mut state.background) } else { Vec::new() };
            let save_thread = if is_last { state.save_thread.take() } else { None };
            if save_thread.is_some() {
                self.is_recording.store(false, Relaxed);
            }
            (is_last, (save_thread, background), state.times, worked)
        };
        drop(ended); // waits for threads: not under the lock
        if let (true, Some(trace)) = (is_last && worked, self.trace()) {
            trace.finish();
        }
        if is_last && worked && self.takes_experts() {
            let experts = match self.live_buffers.load(Relaxed) {
                0 => Experts::Elsewhere,
                _ if self.bypass.has_unasked() => Experts::Unasked,
                _ => Experts::InLargeBatches,
            };
            record::report(&self.config, &self.models(), experts, |model| self.profiles.file_of(model));
            record::save_times(&self.config, times);
        }
    }

    /// Saves what was recorded and, if `with_learnt`, what was learnt.
    fn save(&self, with_learnt: bool) {
        self.profiles.save(&self.config, &self.models(), with_learnt);
        if let Some(trace) = self.trace() {
            trace.save();
        }
    }

    /// Puts a profile in the place of the file that what is learnt goes to, then does what else belongs to it; returns where the
    /// old one is kept.
    pub(super) fn replace_profile(
        &self,
        path: &Path,
        text: &[u8],
        then: impl FnOnce(),
    ) -> crate::Result<Option<PathBuf>> {
        self.profiles.replace_keeping_old(path, text, then)
    }

    /// Where routing is written, if anywhere.
    fn trace(&self) -> Option<&TraceFile> {
        self.trace.get()?.as_ref()
    }

    /// Adds one call to the trace, if one is written.
    pub(super) fn add_to_trace(&self, model: &Arc<Model>, layer: &Layer, ids: &OwnIds) {
        if let Some(trace) = self.trace() {
            trace.add(model, layer, ids);
        }
    }

    /// Starts to fill a model's cache once it has computed enough; `calls`: of this layer so far.
    pub(super) fn consider_fill(&self, model: &Arc<Model>, layer: u32, calls: u64) {
        if !model.refill().is_wanted()
            || !self.state().is_turn_of(model, calls)
            || !model.refill().take(layer, calls, CALLS_BEFORE_FILL)
        {
            return;
        }
        let device = match self.hot_device() {
            Ok(device) if self.config.caches() && !device.is_off() => device,
            _ => return model.refill().settle(),
        };
        let (earlier, ended) = {
            let mut state = self.state();
            let all = std::mem::take(&mut state.background);
            let (earlier, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|background| background.is_of(model));
            let (ended, running): (Vec<_>, _) = others.into_iter().partition(Background::has_ended);
            state.background = running;
            (earlier, ended)
        };
        drop(ended); // not under the lock
        let Some(started) = Background::start(model, device, &self.config, earlier) else { return };
        let cache = started.cache().clone();
        self.state().background.push(started);
        if self.config.test_slots.is_some() {
            cache.queue.wait_filled();
        }
    }

    /// Once there is something to record: says so, and starts to save while the program runs.
    fn start_recording(&'static self) {
        // First, so that no context adds to a trace that is not there yet.
        self.trace.get_or_init(|| TraceFile::open(&self.config));
        if self.is_recording.swap(true, Relaxed) {
            return;
        }
        self.said_recording.call_once(|| {
            for invalid in &self.config.invalid {
                log(Level::Warn, &format!("{invalid}; the default is used"));
            }
            if let Some(path) = &self.config.perf_out {
                self.say_recording(path);
                self.profiles.check_recording(path);
            }
        });
        let thread = SaveThread::start(move |with_learnt| self.save(with_learnt));
        let mut state = self.state();
        let is_wanted = state.live_contexts > 0 && state.save_thread.is_none();
        let unwanted = if is_wanted { state.save_thread.replace(thread) } else { Some(thread) };
        if unwanted.is_some() {
            // The last context closed meanwhile.
            self.is_recording.store(false, Relaxed);
        }
        drop(state);
        drop(unwanted); // waits for the thread: not under the lock
    }

    fn say_recording(&self, path: &Path) {
        let largest = self.config.plain_min_batch.saturating_sub(1);
        let path = path.display();
        let without_cache = match (self.config.caches(), self.hot_device()) {
            (true, Ok(_)) => String::new(),
            (true, Err(reason)) => format!("; no hot cache: {reason}; {ON_THE_CPU}"),
            (false, _) => format!("; no hot cache: {ON_THE_CPU}"),
        };
        log(
            Level::Warn,
            &format!("recording expert usage of batches of 1 to {largest} tokens to {path}{without_cache}"),
        );
    }

    /// The layer that expert weights belong to. `model` is the context's model and is set here on first use.
    pub(super) fn layer_of(
        &'static self,
        model: &mut Option<Arc<Model>>,
        weights: Tensor<'_>,
        n_used: u32,
    ) -> Option<Arc<Layer>> {
        let buffer = weights.buffer()?.address();
        let known = self.state().by_buffer.get(&buffer).cloned();
        let owner = known.unwrap_or_else(|| {
            // Reads weights: not under the lock.
            let owner = model.clone().or_else(|| self.find_unloaded(weights)).unwrap_or_default();
            self.state().adopt(buffer, owner)
        });
        self.start_recording();
        let layer = owner.layer_of(buffer, weights, n_used);
        model.get_or_insert(owner);
        Some(layer)
    }

    /// Notes a new buffer of ours, by its address. `mapped_at`: where it is a map of a model's file, if it is.
    pub fn buffer_made(&self, buffer: usize, mapped_at: Option<usize>) {
        let file = mapped_at.and_then(mapped_file);
        self.live_buffers.fetch_add(1, Relaxed);
        let mut state = self.state();
        state.buffers.push(KnownBuffer { address: buffer, file });
        if state.has_several_models() {
            are_several();
        }
    }

    /// Forgets a buffer whose memory is about to go; its addresses may be used again.
    pub fn forget_buffer(&self, buffer: usize) {
        self.live_buffers.fetch_sub(1, Relaxed);
        close_buffer(buffer);
        {
            let mut state = self.state();
            state.buffers.retain(|known| known.address != buffer);
            state.by_buffer.remove(&buffer);
        }
        // Adapters' buffers are not in the map, yet their factors may be in a pool.
        self.models().iter().for_each(|model| model.forget_buffer(buffer));
        let ended: Vec<_> = {
            let mut state = self.state();
            let (loaded, ended) = std::mem::take(&mut state.background).into_iter().partition(Background::is_needed);
            state.background = loaded;
            ended
        };
        drop(ended); // waits for threads: not under the lock
    }

    /// A model that was unloaded and has come back with these weights.
    fn find_unloaded(&self, weights: Tensor<'_>) -> Option<Arc<Model>> {
        self.models().into_iter().find(|model| !model.is_loaded() && model.knows(weights))
    }

    /// Every model that has appeared.
    pub(super) fn models(&self) -> Vec<Arc<Model>> {
        self.state().models.clone()
    }

    /// What is shown of all this.
    pub(super) fn view(&self) -> &View {
        &self.view
    }

    /// Ends a model's caches; their threads give the memory back.
    pub(super) fn end_caches_of(&self, model: &Arc<Model>) {
        let state = self.state();
        let caches: Vec<_> =
            state.background.iter().filter(|own| own.is_of(model)).map(|own| own.cache().clone()).collect();
        drop(state);
        caches.iter().for_each(|cache| cache.end());
    }

    /// Why no expert is on a device now, in words for users.
    pub(super) fn why_no_cache(&self) -> String {
        if let Some((_, reason)) = self.inert() {
            return reason;
        }
        if !self.config.caches() {
            return "only recording: no --moe-hot-cache given".into();
        }
        match self.hot_device() {
            Err(reason) => reason.to_string(),
            Ok(device) if device.is_off() => format!("{} has failed", device.device().name()),
            Ok(_) if self.models().iter().all(|model| model.refill().is_pending()) => {
                "it is filled after some tokens".into()
            }
            Ok(_) => "it has ended: the log says why".into(),
        }
    }
}

impl State {
    /// Whether a model may be given a cache: no other that was loaded before it (the main model, where this is its draft) still
    /// waits for its own. Not for ever: that one may never be used.
    fn is_turn_of(&self, model: &Arc<Model>, calls: u64) -> bool {
        let owner = |buffer: &KnownBuffer| self.by_buffer.get(&buffer.address);
        let is_its = |buffer: &KnownBuffer| owner(buffer).is_some_and(|owner| Arc::ptr_eq(owner, model));
        let first = self.buffers.iter().position(is_its).unwrap_or(0);
        let waits = |buffer: &KnownBuffer| {
            owner(buffer).map_or_else(|| is_of_weights(buffer.address), |owner| owner.refill().is_pending())
        };
        calls > MAX_CALLS_IN_TURN || !self.buffers[..first].iter().any(waits)
    }

    /// Whether weights of more than one model are in memory, as far as their files tell.
    fn has_several_models(&self) -> bool {
        let files: Vec<_> = self.buffers.iter().filter_map(|buffer| buffer.file.as_ref()).collect();
        let is_mapped_twice = |n: usize| files[..n].contains(&files[n]);
        let is_of_first = |file: &&&PathBuf| name_of(file) == name_of(files[0]);
        (0..files.len()).any(is_mapped_twice) || !files.iter().all(|file| is_of_first(&file))
    }

    /// Notes whose a buffer is; the first word counts, and is returned.
    fn adopt(&mut self, buffer: usize, owner: Arc<Model>) -> Arc<Model> {
        let owner = self.by_buffer.entry(buffer).or_insert(owner);
        let file = self.buffers.iter().find(|known| known.address == buffer).and_then(|known| known.file.as_ref());
        if let Some(file) = file {
            owner.set_file(file);
        }
        if let (Some(file), None) = (file, owner.name().get()) {
            let name = name_of(file);
            let n_before =
                self.models.iter().filter(|model| model.name().get().is_some_and(|known| known.starts_with(&name)));
            let again = match n_before.count() {
                0 => String::new(),
                n => format!(" #{}", n + 1),
            };
            owner.name().set(name + &again);
        }
        if !self.models.iter().any(|model| Arc::ptr_eq(model, owner)) {
            self.models.push(owner.clone());
        }
        owner.clone()
    }
}
