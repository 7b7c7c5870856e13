//! `moe-hot merge`: one profile of several.
//!
//! A count says how long a session was, so counts are not added: what is added are each profile's shares of a layer's requests.

use super::failure::{Failure, OrFail, named_by_user};
use super::formats::{self, Format, n_expert, n_used, profile_of};
use super::import::Written;
use super::output::OutputArgs;
use crate::profile::{MAX_COUNT, RecordedProfile};
use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The largest weight.
const MAX_WEIGHT: f64 = 1e6;

/// Make one profile of several of the same model, each with a weight
#[derive(Args, Debug)]
#[command(
    after_help = "In every layer each profile's counts are first divided by their sum, so that a long session weighs no more\n\
    than a short one; only the weights decide.\n\n\
    Examples:\n  moe-hot merge chat.json code.json -o experts.json\n  \
    moe-hot merge chat.json code.json --weights 2,1 -o experts.json"
)]
pub struct MergeArgs {
    /// Profiles or traces, in any format
    #[arg(required = true, num_args = 2.., value_name = "PROFILE")]
    inputs: Vec<PathBuf>,
    /// One weight per profile, in their order; all the same unless told
    #[arg(long, value_name = "W,…", value_delimiter = ',', allow_hyphen_values = true, value_parser = weight)]
    weights: Vec<f64>,
    #[command(flatten)]
    output: OutputArgs,
    /// Say what was done as JSON
    #[arg(long)]
    json: bool,
}

/// A weight that is none.
#[derive(Debug, thiserror::Error)]
#[error("expected a number above 0, at most {MAX_WEIGHT}; leave out a profile that is to weigh nothing")]
struct InvalidWeight;

fn weight(text: &str) -> Result<f64, InvalidWeight> {
    text.parse().ok().filter(|weight| *weight > 0.0 && *weight <= MAX_WEIGHT).ok_or(InvalidWeight)
}

/// Reads all profiles and writes one.
pub fn merge(args: &MergeArgs) -> Result<(), Failure> {
    let paths: Vec<&Path> = args.inputs.iter().map(PathBuf::as_path).collect();
    args.output.check(&paths)?;
    let weights = if args.weights.is_empty() { vec![1.0; paths.len()] } else { args.weights.clone() };
    if weights.len() != paths.len() {
        let (given, wanted) = (weights.len(), paths.len());
        return Err(Failure::Input(anyhow!("--weights: {given} weights for {wanted} profiles; expected one for each")));
    }
    let mut profiles = Vec::new();
    let mut from = Vec::new();
    for path in &paths {
        let profile = formats::read_profile(path).map_err(named_by_user)?;
        if let Some((first, _)) = profiles.first().zip(paths.first()) {
            check_same_model(first, &profile, paths[0]).with_context(|| path.display().to_string()).or_input()?;
        }
        profiles.push(profile);
        from.push(path.display().to_string());
    }
    let inputs: Vec<_> = profiles.iter().zip(weights).collect();
    let merged = merged(&inputs).or_input()?;
    args.output.write(&formats::perf_json(&merged).or_internal()?)?;
    Written::new(&merged, from, Format::PerfJson, &args.output).print(args.json)
}

/// Refuses profiles that cannot be of one model.
fn check_same_model(first: &RecordedProfile, next: &RecordedProfile, name: &Path) -> Result<()> {
    let name = name.display();
    if let (Some(a), Some(b)) = (&first.model, &next.model) {
        ensure!(a.is_same_model(b), "is of another model than {name}; expected profiles of one model");
    }
    for (number, layer) in &next.layers {
        let Some(other) = first.layers.get(number) else { continue };
        let (theirs, ours) = (n_expert(next, layer), n_expert(first, other));
        let is_said = (layer.n_expert.or(next.n_expert)).is_some() && (other.n_expert.or(first.n_expert)).is_some();
        ensure!(
            !is_said || theirs == ours,
            "has {theirs} experts in layer {number}, and {name} {ours}; expected profiles of one model"
        );
    }
    Ok(())
}

/// The weighted mean of all shares, layer by layer, as counts: a layer counts as much as in all profiles together.
///
/// An expert that any profile counts is counted at least once. A layer that a profile lacks is that of the others.
fn merged(inputs: &[(&RecordedProfile, f64)]) -> Result<RecordedProfile> {
    let layers: BTreeSet<u32> = inputs.iter().flat_map(|(profile, _)| profile.layers.keys().copied()).collect();
    let mut counts = BTreeMap::new();
    for layer in layers {
        let mut shares = BTreeMap::<u32, f64>::new();
        let (mut all_requests, mut all_weights) = (0.0, 0.0);
        for (profile, weight) in inputs {
            let Some(recorded) = profile.layers.get(&layer) else { continue };
            let requests: f64 = recorded.requests.iter().map(|&(_, count)| count as f64).sum();
            if requests == 0.0 {
                continue;
            }
            all_requests += requests;
            all_weights += weight;
            for &(expert, count) in &recorded.requests {
                *shares.entry(expert).or_default() += weight * (count as f64 / requests);
            }
        }
        let scale = all_requests.min(MAX_COUNT as f64) / all_weights;
        let count = |(expert, share): (u32, f64)| (expert, ((share * scale).round() as u64).clamp(1, MAX_COUNT));
        counts.insert(layer, shares.into_iter().map(count).collect());
    }
    let mut merged = profile_of(counts, None, None)?;
    for (number, layer) in &mut merged.layers {
        let of_layer = || inputs.iter().filter_map(|(profile, _)| Some((*profile, profile.layers.get(number)?)));
        layer.n_expert = of_layer().map(|(profile, recorded)| n_expert(profile, recorded)).max();
        layer.n_used = of_layer().filter_map(|(profile, recorded)| n_used(profile, recorded)).max();
    }
    merged.n_expert = merged.layers.values().filter_map(|layer| layer.n_expert).max();
    merged.n_used = merged.layers.values().filter_map(|layer| layer.n_used).max();
    merged.model = inputs.iter().find_map(|(profile, _)| profile.model.clone());
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(counts: &[(u32, u32, u64)]) -> RecordedProfile {
        let mut layers = BTreeMap::<u32, BTreeMap<u32, u64>>::new();
        for &(layer, expert, count) in counts {
            layers.entry(layer).or_default().insert(expert, count);
        }
        profile_of(layers, Some(8), Some(2)).unwrap()
    }

    #[test]
    fn a_long_session_weighs_no_more_than_a_short_one() {
        let (long, short) = (profile(&[(0, 1, 3_000), (0, 2, 1_000)]), profile(&[(0, 2, 4)]));
        let both = merged(&[(&long, 1.0), (&short, 1.0)]).unwrap();
        let requests = &both.layers[&0].requests;
        assert_eq!(requests[..], [(1, 1_502), (2, 2_503)], "3/8 and 5/8 of 4,004");
    }

    #[test]
    fn weights_decide_and_only_their_ratio() {
        let (a, b) = (profile(&[(0, 1, 30)]), profile(&[(0, 2, 30)]));
        for weights in [(2.0, 1.0), (2e-3, 1e-3), (1e6, 5e5)] {
            let both = merged(&[(&a, weights.0), (&b, weights.1)]).unwrap();
            assert_eq!(both.layers[&0].requests[..], [(1, 40), (2, 20)]);
        }
    }

    #[test]
    fn rare_experts_and_layers_of_one_profile_stay() {
        let (a, b) = (profile(&[(0, 1, 1_000_000), (0, 7, 1)]), profile(&[(0, 1, 1), (3, 4, 5)]));
        let both = merged(&[(&a, 1.0), (&b, 1e6)]).unwrap();
        assert_eq!(both.layers[&0].requests.last(), Some(&(7, 1)));
        assert_eq!(both.layers[&3].requests[..], [(4, 5)]);
        assert_eq!((both.n_expert, both.n_used), (Some(8), Some(2)));
    }

    #[test]
    fn weights_are_positive_numbers() {
        for bad in ["-1", "0", "nan", "inf", "x", "", "1e7"] {
            assert!(weight(bad).is_err(), "{bad}");
        }
        assert_eq!(weight("0.5").unwrap(), 0.5);
    }
}
