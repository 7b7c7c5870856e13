//! Does one step: starts the programs, reads what they print, asks the server, and returns what was measured.
//!
//! Knows nothing of the order of steps or of what is already done.

use super::arm::{Arm, Tuned};
use super::children::{Running, free_port, run};
use super::client::Client;
use super::commands::{Commands, LOGITS_CHUNKS, LOGITS_CONTEXT, Tests, typed};
use super::fairness::{Compared, check_device, check_revision};
use super::limits::{Tokens, finished, limit};
use super::outcome::{LayerTimes, Logits, Memory, Outcome, Test, Turn};
use super::prompts::{Conversation, Prompts};
use super::said::{Buffers, CacheSaid, device};
use super::settings::Settings;
use super::steps::{Step, steps};
use super::store::Machine;
use super::summary::mark;
use super::tune::{
    TRIED_TOKENS, check_one_fits, for_workload, physical_cores, threads_to_try, tuned, ubatches_to_try, vram_mib,
    whole_layers_to_try, without_experts,
};
use crate::cli::failure::{Failure, OrFail};
use crate::cli::model::Model;
use crate::cli::program::Program;
use crate::units::Bytes;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::available_parallelism;
use std::time::{Duration, Instant, SystemTime};

/// Repetitions of a test of llama-bench: the first fills a cache and counts for nothing.
const REPETITIONS: u32 = 2;
const TUNING_REPETITIONS: u32 = 3;
/// Asked before anything is measured, so that the cache is there.
const WARM_UP: &str = "Hello";
const WARM_UP_TOKENS: u32 = 16;
/// Answers of the recording are so many times as long: a profile of few tokens promises too much.
const RECORDING_TIMES: u32 = 4;

/// What all steps need.
pub struct Measuring<'a> {
    /// What was asked.
    pub settings: &'a Settings,
    /// The machine at the beginning.
    pub machine: &'a Machine,
    /// Steps that are finished.
    pub done: &'a BTreeMap<String, Outcome>,
    /// The prompts.
    pub prompts: &'a Prompts,
    /// The model's layers.
    pub model: &'a Model,
    /// Command lines.
    pub commands: Commands<'a>,
    /// llama-bench, which is asked for the device's memory too.
    pub bench: &'a Program,
    /// Whether llama-bench has `--moe-cache-mib`.
    pub bench_knows_moe_cache: bool,
    /// Where a program's log goes, by the step's key.
    pub log: &'a dyn Fn(&str) -> PathBuf,
}

impl Measuring<'_> {
    /// Does a step. What it finds unfair is a failure.
    pub fn run(&self, step: Step) -> Result<Outcome, Failure> {
        let began = Instant::now();
        let started = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let tuned = self.with_equal_memory(step, tuned(self.settings, self.machine, self.done));
        let outcome = match step {
            Step::WholeLayers => self.whole_layers(&tuned)?,
            _ => self.step(step, &tuned).with_context(|| step.key()).or_internal()?,
        };
        let outcome = Outcome { started, seconds: began.elapsed().as_secs_f64(), ..outcome };
        if let Some(revision) = &outcome.revision {
            check_revision(&step.key(), &self.settings.revision, revision).or_input()?;
        }
        let earlier = self.done.values().find_map(|outcome| outcome.device.as_deref());
        check_device(&step.key(), earlier, outcome.device.as_deref()).or_input()?;
        self.check_memory(step, &outcome).or_internal()?;
        Ok(outcome)
    }

    /// With the cache's size for the step's workload.
    fn with_equal_memory(&self, step: Step, tuned: Tuned) -> Tuned {
        let (without, baseline) = match step {
            Step::Bench(_, arm) if arm.has_equal_memory() => (Step::Memory, Step::Bench(0, Arm::NCpuMoe)),
            Step::Server(_, arm) | Step::Waits(arm) if arm.has_equal_memory() => {
                (Step::Reference, Step::Server(0, Arm::NCpuMoe))
            }
            _ => return tuned,
        };
        let memory = |step: Step| self.done.get(&step.key())?.memory.as_ref();
        for_workload(tuned, memory(without), memory(baseline))
    }

    /// How long a program may run that computes so many tokens.
    fn limit(&self, step: Step, tokens: Tokens) -> Duration {
        limit(step, &finished(&steps(self.settings, true), self.done), tokens)
    }

    /// Of a server: every prompt as long as the context, at the most.
    fn server_limit(&self, step: Step, conversations: &[Conversation], answer: u32) -> Duration {
        let turns = conversations.iter().map(|conversation| conversation.turns.len() as u64).sum::<u64>();
        let prompt = turns.saturating_mul(self.settings.context.into());
        let decode = turns.saturating_mul(answer.into()) + u64::from(WARM_UP_TOKENS);
        self.limit(step, Tokens { prompt, decode })
    }

    fn step(&self, step: Step, tuned: &Tuned) -> Result<Outcome> {
        let decode = |threads: Vec<u16>| Tests {
            pp: Vec::new(),
            tg: TRIED_TOKENS,
            depth: vec![0],
            repetitions: TUNING_REPETITIONS,
            threads,
            ubatch: vec![tuned.ubatch],
        };
        match step {
            Step::Threads => {
                let logical = available_parallelism().map_or(1, NonZero::get);
                let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
                let tests = decode(threads_to_try(physical_cores(&info, logical), logical));
                self.bench_tests(
                    step,
                    Arm::CpuMoe,
                    self.commands.bench(Arm::CpuMoe, tuned, &tests)?,
                    Tokens::of(&tests),
                )
            }
            Step::Ubatch => {
                let tests = Tests {
                    pp: self.settings.pp.iter().copied().max().into_iter().collect(),
                    tg: 0,
                    depth: vec![0],
                    repetitions: REPETITIONS,
                    threads: vec![tuned.threads],
                    ubatch: ubatches_to_try(&self.settings.pp),
                };
                self.bench_tests(
                    step,
                    Arm::CpuMoe,
                    self.commands.bench(Arm::CpuMoe, tuned, &tests)?,
                    Tokens::of(&tests),
                )
            }
            Step::Memory => {
                let tokens = Tokens { prompt: self.settings.longest_context().into(), decode: 0 };
                self.bench_tests(step, Arm::CpuMoe, self.commands.bench_memory(tuned)?, tokens)
            }
            Step::WholeLayers => Ok(Outcome::default()),
            Step::Record => self.record(tuned),
            Step::Reference => self.server(step, Arm::CpuMoe, tuned),
            Step::Bench(_, Arm::MoeCacheMib) if !self.bench_knows_moe_cache => {
                Ok(Outcome { not_measured: Some("llama-bench has no --moe-cache-mib".into()), ..Outcome::default() })
            }
            Step::Bench(_, arm) => {
                let tests = Tests {
                    pp: self.settings.pp.clone(),
                    tg: self.settings.tg,
                    depth: self.settings.depth.clone(),
                    repetitions: REPETITIONS,
                    threads: vec![tuned.threads],
                    ubatch: vec![tuned.ubatch],
                };
                self.bench_tests(step, arm, self.commands.bench(arm, tuned, &tests)?, Tokens::of(&tests))
            }
            Step::Server(_, arm) | Step::Waits(arm) => self.server(step, arm, tuned),
            Step::LogitsBase => self.logits(step, Arm::CpuMoe, tuned, false),
            Step::Logits(arm) => self.logits(step, arm, tuned, true),
        }
    }

    /// Several N that fit, each in a run of its own.
    fn whole_layers(&self, tuned: &Tuned) -> Result<Outcome, Failure> {
        let stock = without_experts(self.done).unwrap_or_default();
        let vram = vram_mib(self.settings, self.machine);
        let tried = whole_layers_to_try(&self.model.layers, stock.said_mib(), vram).or_input()?;
        let mut all = Outcome::default();
        for n in tried {
            let tests = Tests {
                pp: Vec::new(),
                tg: TRIED_TOKENS,
                depth: vec![0],
                repetitions: TUNING_REPETITIONS,
                threads: vec![tuned.threads],
                ubatch: vec![tuned.ubatch],
            };
            let tuned = Tuned { n_cpu_moe: n, ..*tuned };
            let command = self.commands.bench(Arm::NCpuMoe, &tuned, &tests).or_internal()?;
            let one = self.bench_tests(Step::WholeLayers, Arm::NCpuMoe, command, Tokens::of(&tests));
            let one = one.with_context(|| format!("--n-cpu-moe {n}")).or_internal()?;
            all.commands.extend(one.commands);
            all.tests.extend(one.tests);
            all.revision = one.revision;
        }
        check_one_fits(&all.tests, &stock, vram).or_input()?;
        Ok(all)
    }

    fn bench_tests(&self, step: Step, arm: Arm, command: Command, tokens: Tokens) -> Result<Outcome> {
        let line = typed(&command);
        let printed = run(command, &(self.log)(&step.key()), self.limit(step, tokens))?;
        let rows: Vec<Value> = serde_json::from_str(&printed.output).context("llama-bench: what it printed")?;
        let buffers = Buffers::read(&printed.log, &self.settings.device);
        let test = |row: &Value| {
            let number = |name: &str| u32::try_from(row.get(name)?.as_u64()?).ok();
            let samples = row.get("samples_ts")?.as_array()?.iter().filter_map(Value::as_f64);
            Some(Test {
                prompt: number("n_prompt")?,
                decode: number("n_gen")?,
                depth: number("n_depth")?,
                threads: number("n_threads")?.try_into().ok()?,
                ubatch: number("n_ubatch")?,
                n_cpu_moe: number("n_cpu_moe")?,
                model_mib: buffers.model_mib,
                samples: samples.collect(),
            })
        };
        let tests: Vec<Test> = rows.iter().filter_map(test).collect();
        ensure!(!tests.is_empty() && tests.len() == rows.len(), "llama-bench printed no tests that could be read");
        let revision = rows.first().and_then(|row| {
            Some(format!("{} ({})", row.get("build_number")?.as_u64()?, row.get("build_commit")?.as_str()?))
        });
        let cache = arm.is_ours().then(|| CacheSaid::read(&printed.log));
        Ok(Outcome {
            commands: vec![line],
            revision,
            device: device(&printed.log, &self.settings.device),
            tests,
            memory: Some(memory(buffers, cache.as_ref())),
            cache,
            ..Outcome::default()
        })
    }

    fn server(&self, step: Step, arm: Arm, tuned: &Tuned) -> Result<Outcome> {
        let port = free_port()?;
        let command = self.commands.server(arm, tuned, port)?;
        let line = typed(&command);
        let free_before = self.device_free();
        let conversations = self.prompts.measured();
        let limit = self.server_limit(step, &conversations, self.settings.answer);
        let mut server = Running::start(command, &(self.log)(&step.key()), limit)?;
        let answered = self.answers(step, &conversations, port, &mut server);
        server.check_time()?;
        let (revision, turns, layers) = answered?;
        let free_during = self.device_free();
        let log = server.stop_and_read()?;
        let free_after = self.device_free();
        let cache = arm.is_ours().then(|| CacheSaid::read(&log));
        let mut memory = memory(Buffers::read(&log, &self.settings.device), cache.as_ref());
        memory.device_mib = free_before.zip(free_during).map(|(before, during)| before - during);
        memory.device_noise_mib = free_before.zip(free_after).map(|(before, after)| before - after);
        let has_no_times = matches!(step, Step::Waits(_)) && layers.is_empty();
        Ok(Outcome {
            commands: vec![line],
            revision,
            device: device(&log, &self.settings.device),
            turns,
            memory: Some(memory),
            cache,
            layers,
            not_measured: has_no_times.then(|| "llama-server says no times of layers".into()),
            ..Outcome::default()
        })
    }

    /// Of a server: its revision, all its answers, and the times of its layers where the step wants them.
    fn answers(
        &self,
        step: Step,
        conversations: &[Conversation],
        port: u16,
        server: &mut Running,
    ) -> Result<(Option<String>, Vec<Turn>, Vec<LayerTimes>)> {
        let client = Client::connect(port, server)?;
        let revision = client.revision()?;
        client.answer(&[json!({ "role": "user", "content": WARM_UP })], WARM_UP_TOKENS)?;
        let takes_times = matches!(step, Step::Waits(_)) && client.take_times();
        let reference = self.done.get(&Step::Reference.key()).map(|outcome| outcome.turns.as_slice());
        let turns = converse(&client, conversations, self.settings.answer, reference)?;
        let layers = if takes_times { client.times()? } else { Vec::new() };
        Ok((revision, turns, layers))
    }

    /// What is free on the device now, MiB; `None` where only one program can ask at a time.
    fn device_free(&self) -> Option<i64> {
        if self.settings.device.starts_with("RPC") {
            return None;
        }
        let devices = self.bench.devices(&[]).ok()??;
        let device = devices.into_iter().find(|device| device.name == self.settings.device)?;
        i64::try_from(device.free_mib).ok()
    }

    fn record(&self, tuned: &Tuned) -> Result<Outcome> {
        let port = free_port()?;
        let command = self.commands.recording(tuned, port)?;
        let line = typed(&command);
        let answer = (RECORDING_TIMES * self.settings.answer).min(self.settings.context / 2);
        let conversations = self.prompts.recorded();
        let limit = self.server_limit(Step::Record, &conversations, answer);
        let mut server = Running::start(command, &(self.log)(&Step::Record.key()), limit)?;
        let client = Client::connect(port, &mut server);
        let turns = client.and_then(|client| converse(&client, &conversations, answer, None));
        server.check_time()?;
        let turns = turns?;
        let complaint = server.complaint();
        server.stop_and_read()?;
        ensure!(self.commands.profile.exists(), "no profile was recorded: {complaint}");
        Ok(Outcome { commands: vec![line], turns, ..Outcome::default() })
    }

    fn logits(&self, step: Step, arm: Arm, tuned: &Tuned, compares: bool) -> Result<Outcome> {
        let without = self.done.get(&Step::LogitsBase.key()).and_then(|base| base.not_measured.clone());
        if let (true, Some(why)) = (compares, without) {
            return Ok(Outcome { not_measured: Some(why), ..Outcome::default() });
        }
        let work = &self.commands.work;
        let (text, base) = (work.join("text.txt"), base_file(work));
        fs::write(&text, self.text()).with_context(|| text.display().to_string())?;
        let hits = self.commands.hits();
        let _ = fs::remove_file(&hits);
        let command = self.commands.logits(arm, tuned, &text, &base, compares)?;
        let line = typed(&command);
        let prompt = u64::from(LOGITS_CONTEXT) * u64::from(LOGITS_CHUNKS);
        let printed = run(command, &(self.log)(&step.key()), self.limit(step, Tokens { prompt, decode: 0 }))?;
        let all = [printed.output, printed.log].join("\n");
        if all.contains("you need at least") {
            let why = "the prompts and answers are too short to compare logits".to_owned();
            return Ok(Outcome { commands: vec![line], not_measured: Some(why), ..Outcome::default() });
        }
        let cache = arm.is_ours().then(|| counted(CacheSaid::read(&all), &hits));
        let logits = if compares { read_logits(&all) } else { None };
        let not_measured = (compares && logits.is_none())
            .then(|| "llama-perplexity printed no divergence of logits that is a number".to_owned());
        Ok(Outcome { commands: vec![line], cache, logits, not_measured, ..Outcome::default() })
    }

    /// What logits are compared on: the prompts and stock's answers.
    fn text(&self) -> String {
        let prompts = self.prompts.measured();
        let prompts = prompts.iter().flat_map(|conversation| &conversation.turns);
        let turns = self.done.get(&Step::Reference.key()).map(|outcome| outcome.turns.as_slice()).unwrap_or_default();
        prompts.zip(turns).map(|((_, prompt), turn)| format!("{prompt}\n{}\n\n", turn.text)).collect()
    }

    /// Refuses an arm whose memory is not that of the whole layers in the same workload.
    fn check_memory(&self, step: Step, outcome: &Outcome) -> Result<()> {
        let (arm, baseline) = match step {
            Step::Bench(_, arm) => (arm, Step::Bench(0, Arm::NCpuMoe)),
            Step::Server(_, arm) => (arm, Step::Server(0, Arm::NCpuMoe)),
            _ => return Ok(()),
        };
        let stock = self.done.get(&baseline.key()).and_then(|outcome| outcome.memory.as_ref());
        let Some((own, stock)) = outcome.memory.as_ref().zip(stock) else { return Ok(()) };
        if !arm.has_equal_memory() || mark(outcome).is_some() {
            return Ok(());
        }
        let compared = Compared::of(own, stock);
        // Only the device knows what llama.cpp's own cache takes.
        if arm == Arm::MoeCacheMib && !compared.by_device {
            return Ok(());
        }
        let slot: Bytes = self.model.layers.iter().map(crate::cli::model::ExpertLayer::expert_bytes).sum();
        compared.check(&step.key(), slot.0 as f64 / (1u64 << 20) as f64)
    }
}

/// Where stock's logits are. Large, and removed at the end.
pub fn base_file(work: &Path) -> PathBuf {
    work.join("logits.base")
}

fn memory(buffers: Buffers, cache: Option<&CacheSaid>) -> Memory {
    Memory {
        model_mib: buffers.model_mib,
        context_mib: buffers.context_mib,
        cache_mib: cache.map_or(0, |cache| cache.mib),
        ..Memory::default()
    }
}

/// Has all conversations. What stands before a turn are stock's answers, so that all arms read the same prompts.
fn converse(client: &Client, all: &[Conversation], n: u32, reference: Option<&[Turn]>) -> Result<Vec<Turn>> {
    let mut turns = Vec::new();
    for conversation in all {
        let mut messages = Vec::new();
        for (kind, prompt) in &conversation.turns {
            messages.push(json!({ "role": "user", "content": prompt }));
            let turn = client.answer(&messages, n)?;
            let turn = Turn { conversation: conversation.name.clone(), kind: kind.clone(), ..turn };
            let said = reference.and_then(|reference| reference.get(turns.len())).map_or(&turn.text, |turn| &turn.text);
            messages.push(json!({ "role": "assistant", "content": said }));
            turns.push(turn);
        }
    }
    Ok(turns)
}

/// With the hits that the run has counted in a file, since its last lines may be lost.
fn counted(said: CacheSaid, hits: &Path) -> CacheSaid {
    let profile = fs::read(hits).ok().and_then(|text| serde_json::from_slice::<Value>(&text).ok()).unwrap_or_default();
    let layers = profile.get("layers").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let sum = |name: &str| layers.iter().filter_map(|layer| layer.get(name)?.as_u64()).sum();
    CacheSaid { hits: sum("hot_slots_total"), misses: sum("cold_slots_total"), ..said }
}

fn read_logits(printed: &str) -> Option<Logits> {
    let number = |label: &str| {
        let rest = printed.lines().find_map(|line| line.trim().strip_prefix(label))?;
        rest.trim_start_matches([':', ' '])
            .split_whitespace()
            .next()?
            .parse::<f64>()
            .ok()
            .filter(|number| number.is_finite())
    };
    Some(Logits {
        mean_kld: number("Mean    KLD")?,
        max_kld: number("Maximum KLD")?,
        same_top: number("Same top p")? / 100.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_read_from_what_llama_perplexity_prints() {
        let printed = "====== KL divergence statistics ======\nMean    KLD:   0.000123 ±   0.000010\n\
            Maximum KLD:   0.045600\n99.9%   KLD:   0.01\nSame top p: 99.500 ± 0.200 %\n";
        assert_eq!(read_logits(printed), Some(Logits { mean_kld: 0.000123, max_kld: 0.0456, same_top: 0.995 }));
        assert_eq!(read_logits("Mean    KLD: nothing"), None);
        assert_eq!(read_logits(&printed.replace("0.045600", "inf")), None, "JSON has no such number");
    }

    #[test]
    fn hits_are_counted_from_the_runs_own_profile() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("hits.json");
        fs::write(&file, r#"{"layers": [{"hot_slots_total": 3, "cold_slots_total": 1}, {"hot_slots_total": 2}]}"#)
            .unwrap();
        let said = counted(CacheSaid::default(), &file);
        assert_eq!((said.hits, said.misses), (5, 1));
        assert_eq!(counted(CacheSaid::default(), &folder.path().join("none")).hits, 0);
    }
}
