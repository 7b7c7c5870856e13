//! Graphs built from a template for some number of requests, and those that are ready to be computed.

use super::requests::Form;
use crate::Result;
use crate::ggml::{BufferType, Device, GraphBuilder, Inputs, Memory, OwnGraph, Scratch, TensorIndex, sys};
use crate::moe::{FfnTemplate, Rows, Source};
use std::sync::Arc;

/// A graph without memory, built from a template.
pub struct TemplateGraph {
    builder: GraphBuilder,
    inputs: Inputs,
    /// By place in [`FfnTemplate::weights`].
    weights: Vec<TensorIndex>,
    /// Results that need memory of their own: no views.
    results: Vec<TensorIndex>,
    output: TensorIndex,
}

impl TemplateGraph {
    /// Builds `template` for requests in this form, with weights of `n_experts` (or slots) each. `alignment` in bytes.
    pub fn new(template: &FfnTemplate, form: Form, n_experts: i64, alignment: usize) -> Result<Self> {
        Self::build(template, form, n_experts, |builder, ids, rows| builder.inputs(ids, rows, alignment))
    }

    /// The same for all requests of one token, with rows that go in and come out where a split has them.
    pub fn new_in_place(template: &FfnTemplate, n_experts: i64) -> Result<Self> {
        let inputs = |builder: &mut GraphBuilder, ids, rows| builder.inputs_with_rows_elsewhere(ids, rows);
        let mut graph = Self::build(template, Form::OneToken(template.n_used), n_experts, inputs)?;
        graph.results.retain(|&result| result != graph.output);
        Ok(graph)
    }

    fn build(
        template: &FfnTemplate,
        form: Form,
        n_experts: i64,
        inputs: impl FnOnce(&mut GraphBuilder, [i64; 2], [i64; 3]) -> Result<Inputs>,
    ) -> Result<Self> {
        /// The inputs as a whole, the ids and the rows.
        const INPUTS: usize = 3;
        let mut builder = GraphBuilder::new(INPUTS + template.weights.len() + template.steps.len())?;
        let [ne1, ne2] = form.dims()?;
        let input_ne1 = if form.input_rows(template) == 1 { 1 } else { ne1 };
        let inputs = inputs(&mut builder, [ne1, ne2], [template.n_in, input_ne1, ne2])?;
        let mut weights = Vec::with_capacity(template.weights.len());
        for shape in &template.weights {
            weights.push(builder.leaf(shape.kind, shape.ne_for(n_experts))?);
        }
        let (mut steps, mut results) = (Vec::with_capacity(template.steps.len()), Vec::new());
        for step in &template.steps {
            let resolve = |source: Source| match source {
                Source::Input => inputs.rows,
                Source::Ids => inputs.ids,
                Source::Weights(index) => weights[index],
                Source::Step(index) => steps[index],
            };
            let sources = step.sources.map(|source| source.map(resolve));
            if let (sys::GGML_OP_VIEW, [Some(whole), ..]) = (step.op, sources) {
                steps.push(builder.view(whole, step.ne0, step.offset)?);
                continue;
            }
            let ne = match step.rows {
                Rows::PerRequest => [step.ne0, ne1, ne2, 1],
                Rows::PerExpert => [step.ne0, n_experts, ne2, 1],
            };
            let result = builder.result(step.op, &step.params, ne, sources)?;
            steps.push(result);
            results.push(result);
        }
        let output = steps.last().copied().unwrap_or(inputs.rows);
        Ok(Self { builder, inputs, weights, results, output })
    }

    /// The first operation that `device` cannot execute.
    pub fn unsupported_by(&self, device: Device) -> Result<Option<String>> {
        for &result in &self.results {
            if !self.builder.supported_by(device, result)? {
                return self.builder.op_name(result).map(Some);
            }
        }
        Ok(None)
    }

    /// Bytes of scratch memory of this kind: everything but the weights.
    pub fn scratch_bytes(&self, kind: BufferType) -> Result<usize> {
        let alignment = kind.alignment();
        let mut bytes = self.inputs.bytes.next_multiple_of(alignment);
        for &result in &self.results {
            bytes += self.builder.alloc_size(result, kind)?.next_multiple_of(alignment);
        }
        Ok(bytes)
    }

    /// Places everything but the weights in `scratch`, from its start. Returns where the last result lies.
    fn place_scratch(&mut self, scratch: &Scratch) -> Result<usize> {
        let kind = scratch.buffer_type();
        let alignment = kind.alignment();
        self.builder.place_in_scratch(self.inputs.whole, scratch, 0)?;
        let mut next = self.inputs.bytes.next_multiple_of(alignment);
        let mut output_offset = next;
        for &result in &self.results {
            self.builder.place_in_scratch(result, scratch, next)?;
            output_offset = next;
            next += self.builder.alloc_size(result, kind)?.next_multiple_of(alignment);
        }
        Ok(output_offset)
    }

    /// The graph in `scratch`; its weights are shown at each computation.
    pub fn finish_unbound(mut self, scratch: &Scratch) -> Result<PreparedGraph> {
        let output_offset = self.place_scratch(scratch)?;
        let bound = self.weights.clone();
        self.finish(output_offset, bound)
    }

    /// The graph in `scratch`; its weights lie in `memory`, each at its offset.
    pub fn finish_placed(
        mut self,
        scratch: &Scratch,
        memory: &Arc<Memory>,
        offsets: &[usize],
    ) -> Result<PreparedGraph> {
        let output_offset = self.place_scratch(scratch)?;
        self.place_weights(memory, offsets)?;
        self.finish(output_offset, Vec::new())
    }

    /// The graph between rows that are shown at each computation; everything else is placed as above.
    pub fn finish_in_place(
        mut self,
        scratch: &Scratch,
        memory: &Arc<Memory>,
        offsets: &[usize],
    ) -> Result<InPlaceGraph> {
        self.place_scratch(scratch)?;
        self.place_weights(memory, offsets)?;
        let ids_bytes = self.inputs.bytes;
        Ok(InPlaceGraph { ids_bytes, graph: self.builder.finish_in_place(self.inputs.rows, self.output)? })
    }

    fn place_weights(&mut self, memory: &Arc<Memory>, offsets: &[usize]) -> Result<()> {
        self.weights.iter().zip(offsets).try_for_each(|(&weights, &offset)| self.builder.place(weights, memory, offset))
    }

    fn finish(self, output_offset: usize, bound: Vec<TensorIndex>) -> Result<PreparedGraph> {
        let output_bytes = self.builder.n_bytes(self.output)?;
        Ok(PreparedGraph {
            inputs_bytes: self.inputs.bytes,
            input_offset: self.inputs.rows_offset.unwrap_or(self.inputs.bytes),
            output: self.output,
            output_bytes,
            output_offset,
            weights: self.weights,
            graph: self.builder.finish(bound)?,
        })
    }
}

/// A graph that is ready to be computed, and where its rows go in and come out.
pub struct PreparedGraph {
    pub graph: OwnGraph,
    /// Ids and input rows.
    pub inputs_bytes: usize,
    /// First input row, in bytes from the first id.
    pub input_offset: usize,
    pub output: TensorIndex,
    pub output_bytes: usize,
    /// First output row, in bytes from the start of the scratch memory.
    pub output_offset: usize,
    /// By place in [`FfnTemplate::weights`].
    pub weights: Vec<TensorIndex>,
}

/// A graph for all requests of one token, whose rows go in and come out where a split has them.
pub struct InPlaceGraph {
    pub graph: OwnGraph,
    pub ids_bytes: usize,
}

/// Prepared graphs by form, made when first needed and kept.
#[derive(Default)]
pub struct PreparedGraphs {
    one_token: Vec<Option<Box<PreparedGraph>>>,
    per_row: Vec<Option<Box<PreparedGraph>>>,
}

impl PreparedGraphs {
    /// The graph for this form; `make` is called when there is none yet.
    pub fn get(&mut self, form: Form, make: impl FnOnce() -> Result<PreparedGraph>) -> Result<&mut PreparedGraph> {
        let (graphs, n) = match form {
            Form::OneToken(n) => (&mut self.one_token, n),
            Form::PerRow(n) => (&mut self.per_row, n),
        };
        if graphs.len() <= n {
            graphs.resize_with(n + 1, || None);
        }
        match &mut graphs[n] {
            Some(graph) => Ok(graph),
            empty => Ok(empty.insert(Box::new(make()?))),
        }
    }

    /// Whether there is a graph for this form.
    pub fn has(&self, form: Form) -> bool {
        let (graphs, n) = match form {
            Form::OneToken(n) => (&self.one_token, n),
            Form::PerRow(n) => (&self.per_row, n),
        };
        graphs.get(n).is_some_and(Option::is_some)
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}
