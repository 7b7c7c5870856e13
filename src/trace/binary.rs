//! Reading our own format: records after a magic text. See docs/traces.md.

use super::calls::Calls;
use super::data::{LayerInfo, LayerTrace, MAX_EXPERTS, MAX_LAYERS, Trace};
use super::error::TraceError;
use crate::units::Expert;
use std::collections::BTreeMap;

/// What every trace begins with.
pub const MAGIC: &[u8; 16] = b"moe-hot trace 1\n";
/// Kinds of records.
pub const MODEL: u8 = b'M';
pub const LAYER: u8 = b'L';
pub const BATCH: u8 = b'B';
/// Hex digits of a model's fingerprint.
const FINGERPRINT_DIGITS: usize = 16;

/// What is left of the file.
struct Rest<'a> {
    bytes: &'a [u8],
    /// Bytes before it.
    offset: usize,
}

impl<'a> Rest<'a> {
    /// The next bytes; `None` if the file ends before.
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(n)?;
        self.bytes = rest;
        self.offset += n;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }
}

/// What was read so far.
#[derive(Default)]
struct Reading {
    fingerprint: Option<String>,
    layers: BTreeMap<u16, LayerTrace>,
    /// The layer that was defined first: its batches tell prompt from decode, as the last layer's are cut in prompts.
    first: Option<u16>,
    is_decoding: bool,
}

/// Reads all records after the magic text.
pub fn read(records: &[u8]) -> Result<Trace, TraceError> {
    let mut rest = Rest { bytes: records, offset: MAGIC.len() };
    let mut reading = Reading::default();
    let mut is_cut = false;
    while !rest.bytes.is_empty() && !is_cut {
        is_cut = reading.record(&mut rest)?.is_none();
    }
    Ok(Trace { fingerprint: reading.fingerprint, layers: reading.layers.into_values().collect(), is_cut })
}

impl Reading {
    /// Reads one record; `None` if the file ends within it.
    fn record(&mut self, rest: &mut Rest<'_>) -> Result<Option<()>, TraceError> {
        let offset = rest.offset;
        match rest.array() {
            Some([MODEL]) => self.model(rest, offset),
            Some([LAYER]) => self.layer(rest, offset),
            Some([BATCH]) => self.batch(rest, offset),
            Some([kind]) => Err(TraceError::Kind { offset, kind }),
            None => Ok(None),
        }
    }

    fn model(&mut self, rest: &mut Rest<'_>, offset: usize) -> Result<Option<()>, TraceError> {
        let Some(digits) = rest.take(FINGERPRINT_DIGITS) else { return Ok(None) };
        if !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(TraceError::Fingerprint { offset });
        }
        self.fingerprint = Some(String::from_utf8_lossy(digits).into_owned());
        Ok(Some(()))
    }

    fn layer(&mut self, rest: &mut Rest<'_>, offset: usize) -> Result<Option<()>, TraceError> {
        let (Some(layer), Some(n_expert), Some(n_used), Some(bytes)) =
            (rest.u16(), rest.u16(), rest.u16(), rest.array().map(u64::from_le_bytes))
        else {
            return Ok(None);
        };
        if !(1..=MAX_EXPERTS).contains(&n_expert) || !(1..=n_expert).contains(&n_used) {
            return Err(TraceError::Layer { offset, layer, n_expert, n_used });
        }
        if self.layers.len() >= MAX_LAYERS {
            return Err(TraceError::TooManyLayers);
        }
        let info = LayerInfo { layer, n_expert, n_used, expert_bytes: (bytes > 0).then_some(bytes) };
        let empty = LayerTrace { info, prompt: Calls::default(), decode: Calls::default() };
        if self.layers.insert(layer, empty).is_some() {
            return Err(TraceError::LayerTwice { offset, layer });
        }
        self.first.get_or_insert(layer);
        Ok(Some(()))
    }

    fn batch(&mut self, rest: &mut Rest<'_>, offset: usize) -> Result<Option<()>, TraceError> {
        let (Some(layer), Some(n_tokens)) = (rest.u16(), rest.u16()) else { return Ok(None) };
        let known = self.layers.get_mut(&layer).ok_or(TraceError::UnknownLayer { offset, layer })?;
        let LayerInfo { n_expert, n_used, .. } = known.info;
        if n_tokens == 0 {
            return Err(TraceError::NoTokens { offset, layer });
        }
        let width = if n_expert <= 256 { 1 } else { 2 };
        let Some(ids) = rest.take(usize::from(n_tokens) * usize::from(n_used) * width) else { return Ok(None) };
        let ids =
            ids.chunks_exact(width).map(|id| Expert(u16::from_le_bytes([id[0], id.get(1).copied().unwrap_or(0)])));
        if let Some(Expert(expert)) = ids.clone().find(|id| id.0 >= n_expert) {
            return Err(TraceError::Expert { offset, layer, expert, n_expert });
        }
        if self.first == Some(layer) {
            self.is_decoding |= n_tokens == 1;
        }
        let calls = if self.is_decoding { &mut known.decode } else { &mut known.prompt };
        calls.push(n_tokens.into(), ids);
        Ok(Some(()))
    }
}
