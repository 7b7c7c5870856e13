//! One trace, one policy, one size.

use super::names::{PolicyName, Warm};
use crate::cache::policy::{AdmissionRule, Blend, CopyCost, Policy, ReplacementPolicy, Weights, ranks, worth_of_ranks};
use crate::profile::RecordedProfile;
use crate::replay::policies::{Belady, Fixed, Lfu, LookAhead, Lru};
use crate::replay::{Replay, Settings, Tally};
use crate::trace::{Calls, LayerTrace, Trace};

/// What to play.
pub struct Case<'a> {
    pub policy: PolicyName,
    pub slots: u16,
    pub inserts: Option<u32>,
    pub warm: Warm,
    pub cost: CopyCost,
    pub look_ahead: bool,
    pub profile: Option<&'a RecordedProfile>,
}

/// What came of it, over all layers.
#[derive(Default)]
pub struct Outcome {
    pub n_tokens: u64,
    pub tally: Tally,
    /// Bytes of all copies, if every layer's expert size is known.
    pub bytes: Option<u64>,
}

/// Plays all layers of a trace.
pub fn play(trace: &Trace, case: &Case<'_>, expert_bytes: Option<u64>) -> Outcome {
    let mut outcome = Outcome { n_tokens: trace.n_tokens(), tally: Tally::default(), bytes: Some(0) };
    let mut before = None;
    for layer in &trace.layers {
        let tally = play_layer(layer, before, case);
        let bytes = layer.info.expert_bytes.or(expert_bytes).and_then(|bytes| bytes.checked_mul(tally.copies));
        outcome.bytes = outcome.bytes.zip(bytes).and_then(|(sum, bytes)| sum.checked_add(bytes));
        outcome.tally = sum(outcome.tally, tally);
        before = Some(layer);
    }
    outcome
}

fn sum(a: Tally, b: Tally) -> Tally {
    Tally {
        requests: a.requests + b.requests,
        hits: a.hits + b.hits,
        copies: a.copies + b.copies,
        ahead: a.ahead + b.ahead,
        ahead_used: a.ahead_used + b.ahead_used,
        most_resident: a.most_resident.max(b.most_resident),
    }
}

fn play_layer(layer: &LayerTrace, before: Option<&LayerTrace>, case: &Case<'_>) -> Tally {
    let info = layer.info;
    let settings = Settings { n_expert: info.n_expert, slots: case.slots, lag: case.cost.lag, inserts: case.inserts };
    let mut replay = Replay::new(settings, policy(layer, case));
    let before = before.filter(|_| case.look_ahead);
    if let Some(before) = before {
        replay = replay.with_look_ahead(LookAhead::new(before.info.n_expert, info.n_expert, case.cost));
    }
    let mut is_known = vec![false; info.n_expert.into()];
    if case.warm == Warm::Prompt {
        replay.learn(&layer.prompt);
        if let Some(before) = before.filter(|before| before.prompt.len() == layer.prompt.len()) {
            replay.learn_behind(&before.prompt, &layer.prompt);
        }
        let used = layer.prompt.iter().flatten();
        used.for_each(|expert| is_known[usize::from(expert.0)] = true);
    }
    if case.warm == Warm::Profile || case.policy == PolicyName::Fixed {
        let counted = case.profile.and_then(|profile| profile.layers.get(&info.layer.into()));
        let counted = counted.into_iter().flat_map(|recorded| &recorded.requests);
        counted.for_each(|&(expert, _)| is_known[expert as usize] = true);
    }
    replay.preload(|expert| is_known[usize::from(expert.0)]);
    replay.play_behind(before.map(|before| &before.decode), &layer.decode)
}

fn policy(layer: &LayerTrace, case: &Case<'_>) -> ReplacementPolicy<Box<dyn Policy>> {
    let n_expert = layer.info.n_expert;
    let (policy, admission): (Box<dyn Policy>, _) = match case.policy {
        PolicyName::Lru => (Box::new(Lru::new(n_expert)), AdmissionRule::ANY_BETTER),
        PolicyName::Lfu => (Box::new(Lfu::new(n_expert)), AdmissionRule::ANY_BETTER),
        PolicyName::Blend => (Box::new(Blend::new(n_expert, Weights::QUICK)), AdmissionRule::ANY_BETTER),
        PolicyName::Belady => (Box::new(belady(layer, case)), AdmissionRule::ANY_BETTER),
        PolicyName::Fixed => (Box::new(Fixed::new(n_expert)), AdmissionRule::NOBODY),
        PolicyName::Default | PolicyName::All => {
            (Box::new(Blend::new(n_expert, Weights::fitting(case.cost))), AdmissionRule::priced(case.cost))
        }
    };
    let mut policy = ReplacementPolicy::new(policy, admission);
    if case.warm == Warm::Profile || case.policy == PolicyName::Fixed {
        policy.seed(&profile_worth(layer, case));
    }
    policy
}

/// Knows the prompt too where the policy sees it.
fn belady(layer: &LayerTrace, case: &Case<'_>) -> Belady {
    let none = Calls::default();
    let prompt = if case.warm == Warm::Prompt { &layer.prompt } else { &none };
    Belady::new(layer.info.n_expert, prompt.iter().chain(layer.decode.iter()), case.cost.lag)
}

/// What the profile says of the layer's experts, as uses per token, `[n_expert]`.
fn profile_worth(layer: &LayerTrace, case: &Case<'_>) -> Vec<f32> {
    let mut counts = vec![0.0; layer.info.n_expert.into()];
    let recorded = case.profile.and_then(|profile| profile.layers.get(&layer.info.layer.into()));
    for &(expert, count) in recorded.into_iter().flat_map(|recorded| &recorded.requests) {
        counts[expert as usize] = count as f32;
    }
    worth_of_ranks(&ranks(&counts), layer.info.n_used)
}
