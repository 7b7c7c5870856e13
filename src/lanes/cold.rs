//! The cold lane: experts that are not resident, computed by llama.cpp's own CPU backend.
//!
//! It runs on the thread that llama.cpp calls us on: another thread would bring an OpenMP team of its own.

use super::Requests;
use super::template_graph::{PreparedGraphs, TemplateGraph};
use crate::ggml::{AbortCallback, Backend, BufferType, Device, Graph, HostBlock, Status};
use crate::moe::FfnTemplate;
use crate::{Error, Result};
use std::sync::Arc;

/// One CPU backend instance, owned by one llama.cpp context.
pub struct ColdLane {
    cpu: Backend,
    scratch: Option<HostBlock>,
    /// Graphs for some of a split's requests. Layers with equal templates share them: weights are shown at each call.
    graphs: Vec<(Arc<FfnTemplate>, PreparedGraphs)>,
}

impl ColdLane {
    /// A new lane. Starts no thread.
    pub fn new() -> Result<Self> {
        Ok(Self { cpu: Backend::new(Device::cpu()?)?, scratch: None, graphs: Vec::new() })
    }

    /// Computes the whole split where it lies and returns ggml's answer. Fails if an id points outside the layer.
    pub fn compute(&mut self, split: &Graph<'_>) -> Status {
        self.cpu.compute(split)
    }

    /// Computes some of the split's requests. Nothing of the split is written before [`ColdLane::write_rows`].
    pub fn compute_requests(
        &mut self,
        split: &Graph<'_>,
        template: &Arc<FfnTemplate>,
        requests: &Requests,
    ) -> Result<Status> {
        let form = requests.form();
        let kind = BufferType::cpu().ok_or(Error::Ggml("a CPU buffer type"))?;
        let known = self.place_of(template);
        let (graphs, scratch) = (&mut self.graphs, &mut self.scratch);
        let build = || TemplateGraph::new(template, form, template.n_expert, kind.alignment());
        if !graphs[known].1.has(form) {
            let needed = build()?.scratch_bytes(kind)?;
            if scratch.as_ref().is_none_or(|scratch| scratch.size() < needed) {
                // Graphs are placed in the old memory: they go with it.
                graphs.iter_mut().for_each(|(_, graphs)| graphs.clear());
                *scratch = Some(HostBlock::allocate(kind, needed.next_power_of_two())?);
            }
        }
        let scratch = scratch.as_mut().ok_or(Error::Contract("a cold lane without scratch memory"))?;
        let prepared = graphs[known].1.get(form, || build()?.finish_unbound(scratch.scratch()))?;
        let input = template.input(split).ok_or(NOT_ITS_SPLIT)?;
        requests.write_inputs(scratch, prepared.input_offset, template, (form, 0), &input)?;
        let weights = (0..template.weights.len()).map_while(|index| template.weight(split, index));
        self.cpu.compute_own(&mut prepared.graph, scratch, weights)
    }

    /// Writes the rows of the last [`ColdLane::compute_requests`] to where they belong in the split.
    pub fn write_rows(&mut self, split: &Graph<'_>, template: &Arc<FfnTemplate>, requests: &Requests) -> Result<()> {
        let known = self.place_of(template);
        let missing = || Error::Contract("rows that have not been computed");
        let scratch = self.scratch.as_ref().ok_or_else(missing)?;
        let prepared = self.graphs[known].1.get(requests.form(), || Err(missing()))?;
        let output = template.output(split).ok_or(NOT_ITS_SPLIT)?;
        requests.read_outputs(scratch, prepared.output_offset, template, &output)
    }

    fn place_of(&mut self, template: &Arc<FfnTemplate>) -> usize {
        if let Some(known) = self.graphs.iter().position(|(known, _)| Arc::ptr_eq(known, template)) {
            return known;
        }
        self.graphs.push((template.clone(), PreparedGraphs::default()));
        self.graphs.len() - 1
    }

    /// Forgets all templates and what was made for them.
    pub fn forget_templates(&mut self) {
        self.graphs.clear();
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

const NOT_ITS_SPLIT: Error = Error::Contract("a split that its template was not made from");
