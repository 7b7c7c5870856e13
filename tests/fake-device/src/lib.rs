//! `FakeDevice`: a ggml backend that behaves as a discrete GPU does, without one.
//!
//! Its memory is not host memory (a host access faults), each backend instance has a queue and a thread of its own,
//! and the mathematics is ggml's CPU backend's, bit for bit. Capacity, latency, bandwidth and faults can be set
//! (`settings`), and what happened can be read (`stats`). It knows nothing of moe-hot.

mod backend;
mod buffer_type;
mod captures;
mod device;
mod event;
mod faults;
mod first_use;
mod memory;
mod queue;
mod registry;
mod settings;
mod snapshot;
mod stats;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The generated bindings to the pinned revision of ggml.
#[allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, dead_code)]
#[allow(unsafe_op_in_unsafe_fn, clippy::all, clippy::undocumented_unsafe_blocks)]
mod sys {
    include!(concat!(env!("OUT_DIR"), "/ggml.rs"));
}

/// What llama.cpp looks for in the library that `GGML_BACKEND_PATH` names. Called more than once.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> sys::ggml_backend_reg_t {
    guard("loading", std::ptr::null_mut(), registry::init)
}

/// Runs `body`; a panic becomes one line on stderr and `fallback`.
fn guard<T>(doing: &str, fallback: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        say(&format!("internal error while {doing}"));
        fallback
    })
}

/// One line on stderr.
fn say(message: &str) {
    eprintln!("fake-device: {message}");
}

/// Locks, whether or not another thread has panicked meanwhile.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A static that ggml points into. ggml only reads it.
struct Shared<T>(UnsafeCell<T>);

// SAFETY: neither we nor ggml write to these statics once the host has seen them.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    const fn get(&self) -> *mut T {
        self.0.get()
    }
}
