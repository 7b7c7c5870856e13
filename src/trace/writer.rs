//! Writing a trace while the model runs. Allocates nothing per call once every layer is known.

use super::binary::{BATCH, LAYER, MAGIC, MODEL};
use super::data::{LayerInfo, MAX_EXPERTS};
use super::error::TraceWriteError;
use crate::units::Expert;
use std::io::{self, Write};

/// Writes records one after the other; wrap files in a `BufWriter`.
///
/// A file that ends early, in the middle of a record even, can be read up to there.
#[derive(Debug)]
pub struct TraceWriter<W> {
    out: W,
    /// Layers defined so far, by number.
    defined: Vec<bool>,
    /// One record.
    record: Vec<u8>,
}

impl<W: Write> TraceWriter<W> {
    /// Begins a trace.
    pub fn new(mut out: W) -> io::Result<Self> {
        out.write_all(MAGIC)?;
        Ok(Self { out, defined: Vec::new(), record: Vec::new() })
    }

    /// Says which model it is: 16 hex digits. May come at any time; the last counts.
    pub fn model(&mut self, fingerprint: &str) -> Result<(), TraceWriteError> {
        if fingerprint.len() != 16 || !fingerprint.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(TraceWriteError::Fingerprint(fingerprint.to_owned()));
        }
        self.out.write_all(&[MODEL])?;
        Ok(self.out.write_all(fingerprint.as_bytes())?)
    }

    /// Adds one call: `ids` of `n_tokens` tokens, one token after the other. Defines the layer if this is its first call.
    ///
    /// Fails, without writing, if `ids` are not `n_tokens * n_used` experts of the layer. A call without tokens is not written.
    pub fn call(
        &mut self,
        info: LayerInfo,
        n_tokens: u16,
        ids: impl Iterator<Item = Expert>,
    ) -> Result<(), TraceWriteError> {
        let LayerInfo { layer, n_expert, n_used, expert_bytes } = info;
        if n_tokens == 0 {
            return Ok(());
        }
        self.record.clear();
        if !self.defined.get(usize::from(layer)).is_some_and(|&is_defined| is_defined) {
            if !(1..=MAX_EXPERTS).contains(&n_expert) || !(1..=n_expert).contains(&n_used) {
                return Err(TraceWriteError::Layer { layer, n_expert, n_used });
            }
            self.record.push(LAYER);
            [layer, n_expert, n_used].iter().for_each(|value| self.record.extend(value.to_le_bytes()));
            self.record.extend(expert_bytes.unwrap_or(0).to_le_bytes());
        }
        self.record.push(BATCH);
        [layer, n_tokens].iter().for_each(|value| self.record.extend(value.to_le_bytes()));
        let mut n_ids = 0;
        for expert in ids {
            if expert.0 >= n_expert {
                return Err(TraceWriteError::Expert { layer, expert, n_expert });
            }
            match u8::try_from(expert.0) {
                Ok(byte) if n_expert <= 256 => self.record.push(byte),
                _ => self.record.extend(expert.0.to_le_bytes()),
            }
            n_ids += 1;
        }
        if n_ids != usize::from(n_tokens) * usize::from(n_used) {
            return Err(TraceWriteError::Ids { layer, n_ids, n_tokens, n_used });
        }
        self.out.write_all(&self.record)?;
        if self.defined.len() <= usize::from(layer) {
            self.defined.resize(usize::from(layer) + 1, false);
        }
        self.defined[usize::from(layer)] = true;
        Ok(())
    }

    /// Writes out what is buffered below.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// What is written to, for taking out what is there.
    pub fn get_mut(&mut self) -> &mut W {
        &mut self.out
    }

    /// What is written to.
    pub fn into_inner(self) -> W {
        self.out
    }
}
