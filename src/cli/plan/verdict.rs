//! Which way to use the memory, with the numbers that say so.

use super::estimate::{Estimate, NoCache, Room};
use super::speed::{Machine, Token};
use crate::cli::calibrate::{Calibration, LAYER_OVERHEAD_US};
use crate::cli::model::Model;
use crate::cli::output::percent;
use crate::cli::size::show;
use serde::Serialize;

/// What is less than this faster is not told apart from noise; the regression guard's bar too.
const LEAST_GAIN: f64 = 1.03;
/// What a layer whose experts stock computes on the CPU takes beside its reading. Assumed; docs/commands.md says from what.
const STOCK_OVERHEAD_US: f64 = 10.0;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// Use the cache.
    Cache,
    /// Keep whole layers on the GPU.
    WholeLayers,
    /// A cache does not help.
    NoHelp,
    /// A figure or a profile is missing.
    Unknown,
}

/// Predicted decode speeds, in tokens per second, and what they rest on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speeds {
    /// All experts on the CPU.
    pub cpu_moe: f64,
    /// The best --n-cpu-moe.
    pub n_cpu_moe: f64,
    /// The cache, if there is one.
    pub cache: Option<f64>,
    /// The hit rate from which on a cache is faster than --n-cpu-moe; `None` if it never is.
    pub break_even_hit_rate: Option<f64>,
    /// Bandwidths and overheads that were used.
    pub gpu_gb_per_s: f64,
    /// As the CPU's kernels reach it.
    pub ram_gb_per_s: f64,
    /// Per cached layer.
    pub layer_overhead_us: f64,
    /// Per layer on the CPU in stock.
    pub stock_layer_overhead_us: f64,
}

/// What to do, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// What to do.
    pub choice: Choice,
    /// Why, with the numbers.
    pub reason: String,
    /// What the numbers are, if the machine is known.
    pub speeds: Option<Speeds>,
}

impl Verdict {
    /// Decides by what fits, and where that does not decide, by the predicted speeds.
    pub fn of(
        model: &Model,
        room: &Room,
        estimate: &Estimate,
        calibration: Option<&Calibration>,
        has_profile: bool,
    ) -> Self {
        let speeds = calibration.and_then(|calibration| speeds(room, estimate, calibration));
        let (choice, reason) = decide(model, room, estimate, speeds.as_ref(), has_profile);
        Self { choice, reason, speeds }
    }
}

fn decide(
    model: &Model,
    room: &Room,
    estimate: &Estimate,
    speeds: Option<&Speeds>,
    has_profile: bool,
) -> (Choice, String) {
    if room.for_experts().is_none() {
        let (taken, vram) = (show(room.taken()), show(room.vram));
        return (
            Choice::NoHelp,
            format!("the model without its experts, its context and the reserve take {taken}, more than {vram}"),
        );
    }
    if room.for_experts() >= Some(model.expert_bytes()) {
        return (Choice::NoHelp, "the whole model fits the GPU: run it there, without --cpu-moe".into());
    }
    let whole = &estimate.whole;
    let without_cache = |why: &str| match whole.share > 0.0 {
        true => (Choice::WholeLayers, format!("{why}; {} of the experts fit as whole layers", percent(whole.share))),
        false => (Choice::NoHelp, format!("{why}, and not one whole layer fits")),
    };
    let cache = match &estimate.cache {
        Ok(cache) => cache,
        Err(why @ NoCache::Plan(_)) => return without_cache(&format!("too few slots: {why}")),
        Err(why) => return without_cache(&why.to_string()),
    };
    let Some(speeds) = speeds else {
        return (Choice::Unknown, "the speeds cannot be predicted without the machine's bandwidths".into());
    };
    let ours = speeds.cache.unwrap_or(0.0);
    let stock = speeds.n_cpu_moe.max(speeds.cpu_moe);
    let ratio = ours / stock;
    let against =
        if speeds.n_cpu_moe > speeds.cpu_moe { format!("--n-cpu-moe {}", whole.n_cpu_moe) } else { "--cpu-moe".into() };
    let break_even = match speeds.break_even_hit_rate {
        Some(rate) => format!("it breaks even at {}", percent(rate)),
        None => "no hit rate makes up for its overhead per layer".into(),
    };
    let hits = percent(cache.hit_rate);
    if ratio >= LEAST_GAIN {
        let reason =
            format!("{ratio:.2} times as fast as {against} in the same memory, with {hits} hits; {break_even}");
        return (Choice::Cache, reason);
    }
    if !has_profile && speeds.break_even_hit_rate.is_some_and(|rate| rate < 1.0) {
        let reason =
            format!("{break_even}; {hits} are what chance gives, and a profile says what your work gives: record one");
        return (Choice::Unknown, reason);
    }
    let reason = format!(
        "the cache is {ratio:.2} times as fast as {against} in the same memory, with {hits} hits; {break_even}"
    );
    if speeds.n_cpu_moe >= LEAST_GAIN * speeds.cpu_moe {
        (Choice::WholeLayers, reason)
    } else {
        (Choice::NoHelp, reason)
    }
}

/// Predicted speeds, if the GPU's bandwidth is known.
fn speeds(room: &Room, estimate: &Estimate, calibration: &Calibration) -> Option<Speeds> {
    const GIGA: f64 = 1e9;
    const MICRO: f64 = 1e-6;
    let gpu_gb_per_s = calibration.gpu_gb_per_s?.value;
    let ram_gb_per_s = calibration.ram_gb_per_s.value * estimate.ram_share;
    let layer_overhead_us = calibration.layer_overhead_us.map_or(LAYER_OVERHEAD_US, |figure| figure.value);
    let machine = Machine {
        gpu: gpu_gb_per_s * GIGA,
        ram: ram_gb_per_s * GIGA,
        overhead: layer_overhead_us * MICRO,
        stock_overhead: STOCK_OVERHEAD_US * MICRO,
    };
    let token = Token {
        other: room.other.0 as f64,
        experts: estimate.expert_bytes_per_token,
        layers: estimate.n_layers as f64,
    };
    let whole = machine.whole_layers(&token, estimate.whole.share, estimate.whole.on_cpu as f64);
    Some(Speeds {
        cpu_moe: 1.0 / machine.whole_layers(&token, 0.0, token.layers),
        n_cpu_moe: 1.0 / whole,
        cache: estimate.cache.as_ref().ok().map(|cache| 1.0 / machine.cached(&token, cache.hit_bytes)),
        break_even_hit_rate: machine.break_even(&token, whole),
        gpu_gb_per_s,
        ram_gb_per_s,
        layer_overhead_us,
        stock_layer_overhead_us: STOCK_OVERHEAD_US,
    })
}
