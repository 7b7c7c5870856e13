//! Spark's table: `# hotness table: n_layer=L n_expert=E n_expert_used=K`, a note on the format, L rows of E counts.

use super::text::{self, profile_of};
use crate::profile::{MAX_EXPERTS, MAX_LAYER, RecordedProfile};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fmt::Write;

const TITLE: &str = "# hotness table:";
const NOTE: &str = "# one row per layer, one count of requests per expert";

/// Whether a file that begins so is such a table.
pub fn is_first_line(line: &str) -> bool {
    line.starts_with(TITLE)
}

/// Reads the text of a table.
pub fn read(text: &[u8]) -> Result<RecordedProfile> {
    let text = str::from_utf8(text).context("is not UTF-8; expected text")?;
    let mut lines = (1..).zip(text.lines().map(str::trim));
    let (_, first) = lines.next().context("is empty")?;
    let value = |name: &str| first.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    let number = |name: &str, most: u32| {
        let value = value(name).with_context(|| format!("line 1: no {name}=; expected one"))?;
        Ok::<_, anyhow::Error>(text::whole(1, name, value, 1, most.into())? as u32)
    };
    let n_layer = number("n_layer", MAX_LAYER + 1)?;
    let n_expert = number("n_expert", MAX_EXPERTS)?;
    let n_used = value("n_expert_used").map(|_| number("n_expert_used", n_expert)).transpose()?;
    let mut counts = BTreeMap::new();
    let mut layer = 0;
    for (line, row) in lines {
        let is_note = row.starts_with('#') || (line == 2 && row.starts_with(|c: char| !c.is_ascii_digit()));
        if row.is_empty() || is_note {
            continue;
        }
        ensure!(layer < n_layer, "line {line}: more rows than {n_layer} layers; expected one row per layer");
        let mut of_layer = BTreeMap::new();
        for (expert, text) in (0..).zip(row.trim_end_matches(',').split(',')) {
            ensure!(expert < n_expert, "line {line}: more than {n_expert} counts; expected one per expert");
            of_layer.insert(expert, text::count(line, text)?);
        }
        if of_layer.len() as u32 != n_expert {
            bail!("line {line}: {} counts; expected {n_expert}, one per expert", of_layer.len());
        }
        counts.insert(layer, of_layer);
        layer += 1;
    }
    ensure!(layer == n_layer, "{layer} rows; expected {n_layer}, one per layer");
    profile_of(counts, Some(n_expert), n_used)
}

/// Writes a table. Layers without experts are rows of zeros.
pub fn write(profile: &RecordedProfile) -> Result<Vec<u8>> {
    let n_layer = profile.layers.keys().next_back().map_or(0, |layer| layer + 1);
    let n_expert = profile.layers.values().map(|layer| super::n_expert(profile, layer)).max().unwrap_or(0);
    super::check_cells(u64::from(n_layer) * u64::from(n_expert))?;
    let n_used = profile.layers.values().filter_map(|layer| super::n_used(profile, layer)).max();
    let mut text = format!("{TITLE} n_layer={n_layer} n_expert={n_expert}");
    if let Some(n_used) = n_used {
        write!(text, " n_expert_used={n_used}")?;
    }
    writeln!(text, "\n{NOTE}")?;
    for layer in 0..n_layer {
        let mut row = vec![0; n_expert as usize];
        for &(expert, count) in profile.layers.get(&layer).into_iter().flat_map(|layer| &layer.requests) {
            row[expert as usize] = count;
        }
        writeln!(text, "{}", row.iter().map(u64::to_string).collect::<Vec<_>>().join(","))?;
    }
    Ok(text.into_bytes())
}
