//! One model: its layers, what identifies it, and the handles to its cache.
//!
//! A model is the set of our buffers that occur together in one context's graphs.

pub mod cache_handle;
pub mod copied;
pub mod expert_tensor;
pub mod fetch_queue;
pub mod kept_profile;
pub mod lane_cell;
pub mod lane_request;
pub mod layer;
pub mod layer_cache;
pub mod name;
pub mod policy;
pub mod refill;

use crate::Error;
use crate::files::is_same_file;
use crate::ggml::{Level, Tensor};
use crate::gguf::ModelFile;
use crate::options::{CacheProfile, Config};
use crate::profile::{
    Counts, ExpertShape, ModelId, ModelMismatchError, ModelShape, RecordedProfile, TensorId, combine_fingerprints,
    fingerprint_in_file,
};
use crate::units::layer_number;
use copied::Copied;
use expert_tensor::WeightKey;
use lane_cell::LaneCell;
use lane_request::LaneRequest;
use layer::Layer;
use name::{ModelName, first_part};
use refill::Refill;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// One model's layers and identity.
#[derive(Default)]
pub struct Model {
    inner: Mutex<Inner>,
    /// When its cache is to be filled.
    refill: Arc<Refill>,
    starting: StartingProfile,
    /// The file that its weights are mapped from, where they are.
    file: OnceLock<PathBuf>,
    /// Where its own profile is kept, once that has been looked for; `None` in it: nowhere.
    kept_at: OnceLock<Option<PathBuf>>,
    name: Arc<ModelName>,
    copied: Arc<Copied>,
    contexts: Mutex<Contexts>,
}

/// The contexts that compute with a model.
#[derive(Default)]
struct Contexts {
    cells: Vec<Weak<LaneCell>>,
    requests: VecDeque<LaneRequest>,
}

/// The profile that a model's cache begins with. Whoever needs it first reads it: the thread that fills the cache, or the one
/// that is about to save to the same file.
///
/// The user may put another in its place.
#[derive(Default)]
pub struct StartingProfile {
    known: Mutex<Known>,
    said_other_quantisation: AtomicBool,
}

#[derive(Default)]
struct Known {
    /// What the next fill begins with.
    current: Option<Starting>,
    /// What the file held, or was given since: what is learnt is added to this, and goes into the file.
    in_file: Option<Starting>,
}

#[derive(Clone)]
struct Starting {
    profile: Arc<RecordedProfile>,
    is_other_quantisation: bool,
}

/// A profile to begin with that cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum UnusableProfile {
    /// It was recorded from another model.
    #[error("the profile was recorded from another model than this one: {0}")]
    OtherModel(ModelMismatchError),
    /// It cannot be read.
    #[error(transparent)]
    Unreadable(#[from] Error),
}

impl StartingProfile {
    fn read(&self, path: &Path, model: &Model) -> Result<Arc<RecordedProfile>, UnusableProfile> {
        if let Some(profile) = self.get() {
            return Ok(profile);
        }
        let profile = Arc::new(RecordedProfile::read(path)?);
        // The launcher has compared profile and model where it could; here is what is really loaded.
        let is_other_quantisation = model.is_other_quantisation(&profile).map_err(UnusableProfile::OtherModel)?;
        Ok(self.begin(profile, is_other_quantisation))
    }

    /// Begins with what the file holds, unless there is something to begin with. Returns what it is then.
    fn begin(&self, profile: Arc<RecordedProfile>, is_other_quantisation: bool) -> Arc<RecordedProfile> {
        let mut known = self.lock();
        let starting = Starting { profile, is_other_quantisation };
        known.in_file.get_or_insert_with(|| starting.clone());
        known.current.get_or_insert(starting).profile.clone()
    }

    /// The profile, if one was read.
    pub fn get(&self) -> Option<Arc<RecordedProfile>> {
        self.lock().current.as_ref().map(|starting| starting.profile.clone())
    }

    /// The profile that the file holds, as of the start or of the last one that the user has put there, and whether it is of
    /// another quantisation of the model.
    pub fn in_file(&self) -> Option<(Arc<RecordedProfile>, bool)> {
        self.lock().in_file.as_ref().map(|starting| (starting.profile.clone(), starting.is_other_quantisation))
    }

    /// Whether it is of another quantisation of the model, which nobody has been told yet.
    pub fn must_tell_other_quantisation(&self) -> bool {
        let is_other = self.lock().current.as_ref().is_some_and(|starting| starting.is_other_quantisation);
        is_other && !self.said_other_quantisation.swap(true, Relaxed)
    }

    /// Puts another in its place: the next fill begins with it. `is_in_file`: the file holds it too.
    pub fn replace(&self, profile: Arc<RecordedProfile>, is_other_quantisation: bool, is_in_file: bool) {
        let mut known = self.lock();
        let starting = Starting { profile, is_other_quantisation };
        if is_in_file {
            known.in_file = Some(starting.clone());
        }
        known.current = Some(starting);
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An expert tensor that has appeared.
#[derive(Clone, Debug)]
pub struct KnownTensor {
    /// Layer number.
    pub layer: u32,
    /// 16 hex digits.
    pub fingerprint: String,
    /// `[n_in, n_out, n_expert]`.
    pub shape: ExpertShape,
}

/// Expert tensors by name.
pub type Tensors = BTreeMap<String, KnownTensor>;

#[derive(Default)]
struct Inner {
    layers: Vec<Arc<Layer>>,
    /// Layers of the weights in live memory.
    by_weights: HashMap<WeightKey, Arc<Layer>>,
    /// Every expert tensor that has appeared.
    tensors: Tensors,
}

impl Model {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any of its weights are in memory.
    pub fn is_loaded(&self) -> bool {
        !self.inner().by_weights.is_empty()
    }

    /// Whether these very weights (name and content) are its own.
    pub fn knows(&self, weights: Tensor<'_>) -> bool {
        self.inner().tensors.get(&*weights.name()).is_some_and(|known| known.fingerprint == fingerprint(weights))
    }

    /// The layer of `weights` `[n_in, n_out, n_expert]` in the buffer with this address; made when new.
    pub fn layer_of(&self, buffer: usize, weights: Tensor<'_>, n_used: u32) -> Arc<Layer> {
        let key = (buffer, weights.address());
        let mut inner = self.inner();
        if let Some(layer) = inner.by_weights.get(&key) {
            return layer.clone();
        }
        let name = weights.name().into_owned();
        let number = layer_number(&name).unwrap_or_else(|| inner.next_number());
        let n_layers = inner.layers.len();
        let layer = inner.find_or_add(number, weights, n_used);
        let is_new = inner.layers.len() > n_layers;
        inner.by_weights.insert(key, layer.clone());
        let shape = [0, 1, 2].map(|dim| weights.ne(dim));
        inner.tensors.insert(name, KnownTensor { layer: number, fingerprint: fingerprint(weights), shape });
        drop(inner);
        if is_new && !self.refill.is_wanted() {
            self.plan_again();
        }
        layer
    }

    /// Has the cache filled anew: a layer has come that it was not planned for. While prompts are computed only the last layer's
    /// experts may be asked for.
    fn plan_again(&self) {
        match self.layers().iter().find_map(|layer| layer.cache()) {
            Some(cache) => cache.handle.end_for_refill(),
            None => self.refill.want(),
        }
    }

    /// Forgets the weights of one buffer and what was copied from it; counts are kept.
    pub fn forget_buffer(&self, buffer: usize) {
        let layers = {
            let mut inner = self.inner();
            inner.by_weights.retain(|(owner, _), _| *owner != buffer);
            inner.layers.clone()
        };
        let lost: Vec<_> = layers.iter().filter_map(|layer| layer.forget_buffer(buffer)).collect();
        if let Some(cache) = lost.first() {
            // An adapter has gone, or the model, which may be loaded again, elsewhere in memory.
            cache.handle.end_for_refill();
        }
        if !self.is_loaded() {
            // Also where the cache was over already.
            self.refill.want();
        }
    }

    /// When its cache is to be filled.
    pub fn refill(&self) -> &Arc<Refill> {
        &self.refill
    }

    /// What lines call it.
    pub fn name(&self) -> &Arc<ModelName> {
        &self.name
    }

    /// The profile that its cache begins with, read from `path` unless it has been read before: the file holds what this process
    /// has saved since.
    pub fn start_from(&self, path: &Path) -> Result<Arc<RecordedProfile>, UnusableProfile> {
        self.starting.read(path, self)
    }

    /// The same from where the user's configuration says; where a model's own profile is not there yet, an empty one.
    pub fn begin(&self, config: &Config) -> Result<Arc<RecordedProfile>, UnusableProfile> {
        if let Some(CacheProfile::File(path)) = &config.hot_cache {
            return self.start_from(path);
        }
        self.kept_at.get_or_init(|| self.find_kept(config));
        Ok(self.starting.get().unwrap_or_default())
    }

    /// The file of the profile that its cache begins with, which what is learnt goes into. `None` for its own where that has not
    /// been looked for yet, or is kept nowhere.
    pub fn profile_file<'a>(&'a self, config: &'a Config) -> Option<&'a Path> {
        match config.hot_cache.as_ref()? {
            CacheProfile::File(path) => Some(path),
            CacheProfile::Auto => self.kept_at.get()?.as_deref(),
        }
    }

    /// Whether this file would be that of its own profile, which has not been looked for yet.
    pub fn may_be_kept_at(&self, path: &Path, config: &Config) -> bool {
        let is_its =
            |file: &PathBuf| kept_profile::places(Some(file), "").iter().any(|place| is_same_file(place, path));
        let files = [config.model_file.as_ref(), self.file.get()];
        self.kept_at.get().is_none() && files.into_iter().flatten().any(is_its)
    }

    /// Whether a profile is of another quantisation of it; fails, with why, if it cannot be this model's.
    pub fn fits(&self, profile: &RecordedProfile) -> Result<bool, String> {
        if profile.model.is_some() {
            let is_other = self.is_other_quantisation(profile);
            return is_other.map_err(|why| format!("it was recorded from another model: {why}"));
        }
        let layers = self.layers();
        for (&number, recorded) in &profile.layers {
            let Some(layer) = layers.iter().find(|layer| layer.counts.layer() == number) else {
                return Err(format!("the model has no experts in layer {number}"));
            };
            let ours = layer.counts.n_expert();
            if let Some(&(expert, _)) = recorded.requests.iter().find(|&&(expert, _)| expert >= ours) {
                return Err(format!("it counts expert {expert} in layer {number}, the model has {ours}"));
            }
        }
        Ok(false)
    }

    /// Looks for its own profile, and begins with it.
    fn find_kept(&self, config: &Config) -> Option<PathBuf> {
        let tensors = self.tensors();
        let (name, known) = tensors.first_key_value()?;
        // The user's name for the file if it is this model's: weights need not be mapped, and links lead elsewhere.
        let is_its = |file: &&PathBuf| {
            let found = ModelFile::open(file).ok().and_then(|file| fingerprint_in_file(&file, name).ok().flatten());
            found.is_some_and(|found| found == known.fingerprint)
        };
        let file = config.model_file.as_ref().filter(is_its).or(self.file.get());
        // Of the first of its expert tensors: which ones have appeared by now differs from start to start.
        let first = file.and_then(|file| {
            let file = ModelFile::open(&first_part(file)).ok()?;
            let name = file.experts().next()?.name;
            fingerprint_in_file(&file, name).ok()?
        });
        let tag = first.as_ref().unwrap_or(&known.fingerprint);
        let places = kept_profile::places(file.map(PathBuf::as_path), tag);
        let kept = kept_profile::find(&places, config.learns(), |profile| self.fits(profile));
        for note in &kept.notes {
            self.name.log(Level::Warn, note);
        }
        if let Some((profile, is_other_quantisation)) = kept.profile {
            self.starting.begin(Arc::new(profile), is_other_quantisation);
        }
        kept.path
    }

    /// Notes the file that its weights are mapped from.
    pub fn set_file(&self, file: &Path) {
        self.file.get_or_init(|| file.to_owned());
    }

    /// Whether a profile was recorded from another quantisation of it; fails if it was recorded from another model.
    pub fn is_other_quantisation(&self, profile: &RecordedProfile) -> Result<bool, ModelMismatchError> {
        match profile.model.as_ref().filter(|recorded| !recorded.is_same_model(&self.id())) {
            Some(recorded) => profile.check_other_quantisation(recorded, &self.shape()).map(|()| true),
            None => Ok(false),
        }
    }

    /// The profile that its cache began with.
    pub fn starting(&self) -> &StartingProfile {
        &self.starting
    }

    /// Its layers, in the order in which they appeared.
    pub fn layers(&self) -> Vec<Arc<Layer>> {
        self.inner().layers.clone()
    }

    /// What other quantisations of it would have in common with it, as far as it has appeared.
    fn shape(&self) -> ModelShape {
        let inner = self.inner();
        let n_used = inner.layers.iter().map(|layer| (layer.counts.layer(), layer.n_used)).collect();
        let tensors = inner.tensors.iter().map(|(name, known)| (name.clone(), (known.layer, known.shape))).collect();
        ModelShape { tensors, n_used, is_whole: false }
    }

    /// Its expert tensors, by name.
    pub fn tensors(&self) -> Tensors {
        self.inner().tensors.clone()
    }

    /// What identifies it, as far as it has appeared.
    pub fn id(&self) -> ModelId {
        model_id(&self.inner().tensors)
    }

    /// Notes a context that computes with it, by the place of its hot lane.
    pub fn join(&self, cell: &Arc<LaneCell>) {
        let mut contexts = self.contexts();
        contexts.cells.retain(|cell| cell.strong_count() > 0);
        contexts.cells.push(Arc::downgrade(cell));
    }

    /// The places of its contexts' hot lanes.
    pub fn lane_cells(&self) -> Vec<Arc<LaneCell>> {
        self.contexts().cells.iter().filter_map(Weak::upgrade).collect()
    }

    /// Notes what a context asks the cache's thread for, which is to be told.
    pub fn add_lane_request(&self, request: LaneRequest) {
        self.contexts().requests.push_back(request);
    }

    /// The oldest such request.
    pub fn next_lane_request(&self) -> Option<LaneRequest> {
        self.contexts().requests.pop_front()
    }

    fn contexts(&self) -> MutexGuard<'_, Contexts> {
        self.contexts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls of all layers so far.
    pub fn calls(&self) -> u64 {
        self.layers().iter().map(|layer| layer.counts.calls()).sum()
    }

    /// Counts what was copied to a device.
    pub fn copied(&self) -> &Arc<Copied> {
        &self.copied
    }

    /// Calls and requests of all layers so far.
    pub fn totals(&self) -> Totals {
        let layers = self.layers();
        let counts: Vec<_> = layers.iter().map(|layer| layer.counts.snapshot()).collect();
        Totals {
            layers: layers.len(),
            calls: counts.iter().map(Counts::calls).sum(),
            requests: counts.iter().flat_map(Counts::experts).sum(),
            hits: counts.iter().flat_map(|counts| counts.hot.iter()).sum(),
            copied_bytes: self.copied.bytes(),
        }
    }
}

/// What a model was asked for so far.
pub struct Totals {
    /// MoE layers.
    pub layers: usize,
    /// Expert FFNs computed.
    pub calls: u64,
    /// (token, expert) pairs.
    pub requests: u64,
    /// Those whose expert was resident.
    pub hits: u64,
    /// Bytes copied to a device.
    pub copied_bytes: u64,
}

impl Inner {
    fn find_or_add(&mut self, number: u32, weights: Tensor<'_>, n_used: u32) -> Arc<Layer> {
        if let Some(layer) = self.layers.iter().find(|layer| layer.counts.layer() == number) {
            return layer.clone();
        }
        let layer = Arc::new(Layer::new(number, weights, n_used));
        self.layers.push(layer.clone());
        layer
    }

    /// A number for weights whose name has none.
    fn next_number(&self) -> u32 {
        self.layers.iter().map(|layer| layer.counts.layer() + 1).max().unwrap_or(0)
    }
}

/// What identifies a model with these tensors.
pub fn model_id(tensors: &Tensors) -> ModelId {
    ModelId {
        fingerprint: combine_fingerprints(tensors.values().map(|known| known.fingerprint.as_str())),
        tensors: tensors.iter().map(|(name, known)| (name.clone(), known.fingerprint.clone())).collect(),
        shapes: tensors.iter().map(|(name, known)| (name.clone(), known.shape)).collect(),
    }
}

fn fingerprint(weights: Tensor<'_>) -> String {
    let id = TensorId {
        name: &weights.name(),
        type_name: &weights.type_name(),
        shape: [0, 1, 2, 3].map(|dim| weights.ne(dim)),
        n_bytes: weights.n_bytes(),
    };
    id.fingerprint(|offset, len| weights.weight_bytes(offset, len))
}
