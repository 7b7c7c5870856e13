//! A stream: a queue, and a thread that works it off in order. Events mark places in it.

use crate::code::{self, LastingError};
use crate::settings::{self, BANDWIDTH_MBS, LATENCY_US};
use crate::state::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) enum Command {
    /// Copies `size` bytes: `bytes`, or what lies at `from` when the copy ends.
    Copy { from: *const u8, to: *mut u8, size: usize, bytes: Option<Vec<u8>> },
    /// Copies `size` bytes of the device's memory to the host.
    ReadBack { from: *const u8, to: *mut u8, size: usize },
    /// Marks an event as reached.
    Record(Arc<AtomicU64>, u64),
}

// SAFETY: the addresses are used by one thread, when their turn comes; the caller keeps what they point to until then.
unsafe impl Send for Command {}

/// A place in a stream, the latest of those it was recorded at.
#[derive(Default)]
pub(crate) struct Event {
    recorded: u64,
    reached: Arc<AtomicU64>,
}

impl Event {
    pub(crate) fn record(&mut self) -> Command {
        self.recorded += 1;
        Command::Record(self.reached.clone(), self.recorded)
    }

    pub(crate) fn is_reached(&self) -> bool {
        self.reached.load(SeqCst) >= self.recorded
    }
}

/// Host memory that commands in the queue use, by command.
type Uses = Arc<Mutex<VecDeque<Option<(usize, usize)>>>>;

pub(crate) struct Stream {
    queue: Sender<(Instant, Command)>,
    uses: Uses,
    /// Bytes of copies to the device that have not ended.
    queued: Arc<AtomicU64>,
}

impl Stream {
    pub(crate) fn start(error: Arc<LastingError>) -> Self {
        let (queue, commands) = channel();
        let uses = Uses::default();
        let queued = Arc::<AtomicU64>::default();
        let shared = (uses.clone(), queued.clone());
        thread::spawn(move || work(&commands, &shared.0, &shared.1, &error));
        Self { queue, uses, queued }
    }

    pub(crate) fn submit(&self, command: Command) {
        let used = match &command {
            Command::Copy { from, size, bytes: None, .. } => Some((*from as usize, *size)),
            Command::ReadBack { to, size, .. } => Some((*to as usize, *size)),
            _ => None,
        };
        if let Command::Copy { size, .. } = &command {
            settings::LARGEST_COPY.raise_to(*size as u64);
            settings::MOST_QUEUED.raise_to(self.queued.fetch_add(*size as u64, SeqCst) + *size as u64);
        }
        lock(&self.uses).push_back(used);
        // The thread ends after this sender.
        let _ = self.queue.send((Instant::now(), command));
    }

    pub(crate) fn is_idle(&self) -> bool {
        lock(&self.uses).is_empty()
    }

    pub(crate) fn uses(&self, address: usize, size: usize) -> bool {
        let uses = lock(&self.uses);
        uses.iter().flatten().any(|&(from, len)| from < address + size && address < from + len)
    }
}

fn work(commands: &Receiver<(Instant, Command)>, uses: &Uses, queued: &AtomicU64, error: &LastingError) {
    let mut end = Instant::now();
    while let Ok((submitted, command)) = commands.recv() {
        // As on a device: waking this thread adds nothing.
        end = end.max(submitted);
        let size = if let Command::Copy { size, .. } = &command { *size as u64 } else { 0 };
        if error.load() == code::SUCCESS {
            run(command, &mut end, error);
        }
        queued.fetch_sub(size, SeqCst);
        lock(uses).pop_front();
    }
}

fn run(command: Command, end: &mut Instant, error: &LastingError) {
    match command {
        Command::Record(reached, number) => {
            reached.fetch_max(number, SeqCst);
        }
        Command::ReadBack { from, to, size } => {
            *end += duration(size);
            thread::sleep(end.saturating_duration_since(Instant::now()));
            // SAFETY: the caller keeps both ranges until the copy has ended.
            unsafe { to.copy_from(from, size) };
        }
        Command::Copy { from, to, size, bytes } => {
            if settings::strikes("hang") {
                loop {
                    thread::park();
                }
            }
            *end += duration(size);
            thread::sleep(end.saturating_duration_since(Instant::now()));
            if settings::strikes("async") {
                return error.store(code::ILLEGAL_ADDRESS);
            }
            if settings::strikes("lost") {
                return; // and nobody is told
            }
            let from = bytes.as_ref().map_or(from, |bytes| bytes.as_ptr());
            // SAFETY: the caller keeps both ranges until the copy has ended, or has given the bytes to us.
            unsafe { to.copy_from(from, size) };
        }
    }
}

fn duration(size: usize) -> Duration {
    // 1 MB/s is 1 byte/us
    let transfer = (size as u64 * 1000).checked_div(BANDWIDTH_MBS.get()).unwrap_or(0);
    Duration::from_micros(LATENCY_US.get()) + Duration::from_nanos(transfer)
}
