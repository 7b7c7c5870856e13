//! The slots of one layer's pool: which expert each one holds, and whether it may be used yet.
//!
//! A slot goes `Free → Filling → Resident`. It serves only once its copy is known to be complete; when that is known
//! is the caller's to say. Knows no devices and no copies, and allocates nothing after `new`.

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

    /// Takes a free slot for `expert`. `None` if no slot is free, or the expert is resident, being filled or out of range.
    pub fn start_fill(&mut self, expert: Expert) -> Option<Slot> {
        let place = self.places.get_mut(usize::from(expert.0)).filter(|place| **place == Place::Cold)?;
        let slot = self.free.pop()?;
        *place = Place::Filling;
        self.states[usize::from(slot.0)] = SlotState::Filling(expert);
        Some(slot)
    }

    /// The slot's copy is complete: its expert can be used from now on.
    ///
    /// This and the two below answer with the expert; for a slot that is not being filled they change nothing and answer
    /// `None`.
    pub fn publish(&mut self, slot: Slot) -> Option<Expert> {
        let expert = self.end_fill(slot, SlotState::Resident, Place::Resident(slot))?;
        self.n_resident += 1;
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
        Some(expert)
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
        Publish(Slot),
        Retire(Slot),
        Abandon(Slot),
    }

    /// Ids one or two past the end as well.
    fn operation() -> impl Strategy<Value = Operation> {
        let slot = || (0..N_SLOTS + 2).prop_map(Slot);
        prop_oneof![
            4 => (0..N_EXPERT + 2).prop_map(|id| Operation::StartFill(Expert(id))),
            2 => slot().prop_map(Operation::Publish),
            1 => slot().prop_map(Operation::Retire),
            2 => slot().prop_map(Operation::Abandon),
        ]
    }

    /// The rules, with nothing but the list of states.
    #[derive(Clone, Debug, PartialEq)]
    struct Naive(Vec<SlotState>);

    impl Naive {
        fn find(&self, wanted: SlotState) -> Option<Slot> {
            (0..).map(Slot).zip(&self.0).find_map(|(slot, &state)| (state == wanted).then_some(slot))
        }

        fn may_fill(&self, expert: Expert) -> bool {
            let held = [SlotState::Filling(expert), SlotState::Resident(expert)];
            expert.0 < N_EXPERT && self.0.contains(&SlotState::Free) && !held.iter().any(|state| self.0.contains(state))
        }

        fn end_fill(&mut self, slot: Slot, next: impl Fn(Expert) -> SlotState) -> Option<Expert> {
            match self.0.get(usize::from(slot.0)) {
                Some(&SlotState::Filling(expert)) => {
                    self.0[usize::from(slot.0)] = next(expert);
                    Some(expert)
                }
                _ => None,
            }
        }
    }

    fn states(slots: &Slots) -> Vec<SlotState> {
        (0..N_SLOTS).filter_map(|slot| slots.state(Slot(slot))).collect()
    }

    /// Does the same to both and compares the answers.
    fn apply(slots: &mut Slots, naive: &mut Naive, operation: Operation) -> Result<(), TestCaseError> {
        match operation {
            Operation::StartFill(expert) => {
                let started = slots.start_fill(expert);
                prop_assert_eq!(started.is_some(), naive.may_fill(expert));
                if let Some(slot) = started {
                    prop_assert_eq!(naive.0[usize::from(slot.0)], SlotState::Free, "only a free slot is filled");
                    naive.0[usize::from(slot.0)] = SlotState::Filling(expert);
                }
            }
            Operation::Publish(slot) => prop_assert_eq!(slots.publish(slot), naive.end_fill(slot, SlotState::Resident)),
            Operation::Retire(slot) => {
                prop_assert_eq!(slots.retire(slot), naive.end_fill(slot, |_| SlotState::Retired));
            }
            Operation::Abandon(slot) => {
                prop_assert_eq!(slots.abandon(slot), naive.end_fill(slot, |_| SlotState::Free));
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn slots_follow_the_rules_under_any_operations(operations in prop::collection::vec(operation(), 0..80)) {
            let mut slots = Slots::new(N_EXPERT, N_SLOTS);
            let mut naive = Naive(states(&slots));
            for operation in operations {
                apply(&mut slots, &mut naive, operation)?;
                prop_assert_eq!(&states(&slots), &naive.0);
                let count = |kind: fn(&SlotState) -> bool| naive.0.iter().filter(|state| kind(state)).count();
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
            let mut naive = Naive(states(&slots));
            for operation in operations {
                apply(&mut slots, &mut naive, operation)?;
                for expert in experts() {
                    let holds = |state: &SlotState| [SlotState::Filling(expert), SlotState::Resident(expert)].contains(state);
                    prop_assert!(states(&slots).iter().filter(|state| holds(state)).count() <= 1);
                }
            }
        }

        #[test]
        fn a_retired_slot_stays_retired(operations in prop::collection::vec(operation(), 0..80)) {
            let mut slots = Slots::new(N_EXPERT, N_SLOTS);
            let lost = slots.start_fill(Expert(0)).unwrap();
            slots.retire(lost);
            let mut naive = Naive(states(&slots));
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
