//! The engine: a copy is one transaction of a host-to-device copy for each tensor, a read-back of its ends, and one event.
//!
//! The driver offers no wait with a limit, so events are asked for in short intervals: what is waited for is another
//! device, which wakes nobody. After a failure nothing is started any more; whatever the device may still use is then kept
//! for the life of the process.

use super::DeviceId;
use super::driver::{Context, Stream};
use super::staging::Block;
use crate::device::copy::{COPY_TIMEOUT, Copy, CopyEngine, Outcome, Read, Started};
use crate::ggml::{Level, log};
use crate::{Error, Result};
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks at an event.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Copies to one CUDA device through page-locked memory and a stream of its own.
pub struct CudaEngine(ManuallyDrop<Queue>);

/// What a copy needs until it has ended.
struct InFlight {
    copy: Copy,
    block: Block,
    /// When its turn came.
    since: Instant,
}

/// All that the device may use while copies are in flight. The context is dropped last.
struct Queue {
    free: Vec<Block>,
    /// Oldest first.
    in_flight: VecDeque<InFlight>,
    /// Reported or refused, but perhaps still used by the device.
    not_reusable: Vec<InFlight>,
    timeout: Duration,
    has_failed: bool,
    has_lost: bool,
    stream: Stream,
    context: Context,
}

impl InFlight {
    /// Whether what was read back is what was sent. To be asked once the copy has ended.
    fn has_arrived(&self) -> Result<bool> {
        let Copy { target, slot, .. } = &self.copy;
        let ranges = target.ranges(slot.0).ok_or(Error::Contract("a slot that the pool does not have"))?;
        self.block.has_arrived(target.expert_bytes(), ranges.map(|(_, len)| len))
    }
}

impl CudaEngine {
    /// An engine for experts of up to `expert_bytes`. Staging is page-locked if `pinned` and if the driver can.
    pub fn new(id: &DeviceId, expert_bytes: usize, pinned: bool) -> Result<Self> {
        let context = Context::new(id)?;
        let stream = Stream::new()?;
        let free = Block::allocate_all(expert_bytes, pinned)?;
        let (in_flight, not_reusable) = (VecDeque::with_capacity(free.len()), Vec::with_capacity(free.len()));
        let timeout = COPY_TIMEOUT;
        let queue =
            Queue { free, in_flight, not_reusable, timeout, has_failed: false, has_lost: false, stream, context };
        Ok(Self(ManuallyDrop::new(queue)))
    }

    /// The same with another limit than [`COPY_TIMEOUT`].
    #[cfg(test)]
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.0.timeout = timeout;
        self
    }
}

impl CopyEngine for CudaEngine {
    fn start(&mut self, copy: Copy, read: Read<'_>) -> Started {
        let queue = &mut *self.0;
        if queue.has_failed || copy.target.ranges(copy.slot.0).is_none() {
            return Started::Refused;
        }
        let Some(mut block) = queue.free.pop() else { return Started::Full };
        if !block.fill(copy.target.expert_bytes(), read) {
            queue.free.push(block);
            return Started::Unreadable;
        }
        let sent = queue.send(&copy, &mut block);
        let copy = InFlight { copy, block, since: Instant::now() };
        match sent {
            Ok(()) => {
                queue.in_flight.push_back(copy);
                Started::Yes
            }
            Err(error) => {
                // Some of its tensors may be on their way.
                queue.fail(copy, &error);
                Started::Refused
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight.len()
    }

    fn paused(&mut self, time: Duration) {
        self.0.in_flight.iter_mut().for_each(|copy| copy.since += time);
    }

    fn wait(&mut self, timeout: Duration) -> Option<(u64, Outcome)> {
        let queue = &mut *self.0;
        let left = queue.timeout.saturating_sub(queue.in_flight.front()?.since.elapsed());
        let ended = queue.oldest_has_ended(timeout.min(left));
        if matches!(ended, Ok(false)) && timeout < left {
            return None;
        }
        let oldest = queue.in_flight.pop_front()?;
        let id = oldest.copy.id;
        let failed = |reason: String| Error::Cuda { call: "a copy", reason };
        let outcome = match ended.and_then(|ended| Ok((ended, ended && oldest.has_arrived()?))) {
            Ok((true, true)) => {
                queue.free.push(oldest.block);
                Outcome::Whole
            }
            Ok((true, false)) => {
                queue.fail(oldest, &failed("what was read back is not what was sent".into()));
                Outcome::Failed
            }
            Ok((false, _)) => {
                queue.has_lost = true;
                queue.fail(oldest, &failed(format!("no end after {:?}", queue.timeout)));
                Outcome::Lost
            }
            Err(error) => {
                queue.fail(oldest, &error);
                Outcome::Failed
            }
        };
        if let Some(next) = queue.in_flight.front_mut() {
            // It waited behind the one that has just ended.
            next.since = Instant::now();
        }
        Some((id, outcome))
    }
}

impl Queue {
    fn send(&self, copy: &Copy, block: &mut Block) -> Result<()> {
        self.context.make_current()?;
        let ranges = copy.target.ranges(copy.slot.0).ok_or(Error::Contract("a slot that the pool does not have"))?;
        // SAFETY: the ranges lie in the pool, which the copy keeps alive, and in a slot that is nobody else's until the copy is
        // reported. Copy and block are kept until the event is reached, or else for the life of the process.
        unsafe { block.send(&self.stream, copy.target.expert_bytes(), ranges) }
    }

    fn oldest_has_ended(&self, limit: Duration) -> Result<bool> {
        let Some(oldest) = self.in_flight.front() else { return Ok(false) };
        self.context.make_current()?;
        within(limit, || oldest.block.event.is_reached())
    }

    /// Nothing is started after this. What users are told is for the caller.
    fn fail(&mut self, copy: InFlight, error: &Error) {
        log(Level::Info, &error.to_string());
        self.has_failed = true;
        self.not_reusable.push(copy);
    }

    /// Waits until the device uses nothing of it any more; `false` if that cannot be known.
    fn is_idle_in_time(&self) -> bool {
        let limit = if self.has_lost { Duration::ZERO } else { self.timeout };
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
        thread::sleep(left.min(POLL_INTERVAL));
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        if self.0.is_idle_in_time() {
            // SAFETY: dropped here only, and not used afterwards. The context is current, and the device uses nothing of it.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}
