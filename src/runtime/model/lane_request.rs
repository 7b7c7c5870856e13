//! What a context asks the cache's thread for: that its hot lane learns one more layer, before a token needs it.

use super::fetch_queue::FetchQueue;
use super::lane_cell::LaneCell;
use super::layer_cache::LayerCache;
use crate::lanes::{HotIndex, Width};
use crate::moe::FfnTemplate;
use std::sync::{Arc, OnceLock, Weak};

/// The layer in the context's lane; `None` if it cannot be computed there.
pub type Answer = Arc<OnceLock<Option<HotIndex>>>;

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
