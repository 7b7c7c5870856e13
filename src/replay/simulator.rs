//! Plays recorded routing through a policy: how often would the experts have been resident?
//!
//! One layer at a time, since layers share nothing but the look-ahead. A hit is a request, a (token, expert) pair, whose
//! expert is resident when its call begins. No time passes here: late copies are late by a number of calls.

use super::policies::LookAhead;
use crate::cache::policy::{Policy, ReplacementPolicy};
use crate::trace::Calls;
use crate::units::Expert;
use std::collections::VecDeque;

/// The cache to imagine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Experts in the layer.
    pub n_expert: u16,
    /// Slots in the layer. Late copies wait in spare slots beside them, at most `lag` times `inserts`.
    pub slots: u16,
    /// Calls by which a copy is late. 0: it serves the next call.
    pub lag: u32,
    /// Copies that may start per call; `None`: any number.
    pub inserts: Option<u32>,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// (token, expert) pairs.
    pub requests: u64,
    /// Those whose expert was resident.
    pub hits: u64,
    /// Copies started, those of the look-ahead among them; a preload is not counted.
    pub copies: u64,
    /// Copies that the look-ahead started.
    pub ahead: u64,
    /// Those of them whose expert the call then used.
    pub ahead_used: u64,
    /// The most experts that were resident at once.
    pub most_resident: u64,
}

/// One layer's cache as it is played through.
pub struct Replay<P> {
    settings: Settings,
    policy: ReplacementPolicy<P>,
    look_ahead: Option<LookAhead>,
    places: Box<[Place]>,
    /// Resident experts, at most `slots`.
    resident: Vec<Expert>,
    /// Late copies: the first call that each can serve.
    on_their_way: VecDeque<(usize, Expert)>,
    /// The experts of a call, each once.
    used: Vec<Expert>,
    missed: Vec<Expert>,
    call: usize,
    tally: Tally,
}

/// Where an expert is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Cold,
    OnItsWay,
    Resident,
}

impl<P: Policy> Replay<P> {
    /// An empty cache.
    pub fn new(settings: Settings, policy: ReplacementPolicy<P>) -> Self {
        let n_expert = usize::from(settings.n_expert);
        Self {
            settings,
            policy,
            look_ahead: None,
            places: vec![Place::Cold; n_expert].into(),
            resident: Vec::with_capacity(settings.slots.into()),
            on_their_way: VecDeque::new(),
            used: Vec::with_capacity(n_expert),
            missed: Vec::with_capacity(n_expert),
            call: 0,
            tally: Tally::default(),
        }
    }

    /// Copies at most one expert per call before the layer is reached, see [`Replay::play_behind`].
    pub fn with_look_ahead(mut self, look_ahead: LookAhead) -> Self {
        self.look_ahead = Some(look_ahead);
        self
    }

    /// Lets the policy see calls that the cache did not serve: a prompt.
    pub fn learn(&mut self, prompt: &Calls) {
        for ids in prompt.iter() {
            self.note(ids);
            self.policy.observe(&self.used);
        }
    }

    /// The same for the look-ahead: `prompt` of this layer, `before` of the layer before it, call by call.
    pub fn learn_behind(&mut self, before: &Calls, prompt: &Calls) {
        if let Some(look_ahead) = &mut self.look_ahead {
            before.iter().zip(prompt.iter()).for_each(|(before, used)| look_ahead.observe(before, used));
        }
    }

    /// Fills the slots with the best of the experts that `is_known`. Costs no copies.
    pub fn preload(&mut self, is_known: impl Fn(Expert) -> bool) {
        let scores = self.policy.scores();
        let mut order: Vec<Expert> =
            (0..self.settings.n_expert).map(Expert).filter(|&expert| is_known(expert)).collect();
        let score = |expert: &Expert| scores[usize::from(expert.0)];
        order.sort_by(|a, b| score(b).total_cmp(&score(a)));
        for expert in order.into_iter().take(self.settings.slots.into()) {
            self.settle(expert);
        }
    }

    /// Plays all calls and says what came of them.
    pub fn play(self, calls: &Calls) -> Tally {
        self.play_behind(None, calls)
    }

    /// The same with the calls of the layer before, for the look-ahead; they must be as many.
    pub fn play_behind(mut self, before: Option<&Calls>, calls: &Calls) -> Tally {
        let before = before.filter(|before| before.len() == calls.len());
        for (call, ids) in calls.iter().enumerate() {
            self.call(before.map(|before| before.experts(call)), ids);
        }
        self.tally
    }

    fn call(&mut self, before: Option<&[Expert]>, ids: &[Expert]) {
        self.land();
        let ahead = before.and_then(|before| self.fetch_ahead(before));
        self.note(ids);
        self.count(ids, ahead);
        if let (Some(look_ahead), Some(before)) = (&mut self.look_ahead, before) {
            look_ahead.observe(before, &self.used);
        }
        self.policy.observe(&self.used);
        self.fetch();
        self.call += 1;
    }

    /// Writes the experts of a call to `used`, each once, in order.
    fn note(&mut self, ids: &[Expert]) {
        self.used.clear();
        for &id in ids {
            if id.0 < self.settings.n_expert && !self.used.contains(&id) {
                self.used.push(id);
            }
        }
    }

    fn place(&self, expert: Expert) -> Place {
        self.places.get(usize::from(expert.0)).copied().unwrap_or(Place::Cold)
    }

    fn count(&mut self, ids: &[Expert], ahead: Option<Expert>) {
        self.tally.requests += ids.len() as u64;
        self.tally.hits += ids.iter().filter(|&&id| self.place(id) == Place::Resident).count() as u64;
        self.tally.ahead_used += u64::from(ahead.is_some_and(|expert| self.used.contains(&expert)));
    }

    /// Starts the copies that pay.
    fn fetch(&mut self) {
        let mut missed = std::mem::take(&mut self.missed);
        missed.clear();
        missed.extend(self.used.iter().filter(|&&expert| self.place(expert) == Place::Cold));
        for _ in 0..self.settings.inserts.unwrap_or(u32::MAX) {
            let has_free_slot = self.resident.len() + self.on_their_way.len() < self.settings.slots.into();
            let held = self.resident.iter().copied().chain(self.on_their_way.iter().map(|&(_, expert)| expert));
            let Some(admission) = self.policy.admission(missed.iter().copied(), held, has_free_slot) else { break };
            missed.retain(|&expert| expert != admission.admit);
            self.tally.copies += 1;
            if self.settings.lag == 0 {
                self.settle(admission.admit);
            } else {
                self.places[usize::from(admission.admit.0)] = Place::OnItsWay;
                self.on_their_way.push_back((self.call + 1 + self.settings.lag as usize, admission.admit));
            }
        }
        self.missed = missed;
    }

    /// Copies that are complete serve from now on.
    fn land(&mut self) {
        while let Some((_, expert)) = self.on_their_way.pop_front_if(|&mut (call, _)| call <= self.call) {
            self.settle(expert);
        }
    }

    /// Gives `newcomer` a slot. If none is free, the worst of all goes, which may be the newcomer.
    fn settle(&mut self, newcomer: Expert) {
        self.places[usize::from(newcomer.0)] = Place::Resident;
        self.resident.push(newcomer);
        if self.resident.len() > self.settings.slots.into() {
            let worst = self.policy.worst(self.resident.iter().copied());
            self.evict(worst.unwrap_or(newcomer));
        }
        self.tally.most_resident = self.tally.most_resident.max(self.resident.len() as u64);
    }

    fn evict(&mut self, expert: Expert) {
        self.places[usize::from(expert.0)] = Place::Cold;
        if let Some(index) = self.resident.iter().position(|&resident| resident == expert) {
            self.resident.swap_remove(index);
        }
    }

    /// Copies the expert that the layer before gives most reason to expect; it serves the call at hand.
    fn fetch_ahead(&mut self, before: &[Expert]) -> Option<Expert> {
        let (look_ahead, places) = (self.look_ahead.as_mut()?, &self.places);
        let is_cold = |expert: Expert| places[usize::from(expert.0)] == Place::Cold;
        let (admit, evict) =
            look_ahead.admission(before, self.policy.scores(), is_cold, self.resident.iter().copied())?;
        if self.resident.len() >= self.settings.slots.into() {
            self.evict(evict);
        }
        self.places[usize::from(admit.0)] = Place::Resident;
        self.resident.push(admit);
        self.tally.most_resident = self.tally.most_resident.max(self.resident.len() as u64);
        self.tally.copies += 1;
        self.tally.ahead += 1;
        Some(admit)
    }
}
