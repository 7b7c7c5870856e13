//! The cold lane: experts that are not resident, computed by llama.cpp's own CPU backend.
//!
//! It runs on the thread that llama.cpp calls us on: another thread would bring an OpenMP team of its own.

use crate::Result;
use crate::ggml::{AbortCallback, Backend, Device, Graph, Status};

/// One CPU backend instance, owned by one llama.cpp context.
pub struct ColdLane {
    cpu: Backend,
}

impl ColdLane {
    /// A new lane. Starts no thread.
    pub fn new() -> Result<Self> {
        Ok(Self { cpu: Backend::new(Device::cpu()?)? })
    }

    /// Computes the whole split where it lies and returns ggml's answer.
    pub fn compute(&mut self, split: &Graph<'_>) -> Status {
        self.cpu.compute(split)
    }

    /// Threads to compute with.
    pub fn set_threads(&mut self, n_threads: i32) {
        self.cpu.set_threads(n_threads);
    }

    /// Whom to ask whether to stop.
    pub fn set_abort_callback(&mut self, callback: AbortCallback) {
        self.cpu.set_abort_callback(callback);
    }
}
