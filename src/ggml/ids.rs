//! Expert ids of a batch.

use super::{Tensor, sys};
use std::marker::PhantomData;
use std::ptr::NonNull;

impl<'a> Tensor<'a> {
    /// The tensor's data as expert ids, if it is a 2-D tensor of 32-bit integers in host memory.
    pub fn ids(&self) -> Option<Ids<'a>> {
        let is_aligned = [self.address(), self.nb(0), self.nb(1)].iter().all(|n| n % align_of::<i32>() == 0);
        let is_flat = self.ne(2) == 1 && self.ne(3) == 1;
        if self.element_type() != sys::GGML_TYPE_I32 || !is_flat || !is_aligned {
            return None;
        }
        let [n_used, n_tokens] = [self.ne(0) as usize, self.ne(1) as usize];
        if n_used == 0 || n_tokens == 0 {
            return Some(Ids { data: NonNull::dangling(), n_used, n_tokens: 0, strides: [0; 2], memory: PhantomData });
        }
        if !self.is_in_host_memory() {
            return None;
        }
        let data = NonNull::new(self.address() as *mut i32)?;
        Some(Ids { data, n_used, n_tokens, strides: [self.nb(0), self.nb(1)], memory: PhantomData })
    }
}

/// A copy of a batch's expert ids. ggml may use their memory again once the split's last reader is done.
#[derive(Default)]
pub struct OwnIds {
    ids: Vec<i32>,
    n_used: usize,
    n_tokens: usize,
}

impl OwnIds {
    /// Takes a copy; allocates only for a batch larger than all before.
    pub fn read(&mut self, ids: &Ids<'_>) {
        (self.n_used, self.n_tokens) = (ids.n_used(), ids.n_tokens());
        self.ids.clear();
        self.ids.extend(ids.iter().map(|(_, _, id)| id));
    }

    /// Experts per token.
    pub fn n_used(&self) -> usize {
        self.n_used
    }

    /// Tokens in the batch; 0 is normal.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// All ids, token by token.
    pub fn ids(&self) -> &[i32] {
        &self.ids
    }

    /// All ids as `(k, token, id)`, token by token.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize, i32)> {
        let n_used = self.n_used.max(1);
        self.ids.iter().enumerate().map(move |(place, &id)| (place % n_used, place / n_used, id))
    }
}

/// Expert ids `[n_expert_used, n_tokens]`, usually a strided view of a longer argsort result.
pub struct Ids<'a> {
    data: NonNull<i32>,
    n_used: usize,
    n_tokens: usize,
    /// Bytes from id to id and from token to token.
    strides: [usize; 2],
    memory: PhantomData<&'a [i32]>,
}

impl<'a> Ids<'a> {
    /// Experts per token.
    pub fn n_used(&self) -> usize {
        self.n_used
    }

    /// Tokens in the batch; 0 is normal.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// All ids as `(k, token, id)`, token by token.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize, i32)> {
        (0..self.n_tokens).flat_map(move |token| (0..self.n_used).map(move |k| (k, token, self.at(k, token))))
    }

    /// Whether all ids are below `n_experts`.
    pub(super) fn are_below(&self, n_experts: u64) -> bool {
        self.iter().all(|(_, _, id)| u64::try_from(id).is_ok_and(|id| id < n_experts))
    }

    fn at(&self, k: usize, token: usize) -> i32 {
        let offset = k * self.strides[0] + token * self.strides[1];
        // SAFETY: `Tensor::ids` checked alignment and that the tensor, all n_used x n_tokens of it, lies in host memory;
        // a plain read, so it does not matter who writes there at other times.
        unsafe { self.data.byte_add(offset).read() }
    }
}
