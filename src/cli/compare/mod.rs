//! `moe-hot compare`: one model in the same GPU memory, with stock llama.cpp and with moe-hot, measured in turns.
//!
//! This file owns the options and the order of work; what is measured, chosen, refused and written is below.

mod arm;
mod bars;
mod children;
mod client;
mod commands;
mod fairness;
mod limits;
mod measure;
mod outcome;
mod page;
mod programs;
mod progress;
mod prompts;
mod said;
mod settings;
mod stats;
mod steps;
mod store;
mod summary;
mod table;
mod tune;

use super::calibrate::this_machine;
use super::failure::{Failure, OrFail, named_by_user};
use super::launch::{self, own_folder};
use super::model::Model;
use super::output::{print, table as columns, tell};
use super::size;
use crate::options::host::{self, OFFLOAD_MIN_BATCH, UNIFIED_MEMORY};
use crate::options::{TEST_FREE_COPIES, TEST_NO_GUARD, TEST_SLOTS, TEST_TIMINGS, TEST_WAIT};
use crate::units::Bytes;
use anyhow::{Context, Result, anyhow, ensure};
use arm::{ARMS, Arm};
use clap::Args;
use commands::Commands;
use measure::{Measuring, base_file};
use programs::Programs;
use progress::Progress;
use prompts::Prompts;
use settings::Settings;
use sha2::{Digest, Sha256};
use std::env;
use std::fs;
use std::path::PathBuf;
use std::time::SystemTime;
use steps::{Step, steps};
use store::{Machine, Store};
use summary::{BASELINE, Summary};
use tune::{check_vram, tuned};

/// Longest prompts, contexts and answers that can be asked for, tokens.
const MAX_TOKENS: i64 = 1 << 24;
const MAX_PAIRS: i64 = 1000;
const MAX_THREADS: i64 = 1024;
/// Bytes of a hash that tell one build of ours from another.
const BUILD_BYTES: usize = 8;
/// What a device is called in a list of runs where there is none.
const NO_DEVICE: &str = "(no GPU was found)";

/// Measure moe-hot against stock llama.cpp in the same GPU memory: --cpu-moe, the best --n-cpu-moe N, --fit
#[derive(Args, Debug)]
#[command(
    after_help = "Stock is tuned first (threads, ubatch, the fastest N that fits); moe-hot's cache then gets the bytes of its whole layers.\n\
    All arms run in turns. A comparison that is interrupted goes on when the same command is given again.\n\
    -o DIR gets results.json, table.md and report.html, which opens in any browser, offline.\n\n\
    Examples:\n  moe-hot compare -m model.gguf --vram 12GiB -o comparison --dry-run\n  \
    moe-hot compare -m model.gguf --vram 8G --pp 512 --depth 0 --pairs 3 -o comparison --dry-run"
)]
pub struct CompareArgs {
    /// The model (GGUF); of a split model the first part
    #[arg(short, long, value_name = "MODEL")]
    model: PathBuf,
    /// GPU memory for everything: 12GiB, 12G, 12288MiB, or bytes; what is free less 1 GiB unless told
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = size::parse)]
    vram: Option<Bytes>,
    /// Lengths of llama-bench's prompts
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "512,4096,8192", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=MAX_TOKENS))]
    pp: Vec<u32>,
    /// Tokens that llama-bench decodes
    #[arg(long, value_name = "N", default_value = "128", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(2..=MAX_TOKENS))]
    tg: u32,
    /// Tokens that are in the context before each of llama-bench's tests
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "0,16384", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(0..=MAX_TOKENS))]
    depth: Vec<u32>,
    /// How often every arm runs
    #[arg(long, value_name = "N", default_value = "5", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=MAX_PAIRS))]
    pairs: u32,
    /// Prompts of your own: a line == NAME == for each kind, --- between prompts (three kinds are built in)
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Tokens of each answer of the server
    #[arg(long, value_name = "N", default_value = "128", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(2..=MAX_TOKENS))]
    answer: u32,
    /// Tokens of the server's context
    #[arg(short = 'c', long = "ctx-size", value_name = "N", default_value = "8192", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(64..=MAX_TOKENS))]
    context: u32,
    /// Only these arms; n-cpu-moe must be one of them
    #[arg(long, value_name = "ARM,…", value_delimiter = ',')]
    arms: Vec<Arm>,
    /// The device, as --list-devices names it; the first GPU unless told
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// RPC servers (host:port, …) that llama.cpp should use
    #[arg(long, value_name = "SERVERS")]
    rpc: Option<String>,
    /// Folder of llama-bench, llama-server and llama-perplexity; they are looked for as moe-hot does for any program unless told
    #[arg(long, value_name = "DIR")]
    programs: Option<PathBuf>,
    /// Threads of all arms, instead of what is fastest for stock
    #[arg(short, long, value_name = "N", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u16).range(1..=MAX_THREADS))]
    threads: Option<u16>,
    /// Ubatch of all arms, instead of what is fastest for stock
    #[arg(long = "ubatch-size", value_name = "N", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=MAX_TOKENS))]
    ubatch: Option<u32>,
    /// Type of the KV cache of all arms
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    cache_type: String,
    /// Flash attention of all arms
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = ["on", "off", "auto"])]
    flash_attn: String,
    /// Folder of the results: a new one, or that of the same comparison, which then goes on
    #[arg(short = 'o', long = "output", value_name = "DIR")]
    output: PathBuf,
    /// List the runs and do nothing
    #[arg(long)]
    dry_run: bool,
}

/// Compares, or lists what would be done.
pub fn compare(args: &CompareArgs) -> Result<(), Failure> {
    let (model, _) = Model::read(&args.model).context("--model").map_err(named_by_user)?;
    let prompts = Prompts::read(args.prompts.as_deref()).map_err(named_by_user)?;
    let programs = Programs::find(args.programs.as_deref())?;
    let (settings, machine) = settings(args, &prompts, &programs)?;
    if settings.device != NO_DEVICE {
        check_vram(&settings, &machine, &model.layers).or_input()?;
    }
    if args.dry_run {
        return list(&settings, &programs);
    }
    if settings.device == NO_DEVICE {
        return Err(Failure::Input(anyhow!(
            "--device: llama.cpp has no GPU here; expected one, or --rpc SERVERS with --device RPC0"
        )));
    }
    children::watch_interrupts().or_internal()?;
    let mut store = Store::open(&args.output, settings, machine)?;
    match work(&mut store, &prompts, &model, &programs) {
        Err(_) if children::was_interrupted() => {
            Err(Failure::Internal(anyhow!("interrupted; the same command goes on from here")))
        }
        done => done,
    }
}

/// What is asked, with everything that has a default.
fn settings(args: &CompareArgs, prompts: &Prompts, programs: &Programs) -> Result<(Settings, Machine), Failure> {
    let devices = programs.devices(args.rpc.as_deref())?;
    let wanted = args.device.as_deref();
    let device = devices.iter().find(|device| wanted.is_none_or(|name| device.name == name) && device.total_mib > 0);
    if let (Some(name), None) = (wanted, device) {
        let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
        let known = if names.is_empty() { "no GPU (is --rpc missing?)".into() } else { names.join(", ") };
        return Err(Failure::Input(anyhow!(
            "--device {name}: no device with memory of its own; llama.cpp has {known}"
        )));
    }
    let arms = arms(args, programs).or_input()?;
    let model = fs::canonicalize(&args.model).context("--model").map_err(named_by_user)?;
    let model_bytes = fs::metadata(&model).context("--model").map_err(named_by_user)?.len();
    let machine = Machine {
        cpu: this_machine(),
        device: device.map_or_else(String::new, |device| device.description.clone()),
        device_total_mib: device.map_or(0, |device| device.total_mib),
        device_free_mib: device.map_or(0, |device| device.free_mib),
        began: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
    };
    let settings = Settings {
        model,
        model_bytes,
        vram: args.vram.map(|vram| vram.0),
        pp: distinct(&args.pp),
        tg: args.tg,
        depth: distinct(&args.depth),
        pairs: args.pairs,
        prompts: prompts.source.clone(),
        prompts_sha256: prompts.sha256.clone(),
        answer: args.answer,
        context: args.context,
        arms,
        device: device.map_or(NO_DEVICE, |device| device.name.as_str()).to_owned(),
        rpc: args.rpc.clone(),
        bench: programs.bench_path.clone(),
        server: programs.server_path.clone(),
        perplexity: programs.perplexity_path.clone(),
        revision: programs.revision.clone(),
        threads: args.threads,
        ubatch: args.ubatch,
        cache_type: args.cache_type.clone(),
        flash_attn: args.flash_attn.clone(),
        moe_hot: env!("CARGO_PKG_VERSION").into(),
        moe_hot_build: build().or_internal()?,
        environment: environment(),
    };
    Ok((settings, machine))
}

/// Start of the SHA-256 of our own executable and the plugin.
fn build() -> Result<String> {
    let mut hash = Sha256::new();
    let plugin = launch::plugin(&own_folder()?)?;
    for file in [env::current_exe().context("finding our own executable")?, plugin] {
        hash.update(fs::read(&file).with_context(|| file.display().to_string())?);
    }
    Ok(hash.finalize().iter().take(BUILD_BYTES).map(|byte| format!("{byte:02x}")).collect())
}

/// What in our environment changes what all programs do.
fn environment() -> Vec<String> {
    let tests = [&TEST_NO_GUARD, &TEST_SLOTS, &TEST_FREE_COPIES, &TEST_WAIT, &TEST_TIMINGS].map(|test| test.variable);
    let names = tests.into_iter().chain([OFFLOAD_MIN_BATCH, UNIFIED_MEMORY]);
    names.filter_map(|name| Some(format!("{name}={}", host::variable(name)?.to_string_lossy()))).collect()
}

/// In their order, each once.
fn distinct(values: &[u32]) -> Vec<u32> {
    let mut kept = values.to_vec();
    kept.sort_unstable();
    kept.dedup();
    kept
}

/// Those that were asked for and that the programs have.
fn arms(args: &CompareArgs, programs: &Programs) -> Result<Vec<Arm>> {
    let is_asked = |arm: &Arm| args.arms.is_empty() || args.arms.contains(arm);
    let asked: Vec<Arm> = ARMS.into_iter().filter(is_asked).collect();
    ensure!(
        asked.contains(&BASELINE),
        "--arms: expected {} among them, which all others are compared with",
        BASELINE.name()
    );
    let has = |arm: &Arm| *arm != Arm::MoeCacheMib || programs.server_knows_moe_cache;
    ensure!(
        args.arms.is_empty() || asked.iter().all(has),
        "--arms {}: this llama-server has no --moe-cache-mib; expected one of b11480 or later, or other arms",
        Arm::MoeCacheMib.name()
    );
    Ok(asked.into_iter().filter(has).collect())
}

/// What would be done, without doing any of it.
fn list(settings: &Settings, programs: &Programs) -> Result<(), Failure> {
    let steps = steps(settings, programs.says_times);
    let row = |(number, step): (usize, &Step)| {
        let (pair, arm) = step.place();
        let pair = pair.map(|pair| (pair + 1).to_string()).unwrap_or_default();
        vec![pair, arm.map(|arm| arm.label().to_owned()).unwrap_or_default(), step.what(), (number + 1).to_string()]
    };
    let rows = steps.iter().enumerate().map(row);
    let text = columns(&["pair", "arm", "what", "run"], rows, 3);
    print(&format!("{text}\n{} runs on {}; nothing was started\n", steps.len(), settings.device))
}

/// Does what is not yet done, and writes what came of it.
fn work(store: &mut Store, prompts: &Prompts, model: &Model, programs: &Programs) -> Result<(), Failure> {
    let settings = store.results.settings.clone();
    let machine = store.results.machine.clone();
    let (plan, work) = (steps(&settings, programs.says_times), store.path("work"));
    let work = fs::canonicalize(&work).with_context(|| work.display().to_string()).or_internal()?;
    let profile = work.join("profile.json");
    let launcher = env::current_exe().context("finding our own executable").or_internal()?;
    // What these leave in files must be there too.
    let waits_for_logits = plan.iter().any(|step| matches!(step, Step::Logits(_)) && store.step(&step.key()).is_none());
    let is_done = |store: &Store, step: Step| {
        let has_file = match step {
            Step::Record => profile.exists(),
            Step::LogitsBase => !waits_for_logits || base_file(&work).exists(),
            _ => true,
        };
        store.step(&step.key()).filter(|_| has_file).map(|outcome| outcome.seconds)
    };
    let seconds: Vec<_> = plan.iter().map(|&step| is_done(store, step)).collect();
    let n_done = seconds.iter().flatten().count();
    if n_done > 0 {
        tell(&format!("{n_done} of {} runs are done already", plan.len()));
    }
    let mut progress = Progress::new(plan.clone(), seconds.clone());
    for (number, &step) in plan.iter().enumerate().filter(|(number, _)| seconds[*number].is_none()) {
        progress.begin(number);
        let outcome = {
            let measuring = Measuring {
                settings: &settings,
                machine: &machine,
                done: &store.results.steps,
                prompts,
                model,
                commands: Commands {
                    settings: &settings,
                    launcher: launcher.clone(),
                    work: work.clone(),
                    profile: profile.clone(),
                    has_cache_ram: programs.server_has_cache_ram,
                },
                bench: &programs.bench,
                bench_knows_moe_cache: programs.bench_knows_moe_cache,
                log: &|key| store.log(key),
            };
            measuring.run(step)?
        };
        progress.finish(number, outcome.seconds);
        store.finish(step.key(), outcome).or_internal()?;
    }
    drop(progress);
    let _ = fs::remove_file(base_file(&work));
    write(store, prompts)
}

/// The summary in all its forms.
fn write(store: &mut Store, prompts: &Prompts) -> Result<(), Failure> {
    let results = &store.results;
    let tuned = tuned(&results.settings, &results.machine, &results.steps);
    let summary = Summary::of(&results.settings, prompts, tuned, &results.steps);
    store.results.summary = Some(summary.clone());
    store.results.complete = true;
    let text = table::markdown(&store.results, &summary);
    let page = page::page(&store.results, &summary).context("drawing the report").or_internal()?;
    store.write("table.md", &text).or_internal()?;
    store.write("report.html", &page).or_internal()?;
    store.save().or_internal()?;
    let files = ["results.json", "table.md", "report.html"].map(|name| store.path(name).display().to_string());
    print(&format!("{text}\n{}\n", files.join(", ")))
}
