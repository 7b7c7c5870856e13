//! The engine for any ggml device: a second backend instance in a thread of its own.
//!
//! ggml can only wait without a limit, so the waiting is done by that thread, which is left alone, with everything it
//! uses, if a copy never ends. Staging blocks travel with their copies: nobody else can touch them meanwhile.

use super::{COPY_TIMEOUT, Copy, CopyEngine, Outcome, Read, Started, staging_blocks};
use crate::ggml::{Backend, Device, HostBlock};
use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A staged copy on its way to the thread.
struct Staged {
    copy: Copy,
    block: HostBlock,
}

/// Staged copies on their way to the thread. Not a channel: what a thread that hangs has not begun must come back.
#[derive(Default)]
struct Queue {
    inner: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    copies: VecDeque<Staged>,
    is_closed: bool,
}

impl Queue {
    /// Adds a copy; gives it back if the queue is closed.
    fn push(&self, staged: Staged) -> std::result::Result<(), Staged> {
        let mut inner = self.lock();
        if inner.is_closed {
            return Err(staged);
        }
        inner.copies.push_back(staged);
        self.changed.notify_one();
        Ok(())
    }

    /// Waits for the next copy; `None` once the queue is closed.
    fn pop(&self) -> Option<Staged> {
        let is_idle = |inner: &mut Waiting| inner.copies.is_empty() && !inner.is_closed;
        let mut inner = self.changed.wait_while(self.lock(), is_idle).unwrap_or_else(PoisonError::into_inner);
        inner.copies.pop_front()
    }

    /// Ends the thread after the copy that it is at, and drops all others.
    fn close(&self) {
        let mut inner = self.lock();
        inner.is_closed = true;
        inner.copies.clear();
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies through a backend instance of its own on one device.
pub struct PortableEngine {
    staged: Arc<Queue>,
    /// Of each copy, in their order: its block, and whether it has arrived.
    ended: Receiver<(HostBlock, bool)>,
    thread: Option<JoinHandle<()>>,
    free: Vec<HostBlock>,
    /// Ids and starting times of the copies in flight, oldest first.
    in_flight: VecDeque<(u64, Instant)>,
    timeout: Duration,
}

impl PortableEngine {
    /// An engine for experts of up to `expert_bytes`. Staging is page-locked where the device offers it and `pinned`.
    pub fn new(device: Device, expert_bytes: usize, pinned: bool) -> Result<Self> {
        let (blocks, size) = staging_blocks(expert_bytes);
        let block = |_| HostBlock::for_copies(device, size, pinned);
        let free = (0..blocks).map(block).collect::<Result<Vec<_>>>()?;
        let mut backend = Backend::new(device)?;
        let staged = Arc::<Queue>::default();
        let incoming = staged.clone();
        let (done, ended) = sync_channel(blocks);
        let run = move || {
            while let Some(Staged { copy, block }) = incoming.pop() {
                let arrived = copy.target.fill(&mut backend, copy.slot.0, &block).unwrap_or(false);
                drop(copy); // its pool may be waited for
                if done.send((block, arrived)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("moe-hot-copy".into()).spawn(run);
        let thread = thread.map_err(|_| Error::Thread("for copies"))?;
        Ok(Self { staged, ended, thread: Some(thread), free, in_flight: VecDeque::new(), timeout: COPY_TIMEOUT })
    }

    /// The same with another limit than [`COPY_TIMEOUT`].
    #[cfg(test)]
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

impl CopyEngine for PortableEngine {
    fn start(&mut self, copy: Copy, read: Read<'_>) -> Started {
        let Some(mut block) = self.free.pop() else { return Started::Full };
        let len = copy.target.expert_bytes();
        if len > block.size() || !block.write_with(len, read).unwrap_or(false) {
            self.free.push(block);
            return Started::Unreadable;
        }
        let id = copy.id;
        if self.staged.push(Staged { copy, block }).is_err() {
            return Started::Refused;
        }
        self.in_flight.push_back((id, Instant::now()));
        Started::Yes
    }

    fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn paused(&mut self, time: Duration) {
        self.in_flight.iter_mut().for_each(|(_, since)| *since += time);
    }

    fn wait(&mut self, timeout: Duration) -> Option<(u64, Outcome)> {
        let &(id, since) = self.in_flight.front()?;
        let left = self.timeout.saturating_sub(since.elapsed());
        match self.ended.recv_timeout(timeout.min(left)) {
            Ok((block, arrived)) => {
                self.free.push(block);
                self.in_flight.pop_front();
                if let Some((_, since)) = self.in_flight.front_mut() {
                    // It waited behind the one that has just ended.
                    *since = Instant::now();
                }
                Some((id, if arrived { Outcome::Whole } else { Outcome::Failed }))
            }
            Err(RecvTimeoutError::Timeout) if timeout < left => None,
            Err(RecvTimeoutError::Timeout) => {
                // The thread hangs in the device and cannot be ended: leave it.
                self.thread = None;
                self.staged.close();
                self.in_flight.pop_front();
                Some((id, Outcome::Lost))
            }
            Err(RecvTimeoutError::Disconnected) => {
                self.in_flight.pop_front();
                Some((id, Outcome::Failed))
            }
        }
    }
}

impl Drop for PortableEngine {
    fn drop(&mut self) {
        // Copies in flight end first, unless one of them does not.
        while self.thread.is_some() && self.wait(self.timeout).is_some() {}
        self.staged.close();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been reported by the panic hook and failed its copy.
            let _ = thread.join();
        }
    }
}
