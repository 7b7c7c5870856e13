//! How results are printed: a table, or JSON as docs/replay.md describes it.

use super::names::name;
use super::play::{Case, Outcome};
use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Decimal megabytes, as buses are measured.
const MB: f64 = 1e6;

/// One result.
#[derive(Debug, Serialize)]
pub struct Row {
    trace: String,
    policy: String,
    slots: u16,
    lag: u32,
    inserts: u32,
    warm: String,
    /// Share of requests.
    hit: f64,
    /// All layers together.
    copies_per_token: f64,
    /// All layers together.
    bytes_per_token: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    look_ahead: Option<Ahead>,
}

/// What the look-ahead did.
#[derive(Debug, Serialize)]
struct Ahead {
    /// Among those of the row.
    copies_per_token: f64,
    /// Share of them that the token used.
    accuracy: f64,
}

impl Row {
    pub fn new(trace: &Path, case: &Case<'_>, outcome: &Outcome) -> Self {
        let tally = outcome.tally;
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        let per_token = |n: u64| share(n, outcome.n_tokens);
        Self {
            trace: trace.display().to_string(),
            policy: name(case.policy),
            slots: case.slots,
            lag: case.cost.lag,
            inserts: case.inserts.unwrap_or(0),
            warm: name(case.warm),
            hit: share(tally.hits, tally.requests),
            copies_per_token: per_token(tally.copies),
            bytes_per_token: outcome.bytes.map(per_token),
            look_ahead: case.look_ahead.then(|| Ahead {
                copies_per_token: per_token(tally.ahead),
                accuracy: share(tally.ahead_used, tally.ahead),
            }),
        }
    }

    fn cells(&self) -> [String; 9] {
        [
            self.trace.clone(),
            self.policy.clone() + if self.look_ahead.is_some() { " + look-ahead" } else { "" },
            self.slots.to_string(),
            self.lag.to_string(),
            if self.inserts == 0 { "any".to_owned() } else { self.inserts.to_string() },
            self.warm.clone(),
            format!("{:.3}", self.hit),
            format!("{:.1}", self.copies_per_token),
            self.bytes_per_token.map_or("?".to_owned(), |bytes| format!("{:.1}", bytes / MB)),
        ]
    }
}

pub fn table(rows: &[Row]) -> Result<()> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["trace", "policy", "slots", "lag", "inserts", "warm", "hit", "copies/token", "MB/token"]);
    table.add_rows(rows.iter().map(Row::cells));
    for number in [2, 3, 4, 6, 7, 8] {
        if let Some(column) = table.column_mut(number) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    writeln!(std::io::stdout().lock(), "{}", table.trim_fmt()).context("writing the table")
}

pub fn json(rows: &[Row], mut out: impl Write) -> Result<()> {
    serde_json::to_writer_pretty(&mut out, rows).context("writing JSON")?;
    writeln!(out).and_then(|()| out.flush()).context("writing JSON")
}

pub fn json_file(rows: &[Row], file: File, path: &Path) -> Result<()> {
    json(rows, BufWriter::new(file)).with_context(|| path.display().to_string())
}
