//! What is told of a model's experts.

use crate::cache::{Plan, SlotRule};
use crate::cli::model::{ExpertLayer, Model};
use crate::cli::output::{short_ranges, table};
use crate::cli::size;
use crate::units::Bytes;
use anyhow::Result;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Shares of the experts for which the memory is told.
const SHARES: [f64; 5] = [0.125, 0.25, 0.5, 0.75, 1.0];

/// More blocks than any model has.
const MAX_BLOCKS: u32 = 4096;

/// What is printed. Sizes in bytes.
#[derive(Debug, Serialize)]
pub struct ModelView {
    file: PathBuf,
    name: String,
    architecture: String,
    blocks: Option<u64>,
    /// Blocks that have none.
    without_experts: Vec<u32>,
    expert_bytes: u64,
    other_bytes: u64,
    kv_bytes_per_token: Option<u64>,
    /// Layers that are alike, together.
    layers: Vec<LayersView>,
    budgets: Vec<Budget>,
}

/// Layers whose experts are alike.
#[derive(Debug, Serialize)]
struct LayersView {
    layers: Vec<u32>,
    n_expert: u64,
    n_expert_used: Option<u16>,
    bytes_per_expert: u64,
    bytes_per_layer: u64,
    tensors: Vec<TensorView>,
    eligible: bool,
    reason: Option<String>,
}

#[derive(Debug, Serialize)]
struct TensorView {
    name: String,
    r#type: &'static str,
    /// Of one expert, in ggml's order.
    shape: Vec<u64>,
}

/// What so many slots take.
#[derive(Debug, Serialize)]
struct Budget {
    slots_per_layer: u16,
    share_of_experts: f64,
    bytes: u64,
}

/// Looks through the model at `path`.
pub fn view(path: &Path) -> Result<ModelView> {
    let (model, _) = Model::read(path)?;
    let mut layers: Vec<(Vec<u32>, &ExpertLayer)> = Vec::new();
    for layer in &model.layers {
        let is_like = |other: &ExpertLayer| *layer == ExpertLayer { layer: layer.layer, ..other.clone() };
        match layers.iter_mut().find(|(_, first)| is_like(first)) {
            Some((numbers, _)) => numbers.push(layer.layer),
            None => layers.push((vec![layer.layer], layer)),
        }
    }
    Ok(ModelView {
        file: path.into(),
        layers: layers.into_iter().map(|(numbers, layer)| LayersView::new(numbers, layer)).collect(),
        expert_bytes: model.expert_bytes().0,
        other_bytes: model.other.0,
        kv_bytes_per_token: model.kv_per_token.map(|bytes| bytes.0),
        budgets: budgets(&model),
        without_experts: without_experts(&model),
        name: model.name,
        architecture: model.architecture,
        blocks: model.n_blocks,
    })
}

impl LayersView {
    fn new(layers: Vec<u32>, layer: &ExpertLayer) -> Self {
        let view = |tensor: &crate::cli::model::ExpertTensor| TensorView {
            name: tensor.name.clone(),
            r#type: tensor.kind,
            shape: tensor.shape.clone(),
        };
        let reason = layer.refusal();
        Self {
            layers,
            n_expert: layer.n_expert,
            n_expert_used: layer.n_used,
            bytes_per_expert: layer.expert_bytes().0,
            bytes_per_layer: layer.bytes().0,
            tensors: layer.tensors.iter().map(view).collect(),
            eligible: reason.is_none(),
            reason,
        }
    }

    fn cells(&self) -> Vec<String> {
        vec![
            short_ranges(&self.layers),
            self.reason.clone().map_or("yes".to_owned(), |reason| format!("no: {reason}")),
            self.n_expert.to_string(),
            self.n_expert_used.map_or("?".to_owned(), |n| n.to_string()),
            size::show(Bytes(self.bytes_per_expert)),
            size::show(Bytes(self.bytes_per_layer)),
        ]
    }
}

/// Blocks without experts, where the file says how many blocks there are.
fn without_experts(model: &Model) -> Vec<u32> {
    let has = |block: &u32| model.layers.iter().any(|layer| layer.layer == *block);
    let n_blocks = model.n_blocks.and_then(|n| u32::try_from(n).ok()).filter(|&n| n <= MAX_BLOCKS).unwrap_or(0);
    (0..n_blocks).filter(|block| !has(block)).collect()
}

/// Memory of several numbers of slots in all layers that can be cached.
fn budgets(model: &Model) -> Vec<Budget> {
    // Experts per token do not change sizes; one is as good as any where the file does not say.
    let demands: Vec<_> =
        model.layers.iter().filter_map(|layer| layer.demand(layer.n_used.or(Some(1)), None)).collect();
    let n_expert = demands.iter().map(|demand| demand.n_expert).max().unwrap_or(0);
    let mut slots: Vec<u16> = SHARES.iter().map(|share| (f64::from(n_expert) * share).round() as u16).collect();
    slots.retain(|&slots| slots > 0);
    slots.dedup();
    let budget = |slots: u16| {
        let plan = Plan::new(&demands, Bytes(u64::MAX - 1), SlotRule::Exactly(slots)).ok()?;
        let share_of_experts = f64::from(slots) / f64::from(n_expert);
        Some(Budget { slots_per_layer: slots, share_of_experts, bytes: plan.bytes.0 })
    };
    slots.into_iter().filter_map(budget).collect()
}

impl ModelView {
    pub fn text(&self) -> String {
        let n_layers: usize = self.layers.iter().map(|layers| layers.layers.len()).sum();
        let blocks = self.blocks.map_or(String::new(), |n| format!(" of {n}"));
        let kv = self
            .kv_bytes_per_token
            .map_or(String::new(), |bytes| format!(", KV cache at most {} per token (f16)", size::show(Bytes(bytes))));
        let mut text = format!(
            "{}: {} ({})\nlayers with experts: {n_layers}{blocks}; all experts {}; other weights on a GPU {}{kv}\n\n",
            self.file.display(),
            self.name,
            self.architecture,
            size::show(Bytes(self.expert_bytes)),
            size::show(Bytes(self.other_bytes)),
        );
        let header = ["layers", "can be cached", "experts", "per token", "one expert", "layer"];
        let dense = short_ranges(&self.without_experts);
        let dense = [dense, "no: has no experts".into(), "0".into()];
        let dense = (!self.without_experts.is_empty()).then(|| dense.to_vec());
        text += &table(&header, self.layers.iter().map(LayersView::cells).chain(dense), 2);
        for layers in &self.layers {
            text += &format!("\none expert of layers {}:\n", short_ranges(&layers.layers));
            let cells = |tensor: &TensorView| {
                let shape: Vec<_> = tensor.shape.iter().map(u64::to_string).collect();
                vec![tensor.name.clone(), tensor.r#type.to_owned(), shape.join(" x ")]
            };
            text += &table(&["tensor", "type", "shape"], layers.tensors.iter().map(cells), 3);
        }
        if !self.budgets.is_empty() {
            text += "\nGPU memory for experts:\n";
            let cells = |budget: &Budget| {
                let share = format!("{:.0} %", 100.0 * budget.share_of_experts);
                vec![budget.slots_per_layer.to_string(), share, size::show(Bytes(budget.bytes))]
            };
            text += &table(&["slots per layer", "of all experts", "memory"], self.budgets.iter().map(cells), 0);
        }
        text + "\nThe plugin also looks at a layer's operations when the model runs; its log names layers that it cannot cache.\n"
    }
}
