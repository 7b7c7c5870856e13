//! The reader of profiles. It checks every number, once, so that nobody who uses a [`RecordedProfile`] has to.
//!
//! Profiles come from other programs and other machines; nothing in them is trusted.

use super::error::ProfileError;
use super::fingerprint::ModelId;
use super::format::{Count, MAX_COUNT, MAX_EXPERTS, MAX_LAYER, OPT_SCHEMA, SCHEMA};
use super::json::{self, Object, short};
use super::open::read_bytes;
use crate::{Error, Result};
use serde::Deserialize;
use serde_json::{Number, Value};
use std::collections::BTreeMap;
use std::path::Path;
use std::str;

/// What some editors put before a text; JSON has none.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// How often each expert was asked for in an earlier run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordedProfile {
    /// By layer number, 0 to 65,535; at least one where it was read.
    pub layers: BTreeMap<u32, RecordedLayer>,
    /// Experts per layer, the largest where layers differ, 1 to 65,536, if the profile says so.
    pub n_expert: Option<u32>,
    /// Experts per token, the largest where layers differ, 1 to 65,536, if the profile says so.
    pub n_used: Option<u32>,
    /// The model that was recorded, if the profile says so; other programs' profiles do not.
    pub model: Option<ModelId>,
}

/// How often each expert of one layer was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedLayer {
    /// Experts in this layer, 1 to 65,536, if the profile says so; other programs' profiles do not.
    pub n_expert: Option<u32>,
    /// Experts per token in this layer, 1 to 65,536, if the profile says so.
    pub n_used: Option<u32>,
    /// Expert FFNs computed; 0 where the profile does not say.
    pub calls: u64,
    /// `(expert, requests)`, ordered by expert, each once, without zeros; empty if nothing was asked for.
    ///
    /// The requests of all layers together fit into 64 bits.
    pub requests: Vec<Count>,
    /// `(expert, rank)` that an earlier cache has learnt, 1 to 65,535, the best last; ordered by expert, each once.
    pub ranks: Vec<Count>,
    /// Experts that an earlier cache held at its end, each once.
    pub resident: Vec<u32>,
}

impl RecordedProfile {
    /// Reads the profile at `path`.
    ///
    /// Fails with a [`ProfileError`] if it is not a readable regular file, or a symbolic link to one, or if anything in it is
    /// not as expected.
    pub fn read(path: &Path) -> Result<Self> {
        let profile = read_bytes(path).and_then(|text| Self::from_slice(&text));
        profile.map_err(|what| Error::file(path, what))
    }

    /// Reads the text of a profile.
    ///
    /// Of each layer `hot_experts` and `cold_experts` are added up if they count anything, else `experts` is taken,
    /// as all readers of the schema do. Fails with the first error found.
    pub fn from_slice(text: &[u8]) -> Result<Self, ProfileError> {
        Self::of_schemas(text, &[SCHEMA])
    }

    /// The same for a profile of either schema that has these fields.
    pub fn from_slice_of_either(text: &[u8]) -> Result<Self, ProfileError> {
        Self::of_schemas(text, &[SCHEMA, OPT_SCHEMA])
    }

    fn of_schemas(text: &[u8], schemas: &[&str]) -> Result<Self, ProfileError> {
        let file = parse(text, schemas)?;
        if !schemas.contains(&file.schema.as_str()) {
            return Err(ProfileError::Schema(short(&file.schema)));
        }
        if file.layers.is_empty() {
            return Err(ProfileError::NoLayers);
        }
        let n_expert = of_model(file.n_expert)?;
        let mut learnt = by_layer(file.moe_hot.map(|section| section.0.layers).unwrap_or_default())?;
        let mut layers = BTreeMap::new();
        let mut total = 0u64;
        for (index, Object(entry)) in file.layers.into_iter().enumerate() {
            let layer = layer_number("layers", index, &entry.layer)?;
            let Learnt { n_expert: own, n_used, ranks, resident } = learnt.remove(&layer).unwrap_or_default();
            let own = (own > 0).then_some(own);
            let requests = entry.requests(layer, own.or(n_expert).unwrap_or(MAX_EXPERTS))?;
            for &(_, count) in &requests {
                total = total.checked_add(count).ok_or(ProfileError::Overflow { layer })?;
            }
            let calls = entry.calls.as_u64().unwrap_or(0);
            let recorded = RecordedLayer { n_expert: own, n_used, calls, requests, ranks, resident };
            if layers.insert(layer, recorded).is_some() {
                return Err(ProfileError::DuplicateLayer { section: "layers", layer });
            }
        }
        if total == 0 {
            return Err(ProfileError::NoCounts);
        }
        let n_used = n_used(&file.n_expert_used);
        Ok(Self { layers, n_expert, n_used, model: file.model.map(|model| model.0) })
    }
}

/// The fields that are read. Numbers are kept as they stand, so that the message about a bad one can name its layer.
#[derive(Deserialize)]
struct File {
    schema: String,
    #[serde(default = "zero")]
    n_expert: Number,
    /// Not needed by a cache, so nothing is refused for it.
    #[serde(default)]
    n_expert_used: Value,
    layers: Vec<Object<Layer>>,
    #[serde(default)]
    model: Option<Object<ModelId>>,
    #[serde(default)]
    moe_hot: Option<Object<OwnSection>>,
}

#[derive(Deserialize)]
struct Layer {
    layer: Number,
    #[serde(default)]
    calls: Value,
    #[serde(default)]
    experts: Vec<(Number, Number)>,
    #[serde(default)]
    hot_experts: Vec<(Number, Number)>,
    #[serde(default)]
    cold_experts: Vec<(Number, Number)>,
}

#[derive(Deserialize)]
struct OwnSection {
    #[serde(default)]
    layers: Vec<Object<OwnLayer>>,
}

#[derive(Deserialize)]
struct OwnLayer {
    layer: Number,
    n_expert: Number,
    #[serde(default)]
    n_expert_used: Value,
    #[serde(default)]
    ranks: Vec<(Number, Number)>,
    #[serde(default)]
    resident: Vec<Number>,
}

/// What our own section says of a layer.
#[derive(Default)]
struct Learnt {
    n_expert: u32,
    n_used: Option<u32>,
    ranks: Vec<Count>,
    resident: Vec<u32>,
}

impl OwnLayer {
    fn read(&self, layer: u32, n_expert: u32) -> Result<Learnt, ProfileError> {
        let is_rank = |rank: &Number| whole(rank, u16::MAX.into()).is_some_and(|rank| rank > 0);
        if let Some((id, rank)) = self.ranks.iter().find(|(_, rank)| !is_rank(rank)) {
            return Err(ProfileError::Rank { layer, id: shown(id), rank: shown(rank) });
        }
        let ranks = counts(layer, "ranks", &self.ranks, n_expert)?;
        let once: Vec<_> = self.resident.iter().map(|id| (id.clone(), Number::from(1))).collect();
        let resident = counts(layer, "resident", &once, n_expert)?.into_iter().map(|(id, _)| id).collect();
        Ok(Learnt { n_expert, n_used: n_used(&self.n_expert_used), ranks, resident })
    }
}

/// Only the field that says what a file is.
#[derive(Deserialize)]
struct SchemaOnly {
    schema: String,
}

impl Layer {
    fn requests(&self, layer: u32, n_expert: u32) -> Result<Vec<Count>, ProfileError> {
        let read = |name, list| counts(layer, name, list, n_expert);
        let experts = read("experts", &self.experts)?;
        let mut requests = read("hot_experts", &self.hot_experts)?;
        requests.extend(read("cold_experts", &self.cold_experts)?);
        requests.sort_unstable();
        requests.dedup_by(|next, kept| {
            let is_same = next.0 == kept.0;
            if is_same {
                kept.1 += next.1; // both are at most MAX_COUNT
            }
            is_same
        });
        requests.retain(|&(_, count)| count > 0);
        if requests.is_empty() {
            requests = experts.into_iter().filter(|&(_, count)| count > 0).collect();
        }
        Ok(requests)
    }
}

/// One list of counts, ordered by expert.
fn counts(
    layer: u32,
    list: &'static str,
    pairs: &[(Number, Number)],
    n_expert: u32,
) -> Result<Vec<Count>, ProfileError> {
    let read = |(id, count): &(Number, Number)| {
        let known = whole(id, u64::from(n_expert) - 1);
        let id = known.ok_or_else(|| ProfileError::ExpertId { layer, list, id: shown(id), n_expert })?;
        let bad = || ProfileError::Count { layer, list, id, count: shown(count) };
        let count = count.as_u64().filter(|&count| count <= MAX_COUNT).ok_or_else(bad)?;
        Ok((id, count))
    };
    let mut counts = pairs.iter().map(read).collect::<Result<Vec<Count>, _>>()?;
    counts.sort_unstable();
    match counts.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(ProfileError::DuplicateExpert { layer, list, id: pair[0].0 }),
        None => Ok(counts),
    }
}

/// The root's `n_expert`; `None` where it is zero, which means unknown.
fn of_model(n_expert: Number) -> Result<Option<u32>, ProfileError> {
    let known = whole(&n_expert, MAX_EXPERTS.into());
    let known = known.ok_or_else(|| ProfileError::ExpertsOfModel { value: shown(&n_expert) })?;
    Ok((known > 0).then_some(known))
}

/// Experts per token, if the value is a number that this can be.
fn n_used(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| (1..=MAX_EXPERTS).contains(n))
}

/// Our own section by layer number.
fn by_layer(section: Vec<Object<OwnLayer>>) -> Result<BTreeMap<u32, Learnt>, ProfileError> {
    const SECTION: &str = "moe_hot.layers";
    let mut known = BTreeMap::new();
    for (index, Object(entry)) in section.into_iter().enumerate() {
        let layer = layer_number(SECTION, index, &entry.layer)?;
        let bad = || ProfileError::ExpertsOfLayer { layer, value: shown(&entry.n_expert) };
        let n_expert = whole(&entry.n_expert, MAX_EXPERTS.into()).filter(|&n| n > 0).ok_or_else(bad)?;
        if known.insert(layer, entry.read(layer, n_expert)?).is_some() {
            return Err(ProfileError::DuplicateLayer { section: SECTION, layer });
        }
    }
    Ok(known)
}

fn layer_number(section: &'static str, index: usize, number: &Number) -> Result<u32, ProfileError> {
    whole(number, MAX_LAYER.into()).ok_or_else(|| ProfileError::LayerNumber { section, index, value: shown(number) })
}

/// A whole number from 0 to `max`.
fn whole(number: &Number, max: u64) -> Option<u32> {
    number.as_u64().filter(|&n| n <= max).and_then(|n| u32::try_from(n).ok())
}

fn parse(text: &[u8], schemas: &[&str]) -> Result<File, ProfileError> {
    if text.trim_ascii().is_empty() {
        return Err(ProfileError::Empty);
    }
    let text = str::from_utf8(text).map_err(|error| ProfileError::NotText { offset: error.valid_up_to() })?;
    if let Some(offset) = text.bytes().position(|byte| byte == 0) {
        return Err(ProfileError::Nul { offset });
    }
    if text.starts_with(BYTE_ORDER_MARK) {
        return Err(ProfileError::ByteOrderMark);
    }
    json::check(text).map_err(|error| not_json(&error))?;
    serde_json::from_str(text).map(|Object(file)| file).map_err(|error| wrong_field(text, schemas, &error))
}

fn not_json(error: &serde_json::Error) -> ProfileError {
    if error.is_eof() {
        ProfileError::Truncated { line: error.line(), column: error.column() }
    } else if json::is_too_deep(error) {
        ProfileError::TooDeep
    } else {
        ProfileError::NotJson(short(&error.to_string()))
    }
}

/// Why `text`, which is JSON, is not the JSON we want.
fn wrong_field(text: &str, schemas: &[&str], error: &serde_json::Error) -> ProfileError {
    match serde_json::from_str(text) {
        Ok(Object(SchemaOnly { schema })) if !schemas.contains(&schema.as_str()) => {
            ProfileError::Schema(short(&schema))
        }
        _ => ProfileError::Field(short(&error.to_string())),
    }
}

fn shown(number: &Number) -> String {
    short(&number.to_string())
}

fn zero() -> Number {
    Number::from(0)
}
