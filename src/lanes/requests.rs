//! Lists of requests, and how their rows are laid out for a graph.

use crate::ggml::{HostBlock, Tensor};
use crate::moe::FfnTemplate;
use crate::{Error, Result};

/// Requests for one lane: which rows of the split, and which expert (cold) or slot (hot) for each.
#[derive(Default)]
pub struct Requests {
    /// `(k, token)`: the request's place in the token's top-k, and the token.
    rows: Vec<(usize, usize)>,
    /// The expert or slot of each row.
    ids: Vec<i32>,
}

impl Requests {
    /// Makes room for `n` requests and forgets all.
    pub fn reset(&mut self, n: usize) {
        self.rows.clear();
        self.ids.clear();
        self.rows.reserve(n);
        self.ids.reserve(n);
    }

    /// Adds request number `k` of `token`, for an expert or slot.
    pub fn push(&mut self, k: usize, token: usize, id: i32) {
        self.rows.push((k, token));
        self.ids.push(id);
    }

    /// Takes the last one out: its `k`, token, and expert or slot.
    pub fn pop(&mut self) -> Option<(usize, usize, i32)> {
        let ((k, token), id) = (self.rows.pop()?, self.ids.pop()?);
        Some((k, token, id))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The layout for these requests. Those of a single token stand side by side only if their experts are distinct:
    /// device kernels rely on that.
    pub fn form(&self) -> Form {
        let is_one_token = self.rows.iter().all(|&(_, token)| token == self.rows[0].1);
        let is_distinct = || self.ids.iter().enumerate().all(|(n, id)| !self.ids[..n].contains(id));
        if is_one_token && is_distinct() { Form::OneToken(self.len()) } else { Form::PerRow(self.len()) }
    }

    /// Whether these are all requests of the one token of a batch, in order, and for distinct experts.
    pub fn are_one_token(&self, n_used: usize, n_tokens: usize) -> bool {
        let is_in_order = || self.rows.iter().enumerate().all(|(n, &(k, _))| k == n);
        n_tokens == 1 && self.form() == Form::OneToken(n_used) && is_in_order()
    }

    /// The ids.
    pub(super) fn ids(&self) -> &[i32] {
        &self.ids
    }

    /// The form of a graph for these requests on a device that holds experts in `n_slots` slots, and the slot of the rows
    /// that fill it up; `max_rows` is the most requests that there can be.
    ///
    /// That slot is nobody else's: kernels choose their way by the number of an expert's rows, and ways round differently.
    pub(super) fn form_with_room(&self, max_rows: usize, n_slots: u16) -> (Form, i32) {
        let form = self.form();
        match (0..i32::from(n_slots)).find(|slot| !self.ids.contains(slot)) {
            Some(unused) => (form.with_room(max_rows), unused),
            None => (form, 0),
        }
    }

    /// Writes ids at byte 0 and the rows that go in at `input_offset`. `filler` is the id of rows that fill the form up.
    pub(super) fn write_inputs(
        &self,
        block: &mut HostBlock,
        input_offset: usize,
        template: &FfnTemplate,
        (form, filler): (Form, i32),
        input: &Tensor<'_>,
    ) -> Result<()> {
        block.write_ids(0, &self.ids)?;
        // Rows that fill the graph up are computed too, and mean nothing.
        for row in self.len()..form.rows() {
            block.write_ids(row * size_of::<i32>(), &[filler])?;
        }
        let row_bytes = row_bytes(template.n_in);
        for (row, &(k, token)) in self.rows.iter().take(form.input_rows(template)).enumerate() {
            let k = if template.shared_input { 0 } else { k };
            block.write_row(input_offset + row * row_bytes, input, k, token)?;
        }
        Ok(())
    }

    /// Copies the rows that came out, from `output_offset`, to where they belong in `output`.
    pub(super) fn read_outputs(
        &self,
        block: &HostBlock,
        output_offset: usize,
        template: &FfnTemplate,
        output: &Tensor<'_>,
    ) -> Result<()> {
        let row_bytes = row_bytes(template.n_out);
        for (row, &(k, token)) in self.rows.iter().enumerate() {
            block.read_row(output_offset + row * row_bytes, output, k, token)?;
        }
        Ok(())
    }
}

/// Bytes of a row of `ne0` f32 elements.
pub(super) fn row_bytes(ne0: i64) -> usize {
    ne0 as usize * size_of::<f32>()
}

/// How the rows of `n` requests are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `[n_embd, n, 1]`: distinct experts of one token.
    OneToken(usize),
    /// `[n_embd, 1, n]`: each row stands for a token with one expert.
    PerRow(usize),
}

impl Form {
    /// The form of a graph that has room for these requests: of those for several tokens there are few, so that each is
    /// captured and compiled once. `max_rows`: the most that there can be.
    pub fn with_room(self, max_rows: usize) -> Self {
        match self {
            Form::OneToken(_) => self,
            Form::PerRow(n) => Form::PerRow(n.next_power_of_two().min(max_rows).max(n)),
        }
    }

    /// Rows.
    pub fn rows(self) -> usize {
        match self {
            Form::OneToken(n) | Form::PerRow(n) => n,
        }
    }

    /// The second and third dimension of results.
    pub fn dims(self) -> Result<[i64; 2]> {
        let n = i64::try_from(self.rows()).map_err(|_| Error::Contract("a graph of too many rows"))?;
        Ok(match self {
            Form::OneToken(_) => [n, 1],
            Form::PerRow(_) => [1, n],
        })
    }

    /// Rows that go in: experts of one token can share one.
    pub fn input_rows(self, template: &FfnTemplate) -> usize {
        match self {
            Form::OneToken(_) if template.shared_input => 1,
            _ => self.rows(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(list: &[(usize, i32)]) -> Requests {
        let mut requests = Requests::default();
        list.iter().enumerate().for_each(|(k, &(token, id))| requests.push(k, token, id));
        requests
    }

    #[test]
    fn distinct_experts_of_one_token_stand_side_by_side() {
        assert_eq!(requests(&[(3, 1), (3, 7), (3, 2)]).form(), Form::OneToken(3));
    }

    #[test]
    fn all_requests_of_one_token_are_told_from_some() {
        let one_token = |list: &[(usize, i32)], n_tokens| {
            let mut requests = Requests::default();
            list.iter().for_each(|&(k, id)| requests.push(k, 0, id));
            requests.are_one_token(3, n_tokens)
        };
        assert!(one_token(&[(0, 4), (1, 7), (2, 2)], 1));
        assert!(!one_token(&[(0, 4), (1, 7)], 1), "one is missing");
        assert!(!one_token(&[(0, 4), (1, 7), (2, 4)], 1), "one expert twice");
        assert!(!one_token(&[(1, 4), (0, 7), (2, 2)], 1), "out of order");
        assert!(!one_token(&[(0, 4), (1, 7), (2, 2)], 2), "the other token's are missing");
        assert!(!one_token(&[], 1));
    }

    #[test]
    fn graphs_for_several_tokens_are_few() {
        let sizes: std::collections::BTreeSet<_> = (1..=60).map(|n| Form::PerRow(n).with_room(60).rows()).collect();
        assert_eq!(sizes.into_iter().collect::<Vec<_>>(), [1, 2, 4, 8, 16, 32, 60]);
        assert_eq!(Form::OneToken(7).with_room(60), Form::OneToken(7));
    }

    #[test]
    fn a_graph_is_filled_up_with_rows_of_a_slot_that_nobody_uses() {
        let some = requests(&[(0, 1), (1, 0), (1, 2)]);
        assert_eq!(some.form_with_room(60, 8), (Form::PerRow(4), 3));
        assert_eq!(some.form_with_room(60, 3), (Form::PerRow(3), 0), "there is none: not filled up");
    }

    #[test]
    fn several_tokens_or_a_repeated_expert_make_each_row_a_token_of_its_own() {
        assert_eq!(requests(&[(0, 1), (1, 2)]).form(), Form::PerRow(2));
        assert_eq!(requests(&[(0, 1), (0, 1)]).form(), Form::PerRow(2));
    }
}
