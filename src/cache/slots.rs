//! The slots of one layer's pool: which expert each one holds, and whether it may be used yet.
//!
//! A slot goes `Free → Filling → Resident`, and when another expert takes its expert's place, `→ Leaving → Free`. It
//! serves only once its copy is known to be complete, and is filled anew only once no launch uses it; when that is so is
//! the caller's to say. Knows no devices and no copies, and allocates nothing after `new`.

use crate::units::{Expert, Slot};

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// Nothing: can be filled.
    Free,
    /// A copy of this expert is under way.
    Filling(Expert),
    /// This expert, completely.
    Resident(Expert),
    /// An expert that no new launch finds any more; some launch still uses it.
    Leaving,
    /// A copy into it was lost and may still write: never used again.
    Retired,
}

/// Where an expert is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In no slot.
    Cold,
    /// In a slot that cannot be used yet.
    Filling,
    /// In a slot that can be used.
    Resident(Slot),
}

/// All slots of one layer. An expert is in one slot at most.
#[derive(Clone, Debug)]
pub struct Slots {
    /// Per slot.
    states: Box<[SlotState]>,
    /// Per slot: launches that use it.
    users: Box<[u32]>,
    /// Per slot that is being filled: the expert whose place it takes.
    victims: Box<[Option<Expert>]>,
    /// Per expert: the other way round.
    places: Box<[Place]>,
    /// Every free slot once; the last is taken next.
    free: Vec<Slot>,
    /// Per expert: whether another one is on the way to take its place.
    doomed: Box<[bool]>,
    n_resident: usize,
    n_filling: usize,
}

impl Slots {
    /// All free.
    pub fn new(n_expert: u16, n_slots: u16) -> Self {
        Self {
            states: vec![SlotState::Free; n_slots.into()].into(),
            users: vec![0; n_slots.into()].into(),
            victims: vec![None; n_slots.into()].into(),
            places: vec![Place::Cold; n_expert.into()].into(),
            free: (0..n_slots).rev().map(Slot).collect(),
            doomed: vec![false; n_expert.into()].into(),
            n_resident: 0,
            n_filling: 0,
        }
    }

    /// The slot that holds `expert` completely. One look-up: this is the token's path. `None` for ids out of range.
    pub fn resident(&self, expert: Expert) -> Option<Slot> {
        match self.places.get(usize::from(expert.0)) {
            Some(&Place::Resident(slot)) => Some(slot),
            _ => None,
        }
    }

    /// What a slot holds; `None` if there is no such slot.
    pub fn state(&self, slot: Slot) -> Option<SlotState> {
        self.states.get(usize::from(slot.0)).copied()
    }

    /// Whether `expert` is neither resident nor being filled. False for ids out of range.
    pub fn is_cold(&self, expert: Expert) -> bool {
        self.places.get(usize::from(expert.0)) == Some(&Place::Cold)
    }

    /// Experts that are resident and stay so: nobody is on the way to take their place.
    pub fn staying(&self) -> impl Iterator<Item = Expert> {
        let resident = self.states.iter().filter_map(|state| match state {
            SlotState::Resident(expert) => Some(*expert),
            _ => None,
        });
        resident.filter(|&expert| !self.is_doomed(expert))
    }

    /// Slots that an expert is being copied into.
    pub fn n_filling(&self) -> usize {
        self.n_filling
    }

    fn is_doomed(&self, expert: Expert) -> bool {
        self.doomed.get(usize::from(expert.0)).is_some_and(|&is_doomed| is_doomed)
    }

    /// Slots of any state.
    pub fn n_slots(&self) -> usize {
        self.states.len()
    }

    /// Slots that can be filled.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Experts that can be used.
    pub fn n_resident(&self) -> usize {
        self.n_resident
    }

    /// A launch begins to use a resident slot. Until it ends the slot holds what it holds.
    pub fn acquire(&mut self, slot: Slot) {
        if let Some(SlotState::Resident(_)) = self.state(slot) {
            self.users[usize::from(slot.0)] += 1;
        }
    }

    /// A launch that has acquired the slot is over.
    pub fn release(&mut self, slot: Slot) {
        let Some(users) = self.users.get_mut(usize::from(slot.0)) else { return };
        *users = users.saturating_sub(1);
        if *users == 0 && self.state(slot) == Some(SlotState::Leaving) {
            self.set_free(slot);
        }
    }

    /// Takes a free slot for `expert`, beside all that are resident. `None` if no slot is free, or the expert is resident,
    /// being filled or out of range.
    pub fn start_fill(&mut self, expert: Expert) -> Option<Slot> {
        let place = self.places.get_mut(usize::from(expert.0)).filter(|place| **place == Place::Cold)?;
        let slot = self.free.pop()?;
        *place = Place::Filling;
        self.states[usize::from(slot.0)] = SlotState::Filling(expert);
        self.n_filling += 1;
        Some(slot)
    }

    /// Takes a free slot for `expert`, which shall take the place of `victim`. The victim serves until then.
    ///
    /// `None` as for [`Slots::start_fill`], and if the victim is not resident or already the victim of another fill.
    pub fn start_swap(&mut self, expert: Expert, victim: Expert) -> Option<Slot> {
        self.resident(victim).filter(|_| !self.is_doomed(victim))?;
        let slot = self.start_fill(expert)?;
        self.victims[usize::from(slot.0)] = Some(victim);
        self.doomed[usize::from(victim.0)] = true;
        Some(slot)
    }

    /// Takes the slot of `victim` for `expert` at once: from now on neither can be used, until the copy is complete.
    ///
    /// `None` if the expert is not cold, or the victim is not resident, used by a launch, or the victim of a fill.
    pub fn start_replace(&mut self, expert: Expert, victim: Expert) -> Option<Slot> {
        let slot = self.resident(victim)?;
        let is_used = self.users[usize::from(slot.0)] > 0 || self.is_doomed(victim);
        if is_used || !self.is_cold(expert) {
            return None;
        }
        self.places[usize::from(victim.0)] = Place::Cold;
        self.places[usize::from(expert.0)] = Place::Filling;
        self.states[usize::from(slot.0)] = SlotState::Filling(expert);
        self.n_filling += 1;
        self.n_resident -= 1;
        Some(slot)
    }

    /// Whether no launch uses the slot of this resident expert.
    pub fn is_unused(&self, expert: Expert) -> bool {
        self.resident(expert).is_some_and(|slot| self.users[usize::from(slot.0)] == 0)
    }

    /// The slot's copy is complete: its expert can be used from now on, and its victim no more.
    ///
    /// This and the two below answer with the expert; for a slot that is not being filled they change nothing and answer
    /// `None`.
    pub fn publish(&mut self, slot: Slot) -> Option<Expert> {
        let victim = self.victims.get(usize::from(slot.0)).copied().flatten();
        let expert = self.end_fill(slot, SlotState::Resident, Place::Resident(slot))?;
        self.n_resident += 1;
        if let Some(victim) = victim {
            self.evict(victim);
        }
        Some(expert)
    }

    /// The slot's copy was lost: it may still write, so the slot is never used again. Its expert can be filled elsewhere.
    pub fn retire(&mut self, slot: Slot) -> Option<Expert> {
        self.end_fill(slot, |_| SlotState::Retired, Place::Cold)
    }

    /// The slot's copy is known not to have begun, or to be over: the slot is free again.
    pub fn abandon(&mut self, slot: Slot) -> Option<Expert> {
        let expert = self.end_fill(slot, |_| SlotState::Free, Place::Cold)?;
        self.free.push(slot);
        Some(expert)
    }

    fn end_fill(&mut self, slot: Slot, state: impl Fn(Expert) -> SlotState, place: Place) -> Option<Expert> {
        let held = self.states.get_mut(usize::from(slot.0))?;
        let SlotState::Filling(expert) = *held else { return None };
        *held = state(expert);
        self.places[usize::from(expert.0)] = place;
        self.n_filling -= 1;
        if let Some(victim) = self.victims[usize::from(slot.0)].take() {
            self.doomed[usize::from(victim.0)] = false;
        }
        Some(expert)
    }

    fn evict(&mut self, victim: Expert) {
        let Some(slot) = self.resident(victim) else { return };
        self.places[usize::from(victim.0)] = Place::Cold;
        self.n_resident -= 1;
        if self.users[usize::from(slot.0)] == 0 {
            self.set_free(slot);
        } else {
            self.states[usize::from(slot.0)] = SlotState::Leaving;
        }
    }

    fn set_free(&mut self, slot: Slot) {
        self.states[usize::from(slot.0)] = SlotState::Free;
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests;
