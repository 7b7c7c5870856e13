//! Where a layer's time goes: from ids to launch, the lanes, and the join.
//!
//! Each call is timed, for the cache's own judgement: five looks at the clock. Summing up is for benchmarks only.
#![forbid(unsafe_code)]

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Times of one kind of layer call, summed up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Times {
    /// Expert FFNs computed.
    pub calls: u64,
    /// Requests.
    pub requests: u64,
    /// Requests whose expert was resident.
    pub hits: u64,
    /// Nanoseconds before the CPU began: recognise, check, look up, gather, launch.
    pub plan_and_launch_ns: u64,
    /// Nanoseconds that the CPU computed.
    pub cold_ns: u64,
    /// Nanoseconds after that: wait, write rows, count.
    pub join_ns: u64,
}

/// What is timed, by how a layer was computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LayerTimes {
    /// Nothing resident.
    pub all_cold: Times,
    /// Some resident.
    pub mixed: Times,
    /// All resident.
    pub all_hot: Times,
    /// Any of these, where graphs were made during the call: each is made once.
    pub first: Times,
}

impl Times {
    fn add(&mut self, other: &Times) {
        self.calls += other.calls;
        self.requests += other.requests;
        self.hits += other.hits;
        self.plan_and_launch_ns += other.plan_and_launch_ns;
        self.cold_ns += other.cold_ns;
        self.join_ns += other.join_ns;
    }
}

impl LayerTimes {
    /// Adds what another context has timed.
    pub fn add(&mut self, other: &LayerTimes) {
        self.all_cold.add(&other.all_cold);
        self.mixed.add(&other.mixed);
        self.all_hot.add(&other.all_hot);
        self.first.add(&other.first);
    }
}

/// Nanoseconds that one layer's lanes took, summed up as it computes.
#[derive(Debug, Default)]
pub struct LaneTimes {
    cpu: AtomicU64,
    device: AtomicU64,
    wait: AtomicU64,
}

impl LaneTimes {
    /// One call. `device` and `wait` count only where the device computed.
    pub fn add(&self, (cpu, device, wait): (f32, f32, f32), has_device: bool) {
        self.cpu.fetch_add(cpu as u64, Relaxed);
        if has_device {
            self.device.fetch_add(device as u64, Relaxed);
            self.wait.fetch_add(wait as u64, Relaxed);
        }
    }

    /// What it comes to so far: the CPU computed, the device had work, it was waited for.
    pub fn ns(&self) -> [u64; 3] {
        [&self.cpu, &self.device, &self.wait].map(|time| time.load(Relaxed))
    }
}

/// Times one layer call after the other.
pub struct Stopwatch {
    laps: Laps,
    times: Option<LayerTimes>,
}

#[derive(Clone, Copy)]
struct Laps {
    start: Instant,
    launched: Instant,
    computed: Instant,
    joined: Instant,
    /// Graphs made before the call.
    n_graphs: u64,
}

impl Stopwatch {
    /// One that sums up, or one that only times the call at hand.
    pub fn new(sums_up: bool) -> Self {
        let now = Instant::now();
        let laps = Laps { start: now, launched: now, computed: now, joined: now, n_graphs: 0 };
        Self { laps, times: sums_up.then(LayerTimes::default) }
    }

    /// A layer call begins; `n_graphs` were made before it.
    pub fn start(&mut self, n_graphs: u64) {
        let now = Instant::now();
        self.laps = Laps { start: now, launched: now, computed: now, joined: now, n_graphs };
    }

    /// The device has its work; the CPU begins.
    pub fn launched(&mut self) {
        self.laps.launched = Instant::now();
    }

    /// The CPU is done.
    pub fn computed(&mut self) {
        self.laps.computed = Instant::now();
    }

    /// The device is done too.
    pub fn joined(&mut self) {
        self.laps.joined = Instant::now();
    }

    /// Nanoseconds since the call began.
    pub fn elapsed_ns(&self) -> f64 {
        self.laps.start.elapsed().as_nanos() as f64
    }

    /// Nanoseconds of this call: that the CPU computed, that the device may have, and that it was waited for.
    pub fn lanes_ns(&self) -> (f32, f32, f32) {
        let Laps { start, launched, computed, joined, .. } = self.laps;
        let ns = |from: Instant, to: Instant| to.saturating_duration_since(from).as_nanos() as f32;
        (ns(launched, computed), ns(start, joined), ns(computed, joined))
    }

    /// The layer call is over, `n_graphs` were made until now; `hits` of its `requests` found their expert resident (asked for only
    /// if calls are summed up).
    pub fn stop(&mut self, n_graphs: u64, requests: usize, hits: impl FnOnce() -> usize) {
        let (laps, Some(times)) = (self.laps, &mut self.times) else { return };
        let end = Instant::now();
        let hits = hits();
        let times = match hits {
            _ if n_graphs != laps.n_graphs => &mut times.first,
            0 => &mut times.all_cold,
            _ if hits == requests => &mut times.all_hot,
            _ => &mut times.mixed,
        };
        let nanoseconds = |from: Instant, to: Instant| {
            u64::try_from(to.saturating_duration_since(from).as_nanos()).unwrap_or(u64::MAX)
        };
        times.calls += 1;
        times.requests += requests as u64;
        times.hits += hits as u64;
        times.plan_and_launch_ns += nanoseconds(laps.start, laps.launched);
        times.cold_ns += nanoseconds(laps.launched, laps.computed);
        times.join_ns += nanoseconds(laps.computed, end);
    }

    /// What was timed so far, if anything is.
    pub fn times(&self) -> Option<LayerTimes> {
        self.times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_told_apart_by_how_much_of_them_ran_on_the_device() {
        let mut watch = Stopwatch::new(true);
        for (n_graphs, hits) in [(3, 8), (2, 0), (2, 3), (2, 8), (2, 8)] {
            watch.start(2);
            watch.launched();
            watch.computed();
            watch.stop(n_graphs, 8, || hits);
        }
        let LayerTimes { all_cold, mixed, all_hot, first } = watch.times().unwrap();
        let calls_and_hits = [all_cold, mixed, all_hot, first].map(|times| (times.calls, times.hits));
        assert_eq!(calls_and_hits, [(1, 0), (1, 3), (2, 16), (1, 8)]);
    }

    #[test]
    fn one_that_is_off_times_nothing() {
        let mut watch = Stopwatch::new(false);
        watch.start(0);
        watch.stop(0, 8, || 8);
        assert_eq!(watch.times(), None);
    }
}
