//! A safe way for unit tests to build graphs without memory behind them.

use super::{BufferType, Graph, Tensor, c_text, sys};
use std::ptr::{NonNull, null_mut};

/// Owns the tensors and graphs of one test.
pub(crate) struct Builder {
    raw: NonNull<sys::ggml_context>,
    graph: *mut sys::ggml_cgraph,
}

impl Builder {
    pub(crate) fn new() -> Self {
        let params = sys::ggml_init_params { mem_size: 1 << 20, mem_buffer: null_mut(), no_alloc: true };
        // SAFETY: plain parameters.
        let raw = NonNull::new(unsafe { sys::ggml_init(params) }).unwrap();
        // SAFETY: the context is valid.
        let graph = unsafe { sys::ggml_new_graph(raw.as_ptr()) };
        Self { raw, graph }
    }

    fn wrap(&self, raw: *mut sys::ggml_tensor) -> Tensor<'_> {
        // SAFETY: the tensor lives in our context, and tests are single-threaded users of it.
        unsafe { Tensor::from_raw(raw) }.unwrap()
    }

    pub(crate) fn leaf(&self, kind: sys::ggml_type, shape: [i64; 3]) -> Tensor<'_> {
        // SAFETY: the context is valid.
        self.wrap(unsafe { sys::ggml_new_tensor_3d(self.raw.as_ptr(), kind, shape[0], shape[1], shape[2]) })
    }

    /// Ids as llama.cpp makes them: the first `n_used` rows of a longer `[n_expert, n_tokens]`.
    pub(crate) fn ids(&self, n_used: i64, n_expert: i64, n_tokens: i64) -> Tensor<'_> {
        let all = self.leaf(sys::GGML_TYPE_I32, [n_expert, n_tokens, 1]);
        // SAFETY: the view stays inside `all`.
        self.wrap(unsafe { sys::ggml_view_2d(self.raw.as_ptr(), all.as_raw(), n_used, n_tokens, all.nb(1), 0) })
    }

    pub(crate) fn mul_mat_id(&self, weights: Tensor<'_>, x: Tensor<'_>, ids: Tensor<'_>) -> Tensor<'_> {
        // SAFETY: all tensors are valid; ggml checks their shapes.
        self.wrap(unsafe { sys::ggml_mul_mat_id(self.raw.as_ptr(), weights.as_raw(), x.as_raw(), ids.as_raw()) })
    }

    pub(crate) fn swiglu(&self, gate: Tensor<'_>, up: Tensor<'_>) -> Tensor<'_> {
        // SAFETY: as above.
        self.wrap(unsafe { sys::ggml_swiglu_split(self.raw.as_ptr(), gate.as_raw(), up.as_raw()) })
    }

    pub(crate) fn mul(&self, a: Tensor<'_>, b: Tensor<'_>) -> Tensor<'_> {
        // SAFETY: as above.
        self.wrap(unsafe { sys::ggml_mul(self.raw.as_ptr(), a.as_raw(), b.as_raw()) })
    }

    /// Half `half` (0 or 1) of the innermost dimension, as the fused gate_up is taken apart.
    pub(crate) fn half(&self, of: Tensor<'_>, half: usize) -> Tensor<'_> {
        let [n, rows, tokens] = [of.ne(0) / 2, of.ne(1), of.ne(2)].map(|n| n as i64);
        let offset = half * n as usize * of.nb(0);
        // SAFETY: the view stays inside `of`.
        self.wrap(unsafe {
            sys::ggml_view_3d(self.raw.as_ptr(), of.as_raw(), n, rows, tokens, of.nb(1), of.nb(2), offset)
        })
    }

    /// Puts a leaf into an empty buffer, as the loader's probes and measuring passes do.
    pub(crate) fn place(&self, tensor: Tensor<'_>, kind: BufferType, usage: sys::ggml_backend_buffer_usage) {
        // SAFETY: the buffer type is registered; the buffer is leaked, which a test may do.
        unsafe {
            let buffer = sys::ggml_backend_buft_alloc_buffer(kind.as_raw(), 0);
            sys::ggml_backend_buffer_set_usage(buffer, usage);
            (*tensor.as_raw()).buffer = buffer;
        }
    }

    /// The same as [`Builder::allocate`], in memory that other threads may read, as that of the plugin's own buffers. `leaf`:
    /// any tensor made so far.
    pub(crate) fn allocate_shared(&self, leaf: Tensor<'_>) {
        self.allocate();
        // SAFETY: the buffer is leaked, so that its memory never goes.
        unsafe { super::open_buffer(leaf.buffer().unwrap().address()) };
    }

    /// Gives every tensor made so far zeroed CPU memory, marked as holding weights.
    pub(crate) fn allocate(&self) {
        self.allocate_in(BufferType::cpu().unwrap());
    }

    /// The same in memory of this kind.
    pub(crate) fn allocate_in(&self, kind: BufferType) {
        // SAFETY: the context is valid; the buffer is leaked, which a test may do.
        unsafe {
            let buffer = sys::ggml_backend_alloc_ctx_tensors_from_buft(self.raw.as_ptr(), kind.as_raw());
            sys::ggml_backend_buffer_clear(buffer, 0);
            sys::ggml_backend_buffer_set_usage(buffer, sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        }
    }

    /// Marks what has been allocated as a buffer for results.
    pub(crate) fn mark_results(&self) {
        // SAFETY: the context is valid; its first tensor has a buffer.
        unsafe {
            let first = sys::ggml_get_first_tensor(self.raw.as_ptr());
            sys::ggml_backend_buffer_set_usage((*first).buffer, sys::GGML_BACKEND_BUFFER_USAGE_COMPUTE);
        }
    }

    /// Overwrites the start of a tensor's memory.
    pub(crate) fn fill<T: Copy>(&self, tensor: Tensor<'_>, values: &[T]) {
        let size = size_of_val(values);
        assert!(size <= tensor.n_bytes());
        // SAFETY: `allocate` gave the tensor memory of its own, at least `size` bytes.
        unsafe { sys::ggml_backend_tensor_set(tensor.as_raw(), values.as_ptr().cast(), 0, size) };
    }

    /// A tensor's numbers.
    pub(crate) fn read(&self, tensor: Tensor<'_>) -> Vec<f32> {
        let mut values = vec![0.0; tensor.n_bytes() / size_of::<f32>()];
        // SAFETY: `allocate` gave the tensor memory of its own, and the vector has room for all of it.
        unsafe { sys::ggml_backend_tensor_get(tensor.as_raw(), values.as_mut_ptr().cast(), 0, tensor.n_bytes()) };
        values
    }

    /// Gives a tensor a name.
    pub(crate) fn name(&self, tensor: Tensor<'_>, name: &str) {
        let name = std::ffi::CString::new(name).unwrap();
        // SAFETY: the tensor is valid; ggml copies the name.
        unsafe { sys::ggml_set_name(tensor.as_raw(), name.as_ptr()) };
    }

    /// Marks the graph as the scheduler does.
    pub(crate) fn set_uid(&self, uid: u64) {
        // SAFETY: the graph lives in our context.
        unsafe { (*self.graph).uid = uid };
    }

    /// A graph of this one node, as a host with an eval callback makes them.
    pub(crate) fn graph_of_one<'a>(&'a self, node: Tensor<'a>) -> Graph<'a> {
        // SAFETY: the graph has room for more than one node.
        unsafe {
            *(*self.graph).nodes = node.as_raw();
            (*self.graph).n_nodes = 1;
            Graph::from_raw(self.graph)
        }
        .unwrap()
    }

    /// Everything that has been added to the graph so far.
    pub(crate) fn whole_graph(&self) -> Graph<'_> {
        // SAFETY: the graph lives in our context.
        unsafe { Graph::from_raw(self.graph) }.unwrap()
    }

    /// A graph of everything that `result` needs.
    pub(crate) fn graph(&self, result: Tensor<'_>) -> Graph<'_> {
        // SAFETY: graph and tensor are valid.
        unsafe { sys::ggml_build_forward_expand(self.graph, result.as_raw()) };
        // SAFETY: the graph lives in our context.
        unsafe { Graph::from_raw(self.graph) }.unwrap()
    }
}

/// Loads the CPU backend that stands beside the test's ggml.
pub(crate) fn load_cpu() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/build/stock/bin\0");
    // SAFETY: a NUL-terminated path.
    ONCE.call_once(|| unsafe { sys::ggml_backend_load_all_from_path(folder.as_ptr().cast()) });
}

impl Drop for Builder {
    fn drop(&mut self) {
        // SAFETY: we own the context; all handles borrow from us.
        unsafe { sys::ggml_free(self.raw.as_ptr()) };
    }
}

/// ggml's own name, elements and bytes per block of a type; `None` if it has no such type.
pub fn type_facts(id: u32) -> Option<(String, u64, u64)> {
    let id = Some(id).filter(|&id| id < sys::GGML_TYPE_COUNT)?;
    // SAFETY: the id is in ggml's table; the name is a literal.
    let (name, block, bytes) =
        unsafe { (c_text(sys::ggml_type_name(id)), sys::ggml_blck_size(id), sys::ggml_type_size(id)) };
    (block > 0).then(|| (name.into_owned(), block as u64, bytes as u64))
}
