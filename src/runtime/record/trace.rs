//! `--moe-trace-out`: the routing of every call, written to a file in the background.
//!
//! Contexts add to a buffer in memory; whoever saves profiles carries it to the file. One model per file: the first.

use crate::ggml::{Level, OwnIds, log};
use crate::runtime::model::Model;
use crate::runtime::model::layer::Layer;
use crate::trace::{LayerInfo, MAGIC, TraceWriter};
use crate::units::Expert;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Room in the buffer at first: some seconds of decoding.
const BUFFER_BYTES: usize = 1 << 20;

/// One model's trace.
pub struct TraceFile {
    path: PathBuf,
    inner: Mutex<Inner>,
    /// Held while the buffer is carried to the file.
    file: Mutex<Option<File>>,
}

struct Inner {
    writer: TraceWriter<Vec<u8>>,
    /// Whose routing it is.
    model: Option<Arc<Model>>,
}

impl TraceFile {
    /// A trace for `path`, which is created or, if it is an earlier trace, replaced. `None`, after a line, if it is not.
    pub fn new(path: &Path) -> Option<Self> {
        let opened = open(path);
        let writer = TraceWriter::new(Vec::with_capacity(BUFFER_BYTES));
        match (opened, writer) {
            (Ok(file), Ok(writer)) => Some(Self {
                path: path.into(),
                inner: Mutex::new(Inner { writer, model: None }),
                file: Mutex::new(Some(file)),
            }),
            (Err(error), _) | (_, Err(error)) => {
                log(Level::Warn, &format!("{}: no trace is written: {error}", path.display()));
                None
            }
        }
    }

    /// Adds one call. The lock is held for this only.
    pub fn add(&self, model: &Arc<Model>, layer: &Layer, ids: &OwnIds) {
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

    /// Carries what has been added to the file.
    pub fn save(&self) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(out) = &mut *file else { return };
        let empty = Vec::with_capacity(BUFFER_BYTES);
        let bytes = std::mem::replace(self.inner().writer.get_mut(), empty);
        if let Err(error) = out.write_all(&bytes) {
            log(Level::Warn, &format!("{}: the trace ends here: {error}", self.path.display()));
            *file = None;
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

/// The file, empty. Fails where something other than a trace is.
fn open(path: &Path) -> io::Result<File> {
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("expected a regular file"));
    }
    let mut start = Vec::new();
    (&mut file).take(MAGIC.len() as u64).read_to_end(&mut start)?;
    if !start.is_empty() && start != MAGIC {
        return Err(io::Error::other("expected a new file or an earlier trace"));
    }
    file.set_len(0)?;
    io::Seek::rewind(&mut file)?;
    Ok(file)
}
