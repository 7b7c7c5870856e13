//! The engine for any ggml device: a second backend instance in a thread of its own.
//!
//! ggml can only wait without a limit, so the waiting is done by that thread, which is left alone, with everything it
//! uses, if a copy never ends. Staging blocks travel with their copies: nobody else can touch them meanwhile.

use super::{Copy, CopyEngine, Outcome, PATIENCE, Read, Started, staging_blocks};
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

/// What the thread reports.
struct Ended {
    id: u64,
    arrived: bool,
    block: HostBlock,
}

/// Copies through a backend instance of its own on one device.
pub struct PortableEngine {
    staged: Arc<Queue>,
    ended: Receiver<Ended>,
    thread: Option<JoinHandle<()>>,
    free: Vec<HostBlock>,
    /// Ids and starting times of the copies in flight, oldest first.
    flying: VecDeque<(u64, Instant)>,
    patience: Duration,
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
                let id = copy.id;
                drop(copy); // its pool may be waited for
                if done.send(Ended { id, arrived, block }).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("moe-hot-copy".into()).spawn(run);
        let thread = thread.map_err(|_| Error::Ggml("a thread for copies"))?;
        Ok(Self { staged, ended, thread: Some(thread), free, flying: VecDeque::new(), patience: PATIENCE })
    }

    /// The same with another limit than [`PATIENCE`].
    #[cfg(test)]
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
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
        self.flying.push_back((id, Instant::now()));
        Started::Yes
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }

    fn wait(&mut self, timeout: Duration) -> Option<(u64, Outcome)> {
        let &(id, since) = self.flying.front()?;
        let left = self.patience.saturating_sub(since.elapsed());
        match self.ended.recv_timeout(timeout.min(left)) {
            Ok(Ended { id, arrived, block }) => {
                self.free.push(block);
                self.flying.pop_front();
                if let Some((_, since)) = self.flying.front_mut() {
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
                self.flying.pop_front();
                Some((id, Outcome::Lost))
            }
            Err(RecvTimeoutError::Disconnected) => {
                self.flying.pop_front();
                Some((id, Outcome::Failed))
            }
        }
    }
}

impl Drop for PortableEngine {
    fn drop(&mut self) {
        // Copies in flight end first, unless one of them does not.
        while self.thread.is_some() && self.wait(self.patience).is_some() {}
        self.staged.close();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been reported by the panic hook and failed its copy.
            let _ = thread.join();
        }
    }
}
