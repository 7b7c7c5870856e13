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
    /// `raw` is NULL or a valid graph whose nodes stay valid, and are used by this thread alone, for `'a`.
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

    /// All nodes in execution order.
    pub fn nodes(&self) -> impl Iterator<Item = Tensor<'a>> {
        (0..self.len()).filter_map(|index| self.node(index))
    }
}
