//! A backend instance's queue and the thread that works it off, in order.
//!
//! Time is a device's: a command starts when it was submitted or when the one before it ended, whichever is later,
//! so that waking our thread adds nothing to a latency or a copy's duration.

use crate::event::Event;
use crate::snapshot::{Cpu, Snapshot};
use crate::{guard, lock, say, settings, stats};
use std::collections::VecDeque;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The last part of a wait, which is spun.
const SPIN: Duration = Duration::from_micros(50);
/// Of sleeps; the system's default is 50 us.
const TIMER_SLACK_NS: libc::c_ulong = 1_000;
const MAX_SPARE_SNAPSHOTS: usize = 4;

/// Some queue is stuck for good: nobody who frees something may wait any more.
static IS_ANY_STUCK: AtomicBool = AtomicBool::new(false);
static QUEUES: Mutex<Vec<Weak<Queue>>> = Mutex::new(Vec::new());
/// A setting has changed: those who are held look again.
static HAS_CHANGED: Condvar = Condvar::new();
static HELD: Mutex<()> = Mutex::new(());

/// Which way a copy goes.
#[derive(Clone, Copy)]
pub(crate) enum Direction {
    ToDevice,
    ToHost,
}

/// When the bus is free again: all queues share one in each direction.
static BUS_TO_DEVICE: Mutex<Option<Instant>> = Mutex::new(None);
static BUS_TO_HOST: Mutex<Option<Instant>> = Mutex::new(None);

/// What a queue does. Addresses are real ones, or the host's.
pub(crate) enum Command {
    /// Waits until writes are not held any more.
    Held,
    /// Copies `size` bytes, read only when its turn comes; between host and device, it takes the time of a transfer.
    Copy { from: *const u8, to: *mut u8, size: usize, transfer: Option<Direction> },
    /// Computes, if there is something to compute, and takes the latency, if it applies.
    Compute { graph: Option<Box<Snapshot>>, has_latency: bool },
    /// Marks an event as reached.
    Record(Arc<Event>, u64),
    /// Waits until an event is reached.
    Wait(Arc<Event>, u64),
    /// Never ends.
    Hang,
    /// Ends the thread.
    Stop,
}

// SAFETY: the addresses are used by one thread, when their turn comes; the host keeps what they point to until then.
unsafe impl Send for Command {}

/// Commands that wait for their turn.
#[derive(Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    has_work: Condvar,
    is_idle: Condvar,
}

#[derive(Default)]
struct State {
    commands: VecDeque<(Instant, Command)>,
    is_busy: bool,
    /// Among the commands, and the one that is being run.
    n_large_writes: u64,
    #[allow(clippy::vec_box)] // they go into commands and come back as they are
    spare: Vec<Box<Snapshot>>,
}

impl State {
    fn is_idle(&self) -> bool {
        self.commands.is_empty() && !self.is_busy
    }
}

/// A queue with its thread; dropping it works off what is left, unless something is stuck.
pub(crate) struct Worker {
    pub(crate) queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(crate) fn start(cpu: Cpu) -> std::io::Result<Self> {
        let queue = Arc::<Queue>::default();
        let mut queues = lock(&QUEUES);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        let shared = Arc::clone(&queue);
        let thread = thread::Builder::new().name("fake-device".into()).spawn(move || work(&shared, cpu))?;
        Ok(Self { queue, thread: Some(thread) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.queue.push(Command::Stop);
        let Some(thread) = self.thread.take() else { return };
        if !IS_ANY_STUCK.load(SeqCst) && thread.join().is_err() {
            say("a queue's thread has panicked");
        }
    }
}

impl Queue {
    /// Queues a command; one that would take no time anyway may be run at once.
    pub(crate) fn submit(&self, command: Command) {
        if settings::may_run_inline() {
            let state = lock(&self.state);
            if state.is_idle() && command.runs_inline() {
                return;
            }
        }
        if matches!(command, Command::Hang) {
            IS_ANY_STUCK.store(true, SeqCst);
        }
        self.push(command);
    }

    fn push(&self, command: Command) {
        let mut state = lock(&self.state);
        if command.is_large_write() {
            state.n_large_writes += 1;
            stats::MOST_LARGE_WRITES_QUEUED.raise_to(state.n_large_writes);
        }
        state.commands.push_back((Instant::now(), command));
        drop(state);
        self.has_work.notify_one();
    }

    /// Waits until everything queued is done.
    pub(crate) fn synchronize(&self) {
        let mut state = lock(&self.state);
        while !state.is_idle() {
            state = wait(&self.is_idle, state);
        }
    }

    /// A snapshot to fill, used before if possible.
    pub(crate) fn take_spare(&self) -> Box<Snapshot> {
        lock(&self.state).spare.pop().unwrap_or_default()
    }

    pub(crate) fn give_back(&self, graph: Box<Snapshot>) {
        let mut state = lock(&self.state);
        if state.spare.len() < MAX_SPARE_SNAPSHOTS {
            state.spare.push(graph);
        }
    }

    fn next(&self) -> (Instant, Command) {
        let mut state = lock(&self.state);
        loop {
            if let Some(next) = state.commands.pop_front() {
                state.is_busy = true;
                return next;
            }
            state = wait(&self.has_work, state);
        }
    }

    fn finish(&self, was_large_write: bool) {
        let mut state = lock(&self.state);
        state.is_busy = false;
        state.n_large_writes = state.n_large_writes.saturating_sub(u64::from(was_large_write));
        if state.commands.is_empty() {
            self.is_idle.notify_all();
        }
    }
}

fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

impl Command {
    fn is_large_write(&self) -> bool {
        matches!(self, Self::Copy { transfer: Some(Direction::ToDevice), size, .. } if is_large(*size))
    }

    /// Runs it if that takes no time; else it is to be queued.
    fn runs_inline(&self) -> bool {
        match self {
            Self::Copy { from, to, size, .. } => {
                // SAFETY: as for `Send`: the host keeps both ranges, and it is this command's turn.
                unsafe { to.copy_from(*from, *size) };
                true
            }
            Self::Record(event, number) => {
                event.reach(*number);
                true
            }
            Self::Wait(event, number) => event.is_reached(*number),
            Self::Compute { graph, .. } => graph.is_none(),
            Self::Held | Self::Hang | Self::Stop => false,
        }
    }

    /// Runs it, and returns when the device would have ended it.
    fn run(self, start: Instant, queue: &Queue, cpu: &Cpu) -> Instant {
        match self {
            Self::Held => {
                let mut held = lock(&HELD);
                while settings::HOLD_WRITES.is_on() {
                    held = wait(&HAS_CHANGED, held);
                }
                Instant::now()
            }
            Self::Copy { from, to, size, transfer } => {
                // SAFETY: as for `Send`: the host keeps both ranges, and it is this command's turn.
                unsafe { to.copy_from(from, size) };
                transfer.map_or(start, |direction| end_of_copy(direction, start, size))
            }
            Self::Compute { graph, has_latency } => {
                let mut end = start;
                if let Some(mut graph) = graph {
                    cpu.compute(&mut graph);
                    queue.give_back(graph);
                    end = Instant::now();
                }
                if has_latency { end + Duration::from_micros(settings::LATENCY_US.get()) } else { end }
            }
            Self::Record(event, number) => {
                event.reach(number);
                start
            }
            Self::Wait(event, number) => {
                event.wait(number);
                Instant::now()
            }
            Self::Hang => loop {
                thread::park();
            },
            Self::Stop => start,
        }
    }
}

fn work(queue: &Queue, cpu: Cpu) {
    // SAFETY: changes nothing but this thread's timers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, TIMER_SLACK_NS) };
    let mut end = Instant::now();
    loop {
        let (submitted, command) = queue.next();
        let (is_last, is_large_write) = (matches!(command, Command::Stop), command.is_large_write());
        let start = submitted.max(end);
        end = guard("working off a queue", start, || command.run(start, queue, &cpu));
        wait_until(end);
        queue.finish(is_large_write);
        if is_last {
            return;
        }
    }
}

/// Tells those who wait for a setting that one has changed.
pub(crate) fn look_at_settings() {
    drop(lock(&HELD)); // nobody is between looking and waiting
    HAS_CHANGED.notify_all();
}

/// Waits until all that is queued anywhere is done, as freeing a GPU's memory does; unless something is stuck.
pub(crate) fn drain_all() {
    let queues: Vec<_> = lock(&QUEUES).iter().filter_map(Weak::upgrade).collect();
    for queue in queues {
        if !IS_ANY_STUCK.load(SeqCst) {
            queue.synchronize();
        }
    }
}

/// Whether a copy counts as large; none does if `fault_min_bytes` is not set.
fn is_large(size: usize) -> bool {
    settings::FAULT_MIN_BYTES.is_on() && size as u64 >= settings::FAULT_MIN_BYTES.get()
}

/// When a copy between host and device ends that starts now.
pub(crate) fn end_of_copy(direction: Direction, start: Instant, size: usize) -> Instant {
    let megabytes_per_s = settings::BANDWIDTH_MBS.get();
    if megabytes_per_s == 0 {
        return start;
    }
    let bus = match direction {
        Direction::ToDevice => &BUS_TO_DEVICE,
        Direction::ToHost => &BUS_TO_HOST,
    };
    let mut is_free_at = lock(bus);
    let asked = Instant::now();
    let start = is_free_at.map_or(start, |time| time.max(start));
    if matches!(direction, Direction::ToDevice) && !is_large(size) {
        stats::LONGEST_BUS_WAIT_US.raise_to(start.saturating_duration_since(asked).as_micros() as u64);
    }
    // 1 MB/s is 1 byte/us
    let end = start + Duration::from_nanos(size as u64 * 1000 / megabytes_per_s);
    *is_free_at = Some(end);
    end
}

/// Sleeps, and spins the last part.
pub(crate) fn wait_until(deadline: Instant) {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if left > SPIN {
            thread::sleep(left - SPIN);
        } else {
            spin_loop();
        }
    }
}
