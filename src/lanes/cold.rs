//! The cold lane: experts that are not resident, computed by llama.cpp's own CPU backend.
//!
//! It runs on the thread that llama.cpp calls us on: another thread would bring an OpenMP team of its own.

use super::Requests;
use super::job::{Jobs, Rebuilt};
use crate::ggml::{AbortCallback, Backend, BufferType, Device, Graph, HostBlock, Status};
use crate::moe::Ffn;
use crate::{Error, Result};
use std::sync::Arc;

/// One CPU backend instance, owned by one llama.cpp context.
pub struct ColdLane {
    cpu: Backend,
    scratch: Option<HostBlock>,
    /// Graphs for some of a split's requests. Layers with equal recipes share them: weights are shown at each call.
    recipes: Vec<(Arc<Ffn>, Jobs)>,
}

impl ColdLane {
    /// A new lane. Starts no thread.
    pub fn new() -> Result<Self> {
        Ok(Self { cpu: Backend::new(Device::cpu()?)?, scratch: None, recipes: Vec::new() })
    }

    /// Computes the whole split where it lies and returns ggml's answer.
    pub fn compute(&mut self, split: &Graph<'_>) -> Status {
        self.cpu.compute(split)
    }

    /// Computes some of the split's requests. Nothing of the split is written before [`ColdLane::write_rows`].
    pub fn compute_requests(&mut self, split: &Graph<'_>, ffn: &Arc<Ffn>, requests: &Requests) -> Result<Status> {
        let form = requests.form();
        let kind = BufferType::cpu().ok_or(Error::Ggml("a CPU buffer type"))?;
        let recipe = self.recipe(ffn);
        let (recipes, scratch) = (&mut self.recipes, &mut self.scratch);
        let rebuild = || Rebuilt::new(ffn, form, ffn.n_expert, kind.alignment());
        if !recipes[recipe].1.has(form) {
            let needed = rebuild()?.scratch_bytes(kind);
            if scratch.as_ref().is_none_or(|scratch| scratch.size() < needed) {
                // Graphs are placed in the old memory: they go with it.
                recipes.iter_mut().for_each(|(_, jobs)| jobs.clear());
                *scratch = Some(HostBlock::allocate(kind, needed.next_power_of_two())?);
            }
        }
        let scratch = scratch.as_mut().ok_or(Error::Ggml("scratch memory"))?;
        let job = recipes[recipe].1.get(form, || rebuild()?.finish_unbound(scratch.memory()))?;
        let input = ffn.input(split).ok_or(Error::Ggml("a split of this recipe"))?;
        requests.write_inputs(scratch, job.input_offset, ffn, form, &input)?;
        let weights = (0..ffn.weights.len()).map_while(|index| ffn.weight(split, index));
        self.cpu.compute_own(&mut job.graph, weights)
    }

    /// Writes the rows of the last [`ColdLane::compute_requests`] to where they belong in the split.
    pub fn write_rows(&mut self, split: &Graph<'_>, ffn: &Arc<Ffn>, requests: &Requests) -> Result<()> {
        let recipe = self.recipe(ffn);
        let missing = || Error::Ggml("rows that have been computed");
        let scratch = self.scratch.as_ref().ok_or_else(missing)?;
        let job = self.recipes[recipe].1.get(requests.form(), || Err(missing()))?;
        let output = ffn.output(split).ok_or(Error::Ggml("a split of this recipe"))?;
        requests.read_outputs(scratch, job.output_offset, ffn, &output)
    }

    fn recipe(&mut self, ffn: &Arc<Ffn>) -> usize {
        if let Some(known) = self.recipes.iter().position(|(known, _)| Arc::ptr_eq(known, ffn)) {
            return known;
        }
        self.recipes.push((ffn.clone(), Jobs::default()));
        self.recipes.len() - 1
    }

    /// Forgets all recipes and what was made for them.
    pub fn forget_recipes(&mut self) {
        self.recipes.clear();
    }

    /// Threads to compute with.
    pub fn set_threads(&mut self, n_threads: i32) {
        self.cpu.set_threads(n_threads);
    }

    /// Whom to ask whether to stop.
    pub fn set_abort_callback(&mut self, callback: AbortCallback) {
        self.cpu.set_abort_callback(callback);
    }
}
