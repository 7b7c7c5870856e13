//! Which requests of a call go to which lane, and what happens when a lane fails.
//!
//! Requests whose expert is resident go to the device, the others to the CPU; all requests of one expert go to one lane.
//! Knows no devices: [`Lanes`] computes.

use crate::cache::MissCosts;
use crate::ggml::{Graph, Level, OwnIds, Status, log, sys};
use crate::lanes::{Form, Requests};
use crate::runtime::model::layer_cache::{LayerCache, LayerState};
use crate::units::{Expert, MissRule, Slot};
use crate::{Error, Result};
use std::sync::MutexGuard;

/// The requests of one call, by lane.
#[derive(Default)]
pub struct Partition {
    /// For the device: resident experts, and missed ones that are copied first.
    pub hot: Requests,
    /// For the CPU.
    pub cold: Requests,
    /// Missed experts that this call brings to the device first, and into which slots.
    pub copies: Vec<(Expert, Slot)>,
    /// For each id of the batch, in order: whether it was resident.
    is_hot: Vec<bool>,
    /// Slots that this call uses, each as often as it does.
    acquired: Vec<Slot>,
}

impl Partition {
    /// Every request on the CPU.
    pub fn set_all_cold(&mut self, ids: &OwnIds) {
        self.clear(ids);
        ids.iter().for_each(|(k, token, id)| self.cold.push(k, token, id));
        self.is_hot.resize(ids.ids().len(), false);
    }

    /// Tells resident experts from others and acquires the slots of the former. The lock is held for these look-ups only.
    ///
    /// `rule`: what to do with a miss; `can_copy`: whether missed experts can be copied while the token waits.
    pub fn set(&mut self, ids: &OwnIds, cache: &LayerCache, rule: MissRule, can_copy: impl FnOnce() -> bool) {
        self.clear(ids);
        let mut state = cache.state();
        for (k, token, id) in ids.iter() {
            let slot = u16::try_from(id).ok().and_then(|id| state.slots.resident(Expert(id)));
            match slot {
                Some(slot) => {
                    self.hot.push(k, token, slot.0.into());
                    state.slots.acquire(slot);
                    self.acquired.push(slot);
                }
                None => self.cold.push(k, token, id),
            }
            self.is_hot.push(slot.is_some());
        }
        // A fixed set has no room for newcomers.
        let is_fixed = state.policy.is_none();
        if is_fixed || ids.n_tokens() != 1 || rule == MissRule::Cpu || self.cold.is_empty() {
            return;
        }
        // All requests of one expert go to one lane: each must be asked for once.
        if matches!(self.cold.form(), Form::OneToken(_)) && can_copy() {
            let n_slots = state.slots.n_slots().saturating_sub(self.acquired.len());
            let n = costs(cache).choose(rule, self.cold.len(), n_slots);
            self.copy_misses(&mut state, n);
        }
    }

    /// Moves up to `n` missed requests to the device, which copies their experts into slots first.
    fn copy_misses(&mut self, state: &mut LayerState, n: usize) {
        for _ in 0..n {
            let Some((k, token, id)) = self.cold.pop() else { return };
            let Some((expert, slot)) = state.start_copy(id) else {
                self.cold.push(k, token, id);
                return;
            };
            self.hot.push(k, token, slot.0.into());
            self.copies.push((expert, slot));
        }
    }

    /// Lets go of the slots of a call that is computed on the CPU after all; nothing was copied.
    pub fn cancel(&mut self, cache: &LayerCache) {
        let mut state = cache.state();
        self.acquired.drain(..).for_each(|slot| state.slots.release(slot));
        for (_, slot) in self.copies.drain(..) {
            state.slots.abandon(slot);
        }
    }

    fn clear(&mut self, ids: &OwnIds) {
        let n = ids.ids().len();
        self.hot.reset(n);
        self.cold.reset(n);
        self.is_hot.clear();
        self.acquired.clear();
        self.copies.clear();
    }

    /// For each id of the batch, in order: whether it was resident and served from there.
    pub fn served_hot(&self) -> impl Iterator<Item = bool> {
        self.is_hot.iter().copied()
    }

    /// Lets go of the slots, and publishes what was copied if it `has_landed`.
    pub fn settle(&mut self, cache: &LayerCache, has_landed: bool) {
        if self.acquired.is_empty() && self.copies.is_empty() {
            return;
        }
        let mut state = cache.state();
        self.acquired.drain(..).for_each(|slot| state.slots.release(slot));
        self.copies.iter().for_each(|&(_, slot)| state.end_copy(slot, has_landed));
        drop(state);
        if has_landed && !self.copies.is_empty() {
            cache.handle.add_copied(self.copies.len(), cache.writer.expert_bytes());
        }
    }
}

fn costs(cache: &LayerCache) -> MutexGuard<'_, MissCosts> {
    cache.handle.device.costs()
}

/// Both lanes, as far as a call needs them.
pub trait Lanes {
    /// The whole split on the CPU, where it lies.
    fn compute_whole(&mut self, split: &Graph<'_>) -> Status;

    /// Both lanes at once and one wait. Runs `meanwhile` while the device may still be at work. Writes nothing of the split.
    fn compute_both(
        &mut self,
        split: &Graph<'_>,
        partition: &Partition,
        meanwhile: impl FnOnce(),
    ) -> Result<Status, LaneError>;

    /// Writes all rows to where they belong in the split. Every reader of the split is done by then.
    fn write_rows(&mut self, split: &Graph<'_>, partition: &Partition) -> Result<()>;
}

/// Which lane failed. Nothing of the split has been written.
#[derive(Debug)]
pub enum LaneError {
    /// The device refused the graph, with this status of ggml's.
    Refused(Status),
    /// Something went wrong with the device.
    Device(Error),
    /// Something went wrong on the CPU. The device is not to blame.
    Cpu(Error),
}

/// What became of a call.
#[derive(Debug, PartialEq, Eq)]
pub struct Computed {
    /// ggml's answer.
    pub status: Status,
    /// Whether the device has done its part.
    pub has_landed: bool,
    /// Which lane failed, so that the CPU has computed all, and why.
    pub fault: Option<LaneFault>,
}

/// A lane that failed, and why.
#[derive(Debug, PartialEq, Eq)]
pub enum LaneFault {
    /// The device is to be given up.
    Device(String),
    /// The CPU lane. It is to be expected that the layer's next call fails too.
    Cpu(String),
}

/// Computes a call that has requests for the device.
///
/// Where a lane fails before anything of the split is written, the CPU computes the whole split: the right answer, only
/// slower. Once rows have been written the split's memory, which its tensors may share, no longer holds what went in: a
/// failure then fails the call.
pub fn compute(
    lanes: &mut impl Lanes,
    split: &Graph<'_>,
    partition: &mut Partition,
    meanwhile: impl FnOnce(),
) -> Computed {
    let done = |status| Computed { status, has_landed: true, fault: None };
    let (has_landed, fault) = match lanes.compute_both(split, partition, meanwhile) {
        Ok(sys::GGML_STATUS_SUCCESS) => {
            return match lanes.write_rows(split, partition) {
                Ok(()) => done(sys::GGML_STATUS_SUCCESS),
                Err(error) => {
                    log(Level::Error, &format!("rows could not be written: {error}"));
                    done(sys::GGML_STATUS_FAILED)
                }
            };
        }
        // The CPU's own answer, as when the host aborts.
        Ok(status) => return done(status),
        Err(LaneError::Refused(status)) => {
            (false, LaneFault::Device(format!("it refused to compute (ggml status {status})")))
        }
        Err(LaneError::Device(error)) => (false, LaneFault::Device(error.to_string())),
        Err(LaneError::Cpu(error)) => (true, LaneFault::Cpu(error.to_string())),
    };
    partition.is_hot.fill(false);
    Computed { status: lanes.compute_whole(split), has_landed, fault: Some(fault) }
}

#[cfg(test)]
mod tests;
