//! What came of a comparison: every figure of every arm, pair by pair, with median, spread and ratio to the baseline.
//!
//! Pure: made from finished steps alone, so that it can be made anew at any time. A run that is marked is in no figure.

use super::arm::{Arm, Tuned};
use super::outcome::{LayerTimes, Logits, Memory, Outcome, Turn};
use super::prompts::{Prompts, SWITCH};
use super::settings::Settings;
use super::stats::{Spread, ratios};
use super::steps::Step;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What all arms are compared with.
pub const BASELINE: Arm = Arm::NCpuMoe;

/// The whole of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// What the tuning found.
    pub tuned: Tuned,
    /// [`BASELINE`].
    pub baseline: Arm,
    /// What is not a speed.
    pub arms: Vec<ArmSummary>,
    /// All speeds and times.
    pub measures: Vec<Measure>,
}

/// One arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmSummary {
    /// Which one.
    pub arm: Arm,
    /// Device memory of its first server run, else of llama-bench.
    pub memory: Option<Memory>,
    /// Slots per layer of its cache.
    pub slots: Option<u32>,
    /// Hit rate with real prompts, 0 to 1.
    pub hit_rate: Option<Spread>,
    /// Hit rate in llama-bench, whose tokens are random.
    pub bench_hit_rate: Option<Spread>,
    /// MiB copied to the device in one server run, the first fill included.
    pub copied_mib: Option<Spread>,
    /// Microseconds that a call of a layer waits for the device; only patched servers say that.
    pub wait_us: Option<f64>,
    /// The same by layer, and what else a call takes there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerCall>,
    /// Share of the answers' tokens before the first that differs from stock's, 0 to 1.
    pub agreement: Option<Spread>,
    /// Logits against stock's.
    pub logits: Option<Logits>,
    /// Runs that are marked and in no figure, each with its reason.
    pub marked: Vec<Marked>,
    /// What could not be measured, and why.
    pub not_measured: Vec<String>,
}

/// A layer's call in microseconds, the mean of all.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerCall {
    /// The N of `blk.N.`.
    pub layer: u32,
    /// Computing on the CPU.
    pub cpu_us: f64,
    /// Computing on the device.
    pub device_us: f64,
    /// The CPU waiting for the device.
    pub wait_us: f64,
}

impl LayerCall {
    fn of(times: &LayerTimes) -> Option<Self> {
        let mean = |us: u64| us as f64 / times.calls as f64;
        (times.calls > 0).then(|| Self {
            layer: times.layer,
            cpu_us: mean(times.cpu_us),
            device_us: mean(times.device_us),
            wait_us: mean(times.wait_us),
        })
    }
}

/// A run that counts for nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Marked {
    /// Its key.
    pub step: String,
    /// Why.
    pub reason: String,
}

/// One thing that was measured of every arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    /// Which workload: `llama-bench` or `server`.
    pub workload: String,
    /// What, in words.
    pub name: String,
    /// `t/s` or `ms`.
    pub unit: String,
    /// Whether the smaller is the better.
    pub is_time: bool,
    /// By arm.
    pub figures: Vec<Figure>,
}

/// One arm's values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// Which arm.
    pub arm: Arm,
    /// By pair; missing where a run is missing or marked.
    pub values: Vec<Option<f64>>,
    /// Of the values.
    pub spread: Option<Spread>,
    /// By pair: how many times as fast as the baseline.
    pub ratios: Vec<Option<f64>>,
    /// Of the ratios.
    pub ratio: Option<Spread>,
}

type Steps = BTreeMap<String, Outcome>;

impl Summary {
    /// Of the steps that are finished.
    pub fn of(settings: &Settings, prompts: &Prompts, tuned: Tuned, steps: &Steps) -> Self {
        let mut measures = Vec::new();
        for &depth in &settings.depth {
            let at = if depth == 0 { String::new() } else { format!(" at depth {depth}") };
            for &pp in &settings.pp {
                let name = format!("prompt of {pp} tokens{at}");
                measures.push(measure(settings, ["llama-bench", &name, "t/s"], |pair, arm| {
                    bench(steps, pair, arm, pp, 0, depth)
                }));
            }
            let name = format!("decode of {} tokens{at}", settings.tg);
            measures.push(measure(settings, ["llama-bench", &name, "t/s"], |pair, arm| {
                bench(steps, pair, arm, 0, settings.tg, depth)
            }));
        }
        for conversation in prompts.kinds().chain([SWITCH]) {
            let of = |pair, arm, value: fn(&[&Turn]) -> Option<f64>| {
                let outcome = counted(steps, Step::Server(pair, arm))?;
                let turns: Vec<_> = outcome.turns.iter().filter(|turn| turn.conversation == conversation).collect();
                value(&turns)
            };
            let name = format!("decode, {conversation}");
            measures.push(measure(settings, ["server", &name, "t/s"], |pair, arm| of(pair, arm, decode)));
            let name = format!("first token, {conversation}");
            measures.push(measure(settings, ["server", &name, "ms"], |pair, arm| of(pair, arm, first_token)));
        }
        let arms = settings.arms.iter().map(|&arm| ArmSummary::of(settings, arm, steps)).collect();
        Self { tuned, baseline: BASELINE, arms, measures }
    }
}

impl ArmSummary {
    fn of(settings: &Settings, arm: Arm, steps: &Steps) -> Self {
        let runs = |step: fn(u32, Arm) -> Step| {
            (0..settings.pairs).filter_map(move |pair| counted(steps, step(pair, arm))).collect::<Vec<_>>()
        };
        let (server, bench) = (runs(Step::Server), runs(Step::Bench));
        let hit_rate = |runs: &[&Outcome]| {
            Spread::of(runs.iter().filter_map(|outcome| outcome.cache.as_ref().and_then(|cache| cache.hit_rate())))
        };
        let reference = steps.get(&Step::Reference.key()).map(|outcome| outcome.turns.as_slice()).unwrap_or_default();
        let own = settings_steps(settings, arm);
        let marked = own.iter().filter_map(|&step| {
            let reason = mark(steps.get(&step.key())?)?;
            Some(Marked { step: step.key(), reason })
        });
        let missing = own.iter().filter_map(|step| {
            let why = steps.get(&step.key())?.not_measured.as_ref()?;
            Some(format!("{}: {why}", step.what()))
        });
        let mut not_measured: Vec<String> = missing.collect();
        not_measured.dedup();
        Self {
            arm,
            memory: server.iter().chain(&bench).find_map(|outcome| outcome.memory.clone()),
            slots: server.iter().chain(&bench).find_map(|outcome| outcome.cache.as_ref()).map(|cache| cache.slots),
            hit_rate: hit_rate(&server),
            bench_hit_rate: hit_rate(&bench),
            copied_mib: Spread::of(server.iter().filter_map(|outcome| Some(outcome.cache.as_ref()?.copied_mib))),
            wait_us: counted(steps, Step::Waits(arm)).and_then(wait_us),
            layers: layer_calls(counted(steps, Step::Waits(arm))),
            agreement: Spread::of(server.iter().filter_map(|outcome| agreement(&outcome.turns, reference))),
            logits: counted(steps, Step::Logits(arm)).and_then(|outcome| outcome.logits.clone()),
            marked: marked.collect(),
            not_measured,
        }
    }
}

fn settings_steps(settings: &Settings, arm: Arm) -> Vec<Step> {
    let pairs = (0..settings.pairs).flat_map(|pair| [Step::Bench(pair, arm), Step::Server(pair, arm)]);
    pairs.chain([Step::Waits(arm), Step::Logits(arm)]).collect()
}

/// Why a run counts for nothing: its cache was off, was given up, or had not one hit.
pub fn mark(outcome: &Outcome) -> Option<String> {
    let cache = outcome.cache.as_ref()?;
    cache.off.clone().or_else(|| (cache.hits == 0).then(|| "not one request was answered on the device".to_owned()))
}

/// A finished step that is not marked.
fn counted(steps: &Steps, step: Step) -> Option<&Outcome> {
    steps.get(&step.key()).filter(|outcome| mark(outcome).is_none())
}

fn bench(steps: &Steps, pair: u32, arm: Arm, pp: u32, tg: u32, depth: u32) -> Option<f64> {
    let tests = &counted(steps, Step::Bench(pair, arm))?.tests;
    tests.iter().find(|test| (test.prompt, test.decode, test.depth) == (pp, tg, depth))?.speed()
}

/// All tokens by all the time.
fn decode(turns: &[&Turn]) -> Option<f64> {
    let timed: Vec<_> = turns.iter().filter_map(|turn| Some((turn.tokens.len() as f64, turn.decode?))).collect();
    let (tokens, seconds) =
        timed.iter().fold((0.0, 0.0), |(tokens, seconds), (n, speed)| (tokens + n, seconds + n / speed));
    (seconds > 0.0).then(|| tokens / seconds)
}

fn first_token(turns: &[&Turn]) -> Option<f64> {
    Spread::of(turns.iter().map(|turn| turn.first_token_ms)).map(|spread| spread.median)
}

/// Share of tokens before the first that differs, over all answers.
fn agreement(turns: &[Turn], reference: &[Turn]) -> Option<f64> {
    let equal = |(turn, reference): (&Turn, &Turn)| {
        let same = turn.tokens.iter().zip(&reference.tokens).take_while(|(a, b)| a == b).count();
        (same, turn.tokens.len().max(reference.tokens.len()))
    };
    let (same, all) = turns.iter().zip(reference).map(equal).fold((0, 0), |(a, b), (c, d)| (a + c, b + d));
    (all > 0 && turns.len() == reference.len()).then(|| same as f64 / all as f64)
}

fn layer_calls(outcome: Option<&Outcome>) -> Vec<LayerCall> {
    outcome.map(|outcome| outcome.layers.iter().filter_map(LayerCall::of).collect()).unwrap_or_default()
}

fn wait_us(outcome: &Outcome) -> Option<f64> {
    let (wait, calls) =
        outcome.layers.iter().fold((0, 0), |(wait, calls), layer| (wait + layer.wait_us, calls + layer.calls));
    (calls > 0).then(|| wait as f64 / calls as f64)
}

fn measure(settings: &Settings, [workload, name, unit]: [&str; 3], value: impl Fn(u32, Arm) -> Option<f64>) -> Measure {
    let is_time = unit == "ms";
    let values = |arm: Arm| (0..settings.pairs).map(|pair| value(pair, arm)).collect::<Vec<_>>();
    let baseline = values(BASELINE);
    let figure = |&arm: &Arm| {
        let values = values(arm);
        let ratios = ratios(&values, &baseline, is_time);
        Figure {
            arm,
            spread: Spread::of(values.iter().copied().flatten()),
            ratio: Spread::of(ratios.iter().copied().flatten()),
            values,
            ratios,
        }
    };
    Measure {
        workload: workload.into(),
        name: name.into(),
        unit: unit.into(),
        is_time,
        figures: settings.arms.iter().map(figure).collect(),
    }
}

#[cfg(test)]
pub mod testing {
    use super::super::outcome::Test;
    use super::super::said::CacheSaid;
    use super::super::settings::testing::settings;
    use super::*;

    /// What the tuning found.
    pub const TUNED: Tuned = Tuned { threads: 2, ubatch: 512, n_cpu_moe: 3, cache_mib: 6, fit_target_mib: 0 };

    /// A run of llama-bench with one speed for all tests.
    pub fn bench_run(speed: f64, cache: Option<CacheSaid>) -> Outcome {
        let test = |prompt, decode, depth| Test {
            prompt,
            decode,
            depth,
            threads: 2,
            ubatch: 512,
            n_cpu_moe: 0,
            model_mib: 0.0,
            samples: vec![1.0, speed],
        };
        let tests =
            vec![test(64, 0, 0), test(128, 0, 0), test(0, 16, 0), test(64, 0, 32), test(128, 0, 32), test(0, 16, 32)];
        Outcome { tests, cache, ..Outcome::default() }
    }

    /// A cache with so many hits of ten.
    pub fn cache(hits: u64) -> CacheSaid {
        CacheSaid { mib: 6, slots: 16, layers: 6, hits, misses: 10 - hits, copied_mib: 7.0, off: None }
    }

    /// A comparison in which our arm is 1.5 and 2 times as fast, and a cache is given up once.
    pub fn summary() -> Summary {
        let off = CacheSaid { off: Some("hot cache of this model off on RPC0".into()), ..cache(1) };
        let runs = [
            (Step::Bench(0, Arm::NCpuMoe), bench_run(10.0, None)),
            (Step::Bench(1, Arm::NCpuMoe), bench_run(20.0, None)),
            (Step::Bench(0, Arm::HotFixed), bench_run(15.0, Some(cache(6)))),
            (Step::Bench(1, Arm::HotFixed), bench_run(40.0, Some(cache(8)))),
            (Step::Bench(0, Arm::HotCold), bench_run(1000.0, Some(off))),
            (Step::Bench(1, Arm::HotCold), bench_run(10.0, Some(cache(4)))),
            (Step::Bench(0, Arm::HotProfile), bench_run(1000.0, Some(cache(0)))),
        ];
        let steps = runs.into_iter().map(|(step, outcome)| (step.key(), outcome)).collect();
        Summary::of(&settings(), &Prompts::read(None).unwrap(), TUNED, &steps)
    }
}

#[cfg(test)]
mod tests {
    use super::testing::summary;
    use super::*;

    fn figure(summary: &Summary, arm: Arm) -> &Figure {
        let measure = summary.measures.iter().find(|measure| measure.name == "decode of 16 tokens").unwrap();
        measure.figures.iter().find(|figure| figure.arm == arm).unwrap()
    }

    #[test]
    fn ratios_are_taken_pair_by_pair() {
        let summary = summary();
        let ours = figure(&summary, Arm::HotFixed);
        assert_eq!(
            (ours.values.clone(), ours.ratios.clone()),
            (vec![Some(15.0), Some(40.0)], vec![Some(1.5), Some(2.0)])
        );
        assert_eq!(ours.ratio.as_ref().unwrap().median, 1.75);
        assert_eq!(figure(&summary, Arm::NCpuMoe).ratio.as_ref().unwrap().most, 1.0);
    }

    #[test]
    fn a_cache_that_was_off_is_marked_and_in_no_figure() {
        let summary = summary();
        let cold = figure(&summary, Arm::HotCold);
        assert_eq!((cold.values.clone(), cold.ratios.clone()), (vec![None, Some(10.0)], vec![None, Some(0.5)]));
        let of = |arm: Arm| summary.arms.iter().find(|one| one.arm == arm).unwrap();
        assert_eq!(of(Arm::HotCold).marked[0].step, "bench-0-hot-cold");
        assert_eq!(of(Arm::HotCold).bench_hit_rate.as_ref().unwrap().most, 0.4);
        // No line said that it was off, but it answered nothing.
        assert_eq!(figure(&summary, Arm::HotProfile).spread, None);
        assert!(of(Arm::HotProfile).marked[0].reason.contains("not one request"));
        assert!(of(Arm::NCpuMoe).marked.is_empty() && of(Arm::HotFixed).marked.is_empty());
    }

    #[test]
    fn waits_are_means_of_calls_by_layer_and_of_all() {
        let layer = |layer, calls, wait_us| LayerTimes { layer, calls, cpu_us: 10, device_us: 20, wait_us };
        let layers = vec![layer(0, 10, 50), layer(1, 0, 0), layer(2, 10, 10)];
        let outcome = Outcome { layers, ..Outcome::default() };
        assert_eq!(wait_us(&outcome), Some(3.0));
        let calls: Vec<_> =
            layer_calls(Some(&outcome)).iter().map(|call| (call.layer, call.cpu_us, call.wait_us)).collect();
        assert_eq!(calls, [(0, 1.0, 5.0), (2, 1.0, 1.0)]);
        assert_eq!((wait_us(&Outcome::default()), layer_calls(None)), (None, Vec::new()));
    }

    #[test]
    fn answers_agree_up_to_the_first_token_that_differs() {
        let turn = |tokens: &[u32]| Turn {
            conversation: "a".into(),
            kind: "a".into(),
            prompt: 1,
            cached: 0,
            first_token_ms: 10.0,
            decode: Some(5.0),
            tokens: tokens.to_vec(),
            text: String::new(),
            requests: None,
            hits: None,
        };
        let stock = [turn(&[1, 2, 3, 4]), turn(&[5, 6, 7, 8])];
        assert_eq!(agreement(&stock, &stock), Some(1.0));
        assert_eq!(agreement(&[turn(&[1, 2, 9, 4]), turn(&[5, 6, 7, 8])], &stock), Some(0.75));
        assert_eq!(agreement(&[], &stock), None);
        assert_eq!(agreement(&stock[..1], &stock), None, "an answer is missing");
        // Two turns, the second of which is twice as fast.
        let (slow, fast) = (turn(&[0; 10]), Turn { decode: Some(10.0), ..turn(&[0; 10]) });
        assert_eq!(decode(&[&slow, &fast]), Some(20.0 / 3.0));
    }
}
