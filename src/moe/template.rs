//! The template of a block's expert FFN: what is computed from what, independent of the graph it was found in.
//!
//! Every operation of an expert FFN works row by row. So the FFN can be built again from its template for any list of
//! requests ((token, expert) pairs), with the experts' weights anywhere. Nothing is interpreted: operations, their
//! parameters and their order are those of the split. The template does not say who computes what.

use super::Block;
use crate::ggml::{Graph, MAX_SOURCES, OpParams, Tensor, sys};

/// Where an operation takes a source from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The rows that go in.
    Input,
    /// The experts of the rows.
    Ids,
    /// An expert tensor, by its place in [`FfnTemplate::weights`].
    Weights(usize),
    /// The result of an earlier step.
    Step(usize),
}

/// What a step's result looks like, apart from its innermost dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// One row for each request.
    PerRequest,
    /// One row for each expert, the whole for each token.
    PerExpert,
}

/// One operation, or a view of an earlier one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// `sys::GGML_OP_…`.
    pub op: sys::ggml_op,
    /// Copied verbatim.
    pub params: OpParams,
    /// Elements in a row of the result.
    pub ne0: i64,
    /// How many rows.
    pub rows: Rows,
    /// By source number.
    pub sources: [Option<Source>; MAX_SOURCES],
    /// For views: bytes from the start of each row.
    pub offset: usize,
}

/// An expert tensor of a layer, as the operation that uses it sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightShape {
    /// Element type (`sys::GGML_TYPE_…`).
    pub kind: sys::ggml_type,
    /// Shape in ggml order.
    pub ne: [i64; 4],
    /// The dimension that counts experts; those beyond it are 1.
    pub expert_dim: usize,
    /// Bytes from one expert to the next.
    pub expert_bytes: usize,
    /// Where it stands in the split: node number and source number.
    at: (usize, usize),
}

impl WeightShape {
    /// The same tensor with room for `n` experts.
    pub fn ne_for(&self, n: i64) -> [i64; 4] {
        let mut ne = self.ne;
        ne[self.expert_dim] = n;
        ne
    }
}

/// A layer's expert FFN. Two layers with equal templates can share everything but their weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FfnTemplate {
    /// In the order of the split; the last one's result is the FFN's.
    pub steps: Vec<Step>,
    /// All expert tensors: projections, biases, scales, LoRA factors.
    pub weights: Vec<WeightShape>,
    /// Elements in a row that goes in.
    pub n_in: i64,
    /// Elements in a row that comes out.
    pub n_out: i64,
    /// Experts per token.
    pub n_used: usize,
    /// Experts that every tensor has.
    pub n_expert: i64,
    /// Whether a token has one row for all of its experts (else one for each).
    pub shared_input: bool,
    /// Where rows go in: node number and source number.
    input_at: (usize, usize),
    /// The node whose rows come out.
    output_at: usize,
}

/// Why a block has no template.
type Reason = &'static str;

impl FfnTemplate {
    /// Reads the template of the one block of a split.
    ///
    /// Fails with the reason where the split holds anything that is not part of the FFN, or is used outside.
    pub fn recognise(split: &Graph<'_>, block: &Block) -> Result<Self, Reason> {
        Reader::new(split, block)?.read()
    }

    /// The split's tensor that holds the rows that go in: `[n_in, 1 or n_used, n_tokens]`.
    pub fn input<'a>(&self, split: &Graph<'a>) -> Option<Tensor<'a>> {
        split.node(self.input_at.0)?.src(self.input_at.1)
    }

    /// The split's tensor that takes the rows that come out: `[n_out, n_used, n_tokens]`.
    pub fn output<'a>(&self, split: &Graph<'a>) -> Option<Tensor<'a>> {
        split.node(self.output_at)
    }

    /// The split's expert tensor number `index`.
    pub fn weight<'a>(&self, split: &Graph<'a>, index: usize) -> Option<Tensor<'a>> {
        let (node, source) = self.weights.get(index)?.at;
        split.node(node)?.src(source)
    }
}

/// Reads one split.
struct Reader<'s, 'a> {
    split: &'s Graph<'a>,
    ids: Tensor<'a>,
    n_tokens: u64,
    template: FfnTemplate,
    input: Option<Tensor<'a>>,
    /// What was made so far: the split's tensor, and the step that makes it.
    made: Vec<(Tensor<'a>, usize)>,
    weights: Vec<Tensor<'a>>,
}

impl<'s, 'a> Reader<'s, 'a> {
    fn new(split: &'s Graph<'a>, block: &Block) -> Result<Self, Reason> {
        let ids = block.ids(split).ok_or("no ids")?;
        let n_expert = block.n_expert(split).and_then(|n| i64::try_from(n).ok()).ok_or("no experts")?;
        let template = FfnTemplate {
            steps: Vec::new(),
            weights: Vec::new(),
            n_in: 0,
            n_out: 0,
            n_used: ids.ne(0) as usize,
            n_expert,
            shared_input: true,
            input_at: (0, 0),
            output_at: 0,
        };
        Ok(Self { split, ids, n_tokens: ids.ne(1), template, input: None, made: Vec::new(), weights: Vec::new() })
    }

    fn read(mut self) -> Result<FfnTemplate, Reason> {
        for (number, node) in self.split.nodes().enumerate() {
            if !is_only_a_view(node.op()) {
                self.add_operation(number, node)?;
            }
        }
        let &(output, _) = self.made.last().ok_or("no operations")?;
        if !self.has_request_rows(&output) || !output.is_contiguous() {
            return Err("rows that come out are not one for each request");
        }
        self.template.n_out = output.ne(0) as i64;
        self.check_uses(&output)?;
        Ok(self.template)
    }

    fn add_operation(&mut self, number: usize, node: Tensor<'a>) -> Result<(), Reason> {
        if node.element_type() != sys::GGML_TYPE_F32 {
            return Err("a result that is not f32");
        }
        let rows = match node.op() {
            sys::GGML_OP_REPEAT => Rows::PerExpert,
            _ if self.has_request_rows(&node) => Rows::PerRequest,
            _ => return Err("rows that are not one for each request"),
        };
        let mut sources = [None; MAX_SOURCES];
        for (index, source) in sources.iter_mut().enumerate() {
            *source = match node.src(index) {
                Some(tensor) => Some(self.source(number, &node, index, tensor)?),
                None => None,
            };
        }
        if node.src(MAX_SOURCES).is_some() {
            return Err("an operation with more sources than expected");
        }
        let step = Step { op: node.op(), params: node.op_params(), ne0: node.ne(0) as i64, rows, sources, offset: 0 };
        self.template.output_at = number;
        self.push(node, step);
        Ok(())
    }

    fn push(&mut self, tensor: Tensor<'a>, step: Step) -> usize {
        self.template.steps.push(step);
        let index = self.template.steps.len() - 1;
        self.made.push((tensor, index));
        index
    }

    fn source(&mut self, number: usize, node: &Tensor<'a>, index: usize, tensor: Tensor<'a>) -> Result<Source, Reason> {
        if tensor.is(&self.ids) {
            return Ok(Source::Ids);
        }
        if let Some(step) = self.step_of(&tensor) {
            return Ok(Source::Step(step));
        }
        if let Some(step) = self.step_of(&tensor.storage()) {
            return self.add_view(tensor, step).map(Source::Step);
        }
        match (node.op(), index) {
            (sys::GGML_OP_MUL_MAT_ID, 0) => self.add_weights(number, index, tensor, 2),
            (sys::GGML_OP_ADD_ID, 1) => self.add_weights(number, index, tensor, 1),
            (sys::GGML_OP_REPEAT, 0) => self.add_weights(number, index, tensor, 1),
            (sys::GGML_OP_MUL_MAT_ID, 1) => self.set_input(number, tensor),
            _ => Err("a source from outside that is neither rows nor experts"),
        }
    }

    fn step_of(&self, tensor: &Tensor<'_>) -> Option<usize> {
        self.made.iter().find(|(known, _)| known.is(tensor)).map(|&(_, step)| step)
    }

    /// A part of every row of an earlier step.
    fn add_view(&mut self, view: Tensor<'a>, of: usize) -> Result<usize, Reason> {
        let whole = view.storage();
        let same_rows = (1..4).all(|dim| view.ne(dim) == whole.ne(dim) && view.nb(dim) == whole.nb(dim));
        let end = view.view_offset() + view.ne(0) as usize * view.nb(0);
        if !same_rows || view.nb(0) != whole.nb(0) || end > whole.nb(1) {
            return Err("a view that is not a part of every row");
        }
        let mut sources = [None; MAX_SOURCES];
        sources[0] = Some(Source::Step(of));
        let rows = self.template.steps[of].rows;
        let (ne0, offset) = (view.ne(0) as i64, view.view_offset());
        Ok(self.push(view, Step { op: sys::GGML_OP_VIEW, params: view.op_params(), ne0, rows, sources, offset }))
    }

    fn add_weights(
        &mut self,
        node: usize,
        source: usize,
        tensor: Tensor<'a>,
        expert_dim: usize,
    ) -> Result<Source, Reason> {
        let leaf = tensor.storage();
        let is_leaf = leaf.op() == sys::GGML_OP_NONE && tensor.view_offset() == 0;
        if !is_leaf || !tensor.is_contiguous() || tensor.n_bytes() != leaf.n_bytes() {
            return Err("experts that are not a tensor of their own");
        }
        let ne = [0, 1, 2, 3].map(|dim| tensor.ne(dim) as i64);
        if ne[expert_dim] != self.template.n_expert || ne[expert_dim + 1..].iter().any(|&n| n != 1) {
            return Err("tensors with other numbers of experts");
        }
        if let Some(known) = self.weights.iter().position(|known| known.is(&tensor)) {
            return Ok(Source::Weights(known));
        }
        self.weights.push(tensor);
        self.template.weights.push(WeightShape {
            kind: tensor.element_type(),
            ne,
            expert_dim,
            expert_bytes: tensor.nb(expert_dim),
            at: (node, source),
        });
        Ok(Source::Weights(self.weights.len() - 1))
    }

    fn set_input(&mut self, node: usize, tensor: Tensor<'a>) -> Result<Source, Reason> {
        if let Some(input) = self.input {
            return if input.is(&tensor) { Ok(Source::Input) } else { Err("projections of different inputs") };
        }
        let per_token = tensor.ne(1);
        let is_known = per_token == 1 || per_token == self.template.n_used as u64;
        if tensor.element_type() != sys::GGML_TYPE_F32 || !is_known || tensor.ne(2) != self.n_tokens {
            return Err("rows that go in are of an unknown shape");
        }
        self.input = Some(tensor);
        self.template.shared_input = per_token == 1;
        self.template.n_in = tensor.ne(0) as i64;
        self.template.input_at = (node, 1);
        Ok(Source::Input)
    }

    fn has_request_rows(&self, tensor: &Tensor<'_>) -> bool {
        tensor.ne(1) == self.template.n_used as u64 && tensor.ne(2) == self.n_tokens && tensor.ne(3) == 1
    }

    /// Only a result that is used here and nowhere else may stay unwritten.
    fn check_uses(&self, output: &Tensor<'_>) -> Result<(), Reason> {
        for (tensor, _) in self.made.iter().filter(|(tensor, _)| !tensor.is(output)) {
            let uses_here = self.n_uses(tensor);
            if tensor.is_output() || uses_here == 0 || self.split.use_count(tensor) != Some(uses_here) {
                return Err("a result in between that is used outside");
            }
        }
        Ok(())
    }

    /// How often the split's operations, and the views that they use, read `tensor`.
    fn n_uses(&self, tensor: &Tensor<'_>) -> u32 {
        let readers = self.made.iter();
        let reads = readers.flat_map(|(reader, _)| (0..MAX_SOURCES).filter_map(|index| reader.src(index)));
        reads.filter(|source| source.is(tensor)).count() as u32
    }
}

/// Views compute nothing: they are read where an operation uses them.
fn is_only_a_view(op: sys::ggml_op) -> bool {
    matches!(
        op,
        sys::GGML_OP_NONE | sys::GGML_OP_VIEW | sys::GGML_OP_RESHAPE | sys::GGML_OP_PERMUTE | sys::GGML_OP_TRANSPOSE
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::testing::Builder;

    const N_EMBD: i64 = 64;
    const N_FF: i64 = 32;
    const N_EXPERT: i64 = 8;
    const N_USED: i64 = 2;
    const N_TOKENS: i64 = 3;

    fn experts(b: &Builder, n_in: i64, n_out: i64) -> Tensor<'_> {
        b.leaf(sys::GGML_TYPE_F32, [n_in, n_out, N_EXPERT])
    }

    fn read(graph: &Graph<'_>) -> Result<FfnTemplate, Reason> {
        FfnTemplate::recognise(graph, &Block::recognise(graph)[0])
    }

    /// Gate, up, activation, down; returns gate and down.
    fn swiglu_block<'a>(b: &'a Builder, x: Tensor<'a>) -> (Tensor<'a>, Tensor<'a>) {
        let ids = b.ids(N_USED, N_EXPERT, N_TOKENS);
        let gate = b.mul_mat_id(experts(b, N_EMBD, N_FF), x, ids);
        let up = b.mul_mat_id(experts(b, N_EMBD, N_FF), x, ids);
        (gate, b.mul_mat_id(experts(b, N_FF, N_EMBD), b.swiglu(gate, up), ids))
    }

    #[test]
    fn a_gated_ffn_becomes_its_operations_in_their_order() {
        let b = Builder::new();
        let x = b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, N_TOKENS]);
        let (_, down) = swiglu_block(&b, x);
        let graph = b.graph(down);
        let template = read(&graph).unwrap();
        let ops: Vec<_> = template.steps.iter().map(|step| step.op).collect();
        let m = sys::GGML_OP_MUL_MAT_ID;
        assert_eq!(ops, [m, m, sys::GGML_OP_GLU, m]);
        assert_eq!(template.steps[3].sources, [Some(Source::Weights(2)), Some(Source::Step(2)), Some(Source::Ids)]);
        assert_eq!((template.n_in, template.n_out, template.n_used, template.shared_input), (N_EMBD, N_EMBD, 2, true));
        assert!(template.input(&graph).unwrap().is(&x) && template.output(&graph).unwrap().is(&down));
        assert_eq!(template.weights[2].ne_for(5), [N_FF, N_EMBD, 5, 1]);
    }

    #[test]
    fn halves_of_a_fused_gate_up_become_views_of_it() {
        let b = Builder::new();
        let (x, ids) = (b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, 1]), b.ids(N_USED, N_EXPERT, 1));
        let gate_up = b.mul_mat_id(experts(&b, N_EMBD, 2 * N_FF), x, ids);
        let glu = b.swiglu(b.half(gate_up, 0), b.half(gate_up, 1));
        let template = read(&b.graph(b.mul_mat_id(experts(&b, N_FF, N_EMBD), glu, ids))).unwrap();
        let views: Vec<_> = template.steps.iter().filter(|step| step.op == sys::GGML_OP_VIEW).collect();
        assert_eq!(views.iter().map(|view| view.offset).collect::<Vec<_>>(), [0, N_FF as usize * size_of::<f32>()]);
        assert!(views.iter().all(|view| view.ne0 == N_FF && view.sources[0] == Some(Source::Step(0))));
    }

    #[test]
    fn rows_for_each_expert_of_a_token_are_told_from_shared_ones() {
        let b = Builder::new();
        let (_, down) = swiglu_block(&b, b.leaf(sys::GGML_TYPE_F32, [N_EMBD, N_USED, N_TOKENS]));
        assert!(!read(&b.graph(down)).unwrap().shared_input);
    }

    #[test]
    fn a_result_that_is_used_outside_must_be_written_and_so_is_refused() {
        let b = Builder::new();
        let (gate, down) = swiglu_block(&b, b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, N_TOKENS]));
        b.graph(b.mul(gate, gate));
        assert_eq!(read(&b.graph(down)), Err("a result in between that is used outside"));
    }

    #[test]
    fn equal_layers_have_equal_templates() {
        let read_one = || {
            let b = Builder::new();
            let (_, down) = swiglu_block(&b, b.leaf(sys::GGML_TYPE_F32, [N_EMBD, 1, N_TOKENS]));
            read(&b.graph(down)).unwrap()
        };
        assert_eq!(read_one(), read_one());
    }
}
