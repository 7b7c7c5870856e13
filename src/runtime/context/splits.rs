//! The splits of one context: what was recognised in each, remembered for as long as llama.cpp re-uses the graph.

use crate::ggml::Graph;
use crate::moe::{Block, FfnTemplate, Shape};
use crate::runtime::model::Model;
use crate::runtime::model::lane_request::AskedLayer;
use crate::runtime::model::layer::Layer;
use crate::runtime::model::layer_cache::LayerCache;
use crate::runtime::registry::Runtime;
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::{Arc, Weak};

/// Splits remembered by uid. Enough for every layer of a few graphs; cleared when full.
const MAX_KNOWN_SPLITS: usize = 1024;

/// FFN templates of one context that are kept. Models have one to three; each scale of an adapter makes another.
const MAX_TEMPLATES: usize = 64;

/// What one context has recognised.
pub struct Splits {
    runtime: &'static Runtime,
    /// The context's model, once a layer is known.
    pub model: Option<Arc<Model>>,
    known: HashMap<NonZeroU64, Vec<ResolvedBlock>>,
    /// The last split that had no uid.
    nameless: Vec<ResolvedBlock>,
    /// Every FFN template, once.
    templates: Vec<Arc<FfnTemplate>>,
    /// How often all of them were forgotten.
    n_forgotten: u32,
}

/// A block and the layer whose requests it stands for.
pub struct ResolvedBlock {
    pub block: Block,
    pub layer: Arc<Layer>,
    /// Experts that these weights hold.
    pub n_expert: u32,
    /// Whether the layer is counted by this block.
    pub is_counted: bool,
    /// How to compute some of its requests; `None`: only whole, on the CPU.
    pub template: Option<Arc<FfnTemplate>>,
    /// What the hot lane knows of it.
    pub hot: HotBlock,
}

/// What a context's hot lane knows of a block. It does not keep the cache alive.
#[derive(Default)]
pub enum HotBlock {
    /// Nothing yet.
    #[default]
    Unknown,
    /// What it has been asked for.
    Asked(Arc<AskedLayer>),
    /// That it cannot be computed with this cache.
    Refused(Weak<LayerCache>),
}

impl Splits {
    /// Nothing recognised yet.
    pub fn new(runtime: &'static Runtime) -> Self {
        Self {
            runtime,
            model: None,
            known: HashMap::new(),
            nameless: Vec::new(),
            templates: Vec::new(),
            n_forgotten: 0,
        }
    }

    /// How often all templates were forgotten: what was made for them is of no use any more.
    pub fn n_forgotten(&self) -> u32 {
        self.n_forgotten
    }

    /// The blocks of a split, and the model that they belong to.
    pub fn blocks(&mut self, split: &Graph<'_>) -> (&mut [ResolvedBlock], Option<&Arc<Model>>) {
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

    /// Splits that are remembered.
    #[cfg(test)]
    pub fn n_known(&self) -> usize {
        self.known.len()
    }

    fn recognise(&mut self, split: &Graph<'_>) -> Vec<ResolvedBlock> {
        let blocks = Block::recognise(split);
        let is_alone = blocks.len() == 1;
        blocks.into_iter().filter_map(|block| self.resolve(split, block, is_alone)).collect()
    }

    /// Finds the layer of a block and makes all of the block's weights known to the model.
    fn resolve(&mut self, split: &Graph<'_>, block: Block, is_alone: bool) -> Option<ResolvedBlock> {
        let n_used = u32::try_from(block.ids(split)?.ne(0)).unwrap_or(u32::MAX);
        let n_expert = u32::try_from(block.n_expert(split)?).unwrap_or(u32::MAX);
        let mut found: Option<(Arc<Layer>, bool)> = None;
        for weights in block.weights(split) {
            let layer = self.runtime.layer_of(&mut self.model, weights, n_used)?;
            let is_counted = layer.is_counted_by(weights);
            if found.is_none() || is_counted {
                found = Some((layer, is_counted));
            }
        }
        let (layer, is_counted) = found?;
        layer.record_shape(block.shape());
        let hot = HotBlock::Unknown;
        let mut resolved = ResolvedBlock { block, layer, n_expert, is_counted, template: None, hot };
        // A trace tells the size of an expert, which the template knows.
        if self.runtime.caches() || self.runtime.config().trace_out.is_some() {
            resolved.template = self.template(split, &resolved, is_alone);
        }
        Some(resolved)
    }

    /// How to compute some of the block's requests, if it is the layer's expert FFN, whole and alone in its split.
    fn template(&mut self, split: &Graph<'_>, resolved: &ResolvedBlock, is_alone: bool) -> Option<Arc<FfnTemplate>> {
        if !resolved.is_counted || split.is_empty() || resolved.block.ids(split)?.ne(1) == 0 {
            return None;
        }
        let recognised = match (is_alone, resolved.block.shape()) {
            (false, _) => Err("several blocks in one split"),
            (true, Shape::Partial(reason)) => Err(reason),
            (true, _) => FfnTemplate::recognise(split, &resolved.block),
        };
        let template = match recognised {
            Ok(template) => self.shared(template),
            Err(reason) => {
                resolved.layer.record_refusal(reason);
                return None;
            }
        };
        resolved.layer.record_template(split, &template);
        Some(template)
    }

    /// The one copy of a template that all equal layers share.
    fn shared(&mut self, template: FfnTemplate) -> Arc<FfnTemplate> {
        if let Some(known) = self.templates.iter().find(|known| ***known == template) {
            return known.clone();
        }
        if self.templates.len() >= MAX_TEMPLATES {
            // A server whose requests each have another adapter scale: begin anew.
            self.templates.clear();
            self.known.clear();
            self.n_forgotten += 1;
        }
        self.templates.push(Arc::new(template));
        self.templates[self.templates.len() - 1].clone()
    }
}
