//! What a context asks the cache's thread for: that its hot lane learns one more layer, before a token needs it.

use super::fetch_queue::FetchQueue;
use super::lane_cell::LaneCell;
use super::layer_cache::LayerCache;
use crate::lanes::{HotIndex, Width};
use crate::moe::FfnTemplate;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// The layer in the context's lane; `None` if it cannot be computed there.
pub type Answer = Arc<OnceLock<Option<HotIndex>>>;

/// A layer's template that a context's lane has been asked to know, and the answers. The same for all graphs of the context.
pub struct AskedLayer {
    /// The layer's cache.
    pub cache: Weak<LayerCache>,
    /// The template.
    pub template: Arc<FfnTemplate>,
    /// The pool's tensor for each of its weights.
    pub tensors: Vec<usize>,
    /// For one token and for several; empty: not asked.
    pub answers: [OnceLock<Answer>; 2],
}

impl AskedLayer {
    /// Whether it is for this template over these tensors of this cache.
    pub fn is_for(&self, cache: &Arc<LayerCache>, template: &Arc<FfnTemplate>, tensors: &[usize]) -> bool {
        self.cache.as_ptr() == Arc::as_ptr(cache) && Arc::ptr_eq(&self.template, template) && self.tensors == tensors
    }
}

/// That a context's lane be made ready for a layer's template.
pub struct LaneRequest {
    /// Where the context's lane is.
    pub cell: Weak<LaneCell>,
    /// The layer's cache.
    pub cache: Weak<LayerCache>,
    /// The template.
    pub template: Arc<FfnTemplate>,
    /// The pool's tensor for each of its weights.
    pub tensors: Vec<usize>,
    /// For how many tokens.
    pub width: Width,
    /// Graphs that take longer are of no use.
    pub limit: Duration,
    /// Where the answer goes.
    pub answer: Answer,
    /// Whose thread is to be told, and counts the requests that are open.
    pub queue: Arc<FetchQueue>,
}

impl Drop for LaneRequest {
    fn drop(&mut self) {
        self.queue.request_answered();
    }
}
