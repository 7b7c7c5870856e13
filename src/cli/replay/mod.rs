//! `moe-hot replay`: plays recorded routing through cache policies and prints hit rates.

pub mod names;
pub mod play;
mod report;

use super::failure::{Failure, OrFail, named_by_user};
use super::output::tell;
use crate::cache::policy::CopyCost;
use crate::profile::RecordedProfile;
use crate::trace::Trace;
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use names::{PolicyName, Warm};
use play::{Case, play};
use report::Row;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Most slots per layer that can be asked for.
const MAX_SLOTS: i64 = 4096;
/// Most calls that a copy can be late.
const MAX_LAG: i64 = 1024;

/// Play recorded routing through cache policies and print hit rates. No model is run.
#[derive(Args, Debug)]
#[command(
    override_usage = "moe-hot replay [OPTIONS] TRACE…",
    after_help = "Examples:\n  \
    moe-hot replay routing.trace --slots 8,16\n  \
    moe-hot replay routing.trace --policy lru,default,fixed --profile experts.json --warm profile --json -"
)]
pub struct ReplayArgs {
    /// Traces that --moe-trace-out has written, or route CSV
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Slots per layer
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "8,16,32",
        value_parser = clap::value_parser!(u16).range(1..=MAX_SLOTS))]
    slots: Vec<u16>,
    /// Policies to compare; fixed is the profile's list, unchanging
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', default_value = "all")]
    policy: Vec<PolicyName>,
    /// Tokens by which a copy is late; 0: it serves the next token
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "0",
        value_parser = clap::value_parser!(u32).range(0..=MAX_LAG))]
    lag: Vec<u32>,
    /// Copies that may start per layer and token; 0: any number
    #[arg(long, value_name = "N", default_value = "0")]
    inserts: u32,
    /// What is known before the first decoded token: nothing, the trace's prompt, or the profile
    #[arg(long, value_name = "WHAT", default_value = "none")]
    warm: Warm,
    /// The profile (experts.json) for --warm profile and --policy fixed
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// What a copy costs, in hits: the time it takes from a token, divided by what a hit saves; for the default policy
    #[arg(long, value_name = "HITS", default_value = "0", allow_negative_numbers = true, value_parser = price)]
    copy_price: f32,
    /// Copy at most one expert per layer and token before the layer is reached; for the default policy
    #[arg(long)]
    look_ahead: bool,
    /// Bytes of one expert, where the trace does not say
    #[arg(long, value_name = "BYTES")]
    expert_bytes: Option<u64>,
    /// Write the results to FILE as JSON; -: to the standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A price that is no number of hits.
#[derive(Debug, thiserror::Error)]
#[error("expected a number of hits, 0 or more")]
struct InvalidPrice;

fn price(text: &str) -> Result<f32, InvalidPrice> {
    text.parse::<f32>().ok().filter(|price| price.is_finite() && *price >= 0.0).ok_or(InvalidPrice)
}

/// Replays everything that was asked for and prints it.
pub fn replay(args: &ReplayArgs) -> Result<(), Failure> {
    let rows = rows(args).map_err(named_by_user)?;
    match &args.json {
        None => report::table(&rows),
        Some(path) if path == Path::new("-") => report::json(&rows, std::io::stdout().lock()),
        Some(path) => {
            let file = File::create(path).with_context(|| format!("{}: cannot be written", path.display()));
            report::json_file(&rows, file.map_err(named_by_user)?, path)
        }
    }
    .or_internal()
}

fn rows(args: &ReplayArgs) -> Result<Vec<Row>> {
    let profile = args.profile.as_deref().map(RecordedProfile::read).transpose().context("--profile")?;
    let policies = policies(&args.policy, profile.is_some());
    if profile.is_none() {
        ensure!(args.warm != Warm::Profile, "--warm profile: expected --profile FILE too");
        ensure!(!policies.contains(&PolicyName::Fixed), "--policy fixed: expected --profile FILE too");
    }
    let mut rows = Vec::new();
    for path in &args.traces {
        let trace = Trace::read(path)?;
        if trace.is_cut {
            tell(&format!("{}: ends in the middle of a record; replaying what is before it", path.display()));
        }
        if let Some(profile) = &profile {
            check_profile(&trace, profile).with_context(|| format!("{}: --profile", path.display()))?;
        }
        for &policy in &policies {
            for &lag in &args.lag {
                for &slots in &args.slots {
                    let case = Case {
                        policy,
                        slots,
                        inserts: (args.inserts > 0).then_some(args.inserts),
                        warm: args.warm,
                        cost: CopyCost { price: args.copy_price, lag },
                        look_ahead: args.look_ahead && policy == PolicyName::Default,
                        profile: profile.as_ref(),
                    };
                    let outcome = play(&trace, &case, args.expert_bytes);
                    rows.push(Row::new(path, &case, &outcome));
                }
            }
        }
    }
    Ok(rows)
}

/// Each policy once, in the order asked for.
fn policies(asked: &[PolicyName], has_profile: bool) -> Vec<PolicyName> {
    let all = PolicyName::value_variants().iter().copied().filter(|&policy| policy != PolicyName::All);
    let all = all.filter(|&policy| has_profile || policy != PolicyName::Fixed);
    let mut policies = Vec::new();
    for &policy in asked {
        let of_name: Vec<_> = if policy == PolicyName::All { all.clone().collect() } else { vec![policy] };
        policies.extend(of_name);
    }
    let mut seen = Vec::new();
    policies.retain(|policy| {
        let is_new = !seen.contains(policy);
        seen.push(*policy);
        is_new
    });
    policies
}

/// A profile that counts experts which the trace's model does not have is another model's.
pub fn check_profile(trace: &Trace, profile: &RecordedProfile) -> Result<()> {
    for layer in &trace.layers {
        let Some(recorded) = profile.layers.get(&layer.info.layer.into()) else { continue };
        let n_expert = u32::from(layer.info.n_expert);
        if let Some(&(id, _)) = recorded.requests.iter().find(|&&(id, _)| id >= n_expert) {
            bail!("layer {}: counts expert {id}; expected numbers below {n_expert}, as in the trace", layer.info.layer);
        }
    }
    Ok(())
}
