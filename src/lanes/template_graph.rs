//! A block's recipe rebuilt as a graph for some number of requests, and the graphs that have been prepared.

use super::requests::{Form, row_bytes};
use crate::Result;
use crate::ggml::{BufferType, Device, GraphBuilder, Memory, OwnGraph, TensorIndex, sys};
use crate::moe::{Ffn, Rows, Source};
use std::sync::Arc;

/// A graph without memory that follows a recipe.
pub struct Rebuilt {
    builder: GraphBuilder,
    /// Ids and input rows as one range of bytes, so that one copy brings both.
    inputs: TensorIndex,
    inputs_bytes: usize,
    ids: TensorIndex,
    input: TensorIndex,
    input_offset: usize,
    /// By place in [`Ffn::weights`].
    pub weights: Vec<TensorIndex>,
    /// Results that need memory of their own: no views.
    results: Vec<TensorIndex>,
    output: TensorIndex,
}

impl Rebuilt {
    /// Follows `ffn` for requests in this form, with weights of `n_experts` (or slots) each. `alignment` in bytes.
    pub fn new(ffn: &Ffn, form: Form, n_experts: i64, alignment: usize) -> Result<Self> {
        const LEAVES: usize = 3;
        let mut builder = GraphBuilder::new(LEAVES + ffn.weights.len() + ffn.steps.len())?;
        let [ne1, ne2] = form.dims()?;
        let input_offset = (form.rows() * size_of::<i32>()).next_multiple_of(alignment);
        let inputs_bytes = input_offset + form.input_rows(ffn) * row_bytes(ffn.n_in);

        let inputs = builder.leaf(sys::GGML_TYPE_I8, [inputs_bytes as i64, 1, 1, 1])?;
        let ids = builder.leaf(sys::GGML_TYPE_I32, [ne1, ne2, 1, 1])?;
        let input_ne1 = if form.input_rows(ffn) == 1 { 1 } else { ne1 };
        let input = builder.leaf(sys::GGML_TYPE_F32, [ffn.n_in, input_ne1, ne2, 1])?;
        let mut weights = Vec::with_capacity(ffn.weights.len());
        for shape in &ffn.weights {
            weights.push(builder.leaf(shape.kind, shape.ne_for(n_experts))?);
        }
        let (mut steps, mut results) = (Vec::with_capacity(ffn.steps.len()), Vec::new());
        for step in &ffn.steps {
            let resolve = |source: Source| match source {
                Source::Input => input,
                Source::Ids => ids,
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
        let output = steps.last().copied().unwrap_or(input);
        Ok(Self { builder, inputs, inputs_bytes, ids, input, input_offset, weights, results, output })
    }

    /// The first operation that `device` cannot execute.
    pub fn unsupported_by(&self, device: Device) -> Option<String> {
        let refused = self.results.iter().find(|&&result| !self.builder.supported_by(device, result))?;
        Some(self.builder.op_name(*refused))
    }

    /// Bytes of scratch memory of this kind: everything but the weights.
    pub fn scratch_bytes(&self, kind: BufferType) -> usize {
        let alignment = kind.alignment();
        let results = self.results.iter().map(|&result| self.builder.alloc_size(result, kind));
        results.fold(self.inputs_bytes.next_multiple_of(alignment), |sum, size| sum + size.next_multiple_of(alignment))
    }

    /// Places everything but the weights in `scratch`, from its start.
    fn place_scratch(&mut self, scratch: &Arc<Memory>) -> Result<usize> {
        let alignment = scratch.alignment();
        self.builder.place(self.inputs, scratch, 0)?;
        self.builder.place(self.ids, scratch, 0)?;
        self.builder.place(self.input, scratch, self.input_offset)?;
        let mut next = self.inputs_bytes.next_multiple_of(alignment);
        let mut output_offset = next;
        for &result in &self.results {
            self.builder.place(result, scratch, next)?;
            output_offset = next;
            next += self.builder.alloc_size(result, scratch.buffer_type()).next_multiple_of(alignment);
        }
        Ok(output_offset)
    }

    /// A job whose weights are shown at each computation.
    pub fn finish_unbound(mut self, scratch: &Arc<Memory>) -> Result<Job> {
        let output_offset = self.place_scratch(scratch)?;
        let bound = self.weights.clone();
        self.finish(output_offset, bound)
    }

    /// A job whose weights lie in `memory`, each at its offset.
    pub fn finish_placed(mut self, scratch: &Arc<Memory>, memory: &Arc<Memory>, offsets: &[usize]) -> Result<Job> {
        let output_offset = self.place_scratch(scratch)?;
        for (&weights, &offset) in self.weights.iter().zip(offsets) {
            self.builder.place(weights, memory, offset)?;
        }
        self.finish(output_offset, Vec::new())
    }

    fn finish(self, output_offset: usize, bound: Vec<TensorIndex>) -> Result<Job> {
        let output_bytes = self.builder.n_bytes(self.output);
        Ok(Job {
            inputs: self.inputs,
            inputs_bytes: self.inputs_bytes,
            input_offset: self.input_offset,
            output: self.output,
            output_bytes,
            output_offset,
            weights: self.weights,
            graph: self.builder.finish(bound)?,
        })
    }
}

/// A graph that is ready to be computed, and where its rows go in and come out.
pub struct Job {
    pub graph: OwnGraph,
    /// Ids and input rows.
    pub inputs: TensorIndex,
    pub inputs_bytes: usize,
    /// First input row, in bytes from the start of `inputs` (where the ids are).
    pub input_offset: usize,
    pub output: TensorIndex,
    pub output_bytes: usize,
    /// First output row, in bytes from the start of the scratch memory.
    pub output_offset: usize,
    /// By place in [`Ffn::weights`].
    pub weights: Vec<TensorIndex>,
}

/// Jobs by form, made when first needed and kept.
#[derive(Default)]
pub struct Jobs {
    one_token: Vec<Option<Box<Job>>>,
    per_row: Vec<Option<Box<Job>>>,
}

impl Jobs {
    /// The job for this form; `make` is called when there is none yet.
    pub fn get(&mut self, form: Form, make: impl FnOnce() -> Result<Job>) -> Result<&mut Job> {
        let (jobs, n) = match form {
            Form::OneToken(n) => (&mut self.one_token, n),
            Form::PerRow(n) => (&mut self.per_row, n),
        };
        if jobs.len() <= n {
            jobs.resize_with(n + 1, || None);
        }
        match &mut jobs[n] {
            Some(job) => Ok(job),
            empty => Ok(empty.insert(Box::new(make()?))),
        }
    }

    /// Whether there is a job for this form.
    pub fn has(&self, form: Form) -> bool {
        let (jobs, n) = match form {
            Form::OneToken(n) => (&self.one_token, n),
            Form::PerRow(n) => (&self.per_row, n),
        };
        jobs.get(n).is_some_and(Option::is_some)
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}
