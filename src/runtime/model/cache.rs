//! One model's cache as a whole: its layers' caches, the ring that fills them, and whether it is still worth having.

use super::Model;
use super::layer::Layer;
use crate::ggml::{Level, log};
use crate::runtime::background::fetch::Wishes;
use crate::runtime::hot_device::HotDevice;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What all layers of one model share.
pub struct ModelCache {
    /// The device it is on.
    pub device: Arc<HotDevice>,
    /// Where wishes for copies go.
    pub wishes: Wishes,
    /// The model's count of bytes copied.
    copied_bytes: Arc<AtomicU64>,
    model: Weak<Model>,
    layers: Mutex<Vec<Weak<Layer>>>,
    is_over: AtomicBool,
}

impl ModelCache {
    /// Without layers yet.
    pub fn new(device: Arc<HotDevice>, model: &Arc<Model>) -> Arc<Self> {
        let cache = Arc::new(Self {
            device,
            wishes: Wishes::new(),
            copied_bytes: model.copied_bytes().clone(),
            model: Arc::downgrade(model),
            layers: Mutex::default(),
            is_over: AtomicBool::new(false),
        });
        cache.device.register(&cache);
        cache
    }

    /// Whether it has been given up, or its device has.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Relaxed) || self.device.is_off()
    }

    /// Notes a layer whose cache belongs to it.
    pub fn add_layer(&self, layer: &Arc<Layer>) {
        self.layers().push(Arc::downgrade(layer));
    }

    /// Counts bytes that were copied to the device.
    pub fn add_copied(&self, bytes: usize) {
        self.copied_bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// Gives it up and says why, once.
    pub fn give_up(&self, reason: &str) {
        if !self.is_over() {
            self.end();
            let name = self.device.device().name();
            log(
                Level::Warn,
                &format!(
                    "hot cache of this model off on {name}: {reason}; experts run on the CPU, answers stay the same"
                ),
            );
        }
    }

    /// Ends it, and has the model's cache filled anew: what belongs in it has changed.
    pub fn refill(&self) {
        if !self.is_over() {
            self.end();
            if let Some(model) = self.model.upgrade() {
                model.want_fill();
            }
        }
    }

    /// Takes every layer's cache away, so that its memory goes back to the device, and ends the ring.
    pub fn end(&self) {
        self.is_over.store(true, Relaxed);
        self.wishes.end();
        let layers = std::mem::take(&mut *self.layers());
        layers.iter().filter_map(Weak::upgrade).for_each(|layer| layer.drop_cache());
    }

    fn layers(&self) -> MutexGuard<'_, Vec<Weak<Layer>>> {
        self.layers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
