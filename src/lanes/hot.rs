//! The hot lane: resident experts, computed on the device while the caller does something else.
//!
//! One upload, one graph, one download and one wait for a layer. It works on any ggml device.

use super::Requests;
use super::requests::Form;
use super::template_graph::{InPlaceGraph, PreparedGraph, PreparedGraphs, TemplateGraph};
use crate::device::Pool;
use crate::ggml::{
    Backend, BufferType, Device, Graph, HostBlock, HostBlocks, InPlace, PROBE_BYTES_PER_UPLOAD, Scratch, Status,
    Upload, sys,
};
use crate::moe::{FfnTemplate, WeightShape};
use crate::units::{Expert, Slot};
use crate::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// One device backend instance with its scratch memory, owned by one llama.cpp context.
pub struct HotLane {
    /// Tells this lane's indices from those of the one before it.
    id: u64,
    device: Device,
    kind: BufferType,
    /// Whether rows may pass through page-locked memory.
    pinned: bool,
    scratch: Option<Scratch>,
    inputs: Option<HostBlock>,
    outputs: Option<HostBlock>,
    /// Experts on their way to the device while a token waits. Only page-locked: other memory would have to be copied again.
    staged: Option<HostBlock>,
    /// Both ends of what was copied while a token waited, read back.
    probes: Option<HostBlock>,
    layers: Vec<HotLayer>,
    /// The smallest graph of any layer that took too long, for one token and for several.
    too_slow: [Option<TooSlow>; 2],
    /// Dropped last: the fields above may still be in use on the device.
    backend: Backend,
}

/// A layer's template over its pool.
struct HotLayer {
    pool: Arc<Pool>,
    template: Arc<FfnTemplate>,
    /// First byte in the pool of each of the template's weights.
    offsets: Vec<usize>,
    /// Most requests of one call.
    max_rows: usize,
    graphs: PreparedGraphs,
    /// Made for the first token all of whose experts are resident.
    in_place: Option<Box<InPlaceGraph>>,
    /// What has been made ready, for one token and for several.
    warm: [Warm; 2],
}

/// How far a layer's graphs have been made ready.
#[derive(Clone, Copy, Debug, Default)]
struct Warm {
    /// How often that has been tried.
    n_tries: u8,
    /// Rows of the largest graph that has been computed once.
    rows: usize,
    /// Larger ones were left out since one took longer than this.
    limit: Option<Duration>,
}

/// A graph that takes longer than it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooSlow {
    /// Its rows.
    pub rows: usize,
    /// No call for so many tokens can do with a smaller one.
    pub is_smallest: bool,
    /// How long it takes once the device knows it: the shortest time of all layers.
    pub takes: Duration,
    /// In how many layers that has been found, at different times.
    pub n_layers: usize,
}

/// For how many tokens graphs are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// One.
    OneToken,
    /// More.
    SeveralTokens,
}

impl Width {
    /// That of a batch.
    pub fn of(n_tokens: usize) -> Self {
        if n_tokens == 1 { Self::OneToken } else { Self::SeveralTokens }
    }
}

/// A layer that a lane knows. Good for that lane only, see [`HotLane::knows`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotIndex {
    lane: u64,
    place: usize,
}

/// Why a lane cannot compute a template, or how much scratch memory it takes.
pub struct Trial {
    /// The first operation that the device cannot execute.
    pub unsupported: Option<String>,
    /// Bytes of scratch memory on the device for up to `max_rows` requests.
    pub scratch_bytes: usize,
}

/// Builds a template's graphs without memory to see what the device says to them.
pub fn try_out(device: Device, template: &FfnTemplate, max_rows: usize) -> Result<Trial> {
    let kind = device.buffer_type().ok_or(Error::Ggml("a buffer type of the device"))?;
    let mut trial = Trial { unsupported: None, scratch_bytes: 0 };
    for form in [Form::OneToken(template.n_used.min(max_rows)), Form::PerRow(max_rows)] {
        let graph = TemplateGraph::new(template, form, template.n_expert, kind.alignment())?;
        if trial.unsupported.is_none() {
            trial.unsupported = graph.unsupported_by(device)?;
        }
        trial.scratch_bytes = trial.scratch_bytes.max(graph.scratch_bytes(kind)?);
    }
    Ok(trial)
}

impl HotLane {
    /// A new instance on `device`. `pinned`: whether rows may pass through page-locked memory.
    pub fn new(device: Device, pinned: bool) -> Result<Self> {
        let kind = device.buffer_type().ok_or(Error::Ggml("a buffer type of the device"))?;
        let backend = Backend::new(device)?;
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Relaxed),
            device,
            kind,
            pinned,
            scratch: None,
            inputs: None,
            outputs: None,
            staged: None,
            probes: None,
            layers: Vec::new(),
            too_slow: [None; 2],
            backend,
        })
    }

    /// Whether `layer` was added to this very lane.
    pub fn knows(&self, layer: HotIndex) -> bool {
        layer.lane == self.id
    }

    /// Bytes of scratch memory that it has on the device.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.as_ref().map_or(0, |scratch| scratch.size())
    }

    /// Gives its scratch memory back, and the graphs that are placed in it.
    pub fn drop_scratch(&mut self) {
        for layer in &mut self.layers {
            layer.graphs.clear();
            layer.in_place = None;
            layer.warm = [Warm::default(); 2];
        }
        self.scratch = None;
    }

    /// Takes `scratch_bytes` of scratch memory on the device in place of what it has. `false`: the device has no room.
    pub fn grow(&mut self, scratch_bytes: usize) -> bool {
        self.drop_scratch();
        self.scratch = Scratch::allocate(self.kind, scratch_bytes);
        self.scratch.is_some()
    }

    /// A layer's template over its pool; `tensors` gives the pool's tensor for each of the template's weights; `max_rows` is
    /// the most requests that one call can have.
    pub fn add_layer(
        &mut self,
        pool: &Arc<Pool>,
        template: &Arc<FfnTemplate>,
        tensors: &[usize],
        max_rows: usize,
    ) -> HotIndex {
        let offsets: Vec<_> = tensors.iter().map(|&tensor| pool.offset(tensor)).collect();
        // Two adapters can have the same template over other tensors of the same pool.
        let is_it = |layer: &HotLayer| {
            Arc::ptr_eq(&layer.pool, pool) && Arc::ptr_eq(&layer.template, template) && layer.offsets == offsets
        };
        if let Some(known) = self.layers.iter().position(is_it) {
            return HotIndex { lane: self.id, place: known };
        }
        let (pool, template, graphs) = (pool.clone(), template.clone(), PreparedGraphs::default());
        let warm = [Warm::default(); 2];
        self.layers.push(HotLayer { pool, template, offsets, max_rows, graphs, in_place: None, warm });
        HotIndex { lane: self.id, place: self.layers.len() - 1 }
    }

    /// Whether the graphs of this layer for so many tokens have been computed once, all that take no longer than `limit`.
    ///
    /// Those that took too long are tried again where another layer's have not, or where they may take twice as long now.
    pub fn is_warm(&self, layer: HotIndex, width: Width, limit: Duration) -> bool {
        let Some(known) = self.layers.get(layer.place).filter(|_| self.knows(layer)) else { return false };
        let Warm { n_tries, limit: earlier, .. } = known.warm[width as usize];
        let may_be_faster = earlier.is_some_and(|earlier| self.too_slow(width).is_none() || limit >= 2 * earlier);
        n_tries > 0 && !(may_be_faster && n_tries < MAX_TRIES)
    }

    /// The smallest graph for so many tokens that takes too long; larger ones are not warm.
    pub fn too_slow(&self, width: Width) -> Option<TooSlow> {
        self.too_slow[width as usize]
    }

    /// Whether the graph for these requests has been computed once. There is none that is filled up where each slot is used.
    pub fn is_warm_for(&self, layer: HotIndex, requests: &Requests) -> bool {
        let Some(known) = self.layers.get(layer.place).filter(|_| !requests.is_empty()) else { return true };
        let (form, _) = requests.form_with_room(known.max_rows, known.pool.slots());
        let warm_up_to = |width: Width| known.warm[width as usize].rows;
        match form {
            Form::OneToken(n) => n <= warm_up_to(Width::OneToken),
            Form::PerRow(n) => {
                let is_made = n.is_power_of_two() || n == known.max_rows;
                is_made && n <= warm_up_to(Width::SeveralTokens)
            }
        }
    }

    /// Computes each graph of this layer for so many tokens once, with rows that mean nothing: devices compile, load or
    /// capture what a graph needs when they see it first. The smallest comes first; one that takes longer than `limit` once
    /// the device knows it is the last: larger ones would take longer still. Remote devices are not asked.
    ///
    /// Returns the status with which the device refused one.
    pub fn warm_up(&mut self, layer: HotIndex, width: Width, limit: Duration) -> Result<Result<(), Status>> {
        if self.is_warm(layer, width, limit) {
            return Ok(Ok(()));
        }
        let HotLayer { template, pool, max_rows, .. } = self.layers.get(layer.place).ok_or(UNKNOWN_LAYER)?;
        let (template, pool, max_rows) = (template.clone(), pool.clone(), *max_rows);
        if width == Width::OneToken {
            self.make_staging(template.n_used * expert_bytes(&template));
        }
        if self.device.is_remote() {
            // No kernels are made here, and the host may be computing on the device at this moment.
            self.layers[layer.place].warm[width as usize] = Warm { n_tries: 1, rows: max_rows, limit: None };
            return Ok(Ok(()));
        }
        let forms: Vec<_> = match width {
            Width::OneToken => {
                (1..=template.n_used.min(pool.slots().into()).min(max_rows)).map(Form::OneToken).collect()
            }
            Width::SeveralTokens => {
                let sizes = (1..).map(|power| 1 << power).take_while(|&size| size < 2 * max_rows);
                sizes.map(|size: usize| Form::PerRow(size.min(max_rows))).collect()
            }
        };
        let mut warm = self.layers[layer.place].warm[width as usize];
        warm.n_tries += 1;
        warm.limit = None;
        let (known, smallest) = (warm.rows, forms.first().map(|form| form.rows()));
        for form in forms.into_iter().filter(|form| form.rows() > known) {
            let mut takes = Duration::MAX;
            // The first time takes what the device compiles, too.
            for _ in 0..2 {
                let start = Instant::now();
                let status = self.compute_once(layer, form)?;
                if status != sys::GGML_STATUS_SUCCESS {
                    return Ok(Err(status));
                }
                takes = takes.min(start.elapsed());
                if takes <= limit {
                    break;
                }
            }
            if takes > limit {
                warm.limit = Some(limit);
                self.note_too_slow(width, form.rows(), smallest == Some(form.rows()), takes);
                break;
            }
            warm.rows = form.rows();
            // What was found of another layer, or for smaller batches, does not hold.
            self.too_slow[width as usize].take_if(|slow| slow.rows <= form.rows());
        }
        self.layers[layer.place].warm[width as usize] = warm;
        Ok(Ok(()))
    }

    fn note_too_slow(&mut self, width: Width, rows: usize, is_smallest: bool, takes: Duration) {
        let known = &mut self.too_slow[width as usize];
        let before = known.filter(|known| known.rows == rows);
        let n_layers = before.map_or(0, |known| known.n_layers) + 1;
        let takes = before.map_or(takes, |known| known.takes.min(takes));
        *known = Some(TooSlow { rows, is_smallest, takes, n_layers });
    }

    fn compute_once(&mut self, layer: HotIndex, form: Form) -> Result<Status> {
        let layer = self.layers.get_mut(layer.place).ok_or(UNKNOWN_LAYER)?;
        let scratch = self.scratch.as_mut().ok_or(NO_SCRATCH)?;
        let prepared = layer.prepared(form, scratch, self.kind)?;
        let place = (self.device, self.pinned);
        let inputs = sized(&mut self.inputs, place, prepared.inputs_bytes)?;
        let outputs = sized(&mut self.outputs, place, prepared.output_bytes)?;
        let probes = sized(&mut self.probes, place, 0)?;
        let slot = |row: usize| if matches!(form, Form::OneToken(_)) { row as i32 } else { 0 };
        inputs.write_ids(0, &(0..form.rows()).map(slot).collect::<Vec<_>>())?;
        let blocks = HostBlocks { inputs, outputs, probes };
        let graph = (&mut prepared.graph, scratch);
        let computed = self.backend.compute_while(graph, std::iter::empty(), prepared.output, blocks, || ())?;
        Ok(computed.map_or_else(|refusal| refusal, |()| sys::GGML_STATUS_SUCCESS))
    }

    /// Computes some of the split's requests on the device, and `meanwhile` on this thread; returns when both are done.
    ///
    /// `copies` says which experts to bring into which slots first. If the device refuses, `meanwhile` is not run and the
    /// status is returned. Nothing of the split is written before [`HotLane::write_rows`].
    pub fn compute_while<R>(
        &mut self,
        layer: HotIndex,
        split: &Graph<'_>,
        requests: &Requests,
        copies: &[(Expert, Slot)],
        meanwhile: impl FnOnce() -> R,
    ) -> Result<Result<R, Status>> {
        let layer = self.layers.get_mut(layer.place).ok_or(UNKNOWN_LAYER)?;
        let (form, filler) = requests.form_with_room(layer.max_rows, layer.pool.slots());
        let template = layer.template.clone();
        let scratch = self.scratch.as_mut().ok_or(NO_SCRATCH)?;
        let prepared = layer.prepared(form, scratch, self.kind)?;
        let place = (self.device, self.pinned);
        let inputs = sized(&mut self.inputs, place, prepared.inputs_bytes)?;
        let outputs = sized(&mut self.outputs, place, prepared.output_bytes)?;
        let probes_bytes = copies.len() * template.weights.len() * PROBE_BYTES_PER_UPLOAD;
        let probes = sized(&mut self.probes, place, probes_bytes)?;
        let rows = template.input(split).ok_or(NOT_ITS_SPLIT)?;
        requests.write_inputs(inputs, prepared.input_offset, &template, (form, filler), &rows)?;
        let staged = stage(&mut self.staged, split, &template, copies)?;
        let tensors = &prepared.weights;
        let of_copy = |n: usize| template.weights.iter().zip(tensors).enumerate().map(move |weight| (n, weight));
        let uploads = (0..copies.len()).flat_map(of_copy).map(|(n, (index, (shape, &tensor)))| {
            let ((expert, slot), len) = (copies[n], shape.expert_bytes);
            let bytes = match staged {
                Some(staged) => {
                    let start = n * expert_bytes(&template) + bytes_of(&template.weights[..index]);
                    staged.get(start..start + len).ok_or(NOT_AT_HAND)?
                }
                None => weight_of(&template, split, index, expert)?,
            };
            Ok(Upload { tensor, offset: usize::from(slot.0) * len, bytes })
        });
        let blocks = HostBlocks { inputs, outputs, probes };
        self.backend.compute_while((&mut prepared.graph, scratch), uploads, prepared.output, blocks, meanwhile)
    }

    /// Computes all requests of a split of one token on the instance that has made its rows: they are read where they lie, and the
    /// result is left in its place. Runs `meanwhile` on this thread; returns when both are done.
    ///
    /// If the device refuses, `meanwhile` is not run, the status is returned, and nothing is written.
    pub fn compute_in_place<R>(
        &mut self,
        layer: HotIndex,
        split: &Graph<'_>,
        requests: &Requests,
        place: &InPlace<'_>,
        meanwhile: impl FnOnce() -> R,
    ) -> Result<Result<R, Status>> {
        let layer = self.layers.get_mut(layer.place).ok_or(UNKNOWN_LAYER)?;
        let template = layer.template.clone();
        let scratch = self.scratch.as_mut().ok_or(NO_SCRATCH)?;
        let InPlaceGraph { graph, ids_bytes } = layer.in_place(scratch)?;
        let ids = sized(&mut self.inputs, (self.device, self.pinned), *ids_bytes)?;
        ids.write_ids(0, requests.ids())?;
        let (rows, output) =
            (template.input(split).ok_or(NOT_ITS_SPLIT)?, template.output(split).ok_or(NOT_ITS_SPLIT)?);
        place.compute_while((graph, scratch), (&rows, &output), ids, meanwhile)
    }

    /// Whether [`HotLane::compute_in_place`] can compute these requests.
    pub fn is_in_place(&self, layer: HotIndex, split: &Graph<'_>, requests: &Requests, place: &InPlace<'_>) -> bool {
        let Some(HotLayer { template, .. }) = self.layers.get(layer.place) else { return false };
        let (Some(rows), Some(output)) = (template.input(split), template.output(split)) else { return false };
        let is_whole = requests.are_one_token(template.n_used, output.ne(2) as usize);
        is_whole && place.device() == self.device && place.has_input(&rows)
    }

    /// Page-locked memory of this many bytes for experts, if the device offers any.
    fn make_staging(&mut self, bytes: usize) {
        if self.staged.as_ref().is_some_and(|staged| staged.size() >= bytes) {
            return;
        }
        let block = HostBlock::for_copies(self.device, bytes, self.pinned);
        self.staged = block.ok().filter(|block| !block.is_pageable());
    }

    /// Whether experts of this layer can be copied while a token waits: the template's tensors are all that the pool holds,
    /// and their bytes are at hand.
    pub fn can_copy(&self, layer: HotIndex, split: &Graph<'_>) -> bool {
        let Some(HotLayer { pool, template, .. }) = self.layers.get(layer.place) else { return false };
        let is_at_hand =
            |index| template.weight(split, index).is_some_and(|weight| weight.weight_bytes(0, 0).is_some());
        pool.n_tensors() == template.weights.len() && (0..template.weights.len()).all(is_at_hand)
    }

    /// Writes the rows of the last [`HotLane::compute_while`] to where they belong in the split.
    pub fn write_rows(&self, layer: HotIndex, split: &Graph<'_>, requests: &Requests) -> Result<()> {
        let HotLayer { template, .. } = self.layers.get(layer.place).ok_or(UNKNOWN_LAYER)?;
        let outputs = self.outputs.as_ref().ok_or(Error::Contract("rows that have not been computed"))?;
        let output = template.output(split).ok_or(NOT_ITS_SPLIT)?;
        requests.read_outputs(outputs, 0, template, &output)
    }
}

impl HotLayer {
    /// The graph of this form, made when there is none yet.
    fn prepared(&mut self, form: Form, scratch: &Scratch, kind: BufferType) -> Result<&mut PreparedGraph> {
        let Self { pool, template, offsets, graphs, .. } = self;
        graphs.get(form, || {
            let graph = TemplateGraph::new(template, form, pool.slots().into(), kind.alignment())?;
            graph.finish_placed(scratch, pool.memory(), offsets)
        })
    }

    /// The graph between a split's own rows, made when there is none yet.
    fn in_place(&mut self, scratch: &Scratch) -> Result<&mut InPlaceGraph> {
        let Self { pool, template, offsets, in_place, .. } = self;
        match in_place {
            Some(graph) => Ok(graph),
            empty => {
                let graph = TemplateGraph::new_in_place(template, pool.slots().into())?;
                Ok(empty.insert(Box::new(graph.finish_in_place(scratch, pool.memory(), offsets)?)))
            }
        }
    }
}

/// How often a layer's graphs that took too long are tried.
const MAX_TRIES: u8 = 3;
const NOT_AT_HAND: Error = Error::Contract("an expert whose bytes are not at hand");
const NO_SCRATCH: Error = Error::Contract("a hot lane without scratch memory");
const NOT_ITS_SPLIT: Error = Error::Contract("a split that its template was not made from");
const UNKNOWN_LAYER: Error = Error::Contract("a layer that the lane does not know");

/// Bytes of one expert in all of the template's weights.
fn expert_bytes(template: &FfnTemplate) -> usize {
    bytes_of(&template.weights)
}

fn bytes_of(weights: &[WeightShape]) -> usize {
    weights.iter().map(|shape| shape.expert_bytes).sum()
}

/// An expert's bytes in the template's weight number `index`.
fn weight_of<'a>(template: &FfnTemplate, split: &'a Graph<'_>, index: usize, expert: Expert) -> Result<&'a [u8]> {
    let len = template.weights.get(index).map_or(0, |shape| shape.expert_bytes);
    let weight = template.weight(split, index);
    weight.and_then(|weight| weight.weight_bytes(usize::from(expert.0) * len, len)).ok_or(NOT_AT_HAND)
}

/// Copies the bytes of these experts into the block, one after the other in the order in which they are sent. `None` if
/// there is no block for them: they are sent from where they are.
fn stage<'a>(
    block: &'a mut Option<HostBlock>,
    split: &Graph<'_>,
    template: &FfnTemplate,
    copies: &[(Expert, Slot)],
) -> Result<Option<&'a [u8]>> {
    let len = copies.len() * expert_bytes(template);
    let Some(block) = block.as_mut().filter(|block| len > 0 && block.size() >= len) else { return Ok(None) };
    block.write_with(len, |mut rest: &mut [u8]| -> Result<()> {
        for &(expert, _) in copies {
            for index in 0..template.weights.len() {
                let bytes = weight_of(template, split, index, expert)?;
                rest.split_off_mut(..bytes.len()).ok_or(NOT_AT_HAND)?.copy_from_slice(bytes);
            }
        }
        Ok(())
    })??;
    block.bytes(len).map(Some)
}

/// The block, made larger if it is too small.
fn sized(block: &mut Option<HostBlock>, (device, pinned): (Device, bool), bytes: usize) -> Result<&mut HostBlock> {
    if block.as_ref().is_none_or(|block| block.size() < bytes) {
        *block = Some(HostBlock::for_copies(device, bytes.next_power_of_two(), pinned)?);
    }
    block.as_mut().ok_or(Error::Contract("a block that was not made"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::testing::{Builder, load_cpu};
    use crate::moe::Block;

    #[test]
    fn an_index_is_good_for_its_own_lane_only() {
        const N: i64 = 32;
        load_cpu();
        let b = Builder::new();
        let (x, ids) = (b.leaf(sys::GGML_TYPE_F32, [N, 1, 1]), b.ids(2, 4, 1));
        let weights = || b.leaf(sys::GGML_TYPE_F32, [N, N, 4]);
        let (gate, up) = (b.mul_mat_id(weights(), x, ids), b.mul_mat_id(weights(), x, ids));
        let graph = b.graph(b.mul_mat_id(weights(), b.swiglu(gate, up), ids));
        let template = Arc::new(FfnTemplate::recognise(&graph, &Block::recognise(&graph)[0]).unwrap());
        let pool = Arc::new(
            Pool::allocate(
                BufferType::cpu().unwrap(),
                &template.weights.iter().map(crate::lanes::pool_tensor).collect::<Vec<_>>(),
                2,
            )
            .unwrap()
            .unwrap(),
        );
        let lane = || HotLane::new(Device::cpu().unwrap(), false).unwrap();
        let (mut old, mut new) = (lane(), lane());
        let index = old.add_layer(&pool, &template, &[0, 1, 2], 4);
        assert_eq!(old.add_layer(&pool, &template, &[0, 1, 2], 4), index, "added once");
        assert_ne!(old.add_layer(&pool, &template, &[1, 0, 2], 4), index, "the same template over other tensors");
        assert!(old.knows(index) && !new.knows(index));
        assert_ne!(new.add_layer(&pool, &template, &[0, 1, 2], 4), index);
    }
}
