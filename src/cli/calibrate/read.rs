//! How fast this machine's CPU reads its memory: threads that add up a buffer larger than the caches.
//!
//! This is what a CPU does when a token needs an expert: every thread reads its share of the weights once. It computes less per byte
//! than a matrix product does, so it is the most that one can reach.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::hint::black_box;
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

/// The buffer is so many times the largest cache ...
const CACHES: u64 = 4;
/// ... at least so large, since a virtual machine may not say what its caches are ...
const LEAST_BYTES: u64 = 1 << 30;
/// ... and at most so large.
const MOST_BYTES: u64 = 8 << 30;
/// The least that does not fit the caches still.
const LEAST_CACHES: u64 = 2;
/// Passes that count; the one before them does not.
const PASSES: usize = 9;
/// Numbers that are added up side by side, so that the compiler uses vectors.
const LANES: usize = 32;
const WORD: u64 = 8;

/// What was measured, in GB/s (10^9 bytes).
pub struct Reading {
    pub median: f64,
    pub least: f64,
    pub most: f64,
    /// Of the buffer.
    pub bytes: u64,
    pub passes: usize,
}

/// Reads memory with so many threads.
///
/// Fails if there is too little free memory for a buffer that is larger than the caches.
pub fn measure(threads: usize) -> Result<Reading> {
    let bytes = buffer_bytes(largest_cache(), available_memory())?;
    let words = (bytes / WORD) as usize / threads.max(1);
    let barrier = &Barrier::new(threads + 1);
    let seconds = thread::scope(|scope| {
        let (mut starts, mut readers) = (Vec::new(), Vec::new());
        for _ in 0..threads {
            let (start, started) = channel();
            let read = move || started.recv().is_ok() && read(words, barrier);
            readers.push(thread::Builder::new().spawn_scoped(scope, read).context("a thread that reads")?);
            starts.push(start); // all of them end at once if one is dropped unused
        }
        for start in starts {
            start.send(()).context("a thread that reads")?;
        }
        let mut seconds = Vec::new();
        for _ in 0..=PASSES {
            barrier.wait();
            let start = Instant::now();
            barrier.wait();
            seconds.push(start.elapsed().as_secs_f64());
        }
        let is_read = readers.into_iter().all(|reader| reader.join().is_ok_and(|is_read| is_read));
        ensure!(is_read, "the system refused the memory to read");
        Ok(seconds)
    });
    let mut speeds: Vec<_> = seconds?.split_off(1);
    let n_bytes = (words * threads) as f64 * WORD as f64;
    speeds.iter_mut().for_each(|seconds| *seconds = n_bytes / *seconds / 1e9);
    speeds.sort_by(f64::total_cmp);
    Ok(Reading {
        median: speeds[PASSES / 2],
        least: speeds[0],
        most: speeds[PASSES - 1],
        bytes: (words * threads) as u64 * WORD,
        passes: PASSES,
    })
}

/// Reads so many words once per pass, between two waits. Returns whether there was memory for them.
fn read(words: usize, barrier: &Barrier) -> bool {
    let mut buffer = Vec::new();
    let is_allocated = buffer.try_reserve_exact(words).is_ok();
    if is_allocated {
        buffer.resize(words, 1u64); // touched by the thread that reads it
    }
    for _ in 0..=PASSES {
        barrier.wait();
        black_box(sum(black_box(&buffer)));
        barrier.wait();
    }
    is_allocated
}

fn sum(words: &[u64]) -> u64 {
    let mut sums = [0u64; LANES];
    for lanes in words.as_chunks::<LANES>().0 {
        sums.iter_mut().zip(lanes).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

/// How much to read, given the largest cache and the memory that is free, both in bytes.
fn buffer_bytes(cache: u64, free: Option<u64>) -> Result<u64> {
    let wanted = cache.saturating_mul(CACHES).clamp(LEAST_BYTES, MOST_BYTES);
    let bytes = free.map_or(wanted, |free| wanted.min(free / 2));
    let needed = cache.saturating_mul(LEAST_CACHES).max(1 << 20);
    ensure!(bytes >= needed, "too little free memory: a buffer of {} MiB is needed", needed >> 20);
    Ok(bytes)
}

/// Bytes of the largest cache of the first CPU; 0 if the system does not say.
fn largest_cache() -> u64 {
    let size = |index: u32| {
        let text = fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size")).ok()?;
        let kib: u64 = text.trim().strip_suffix('K')?.parse().ok()?;
        kib.checked_mul(1 << 10)
    };
    (0..8).filter_map(size).max().unwrap_or(0)
}

/// Bytes that can be allocated without swapping; `None` if the system does not say.
fn available_memory() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_is_larger_than_the_caches_and_leaves_memory_free() {
        const GIB: u64 = 1 << 30;
        assert_eq!(buffer_bytes(32 << 20, Some(64 * GIB)).unwrap(), GIB);
        assert_eq!(buffer_bytes(GIB, Some(64 * GIB)).unwrap(), 4 * GIB);
        assert_eq!(buffer_bytes(32 << 20, Some(GIB)).unwrap(), GIB / 2);
        assert_eq!(buffer_bytes(0, None).unwrap(), GIB);
        assert!(buffer_bytes(GIB, Some(2 * GIB)).is_err());
    }

    #[test]
    fn every_word_that_fills_the_lanes_is_read() {
        assert_eq!(sum(&vec![1; 10 * LANES]), 10 * LANES as u64);
        assert_eq!(sum(&[]), 0);
    }
}
