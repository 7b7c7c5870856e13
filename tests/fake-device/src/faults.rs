//! Things that go wrong on demand. Each fault counts the occasions since it was set, the first of which is 1.

use crate::stats;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};

/// A thing that fails from its Nth occasion on, or at its Nth occasion only.
pub(crate) struct Fault {
    name: &'static str,
    /// 0: never.
    nth: AtomicI64,
    once: AtomicBool,
    occasions: AtomicI64,
}

impl Fault {
    const fn new(name: &'static str) -> Self {
        Self { name, nth: AtomicI64::new(0), once: AtomicBool::new(false), occasions: AtomicI64::new(0) }
    }

    fn set(&self, nth: i64, once: bool) {
        self.once.store(once, Relaxed);
        self.occasions.store(0, Relaxed);
        self.nth.store(nth, Relaxed);
    }

    /// Counts an occasion: does it fail?
    pub(crate) fn strikes(&self) -> bool {
        let nth = self.nth.load(Relaxed);
        if nth <= 0 {
            return false;
        }
        let occasion = self.occasions.fetch_add(1, Relaxed) + 1;
        let strikes = occasion == nth || (occasion > nth && !self.once.load(Relaxed));
        if strikes {
            stats::FAULTS.add(1);
        }
        if occasion == nth {
            stats::write();
        }
        strikes
    }
}

/// An allocation returns NULL.
pub(crate) static ALLOC: Fault = Fault::new("alloc");
/// An asynchronous write is dropped.
pub(crate) static COPY: Fault = Fault::new("copy");
/// An asynchronous write never ends; only once, as its queue is stuck then.
pub(crate) static HANG: Fault = Fault::new("hang");
/// A small graph with experts in it fails.
pub(crate) static COMPUTE: Fault = Fault::new("compute");
/// An instance is not made.
pub(crate) static INIT: Fault = Fault::new("init");

static ALL: [&Fault; 5] = [&ALLOC, &COPY, &HANG, &COMPUTE, &INIT];

/// Sets fault `name` or `name_once`, and counts anew. False if there is no such fault.
pub(crate) fn set(name: &str, nth: i64) -> bool {
    let (name, once) = name.strip_suffix("_once").map_or((name, false), |name| (name, true));
    let Some(fault) = ALL.iter().find(|fault| fault.name == name) else { return false };
    fault.set(nth, once || name == HANG.name);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_from_its_nth_occasion_on_or_only_then() {
        let fault = Fault::new("test");
        assert!(!fault.strikes());
        fault.set(2, false);
        assert_eq!([(); 4].map(|()| fault.strikes()), [false, true, true, true]);
        fault.set(2, true);
        assert_eq!([(); 4].map(|()| fault.strikes()), [false, true, false, false]);
    }
}
