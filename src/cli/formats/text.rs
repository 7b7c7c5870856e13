//! What the readers of counts have in common: files of bounded size, numbers in their limits, one profile in the end.

use crate::profile::{Count, MAX_COUNT, MAX_EXPERTS, MAX_LAYER, RecordedLayer, RecordedProfile};
use anyhow::{Result, bail, ensure};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// The most that is repeated of a value, in characters.
const MAX_SHOWN: usize = 40;

/// The whole file, if it is not larger than so many MiB.
pub fn read(path: &Path, max_mib: u64) -> Result<Vec<u8>> {
    let max = max_mib << 20;
    let mut bytes = Vec::new();
    super::open(path)?.take(max + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() as u64 <= max, "is larger than {max_mib} MiB; expected a smaller file");
    Ok(bytes)
}

/// A whole number from `least` to `most` that stands in line `line`.
pub fn whole(line: u64, what: &str, text: &str, least: u64, most: u64) -> Result<u64> {
    match text.trim().parse() {
        Ok(value) if (least..=most).contains(&value) => Ok(value),
        _ => {
            let shown: String = text.chars().take(MAX_SHOWN).collect();
            bail!("line {line}: {what} is {shown:?}; expected a whole number from {least} to {most}")
        }
    }
}

/// The number of an expert, a layer, a count.
pub fn expert(line: u64, text: &str) -> Result<u32> {
    Ok(whole(line, "expert", text, 0, u64::from(MAX_EXPERTS) - 1)? as u32)
}

/// See [`expert`].
pub fn layer(line: u64, text: &str) -> Result<u32> {
    Ok(whole(line, "layer", text, 0, MAX_LAYER.into())? as u32)
}

/// See [`expert`].
pub fn count(line: u64, text: &str) -> Result<u64> {
    whole(line, "count", text, 0, MAX_COUNT)
}

/// A profile of counts per layer and expert. Layers that count nothing are left out.
///
/// Fails if nothing is counted or the sum of all counts is above 2^64.
pub fn profile_of(
    counts: BTreeMap<u32, BTreeMap<u32, u64>>,
    n_expert: Option<u32>,
    n_used: Option<u32>,
) -> Result<RecordedProfile> {
    let (mut layers, mut total) = (BTreeMap::new(), 0u64);
    for (layer, counts) in counts {
        let requests: Vec<Count> = counts.into_iter().filter(|&(_, count)| count > 0).collect();
        for &(_, count) in &requests {
            let Some(sum) = total.checked_add(count) else {
                bail!("layer {layer}: the sum of all counts is above 2^64")
            };
            total = sum;
        }
        if !requests.is_empty() {
            let recorded =
                RecordedLayer { n_expert, n_used, calls: 0, requests, ranks: Vec::new(), resident: Vec::new() };
            layers.insert(layer, recorded);
        }
    }
    ensure!(total > 0, "counts no request in any layer; expected a profile of a run that decoded something");
    Ok(RecordedProfile { layers, n_expert, n_used, model: None })
}
