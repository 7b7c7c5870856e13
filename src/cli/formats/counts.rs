//! CSV with a row of names, of which `layer`, `expert` and `count` are read, and one row per layer and expert.

use super::text::{self, profile_of};
use crate::profile::RecordedProfile;
use anyhow::{Context, Result, ensure};
use csv::{ReaderBuilder, Trim, Writer};
use std::collections::BTreeMap;

/// Reads the text of a file.
pub fn read(text: &[u8]) -> Result<RecordedProfile> {
    let mut rows = ReaderBuilder::new().trim(Trim::All).comment(Some(b'#')).flexible(true).from_reader(text);
    let names = rows.headers().context("line 1: is not text")?.clone();
    let column = |wanted| {
        names.iter().position(|name| name == wanted).with_context(|| format!("no column {wanted}; expected one"))
    };
    let (layer, expert, count) = (column("layer")?, column("expert")?, column("count")?);
    let mut counts = BTreeMap::<u32, BTreeMap<u32, u64>>::new();
    for row in rows.records() {
        let row = row.map_err(|error| {
            let line = error.position().map_or(0, csv::Position::line);
            anyhow::anyhow!("line {line}: is not text; expected comma-separated numbers")
        })?;
        let line = row.position().map_or(0, csv::Position::line);
        let cell = |column: usize| row.get(column).unwrap_or_default();
        let (layer, expert) = (text::layer(line, cell(layer))?, text::expert(line, cell(expert))?);
        let before = counts.entry(layer).or_default().insert(expert, text::count(line, cell(count))?);
        ensure!(before.is_none(), "line {line}: expert {expert} of layer {layer} is there twice; expected it once");
    }
    let n_expert = counts.values().filter_map(|layer| layer.keys().next_back()).max().map(|last| last + 1);
    profile_of(counts, n_expert, None)
}

/// Writes a row for every expert of every layer, those without requests too: so the number of experts is known.
pub fn write(profile: &RecordedProfile) -> Result<Vec<u8>> {
    let mut rows = Writer::from_writer(Vec::new());
    rows.write_record(["layer", "expert", "count"])?;
    for (layer, recorded) in &profile.layers {
        let counts: BTreeMap<_, _> = recorded.requests.iter().copied().collect();
        for expert in 0..super::n_expert(profile, recorded) {
            let count = counts.get(&expert).copied().unwrap_or(0);
            rows.write_record([layer.to_string(), expert.to_string(), count.to_string()])?;
        }
    }
    Ok(rows.into_inner().map_err(|error| error.into_error())?)
}
