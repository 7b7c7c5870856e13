//! A graph as it is at the moment of the call, with device addresses replaced by real ones, for ggml's CPU backend.
//!
//! Nodes come first and in order, then everything they refer to. How often a node is used is taken over from the
//! original graph, so that the CPU backend fuses what it would have fused there.

use crate::memory::{Place, place};
use crate::{device, say, settings, sys};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_void};
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};
use std::ptr::{NonNull, null, null_mut};
use std::sync::OnceLock;

const BITS: usize = u32::BITS as usize;

/// One graph's copy. Kept and filled again, as it holds its memory.
#[derive(Default)]
pub(crate) struct Snapshot {
    index: HashMap<usize, usize, BuildHasherDefault<AddressHasher>>,
    originals: Vec<*const sys::ggml_tensor>,
    tensors: Vec<sys::ggml_tensor>,
    nodes: Vec<*mut sys::ggml_tensor>,
    keys: Vec<*mut sys::ggml_tensor>,
    used: Vec<u32>,
    use_counts: Vec<i32>,
}

// SAFETY: it owns what its pointers point to, but for tensors' data, which the host keeps until it is computed.
unsafe impl Send for Snapshot {}

/// Why a graph cannot be computed here.
#[derive(Debug)]
pub(crate) struct NotOurs(String);

impl std::fmt::Display for NotOurs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tensor \"{}\" is neither in this device's memory nor in the host's", self.0)
    }
}

impl Snapshot {
    /// Replaces the contents by a copy of `graph`.
    ///
    /// # Safety
    /// `graph`, its tensors and their buffers are valid.
    pub(crate) unsafe fn take(&mut self, graph: *const sys::ggml_cgraph) -> Result<(), NotOurs> {
        // SAFETY: passed on from the caller, here and below.
        let nodes = unsafe { nodes_of(graph) };
        self.index.clear();
        self.originals.clear();
        self.tensors.clear();
        nodes.iter().for_each(|&node| self.add(node));
        for &node in nodes {
            // SAFETY: as above.
            let node = unsafe { &*node };
            node.src.iter().chain([&node.view_src]).filter(|source| !source.is_null()).for_each(|&t| self.add(t));
        }
        for i in 0..self.originals.len() {
            // SAFETY: as above.
            let tensor = unsafe { translated(self.originals[i])? };
            self.tensors.push(tensor);
        }
        let first = self.tensors.as_mut_ptr();
        let find = |of: *mut sys::ggml_tensor| match self.index.get(&(of as usize)) {
            Some(&i) => first.wrapping_add(i),
            None => null_mut(),
        };
        for (i, tensor) in self.tensors.iter_mut().enumerate() {
            let is_node = i < nodes.len();
            tensor.src = if is_node { tensor.src.map(find) } else { [null_mut(); sys::GGML_MAX_SRC as usize] };
            tensor.view_src = if is_node { find(tensor.view_src) } else { null_mut() };
        }
        self.nodes.clear();
        self.nodes.extend((0..nodes.len()).map(|i| first.wrapping_add(i)));
        // SAFETY: as above.
        unsafe { self.take_use_counts(&*graph, nodes) };
        Ok(())
    }

    /// What tells whether another graph has the same operations, types and shapes.
    pub(crate) fn kind(&self) -> u64 {
        let mut kind = DefaultHasher::new();
        self.tensors.iter().for_each(|tensor| (tensor.op, tensor.type_, tensor.ne, tensor.nb).hash(&mut kind));
        kind.finish()
    }

    /// Where each tensor's bytes are.
    pub(crate) fn addresses(&self) -> Vec<usize> {
        self.tensors.iter().map(|tensor| tensor.data as usize).collect()
    }

    /// Has them computed elsewhere.
    pub(crate) fn set_addresses(&mut self, addresses: &[usize]) {
        self.tensors.iter_mut().zip(addresses).for_each(|(tensor, &address)| tensor.data = address as *mut c_void);
    }

    fn add(&mut self, tensor: *const sys::ggml_tensor) {
        if let Entry::Vacant(entry) = self.index.entry(tensor as usize) {
            entry.insert(self.originals.len());
            self.originals.push(tensor);
        }
    }

    /// Fills the table in which ggml looks up a node's uses (ggml-impl.h, `ggml_node_get_use_count`).
    ///
    /// # Safety
    /// As for [`Snapshot::take`].
    unsafe fn take_use_counts(&mut self, graph: &sys::ggml_cgraph, nodes: &[*mut sys::ggml_tensor]) {
        let size = 2 * nodes.len() + 1;
        self.keys.clear();
        self.keys.resize(size, null_mut());
        self.use_counts.clear();
        self.use_counts.resize(size, 0);
        self.used.clear();
        self.used.resize(size.div_ceil(BITS), 0);
        for (&node, &original) in self.nodes.iter().zip(nodes) {
            let mut slot = hash(node) % size;
            while !self.keys[slot].is_null() {
                slot = (slot + 1) % size;
            }
            self.keys[slot] = node;
            self.used[slot / BITS] |= 1 << (slot % BITS);
            // SAFETY: passed on from the caller.
            self.use_counts[slot] = unsafe { use_count(graph, original) };
        }
    }

    fn as_graph(&mut self) -> sys::ggml_cgraph {
        sys::ggml_cgraph {
            size: self.nodes.len() as c_int,
            n_nodes: self.nodes.len() as c_int,
            n_leafs: 0,
            nodes: self.nodes.as_mut_ptr(),
            grads: null_mut(),
            grad_accs: null_mut(),
            leafs: null_mut(),
            use_counts: self.use_counts.as_mut_ptr(),
            visited_hash_set: sys::ggml_hash_set {
                size: self.keys.len(),
                used: self.used.as_mut_ptr(),
                keys: self.keys.as_mut_ptr(),
            },
            order: sys::GGML_CGRAPH_EVAL_ORDER_LEFT_TO_RIGHT,
            uid: 0,
        }
    }
}

/// # Safety
/// `graph` is valid for `'a`.
pub(crate) unsafe fn nodes_of<'a>(graph: *const sys::ggml_cgraph) -> &'a [*mut sys::ggml_tensor] {
    // SAFETY: passed on from the caller; ggml's graphs hold `n_nodes` valid nodes.
    unsafe {
        if (*graph).n_nodes <= 0 {
            return &[];
        }
        std::slice::from_raw_parts((*graph).nodes, (*graph).n_nodes as usize)
    }
}

/// A copy of a tensor whose data is the real one, in a buffer that the CPU backend takes for the host's.
///
/// # Safety
/// The tensor and its buffer are valid.
unsafe fn translated(original: *const sys::ggml_tensor) -> Result<sys::ggml_tensor, NotOurs> {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut tensor = *original;
        match place(original, 0, sys::ggml_nbytes(original)) {
            Place::Ours(real) => {
                tensor.data = real.cast();
                tensor.buffer = host_buffer();
                tensor.extra = null_mut();
                Ok(tensor)
            }
            Place::Host => Ok(tensor),
            Place::Foreign => Err(NotOurs(std::ffi::CStr::from_ptr(tensor.name.as_ptr()).to_string_lossy().into())),
        }
    }
}

/// An empty buffer of ggml's own host type.
fn host_buffer() -> sys::ggml_backend_buffer_t {
    static BUFFER: OnceLock<usize> = OnceLock::new();
    // SAFETY: the CPU's buffer type is a static of ggml's; a buffer of size 0 is never NULL.
    let address = BUFFER.get_or_init(|| unsafe {
        sys::ggml_backend_buft_alloc_buffer(sys::ggml_backend_cpu_buffer_type(), 0) as usize
    });
    *address as sys::ggml_backend_buffer_t
}

/// ggml's own hash of a tensor (ggml-impl.h, `ggml_hash`).
fn hash(tensor: *const sys::ggml_tensor) -> usize {
    tensor as usize >> 4
}

/// How often a node is used in the graph it comes from; 0 if that does not know it.
///
/// # Safety
/// `graph` is valid.
unsafe fn use_count(graph: &sys::ggml_cgraph, node: *const sys::ggml_tensor) -> i32 {
    let set = &graph.visited_hash_set;
    if set.size == 0 || graph.use_counts.is_null() {
        return 0;
    }
    let first = hash(node) % set.size;
    let mut slot = first;
    loop {
        // SAFETY: the table has `size` slots, and a bit for each.
        unsafe {
            if *set.used.add(slot / BITS) >> (slot % BITS) & 1 == 0 {
                return 0;
            }
            if (*set.keys.add(slot)).cast_const() == node {
                return *graph.use_counts.add(slot);
            }
        }
        slot = (slot + 1) % set.size;
        if slot == first {
            return 0;
        }
    }
}

/// Addresses of tensors are multiples of 16; nobody chooses them to do harm.
#[derive(Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_usize(byte as usize);
        }
    }

    fn write_usize(&mut self, value: usize) {
        self.0 = (self.0 ^ (value as u64 >> 4)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32);
    }
}

/// An instance of ggml's CPU backend, which does the mathematics.
pub(crate) struct Cpu(NonNull<sys::ggml_backend>);

// SAFETY: a backend instance may move between threads; one queue's thread uses it.
unsafe impl Send for Cpu {}

impl Cpu {
    /// `None` if the CPU backend is not loaded.
    pub(crate) fn new() -> Option<Self> {
        let device = device::cpu();
        if device.is_null() {
            return None;
        }
        // SAFETY: the device is registered; NULL parameters ask for defaults. ggml documents the function looked up
        // with exactly this signature (ggml-backend.h).
        unsafe {
            let backend = NonNull::new(sys::ggml_backend_dev_init(device, null()))?;
            let registry = sys::ggml_backend_dev_backend_reg(device);
            let set_threads = sys::ggml_backend_reg_get_proc_address(registry, c"ggml_backend_set_n_threads".as_ptr());
            if let Some(set_threads) = NonNull::new(set_threads) {
                type SetThreads = unsafe extern "C" fn(sys::ggml_backend_t, c_int);
                let set_threads = std::mem::transmute::<NonNull<std::ffi::c_void>, SetThreads>(set_threads);
                set_threads(backend.as_ptr(), settings::THREADS.get().max(1) as c_int);
            }
            Some(Self(backend))
        }
    }

    /// Computes all nodes and waits.
    pub(crate) fn compute(&self, graph: &mut Snapshot) {
        let mut graph = graph.as_graph();
        // SAFETY: the snapshot is whole and outlives the call; this thread alone uses the instance.
        let status = unsafe { sys::ggml_backend_graph_compute(self.0.as_ptr(), &mut graph) };
        if status != sys::GGML_STATUS_SUCCESS {
            say(&format!("the CPU backend answered {status}"));
        }
    }
}

impl Drop for Cpu {
    fn drop(&mut self) {
        // SAFETY: we own the instance.
        unsafe { sys::ggml_backend_free(self.0.as_ptr()) };
    }
}
