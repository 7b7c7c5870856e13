//! Which layers of a model can be cached, and what is known of each before a plan is made.

use crate::cache::{LayerDemand, Spare, TensorBytes, gains_nothing, ranks, worth_of_ranks};
use crate::device::padding;
use crate::ggml::{BufferType, Device, Level, log};
use crate::lanes::{pool_tensor, try_out};
use crate::moe::Shape;
use crate::options::Config;
use crate::profile::{RecordedLayer, RecordedProfile};
use crate::runtime::model::Model;
use crate::runtime::model::expert_tensor::ExpertTensor;
use crate::runtime::model::layer::{Layer, LayerInfo};
use crate::units::{self, Bytes, Expert};
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Why a layer is not cached, in words for users.
#[derive(Debug, thiserror::Error)]
pub enum NotCached {
    /// Its block is not one that can be computed in two lanes.
    #[error("{0}")]
    Block(&'static str),
    /// The device lacks an operation.
    #[error("{device} cannot compute {operation}")]
    Operation {
        /// The device.
        device: String,
        /// The operation.
        operation: String,
    },
    /// Numbers that we do not handle.
    #[error("more than {} layers or experts", u16::MAX)]
    TooMany,
    /// The profile says that the layer has another number of experts.
    #[error("the profile is of a model with {theirs} experts per layer, this one has {ours}")]
    OtherExperts {
        /// In the profile.
        theirs: u32,
        /// In the model.
        ours: u16,
    },
    /// The profile counts an expert that the layer does not have.
    #[error("the profile counts expert {expert}, this model has {n_expert} per layer")]
    UnknownExpert {
        /// In the profile.
        expert: u32,
        /// In the model.
        n_expert: u16,
    },
    /// Few large experts.
    #[error(
        "{n_used} of only {n_expert} experts of {bytes} per token, a cache gains nothing: keep whole layers on the GPU \
         with --n-cpu-moe"
    )]
    GainsNothing {
        /// Experts per token.
        n_used: u16,
        /// Experts.
        n_expert: u16,
        /// Of one expert.
        bytes: Bytes,
    },
    /// ggml refused something.
    #[error(transparent)]
    Failed(#[from] Error),
}

/// A layer that can be cached.
pub struct Candidate {
    /// The layer.
    pub layer: Arc<Layer>,
    /// Its expert tensors.
    pub tensors: Vec<ExpertTensor>,
    /// What a plan must know of it.
    pub demand: LayerDemand,
    /// Uses per call to expect of each expert, `[n_expert]`.
    pub worth: Vec<f32>,
    /// Experts that were resident when the profile was written.
    pub resident: Vec<Expert>,
    /// Scratch memory that one context needs on the device to compute it.
    pub scratch: Bytes,
}

impl Candidate {
    /// Bytes of one expert in all of its tensors.
    pub fn expert_bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.shape.expert_bytes).sum()
    }
}

/// The layers of a model, each that can be cached and why the others cannot.
pub struct Candidates {
    /// By layer number.
    pub layers: Vec<Candidate>,
    /// The others, by reason.
    refused: BTreeMap<String, BTreeSet<u32>>,
}

impl Candidates {
    /// Looks at every layer of `model`.
    pub fn of(model: &Model, profile: &RecordedProfile, device: Device, config: &Config) -> Result<Self> {
        let kind = device.buffer_type().ok_or(Error::Ggml("a buffer type of the device"))?;
        let (mut layers, mut refused) = (Vec::new(), BTreeMap::<String, BTreeSet<u32>>::new());
        for layer in model.layers() {
            let number = layer.counts.layer();
            match candidate(&layer, profile.layers.get(&number), device, kind, config) {
                Ok(candidate) => layers.push(candidate),
                Err(reason) => {
                    refused.entry(reason.to_string()).or_default().insert(number);
                }
            }
        }
        layers.sort_by_key(|candidate| candidate.demand.layer);
        Ok(Self { layers, refused })
    }

    /// Why which layers cannot be cached; empty if all can.
    pub fn refusals(&self) -> String {
        let tell = |(reason, layers): (&String, &BTreeSet<u32>)| {
            let layers: Vec<_> = layers.iter().map(u32::to_string).collect();
            format!("layers {}: {reason}", layers.join(", "))
        };
        self.refused.iter().map(tell).collect::<Vec<_>>().join("; ")
    }

    /// Says which layers are not cached, if any.
    pub fn tell_refusals(&self) {
        if !self.refused.is_empty() {
            log(Level::Warn, &format!("not cached, on the CPU as before: {}", self.refusals()));
        }
    }

    /// Scratch memory that one context needs.
    pub fn scratch(&self) -> Bytes {
        self.layers.iter().map(|candidate| candidate.scratch).max().unwrap_or_default()
    }

    /// Bytes of the largest expert.
    pub fn expert_bytes(&self) -> usize {
        self.layers.iter().map(Candidate::expert_bytes).max().unwrap_or(0)
    }

    /// Experts of the largest layer.
    pub fn n_expert(&self) -> u16 {
        self.layers.iter().map(|candidate| candidate.demand.n_expert).max().unwrap_or(0)
    }
}

fn candidate(
    layer: &Arc<Layer>,
    recorded: Option<&RecordedLayer>,
    device: Device,
    kind: BufferType,
    config: &Config,
) -> Result<Candidate, NotCached> {
    let LayerInfo { shape, tensors, templates, reason } = layer.info();
    if let Shape::Partial(reason) = shape {
        return Err(NotCached::Block(reason));
    }
    if templates.is_empty() || tensors.is_empty() {
        return Err(NotCached::Block(reason.unwrap_or("its block was not seen whole")));
    }
    let mut scratch = 0;
    for template in &templates {
        let trial = try_out(device, template, config.max_hot_rows(template.n_used))?;
        if let Some(operation) = trial.unsupported {
            return Err(NotCached::Operation { device: device.name().into_owned(), operation });
        }
        scratch = scratch.max(trial.scratch_bytes);
    }
    let number = |n: u32| u16::try_from(n).map_err(|_| NotCached::TooMany);
    let (n_expert, n_used) = (number(layer.counts.n_expert())?, number(layer.n_used)?);
    let demand = LayerDemand {
        layer: units::Layer(number(layer.counts.layer())?),
        n_expert,
        n_used,
        tensors: tensor_bytes(&tensors, kind)?,
        alignment: Bytes(kind.alignment() as u64),
        spare: if config.learns() { Spare::One } else { Spare::None },
        counts: counts(recorded, n_expert)?,
    };
    let bytes = Bytes(layer.expert_bytes().unwrap_or(0));
    if gains_nothing(n_used, n_expert, bytes) {
        return Err(NotCached::GainsNothing { n_used, n_expert, bytes });
    }
    let (worth, resident) = learnt(recorded, &demand);
    Ok(Candidate { layer: layer.clone(), tensors, demand, worth, resident, scratch: Bytes(scratch as u64) })
}

fn tensor_bytes(tensors: &[ExpertTensor], kind: BufferType) -> Result<Vec<TensorBytes>> {
    let bytes = |tensor: &ExpertTensor| {
        let per_expert = Bytes(tensor.shape.expert_bytes as u64);
        Ok(TensorBytes { per_expert, padding: Bytes(padding(&pool_tensor(&tensor.shape), kind)? as u64) })
    };
    tensors.iter().map(bytes).collect()
}

/// A layer's requests by expert, `[n_expert]`; `None` if the profile lacks the layer.
fn counts(recorded: Option<&RecordedLayer>, n_expert: u16) -> Result<Option<Vec<u64>>, NotCached> {
    let Some(recorded) = recorded else { return Ok(None) };
    if let Some(theirs) = recorded.n_expert.filter(|&theirs| theirs != u32::from(n_expert)) {
        return Err(NotCached::OtherExperts { theirs, ours: n_expert });
    }
    let mut counts = vec![0; n_expert.into()];
    for &(expert, count) in &recorded.requests {
        let place = usize::try_from(expert).ok().and_then(|expert| counts.get_mut(expert));
        *place.ok_or(NotCached::UnknownExpert { expert, n_expert })? = count;
    }
    Ok(Some(counts))
}

/// What an earlier run has learnt: the worth of each expert, by its ranks or else by its counts, and who was resident.
fn learnt(recorded: Option<&RecordedLayer>, demand: &LayerDemand) -> (Vec<f32>, Vec<Expert>) {
    let mut by_rank = vec![0; demand.n_expert.into()];
    let Some(recorded) = recorded else { return (worth_of_ranks(&by_rank, demand.n_used), Vec::new()) };
    for &(expert, rank) in &recorded.ranks {
        let place = usize::try_from(expert).ok().and_then(|expert| by_rank.get_mut(expert));
        if let (Some(place), Ok(rank)) = (place, u16::try_from(rank)) {
            *place = rank;
        }
    }
    if recorded.ranks.is_empty() {
        let counts: Vec<f32> = demand.counts.iter().flatten().map(|&count| count as f32).collect();
        by_rank = ranks(&counts);
    }
    let resident = recorded.resident.iter().filter_map(|&id| u16::try_from(id).ok()).filter(|&id| id < demand.n_expert);
    (worth_of_ranks(&by_rank, demand.n_used), resident.map(Expert).collect())
}
