//! Counters of what happened, and the JSON file (`FAKE_STATS`) that they are written to at exit and when an instance
//! is freed.

use crate::{guard, say};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::{env, fs, process};

/// One number with a name.
pub(crate) struct Counter {
    name: &'static str,
    value: AtomicU64,
}

impl Counter {
    const fn new(name: &'static str) -> Self {
        Self { name, value: AtomicU64::new(0) }
    }

    pub(crate) fn add(&self, n: u64) {
        self.value.fetch_add(n, Relaxed);
    }

    pub(crate) fn set(&self, n: u64) {
        self.value.store(n, Relaxed);
    }

    pub(crate) fn raise_to(&self, n: u64) {
        self.value.fetch_max(n, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.value.load(Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $constant:ident = $name:literal;)*) => {
        $($(#[$doc])* pub(crate) static $constant: Counter = Counter::new($name);)*
        static ALL: &[&Counter] = &[$(&$constant),*];
    };
}

counters! {
    /// Buffers made, of non-zero size.
    ALLOCATIONS = "allocations";
    /// In buffers at this moment.
    ALLOCATED_BYTES = "allocated_bytes";
    PEAK_BYTES = "peak_bytes";
    SET_ASYNC_CALLS = "set_async_calls";
    SET_ASYNC_BYTES = "set_async_bytes";
    /// Those of at least `fault_min_bytes`.
    LARGE_WRITES = "large_writes";
    /// Bytes of the largest one.
    LARGEST_WRITE = "largest_write";
    GET_ASYNC_CALLS = "get_async_calls";
    GET_ASYNC_BYTES = "get_async_bytes";
    /// Graphs accepted, whether or not the mathematics was skipped.
    GRAPHS = "graphs";
    MUL_MAT_ID_NODES = "mul_mat_id_nodes";
    MUL_MAT_ID_GRAPHS = "mul_mat_id_graphs";
    /// Times that a caller waited for an instance or an event.
    WAITS = "waits";
    /// Copies that their caller waited for.
    BLOCKING_COPIES = "blocking_copies";
    /// Graphs with experts that were the first of their kind.
    FIRST_USES = "first_uses";
    /// Graphs with experts that were captured: unknown by the address of their first node, changed since, or dropped.
    CAPTURES = "captures";
    /// The most writes of at least `fault_min_bytes` that were queued in one instance at a time.
    MOST_LARGE_WRITES_QUEUED = "most_large_writes_queued";
    /// The longest time that a smaller write had to wait for the bus, in us.
    LONGEST_BUS_WAIT_US = "longest_bus_wait_us";
    /// Times that the device was asked for its properties.
    PROPERTY_QUERIES = "property_queries";
    /// Times that the device was asked for its memory.
    MEMORY_QUERIES = "memory_queries";
    /// Backend instances made.
    INSTANCES = "instances";
    DEVICES = "devices";
    /// Times that a fault of `FAKE_FAULT` struck.
    FAULTS = "faults";
}

pub(crate) fn read(name: &str) -> Option<u64> {
    ALL.iter().find(|counter| counter.name == name).map(|counter| counter.get())
}

/// Arranges for [`write()`] when the process ends by itself.
pub(crate) fn write_at_exit() {
    extern "C" fn at_exit() {
        guard("writing statistics", (), write);
    }
    if file().is_some() {
        // SAFETY: the function stays mapped: this library is linked with `-z nodelete`.
        unsafe { libc::atexit(at_exit) };
    }
}

/// Replaces the file of `FAKE_STATS`, if one is named.
pub(crate) fn write() {
    let Some(path) = file() else { return };
    let numbers: Vec<_> = ALL.iter().map(|counter| format!("\"{}\": {}", counter.name, counter.get())).collect();
    let partial = path.with_extension(format!("partial-{}", process::id()));
    let written =
        fs::write(&partial, format!("{{{}}}\n", numbers.join(", "))).and_then(|()| fs::rename(&partial, path));
    if let Err(error) = written {
        say(&format!("FAKE_STATS: {}: {error}", path.display()));
    }
}

fn file() -> Option<&'static PathBuf> {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    FILE.get_or_init(|| env::var_os("FAKE_STATS").filter(|path| !path.is_empty()).map(PathBuf::from)).as_ref()
}
