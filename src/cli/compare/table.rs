//! The result as Markdown, for a terminal and for reports to others.
//!
//! Pure. Every table names its unit; what was not measured, and every run that is marked, is named below.

use super::outcome::{Memory, Test};
use super::said::CacheSaid;
use super::stats::Spread;
use super::steps::Step;
use super::store::Results;
use super::summary::{ArmSummary, Measure, Summary};
use crate::cli::output::percent;
use crate::cli::size::show;
use crate::units::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// A cell without a value.
pub const NONE: &str = "–";

/// What the table of layers is called.
pub const LAYERS: &str = "Layers: computing on CPU and device, and waiting for the device, µs per call";

/// The whole text.
pub fn markdown(results: &Results, summary: &Summary) -> String {
    let mut text = format!("# moe-hot compare: {}\n\n", results.settings.model.display());
    for (name, value) in facts(results, summary) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "- {name}: {value}");
    }
    for workload in ["llama-bench", "server"] {
        for measure in summary.measures.iter().filter(|measure| measure.workload == workload) {
            let _ = write!(text, "\n## {}\n\n{}", title(measure), grid(&measure_rows(measure)));
        }
    }
    let _ = write!(text, "\n## Memory, hits, answers\n\n{}", grid(&arm_rows(summary)));
    if let Some(rows) = layer_rows(summary) {
        let _ = write!(text, "\n## {LAYERS}\n\n{}", grid(&rows));
    }
    let _ = write!(text, "\n## How stock was tuned\n\n{}", grid(&tuning_rows(results)));
    let _ = write!(text, "\n## Notes\n\n");
    for note in notes(results, summary) {
        let _ = writeln!(text, "- {note}");
    }
    text
}

/// What a measure's table is called.
pub fn title(measure: &Measure) -> String {
    format!("{}: {} ({})", measure.workload, measure.name, measure.unit)
}

fn grid(rows: &[Vec<String>]) -> String {
    let mut text = String::new();
    for (number, row) in rows.iter().enumerate() {
        let cells: Vec<_> = row.iter().map(|cell| cell.replace('|', "\\|")).collect();
        let _ = writeln!(text, "| {} |", cells.join(" | "));
        if number == 0 {
            let rule: Vec<_> = (0..row.len()).map(|column| if column == 0 { "---" } else { "---:" }).collect();
            let _ = writeln!(text, "| {} |", rule.join(" | "));
        }
    }
    text
}

/// What everything rests on.
pub fn facts(results: &Results, summary: &Summary) -> Vec<(&'static str, String)> {
    let (settings, machine, tuned) = (&results.settings, &results.machine, &summary.tuned);
    let vram = settings.vram.map_or_else(|| "what is free less 1 GiB".into(), |bytes| show(Bytes(bytes)));
    let environment = settings.environment.join(" ");
    let mut facts = vec![
        ("machine", machine.cpu.clone()),
        (
            "device",
            format!(
                "{} ({}), {} MiB, {} MiB free",
                settings.device, machine.device, machine.device_total_mib, machine.device_free_mib
            ),
        ),
        ("GPU memory for everything", vram),
        ("llama.cpp", format!("{}; moe-hot {}", settings.revision, settings.moe_hot)),
        ("date", machine.began.clone()),
        (
            "all arms",
            format!(
                "-t {} -ub {} -ctk {t} -ctv {t} -fa {}, --no-repack; server -c {}",
                tuned.threads,
                tuned.ubatch,
                settings.flash_attn,
                settings.context,
                t = settings.cache_type
            ),
        ),
        (
            "equal memory",
            format!(
                "--n-cpu-moe {}, the fastest that fits; a cache gets what that takes (--moe-hot-cache-max-mib): {} MiB of experts, and \
                 the scratch memory that they need in each workload",
                tuned.n_cpu_moe, tuned.cache_mib
            ),
        ),
        ("pairs", format!("{}, every second one in the opposite order; warm-ups do not count", settings.pairs)),
        ("prompts", format!("{}, answers of {} tokens", settings.prompts, settings.answer)),
    ];
    if !environment.is_empty() {
        facts.push(("set in the environment", environment));
    }
    facts
}

/// What the tuning tried: setting and speed.
pub fn tuning_rows(results: &Results) -> Vec<Vec<String>> {
    let mut rows = vec![["tried for stock", "decode or prompt, t/s"].map(str::to_owned).to_vec()];
    type Name = fn(&Test) -> String;
    let steps: [(Step, Name); 3] = [
        (Step::Threads, |test| format!("-t {}", test.threads)),
        (Step::Ubatch, |test| format!("-ub {}", test.ubatch)),
        (Step::WholeLayers, |test| format!("--n-cpu-moe {}", test.n_cpu_moe)),
    ];
    for (step, name) in steps {
        let tests = results.steps.get(&step.key()).map(|outcome| outcome.tests.as_slice()).unwrap_or_default();
        rows.extend(tests.iter().map(|test| vec![name(test), test.speed().map_or_else(|| NONE.into(), number)]));
    }
    rows
}

/// A measure's table, its header first.
pub fn measure_rows(measure: &Measure) -> Vec<Vec<String>> {
    let header = ["arm", "median", "least to most", "times as fast as --n-cpu-moe", "least to most", "pairs"];
    let row = |figure: &super::summary::Figure| {
        let range =
            |spread: &Spread, show: fn(f64) -> String| format!("{} to {}", show(spread.least), show(spread.most));
        let spread = figure.spread.as_ref();
        let ratio = figure.ratio.as_ref();
        vec![
            figure.arm.label().to_owned(),
            spread.map_or_else(|| NONE.into(), |spread| number(spread.median)),
            spread.map_or_else(|| NONE.into(), |spread| range(spread, number)),
            ratio.map_or_else(|| NONE.into(), |ratio| times(ratio.median)),
            ratio.map_or_else(|| NONE.into(), |ratio| range(ratio, times)),
            format!("{} of {}", spread.map_or(0, |spread| spread.n), figure.values.len()),
        ]
    };
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    rows.extend(measure.figures.iter().map(row));
    rows
}

/// What is not a speed, by arm, its header first.
pub fn arm_rows(summary: &Summary) -> Vec<Vec<String>> {
    let header = [
        "arm",
        "device memory, MiB",
        "of it cache",
        "slots per layer",
        "hits, prompts",
        "hits, llama-bench",
        "copied, MiB",
        "wait per layer call, µs",
        "tokens as stock's",
        "mean KL divergence",
        "same likeliest token",
    ];
    let or_none = |text: Option<String>| text.unwrap_or_else(|| NONE.into());
    let row = |arm: &ArmSummary| {
        let of_cache = |text: String| if arm.arm.is_ours() { text } else { NONE.into() };
        vec![
            arm.arm.label().to_owned(),
            or_none(arm.memory.as_ref().map(memory)),
            or_none(arm.memory.as_ref().map(|memory| of_cache(memory.cache_mib.to_string()))),
            or_none(arm.slots.map(|slots| slots.to_string())),
            or_none(arm.hit_rate.as_ref().map(|rate| percent(rate.median))),
            or_none(arm.bench_hit_rate.as_ref().map(|rate| percent(rate.median))),
            or_none(arm.copied_mib.as_ref().map(|copied| format!("{:.1}", copied.median))),
            or_none(arm.wait_us.map(|wait| format!("{wait:.1}"))),
            or_none(arm.agreement.as_ref().map(|share| percent(share.median))),
            or_none(arm.logits.as_ref().map(|logits| format!("{:.6}", logits.mean_kld))),
            or_none(arm.logits.as_ref().map(|logits| percent(logits.same_top))),
        ]
    };
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    rows.extend(summary.arms.iter().map(row));
    rows
}

/// What the calls of each layer take, by arm, the header first; `None` where no server has said it.
pub fn layer_rows(summary: &Summary) -> Option<Vec<Vec<String>>> {
    let arms: Vec<_> = summary.arms.iter().filter(|arm| !arm.layers.is_empty()).collect();
    let layers: BTreeSet<u32> = arms.iter().flat_map(|arm| &arm.layers).map(|call| call.layer).collect();
    let heads = |arm: &&ArmSummary| ["CPU", "device", "wait"].map(|what| format!("{}: {what}", arm.arm.label()));
    let mut rows = vec![std::iter::once("layer".to_owned()).chain(arms.iter().flat_map(heads)).collect()];
    for layer in layers {
        let cells = |arm: &&ArmSummary| match arm.layers.iter().find(|call| call.layer == layer) {
            Some(call) => [call.cpu_us, call.device_us, call.wait_us].map(|us| format!("{us:.1}")),
            None => [NONE; 3].map(str::to_owned),
        };
        rows.push(std::iter::once(layer.to_string()).chain(arms.iter().flat_map(cells)).collect());
    }
    (!arms.is_empty()).then_some(rows)
}

fn memory(memory: &Memory) -> String {
    match memory.device_mib {
        Some(device) => format!(
            "{:.1} ({device} by the device, ± {})",
            memory.said_mib(),
            memory.device_noise_mib.unwrap_or(0).abs()
        ),
        None => format!("{:.1}", memory.said_mib()),
    }
}

/// What a reader must know to believe the figures, and what is missing.
pub fn notes(results: &Results, summary: &Summary) -> Vec<String> {
    let mut notes = vec![
        "llama-bench decodes random tokens, which do not route like text; the server's prompts are text.".to_owned(),
        "\"tokens as stock's\": greedy answers up to the first token that differs from stock's --cpu-moe.".to_owned(),
        "Device memory: what llama.cpp and moe-hot say that they took there; stock --fit takes what it wants."
            .to_owned(),
        "Wait per layer call: only patched servers say it (build/patched/bin).".to_owned(),
    ];
    // The same reason in many runs is one note.
    for arm in &summary.arms {
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for marked in &arm.marked {
            reasons.entry(&marked.reason).or_default().push(&marked.step);
        }
        for (reason, steps) in reasons {
            notes.push(format!("**Not counted**: {} ({}): {reason}", arm.arm.label(), steps.join(", ")));
        }
        notes.extend(arm.not_measured.iter().map(|why| format!("Not measured: {}, {why}", arm.arm.label())));
    }
    notes.extend(more_than_asked(results));
    if let Some(cache) = smaller_cache(results) {
        notes.push(cache);
    }
    notes
}

/// Where the whole layers took more than was asked for, with the scratch memory that they need.
fn more_than_asked(results: &Results) -> Option<String> {
    let vram = Bytes(results.settings.vram?).0 as f64 / (1u64 << 20) as f64;
    let baseline = super::summary::BASELINE;
    let steps = [Step::Bench(0, baseline), Step::Server(0, baseline)];
    let taken = steps.iter().filter_map(|step| Some(results.steps.get(&step.key())?.memory.as_ref()?.said_mib()));
    let most = taken.fold(0.0, f64::max);
    (most > vram).then(|| {
        format!(
            "{} took {most:.1} MiB, with scratch memory that only shows when it runs: more than --vram, as all arms did \
             that are compared with it.",
            baseline.label()
        )
    })
}

/// Where the cache could not come as close to the whole layers' bytes as it should.
fn smaller_cache(results: &Results) -> Option<String> {
    let memory = |step: Step| results.steps.get(&step.key())?.memory.clone();
    let baseline = memory(Step::Server(0, super::summary::BASELINE))?;
    let ours = results.settings.arms.iter().filter(|arm| arm.is_ours());
    let least = ours.filter_map(|&arm| {
        let cache: &CacheSaid = results.steps.get(&Step::Server(0, arm).key())?.cache.as_ref()?;
        cache.off.is_none().then_some(())?;
        Some(memory(Step::Server(0, arm))?.said_mib() - baseline.said_mib())
    });
    let least = least.fold(0.0, f64::min);
    (least < -0.02 * baseline.said_mib()).then(|| {
        format!(
            "A cache has {:.1} MiB less than the whole layers: one slot more in every layer would be too much.",
            -least
        )
    })
}

/// Three digits or so.
pub fn number(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

fn times(ratio: f64) -> String {
    format!("{ratio:.3}")
}

#[cfg(test)]
pub mod testing {
    use super::super::settings::testing::settings;
    use super::super::store::{Machine, SCHEMA};
    use super::*;

    /// Results without steps.
    pub fn results() -> Results {
        Results {
            schema: SCHEMA.into(),
            settings: settings(),
            machine: Machine {
                cpu: "a CPU".into(),
                device: "GPU".into(),
                device_total_mib: 300,
                device_free_mib: 250,
                began: "now".into(),
            },
            steps: BTreeMap::new(),
            summary: None,
            complete: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::arm::Arm;
    use super::super::outcome::Outcome;
    use super::super::summary::testing::summary;
    use super::testing::results;
    use super::*;

    #[test]
    fn every_arm_has_its_row_and_what_is_marked_has_no_figure() {
        let text = markdown(&results(), &summary());
        assert!(text.contains("## llama-bench: decode of 16 tokens (t/s)"), "{text}");
        assert!(
            text.contains("| moe-hot, fixed profile | 27.5 | 15.0 to 40.0 | 1.750 | 1.500 to 2.000 | 2 of 2 |"),
            "{text}"
        );
        assert!(
            text.contains("| moe-hot, learning from cold | 10.0 | 10.0 to 10.0 | 0.500 | 0.500 to 0.500 | 1 of 2 |"),
            "{text}"
        );
        assert!(text.contains("| moe-hot, learning from a profile | – | – | – | – | 0 of 2 |"), "{text}");
        assert!(
            text.contains(
                "**Not counted**: moe-hot, learning from cold (bench-0-hot-cold): hot cache of this model off"
            )
        );
        assert!(text.contains("not one request was answered on the device"));
    }

    #[test]
    fn whole_layers_that_took_more_than_was_asked_for_are_named() {
        let mut results = results();
        assert_eq!(more_than_asked(&results), None);
        let memory = Memory { model_mib: 70.0, context_mib: 30.0, ..Memory::default() };
        let mut took = |context_mib: f64| {
            let memory = Memory { context_mib, ..memory.clone() };
            let outcome = Outcome { memory: Some(memory), ..Outcome::default() };
            results.steps.insert(Step::Server(0, Arm::NCpuMoe).key(), outcome);
            more_than_asked(&results)
        };
        assert_eq!(took(30.0), None, "100 MiB were asked for");
        assert!(took(31.0).unwrap().contains("took 101.0 MiB"));
    }

    #[test]
    fn numbers_have_three_digits_or_so() {
        assert_eq!([1234.5, 99.94, 9.994, 0.5].map(number), ["1234", "99.9", "9.99", "0.50"]);
    }
}
