//! What all parts of one model's cache share: its device, its queue of fetches, and whether it is over.

use super::copied::Copied;
use super::fetch_queue::FetchQueue;
use super::name::ModelName;
use super::refill::Refill;
use crate::ggml::Level;
use crate::runtime::hot_device::HotDevice;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Something of a context that holds device memory while the context is idle.
pub trait IdleMemory: Send + Sync {
    /// Gives the memory back to the device.
    fn release(&self);
}

/// A handle to one model's cache. It keeps none of the cache's memory.
pub struct CacheHandle {
    /// The device that it is on.
    pub device: Arc<HotDevice>,
    /// MoE layers of the model.
    pub n_layers: usize,
    /// Copies to be made.
    pub queue: Arc<FetchQueue>,
    /// The model's count of copies.
    copied: Arc<Copied>,
    /// Whether the model's cache is to be filled anew.
    refill: Arc<Refill>,
    name: Arc<ModelName>,
    idle: Mutex<Vec<Weak<dyn IdleMemory>>>,
    is_over: AtomicBool,
}

impl CacheHandle {
    /// A cache without layers, of a model with `n_layers`.
    pub fn new(
        device: Arc<HotDevice>,
        n_layers: usize,
        copied: Arc<Copied>,
        refill: Arc<Refill>,
        name: Arc<ModelName>,
    ) -> Arc<Self> {
        let queue = Arc::new(FetchQueue::new(n_layers));
        device.register(&queue);
        let (idle, is_over) = (Mutex::default(), AtomicBool::new(false));
        Arc::new(Self { device, n_layers, queue, copied, refill, name, idle, is_over })
    }

    /// Whether it has ended, or its device has failed. Its memory goes back to the device.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Relaxed) || self.device.is_off()
    }

    /// Counts experts that were copied to the device, each of so many bytes.
    pub fn add_copied(&self, experts: usize, expert_bytes: usize) {
        self.copied.add(experts, experts * expert_bytes);
    }

    /// Ends it. Its thread gives the memory back.
    pub fn end(&self) {
        self.is_over.store(true, Relaxed);
        self.queue.end();
    }

    /// Ends it and says why, once.
    pub fn give_up(&self, reason: &str) {
        if self.is_over.swap(true, Relaxed) || self.device.is_off() {
            return;
        }
        self.queue.end();
        let name = self.device.device().name();
        let what = "answers stay the same";
        self.log(
            Level::Warn,
            &format!("hot cache of this model off on {name}: {reason}; experts run on the CPU, {what}"),
        );
    }

    /// Logs a line about its model.
    pub fn log(&self, level: Level, line: &str) {
        self.name.log(level, line);
    }

    /// Ends it and has the model's cache filled anew: what belongs in it has changed.
    pub fn end_for_refill(&self) {
        if !self.is_over.swap(true, Relaxed) {
            self.queue.end();
            self.refill.want();
        }
    }

    /// Notes memory of a context, to be released when the cache has ended.
    pub fn note_idle_memory(&self, memory: Weak<dyn IdleMemory>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|memory| memory.strong_count() > 0);
        idle.push(memory);
    }

    /// Releases the memory of contexts that are idle. Those that compute release theirs when they are done.
    pub fn release_idle_memory(&self) {
        let idle = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        idle.iter().filter_map(Weak::upgrade).for_each(|memory| memory.release());
    }
}
