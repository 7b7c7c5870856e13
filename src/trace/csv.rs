//! Reading route traces of other programs: CSV with one row per (token, layer, expert).
//!
//! Lines that begin with `#` come first and may name `n_expert=N` for the model and `layer=L expert_bytes=N` for a layer.
//! Then a row of column names, of which `phase` (0 prompt, 1 decode), `layer` and `expert` are needed, `turn` and `step`
//! tell tokens apart, and the rest is passed over. Rows of one token and layer follow each other.

use super::calls::Calls;
use super::data::{LayerInfo, LayerTrace, MAX_EXPERTS, MAX_LAYERS, Trace};
use super::error::TraceError;
use crate::units::Expert;
use csv::{ReaderBuilder, StringRecord, Terminator, Trim};
use std::collections::BTreeMap;

/// The longest line, in bytes.
const MAX_LINE: usize = 4096;
/// The most that is repeated of a value, in characters.
const MAX_SHOWN: usize = 40;
/// What some editors put before a text. The crate passes over it; we do not take such a file.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The lines before the column names.
#[derive(Default)]
struct Preamble {
    n_expert: Option<u16>,
    expert_bytes: BTreeMap<u16, u64>,
}

/// Where the columns are that we need.
struct Columns {
    turn: Option<usize>,
    phase: usize,
    step: Option<usize>,
    layer: usize,
    expert: usize,
}

/// A row's token and layer.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    turn: u32,
    step: u32,
    is_decode: bool,
    layer: u16,
}

#[derive(Default)]
struct Reading {
    n_expert: Option<u16>,
    layers: BTreeMap<u16, (Calls, Calls)>,
    /// The token and layer whose experts are being gathered.
    open: Option<Key>,
    experts: Vec<Expert>,
    max_expert: u16,
    max_used: BTreeMap<u16, usize>,
}

/// Reads the text of a file.
pub fn read(text: &[u8]) -> Result<Trace, TraceError> {
    let (preamble, start) = Preamble::read(text)?;
    let table = &text[start..];
    if table.starts_with(BYTE_ORDER_MARK) {
        return Err(TraceError::NotATrace);
    }
    let mut rows = ReaderBuilder::new()
        .has_headers(false) // a first row that is no row of names is not to be taken for one
        .flexible(true)
        .quoting(false)
        .terminator(Terminator::Any(b'\n'))
        .trim(Trim::All)
        .comment(Some(b'#'))
        .from_reader(table);
    let mut row = StringRecord::new();
    if !rows.read_record(&mut row).is_ok_and(|has_names| has_names && row.as_slice().len() <= MAX_LINE) {
        return Err(TraceError::NotATrace);
    }
    let columns = Columns::find(&row).ok_or(TraceError::NotATrace)?;
    let mut reading = Reading { n_expert: preamble.n_expert, ..Reading::default() };
    loop {
        let has_row = rows.read_record(&mut row);
        // Counted only for a message; the crate's own number is that of the blank lines before the row.
        let line = || line_before(text, start + rows.position().byte() as usize);
        match has_row {
            Ok(false) => break,
            Ok(true) if row.as_slice().len() > MAX_LINE => return Err(TraceError::Line { line: line() }),
            Ok(true) if row.as_slice().is_empty() && row.len() == 1 => {} // a carriage return alone
            Ok(true) => reading.row(&columns, &row, line)?,
            Err(_) => return Err(TraceError::Line { line: line() }),
        }
    }
    reading.close();
    Ok(reading.trace(&preamble.expert_bytes))
}

/// The number of the line that ends right before byte `end`, from 1.
fn line_before(text: &[u8], end: usize) -> usize {
    1 + text[..end.saturating_sub(1)].iter().filter(|&&byte| byte == b'\n').count()
}

impl Preamble {
    /// Reads the lines before the column names, and finds where those begin.
    fn read(text: &[u8]) -> Result<(Self, usize), TraceError> {
        let (mut preamble, mut start) = (Self::default(), 0);
        for (number, line) in (1..).zip(text.split_inclusive(|&byte| byte == b'\n')) {
            let trimmed = line.trim_ascii();
            if trimmed.starts_with(b"#") {
                let text = str::from_utf8(trimmed).ok().filter(|_| line.len() <= MAX_LINE);
                preamble.comment(number, text.ok_or(TraceError::NotATrace)?)?;
            } else if !trimmed.is_empty() {
                return Ok((preamble, start));
            }
            start += line.len();
        }
        Err(TraceError::NotATrace)
    }

    /// `# model=… n_expert=N …` or `# layer=L expert_bytes=N …`.
    fn comment(&mut self, line: usize, text: &str) -> Result<(), TraceError> {
        let value = |name: &str| text.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        if let Some(text) = value("n_expert") {
            let expected = || format!("a whole number from 1 to {MAX_EXPERTS}");
            let known = text.parse().ok().filter(|n| (1..=MAX_EXPERTS).contains(n));
            self.n_expert = Some(known.ok_or_else(|| field(line, "n_expert", text, expected()))?);
        }
        if let (Some(layer), Some(text)) = (value("layer"), value("expert_bytes")) {
            let expected = || "a whole number".to_owned();
            let layer = layer.parse().map_err(|_| field(line, "layer", layer, expected()))?;
            let bytes = text.parse().map_err(|_| field(line, "expert_bytes", text, expected()))?;
            self.expert_bytes.insert(layer, bytes);
        }
        Ok(())
    }
}

impl Columns {
    fn find(names: &StringRecord) -> Option<Self> {
        let find = |name| names.iter().position(|column| column == name);
        let (phase, layer, expert) = (find("phase")?, find("layer")?, find("expert")?);
        Some(Self { turn: find("turn"), phase, step: find("step"), layer, expert })
    }
}

impl Reading {
    /// Takes one row; `line` counts its line number.
    fn row(&mut self, columns: &Columns, row: &StringRecord, line: impl Fn() -> usize) -> Result<(), TraceError> {
        let whole = |name, column: Option<usize>, end: u32| {
            let Some(column) = column else { return Ok(0) };
            let text = row.get(column).unwrap_or_default();
            let value = text.parse::<u32>().ok().filter(|&value| value < end);
            value.ok_or_else(|| field(line(), name, text, format!("a whole number below {end}")))
        };
        let layer = whole("layer", Some(columns.layer), 1 << 16)? as u16;
        let n_expert = self.n_expert.unwrap_or(MAX_EXPERTS);
        let expert = whole("expert", Some(columns.expert), n_expert.into())? as u16;
        let is_decode = whole("phase", Some(columns.phase), 2)? == 1;
        let (turn, step) = (whole("turn", columns.turn, u32::MAX)?, whole("step", columns.step, u32::MAX)?);
        let key = Key { turn, step, is_decode, layer };
        if self.open != Some(key) {
            self.close();
            self.open = Some(key);
        }
        if self.experts.contains(&Expert(expert)) {
            return Err(TraceError::Twice { line: line(), expert });
        }
        self.experts.push(Expert(expert));
        self.max_expert = self.max_expert.max(expert);
        if self.layers.len() > MAX_LAYERS { Err(TraceError::TooManyLayers) } else { Ok(()) }
    }

    /// The experts of one token and layer are complete.
    fn close(&mut self) {
        let Some(key) = self.open.take() else { return };
        let (prompt, decode) = self.layers.entry(key.layer).or_default();
        let calls = if key.is_decode { decode } else { prompt };
        calls.push(1, self.experts.iter().copied());
        let most = self.max_used.entry(key.layer).or_default();
        *most = (*most).max(self.experts.len());
        self.experts.clear();
    }

    fn trace(self, expert_bytes: &BTreeMap<u16, u64>) -> Trace {
        let n_expert = self.n_expert.unwrap_or(self.max_expert + 1);
        let layer = |(layer, (prompt, decode)): (u16, (Calls, Calls))| {
            let n_used = self.max_used.get(&layer).and_then(|&n_used| u16::try_from(n_used).ok()).unwrap_or(n_expert);
            let expert_bytes = expert_bytes.get(&layer).copied();
            LayerTrace { info: LayerInfo { layer, n_expert, n_used, expert_bytes }, prompt, decode }
        };
        Trace { fingerprint: None, layers: self.layers.into_iter().map(layer).collect(), is_cut: false }
    }
}

fn field(line: usize, column: &'static str, value: &str, expected: String) -> TraceError {
    TraceError::Field { line, column, value: value.chars().take(MAX_SHOWN).collect(), expected }
}
