//! The slot machine against a naive one, under any operations.

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
