//! What fits into the GPU's memory, as a cache and as whole layers, and what share of a token's experts it answers.

use crate::cache::{LayerDemand, Plan, PlanError, SlotRule};
use crate::cli::formats;
use crate::cli::model::{ExpertLayer, Model};
use crate::profile::{RecordedLayer, RecordedProfile};
use crate::units::Bytes;
use anyhow::{Context, Result};

/// Published: the share of RAM's bandwidth that a CPU reaches with IQ types, 55 to 69 %; the middle. Others are taken to reach all of it.
const IQ_SHARE: f64 = 0.62;

/// The GPU's memory and what takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// All of it.
    pub vram: Bytes,
    /// Tokens of context.
    pub context: u32,
    /// Keys and values of the context; nothing where the model's file does not say.
    pub kv: Bytes,
    /// Weights besides experts.
    pub other: Bytes,
    /// Left free.
    pub reserve: Bytes,
}

impl Room {
    /// What `model` with a context of so many tokens takes of `vram`.
    pub fn new(model: &Model, vram: Bytes, reserve: Bytes, context: u32) -> Self {
        let kv = model.kv_per_token.unwrap_or_default().saturating_mul(context.into());
        Self { vram, context, kv, other: model.other, reserve }
    }

    /// All but experts.
    pub fn taken(&self) -> Bytes {
        [self.kv, self.other, self.reserve].into_iter().sum()
    }

    /// For experts; `None` if the rest does not fit.
    pub fn for_experts(&self) -> Option<Bytes> {
        (self.taken() <= self.vram).then(|| self.vram.saturating_sub(self.taken()))
    }
}

/// What so much memory brings.
#[derive(Debug)]
pub struct Estimate {
    /// Experts that one token reads, bytes.
    pub expert_bytes_per_token: f64,
    /// Layers with experts.
    pub n_layers: usize,
    /// Layers that can be cached.
    pub n_eligible: usize,
    /// Share of RAM's bandwidth that a CPU reaches with the types of these experts.
    pub ram_share: f64,
    /// The cache, or why there is none.
    pub cache: Result<Cache, NoCache>,
    /// Tokens that the profile counts, if there is one: those of the layer that has most.
    pub counted_tokens: Option<u64>,
    /// The best --n-cpu-moe.
    pub whole: WholeLayers,
}

/// A cache that fits.
#[derive(Debug)]
pub struct Cache {
    /// In every layer at least.
    pub slots_per_layer: u16,
    /// Experts of the largest layer.
    pub n_expert: u16,
    /// Device memory of all slots.
    pub bytes: Bytes,
    /// Share of requests whose expert is resident.
    pub hit_rate: f64,
    /// The same by bytes.
    pub hit_bytes: f64,
}

/// Why there is no cache.
#[derive(Debug, thiserror::Error)]
pub enum NoCache {
    /// The rest of the model does not fit.
    #[error("the rest of the model does not fit")]
    NoRoom,
    /// No layer can be cached.
    #[error("no layer can be cached: {0}")]
    NotEligible(String),
    /// Too few slots.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// Whole layers on the GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WholeLayers {
    /// Layers, counted from the first block, whose experts stay on the CPU: the N of --n-cpu-moe.
    pub n_cpu_moe: u32,
    /// Layers with experts among them.
    pub on_cpu: usize,
    /// Bytes of experts on the GPU.
    pub bytes: Bytes,
    /// Share of a token's experts, by bytes, that are on the GPU.
    pub share: f64,
}

impl Estimate {
    /// Fails if it is unknown how many experts a token uses, or the profile is not of this model.
    pub fn new(model: &Model, profile: Option<&RecordedProfile>, room: &Room) -> Result<Self> {
        let mut layers = Vec::new();
        let mut counted_tokens = profile.map(|_| 0);
        for layer in &model.layers {
            let recorded = profile.and_then(|profile| Some((profile, profile.layers.get(&layer.layer)?)));
            let by_profile = recorded.and_then(|(profile, recorded)| formats::n_used(profile, recorded));
            let n_used = layer.n_used.or(by_profile.and_then(|n| u16::try_from(n).ok()));
            let n_used =
                n_used.context("its key ARCHITECTURE.expert_used_count is missing; expected experts per token")?;
            let counts = match (recorded, layer.refusal()) {
                (Some((_, recorded)), None) => Some(counts(recorded, layer)?),
                _ => None,
            };
            if let (Some(most), Some((_, recorded))) = (&mut counted_tokens, recorded) {
                let requests: u64 = recorded.requests.iter().map(|&(_, count)| count).sum();
                *most = (*most).max(requests / u64::from(n_used));
            }
            layers.push((layer, n_used, layer.demand(Some(n_used), counts)));
        }
        let bytes = |(layer, n_used, _): &(&ExpertLayer, u16, _)| f64::from(*n_used) * layer.expert_bytes().0 as f64;
        let all: f64 = layers.iter().map(bytes).sum();
        let demands: Vec<_> = layers.iter().filter_map(|(_, _, demand)| demand.clone()).collect();
        let requests: f64 = layers.iter().map(|(_, n_used, _)| f64::from(*n_used)).sum();
        let weights: Vec<_> = layers.iter().filter(|layer| layer.2.is_some()).map(|layer| bytes(layer) / all).collect();
        let shares: Vec<_> = demands.iter().map(|demand| f64::from(demand.n_used) / requests).collect();
        Ok(Self {
            expert_bytes_per_token: all,
            n_layers: layers.len(),
            n_eligible: demands.len(),
            ram_share: ram_share(model),
            counted_tokens,
            cache: cache(model, &demands, room, profile.is_some(), &shares, &weights),
            whole: whole_layers(model, room.for_experts().unwrap_or_default(), |layer| {
                layers.iter().find(|(other, ..)| other.layer == layer.layer).map_or(0.0, |known| bytes(known) / all)
            }),
        })
    }
}

/// Requests by expert, `[n_expert]`, of a layer that can be cached.
fn counts(recorded: &RecordedLayer, layer: &ExpertLayer) -> Result<Vec<u64>> {
    let mut counts = vec![0; usize::try_from(layer.n_expert)?];
    for &(expert, count) in &recorded.requests {
        *counts.get_mut(expert as usize).with_context(|| format!("the profile counts expert {expert}"))? = count;
    }
    Ok(counts)
}

/// The cache that fits. `shares` and `weights`: each layer's part of a token's requests and of their bytes.
fn cache(
    model: &Model,
    demands: &[LayerDemand],
    room: &Room,
    is_counted: bool,
    shares: &[f64],
    weights: &[f64],
) -> Result<Cache, NoCache> {
    let budget = room.for_experts().ok_or(NoCache::NoRoom)?;
    if demands.is_empty() {
        let reason = model.layers.iter().find_map(ExpertLayer::refusal).unwrap_or_default();
        return Err(NoCache::NotEligible(reason));
    }
    let plan = Plan::new(demands, budget, SlotRule::AtLeastAThird)?;
    let mut cache = Cache {
        slots_per_layer: plan.slots_per_layer,
        n_expert: demands.iter().map(|demand| demand.n_expert).max().unwrap_or(0),
        bytes: plan.bytes,
        hit_rate: 0.0,
        hit_bytes: 0.0,
    };
    for (((demand, plan), share), weight) in demands.iter().zip(&plan.layers).zip(shares).zip(weights) {
        let residents = plan.slots - demand.spare.of(plan.slots, demand.n_expert);
        let by_chance = f64::from(residents) / f64::from(demand.n_expert);
        let hits = match &demand.counts {
            Some(counts) => {
                let total: f64 = counts.iter().map(|&count| count as f64).sum();
                let hit: f64 =
                    plan.experts.iter().filter_map(|id| counts.get(usize::from(id.0))).map(|&n| n as f64).sum();
                if total > 0.0 { hit / total } else { 0.0 }
            }
            None if is_counted => 0.0, // nothing is filled where the profile lacks the layer
            None => by_chance,
        };
        cache.hit_rate += hits * share;
        cache.hit_bytes += hits * weight;
    }
    Ok(cache)
}

/// As many of the last layers as fit whole, since --n-cpu-moe keeps the first ones on the CPU.
fn whole_layers(model: &Model, budget: Bytes, share: impl Fn(&ExpertLayer) -> f64) -> WholeLayers {
    let mut whole = WholeLayers { n_cpu_moe: 0, on_cpu: model.layers.len(), bytes: Bytes::ZERO, share: 0.0 };
    for layer in model.layers.iter().rev() {
        let bytes = whole.bytes.saturating_add(layer.bytes());
        if bytes > budget {
            whole.n_cpu_moe = layer.layer.saturating_add(1);
            break;
        }
        whole.bytes = bytes;
        whole.share += share(layer);
        whole.on_cpu -= 1;
    }
    whole
}

/// Weighted by bytes, as time is: bytes that are read at half the speed count twice.
fn ram_share(model: &Model) -> f64 {
    let (mut bytes, mut time) = (0.0, 0.0);
    for tensor in model.layers.iter().flat_map(|layer| &layer.tensors) {
        let speed = if tensor.kind.starts_with("iq") { IQ_SHARE } else { 1.0 };
        bytes += tensor.bytes.0 as f64;
        time += tensor.bytes.0 as f64 / speed;
    }
    if time > 0.0 { bytes / time } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::formats::profile_of;
    use crate::cli::model::ExpertTensor;
    use std::collections::BTreeMap;

    /// `n_layers` layers of 8 experts of 1 MiB, 2 per token.
    fn model(n_layers: u32, kind: &'static str) -> Model {
        let tensor = ExpertTensor {
            name: "ffn_up_exps.weight".into(),
            kind,
            shape: vec![1, 1],
            n_expert: 8,
            bytes: Bytes::from_mib(8),
        };
        let layer = |layer| ExpertLayer {
            layer,
            n_expert: 8,
            n_used: Some(2),
            tensors: vec![tensor.clone()],
            chunk_bytes: Bytes::ZERO,
        };
        Model {
            name: String::new(),
            architecture: String::new(),
            n_blocks: Some(n_layers.into()),
            layers: (0..n_layers).map(layer).collect(),
            other: Bytes::from_mib(10),
            kv_per_token: Some(Bytes(1024)),
        }
    }

    fn room(vram_mib: u64) -> Room {
        Room::new(&model(4, "f32"), Bytes::from_mib(vram_mib), Bytes::from_mib(2), 4096)
    }

    #[test]
    fn memory_is_shared_by_all_that_needs_it() {
        assert_eq!(room(40).for_experts(), Some(Bytes::from_mib(40 - 10 - 4 - 2)));
        assert_eq!(room(15).for_experts(), None);
    }

    #[test]
    fn whole_layers_are_the_last_ones() {
        let estimate = Estimate::new(&model(4, "f32"), None, &room(16 + 20)).unwrap();
        let whole = estimate.whole;
        assert_eq!((whole.n_cpu_moe, whole.on_cpu, whole.bytes), (2, 2, Bytes::from_mib(16)));
        assert_eq!(whole.share, 0.5);
        let all = Estimate::new(&model(4, "f32"), None, &room(16 + 32)).unwrap().whole;
        assert_eq!((all.n_cpu_moe, all.share), (0, 1.0));
    }

    #[test]
    fn a_profile_raises_the_hit_rate_above_chance() {
        let by_chance = Estimate::new(&model(4, "f32"), None, &room(16 + 17)).unwrap().cache.unwrap();
        assert_eq!((by_chance.slots_per_layer, by_chance.hit_rate), (4, 3.0 / 8.0), "one slot is spare");
        let counts = (0..4).map(|layer| (layer, BTreeMap::from([(1, 97), (2, 1), (3, 1), (4, 1)]))).collect();
        let profile = profile_of(counts, Some(8), Some(2)).unwrap();
        let cache = Estimate::new(&model(4, "f32"), Some(&profile), &room(16 + 17)).unwrap().cache.unwrap();
        assert!((cache.hit_rate - 0.99).abs() < 1e-9 && (cache.hit_bytes - 0.99).abs() < 1e-9);
        let counted = |profile| Estimate::new(&model(4, "f32"), profile, &room(40)).unwrap().counted_tokens;
        assert_eq!((counted(Some(&profile)), counted(None)), (Some(50), None), "2 experts per token");
    }

    #[test]
    fn iq_types_reach_less_of_ram() {
        let share = |kind| Estimate::new(&model(4, kind), None, &room(40)).unwrap().ram_share;
        assert_eq!((share("q4_K"), share("iq2_xs")), (1.0, IQ_SHARE));
    }
}
