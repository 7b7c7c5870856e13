//! Filling a model's cache: plan, allocate, copy. Runs in a thread of its own while decoding goes on.

use super::fetch::{Ring, Wish};
use crate::cache::{LayerDemand, Plan, SlotRule, Slots, Spare, TensorBytes, gains_nothing, ranks, worth_of_ranks};
use crate::device::copy::{CopyEngine, PortableEngine};
use crate::device::cuda;
use crate::device::{Pool, padding};
use crate::ggml::{BufferType, Device, Level, Memory, log};
use crate::lanes::{pool_tensor, try_out};
use crate::moe::Shape;
use crate::options::Config;
use crate::profile::{RecordedLayer, RecordedProfile};
use crate::runtime::model::Model;
use crate::runtime::model::cache::ModelCache;
use crate::runtime::model::layer::{Layer, LayerCache, LayerState, Part, Sight};
use crate::runtime::model::policy::Learner;
use crate::units::{Bytes, Expert};
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Everything that filling one model's cache needs.
pub struct Fill {
    /// Whose cache.
    pub model: Arc<Model>,
    /// What the user asked for.
    pub config: Config,
    /// Contexts that compute with the model: each needs scratch memory on the device.
    pub n_contexts: usize,
    /// What is to be filled.
    pub cache: Arc<ModelCache>,
}

/// Why there is nothing to fill, in words for users.
type Reason = String;

/// The layers' caches in the order of the candidates; none for a layer without slots.
type Caches = Vec<Option<Arc<LayerCache>>>;

/// A layer that can be cached.
struct Candidate {
    layer: Arc<Layer>,
    number: u16,
    n_expert: u16,
    parts: Vec<Part>,
    demand: LayerDemand,
    /// Uses per call to expect of each expert, `[n_expert]`.
    worth: Vec<f32>,
    /// Who was resident when the profile was written.
    resident: Vec<Expert>,
}

impl Candidate {
    /// Bytes of one expert in all of its tensors.
    fn expert_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.shape.expert_bytes).sum()
    }
}

impl Fill {
    /// Does it all; whatever goes wrong costs the cache, no more.
    pub fn run(self) {
        self.fill_or_say_why();
        self.model.set_has_profile();
        self.cache.wishes.set_filled();
    }

    fn fill_or_say_why(&self) {
        // What a model that is being unloaded lacks is no news.
        if let Err(reason) = self.fill()
            && self.model.is_loaded()
        {
            log(Level::Warn, &format!("no hot cache: {reason}; experts run on the CPU"));
        }
    }

    fn fill(&self) -> Result<(), Reason> {
        let Some(path) = &self.config.hot_cache else { return Ok(()) };
        // What is in the file now may be what this process has saved since.
        let demand = match self.model.began_with() {
            Some(demand) => demand,
            None => {
                let demand = RecordedProfile::read(path).map_err(|error| error.to_string())?;
                self.check_model(&demand)?;
                self.model.begin_with(demand)
            }
        };
        self.model.set_has_profile();
        let (candidates, scratch) = self.candidates(demand)?;
        let expert_bytes = candidates.iter().map(|candidate| candidate.expert_bytes()).max().unwrap_or(0);
        // Before the plan: what it takes of the device is not there for experts.
        let (engine, _claim) = self.cache.device.measure(|| self.copy_engine(expert_bytes));
        let engine = match engine {
            Ok(engine) => engine,
            Err(error) => {
                self.cache.device.turn_off(&format!("nothing can be copied to it ({error})"));
                return Ok(());
            }
        };
        let n_contexts = u64::try_from(self.n_contexts.max(1)).unwrap_or(u64::MAX);
        let scratch = scratch.saturating_mul(n_contexts);
        let (plan, caches) = self.allocate(&candidates, scratch)?;
        self.announce(&candidates, &plan, scratch);
        for (candidate, cache) in candidates.iter().zip(&caches) {
            if let Some(cache) = cache {
                self.cache.add_layer(&candidate.layer);
                candidate.layer.give_cache(cache.clone());
            }
        }
        self.copy(engine, self.fills(&candidates, &plan), &caches);
        Ok(())
    }

    /// The launcher has compared profile and model where it could; here is what is really loaded.
    fn check_model(&self, demand: &RecordedProfile) -> Result<(), Reason> {
        let ours = self.model.id();
        match &demand.model {
            Some(theirs) if !theirs.is_same_model(&ours) => Err("the profile was recorded from another model".into()),
            _ => Ok(()),
        }
    }

    /// The layers that can be cached, and the scratch memory that one context needs. Says which cannot, and why.
    fn candidates(&self, demand: &RecordedProfile) -> Result<(Vec<Candidate>, Bytes), Reason> {
        let mut refused: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
        let (mut candidates, mut scratch) = (Vec::new(), 0);
        for layer in self.model.layers() {
            match self.candidate(&layer, demand) {
                Ok((candidate, bytes)) => {
                    scratch = scratch.max(bytes);
                    candidates.push(candidate);
                }
                Err(reason) => {
                    refused.entry(reason).or_default().insert(layer.counts.layer());
                }
            }
        }
        let tell = |(reason, layers): (&String, &BTreeSet<u32>)| {
            let layers: Vec<_> = layers.iter().map(u32::to_string).collect();
            format!("layers {}: {reason}", layers.join(", "))
        };
        let refused = refused.iter().map(tell).collect::<Vec<_>>().join("; ");
        if candidates.is_empty() {
            return Err(format!("no layer can be cached: {refused}"));
        }
        if !refused.is_empty() && self.model.is_loaded() {
            log(Level::Warn, &format!("not cached, on the CPU as before: {refused}"));
        }
        candidates.sort_by_key(|candidate| candidate.number);
        Ok((candidates, Bytes(scratch as u64)))
    }

    fn candidate(&self, layer: &Arc<Layer>, demand: &RecordedProfile) -> Result<(Candidate, usize), Reason> {
        let Sight { shape, parts, ffns, reason } = layer.sight();
        if let Shape::Partial(reason) = shape {
            return Err(reason.into());
        }
        if ffns.is_empty() || parts.is_empty() {
            return Err(reason.unwrap_or("its block was not seen whole").into());
        }
        let device = self.cache.device.device();
        let mut scratch = 0;
        for ffn in &ffns {
            let trial =
                try_out(device, ffn, self.config.max_hot_rows(ffn.n_used)).map_err(|error| error.to_string())?;
            if let Some(op) = trial.unsupported {
                return Err(format!("{} cannot compute {op}", device.name()));
            }
            scratch = scratch.max(trial.scratch_bytes);
        }
        let number = layer.counts.layer();
        let too_many = |_| format!("more than {} layers or experts", u16::MAX);
        let n_expert = u16::try_from(layer.counts.n_expert()).map_err(too_many)?;
        let recorded = demand.layers.get(&number);
        let counts = counts(recorded, n_expert)?;
        let demand = LayerDemand {
            layer: crate::units::Layer(u16::try_from(number).map_err(too_many)?),
            n_expert,
            n_used: u16::try_from(layer.n_used).map_err(too_many)?,
            tensors: self.tensor_bytes(&parts).map_err(|error| error.to_string())?,
            alignment: Bytes(self.kind().map_err(|error| error.to_string())?.alignment() as u64),
            spare: self.spare(),
            counts,
        };
        let expert_bytes = Bytes(layer.expert_bytes().unwrap_or(0));
        if gains_nothing(demand.n_used, n_expert, expert_bytes) {
            return Err(format!(
                "{} of only {n_expert} experts of {expert_bytes} per token, a cache gains nothing: keep whole layers on the GPU \
                 with --n-cpu-moe",
                demand.n_used
            ));
        }
        let (worth, resident) = learnt(recorded, &demand);
        Ok((
            Candidate { layer: layer.clone(), number: demand.layer.0, n_expert, parts, demand, worth, resident },
            scratch,
        ))
    }

    fn learns(&self) -> bool {
        self.config.learns()
    }

    fn spare(&self) -> Spare {
        if self.learns() { Spare::One } else { Spare::None }
    }

    /// All slots free, and what an earlier run has learnt.
    fn state(&self, candidate: &Candidate, n_slots: u16) -> LayerState {
        let Candidate { demand, worth, .. } = candidate;
        let learner = || {
            let n_spare = demand.spare.of(n_slots, demand.n_expert);
            let learner = Learner::new(worth, n_slots, n_spare, demand.n_used, self.config.update_rate);
            if self.config.test_free_copies { learner.with_free_copies() } else { learner }
        };
        LayerState { slots: Slots::new(demand.n_expert, n_slots), learner: self.learns().then(learner) }
    }

    fn kind(&self) -> Result<BufferType> {
        self.cache.device.device().buffer_type().ok_or(Error::Ggml("a buffer type of the device"))
    }

    fn tensor_bytes(&self, parts: &[Part]) -> Result<Vec<TensorBytes>> {
        let kind = self.kind()?;
        let bytes = |part: &Part| {
            Ok(TensorBytes {
                per_expert: Bytes(part.shape.expert_bytes as u64),
                padding: Bytes(padding(&pool_tensor(&part.shape), kind)? as u64),
            })
        };
        parts.iter().map(bytes).collect()
    }

    /// Plans and allocates; where the device gives less than planned, again with half of the budget.
    fn allocate(&self, candidates: &[Candidate], scratch: Bytes) -> Result<(Plan, Caches), Reason> {
        let name = self.cache.device.device().name();
        let rule = self
            .config
            .test_slots
            .map_or(SlotRule::AtLeastAThird, |slots| SlotRule::Exactly(u16::try_from(slots).unwrap_or(u16::MAX)));
        let demands: Vec<_> = candidates.iter().map(|candidate| candidate.demand.clone()).collect();
        let mut budget = self.cache.device.available().saturating_sub(scratch);
        let mut failed = String::new();
        loop {
            let plan = Plan::new(&demands, budget, rule)
                .map_err(|refusal| format!("{failed}{} on {name}", refusal.beside(scratch)))?;
            if plan.slots_per_layer == 0 && self.config.test_slots != Some(0) {
                return Err(format!("{failed}{budget} hold no expert of every layer on {name}"));
            }
            if let Some(caches) = self.try_allocate(candidates, &plan, scratch).map_err(|error| error.to_string())? {
                return Ok((plan, caches));
            }
            failed = format!("{name} had no room for {}; then: ", plan.bytes);
            budget = Bytes(plan.bytes.0.min(budget.0) / 2);
        }
    }

    /// All layers' pools, or nothing. Sees to it that contexts find room for their scratch memory.
    fn try_allocate(&self, candidates: &[Candidate], plan: &Plan, scratch: Bytes) -> Result<Option<Caches>> {
        let kind = self.kind()?;
        let scratch_size = usize::try_from(scratch.0).unwrap_or(usize::MAX);
        let Some(_room) = self.cache.device.allocate(scratch, || Memory::allocate(kind, scratch_size)) else {
            return Ok(None);
        };
        let mut caches = Vec::with_capacity(candidates.len());
        for (candidate, layer) in candidates.iter().zip(&plan.layers) {
            if layer.slots == 0 {
                caches.push(None);
                continue;
            }
            let shapes: Vec<_> = candidate.parts.iter().map(|part| pool_tensor(&part.shape)).collect();
            let mut error = None;
            let made = self.cache.device.allocate(layer.bytes, || {
                Pool::allocate(kind, &shapes, layer.slots).unwrap_or_else(|e| {
                    error = Some(e);
                    None
                })
            });
            if let Some(error) = error {
                return Err(error);
            }
            let Some((pool, claim)) = made else { return Ok(None) };
            let (parts, state) = (candidate.parts.clone(), self.state(candidate, layer.slots));
            let cache = LayerCache::new(pool.keeping(claim), self.cache.clone(), parts, state)?;
            caches.push(Some(Arc::new(cache)));
        }
        Ok(Some(caches))
    }

    fn announce(&self, candidates: &[Candidate], plan: &Plan, scratch: Bytes) {
        let name = self.cache.device.device().name();
        let (bytes, slots) = (plan.bytes.saturating_add(scratch), plan.slots_per_layer);
        let n_expert = candidates.iter().map(|candidate| candidate.n_expert).max().unwrap_or(0);
        let expected = match plan.expected_hit_rate {
            Some(rate) => format!("the profile expects {:.1} % hits", 100.0 * rate),
            None => "the profile has no counts for these layers".into(),
        };
        let layers = candidates.len();
        log(
            Level::Warn,
            &format!(
                "hot cache on {name}: {} MiB, {slots} slots per layer ({n_expert} experts) in {layers} layers; {expected}",
                bytes.mib_up()
            ),
        );
    }

    /// Who comes first: in a cache that learns, those that it held at its last end; then the plan's, hottest first.
    fn fills(&self, candidates: &[Candidate], plan: &Plan) -> Vec<(usize, Expert)> {
        let mut fills = Vec::with_capacity(plan.fills.len());
        let mut room: Vec<usize> = Vec::with_capacity(candidates.len());
        for (candidate, layer) in candidates.iter().zip(&plan.layers) {
            let demand = &candidate.demand;
            room.push((layer.slots - demand.spare.of(layer.slots, demand.n_expert)).into());
        }
        let was_resident = candidates.iter().enumerate().flat_map(|(index, candidate)| {
            candidate.resident.iter().filter(|_| self.learns()).map(move |&expert| (index, expert))
        });
        for (index, expert) in was_resident.chain(plan.fills.iter().copied()) {
            if room[index] > 0 && !fills.contains(&(index, expert)) {
                room[index] -= 1;
                fills.push((index, expert));
            }
        }
        if self.learns() {
            let worth = |&(index, expert): &(usize, Expert)| candidates[index].worth[usize::from(expert.0)];
            fills.sort_by(|a, b| worth(b).total_cmp(&worth(a)));
        }
        fills
    }

    /// Copies these experts, in their order. Each serves from the moment it is complete. Then goes on with wishes.
    fn copy(&self, engine: Box<dyn CopyEngine>, fills: Vec<(usize, Expert)>, caches: &Caches) {
        if caches.iter().all(Option::is_none) || (fills.is_empty() && !self.learns()) {
            return;
        }
        let wish = |(index, expert): (usize, Expert)| {
            Some(Wish { cache: caches.get(index)?.clone()?, expert, victim: None, wished_at: None })
        };
        let mut ring = Ring::new(engine, self.cache.clone());
        ring.carry_out(fills.into_iter().filter_map(wish).collect());
        if self.learns() {
            self.cache.wishes.forget();
            self.cache.wishes.set_filled();
            ring.serve();
        }
    }

    fn copy_engine(&self, expert_bytes: usize) -> Result<Box<dyn CopyEngine>> {
        copy_engine(self.cache.device.device(), expert_bytes, !self.config.no_host)
    }
}

/// The fastest that there is for the device.
fn copy_engine(device: Device, expert_bytes: usize, pinned: bool) -> Result<Box<dyn CopyEngine>> {
    match cuda::engine_for(device, expert_bytes, pinned) {
        Some(Ok(engine)) => return Ok(engine),
        Some(Err(error)) => log(Level::Warn, &format!("{error}; copies to {} go through ggml", device.name())),
        None => {}
    }
    Ok(Box::new(PortableEngine::new(device, expert_bytes, pinned)?))
}

/// A layer's requests by expert, `[n_expert]`; `None` if the profile lacks the layer.
fn counts(recorded: Option<&RecordedLayer>, n_expert: u16) -> Result<Option<Vec<u64>>, Reason> {
    let Some(recorded) = recorded else { return Ok(None) };
    if let Some(other) = recorded.n_expert.filter(|&other| other != u32::from(n_expert)) {
        return Err(format!("the profile is of a model with {other} experts per layer, this one has {n_expert}"));
    }
    let mut counts = vec![0; n_expert.into()];
    for &(expert, count) in &recorded.requests {
        let place = usize::try_from(expert).ok().and_then(|expert| counts.get_mut(expert));
        *place.ok_or_else(|| format!("the profile counts expert {expert}, this model has {n_expert} per layer"))? =
            count;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::copy::testing::{Subject, healthy, test_of};
    use crate::device::cuda::tests::{FakeDriver, with_library};
    use crate::ggml::test_devices::{logged, register_cuda_lookalike};

    #[test]
    fn cuda_devices_get_cudas_engine() {
        FakeDriver::with(|driver| {
            let device = register_cuda_lookalike();
            let make = |bytes: usize, _| copy_engine(device, bytes, true).unwrap();
            healthy(&Subject { make: &make, device });
            assert!((1..u64::MAX).contains(&driver.stat("cuMemcpyHtoDAsync_v2")));
            assert_eq!(logged(), [""; 0]);
        });
    }

    #[test]
    fn where_the_driver_is_of_no_use_copies_go_through_ggml_and_one_line_says_so() {
        let test = || {
            let device = register_cuda_lookalike();
            let engine = copy_engine(device, 1 << 20, true).unwrap();
            assert_eq!(
                logged(),
                ["moe-hot: CUDA: loading libcuda.so: it has no cuInit; copies to CUDA0 go through ggml\n"]
            );
            drop(engine);
            let make = |bytes: usize, _| copy_engine(device, bytes, true).unwrap();
            healthy(&Subject { make: &make, device });
        };
        with_library("libggml_fake.so", test_of(&test), test);
    }
}
