//! The thread of one model's cache: it fills the cache, makes the copies that contexts ask for, and in the end gives the
//! cache's memory back to the device, so that no token waits for that. Only the scratch memory of a context that computes at
//! that moment goes with the end of its call.

mod candidates;
mod fetcher;
mod fill;
mod warm_up;

use super::hot_device::HotDevice;
use super::model::Model;
use super::model::cache_handle::CacheHandle;
use super::model::layer::Layer;
use super::model::layer_cache::LayerCache;
use crate::ggml::Level;
use crate::options::Config;
use std::sync::Arc;
use std::thread::JoinHandle;

/// A model's cache and its thread; the cache ends, and the thread is waited for, when this is dropped.
pub struct Background {
    model: Arc<Model>,
    cache: Arc<CacheHandle>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Starts to fill a cache for `model`. `earlier`: the model's caches before this one, whose memory comes back first.
    ///
    /// `None`, after one line, if the system refuses a thread.
    pub fn start(model: &Arc<Model>, device: &Arc<HotDevice>, config: &Config, earlier: Vec<Self>) -> Option<Self> {
        let cache = new_cache(model, device);
        let mut task = Task::new(model.clone(), cache.clone(), config.clone());
        task.earlier = earlier;
        match std::thread::Builder::new().name("moe-hot-cache".into()).spawn(move || task.run()) {
            Ok(thread) => Some(Self { model: model.clone(), cache, thread: Some(thread) }),
            Err(error) => {
                model.name().log(Level::Warn, &format!("no hot cache: no thread to fill it ({error})"));
                None
            }
        }
    }

    /// The cache.
    pub fn cache(&self) -> &Arc<CacheHandle> {
        &self.cache
    }

    /// Whether it is a cache of this model.
    pub fn is_of(&self, model: &Arc<Model>) -> bool {
        Arc::ptr_eq(&self.model, model)
    }

    /// Whether its thread has nothing left to do.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Whether its model is in memory.
    pub fn is_needed(&self) -> bool {
        self.model.is_loaded()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.cache.end();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been reported by the panic hook and cost the cache, no more.
            let _ = thread.join();
        }
    }
}

fn new_cache(model: &Model, device: &Arc<HotDevice>) -> Arc<CacheHandle> {
    CacheHandle::new(
        device.clone(),
        model.layers().len(),
        model.copied().clone(),
        model.refill().clone(),
        model.name().clone(),
    )
}

/// A layer and the cache that it was given; taken away when dropped.
struct Cached {
    layer: Arc<Layer>,
    cache: Arc<LayerCache>,
}

impl Drop for Cached {
    fn drop(&mut self) {
        self.layer.take_cache(&self.cache);
    }
}

/// What the thread does. Whatever becomes of it (refused by the system, ended by a panic) its end is seen to.
struct Task {
    model: Arc<Model>,
    cache: Arc<CacheHandle>,
    config: Config,
    /// The model's caches before this one.
    earlier: Vec<Background>,
}

impl Task {
    fn new(model: Arc<Model>, cache: Arc<CacheHandle>, config: Config) -> Self {
        Self { model, cache, config, earlier: Vec::new() }
    }

    /// Does it all; whatever goes wrong costs the cache, no more.
    fn run(mut self) {
        // Waits for their threads: their memory is this cache's.
        self.earlier.clear();
        let error = match self.fill_and_serve() {
            Ok(()) => return,
            Err(error) => error,
        };
        // What a model that is being unloaded lacks is no news.
        if self.model.is_loaded() {
            self.cache.log(Level::Warn, &format!("no hot cache: {error}; experts run on the CPU"));
        }
    }

    fn fill_and_serve(&self) -> Result<(), fill::NoCache> {
        let Some(filled) = fill::Fill::new(&self.model, &self.cache, &self.config).run()? else {
            return Ok(());
        };
        let fill::Filled { mut fetcher, fetches, mut warm_up } = filled;
        fetcher.carry_out(fetches, &mut || warm_up.answer_one());
        self.forget_old_fetches(&fetcher);
        self.cache.queue.set_filled();
        fetcher.serve(&mut || warm_up.answer_one());
        Ok(())
    }

    /// What contexts have asked for while the plan was carried out is old.
    fn forget_old_fetches(&self, fetcher: &fetcher::Fetcher) {
        self.cache.queue.drain().iter().for_each(|fetch| fetcher.end_fetch(fetch, false));
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.cache.end();
        self.model.refill().settle();
        self.cache.queue.set_filled();
        self.cache.release_idle_memory();
    }
}

/// Tasks for unit tests.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// The cache of a task that the system refused a thread for.
    pub(crate) fn dropped_before_it_ran(model: &Arc<Model>, config: &Config) -> Arc<CacheHandle> {
        let device = HotDevice::choose(config).unwrap();
        let cache = new_cache(model, &device);
        drop(Task::new(model.clone(), cache.clone(), config.clone()));
        cache
    }
}
