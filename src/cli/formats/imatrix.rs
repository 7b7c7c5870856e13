//! llama-imatrix's GGUF: for every expert tensor the tokens that each expert saw, as 32-bit floats.
//!
//! What it sums up of activations is neither read nor written: llama.cpp refuses a file with counts alone as an importance
//! matrix, and rightly so.

use super::text::profile_of;
use crate::gguf::ModelFile;
use crate::profile::{MAX_COUNT, MAX_EXPERTS, RecordedProfile};
use crate::units::layer_number;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::path::Path;

/// What `general.type` says.
const TYPE: &str = "imatrix";
const COUNTS: &str = ".counts";
/// What names of expert weights hold, in every architecture of llama.cpp.
const EXPERTS: &str = "_exps";
/// The tensor that counts are written for: every expert FFN has it.
const WRITTEN: &str = "ffn_down_exps.weight";
const F32: &str = "f32";
const GGUF_VERSION: u32 = 3;
const TYPE_STRING: u32 = 8;
const ALIGNMENT: usize = 32;

/// Whether the GGUF file at `path` says that it is one. What cannot be read is none.
pub fn is_imatrix(path: &Path) -> bool {
    ModelFile::open(path).is_ok_and(|file| file.text("general.type") == Some(TYPE))
}

/// Reads the counts. Tensors of one layer that differ (they see the same tokens) count as the one that saw most.
pub fn read(path: &Path) -> Result<RecordedProfile> {
    // The caller names the file.
    let unnamed = |error| match error {
        crate::Error::File { what, .. } => anyhow::anyhow!(what),
        other => other.into(),
    };
    let file = ModelFile::open(path).map_err(unnamed)?;
    ensure!(
        file.text("general.type") == Some(TYPE),
        "is a model; expected a profile or trace: one of {}",
        super::Format::names()
    );
    file.check_whole().map_err(unnamed)?;
    let mut counts = BTreeMap::<u32, BTreeMap<u32, u64>>::new();
    let mut n_expert = 0;
    for (name, info) in file.tensors() {
        let Some(layer) = layer_number(name).filter(|_| name.contains(EXPERTS) && name.ends_with(COUNTS)) else {
            continue;
        };
        let of_tensor = || format!("tensor {name:?}");
        ensure!(info.kind.name == F32, "{}: is {}; expected {F32}", of_tensor(), info.kind.name);
        let n = info.n_bytes / 4;
        ensure!(n <= MAX_EXPERTS.into(), "{}: {n} experts; expected at most {MAX_EXPERTS}", of_tensor());
        let mut bytes = vec![0; info.n_bytes as usize]; // at most 4 * MAX_EXPERTS
        let tensor = file.tensor(name).with_context(of_tensor)?;
        tensor.read_exact_at(&mut bytes, 0).with_context(of_tensor)?;
        let of_layer = counts.entry(layer).or_default();
        for (expert, bytes) in (0..).zip(bytes.as_chunks::<4>().0) {
            let value = f64::from(f32::from_le_bytes(*bytes));
            ensure!(
                (0.0..=MAX_COUNT as f64).contains(&value),
                "{}: expert {expert} has {value} tokens; expected a number from 0 to 2^53",
                of_tensor()
            );
            let most = of_layer.entry(expert).or_default();
            *most = (value.round() as u64).max(*most);
        }
        n_expert = n_expert.max(n as u32);
    }
    ensure!(!counts.is_empty(), "counts no experts; expected an imatrix of a model with experts");
    profile_of(counts, Some(n_expert), None)
}

/// Writes the counts alone. Above 2^24 they are not exact.
pub fn write(profile: &RecordedProfile) -> Result<Vec<u8>> {
    let (mut table, mut data) = (Vec::new(), Vec::new());
    for (layer, recorded) in &profile.layers {
        let n_expert = super::n_expert(profile, recorded);
        push_text(&mut table, &format!("blk.{layer}.{WRITTEN}{COUNTS}"));
        table.extend(2u32.to_le_bytes());
        table.extend([1, u64::from(n_expert)].map(u64::to_le_bytes).concat());
        table.extend(0u32.to_le_bytes()); // F32
        table.extend((data.len() as u64).to_le_bytes());
        let mut counts = vec![0f32; n_expert as usize];
        recorded.requests.iter().for_each(|&(expert, count)| counts[expert as usize] = count as f32);
        data.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
        data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
    }
    let mut file = b"GGUF".to_vec();
    file.extend(GGUF_VERSION.to_le_bytes());
    file.extend((profile.layers.len() as u64).to_le_bytes());
    file.extend(1u64.to_le_bytes());
    push_text(&mut file, "general.type");
    file.extend(TYPE_STRING.to_le_bytes());
    push_text(&mut file, TYPE);
    file.extend(table);
    file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
    file.extend(data);
    Ok(file)
}

fn push_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}
