//! Filling a model's cache: from a profile and free memory to pools and a list of copies.
//!
//! Steps, each of which can end it: read the profile, find the layers that can be cached, make a copy engine, plan, allocate
//! (again with less where the device gives less than planned), give each layer its cache.

use super::Cached;
use super::candidates::{Candidate, Candidates};
use super::fetcher::Fetcher;
use super::warm_up::WarmUp;
use crate::cache::{Admission, LayerPlan, Plan, PlanError, SlotRule, Slots};
use crate::device::Pool;
use crate::device::copy::{CopyEngine, PortableEngine};
use crate::device::cuda;
use crate::ggml::{Device, Level, log};
use crate::lanes::pool_tensor;
use crate::options::{CacheProfile, Config};
use crate::profile::other_quantisation;
use crate::runtime::model::cache_handle::CacheHandle;
use crate::runtime::model::fetch_queue::Fetch;
use crate::runtime::model::layer_cache::{LayerCache, LayerState};
use crate::runtime::model::policy::LayerPolicy;
use crate::runtime::model::{Model, UnusableProfile};
use crate::units::{Bytes, Expert};
use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::Arc;

/// Why there is no cache, in words for users.
#[derive(Debug, thiserror::Error)]
pub enum NoCache {
    /// The profile cannot serve.
    #[error(transparent)]
    Profile(#[from] UnusableProfile),
    /// No layer can be cached.
    #[error("no layer can be cached: {0}")]
    NoLayer(String),
    /// There is no plan for the memory that there is.
    #[error("{before}{reason} on {device}")]
    NoPlan {
        /// What was tried before.
        before: Before,
        /// Why there is none.
        reason: PlanError,
        /// The device.
        device: String,
    },
    /// The memory holds no expert of every layer.
    #[error("{before}{budget} hold no expert of every layer on {device}")]
    NoSlots {
        /// What was tried before.
        before: Before,
        /// What may be taken.
        budget: Bytes,
        /// The device.
        device: String,
    },
    /// The memory does not even hold what contexts compute in.
    #[error("no room on {device} for the contexts' scratch memory ({available} may be taken)")]
    NoScratch {
        /// What may be taken.
        available: Bytes,
        /// The device.
        device: String,
    },
    /// ggml refused something.
    #[error(transparent)]
    Failed(#[from] Error),
}

/// A plan that the device had no room for, told in front of what came of the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Before(Option<(String, Bytes)>);

impl std::fmt::Display for Before {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Some((device, bytes)) => write!(f, "{device} had no room for {bytes}; then: "),
            None => Ok(()),
        }
    }
}

/// One fill of a model's cache.
pub struct Fill<'a> {
    model: &'a Arc<Model>,
    cache: &'a Arc<CacheHandle>,
    config: &'a Config,
}

/// The layers' caches in the order of the plan; none for a layer without slots.
type LayerCaches = Vec<Option<Arc<LayerCache>>>;

/// What serves a filled cache.
pub struct Filled {
    /// Makes copies.
    pub fetcher: Fetcher,
    /// Those to begin with.
    pub fetches: VecDeque<Fetch>,
    /// Makes contexts' lanes ready.
    pub warm_up: WarmUp,
}

impl<'a> Fill<'a> {
    /// A fill of `cache`.
    pub fn new(model: &'a Arc<Model>, cache: &'a Arc<CacheHandle>, config: &'a Config) -> Self {
        Self { model, cache, config }
    }

    /// Allocates everything and gives the layers their caches, empty yet.
    ///
    /// `None` if there is nothing to fill, or the device has failed (which has been said then).
    pub fn run(&self) -> Result<Option<Filled>, NoCache> {
        let profile = self.model.begin(self.config)?;
        let candidates = Candidates::of(self.model, &profile, self.device(), self.config)?;
        if candidates.layers.is_empty() {
            return Err(NoCache::NoLayer(candidates.refusals()));
        }
        if self.model.is_loaded() {
            candidates.tell_refusals();
        }
        // Before the plan: what the engine takes of the device is not there for experts.
        let engine = match self.copy_engine(candidates.expert_bytes()) {
            Ok(engine) => engine,
            Err(error) => {
                self.cache.device.turn_off(&format!("nothing can be copied to it ({error})"));
                return Ok(None);
            }
        };
        let memory = self.cache.device.memory();
        let planning = memory.begin_planning();
        let available = memory.plan();
        let warm_up = WarmUp::new(self.model.clone(), self.cache.clone(), candidates.scratch(), self.config);
        // Contexts first: without scratch memory for them the experts would be of no use.
        let no_scratch = || NoCache::NoScratch { available, device: self.device().name().into_owned() };
        let mut warm_up = warm_up.ok_or_else(no_scratch)?;
        let scratch = warm_up.bytes();
        let make_lanes = || match warm_up.make_lanes() {
            Ok(true) => Ok(true),
            Ok(false) => Err(no_scratch()),
            Err(error) => {
                self.cache.device.turn_off(&error.to_string());
                Ok(false)
            }
        };
        let Some((plan, layers)) = self.allocate(&candidates.layers, (available, scratch), make_lanes)? else {
            return Ok(None);
        };
        drop(planning);
        self.model.refill().settle();
        self.announce(&candidates, &plan, scratch);
        let fetches = self.fetches(&candidates.layers, &plan);
        let mut cached = Vec::with_capacity(layers.len());
        for (cache, candidate) in layers.into_iter().zip(candidates.layers) {
            let Some(cache) = cache else {
                cached.push(None);
                continue;
            };
            if !candidate.layer.give_cache(&cache) {
                // An adapter has gone meanwhile, or the model: what belongs in the cache has changed.
                self.cache.end_for_refill();
                return Ok(None);
            }
            cached.push(Some(Cached { layer: candidate.layer, cache }));
        }
        let fetcher = Fetcher::new(engine, self.cache.clone(), cached);
        Ok(Some(Filled { fetcher, fetches, warm_up }))
    }

    fn device(&self) -> Device {
        self.cache.device.device()
    }

    fn copy_engine(&self, expert_bytes: usize) -> Result<Box<dyn CopyEngine>> {
        copy_engine(self.device(), expert_bytes, !self.config.no_host)
    }

    /// Plans and allocates; where the device gives less than planned, again with half of the budget. No cache for a layer
    /// without slots. `before_pools` is done once there is a plan; `None` if it says no.
    fn allocate(
        &self,
        candidates: &[Candidate],
        (available, scratch): (Bytes, Bytes),
        mut before_pools: impl FnMut() -> Result<bool, NoCache>,
    ) -> Result<Option<(Plan, LayerCaches)>, NoCache> {
        let device = || self.device().name().into_owned();
        let rule = match self.config.test_slots {
            Some(slots) => SlotRule::Exactly(u16::try_from(slots).unwrap_or(u16::MAX)),
            None => SlotRule::AtLeastAThird,
        };
        let demands: Vec<_> = candidates.iter().map(|candidate| candidate.demand.clone()).collect();
        let mut budget = available.saturating_sub(scratch);
        let mut before = Before::default();
        loop {
            let plan = match Plan::new(&demands, budget, rule) {
                Ok(plan) => plan,
                Err(reason) => {
                    return Err(NoCache::NoPlan { before, reason: reason.beside(scratch), device: device() });
                }
            };
            if plan.slots_per_layer == 0 && self.config.test_slots != Some(0) {
                return Err(NoCache::NoSlots { before, budget, device: device() });
            }
            if !before_pools()? {
                return Ok(None);
            }
            if let Some(layers) = self.try_allocate(candidates, &plan)? {
                return Ok(Some((plan, layers)));
            }
            before = Before(Some((device(), plan.bytes)));
            budget = Bytes(plan.bytes.0.min(budget.0) / 2).min(self.cache.device.memory().plan());
        }
    }

    /// All layers' pools, or nothing.
    fn try_allocate(&self, candidates: &[Candidate], plan: &Plan) -> Result<Option<LayerCaches>> {
        let memory = self.cache.device.memory();
        let kind = self.device().buffer_type().ok_or(Error::Ggml("a buffer type of the device"))?;
        let mut layers = Vec::with_capacity(candidates.len());
        for (index, (candidate, layer)) in candidates.iter().zip(&plan.layers).enumerate() {
            if layer.slots == 0 {
                layers.push(None);
                continue;
            }
            let shapes: Vec<_> = candidate.tensors.iter().map(|tensor| pool_tensor(&tensor.shape)).collect();
            let made = memory.allocate(layer.bytes, || Pool::allocate(kind, &shapes, layer.slots).transpose());
            let Some((pool, reservation)) = made else { return Ok(None) };
            let pool = pool?.keeping(reservation);
            let (tensors, state) = (candidate.tensors.clone(), self.state(candidate, layer));
            layers.push(Some(Arc::new(LayerCache::new(pool, self.cache.clone(), index, tensors, state)?)));
        }
        Ok(Some(layers))
    }

    /// All slots free, and what an earlier run has learnt.
    fn state(&self, candidate: &Candidate, layer: &LayerPlan) -> LayerState {
        let Candidate { demand, worth, .. } = candidate;
        let policy = || {
            let n_spare = demand.spare.of(layer.slots, demand.n_expert);
            let policy = LayerPolicy::new(worth, layer.slots, n_spare, demand.n_used, self.config.update_rate);
            if self.config.test_free_copies { policy.with_free_copies() } else { policy }
        };
        LayerState { slots: Slots::new(demand.n_expert, layer.slots), policy: self.config.learns().then(policy) }
    }

    fn announce(&self, candidates: &Candidates, plan: &Plan, scratch: Bytes) {
        let name = self.device().name();
        let (mib, slots) = (plan.bytes.saturating_add(scratch).mib_up(), plan.slots_per_layer);
        let (n_expert, layers) = (candidates.n_expert(), candidates.layers.len());
        let is_cold = self.model.starting().get().is_none();
        let expected = match plan.expected_hit_rate {
            Some(rate) => format!("the profile expects {:.1} % hits", 100.0 * rate),
            None if is_cold => "nothing is learnt yet".into(),
            None => "the profile has no counts for these layers".into(),
        };
        let file = self.model.profile_file(self.config);
        if let (Some(path), true) = (file, self.model.starting().must_tell_other_quantisation())
            && !self.config.said_quantisation
        {
            log(Level::Warn, &other_quantisation(path, self.config.learns()));
        }
        let kept = match (file, &self.config.hot_cache) {
            (Some(path), Some(CacheProfile::Auto)) => format!("; profile: {}", path.display()),
            _ => String::new(),
        };
        let size = format!("{mib} MiB, {slots} slots per layer ({n_expert} experts) in {layers} layers");
        self.cache.log(Level::Warn, &format!("hot cache on {name}: {size}; {expected}{kept}"));
    }

    /// The copies to begin with, in their order: in a cache that learns first the experts that it held at its last end, then
    /// the plan's; those that are worth most come first.
    fn fetches(&self, candidates: &[Candidate], plan: &Plan) -> VecDeque<Fetch> {
        let mut room: Vec<usize> = Vec::with_capacity(candidates.len());
        for (candidate, layer) in candidates.iter().zip(&plan.layers) {
            let demand = &candidate.demand;
            room.push((layer.slots - demand.spare.of(layer.slots, demand.n_expert)).into());
        }
        let learns = self.config.learns();
        let was_resident = candidates
            .iter()
            .enumerate()
            .filter(|_| learns)
            .flat_map(|(index, candidate)| candidate.resident.iter().map(move |&expert| (index, expert)));
        let mut fills: Vec<(usize, Expert)> = Vec::with_capacity(plan.fills.len());
        for (index, expert) in was_resident.chain(plan.fills.iter().copied()) {
            if room[index] > 0 && !fills.contains(&(index, expert)) {
                room[index] -= 1;
                fills.push((index, expert));
            }
        }
        if learns {
            let worth = |&(index, expert): &(usize, Expert)| candidates[index].worth[usize::from(expert.0)];
            fills.sort_by(|a, b| worth(b).total_cmp(&worth(a)));
        }
        let fetch = |(layer, admit)| Fetch { layer, admission: Admission { admit, evict: None }, decided_at: None };
        fills.into_iter().map(fetch).collect()
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
