//! How a plan is printed.

use super::estimate::{Estimate, Room};
use super::verdict::{Choice, Speeds, Verdict};
use crate::cli::calibrate::Calibration;
use crate::cli::model::Model;
use crate::cli::output::{percent, table};
use crate::cli::size::show;
use crate::units::Bytes;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// A profile of fewer tokens promises too much: what a short text used is not what the work uses. Chosen: with 8 of 128 experts per
/// token it is about 125 requests for each.
const FEW_TOKENS: u64 = 2000;

/// What is printed. Sizes in bytes, speeds in tokens per second.
#[derive(Debug, Serialize)]
pub struct View {
    model: PathBuf,
    profile: Option<PathBuf>,
    name: String,
    layers: usize,
    eligible_layers: usize,
    expert_bytes: u64,
    expert_bytes_per_token: f64,
    memory: Memory,
    cache: Option<CacheView>,
    no_cache: Option<String>,
    n_cpu_moe: WholeView,
    /// Tokens that the profile counts.
    counted_tokens: Option<u64>,
    /// Share of RAM's bandwidth that a CPU reaches with these experts' types.
    ram_share: f64,
    calibration: Option<Calibration>,
    verdict: Verdict,
    note: Option<String>,
}

#[derive(Debug, Serialize)]
struct Memory {
    vram: u64,
    other_weights: u64,
    context_tokens: u32,
    kv_cache: u64,
    reserve: u64,
    for_experts: Option<u64>,
}

#[derive(Debug, Serialize)]
struct CacheView {
    slots_per_layer: u16,
    n_expert: u16,
    bytes: u64,
    hit_rate: f64,
    /// Whether a profile says so; else all experts count as used alike.
    hit_rate_from_profile: bool,
    /// The first fill's time on the bus, s.
    fill_seconds: Option<f64>,
}

#[derive(Debug, Serialize)]
struct WholeView {
    n: u32,
    bytes: u64,
    share_of_experts: f64,
}

/// What is known of this machine.
pub struct Known {
    pub calibration: Option<Calibration>,
    /// What is missing, and what to do.
    pub note: Option<String>,
}

impl View {
    pub fn new(
        path: &Path,
        profile: Option<&Path>,
        model: &Model,
        room: Room,
        estimate: &Estimate,
        known: Known,
        verdict: Verdict,
    ) -> Self {
        let Known { calibration, note } = known;
        let bus = calibration.as_ref().and_then(|calibration| calibration.bus_gb_per_s);
        let cache = estimate.cache.as_ref().ok().map(|cache| CacheView {
            slots_per_layer: cache.slots_per_layer,
            n_expert: cache.n_expert,
            bytes: cache.bytes.0,
            hit_rate: cache.hit_rate,
            hit_rate_from_profile: profile.is_some(),
            fill_seconds: bus.map(|bus| cache.bytes.0 as f64 / 1e9 / bus.value),
        });
        Self {
            model: path.into(),
            profile: profile.map(Path::to_path_buf),
            name: model.name.clone(),
            layers: estimate.n_layers,
            eligible_layers: estimate.n_eligible,
            expert_bytes: model.expert_bytes().0,
            expert_bytes_per_token: estimate.expert_bytes_per_token,
            memory: Memory {
                vram: room.vram.0,
                other_weights: room.other.0,
                context_tokens: room.context,
                kv_cache: room.kv.0,
                reserve: room.reserve.0,
                for_experts: room.for_experts().map(|bytes| bytes.0),
            },
            cache,
            no_cache: estimate.cache.as_ref().err().map(ToString::to_string),
            n_cpu_moe: WholeView {
                n: estimate.whole.n_cpu_moe,
                bytes: estimate.whole.bytes.0,
                share_of_experts: estimate.whole.share,
            },
            counted_tokens: estimate.counted_tokens,
            ram_share: estimate.ram_share,
            calibration,
            verdict,
            note,
        }
    }

    pub fn text(&self) -> String {
        let size = |bytes: u64| show(Bytes(bytes));
        let memory = &self.memory;
        let for_experts = memory
            .for_experts
            .map_or("nothing left for experts".to_owned(), |bytes| format!("{} for experts", size(bytes)));
        let per_token = size(self.expert_bytes_per_token as u64);
        let mut text = format!(
            "{}: {}, {} layers with experts, {} of them can be cached; all experts {}, {per_token} per token\n\
             GPU memory {}: {} other weights, {} context of {} tokens (f16), {} reserve, {for_experts}\n\n",
            self.model.display(),
            self.name,
            self.layers,
            self.eligible_layers,
            size(self.expert_bytes),
            size(memory.vram),
            size(memory.other_weights),
            size(memory.kv_cache),
            memory.context_tokens,
            size(memory.reserve),
        );
        text += &table(&["experts on the GPU", "memory", "share or hits", "decode, predicted"], self.rows(), 1);
        text.push('\n');
        text += &self.basis();
        if let Some(note) = &self.note {
            text += &format!("{note}\n");
        }
        text + &format!("verdict: {}: {}\n{}", self.choice(), self.verdict.reason, self.command())
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let speeds = self.verdict.speeds.as_ref();
        let speed = |of: fn(&Speeds) -> Option<f64>| {
            speeds.and_then(of).map_or("unknown".to_owned(), |speed| format!("{speed:.1} t/s"))
        };
        let size = |bytes: u64| show(Bytes(bytes));
        let whole = &self.n_cpu_moe;
        let mut rows = vec![
            vec!["none: --cpu-moe".into(), size(0), percent(0.0), speed(|speeds| Some(speeds.cpu_moe))],
            vec![
                format!("whole layers: --n-cpu-moe {}", whole.n),
                size(whole.bytes),
                percent(whole.share_of_experts),
                speed(|speeds| Some(speeds.n_cpu_moe)),
            ],
        ];
        rows.push(match &self.cache {
            Some(cache) => vec![
                format!("cache: {} of {} experts per layer", cache.slots_per_layer, cache.n_expert),
                size(cache.bytes),
                percent(cache.hit_rate),
                speed(|speeds| speeds.cache),
            ],
            None => vec!["no cache".into(), String::new(), String::new(), String::new()],
        });
        rows
    }

    /// What the numbers rest on.
    fn basis(&self) -> String {
        let mut text = String::new();
        if let Some(cache) = &self.cache {
            text += if cache.hit_rate_from_profile {
                "hits: what the profile expects of these slots; a cache that learns follows the text, which mostly gives more\n"
            } else {
                "hits: no profile, so as if all experts were used alike; record one and give it with --profile\n"
            };
        }
        if let Some(tokens) = self.counted_tokens.filter(|&tokens| tokens < FEW_TOKENS) {
            text += &format!(
                "the profile counts {tokens} tokens: with fewer than {FEW_TOKENS} it promises more hits than other text will have\n"
            );
        }
        if let (Some(speeds), Some(calibration)) = (&self.verdict.speeds, &self.calibration) {
            let Speeds { gpu_gb_per_s, ram_gb_per_s, layer_overhead_us, stock_layer_overhead_us, .. } = speeds;
            let iq = if self.ram_share < 1.0 {
                format!(" ({} of what was measured: IQ types take the CPU longer)", percent(self.ram_share))
            } else {
                String::new()
            };
            let assumed = if calibration.layer_overhead_us.is_some() { "given" } else { "assumed" };
            text += &format!(
                "speed: RAM {ram_gb_per_s:.1} GB/s measured {} with {} threads{iq}; GPU {gpu_gb_per_s:.0} GB/s given; \
                 per layer {layer_overhead_us:.0} µs {assumed}, stock {stock_layer_overhead_us:.0} µs assumed\n",
                calibration.date, calibration.threads,
            );
        }
        if let Some(seconds) = self.cache.as_ref().and_then(|cache| cache.fill_seconds) {
            let ms = 1e3 * seconds;
            let time = if seconds < 1.0 { format!("{ms:.1} ms") } else { format!("{seconds:.1} s") };
            text += &format!("the first fill takes at least {time} on the bus, beside the tokens\n");
        }
        text
    }

    fn choice(&self) -> &'static str {
        match self.verdict.choice {
            Choice::Cache => "use the cache",
            Choice::WholeLayers => "whole layers",
            Choice::NoHelp => "it will not help",
            Choice::Unknown => "not known yet",
        }
    }

    /// What to type then.
    fn command(&self) -> String {
        let start = format!("llama-server -m {} -ngl 99 -c {}", self.model.display(), self.memory.context_tokens);
        let max_mib = self.cache.as_ref().map_or(0, |cache| Bytes(cache.bytes).mib_up());
        match (self.verdict.choice, &self.profile) {
            (Choice::Cache, Some(profile)) => {
                let profile = profile.display();
                format!("    moe-hot {start} --moe-hot-cache {profile} --moe-hot-cache-max-mib {max_mib}\n")
            }
            (Choice::Cache | Choice::Unknown, None) => {
                format!("    moe-hot {start} --moe-layer-perf-out experts.json\n")
            }
            (Choice::WholeLayers, _) => format!("    {start} --n-cpu-moe {}\n", self.n_cpu_moe.n),
            _ => String::new(),
        }
    }
}
