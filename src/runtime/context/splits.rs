//! The splits of one context: what was recognised in each, remembered for as long as llama.cpp re-uses the graph.

use crate::ggml::Graph;
use crate::lanes::HotIndex;
use crate::moe::{Block, FfnTemplate, Shape};
use crate::runtime::Engine;
use crate::runtime::model::Model;
use crate::runtime::model::layer::{Layer, LayerCache};
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::{Arc, Weak};

/// Splits remembered by uid. Enough for every layer of a few graphs; cleared when full.
const MAX_KNOWN_SPLITS: usize = 1024;

/// Recipes of one context that are kept. Models have one to three; each scale of an adapter makes another.
const MAX_RECIPES: usize = 64;

/// What one context has recognised.
pub struct Splits {
    engine: &'static Engine,
    /// The context's model, once a layer was seen.
    pub model: Option<Arc<Model>>,
    known: HashMap<NonZeroU64, Vec<Seen>>,
    /// The last split that had no uid.
    nameless: Vec<Seen>,
    /// Every recipe, once.
    ffns: Vec<Arc<FfnTemplate>>,
    /// How often all of them were forgotten.
    n_forgotten: u32,
}

/// A block and the layer whose requests it stands for.
pub struct Seen {
    pub block: Block,
    pub layer: Arc<Layer>,
    /// Experts that these weights hold.
    pub n_expert: u32,
    /// Whether this part of the layer is the one that is counted.
    pub counts: bool,
    /// How to compute some of its requests; `None`: only whole, on the CPU.
    pub ffn: Option<Arc<FfnTemplate>>,
    /// Where the hot lane keeps it.
    pub hot: Known,
}

/// What a context's hot lane knows of a block. It does not keep the cache alive.
#[derive(Default)]
pub enum Known {
    /// Nothing yet.
    #[default]
    Nothing,
    /// Its place in the lane, for this cache.
    Ready(Weak<LayerCache>, HotIndex),
    /// That it cannot be computed with this cache.
    Refused(Weak<LayerCache>),
}

impl Splits {
    /// Nothing recognised yet.
    pub fn new(engine: &'static Engine) -> Self {
        Self { engine, model: None, known: HashMap::new(), nameless: Vec::new(), ffns: Vec::new(), n_forgotten: 0 }
    }

    /// How often all recipes were forgotten: what was made for them is of no use any more.
    pub fn n_forgotten(&self) -> u32 {
        self.n_forgotten
    }

    /// The blocks of a split, and the model whose they are.
    pub fn blocks(&mut self, split: &Graph<'_>) -> (&mut [Seen], Option<&Arc<Model>>) {
        let Some(uid) = split.uid() else {
            self.nameless = self.recognise(split);
            return (&mut self.nameless, self.model.as_ref());
        };
        if !self.known.contains_key(&uid) {
            let blocks = self.recognise(split);
            if self.known.len() >= MAX_KNOWN_SPLITS {
                self.known.clear();
            }
            self.known.insert(uid, blocks);
        }
        (self.known.get_mut(&uid).map_or(&mut [], Vec::as_mut_slice), self.model.as_ref())
    }

    fn recognise(&mut self, split: &Graph<'_>) -> Vec<Seen> {
        let blocks = Block::recognise(split);
        let is_alone = blocks.len() == 1;
        blocks.into_iter().filter_map(|block| self.resolve(split, block, is_alone)).collect()
    }

    /// Finds the layer of a block and makes all of the block's weights known to the model.
    fn resolve(&mut self, split: &Graph<'_>, block: Block, is_alone: bool) -> Option<Seen> {
        let n_used = u32::try_from(block.ids(split)?.ne(0)).unwrap_or(u32::MAX);
        let n_expert = u32::try_from(block.n_expert(split)?).unwrap_or(u32::MAX);
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
        let mut seen = Seen { block, layer, n_expert, counts, ffn: None, hot: Known::Nothing };
        // A trace tells the size of an expert, which the recipe knows.
        if self.engine.caches() || self.engine.config().trace_out.is_some() {
            seen.ffn = self.recipe(split, &seen, is_alone);
        }
        Some(seen)
    }

    /// How to compute some of the block's requests, if it is the layer's expert FFN, whole and alone in its split.
    fn recipe(&mut self, split: &Graph<'_>, seen: &Seen, is_alone: bool) -> Option<Arc<FfnTemplate>> {
        if !seen.counts || split.is_empty() || seen.block.ids(split)?.ne(1) == 0 {
            return None;
        }
        let recognised = match (is_alone, seen.block.shape()) {
            (false, _) => Err("several blocks in one split"),
            (true, Shape::Partial(reason)) => Err(reason),
            (true, _) => FfnTemplate::recognise(split, &seen.block),
        };
        let ffn = match recognised {
            Ok(ffn) => self.shared(ffn),
            Err(reason) => {
                seen.layer.saw_refusal(reason);
                return None;
            }
        };
        seen.layer.saw_recipe(split, &ffn);
        Some(ffn)
    }

    /// The one copy of a recipe that all equal layers share.
    fn shared(&mut self, ffn: FfnTemplate) -> Arc<FfnTemplate> {
        if let Some(known) = self.ffns.iter().find(|known| ***known == ffn) {
            return known.clone();
        }
        if self.ffns.len() >= MAX_RECIPES {
            // A server whose requests each have another adapter scale: begin anew.
            self.ffns.clear();
            self.known.clear();
            self.n_forgotten += 1;
        }
        self.ffns.push(Arc::new(ffn));
        self.ffns[self.ffns.len() - 1].clone()
    }
}
