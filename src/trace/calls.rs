//! The calls of one layer, as a trace holds them.

use crate::units::Expert;

/// The calls of one layer, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// The experts of all calls, one token after the other.
    ids: Vec<Expert>,
    /// Per call, its tokens and where its experts end in `ids`.
    calls: Vec<(u32, usize)>,
}

impl Calls {
    /// Adds a call: the experts of its tokens, one token after the other.
    pub fn push(&mut self, n_tokens: u32, ids: impl IntoIterator<Item = Expert>) {
        self.ids.extend(ids);
        self.calls.push((n_tokens, self.ids.len()));
    }

    /// Each call's experts.
    pub fn iter(&self) -> impl Iterator<Item = &[Expert]> + Clone {
        (0..self.calls.len()).map(|call| self.experts(call))
    }

    /// The experts of one call; none if there is no such call.
    pub fn experts(&self, call: usize) -> &[Expert] {
        let start = call.checked_sub(1).and_then(|before| self.calls.get(before)).map_or(0, |call| call.1);
        self.calls.get(call).map_or(&[], |call| &self.ids[start..call.1])
    }

    /// Calls.
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Tokens of all calls.
    pub fn n_tokens(&self) -> u64 {
        self.calls.iter().map(|&(n_tokens, _)| u64::from(n_tokens)).sum()
    }

    /// (token, expert) pairs of all calls.
    pub fn n_requests(&self) -> usize {
        self.ids.len()
    }
}
