//! The engine: a copy is one transaction of a host-to-device copy for each tensor and one event after them.
//!
//! The driver offers no wait with a limit, so events are asked for in short intervals: what is waited for is another
//! device, which wakes nobody. After a failure nothing is started any more; whatever the device may still use is then kept
//! for the life of the process.

use super::Place;
use super::driver::{Context, Stream};
use super::staging::Block;
use crate::device::copy::{Copy, CopyEngine, Outcome, PATIENCE, Read, Started};
use crate::ggml::{Level, log};
use crate::{Error, Result};
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks at an event.
const GLANCE: Duration = Duration::from_micros(100);

/// Copies to one CUDA device through page-locked memory and a stream of its own.
pub struct CudaEngine(ManuallyDrop<Ring>);

/// What a copy needs until it has ended.
struct Flight {
    copy: Copy,
    block: Block,
    /// When its turn came.
    since: Instant,
}

/// All that the device may use while copies are in flight. The context is dropped last.
struct Ring {
    free: Vec<Block>,
    /// Oldest first.
    flying: VecDeque<Flight>,
    /// Reported or refused, but perhaps still used by the device.
    stranded: Vec<Flight>,
    patience: Duration,
    has_failed: bool,
    has_lost: bool,
    stream: Stream,
    context: Context,
}

impl CudaEngine {
    /// An engine for experts of up to `expert_bytes`. Staging is page-locked if `pinned` and if the driver can.
    pub fn new(place: &Place, expert_bytes: usize, pinned: bool) -> Result<Self> {
        let context = Context::new(place)?;
        let stream = Stream::new()?;
        let free = Block::allocate_all(expert_bytes, pinned)?;
        let (flying, stranded) = (VecDeque::with_capacity(free.len()), Vec::with_capacity(free.len()));
        let patience = PATIENCE;
        let ring = Ring { free, flying, stranded, patience, has_failed: false, has_lost: false, stream, context };
        Ok(Self(ManuallyDrop::new(ring)))
    }

    /// The same with another limit than [`PATIENCE`].
    #[cfg(test)]
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.0.patience = patience;
        self
    }
}

impl CopyEngine for CudaEngine {
    fn start(&mut self, copy: Copy, read: Read<'_>) -> Started {
        let ring = &mut *self.0;
        if ring.has_failed || copy.target.ranges(copy.slot.0).is_none() {
            return Started::Refused;
        }
        let Some(mut block) = ring.free.pop() else { return Started::Full };
        if !block.fill(copy.target.expert_bytes(), read) {
            ring.free.push(block);
            return Started::Unreadable;
        }
        let sent = ring.send(&copy, &block);
        let flight = Flight { copy, block, since: Instant::now() };
        match sent {
            Ok(()) => {
                ring.flying.push_back(flight);
                Started::Yes
            }
            Err(error) => {
                // Some of its tensors may be on their way.
                ring.fail(flight, &error);
                Started::Refused
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.0.flying.len()
    }

    fn wait(&mut self, timeout: Duration) -> Option<(u64, Outcome)> {
        let ring = &mut *self.0;
        let left = ring.patience.saturating_sub(ring.flying.front()?.since.elapsed());
        let arrived = ring.oldest_has_arrived(timeout.min(left));
        if matches!(arrived, Ok(false)) && timeout < left {
            return None;
        }
        let flight = ring.flying.pop_front()?;
        let id = flight.copy.id;
        let outcome = match arrived {
            Ok(true) => {
                ring.free.push(flight.block);
                Outcome::Whole
            }
            Ok(false) => {
                ring.has_lost = true;
                ring.fail(flight, &Error::Cuda { call: "a copy", reason: format!("no end after {:?}", ring.patience) });
                Outcome::Lost
            }
            Err(error) => {
                ring.fail(flight, &error);
                Outcome::Failed
            }
        };
        if let Some(next) = ring.flying.front_mut() {
            // It waited behind the one that has just ended.
            next.since = Instant::now();
        }
        Some((id, outcome))
    }
}

impl Ring {
    fn send(&self, copy: &Copy, block: &Block) -> Result<()> {
        self.context.make_current()?;
        let mut rest = block.bytes(copy.target.expert_bytes())?;
        for (address, len) in copy.target.ranges(copy.slot.0).ok_or(Error::Ggml("a slot of the pool"))? {
            let (part, after) = rest.split_at(len);
            // SAFETY: the range lies in the pool, which the copy keeps alive, and in a slot that is nobody else's until the
            // copy is reported. Copy and block are kept until the event is reached, or else for the life of the process.
            unsafe { self.stream.copy_to_device(address, part) }?;
            rest = after;
        }
        self.stream.record(&block.event)
    }

    fn oldest_has_arrived(&self, limit: Duration) -> Result<bool> {
        let Some(oldest) = self.flying.front() else { return Ok(false) };
        self.context.make_current()?;
        within(limit, || oldest.block.event.is_reached())
    }

    /// Nothing is started after this. What users are told is for the caller.
    fn fail(&mut self, flight: Flight, error: &Error) {
        log(Level::Info, &error.to_string());
        self.has_failed = true;
        self.stranded.push(flight);
    }

    /// Waits until the device uses nothing of it any more; `false` if that cannot be known.
    fn comes_to_rest(&self) -> bool {
        let limit = if self.has_lost { Duration::ZERO } else { self.patience };
        self.context.make_current().and_then(|()| within(limit, || self.stream.is_idle())).unwrap_or(false)
    }
}

/// Asks until it is so, or until `limit` is over.
fn within(limit: Duration, is_so: impl Fn() -> Result<bool>) -> Result<bool> {
    let begin = Instant::now();
    loop {
        if is_so()? {
            return Ok(true);
        }
        let left = limit.saturating_sub(begin.elapsed());
        if left.is_zero() {
            return Ok(false);
        }
        thread::sleep(left.min(GLANCE));
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        if self.0.comes_to_rest() {
            // SAFETY: dropped here only, and not used afterwards. The context is current, and the device uses nothing of it.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}
