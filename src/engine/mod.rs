//! What happens when llama.cpp calls: the one place that joins `moe`, `lanes` and `routing`.
//!
//! One [`Engine`] per process knows the models; one [`Context`] per llama.cpp context computes. Nothing here
//! knows vtables. Once a graph has been seen, nothing on a token's path allocates, logs or does I/O, and no lock is
//! held for longer than it takes to count or to copy a layer's counts.
#![forbid(unsafe_code)]

mod context;
mod model;
mod recorder;

pub use context::Context;

use crate::config::{Config, OFFLOAD_MIN_BATCH};
use crate::ggml::{Device, Level, Tensor, is_hosts_log, log};
use model::{Layer, Model};
use recorder::Recorder;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError};

/// The process's models, who uses them, and the recorder that saves their counts.
pub struct Engine {
    config: Config,
    state: Mutex<State>,
    /// Buffers of ours that are alive.
    live_buffers: AtomicUsize,
}

#[derive(Default)]
struct State {
    /// Every model seen, also those that are unloaded: they may come back.
    models: Vec<Arc<Model>>,
    /// Which model a live buffer belongs to, by the buffer's address.
    by_buffer: HashMap<usize, Arc<Model>>,
    live_contexts: usize,
    recorder: Option<Recorder>,
}

/// The process's engine; reads the configuration when first asked for.
pub fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| Engine::new(Config::from_env()))
}

impl Engine {
    fn new(config: Config) -> Self {
        Self { config, state: Mutex::default(), live_buffers: AtomicUsize::new(0) }
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

    /// Why there is nothing to win, and whether the user should hear of it unasked.
    fn inert(&self) -> Option<(Level, String)> {
        if !self.config.takes_experts() {
            return Some((Level::Info, "no --moe-layer-perf-out given; experts stay with llama.cpp".into()));
        }
        if self.config.offload_min_batch <= 1 {
            let threshold = self.config.offload_min_batch;
            return Some((
                Level::Warn,
                format!("{OFFLOAD_MIN_BATCH} is {threshold}, so every batch is llama.cpp's; nothing is recorded"),
            ));
        }
        let device = Device::shared_memory_gpu()?;
        let name = device.name();
        Some((
            Level::Warn,
            format!("{name} shares the host's memory: nothing to win, nothing is recorded; run without moe-hot"),
        ))
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
    /// `worked`: llama.cpp has decoded with the context; it makes others only to measure.
    fn context_closed(&self, worked: bool) {
        // All models, in the order in which they appeared: the first gets the file that was asked for.
        self.models().iter().for_each(|model| recorder::save(&self.config, model));
        let (is_last, recorder) = {
            let mut state = self.state();
            state.live_contexts -= 1;
            let is_last = state.live_contexts == 0;
            (is_last, if is_last { state.recorder.take() } else { None })
        };
        drop(recorder); // joins its thread: not under the lock
        if is_last && worked && self.takes_experts() {
            recorder::report(&self.config, &self.models(), self.live_buffers.load(Relaxed) > 0);
        }
    }

    /// Once there is something to record: says so, and starts to save while the program runs.
    fn start_recording(&self, path: &Path, state: &mut State) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let largest = self.config.offload_min_batch.saturating_sub(1);
            let path = path.display();
            log(
                Level::Warn,
                &format!(
                    "recording expert usage of batches of 1 to {largest} tokens to {path}; no hot cache: experts run on the CPU \
                     as with --no-repack (without a GPU slower than stock, which repacks them, and rounded otherwise)"
                ),
            );
        });
        state.recorder = Some(Recorder::start());
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
            if let (Some(path), None) = (&self.config.perf_out, &state.recorder) {
                self.start_recording(path, &mut state);
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
        if let Some(model) = self.state().by_buffer.remove(&buffer) {
            model.forget_buffer(buffer);
        }
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
