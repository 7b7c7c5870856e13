//! Settings, and things that go wrong on demand.
//!
//! `owner` is the ordinal of the device whose all memory is. `latency_us` and `bandwidth_mbs` (10^6 bytes per second, 0 is unlimited) are what a copy takes. `fault_NAME=n` makes the
//! nth call of driver function NAME from now on fail, once; `fault_hang=n` makes the nth copy from now on never end, and
//! `fault_async=n` makes it end in an error that its context keeps,
//! and `fault_lost=n` makes it write nothing and say nothing. `repair` ends all contexts' errors.

use crate::state::{self, lock};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

pub(crate) struct Number(AtomicU64);

impl Number {
    pub(crate) fn get(&self) -> u64 {
        self.0.load(SeqCst)
    }

    pub(crate) fn add(&self) {
        self.0.fetch_add(1, SeqCst);
    }

    pub(crate) fn raise_to(&self, value: u64) {
        self.0.fetch_max(value, SeqCst);
    }

    fn set(&self, value: i64) {
        self.0.store(u64::try_from(value).unwrap_or(0), SeqCst);
    }
}

pub(crate) static LATENCY_US: Number = Number(AtomicU64::new(0));
pub(crate) static BANDWIDTH_MBS: Number = Number(AtomicU64::new(0));
pub(crate) static OWNER: Number = Number(AtomicU64::new(0));
/// Bytes of the largest copy to a device.
pub(crate) static LARGEST_COPY: Number = Number(AtomicU64::new(0));
/// The most copies to devices that were queued at once.
pub(crate) static MOST_QUEUED: Number = Number(AtomicU64::new(0));
/// Memory that was freed while a copy used it.
pub(crate) static MISUSES: Number = Number(AtomicU64::new(0));

/// Occasions left until the fault of this name strikes.
static FAULTS: Mutex<BTreeMap<String, i64>> = Mutex::new(BTreeMap::new());

pub(crate) fn set(name: &str, value: i64) -> bool {
    match name {
        "owner" => OWNER.set(value),
        "latency_us" => LATENCY_US.set(value),
        "bandwidth_mbs" => BANDWIDTH_MBS.set(value),
        "repair" => state::repair(),
        _ => match name.strip_prefix("fault_") {
            Some(fault) => {
                lock(&FAULTS).insert(fault.into(), value);
            }
            None => return false,
        },
    }
    true
}

/// Counts an occasion for a fault: does it strike?
pub(crate) fn strikes(name: &str) -> bool {
    let mut faults = lock(&FAULTS);
    let Some(left) = faults.get_mut(name) else { return false };
    *left -= 1;
    *left == 0
}
