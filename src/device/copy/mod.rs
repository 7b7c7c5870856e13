//! Copy engines: what carries experts' bytes to a device while other work goes on there.
//!
//! An engine owns a ring of staging blocks of fixed size. A copy is staged, sent, and reported once it is known to be
//! whole: its tensors are one transaction. Engines know bytes and slots; what is copied, and why, is for others.
#![forbid(unsafe_code)]

mod portable;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub use portable::PortableEngine;

use crate::device::PoolWriter;
use crate::units::Slot;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of staging memory, over all blocks of an engine.
pub const STAGING_BYTES: usize = 64 << 20;
/// A copy that is not complete after this time is lost.
pub const COPY_TIMEOUT: Duration = Duration::from_secs(5);

/// One expert on its way to a slot.
pub struct Copy {
    /// The caller's name for it.
    pub id: u64,
    /// The pool, and how an expert lies in it.
    pub target: Arc<PoolWriter>,
    /// Where in the pool.
    pub slot: Slot,
}

/// What became of an attempt to start a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Started {
    /// It is on its way and will be reported.
    Yes,
    /// All staging blocks are in flight: wait for one first.
    Full,
    /// Its bytes are gone, or it is larger than a staging block. It will not be reported.
    Unreadable,
    /// The device refused. It will not be reported.
    Refused,
}

/// How a copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All of it is on the device.
    Whole,
    /// It did not arrive.
    Failed,
    /// It did not end in time. It, its staging block and its slot must never be used again, nor the engine.
    Lost,
}

/// Puts an expert's bytes, one tensor after the other, into a staging block; `false` if they are gone.
pub type Read<'a> = &'a mut dyn FnMut(&mut [u8]) -> bool;

/// Carries experts to one device, several at a time, in order. Used by one thread.
pub trait CopyEngine: Send {
    /// Stages a copy and sends it off.
    fn start(&mut self, copy: Copy, read: Read<'_>) -> Started;

    /// Copies that were started and not reported yet.
    fn in_flight(&self) -> usize;

    /// Waits up to `timeout` for the oldest copy to end. `None` if it has not, or there is none.
    ///
    /// A copy that has been on its way for longer than [`COPY_TIMEOUT`] is reported as lost.
    fn wait(&mut self, timeout: Duration) -> Option<(u64, Outcome)>;

    /// The caller has done something else for so long, which is not to count as the copies' time.
    fn paused(&mut self, time: Duration);
}

/// How many staging blocks an engine has, and how large each is, for experts of `expert_bytes`.
///
/// At least two, so that one is filled while the other is sent; more as long as they fit into [`STAGING_BYTES`].
pub fn staging_blocks(expert_bytes: usize) -> (usize, usize) {
    const MOST: usize = 8;
    let block = expert_bytes.max(1);
    ((STAGING_BYTES / block).clamp(2, MOST), block)
}
