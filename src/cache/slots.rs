//! The slots of one layer's pool: which expert each one holds, and whether it may be used yet.
//!
//! A slot goes `Free → Filling → Resident`, and when another expert takes its expert's place, `→ Leaving → Free`. It
//! serves only once its copy is known to be complete, and is filled anew only once no launch uses it; when that is so is
//! the caller's to say. Knows no devices and no copies, and allocates nothing after `new`.

use super::{Expert, Slot};

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
    n_resident: usize,
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
            n_resident: 0,
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
        resident.filter(|expert| !self.victims.contains(&Some(*expert)))
    }

    /// Slots that an expert is being copied into.
    pub fn n_filling(&self) -> usize {
        self.states.iter().filter(|state| matches!(state, SlotState::Filling(_))).count()
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
        Some(slot)
    }

    /// Takes a free slot for `expert`, which shall take the place of `victim`. The victim serves until then.
    ///
    /// `None` as for [`Slots::start_fill`], and if the victim is not resident or already the victim of another fill.
    pub fn start_swap(&mut self, expert: Expert, victim: Expert) -> Option<Slot> {
        self.resident(victim).filter(|_| !self.victims.contains(&Some(victim)))?;
        let slot = self.start_fill(expert)?;
        self.victims[usize::from(slot.0)] = Some(victim);
        Some(slot)
    }

    /// Takes the slot of `victim` for `expert` at once: from now on neither can be used, until the copy is complete.
    ///
    /// `None` if the expert is not cold, or the victim is not resident, used by a launch, or the victim of a fill.
    pub fn start_replace(&mut self, expert: Expert, victim: Expert) -> Option<Slot> {
        let slot = self.resident(victim)?;
        let is_used = self.users[usize::from(slot.0)] > 0 || self.victims.contains(&Some(victim));
        if is_used || !self.is_cold(expert) {
            return None;
        }
        self.places[usize::from(victim.0)] = Place::Cold;
        self.places[usize::from(expert.0)] = Place::Filling;
        self.states[usize::from(slot.0)] = SlotState::Filling(expert);
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
        self.victims[usize::from(slot.0)] = None;
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    const N_EXPERT: u16 = 6;
    const N_SLOTS: u16 = 4;

    fn experts() -> impl Iterator<Item = Expert> {
        (0..N_EXPERT).map(Expert)
    }

    #[derive(Clone, Copy, Debug)]
    enum Operation {
        StartFill(Expert),
        StartSwap(Expert, Expert),
        StartReplace(Expert, Expert),
        Publish(Slot),
        Retire(Slot),
        Abandon(Slot),
        /// A launch looks an expert up and uses its slot if it has one.
        Launch(Expert),
        /// The oldest launch ends.
        Land,
    }

    /// Ids one or two past the end as well.
    fn operation() -> impl Strategy<Value = Operation> {
        let slot = || (0..N_SLOTS + 2).prop_map(Slot);
        let expert = || (0..N_EXPERT + 2).prop_map(Expert);
        prop_oneof![
            4 => expert().prop_map(Operation::StartFill),
            4 => (expert(), expert()).prop_map(|(expert, victim)| Operation::StartSwap(expert, victim)),
            2 => (expert(), expert()).prop_map(|(expert, victim)| Operation::StartReplace(expert, victim)),
            4 => slot().prop_map(Operation::Publish),
            1 => slot().prop_map(Operation::Retire),
            2 => slot().prop_map(Operation::Abandon),
            4 => expert().prop_map(Operation::Launch),
            3 => Just(Operation::Land),
        ]
    }

    /// The rules, with nothing but the list of states, of victims, and of the launches that run.
    #[derive(Clone, Debug, PartialEq)]
    struct Naive {
        states: Vec<SlotState>,
        victims: Vec<Option<Expert>>,
        launches: Vec<(Slot, Expert)>,
    }

    impl Naive {
        fn new(states: Vec<SlotState>) -> Self {
            Self { victims: vec![None; states.len()], states, launches: Vec::new() }
        }

        fn find(&self, wanted: SlotState) -> Option<Slot> {
            (0..).map(Slot).zip(&self.states).find_map(|(slot, &state)| (state == wanted).then_some(slot))
        }

        fn may_fill(&self, expert: Expert) -> bool {
            let held = [SlotState::Filling(expert), SlotState::Resident(expert)];
            let is_held = held.iter().any(|state| self.states.contains(state));
            expert.0 < N_EXPERT && self.states.contains(&SlotState::Free) && !is_held
        }

        fn may_swap(&self, expert: Expert, victim: Expert) -> bool {
            let is_resident = self.states.contains(&SlotState::Resident(victim));
            self.may_fill(expert) && is_resident && !self.victims.contains(&Some(victim))
        }

        /// The slot of a victim that nothing holds back.
        fn may_replace(&self, expert: Expert, victim: Expert) -> Option<Slot> {
            let held = [SlotState::Filling(expert), SlotState::Resident(expert)];
            let is_cold = expert.0 < N_EXPERT && !held.iter().any(|state| self.states.contains(state));
            let slot = self.find(SlotState::Resident(victim)).filter(|_| is_cold)?;
            let is_used = self.launches.iter().any(|&(used, _)| used == slot) || self.victims.contains(&Some(victim));
            (!is_used).then_some(slot)
        }

        fn end_fill(&mut self, slot: Slot, next: impl Fn(Expert) -> SlotState) -> Option<Expert> {
            let place = usize::from(slot.0);
            let Some(&SlotState::Filling(expert)) = self.states.get(place) else { return None };
            self.states[place] = next(expert);
            let victim = self.victims[place].take();
            if let (SlotState::Resident(_), Some(victim)) = (self.states[place], victim) {
                let left = self.find(SlotState::Resident(victim)).unwrap();
                let is_used = self.launches.iter().any(|&(slot, _)| slot == left);
                self.states[usize::from(left.0)] = if is_used { SlotState::Leaving } else { SlotState::Free };
            }
            Some(expert)
        }

        fn land(&mut self) -> Option<Slot> {
            if self.launches.is_empty() {
                return None;
            }
            let (slot, _) = self.launches.remove(0);
            let place = usize::from(slot.0);
            let is_used = self.launches.iter().any(|&(other, _)| other == slot);
            if self.states[place] == SlotState::Leaving && !is_used {
                self.states[place] = SlotState::Free;
            }
            Some(slot)
        }
    }

    fn states(slots: &Slots) -> Vec<SlotState> {
        (0..N_SLOTS).filter_map(|slot| slots.state(Slot(slot))).collect()
    }

    /// Does the same to both and compares the answers.
    fn apply(slots: &mut Slots, naive: &mut Naive, operation: Operation) -> Result<(), TestCaseError> {
        let filled = |naive: &mut Naive, slot: Slot, expert, victim| {
            prop_assert_eq!(naive.states[usize::from(slot.0)], SlotState::Free, "only a free slot is filled");
            naive.states[usize::from(slot.0)] = SlotState::Filling(expert);
            naive.victims[usize::from(slot.0)] = victim;
            Ok(())
        };
        match operation {
            Operation::StartFill(expert) => {
                let started = slots.start_fill(expert);
                prop_assert_eq!(started.is_some(), naive.may_fill(expert));
                started.map_or(Ok(()), |slot| filled(naive, slot, expert, None))?;
            }
            Operation::StartSwap(expert, victim) => {
                let started = slots.start_swap(expert, victim);
                prop_assert_eq!(started.is_some(), naive.may_swap(expert, victim));
                started.map_or(Ok(()), |slot| filled(naive, slot, expert, Some(victim)))?;
            }
            Operation::StartReplace(expert, victim) => {
                let slot = slots.start_replace(expert, victim);
                prop_assert_eq!(slot, naive.may_replace(expert, victim));
                if let Some(slot) = slot {
                    naive.states[usize::from(slot.0)] = SlotState::Filling(expert);
                }
            }
            Operation::Publish(slot) => prop_assert_eq!(slots.publish(slot), naive.end_fill(slot, SlotState::Resident)),
            Operation::Retire(slot) => {
                prop_assert_eq!(slots.retire(slot), naive.end_fill(slot, |_| SlotState::Retired));
            }
            Operation::Abandon(slot) => {
                prop_assert_eq!(slots.abandon(slot), naive.end_fill(slot, |_| SlotState::Free));
            }
            Operation::Launch(expert) => {
                if let Some(slot) = slots.resident(expert) {
                    slots.acquire(slot);
                    naive.launches.push((slot, expert));
                }
            }
            Operation::Land => {
                if let Some(slot) = naive.land() {
                    slots.release(slot);
                }
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn slots_follow_the_rules_under_any_operations(operations in prop::collection::vec(operation(), 0..80)) {
            let mut slots = Slots::new(N_EXPERT, N_SLOTS);
            let mut naive = Naive::new(states(&slots));
            for operation in operations {
                apply(&mut slots, &mut naive, operation)?;
                prop_assert_eq!(&states(&slots), &naive.states);
                let count = |kind: fn(&SlotState) -> bool| naive.states.iter().filter(|state| kind(state)).count();
                prop_assert_eq!(slots.n_free(), count(|state| *state == SlotState::Free));
                prop_assert_eq!(slots.n_resident(), count(|state| matches!(state, SlotState::Resident(_))));
                for expert in experts() {
                    prop_assert_eq!(slots.resident(expert), naive.find(SlotState::Resident(expert)));
                }
            }
        }

        #[test]
        fn an_expert_is_in_one_slot_at_most(operations in prop::collection::vec(operation(), 0..80)) {
            let mut slots = Slots::new(N_EXPERT, N_SLOTS);
            let mut naive = Naive::new(states(&slots));
            for operation in operations {
                apply(&mut slots, &mut naive, operation)?;
                for expert in experts() {
                    let holds = |state: &SlotState| [SlotState::Filling(expert), SlotState::Resident(expert)].contains(state);
                    prop_assert!(states(&slots).iter().filter(|state| holds(state)).count() <= 1);
                }
            }
        }

        #[test]
        fn a_slot_that_a_launch_uses_is_never_filled_anew(operations in prop::collection::vec(operation(), 0..120)) {
            let mut slots = Slots::new(N_EXPERT, N_SLOTS);
            let mut naive = Naive::new(states(&slots));
            for operation in operations {
                apply(&mut slots, &mut naive, operation)?;
                for &(slot, expert) in &naive.launches {
                    let state = slots.state(slot);
                    prop_assert!(state == Some(SlotState::Resident(expert)) || state == Some(SlotState::Leaving));
                }
            }
        }

        #[test]
        fn a_retired_slot_stays_retired(operations in prop::collection::vec(operation(), 0..80)) {
            let mut slots = Slots::new(N_EXPERT, N_SLOTS);
            let lost = slots.start_fill(Expert(0)).unwrap();
            slots.retire(lost);
            let mut naive = Naive::new(states(&slots));
            for operation in operations {
                apply(&mut slots, &mut naive, operation)?;
                prop_assert_eq!(slots.state(lost), Some(SlotState::Retired));
                prop_assert!(experts().all(|expert| slots.resident(expert) != Some(lost)));
            }
        }
    }

    #[test]
    fn an_expert_serves_only_once_its_copy_is_published() {
        let mut slots = Slots::new(4, 2);
        let slot = slots.start_fill(Expert(3)).unwrap();
        assert_eq!((slots.resident(Expert(3)), slots.state(slot)), (None, Some(SlotState::Filling(Expert(3)))));
        assert_eq!(slots.publish(slot), Some(Expert(3)));
        assert_eq!((slots.resident(Expert(3)), slots.n_resident()), (Some(slot), 1));
        assert_eq!(slots.publish(slot), None, "published twice");
    }

    #[test]
    fn an_expert_that_is_resident_or_being_filled_takes_no_second_slot() {
        let mut slots = Slots::new(4, 3);
        let slot = slots.start_fill(Expert(1)).unwrap();
        assert_eq!(slots.start_fill(Expert(1)), None);
        slots.publish(slot);
        assert_eq!((slots.start_fill(Expert(1)), slots.n_free()), (None, 2));
    }

    #[test]
    fn a_lost_copy_costs_its_slot_and_not_its_expert() {
        let mut slots = Slots::new(4, 2);
        let lost = slots.start_fill(Expert(1)).unwrap();
        assert_eq!(slots.retire(lost), Some(Expert(1)));
        assert_eq!((slots.publish(lost), slots.abandon(lost)), (None, None), "its late end changes nothing");
        let second = slots.start_fill(Expert(1)).unwrap();
        assert_ne!(second, lost);
        assert_eq!(slots.start_fill(Expert(2)), None);
    }

    #[test]
    fn an_abandoned_slot_is_filled_again() {
        let mut slots = Slots::new(4, 1);
        let slot = slots.start_fill(Expert(0)).unwrap();
        assert_eq!(slots.start_fill(Expert(1)), None, "full");
        assert_eq!(slots.abandon(slot), Some(Expert(0)));
        assert_eq!(slots.start_fill(Expert(1)), Some(slot));
    }

    #[test]
    fn a_victim_serves_until_the_newcomer_is_published_and_its_slot_until_no_launch_uses_it() {
        let mut slots = Slots::new(4, 2);
        let old = slots.start_fill(Expert(0)).unwrap();
        slots.publish(old);
        slots.acquire(old);
        let new = slots.start_swap(Expert(1), Expert(0)).unwrap();
        assert_eq!(slots.resident(Expert(0)), Some(old));
        slots.publish(new);
        assert_eq!((slots.resident(Expert(0)), slots.resident(Expert(1)), slots.n_resident()), (None, Some(new), 1));
        assert_eq!((slots.state(old), slots.start_fill(Expert(2))), (Some(SlotState::Leaving), None));
        slots.release(old);
        assert_eq!(slots.start_fill(Expert(2)), Some(old));
    }

    #[test]
    fn an_abandoned_newcomer_leaves_its_victim_where_it_is() {
        let mut slots = Slots::new(4, 2);
        let old = slots.start_fill(Expert(0)).unwrap();
        slots.publish(old);
        let new = slots.start_swap(Expert(1), Expert(0)).unwrap();
        slots.abandon(new);
        assert_eq!(slots.resident(Expert(0)), Some(old));
        assert!(slots.start_swap(Expert(2), Expert(0)).is_some(), "it can be a victim again");
    }

    #[test]
    fn ids_out_of_range_and_pools_without_slots_are_answered_with_none() {
        let mut slots = Slots::new(4, 2);
        assert_eq!((slots.resident(Expert(4)), slots.start_fill(Expert(u16::MAX))), (None, None));
        assert_eq!((slots.publish(Slot(2)), slots.state(Slot(2))), (None, None));
        let mut none = Slots::new(0, 0);
        assert_eq!((none.start_fill(Expert(0)), none.n_free(), none.n_slots()), (None, 0, 0));
        assert_eq!(Slots::new(u16::MAX, u16::MAX).n_free(), usize::from(u16::MAX));
    }

    #[test]
    fn the_lowest_slot_is_filled_first() {
        let mut slots = Slots::new(4, 3);
        assert_eq!([2, 0, 1].map(|id| slots.start_fill(Expert(id))), [Some(Slot(0)), Some(Slot(1)), Some(Slot(2))]);
    }
}
