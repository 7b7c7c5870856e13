//! Events: a mark in one queue that another queue, or the host, waits for.
//!
//! An event's context is a leaked `Arc<Event>`: commands in a queue keep it alive after it is freed.

use crate::{guard, lock, sys};
use std::ptr::null_mut;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Each record has a number; whoever waits, waits for the last one issued before.
#[derive(Default)]
pub(crate) struct Event {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    issued: u64,
    reached: u64,
}

impl Event {
    /// A new record's number.
    pub(crate) fn issue(&self) -> u64 {
        let mut state = lock(&self.state);
        state.issued += 1;
        state.issued
    }

    /// The number to wait for now.
    pub(crate) fn issued(&self) -> u64 {
        lock(&self.state).issued
    }

    pub(crate) fn reach(&self, number: u64) {
        let mut state = lock(&self.state);
        state.reached = state.reached.max(number);
        self.changed.notify_all();
    }

    pub(crate) fn is_reached(&self, number: u64) -> bool {
        lock(&self.state).reached >= number
    }

    pub(crate) fn wait(&self, number: u64) {
        let mut state = lock(&self.state);
        while state.reached < number {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// # Safety
/// `event` was made by [`new`] and is not freed yet.
pub(crate) unsafe fn get(event: sys::ggml_backend_event_t) -> Arc<Event> {
    // SAFETY: the context is a leaked `Arc`, whose count is raised for the one returned.
    unsafe {
        let raw = (*event).context.cast::<Event>().cast_const();
        Arc::increment_strong_count(raw);
        Arc::from_raw(raw)
    }
}

pub(crate) unsafe extern "C" fn new(device: sys::ggml_backend_dev_t) -> sys::ggml_backend_event_t {
    guard("creating an event", null_mut(), || {
        let context = Arc::into_raw(Arc::<Event>::default()).cast_mut().cast();
        Box::into_raw(Box::new(sys::ggml_backend_event { device, context }))
    })
}

pub(crate) unsafe extern "C" fn free(_: sys::ggml_backend_dev_t, event: sys::ggml_backend_event_t) {
    // SAFETY: ggml frees each event once; both were made by `new`.
    guard("freeing an event", (), || unsafe {
        let event = Box::from_raw(event);
        drop(Arc::from_raw(event.context.cast::<Event>().cast_const()));
    });
}

pub(crate) unsafe extern "C" fn synchronize(_: sys::ggml_backend_dev_t, event: sys::ggml_backend_event_t) {
    guard("waiting for an event", (), || {
        crate::stats::WAITS.add(1);
        // SAFETY: ggml passes a live event of ours.
        let event = unsafe { get(event) };
        event.wait(event.issued());
    });
}
