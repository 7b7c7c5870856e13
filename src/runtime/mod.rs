//! What happens when llama.cpp calls: the one place that joins `moe`, `lanes` and `routing`.
//!
//! One [`Engine`] per process knows the models; one [`Context`] per llama.cpp context computes. Nothing here
//! knows vtables. Once a graph has been seen, nothing on a token's path allocates, logs or does I/O, and no lock is
//! held for longer than it takes to count or to copy a layer's counts.
#![forbid(unsafe_code)]

mod background;
mod claims;
mod context;
mod hot_device;
mod model;
mod record;

pub use context::Context;

use crate::ggml::{Device, Level, OwnIds, Tensor, close_buffer, is_hosts_log, log};
use crate::options::{Budget, Config, OFFLOAD_MIN_BATCH};
use background::fill::Fill;
use context::timing::LayerTimes;
use hot_device::HotDevice;
use model::Model;
use model::cache::ModelCache;
use model::layer::Layer;
use record::Recorder;
use record::trace::Tracer;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::thread::JoinHandle;

/// Calls of a layer before its model's cache is filled. llama-server computes two batches for itself (warm-up, and a
/// look at its cache) before it makes the contexts of draft models and projectors, which need memory first.
const CALLS_BEFORE_FILL: u64 = 3;

/// What recording without a cache means.
const ON_THE_CPU: &str = "experts run on the CPU as with --no-repack (without a GPU slower than stock, which repacks them, \
                          and rounded otherwise)";

/// The process's models, who uses them, and the recorder that saves their counts.
pub struct Engine {
    config: Config,
    state: Mutex<State>,
    /// Buffers of ours that are alive.
    live_buffers: AtomicUsize,
    /// Where hot experts go, or why nowhere; decided when experts are placed.
    hot_device: OnceLock<Result<Arc<HotDevice>, String>>,
    tracer: OnceLock<Option<Tracer>>,
}

#[derive(Default)]
struct State {
    /// Every model seen, also those that are unloaded: they may come back.
    models: Vec<Arc<Model>>,
    /// Which model a live buffer belongs to, by the buffer's address.
    by_buffer: HashMap<usize, Arc<Model>>,
    live_contexts: usize,
    /// Those that llama.cpp decodes with.
    working_contexts: usize,
    /// Whether any has decoded since there was none.
    has_worked: bool,
    recorder: Option<Recorder>,
    fillers: Vec<Filler>,
    times: Option<LayerTimes>,
}

/// The thread that fills one model's cache; told to end, and waited for, when dropped.
struct Filler {
    model: Arc<Model>,
    cache: Arc<ModelCache>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Filler {
    fn drop(&mut self) {
        self.cache.end();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been reported by the panic hook and cost the cache, no more.
            let _ = thread.join();
        }
    }
}

/// The process's engine; reads the configuration when first asked for.
pub fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| Engine::new(Config::from_env()))
}

impl Engine {
    fn new(config: Config) -> Self {
        Self {
            config,
            state: Mutex::default(),
            live_buffers: AtomicUsize::new(0),
            hot_device: OnceLock::new(),
            tracer: OnceLock::new(),
        }
    }

    /// What the user asked for.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// A panic while the lock was held left no half-made state: every change is a single insert or remove.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the loader may place experts with us.
    pub fn takes_experts(&self) -> bool {
        self.inert().is_none()
    }

    /// Whether experts are cached on a device.
    pub fn caches(&self) -> bool {
        self.config.caches() && self.hot_device().is_ok()
    }

    fn hot_device(&self) -> &Result<Arc<HotDevice>, String> {
        self.hot_device.get_or_init(|| {
            hot_device::choose(&self.config).map(|device| Arc::new(HotDevice::new(device, &self.config)))
        })
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

    fn context_opened(&self) {
        self.state().live_contexts += 1;
        if self.live_buffers.load(Relaxed) > 0 || !is_hosts_log() {
            return;
        }
        if let Some((level, reason)) = self.inert() {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| log(level, &format!("inert: {reason}")));
        }
    }

    /// Saves what has been learnt. With the last context ends the recorder and says what became of the recording.
    ///
    /// `worked`: llama.cpp has decoded with the context; it makes others only to measure. `times`: what it has timed.
    fn context_closed(&self, worked: bool, times: Option<LayerTimes>) {
        self.save(true);
        let (is_last, ended, times, worked) = {
            let mut state = self.state();
            state.live_contexts -= 1;
            state.working_contexts -= usize::from(worked);
            state.has_worked |= worked;
            if let Some(times) = &times {
                state.times.get_or_insert_default().add(times);
            }
            let is_last = state.live_contexts == 0;
            // The last one to go need not be one that has decoded.
            let worked = if is_last { std::mem::take(&mut state.has_worked) } else { worked };
            // A cache goes on with the next context, as long as its model is loaded.
            let is_over = is_last && self.live_buffers.load(Relaxed) == 0;
            let fillers = if is_over { std::mem::take(&mut state.fillers) } else { Vec::new() };
            let ended = (if is_last { state.recorder.take() } else { None }, fillers);
            (is_last, ended, state.times, worked)
        };
        drop(ended); // joins threads: not under the lock
        if let (true, Some(tracer)) = (is_last && worked, self.tracer()) {
            tracer.finish();
        }
        if is_last && worked && self.takes_experts() {
            record::report(&self.config, &self.models(), self.live_buffers.load(Relaxed) > 0);
            record::save_times(&self.config, times);
        }
    }

    /// Saves what was recorded and, if `all`, what was learnt.
    fn save(&self, all: bool) {
        // All models, in the order in which they appeared: the first gets the file that was asked for.
        for model in self.models() {
            record::save(&self.config, &model);
            if all {
                record::save_learnt(&self.config, &model);
            }
        }
        if let Some(tracer) = self.tracer() {
            tracer.save();
        }
    }

    /// Where routing is written, if anywhere.
    fn tracer(&self) -> Option<&Tracer> {
        self.tracer.get()?.as_ref()
    }

    /// Adds one call to the trace, if one is written.
    fn trace(&self, model: &Arc<Model>, layer: &Layer, ids: &OwnIds) {
        if let Some(tracer) = self.tracer() {
            tracer.add(model, layer, ids);
        }
    }

    /// llama.cpp decodes with one more context.
    fn context_works(&self) {
        self.state().working_contexts += 1;
    }

    /// Starts to fill a model's cache once it has computed enough; `calls`: of one of its layers so far.
    fn consider_fill(&self, model: &Arc<Model>, calls: u64) {
        if !model.take_fill(calls, CALLS_BEFORE_FILL) {
            return;
        }
        let device = match self.hot_device() {
            Ok(device) if self.config.caches() && !device.is_off() => device,
            _ => return model.set_has_profile(),
        };
        let cache = ModelCache::new(device.clone(), model);
        let mut state = self.state();
        let fill = Fill {
            model: model.clone(),
            config: self.config.clone(),
            n_contexts: state.working_contexts,
            cache: cache.clone(),
        };
        match std::thread::Builder::new().name("moe-hot-fill".into()).spawn(|| fill.run()) {
            Ok(thread) => {
                state.fillers.push(Filler { model: model.clone(), cache: cache.clone(), thread: Some(thread) });
                drop(state);
                if self.config.test_slots.is_some() {
                    cache.wishes.wait_filled();
                }
            }
            Err(error) => log(Level::Warn, &format!("no hot cache: no thread to fill it ({error})")),
        }
    }

    /// Once there is something to record: says so, and starts to save while the program runs.
    fn start_recording(&self, state: &mut State) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            self.config.complaints.iter().for_each(|complaint| log(Level::Warn, complaint));
            if let Some(path) = &self.config.perf_out {
                self.say_recording(path);
            }
        });
        self.tracer.get_or_init(|| Tracer::new(self.config.trace_out.as_ref()?));
        state.recorder = Some(Recorder::start());
    }

    fn say_recording(&self, path: &Path) {
        let largest = self.config.offload_min_batch.saturating_sub(1);
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
    fn layer_of(&self, model: &mut Option<Arc<Model>>, weights: Tensor<'_>, n_used: u32) -> Option<Arc<Layer>> {
        let buffer = weights.buffer()?.address();
        let owner = {
            let mut state = self.state();
            let owner = match state.by_buffer.get(&buffer) {
                Some(known) => known.clone(),
                None => {
                    let owner = model.clone().unwrap_or_else(|| state.find_or_add(weights));
                    state.by_buffer.insert(buffer, owner.clone());
                    owner
                }
            };
            if state.recorder.is_none() {
                self.start_recording(&mut state);
            }
            owner
        };
        let layer = owner.layer_of(buffer, weights, n_used);
        model.get_or_insert(owner);
        Some(layer)
    }

    /// Notes a new buffer of ours.
    pub fn buffer_made(&self) {
        self.live_buffers.fetch_add(1, Relaxed);
    }

    /// Forgets a buffer whose memory is about to go; its addresses may be used again.
    pub fn forget_buffer(&self, buffer: usize) {
        self.live_buffers.fetch_sub(1, Relaxed);
        close_buffer(buffer);
        self.state().by_buffer.remove(&buffer);
        // Adapters' buffers are not in the map, yet their factors may be in a pool.
        self.models().iter().for_each(|model| model.forget_buffer(buffer));
        let ended: Vec<_> = {
            let mut state = self.state();
            let (loaded, ended) =
                std::mem::take(&mut state.fillers).into_iter().partition(|filler| filler.model.is_loaded());
            state.fillers = loaded;
            ended
        };
        drop(ended); // joins threads: not under the lock
    }

    fn models(&self) -> Vec<Arc<Model>> {
        self.state().models.clone()
    }
}

impl State {
    /// An unloaded model that has come back, or a new one.
    fn find_or_add(&mut self, weights: Tensor<'_>) -> Arc<Model> {
        let is_back = |model: &&Arc<Model>| !model.is_loaded() && model.knows(weights);
        if let Some(model) = self.models.iter().find(is_back) {
            return model.clone();
        }
        let model = Arc::new(Model::new());
        self.models.push(model.clone());
        model
    }
}
