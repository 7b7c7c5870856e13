//! What contexts have asked for, on its way to the cache's thread: copies, and that it looks for requests of lanes.
//!
//! A layer asks for one copy at a time, so that the queue is never longer than the model has layers.

use crate::cache::Admission;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// One copy to be made: an expert into a layer's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Which of the cache's layers, by its index in the plan.
    pub layer: usize,
    /// Who comes, and who goes.
    pub admission: Admission,
    /// The layer's calls when it was decided on; `None`: by the plan.
    pub decided_at: Option<u32>,
}

/// Fetches that wait, and the word that no more are made.
#[derive(Default)]
pub struct FetchQueue {
    waiting: Mutex<VecDeque<Fetch>>,
    /// Requests of lanes that have not been answered. Changed under the lock.
    n_requests: AtomicUsize,
    changed: Condvar,
    ended: AtomicBool,
    filled: AtomicBool,
}

impl FetchQueue {
    /// Empty; room for one fetch of each of `n_layers` layers.
    pub fn new(n_layers: usize) -> Self {
        Self { waiting: Mutex::new(VecDeque::with_capacity(n_layers)), ..Self::default() }
    }

    /// Adds a fetch, unless the queue has ended. The lock is held for this only.
    pub fn push(&self, fetch: Fetch) {
        let mut waiting = self.lock();
        if self.has_ended() {
            return;
        }
        waiting.push_back(fetch);
        drop(waiting);
        self.changed.notify_all();
    }

    /// The oldest fetch that waits.
    pub fn pop(&self) -> Option<Fetch> {
        self.lock().pop_front()
    }

    /// There is one more request of a lane.
    pub fn request_made(&self) {
        let _waiting = self.lock();
        self.n_requests.fetch_add(1, Relaxed);
    }

    /// The thread is to look for requests of lanes.
    pub fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// One of them has been answered, or will not be.
    pub fn request_answered(&self) {
        let waiting = self.lock();
        self.n_requests.fetch_sub(1, Relaxed);
        drop(waiting);
        self.changed.notify_all();
    }

    /// Whether lanes are being made ready.
    pub fn has_requests(&self) -> bool {
        self.n_requests.load(Relaxed) > 0
    }

    /// Whether the cache is filled and every lane that was asked for is ready.
    pub fn is_prepared(&self) -> bool {
        self.is_filled() && !self.has_requests()
    }

    /// Waits until all requests of lanes have been answered, or will not be.
    pub fn wait_answered(&self) {
        let is_open = |_: &mut VecDeque<Fetch>| self.n_requests.load(Relaxed) > 0 && !self.has_ended();
        drop(self.changed.wait_while(self.lock(), is_open));
    }

    /// Waits until there is a fetch or a request of a lane, or the end.
    pub fn wait(&self) {
        let is_idle = |waiting: &mut VecDeque<Fetch>| {
            waiting.is_empty() && self.n_requests.load(Relaxed) == 0 && !self.has_ended()
        };
        drop(self.changed.wait_while(self.lock(), is_idle));
    }

    /// Takes out all that wait.
    pub fn drain(&self) -> Vec<Fetch> {
        self.lock().drain(..).collect()
    }

    /// No more fetches are made.
    pub fn end(&self) {
        // Under the lock, so that nobody goes to sleep between looking and being told.
        let mut waiting = self.lock();
        self.ended.store(true, Relaxed);
        waiting.clear();
        drop(waiting);
        self.changed.notify_all();
    }

    /// Whether no more fetches are made.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Relaxed)
    }

    /// The plan has been carried out, or will not be.
    pub fn set_filled(&self) {
        let waiting = self.lock();
        self.filled.store(true, Relaxed);
        drop(waiting);
        self.changed.notify_all();
    }

    /// Whether the plan has been carried out, or will not be.
    pub fn is_filled(&self) -> bool {
        self.filled.load(Relaxed)
    }

    /// Waits until the plan has been carried out, or will not be.
    pub fn wait_filled(&self) {
        drop(self.changed.wait_while(self.lock(), |_| !self.filled.load(Relaxed)));
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Fetch>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Expert;

    fn fetch(layer: usize) -> Fetch {
        Fetch { layer, admission: Admission { admit: Expert(0), evict: None }, decided_at: None }
    }

    #[test]
    fn fetches_come_out_in_the_order_they_went_in() {
        let queue = FetchQueue::new(2);
        for layer in [3, 1] {
            queue.push(fetch(layer));
        }
        queue.wait();
        assert_eq!([queue.pop(), queue.pop(), queue.pop()], [Some(fetch(3)), Some(fetch(1)), None]);
    }

    #[test]
    fn nothing_is_kept_after_the_end_and_nobody_waits() {
        let queue = FetchQueue::new(2);
        queue.push(fetch(0));
        queue.end();
        queue.push(fetch(1));
        queue.wait();
        assert_eq!(queue.pop(), None);
    }

    #[test]
    fn a_request_of_a_lane_wakes_the_thread_and_its_answer_the_context() {
        let queue = FetchQueue::new(1);
        std::thread::scope(|scope| {
            queue.request_made();
            queue.wait();
            scope.spawn(|| queue.wait_answered());
            queue.request_answered();
        });
    }

    #[test]
    fn whoever_waits_for_the_fill_is_woken() {
        let queue = FetchQueue::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| queue.wait_filled());
            queue.set_filled();
        });
    }
}
