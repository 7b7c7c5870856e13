//! The engine: a copy is one transaction of host-to-device copies and a read-back of its ends. It goes in pieces, few at a
//! time, with an event for each: the bus is everybody's, and the rows of a token wait behind what is under way.
//!
//! The driver offers no wait with a limit, so events are asked for in short intervals: what is waited for is another
//! device, which wakes nobody. After a failure nothing is started any more; whatever the device may still use is then kept
//! for the life of the process.

use super::driver::{Context, Event, Stream};
use super::staging::Block;
use crate::device::copy::{COPY_TIMEOUT, Copy, CopyEngine, Outcome, Read, Started};
use crate::ggml::{Level, PIECES_IN_FLIGHT, log};
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
    /// Bytes that have been sent.
    sent: usize,
    /// With which piece it ends; `None` as long as that has not been sent.
    ends_with: Option<u64>,
}

/// All that the device may use while copies are in flight. The context is dropped last.
struct Queue {
    free: Vec<Block>,
    /// Oldest first.
    in_flight: VecDeque<InFlight>,
    /// Reported or refused, but perhaps still used by the device.
    not_reusable: Vec<InFlight>,
    /// Reached when a piece has ended, by the piece's number.
    events: [Event; PIECES_IN_FLIGHT],
    pieces_sent: u64,
    pieces_ended: u64,
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
    /// An engine for experts of up to `expert_bytes`, on the device whose memory is at `address`. Staging is page-locked if
    /// `pinned` and if the driver can.
    pub fn new(address: usize, expert_bytes: usize, pinned: bool) -> Result<Self> {
        let context = Context::of(address)?;
        let stream = Stream::new()?;
        let events = [Event::new()?, Event::new()?];
        let free = Block::allocate_all(expert_bytes, pinned)?;
        let (in_flight, not_reusable) = (VecDeque::with_capacity(free.len()), Vec::with_capacity(free.len()));
        Ok(Self(ManuallyDrop::new(Queue {
            free,
            in_flight,
            not_reusable,
            events,
            pieces_sent: 0,
            pieces_ended: 0,
            timeout: COPY_TIMEOUT,
            has_failed: false,
            has_lost: false,
            stream,
            context,
        })))
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
        queue.in_flight.push_back(InFlight { copy, block, since: Instant::now(), sent: 0, ends_with: None });
        let Err(error) = queue.advance() else { return Started::Yes };
        if let Some(copy) = queue.in_flight.pop_back() {
            // Some of it may be on its way.
            queue.fail(copy, &error);
        }
        Started::Refused
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
        let pieces_ended = queue.pieces_ended;
        let ended = queue.oldest_has_ended(timeout.min(left));
        let has_advanced = queue.pieces_ended > pieces_ended;
        if matches!(ended, Ok(false)) && (timeout < left || has_advanced) {
            if let Some(oldest) = queue.in_flight.front_mut().filter(|_| has_advanced) {
                // What advances is not lost, however long this process was stopped meanwhile.
                oldest.since = Instant::now();
            }
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
    /// Sees which pieces have ended, and sends as many as may be on their way.
    fn advance(&mut self) -> Result<()> {
        self.context.make_current()?;
        while self.pieces_ended < self.pieces_sent && event_of(&self.events, self.pieces_ended).is_reached()? {
            self.pieces_ended += 1;
        }
        while !self.has_failed && self.pieces_sent - self.pieces_ended < PIECES_IN_FLIGHT as u64 {
            let Some(InFlight { copy, block, sent, ends_with, .. }) =
                self.in_flight.iter_mut().find(|copy| copy.ends_with.is_none())
            else {
                break;
            };
            let len = copy.target.expert_bytes();
            let ranges =
                copy.target.ranges(copy.slot.0).ok_or(Error::Contract("a slot that the pool does not have"))?;
            // SAFETY: the ranges lie in the pool, which the copy keeps alive, and in a slot that is nobody else's until the
            // copy is reported. Copy and block are kept until the last piece has ended, or else for the life of the process.
            *sent = unsafe { block.send_piece(&self.stream, len, *sent, ranges) }?;
            self.stream.record(event_of(&self.events, self.pieces_sent))?;
            if *sent == len {
                *ends_with = Some(self.pieces_sent);
            }
            self.pieces_sent += 1;
        }
        Ok(())
    }

    fn oldest_has_ended(&mut self, limit: Duration) -> Result<bool> {
        within(limit, || {
            self.advance()?;
            match self.in_flight.front().map(|oldest| oldest.ends_with) {
                Some(Some(last)) => Ok(self.pieces_ended > last),
                Some(None) if self.has_failed => {
                    Err(Error::Cuda { call: "a copy", reason: "one before it has failed".into() })
                }
                _ => Ok(false),
            }
        })
    }

    /// Nothing is started after this. What users are told is for the caller.
    fn fail(&mut self, copy: InFlight, error: &Error) {
        log(Level::Info, &error.to_string());
        self.has_failed = true;
        self.not_reusable.push(copy);
    }

    /// Waits until the device uses nothing of it any more; `false` if that cannot be known.
    fn is_idle_in_time(&mut self) -> bool {
        let limit = if self.has_lost { Duration::ZERO } else { self.timeout };
        let is_idle = || {
            self.advance()?;
            let is_sent = self.has_failed || self.in_flight.iter().all(|copy| copy.ends_with.is_some());
            Ok(is_sent && self.stream.is_idle()?)
        };
        within(limit, is_idle).unwrap_or(false)
    }
}

/// That of a piece: it was another one's before, which has ended.
fn event_of(events: &[Event; PIECES_IN_FLIGHT], piece: u64) -> &Event {
    &events[(piece % PIECES_IN_FLIGHT as u64) as usize]
}

/// Asks until it is so, or until `limit` is over.
fn within(limit: Duration, mut is_so: impl FnMut() -> Result<bool>) -> Result<bool> {
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
