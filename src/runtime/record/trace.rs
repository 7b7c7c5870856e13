//! `--moe-trace-out`: the routing of every call, written to a file in the background.
//!
//! Contexts add to a buffer in memory; whoever saves profiles carries it to the file. One model per file: the first.

use crate::files::{self, Claim, FileError, Growing, MAX_WAITING_BYTES, beside, is_same_file, is_younger, read_start};
use crate::ggml::{Level, OwnIds, log};
use crate::options::{CacheProfile, Config};
use crate::runtime::model::Model;
use crate::runtime::model::layer::Layer;
use crate::trace::{LayerInfo, MAGIC, TraceWriter};
use crate::units::Expert;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Room in the buffer at first: some seconds of decoding.
const BUFFER_BYTES: usize = 1 << 20;
/// Files beside the one asked for that are tried before giving up: a router may start many programs.
const MAX_FILES_BESIDE: usize = 999;
/// How often a file may change while we look at it before we give up.
const MAX_TRIES: usize = 16;

/// One model's trace.
pub struct TraceFile {
    path: PathBuf,
    inner: Mutex<Inner>,
    /// Held while the buffer is carried to the file.
    file: Mutex<Option<Open>>,
    has_ended: AtomicBool,
}

/// A file that is being written.
struct Open {
    file: Growing,
    /// What has not been written yet.
    waiting: Vec<u8>,
    /// Whether the user knows that the disk is full.
    said_full: bool,
}

struct Inner {
    writer: TraceWriter<Vec<u8>>,
    /// Whose routing it is.
    model: Option<Arc<Model>>,
}

impl TraceFile {
    /// A new trace, in the file asked for or, if that is taken, beside it. `None`, after a line, if there is none.
    pub fn open(config: &Config) -> Option<Self> {
        let path = config.trace_out.as_ref()?;
        let refuse = |why: &dyn std::fmt::Display| {
            log(Level::Warn, &format!("{}: no trace is written: {why}", path.display()));
        };
        let profiles = [config.perf_out.as_deref(), config.hot_cache.as_ref().and_then(CacheProfile::file)];
        if profiles.into_iter().flatten().any(|profile| is_same_file(path, profile)) {
            refuse(&"it is the profile's file too; expected a file for each");
            return None;
        }
        let file = match settle(path, config.session_began) {
            Ok(Some(file)) => file,
            Ok(None) => {
                refuse(&format!("it and {MAX_FILES_BESIDE} files beside it are taken"));
                return None;
            }
            Err(error) => {
                refuse(&error);
                return None;
            }
        };
        let writer = TraceWriter::new(Vec::with_capacity(BUFFER_BYTES)).ok()?; // memory takes everything
        Some(Self {
            path: file.path().into(),
            inner: Mutex::new(Inner { writer, model: None }),
            file: Mutex::new(Some(Open { file, waiting: Vec::new(), said_full: false })),
            has_ended: AtomicBool::new(false),
        })
    }

    /// Adds one call. The lock is held for this only.
    pub fn add(&self, model: &Arc<Model>, layer: &Layer, ids: &OwnIds) {
        if self.has_ended.load(Relaxed) {
            return;
        }
        let mut inner = self.inner();
        let owner = inner.model.get_or_insert_with(|| model.clone());
        if !Arc::ptr_eq(owner, model) {
            return;
        }
        let number = |n: u32| u16::try_from(n).ok();
        let (Some(number), Some(n_expert)) = (number(layer.counts.layer()), number(layer.counts.n_expert())) else {
            return;
        };
        let (Ok(n_used), Ok(n_tokens)) = (u16::try_from(ids.n_used()), u16::try_from(ids.n_tokens())) else { return };
        let info = LayerInfo { layer: number, n_expert, n_used, expert_bytes: layer.expert_bytes() };
        let experts = ids.iter().filter_map(|(_, _, id)| u16::try_from(id).ok()).map(Expert);
        // What the format cannot hold is left out.
        let _ = inner.writer.call(info, n_tokens, experts);
    }

    /// Carries what has been added to the file. While the disk is full it waits in memory.
    pub fn save(&self) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = &mut *file else { return };
        let empty = Vec::with_capacity(BUFFER_BYTES);
        let mut bytes = std::mem::replace(self.inner().writer.get_mut(), empty);
        open.waiting.append(&mut bytes);
        let path = self.path.display();
        match open.file.append(&mut open.waiting) {
            Ok(()) => open.said_full = false,
            Err(error) if error.is_full_disk() && open.waiting.len() <= MAX_WAITING_BYTES => {
                if !std::mem::replace(&mut open.said_full, true) {
                    log(Level::Warn, &format!("{path}: trace not written, will be tried again: {error}"));
                }
            }
            Err(error) => {
                log(Level::Warn, &format!("{path}: trace ended: {error}"));
                self.has_ended.store(true, Relaxed);
                *file = None;
            }
        }
    }

    /// Says which model it was and carries everything to the file.
    pub fn finish(&self) {
        let model = self.inner().model.clone();
        if let Some(model) = model {
            let fingerprint = model.id().fingerprint;
            // Fails only for what is not a fingerprint.
            let _ = self.inner().writer.model(&fingerprint);
        }
        self.save();
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The file asked for, empty, or the next one beside it; `None` if all are taken.
fn settle(asked: &Path, session_began: Option<SystemTime>) -> Result<Option<Growing>, TraceFileError> {
    let names = (2..).map(|n: usize| beside(asked, &n.to_string())).take(MAX_FILES_BESIDE);
    for (n, path) in std::iter::once(asked.to_owned()).chain(names).enumerate() {
        match begin(&path, session_began) {
            Ok(Some(mut file)) => {
                if n > 0 {
                    let asked = asked.display();
                    log(
                        Level::Warn,
                        &format!("{asked} is taken (another program): this trace goes to {}", path.display()),
                    );
                }
                for note in file.take_notes() {
                    log(Level::Warn, &format!("{}: {note}", path.display()));
                }
                return Ok(Some(file));
            }
            Ok(None) => {}
            Err(TraceFileError::NotATrace) if n > 0 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Begins a trace at `path`; `None` if another program writes one there, or has done so in this session.
fn begin(path: &Path, session_began: Option<SystemTime>) -> Result<Option<Growing>, TraceFileError> {
    for _ in 0..MAX_TRIES {
        let Claim::Ours(claimed) = files::claim(path)? else { return Ok(None) };
        if let Some(present) = claimed.present() {
            let start = read_start(present, MAGIC.len()).map_err(TraceFileError::Unreadable)?;
            if start == MAGIC && is_younger(present, session_began) {
                return Ok(None);
            }
            if !start.is_empty() && start != MAGIC {
                return Err(TraceFileError::NotATrace);
            }
        }
        if let Some(file) = claimed.grow()? {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// Why a trace cannot be written to a file.
#[derive(Debug, thiserror::Error)]
enum TraceFileError {
    /// The file cannot be ours.
    #[error(transparent)]
    File(#[from] FileError),
    /// It cannot be looked at.
    #[error("cannot be read: {0}")]
    Unreadable(std::io::Error),
    /// Something else is there.
    #[error("expected a new file or an earlier trace")]
    NotATrace,
}
