//! One llama.cpp context's side of the engine: what is done for each split.

use super::model::{Layer, Model};
use super::{Engine, engine};
use crate::ggml::{AbortCallback, Graph, Level, Status, log, sys};
use crate::lanes::ColdLane;
use crate::moe::Block;
use crate::routing::check_ids;
use crate::{Error, Result};
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;

/// Splits remembered by uid. Enough for every layer of a few graphs; cleared when full.
const MAX_KNOWN_SPLITS: usize = 1024;

/// Computes the splits of one llama.cpp context. Used by one thread at a time.
pub struct Context {
    engine: &'static Engine,
    cold: ColdLane,
    model: Option<Arc<Model>>,
    known: HashMap<NonZeroU64, Vec<Seen>>,
}

/// A block and the layer whose requests it stands for.
struct Seen {
    block: Block,
    layer: Arc<Layer>,
    /// Experts that these weights hold.
    n_expert: u32,
    /// Whether this part of the layer is the one that is counted.
    counts: bool,
}

impl Context {
    /// A new context. Starts no thread and touches no file: llama.cpp makes and frees contexts to measure.
    pub fn new() -> Result<Self> {
        let context = Self { engine: engine(), cold: ColdLane::new()?, model: None, known: HashMap::new() };
        context.engine.context_opened();
        Ok(context)
    }

    /// Computes one split and returns ggml's answer.
    ///
    /// A split with ids outside the layer fails and leaves everything as it was.
    pub fn compute(&mut self, split: &Graph<'_>) -> Status {
        if let Err(error) = self.observe(split) {
            log(Level::Error, &error.to_string());
            return sys::GGML_STATUS_FAILED;
        }
        self.cold.compute(split)
    }

    /// Threads to compute with.
    pub fn set_threads(&mut self, n_threads: i32) {
        self.cold.set_threads(n_threads);
    }

    /// Whom to ask whether to stop.
    pub fn set_abort_callback(&mut self, callback: AbortCallback) {
        self.cold.set_abort_callback(callback);
    }

    /// Checks and counts the ids of every block in the split.
    fn observe(&mut self, split: &Graph<'_>) -> Result<()> {
        let Some(uid) = split.uid() else {
            let blocks = self.recognise(split);
            return check_and_count(split, &blocks);
        };
        if !self.known.contains_key(&uid) {
            let blocks = self.recognise(split);
            if self.known.len() >= MAX_KNOWN_SPLITS {
                self.known.clear();
            }
            self.known.insert(uid, blocks);
        }
        match self.known.get(&uid) {
            Some(blocks) => check_and_count(split, blocks),
            None => Ok(()),
        }
    }

    fn recognise(&mut self, split: &Graph<'_>) -> Vec<Seen> {
        Block::recognise(split).into_iter().filter_map(|block| self.resolve(split, block)).collect()
    }

    /// Finds the layer of a block and makes all of the block's weights known to the model.
    fn resolve(&mut self, split: &Graph<'_>, block: Block) -> Option<Seen> {
        let n_used = u32::try_from(block.ids(split)?.ne(0)).unwrap_or(u32::MAX);
        let n_expert = block.weights(split).map(|weights| weights.ne(2)).min()?;
        let mut found: Option<(Arc<Layer>, bool)> = None;
        for weights in block.weights(split) {
            let layer = self.engine.layer_of(&mut self.model, weights, n_used)?;
            let counts = layer.is_counted_by(weights);
            if found.is_none() || counts {
                found = Some((layer, counts));
            }
        }
        let (layer, counts) = found?;
        layer.saw(block.shape());
        Some(Seen { block, layer, n_expert: u32::try_from(n_expert).unwrap_or(u32::MAX), counts })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.engine.context_closed(self.model.as_deref());
    }
}

fn check_and_count(split: &Graph<'_>, blocks: &[Seen]) -> Result<()> {
    for Seen { block, layer, n_expert, counts } in blocks {
        let number = layer.counts.layer();
        let ids = block.ids(split).and_then(|ids| ids.ids()).ok_or(Error::IdsTensor { layer: number })?;
        check_ids(number, *n_expert, ids.iter())?;
        if *counts && ids.n_tokens() > 0 {
            layer.counts.add(ids.n_tokens(), ids.iter());
        }
    }
    Ok(())
}
