//! Prompts of one model, with the experts on the CPU and copied to the GPU: what decides which batches llama.cpp offloads.
//!
//! llama-bench computes both, by llama.cpp's own setting, as stock would: nothing is assumed of the bus or the kernels.

use super::machine::{Prompts, model_key};
use super::threshold::{Prompt, min_batch};
use crate::cli::failure::{Failure, OrFail};
use crate::cli::launch::own_folder;
use crate::cli::output::tell;
use crate::cli::program;
use crate::gguf::ModelFile;
use crate::options::host::{OFFLOAD_MIN_BATCH, OFFLOAD_MIN_BATCH_DEFAULT};
use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};

const BENCH: &str = "llama-bench";
/// Prompts, in tokens; the largest is llama.cpp's default for a batch.
const SIZES: &str = "32,64,128,256,512";
const UBATCH: &str = "512";
/// Of each prompt, each time that the model is loaded.
const REPETITIONS: &str = "5";
/// No batch is as large.
const NEVER: u32 = 1_000_000;
/// The model is loaded once for each; both ways in turns, so that what slows the machine down meanwhile meets both.
const RUNS: [Way; 4] = [Way::Copied, Way::Cpu, Way::Cpu, Way::Copied];
const MS: f64 = 1e-6; // of nanoseconds

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Cpu,
    Copied,
}

/// Measures with `program`, else with the llama-bench that the launcher would find.
pub fn measure(model: &Path, program: Option<&Path>, threads: Option<u16>, date: &str) -> Result<Prompts, Failure> {
    let file = ModelFile::open(model).or_input()?;
    let Some(key) = model_key(&file) else {
        return Err(Failure::Input(anyhow!("{}: has no experts; expected a model with experts", model.display())));
    };
    let name = program.map_or(OsStr::new(BENCH), Path::as_os_str);
    let path = program::find(name, &own_folder().or_internal()?).context("--program").or_input()?;
    let mut samples: BTreeMap<(u32, Way), Vec<f64>> = BTreeMap::new();
    let mut n_threads = 0;
    for (at, way) in RUNS.into_iter().enumerate() {
        let what = if way == Way::Cpu { "on the CPU" } else { "copied to the GPU" };
        tell(&format!("prompts with the experts {what}, {} of {} …", at + 1, RUNS.len()));
        n_threads = run(command(&path, model, threads, way), way, &mut samples).or_internal()?;
    }
    // The fastest: whatever else the machine does makes prompts slower, and never faster.
    let fastest = |n_tokens, way| samples.get(&(n_tokens, way))?.iter().copied().min_by(f64::total_cmp);
    let prompt = |&(n_tokens, way): &(u32, Way)| {
        let copied_ms = fastest(n_tokens, Way::Copied).filter(|_| way == Way::Cpu)?;
        Some(Prompt { n_tokens, cpu_ms: fastest(n_tokens, Way::Cpu)?, copied_ms })
    };
    let prompts: Vec<_> = samples.keys().filter_map(prompt).collect();
    Ok(Prompts {
        model: key,
        date: date.into(),
        n_threads,
        are_threads_given: threads.is_some(),
        min_batch: min_batch(&prompts),
        prompts,
    })
}

fn command(path: &Path, model: &Path, threads: Option<u16>, way: Way) -> Command {
    let mut command = Command::new(path);
    command.arg("-m").arg(model).args(["-ngl", "999", "-ncmoe", "999", "--repack", "0"]);
    command.args(["-p", SIZES, "-n", "0", "-ub", UBATCH, "-b", UBATCH, "-r", REPETITIONS, "-o", "json"]);
    if let Some(threads) = threads {
        command.args(["-t", &threads.to_string()]);
    }
    let threshold = if way == Way::Cpu { NEVER } else { OFFLOAD_MIN_BATCH_DEFAULT };
    command.env(OFFLOAD_MIN_BATCH, threshold.to_string()).stdin(Stdio::null());
    command
}

/// Adds the times of one run, in ms; returns the threads that computed.
fn run(mut command: Command, way: Way, samples: &mut BTreeMap<(u32, Way), Vec<f64>>) -> Result<u32> {
    let name = command.get_program().display().to_string();
    let done = command.output().with_context(|| format!("{name}: cannot be started"))?;
    let log = String::from_utf8_lossy(&done.stderr);
    let last = log.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("(nothing)");
    ensure!(done.status.success(), "{name} failed; its last line: {last}");
    let rows: Vec<Value> = serde_json::from_slice(&done.stdout).with_context(|| format!("{name}: what it printed"))?;
    let mut n_threads = None;
    for row in &rows {
        let number = |name: &str| u32::try_from(row.get(name)?.as_u64()?).ok();
        let times = row.get("samples_ns").and_then(Value::as_array);
        let (Some(n_tokens), Some(times)) = (number("n_prompt"), times) else { continue };
        n_threads = number("n_threads");
        let times = times.iter().filter_map(Value::as_f64).filter(|&ns| ns > 0.0).map(|ns| ns * MS);
        samples.entry((n_tokens, way)).or_default().extend(times);
    }
    n_threads.with_context(|| format!("{name} printed no tests that could be read; expected llama-bench"))
}
