//! Reading a trace of either format, trusting nothing.

use super::binary::MAGIC;
use super::data::{MAX_MIB, Trace};
use super::error::TraceError;
use super::{binary, csv};
use crate::{Error, Result};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Larger files are not read.
const MAX_BYTES: u64 = MAX_MIB << 20;

impl Trace {
    /// Reads a trace of either format. Fails with a [`TraceError`].
    pub fn read(path: &Path) -> Result<Self> {
        let trace = read_bytes(path).and_then(|bytes| Self::from_slice(&bytes));
        trace.map_err(|what| Error::file(path, what))
    }

    /// Reads what a file holds.
    pub fn from_slice(bytes: &[u8]) -> Result<Self, TraceError> {
        if bytes.len() as u64 > MAX_BYTES {
            return Err(TraceError::TooLarge);
        }
        let trace = match bytes.strip_prefix(MAGIC) {
            Some(records) => binary::read(records)?,
            None => csv::read(bytes)?,
        };
        if trace.layers.iter().all(|layer| layer.decode.is_empty()) {
            return Err(TraceError::NoDecode);
        }
        Ok(trace)
    }
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, TraceError> {
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(TraceError::NotRegular);
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
