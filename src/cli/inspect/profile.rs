//! How a profile's requests are spread over the experts of each layer.

use crate::cli::formats::{self, Recording};
use crate::cli::output::{percent, table};
use crate::profile::{RecordedLayer, RecordedProfile};
use anyhow::{Context, Result};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Shares of a layer's experts for which the coverage is told.
const SHARES: [f64; 4] = [0.125, 0.25, 0.5, 0.75];

/// What is printed.
#[derive(Debug, Serialize)]
pub struct ProfileView {
    file: PathBuf,
    format: String,
    model: Option<String>,
    requests: u64,
    /// Mean over layers.
    all_layers: Skew,
    layers: Vec<LayerView>,
}

#[derive(Debug, Serialize)]
struct LayerView {
    layer: u32,
    n_expert: u32,
    n_expert_used: Option<u32>,
    requests: u64,
    experts_never_used: u32,
    #[serde(flatten)]
    skew: Skew,
}

/// How unevenly experts are used.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Skew {
    /// Gini coefficient: 0 if all experts are used alike, towards 1 if one has all requests.
    pub gini: f64,
    /// Share of requests that the most used experts have, by share of the experts.
    pub coverage: Vec<Coverage>,
}

/// Part of a coverage curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Coverage {
    /// Share of the experts, the most used ones.
    pub experts: f64,
    /// Share of all requests that they have.
    pub requests: f64,
}

/// How unevenly a layer's `n_expert` experts are used.
pub fn skew(layer: &RecordedLayer, n_expert: u32) -> Skew {
    let mut counts: Vec<f64> = layer.requests.iter().map(|&(_, count)| count as f64).collect();
    counts.sort_by(|a, b| b.total_cmp(a));
    let total: f64 = counts.iter().sum();
    let n = f64::from(n_expert);
    let cover = |experts: f64| {
        let requests: f64 = counts.iter().take((n * experts).round() as usize).sum();
        Coverage { experts, requests: if total > 0.0 { requests / total } else { 0.0 } }
    };
    // 1 - twice the area below the Lorenz curve; unused experts are zeros at its beginning.
    let area: f64 = (1u32..).zip(&counts).map(|(place, count)| count * (2.0 * f64::from(place) - 1.0)).sum();
    let gini = if total > 0.0 { (1.0 - area / (n * total)).max(0.0) } else { 0.0 };
    Skew { gini, coverage: SHARES.into_iter().map(cover).collect() }
}

/// The mean of several layers.
fn mean(skews: &[Skew]) -> Skew {
    let n = skews.len().max(1) as f64;
    let cover = |(place, experts): (usize, f64)| {
        let sum: f64 = skews.iter().filter_map(|skew| skew.coverage.get(place)).map(|part| part.requests).sum();
        Coverage { experts, requests: sum / n }
    };
    Skew {
        gini: skews.iter().map(|skew| skew.gini).sum::<f64>() / n,
        coverage: SHARES.into_iter().enumerate().map(cover).collect(),
    }
}

/// Reads the profile or trace at `path`.
pub fn view(path: &Path) -> Result<ProfileView> {
    let (recording, format) = formats::read(path)?;
    let profile = match recording {
        Recording::Profile(profile) => profile,
        Recording::Trace(trace) => formats::profile_of_trace(&trace).with_context(|| path.display().to_string())?,
    };
    let layers: Vec<_> =
        profile.layers.iter().map(|(&number, layer)| LayerView::new(number, layer, &profile)).collect();
    let counted: Vec<_> = layers.iter().filter(|layer| layer.requests > 0).map(|layer| layer.skew.clone()).collect();
    Ok(ProfileView {
        file: path.into(),
        format: format.name(),
        requests: layers.iter().map(|layer| layer.requests).sum(),
        all_layers: mean(&counted),
        model: profile.model.map(|model| model.fingerprint),
        layers,
    })
}

impl LayerView {
    fn new(number: u32, layer: &RecordedLayer, profile: &RecordedProfile) -> Self {
        let n_expert = formats::n_expert(profile, layer);
        Self {
            layer: number,
            n_expert,
            n_expert_used: formats::n_used(profile, layer),
            requests: layer.requests.iter().map(|&(_, count)| count).sum(),
            experts_never_used: n_expert.saturating_sub(layer.requests.len() as u32),
            skew: skew(layer, n_expert),
        }
    }

    fn cells(&self) -> Vec<String> {
        let first = [
            self.layer.to_string(),
            self.n_expert.to_string(),
            self.n_expert_used.map_or("?".to_owned(), |n| n.to_string()),
            self.requests.to_string(),
            self.experts_never_used.to_string(),
        ];
        first.into_iter().chain(self.skew.cells()).collect()
    }
}

impl Skew {
    fn cells(&self) -> impl Iterator<Item = String> {
        [format!("{:.2}", self.gini)].into_iter().chain(self.coverage.iter().map(|part| percent(part.requests)))
    }
}

impl ProfileView {
    pub fn text(&self) -> String {
        let model = self.model.as_ref().map_or("it does not say of which model".to_owned(), |id| format!("model {id}"));
        let mut text = format!(
            "{}: {}, {model}, {} layers, {} requests\n\n",
            self.file.display(),
            self.format,
            self.layers.len(),
            self.requests
        );
        let shares: Vec<_> = SHARES.iter().map(|share| format!("best {}", percent(*share))).collect();
        let header = ["layer", "experts", "per token", "requests", "never used", "Gini"];
        let header: Vec<_> = header.into_iter().chain(shares.iter().map(String::as_str)).collect();
        let all = ["all"].into_iter().chain([""; 4]).map(str::to_owned).chain(self.all_layers.cells()).collect();
        text += &table(&header, self.layers.iter().map(LayerView::cells).chain([all]), 0);
        text + "\nGini: 0 if all experts are used alike, towards 1 if few have all requests. best N %: the share of requests that\n\
                so many of the experts have, if they were always on the GPU.\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(counts: &[u64]) -> RecordedLayer {
        let requests = (0..).zip(counts.iter().copied()).filter(|&(_, count)| count > 0).collect();
        RecordedLayer { n_expert: None, n_used: None, calls: 0, requests, ranks: Vec::new(), resident: Vec::new() }
    }

    #[test]
    fn equal_use_has_no_skew_and_one_expert_has_all_of_it() {
        let even = skew(&layer(&[5; 8]), 8);
        assert!(
            even.gini.abs() < 1e-12 && even.coverage.iter().all(|part| (part.experts - part.requests).abs() < 1e-12)
        );
        let one = skew(&layer(&[0, 0, 9, 0, 0, 0, 0, 0]), 8);
        assert!((one.gini - 0.875).abs() < 1e-12 && one.coverage.iter().all(|part| part.requests == 1.0));
        assert_eq!(skew(&layer(&[]), 8).gini, 0.0);
    }

    #[test]
    fn the_mean_is_over_layers() {
        let both = mean(&[skew(&layer(&[5; 8]), 8), skew(&layer(&[0, 9]), 8)]);
        assert!((both.gini - 0.4375).abs() < 1e-12 && (both.coverage[0].requests - 0.5625).abs() < 1e-12);
    }
}
