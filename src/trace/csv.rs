//! Reading route traces of other programs: CSV with one row per (token, layer, expert).
//!
//! Lines that begin with `#` come first and may name `n_expert=N` for the model and `layer=L expert_bytes=N` for a layer.
//! Then a row of column names, of which `phase` (0 prompt, 1 decode), `layer` and `expert` are needed, `turn` and `step`
//! tell tokens apart, and the rest is passed over. Rows of one token and layer follow each other.

use super::Calls;
use super::{LayerInfo, LayerTrace, MAX_EXPERTS, MAX_LAYERS, Trace, TraceFault};
use crate::units::Expert;
use std::collections::BTreeMap;

/// The longest line, in bytes.
const MAX_LINE: usize = 4096;
/// The most that is repeated of a value, in characters.
const MAX_SHOWN: usize = 40;

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
    expert_bytes: BTreeMap<u16, u64>,
    layers: BTreeMap<u16, (Calls, Calls)>,
    /// The token and layer whose experts are being gathered.
    open: Option<Key>,
    experts: Vec<Expert>,
    max_expert: u16,
    max_used: BTreeMap<u16, usize>,
}

pub fn read(text: &[u8]) -> Result<Trace, TraceFault> {
    let mut reading = Reading::default();
    let mut columns = None;
    for (number, line) in (1..).zip(text.split(|&byte| byte == b'\n')) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let line = std::str::from_utf8(line).ok().filter(|line| line.len() <= MAX_LINE);
        match (&columns, line) {
            (None, None) => return Err(TraceFault::NotATrace),
            (_, None) => return Err(TraceFault::Line { line: number }),
            (_, Some("")) => {}
            (_, Some(line)) if line.starts_with('#') => reading.comment(number, line)?,
            (None, Some(line)) => columns = Some(Columns::find(line).ok_or(TraceFault::NotATrace)?),
            (Some(columns), Some(line)) => reading.row(columns, number, line)?,
        }
    }
    reading.close();
    columns.map_or(Err(TraceFault::NotATrace), |_| Ok(reading.trace()))
}

impl Columns {
    fn find(line: &str) -> Option<Self> {
        let find = |name| line.split(',').position(|column| column.trim() == name);
        let (phase, layer, expert) = (find("phase")?, find("layer")?, find("expert")?);
        Some(Self { turn: find("turn"), phase, step: find("step"), layer, expert })
    }
}

impl Reading {
    /// `# model=… n_expert=N …` or `# layer=L expert_bytes=N …`.
    fn comment(&mut self, number: usize, line: &str) -> Result<(), TraceFault> {
        let value = |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        if let Some(text) = value("n_expert") {
            let expected = || format!("a whole number from 1 to {MAX_EXPERTS}");
            let known = text.parse().ok().filter(|n| (1..=MAX_EXPERTS).contains(n));
            self.n_expert = Some(known.ok_or_else(|| field(number, "n_expert", text, expected()))?);
        }
        if let (Some(layer), Some(text)) = (value("layer"), value("expert_bytes")) {
            let expected = || "a whole number".to_owned();
            let layer = layer.parse().map_err(|_| field(number, "layer", layer, expected()))?;
            let bytes = text.parse().map_err(|_| field(number, "expert_bytes", text, expected()))?;
            self.expert_bytes.insert(layer, bytes);
        }
        Ok(())
    }

    fn row(&mut self, columns: &Columns, number: usize, line: &str) -> Result<(), TraceFault> {
        let text = |column: usize| line.split(',').nth(column).unwrap_or_default().trim();
        let whole = |name, column: Option<usize>, end: u32| {
            let Some(column) = column else { return Ok(0) };
            let value = text(column).parse::<u32>().ok().filter(|&value| value < end);
            value.ok_or_else(|| field(number, name, text(column), format!("a whole number below {end}")))
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
            return Err(TraceFault::Twice { line: number, expert });
        }
        self.experts.push(Expert(expert));
        self.max_expert = self.max_expert.max(expert);
        if self.layers.len() > MAX_LAYERS { Err(TraceFault::TooManyLayers) } else { Ok(()) }
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

    fn trace(self) -> Trace {
        let n_expert = self.n_expert.unwrap_or(self.max_expert + 1);
        let layer = |(layer, (prompt, decode)): (u16, (Calls, Calls))| {
            let n_used = self.max_used.get(&layer).and_then(|&n_used| u16::try_from(n_used).ok()).unwrap_or(n_expert);
            let expert_bytes = self.expert_bytes.get(&layer).copied();
            LayerTrace { info: LayerInfo { layer, n_expert, n_used, expert_bytes }, prompt, decode }
        };
        Trace { fingerprint: None, layers: self.layers.into_iter().map(layer).collect(), is_cut: false }
    }
}

fn field(line: usize, column: &'static str, value: &str, expected: String) -> TraceFault {
    TraceFault::Field { line, column, value: value.chars().take(MAX_SHOWN).collect(), expected }
}
