//! `moe-hot calibrate`: what `moe-hot plan` must know of this machine.

mod machine;
mod prompts;
mod read;
mod threshold;

pub use machine::{Calibration, Figure, LAYER_OVERHEAD_US, Prompts, Source, model_key, this_machine};

use threshold::Prompt;

use super::failure::{Failure, OrFail, named_by_user};
use super::output::{print, print_json, tell};
use super::size;
use crate::units::Bytes;
use anyhow::Context;
use clap::Args;
use std::num::NonZero;
use std::path::PathBuf;
use std::thread::available_parallelism;
use std::time::SystemTime;

/// Most threads that can be asked for.
const MAX_THREADS: i64 = 1024;
/// The largest bandwidth that is believed, in GB/s.
const MAX_GB_PER_S: f64 = 1e6;
/// The largest overhead that is believed, in microseconds.
const MAX_US: f64 = 1e6;

/// Measure this machine's memory and store the figures for `moe-hot plan`
#[derive(Args, Debug)]
#[command(
    after_help = "Measured: RAM, by threads that read a buffer larger than all caches, as a CPU reads a model's weights. It takes a\n\
    few seconds; nothing else should run meanwhile.\n\
    Not measured, but taken from you: the GPU's memory and the bus (a GPU is only seen from inside a llama.cpp\n\
    program). Look them up: RTX 3060 360, RTX 4090 1008; PCIe 3 x16 about 12, PCIe 4 x16 about 25. What was given\n\
    is kept until it is given anew.\n\
    With --model: prompts of that model too, by llama-bench, with its experts on the CPU and copied to the GPU. From then on\n\
    moe-hot tells llama.cpp which batches are worth a copy. It takes minutes with a large model.\n\n\
    Examples:\n  moe-hot calibrate --threads 8 --gpu-bandwidth 360 --bus-bandwidth 12\n  moe-hot calibrate --model model.gguf\n  moe-hot calibrate --json"
)]
pub struct CalibrateArgs {
    /// Threads that read: as many as llama.cpp will compute with (-t); all CPUs unless told
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_THREADS))]
    threads: Option<u16>,
    /// Bandwidth of the GPU's memory in GB/s (10^9 bytes)
    #[arg(long, value_name = "GB/s", allow_negative_numbers = true, value_parser = bandwidth)]
    gpu_bandwidth: Option<f64>,
    /// Bandwidth of the bus to the GPU in GB/s
    #[arg(long, value_name = "GB/s", allow_negative_numbers = true, value_parser = bandwidth)]
    bus_bandwidth: Option<f64>,
    /// Time that a cached layer takes beside its reading, in µs (launch, wait, copies of rows)
    #[arg(long, value_name = "µs", allow_negative_numbers = true, value_parser = overhead)]
    layer_overhead: Option<f64>,
    /// Measure the prompts of this model too
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// llama-bench; it is looked for as moe-hot does for any program unless told
    #[arg(long, value_name = "FILE", requires = "model")]
    program: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A figure that is none.
#[derive(Debug, thiserror::Error)]
#[error("expected a number of {unit}, {least} to {MAX_GB_PER_S}")]
struct InvalidFigure {
    unit: &'static str,
    least: &'static str,
}

fn bandwidth(text: &str) -> Result<f64, InvalidFigure> {
    let is_known = |value: &f64| (0.001..=MAX_GB_PER_S).contains(value);
    text.parse().ok().filter(is_known).ok_or(InvalidFigure { unit: "GB/s", least: "0.001" })
}

fn overhead(text: &str) -> Result<f64, InvalidFigure> {
    let is_known = |value: &f64| (0.0..=MAX_US).contains(value);
    text.parse().ok().filter(is_known).ok_or(InvalidFigure { unit: "microseconds", least: "0" })
}

/// Measures, stores and prints.
pub fn calibrate(args: &CalibrateArgs) -> Result<(), Failure> {
    let path = Calibration::path().or_internal()?;
    let before = Calibration::load(&path).ok().flatten().filter(|before| before.machine == this_machine());
    let threads = match args.threads {
        Some(threads) => threads.into(),
        None => available_parallelism().map_or(1, NonZero::get),
    };
    let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let measured = match &args.model {
        Some(model) => Some(prompts::measure(model, args.program.as_deref(), args.threads, &date)?),
        None => None,
    };
    let mut prompts = before.as_ref().map(|before| before.prompts.clone()).unwrap_or_default();
    if let Some(measured) = measured {
        prompts.retain(|known| known.model != measured.model);
        prompts.push(measured);
    }
    tell(&format!("reading memory with {threads} threads …"));
    let reading = read::measure(threads).or_internal()?;
    let given = |value: Option<f64>, before: Option<Figure>| {
        value.map(|value| Figure { value, source: Source::Given }).or(before)
    };
    let kept = |figure: fn(&Calibration) -> Option<Figure>| before.as_ref().and_then(figure);
    let calibration = Calibration {
        format: Calibration::FORMAT,
        date,
        machine: this_machine(),
        threads,
        buffer_bytes: reading.bytes,
        passes: reading.passes,
        ram_least_gb_per_s: reading.least,
        ram_most_gb_per_s: reading.most,
        ram_gb_per_s: Figure { value: reading.median, source: Source::Measured },
        gpu_gb_per_s: given(args.gpu_bandwidth, kept(|before| before.gpu_gb_per_s)),
        bus_gb_per_s: given(args.bus_bandwidth, kept(|before| before.bus_gb_per_s)),
        layer_overhead_us: given(args.layer_overhead, kept(|before| before.layer_overhead_us)),
        prompts,
    };
    calibration.store(&path).with_context(|| path.display().to_string()).map_err(named_by_user)?;
    if args.json {
        return print_json(&calibration);
    }
    print(&format!("{}\nstored in {}\n", text(&calibration), path.display()))
}

fn text(calibration: &Calibration) -> String {
    let Calibration { date, machine, threads, passes, ram_gb_per_s: ram, .. } = calibration;
    let (least, most) = (calibration.ram_least_gb_per_s, calibration.ram_most_gb_per_s);
    let buffer = size::show(Bytes(calibration.buffer_bytes));
    let given = |figure: Option<Figure>, flag: &str, unit: &str| match figure {
        Some(figure) => format!("{:.1} {unit}  not measured: given", figure.value),
        None => format!("unknown; give it with {flag}"),
    };
    let overhead = match calibration.layer_overhead_us {
        Some(figure) => format!("{:.1} µs  not measured: given", figure.value),
        None => format!("{LAYER_OVERHEAD_US:.1} µs  not measured: assumed; give it with --layer-overhead"),
    };
    let prompts: String = calibration.prompts.iter().map(prompts_text).collect();
    format!(
        "machine             {machine}, {date}\n\
         RAM                 {:.1} GB/s  measured: {threads} threads read {buffer}, median of {passes} passes ({least:.1} to {most:.1})\n\
         GPU memory          {}\n\
         bus                 {}\n\
         overhead per layer  {overhead}{prompts}",
        ram.value,
        given(calibration.gpu_gb_per_s, "--gpu-bandwidth", "GB/s"),
        given(calibration.bus_gb_per_s, "--bus-bandwidth", "GB/s"),
    )
}

fn prompts_text(prompts: &Prompts) -> String {
    let Prompts { model, date, n_threads, min_batch, .. } = prompts;
    let row = |prompt: &Prompt| {
        format!(
            "\n {:18} {:.1} ms with experts on the CPU, {:.1} ms with experts copied",
            format!("{} tokens", prompt.n_tokens),
            prompt.cpu_ms,
            prompt.copied_ms
        )
    };
    let rows: String = prompts.prompts.iter().map(row).collect();
    format!(
        "\nprompts             copied from {min_batch} tokens on  measured {date} with {n_threads} threads: {model}{rows}"
    )
}
