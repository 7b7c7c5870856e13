//! How many experts were copied to a device.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts experts that were copied to a device.
#[derive(Default)]
pub struct Copied {
    experts: AtomicU64,
    bytes: AtomicU64,
}

impl Copied {
    /// So many more, of so many bytes together.
    pub fn add(&self, experts: usize, bytes: usize) {
        self.experts.fetch_add(experts as u64, Relaxed);
        self.bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// Experts so far.
    pub fn experts(&self) -> u64 {
        self.experts.load(Relaxed)
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}
