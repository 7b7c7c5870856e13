//! What the driver keeps: contexts, and what was made in them, by handle.

use crate::code::{self, Code, LastingError};
use crate::stream::{Event, Stream};
use crate::{DEVICES, settings};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What callers take for a pointer.
pub(crate) type Handle = usize;

const FIRST_CONTEXT: Handle = 0x100;
const FIRST_HANDLE: Handle = 0x1000;

static STATE: Mutex<State> = Mutex::new(State::new());

thread_local! {
    /// The device whose context is current.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// What a function needs before it can be called.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    Init,
    /// A current context without an error.
    Context,
}

pub(crate) struct Context {
    pub(crate) retained: u32,
    pub(crate) error: Arc<LastingError>,
}

pub(crate) struct State {
    pub(crate) is_initialised: bool,
    /// By device.
    pub(crate) contexts: Vec<Context>,
    pub(crate) streams: BTreeMap<Handle, Arc<Stream>>,
    pub(crate) events: BTreeMap<Handle, Event>,
    /// Sizes by address.
    pub(crate) page_locked: BTreeMap<usize, usize>,
    made: usize,
    calls: BTreeMap<&'static str, u64>,
}

impl State {
    const fn new() -> Self {
        Self {
            is_initialised: false,
            contexts: Vec::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            page_locked: BTreeMap::new(),
            made: 0,
            calls: BTreeMap::new(),
        }
    }

    pub(crate) fn new_handle(&mut self) -> Handle {
        self.made += 1;
        FIRST_HANDLE + self.made
    }

    pub(crate) fn set_current(&self, context: Handle) -> Code {
        let device = context.wrapping_sub(FIRST_CONTEXT);
        if self.contexts.get(device).is_none_or(|context| context.retained == 0) {
            return code::INVALID_CONTEXT;
        }
        CURRENT.set(Some(device));
        code::SUCCESS
    }

    /// The current context's error, now and later.
    pub(crate) fn current_error(&self) -> Arc<LastingError> {
        CURRENT.get().map(|device| self.contexts[device].error.clone()).unwrap_or_default()
    }

    pub(crate) fn is_page_locked(&self, address: usize, size: usize) -> bool {
        let before = self.page_locked.range(..=address).next_back();
        before.is_some_and(|(start, len)| address + size <= start + len)
    }

    pub(crate) fn is_used_by_a_copy(&self, address: usize, size: usize) -> bool {
        self.streams.values().any(|stream| stream.uses(address, size))
    }

    fn check(&self, needs: Needs) -> Code {
        match (needs, CURRENT.get().map(|device| &self.contexts[device])) {
            (Needs::Nothing, _) => code::SUCCESS,
            _ if !self.is_initialised => code::NOT_INITIALIZED,
            (Needs::Init, _) => code::SUCCESS,
            (Needs::Context, Some(context)) if context.retained > 0 => context.error.load(),
            (Needs::Context, _) => code::INVALID_CONTEXT,
        }
    }
}

pub(crate) fn context_handle(device: usize) -> Handle {
    FIRST_CONTEXT + device
}

/// Runs a driver function's `body`, unless it is to fail or lacks what it needs.
pub(crate) fn call(name: &'static str, needs: Needs, body: impl FnOnce(&mut State) -> Code) -> Code {
    let mut state = lock(&STATE);
    let state = &mut *state;
    while state.contexts.len() < DEVICES {
        state.contexts.push(Context { retained: 0, error: Arc::default() });
    }
    *state.calls.entry(name).or_default() += 1;
    if settings::strikes(name) {
        return code::of_fault(name);
    }
    match state.check(needs) {
        code::SUCCESS => catch_unwind(AssertUnwindSafe(|| body(state))).unwrap_or(code::UNKNOWN),
        error => error,
    }
}

/// Forgets what a handle stands for.
pub(crate) fn removed<T>(all: &mut BTreeMap<Handle, T>, handle: Handle) -> Code {
    if all.remove(&handle).is_some() { code::SUCCESS } else { code::INVALID_HANDLE }
}

/// Ends all contexts' errors.
pub(crate) fn repair() {
    lock(&STATE).contexts.iter().for_each(|context| context.error.store(code::SUCCESS));
}

pub(crate) fn stat(name: &str) -> Option<u64> {
    let state = lock(&STATE);
    Some(match name {
        "contexts" => state.contexts.iter().map(|context| u64::from(context.retained)).sum(),
        "contexts_of_0" => u64::from(state.contexts[0].retained),
        "contexts_of_1" => u64::from(state.contexts[1].retained),
        "streams" => state.streams.len() as u64,
        "events" => state.events.len() as u64,
        "page_locked_bytes" => state.page_locked.values().sum::<usize>() as u64,
        "misuses" => settings::MISUSES.get(),
        "largest_copy" => settings::LARGEST_COPY.get(),
        "most_queued" => settings::MOST_QUEUED.get(),
        function => *state.calls.get(function)?,
    })
}

/// Locks, whether or not another thread has panicked meanwhile.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
