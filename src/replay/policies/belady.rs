//! Belady's optimum: keeps what is used again soonest. Needs to know the future, so it serves replay only.

use crate::cache::policy::Policy;
use crate::units::Expert;

/// Scores experts by the next call that uses them. May refuse: what is never used again is not worth a copy.
///
/// With copies at once no policy has more hits. With late copies it is a good plan, not an optimum.
#[derive(Clone, Debug)]
pub struct Belady {
    /// Calls that use each expert, in order: expert e's are `calls[starts[e]..starts[e + 1]]`.
    calls: Vec<u32>,
    starts: Vec<usize>,
    /// Per expert, its next use in `calls`.
    next: Vec<usize>,
    /// Calls observed.
    now: u32,
    /// Calls until a copy that starts now serves.
    lag: u32,
    scores: Box<[f32]>,
    is_stale: bool,
}

impl Belady {
    /// Told all calls to come, each as the experts it uses, and how many calls late copies are.
    pub fn new<'a>(n_expert: u16, future: impl Iterator<Item = &'a [Expert]> + Clone, lag: u32) -> Self {
        let n_expert = usize::from(n_expert);
        let mut uses = vec![Vec::new(); n_expert];
        for (call, experts) in (0..).zip(future) {
            for expert in experts {
                if let Some(uses) = uses.get_mut(usize::from(expert.0)) {
                    uses.push(call);
                }
            }
        }
        let mut starts = vec![0];
        starts.extend(uses.iter().scan(0, |end, uses| {
            *end += uses.len();
            Some(*end)
        }));
        let next = starts[..n_expert].to_vec();
        let scores = vec![0.0; n_expert].into();
        Self { calls: uses.concat(), starts, next, now: 0, lag, scores, is_stale: true }
    }
}

impl Policy for Belady {
    fn observe(&mut self, _used: &[Expert]) {
        self.now += 1;
        self.is_stale = true;
    }

    /// Minus the number of calls until the next use; minus infinity if there is none.
    fn scores(&mut self) -> &[f32] {
        if std::mem::take(&mut self.is_stale) {
            let first = self.now.saturating_add(self.lag);
            for (expert, next) in self.next.iter_mut().enumerate() {
                let end = self.starts[expert + 1];
                while *next < end && self.calls[*next] < first {
                    *next += 1;
                }
                self.scores[expert] =
                    if *next < end { -((self.calls[*next] - first) as f32) } else { f32::NEG_INFINITY };
            }
        }
        &self.scores
    }

    fn long_term_scores(&self) -> &[f32] {
        &self.scores
    }

    fn seed(&mut self, _worth: &[f32]) {}
}
