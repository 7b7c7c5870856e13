//! The numbers of a report.

use crate::cache::CopyCost;
use crate::cli::formats::{n_expert, n_used};
use crate::cli::inspect::{Skew, skew};
use crate::cli::replay::names::{PolicyName, Warm};
use crate::cli::replay::play::{Case, play};
use crate::profile::{RecordedLayer, RecordedProfile};
use crate::trace::Trace;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Shares of a layer's experts at which hit rates are told.
const SHARES: [f64; 9] = [0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0];
/// Steps of a coverage curve.
const STEPS: u32 = 32;
/// Most used experts that are named.
const NAMED: usize = 5;
/// Copies in practice: so many tokens late, so many per layer and token.
pub const LAG: u32 = 4;
/// See [`LAG`].
pub const INSERTS: u32 = 1;

/// What a report shows.
#[derive(Debug, Serialize)]
pub struct Figures {
    pub profile: PathBuf,
    pub trace: Option<PathBuf>,
    pub model: Option<String>,
    pub requests: u64,
    pub n_expert: u32,
    pub layers: Vec<LayerFigures>,
    pub coverage: Vec<CoveragePoint>,
    pub hit_rates: Vec<HitRates>,
    /// Whether the budgets of `hit_rates` are known in bytes.
    pub has_bytes: bool,
}

/// One layer.
#[derive(Debug, Serialize)]
pub struct LayerFigures {
    pub layer: u32,
    pub n_expert: u32,
    pub requests: u64,
    #[serde(flatten)]
    pub skew: Skew,
    /// The most used experts, best first.
    pub most_used: Vec<u32>,
}

/// Requests that the most used experts have.
#[derive(Debug, Serialize)]
pub struct CoveragePoint {
    /// Share of the experts.
    pub experts: f64,
    /// Share of requests: of the layer with least, the mean, of that with most.
    pub least: f64,
    pub mean: f64,
    pub most: f64,
}

/// One way to fill slots.
#[derive(Debug, Serialize)]
pub struct HitRates {
    pub name: &'static str,
    pub points: Vec<HitRate>,
}

/// What so many slots bring.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct HitRate {
    pub slots: u16,
    /// Of all layers, if the size of experts is known.
    pub bytes: Option<u64>,
    pub hit_rate: f64,
}

impl Figures {
    pub fn new(path: &Path, profile: &RecordedProfile, trace: Option<(&Path, &Trace)>) -> Self {
        let layers: Vec<_> =
            profile.layers.iter().map(|(&number, layer)| LayerFigures::new(number, layer, profile)).collect();
        let n_expert = layers.iter().map(|layer| layer.n_expert).max().unwrap_or(0);
        let hit_rates = match trace {
            Some((_, trace)) => replayed(trace, profile),
            None => vec![expected(profile, n_expert)],
        };
        Self {
            profile: path.into(),
            trace: trace.map(|(path, _)| path.into()),
            model: profile.model.as_ref().map(|model| model.fingerprint.clone()),
            requests: layers.iter().map(|layer| layer.requests).sum(),
            n_expert,
            layers,
            coverage: coverage(profile),
            has_bytes: hit_rates.iter().flat_map(|rates| &rates.points).all(|point| point.bytes.is_some()),
            hit_rates,
        }
    }
}

impl LayerFigures {
    fn new(number: u32, layer: &RecordedLayer, profile: &RecordedProfile) -> Self {
        let n_expert = n_expert(profile, layer);
        let mut order = layer.requests.clone();
        order.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        Self {
            layer: number,
            n_expert,
            requests: layer.requests.iter().map(|&(_, count)| count).sum(),
            skew: skew(layer, n_expert),
            most_used: order.into_iter().take(NAMED).map(|(expert, _)| expert).collect(),
        }
    }
}

/// The curve over all layers that count anything.
fn coverage(profile: &RecordedProfile) -> Vec<CoveragePoint> {
    let counted: Vec<_> = profile.layers.values().filter(|layer| !layer.requests.is_empty()).collect();
    let point = |step: u32| {
        let experts = f64::from(step) / f64::from(STEPS);
        let covered = counted.iter().map(|layer| covered(layer, experts * f64::from(n_expert(profile, layer))));
        CoveragePoint {
            experts,
            least: covered.clone().fold(1.0, f64::min),
            mean: covered.clone().sum::<f64>() / counted.len().max(1) as f64,
            most: covered.fold(0.0, f64::max),
        }
    };
    (0..=STEPS).map(point).collect()
}

/// Share of a layer's requests that its most used experts have, a fraction of one expert counted as such.
fn covered(layer: &RecordedLayer, n: f64) -> f64 {
    let mut counts: Vec<f64> = layer.requests.iter().map(|&(_, count)| count as f64).collect();
    counts.sort_by(|a, b| b.total_cmp(a));
    let part = |(place, count): (usize, &f64)| count * (n - place as f64).clamp(0.0, 1.0);
    let total: f64 = counts.iter().sum();
    if total > 0.0 { counts.iter().enumerate().map(part).sum::<f64>() / total } else { 0.0 }
}

fn slots_of(n_expert: u32) -> Vec<u16> {
    let mut slots: Vec<u16> = SHARES.iter().map(|share| (f64::from(n_expert) * share).round() as u16).collect();
    slots.retain(|&slots| slots > 0);
    slots.dedup();
    slots
}

/// What the profile expects of its most used experts.
fn expected(profile: &RecordedProfile, most: u32) -> HitRates {
    let point = |slots: u16| {
        let (mut hits, mut all) = (0.0, 0.0);
        for layer in profile.layers.values() {
            let n_used = f64::from(n_used(profile, layer).unwrap_or(1));
            hits += n_used * covered(layer, f64::from(slots));
            all += n_used;
        }
        HitRate { slots, bytes: None, hit_rate: if all > 0.0 { hits / all } else { 0.0 } }
    };
    HitRates { name: "the profile's most used experts", points: slots_of(most).into_iter().map(point).collect() }
}

/// What policies make of a trace. All begin with the profile's most used experts.
fn replayed(trace: &Trace, profile: &RecordedProfile) -> Vec<HitRates> {
    let n_expert = trace.layers.iter().map(|layer| u32::from(layer.info.n_expert)).max().unwrap_or(0);
    let ways = [
        ("Belady (knows the future)", PolicyName::Belady),
        ("moe-hot", PolicyName::Default),
        ("LRU", PolicyName::Lru),
        ("a fixed set", PolicyName::Fixed),
    ];
    let rates = |(name, policy)| {
        let point = |slots: u16| {
            let cost = CopyCost { price: 0.0, lag: LAG };
            let case = Case {
                policy,
                slots,
                inserts: Some(INSERTS),
                warm: Warm::Profile,
                cost,
                look_ahead: false,
                profile: Some(profile),
            };
            let tally = play(trace, &case, None).tally;
            let bytes = trace.layers.iter().map(|layer| {
                let slots = slots.min(layer.info.n_expert);
                layer.info.expert_bytes?.checked_mul(slots.into())
            });
            let hit_rate = tally.hits as f64 / tally.requests.max(1) as f64;
            HitRate { slots, bytes: bytes.sum::<Option<u64>>(), hit_rate }
        };
        HitRates { name, points: slots_of(n_expert).into_iter().map(point).collect() }
    };
    ways.into_iter().map(rates).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::formats::profile_of;
    use std::collections::BTreeMap;

    #[test]
    fn curves_begin_at_nothing_and_end_at_all() {
        let counts = BTreeMap::from([(0, BTreeMap::from([(1, 6), (2, 2)])), (3, BTreeMap::from([(0, 1), (7, 1)]))]);
        let profile = profile_of(counts, Some(8), Some(2)).unwrap();
        let figures = Figures::new(Path::new("p"), &profile, None);
        let (first, last) = (&figures.coverage[0], &figures.coverage[STEPS as usize]);
        assert_eq!((first.mean, last.least), (0.0, 1.0));
        let eighth = &figures.coverage[STEPS as usize / 8];
        assert_eq!((eighth.least, eighth.mean, eighth.most), (0.5, 0.625, 0.75));
        let rates = &figures.hit_rates[0].points;
        assert!((rates[0].slots, rates[0].hit_rate) == (1, 0.625) && rates.last().unwrap().hit_rate == 1.0);
        assert_eq!(figures.layers[0].most_used, [1, 2]);
    }
}
