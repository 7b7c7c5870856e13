//! A graph, or a range of one, that the scheduler hands to a backend.

use super::{Tensor, sys};
use std::marker::PhantomData;
use std::num::NonZeroU64;
use std::ptr::NonNull;

/// The nodes of one split, in execution order.
pub struct Graph<'a> {
    raw: NonNull<sys::ggml_cgraph>,
    owner: PhantomData<&'a sys::ggml_cgraph>,
}

impl<'a> Graph<'a> {
    /// Wraps a graph; `None` for NULL.
    ///
    /// # Safety
    /// `raw` is NULL or a valid graph whose nodes stay valid, and are used by this thread alone, for `'a`. Each of them is
    /// as [`Tensor::from_raw`] demands, and made by one of ggml's constructors. Only the values of ids may be wrong.
    pub unsafe fn from_raw(raw: *mut sys::ggml_cgraph) -> Option<Self> {
        let raw = NonNull::new(raw)?;
        Some(Self { raw, owner: PhantomData })
    }

    fn get(&self) -> &'a sys::ggml_cgraph {
        // SAFETY: `from_raw` promises a valid graph for 'a.
        unsafe { self.raw.as_ref() }
    }

    pub(crate) fn as_raw(&self) -> *mut sys::ggml_cgraph {
        self.raw.as_ptr()
    }

    /// Number that stands for exactly this graph as long as the process lives; `None`: recognise it anew.
    pub fn uid(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.get().uid)
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.get().n_nodes.max(0) as usize
    }

    /// Whether there are no nodes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Node number `index`.
    pub fn node(&self, index: usize) -> Option<Tensor<'a>> {
        if index >= self.len() {
            return None;
        }
        // SAFETY: `nodes` holds `n_nodes` pointers, and `index` is below that.
        let raw = unsafe { *self.get().nodes.add(index) };
        // SAFETY: nodes of a valid graph are valid tensors for 'a.
        unsafe { Tensor::from_raw(raw) }
    }

    /// How many operations of the whole graph (not only of this split) read `node`; `None` if the graph does not know it.
    ///
    /// Looks it up as ggml does (ggml-impl.h, `ggml_hash_find`): address / 16, then linear probing.
    pub fn use_count(&self, node: &Tensor<'_>) -> Option<u32> {
        const BITS: usize = u32::BITS as usize;
        let set = &self.get().visited_hash_set;
        if set.size == 0 || set.used.is_null() || set.keys.is_null() || self.get().use_counts.is_null() {
            return None;
        }
        let first = (node.as_raw() as usize >> 4) % set.size;
        for position in (first..set.size).chain(0..first) {
            // SAFETY: `used` holds one bit, and `keys` and `use_counts` one element, for each of `size` positions.
            unsafe {
                if *set.used.add(position / BITS) >> (position % BITS) & 1 == 0 {
                    return None;
                }
                if *set.keys.add(position) == node.as_raw() {
                    return u32::try_from(*self.get().use_counts.add(position)).ok();
                }
            }
        }
        None
    }

    /// Whether every id of every operation is an expert of the tensor that it picks from. The CPU's kernels do not check it.
    ///
    /// No: for ids that cannot be read before the graph is computed, too.
    pub(super) fn has_valid_ids(&self) -> bool {
        let mut last: Option<(Tensor<'_>, u64)> = None;
        self.nodes().all(|node| {
            let (experts, dim, ids) = match node.op() {
                sys::GGML_OP_MUL_MAT_ID => (node.src(0), 2, node.src(2)),
                sys::GGML_OP_ADD_ID => (node.src(1), 1, node.src(2)),
                sys::GGML_OP_GET_ROWS => (node.src(0), 1, node.src(1)),
                _ => return true,
            };
            let (Some(experts), Some(ids)) = (experts, ids) else { return false };
            let n_experts = experts.ne(dim);
            // The operations of a layer share their ids.
            if last.is_some_and(|(known, bound)| known.is(&ids) && bound <= n_experts) {
                return true;
            }
            last = Some((ids, n_experts));
            let is_made_here = ids.storage().op() != sys::GGML_OP_NONE && self.computes(&ids.storage());
            !is_made_here && ids.ids().is_some_and(|ids| ids.are_below(n_experts))
        })
    }

    fn computes(&self, tensor: &Tensor<'_>) -> bool {
        self.nodes().any(|node| node.is(tensor))
    }

    /// All nodes in execution order.
    pub fn nodes(&self) -> impl Iterator<Item = Tensor<'a>> {
        (0..self.len()).filter_map(|index| self.node(index))
    }
}
