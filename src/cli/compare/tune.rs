//! What is best for stock, chosen from measurements: threads, ubatch, and how many whole layers stay on the device.
//!
//! Pure: says what to try, and takes the fastest of what was tried. Our cache then gets the bytes of those whole layers.

use super::arm::Tuned;
use super::fairness::Compared;
use super::outcome::{Memory, Outcome, Test};
use super::settings::Settings;
use super::stats::fastest;
use super::steps::Step;
use super::store::Machine;
use crate::cli::model::ExpertLayer;
use crate::cli::size::show;
use crate::units::Bytes;
use anyhow::{Result, ensure};
use std::collections::BTreeMap;

/// What is left of a device's free memory unless the user says how much to take, MiB. The cache's own default.
const RESERVE_MIB: u64 = 1024;
/// So many `--n-cpu-moe N` are tried, from the smallest that fits.
const TRIED_LAYERS: usize = 3;
/// llama.cpp's own default for `-ub`.
const DEFAULT_UBATCH: u32 = 512;
const UBATCHES: [u32; 3] = [512, 1024, 2048];
/// Decoded to choose threads and layers.
pub const TRIED_TOKENS: u32 = 32;
const MIB: f64 = (1u64 << 20) as f64;

/// Numbers of threads to try: physical cores, half of them, and all that the system shows.
pub fn threads_to_try(physical: usize, logical: usize) -> Vec<u16> {
    let mut tried: Vec<_> =
        [physical.div_ceil(2), physical, logical].iter().filter_map(|&n| u16::try_from(n.max(1)).ok()).collect();
    tried.sort_unstable();
    tried.dedup();
    tried
}

/// Physical cores, by the text of /proc/cpuinfo; all CPUs where it does not tell.
pub fn physical_cores(cpuinfo: &str, logical: usize) -> usize {
    let value = |cpu: &str, name: &str| {
        cpu.lines().find_map(|line| Some(line.strip_prefix(name)?.split_once(':')?.1.trim().to_owned()))
    };
    let mut cores: Vec<_> =
        cpuinfo.split("\n\n").filter_map(|cpu| Some((value(cpu, "physical id")?, value(cpu, "core id")?))).collect();
    cores.sort();
    cores.dedup();
    if cores.is_empty() { logical } else { cores.len().min(logical) }
}

/// Sizes of ubatches to try: a larger one than the longest prompt changes nothing.
pub fn ubatches_to_try(pp: &[u32]) -> Vec<u32> {
    let longest = pp.iter().copied().max().unwrap_or(0);
    UBATCHES.into_iter().filter(|&ubatch| ubatch == DEFAULT_UBATCH || ubatch <= longest).collect()
}

/// Device memory for everything, MiB.
pub fn vram_mib(settings: &Settings, machine: &Machine) -> u64 {
    match settings.vram {
        Some(bytes) => Bytes(bytes).mib(),
        None => machine.device_free_mib.saturating_sub(RESERVE_MIB),
    }
}

/// What is known so far. What is not yet known has the value that changes nothing.
pub fn tuned(settings: &Settings, machine: &Machine, steps: &BTreeMap<String, Outcome>) -> Tuned {
    let tests = |step: Step| steps.get(&step.key()).map(|outcome| outcome.tests.as_slice()).unwrap_or_default();
    let threads = settings.threads.or_else(|| Some(best(tests(Step::Threads))?.threads));
    let ubatch = settings.ubatch.or_else(|| Some(best(tests(Step::Ubatch))?.ubatch));
    let layers = without_experts(steps).and_then(|stock| {
        let vram = vram_mib(settings, machine) as f64;
        let fits = |test: &&Test| needed_mib(&stock, test) <= vram;
        let fitting: Vec<Test> = tests(Step::WholeLayers).iter().filter(fits).cloned().collect();
        let best = best(&fitting)?;
        Some((best.n_cpu_moe, (best.model_mib - stock.model_mib).max(0.0)))
    });
    Tuned {
        threads: threads.unwrap_or(1),
        ubatch: ubatch.unwrap_or(DEFAULT_UBATCH),
        n_cpu_moe: layers.map_or(u32::MAX, |(n, _)| n),
        cache_mib: layers.map_or(0, |(_, mib)| mib.ceil() as u64),
        fit_target_mib: machine.device_free_mib.saturating_sub(vram_mib(settings, machine)),
    }
}

/// The same with the cache's MiB for one workload: what whole layers took there above what stock takes without experts, scratch
/// memory included. `without` and `baseline`: memory of that workload; what is missing changes nothing.
pub fn for_workload(tuned: Tuned, without: Option<&Memory>, baseline: Option<&Memory>) -> Tuned {
    let Some((without, baseline)) = without.zip(baseline) else { return tuned };
    let Compared { arm_mib, baseline_mib, .. } = Compared::of(without, baseline);
    Tuned { cache_mib: (baseline_mib - arm_mib).max(1.0).ceil() as u64, ..tuned }
}

/// What stock takes on the device without experts there: its weights, and the larger of llama-bench's longest context and the
/// server's.
pub fn without_experts(steps: &BTreeMap<String, Outcome>) -> Option<Memory> {
    let memory = |step: Step| steps.get(&step.key())?.memory.clone();
    let (bench, server) = (memory(Step::Memory)?, memory(Step::Reference));
    let context_mib = server.map_or(0.0, |server| server.context_mib).max(bench.context_mib);
    Some(Memory { context_mib, ..bench })
}

/// What a test of whole layers took of the device, MiB. `stock`: what stock takes without experts there.
fn needed_mib(stock: &Memory, test: &Test) -> f64 {
    stock.said_mib() - stock.model_mib + test.model_mib
}

/// Refuses memory that none of the tests has fitted into, as was measured.
pub fn check_one_fits(tests: &[Test], stock: &Memory, vram_mib: u64) -> Result<()> {
    let least = tests.iter().map(|test| needed_mib(stock, test)).fold(f64::INFINITY, f64::min);
    ensure!(
        least <= vram_mib as f64,
        "--vram {}: with the experts of whole layers there llama.cpp took {least:.1} MiB at least; expected more",
        show(Bytes::from_mib(vram_mib))
    );
    Ok(())
}

/// Refuses memory that can be seen to be too much or too little before anything runs.
pub fn check_vram(settings: &Settings, machine: &Machine, layers: &[ExpertLayer]) -> Result<()> {
    let (vram, free) = (vram_mib(settings, machine), machine.device_free_mib);
    let device = &settings.device;
    ensure!(
        settings.vram.is_some() || free > RESERVE_MIB,
        "--vram is not given, and {device} has {free} MiB free, of which {RESERVE_MIB} MiB are left alone; expected --vram SIZE"
    );
    let given = show(Bytes(settings.vram.unwrap_or(Bytes::from_mib(vram).0)));
    ensure!(
        vram <= free,
        "--vram {given}: {device} has {free} MiB free of {} MiB; expected at most that",
        machine.device_total_mib
    );
    let least = layers.iter().map(ExpertLayer::bytes).min().unwrap_or(Bytes::ZERO);
    ensure!(
        Bytes::from_mib(vram) >= least,
        "--vram {given}: the experts of one layer alone take {}; expected more",
        show(least)
    );
    Ok(())
}

/// The fastest test; of equal ones the first.
fn best(tests: &[Test]) -> Option<&Test> {
    let speeds: Vec<f64> = tests.iter().map(|test| test.speed().unwrap_or(f64::NAN)).collect();
    tests.get(fastest(&speeds)?)
}

/// The `--n-cpu-moe N` to try in so much memory, the smallest first. `without_mib`: what stock takes without experts there.
pub fn whole_layers_to_try(layers: &[ExpertLayer], without_mib: f64, vram_mib: u64) -> Result<Vec<u32>> {
    let vram = vram_mib as f64;
    let needed = |n: u32| {
        let there = layers.iter().filter(|layer| layer.layer >= n);
        without_mib + there.map(|layer| layer.bytes().0 as f64).sum::<f64>() / MIB
    };
    let size = |mib: f64| show(Bytes((mib * MIB).ceil() as u64));
    ensure!(
        without_mib <= vram,
        "--vram {}: the model takes {} without any expert; expected more",
        size(vram),
        size(without_mib)
    );
    let last = layers.iter().map(|layer| layer.layer).max().unwrap_or(0);
    ensure!(
        needed(0) > vram,
        "--vram {}: the whole model takes {}, so there is nothing to compare; expected less",
        size(vram),
        size(needed(0))
    );
    // With N one above a layer without experts nothing changes.
    let useful = layers.iter().map(|layer| layer.layer).filter(|&n| n > 0);
    let fitting: Vec<u32> = useful.filter(|&n| needed(n) <= vram).take(TRIED_LAYERS).collect();
    ensure!(
        !fitting.is_empty(),
        "--vram {}: not even one layer's experts fit beside the rest; expected at least {}",
        size(vram),
        size(needed(last))
    );
    Ok(fitting)
}

#[cfg(test)]
mod tests {
    use super::super::settings::testing::settings;
    use super::*;
    use crate::cli::model::ExpertTensor;

    fn layer(layer: u32, mib: u64) -> ExpertLayer {
        let tensor = ExpertTensor {
            name: "ffn_up_exps.weight".into(),
            kind: "f32",
            shape: vec![1, 1],
            n_expert: 8,
            bytes: Bytes::from_mib(mib),
        };
        ExpertLayer { layer, n_expert: 8, n_used: Some(2), tensors: vec![tensor], chunk_bytes: Bytes::ZERO }
    }

    fn test(threads: u16, n_cpu_moe: u32, model_mib: f64, speed: f64) -> Test {
        Test { prompt: 0, decode: 8, depth: 0, threads, ubatch: 512, n_cpu_moe, model_mib, samples: vec![999.0, speed] }
    }

    fn machine() -> Machine {
        Machine {
            cpu: "x".into(),
            device: "GPU".into(),
            device_total_mib: 300,
            device_free_mib: 250,
            began: "now".into(),
        }
    }

    #[test]
    fn physical_cores_are_told_from_threads() {
        let cpu = |id: u32, core: u32| format!("processor\t: {id}\nphysical id\t: 0\ncore id\t: {core}\n\n");
        let info: String = (0..8).map(|n| cpu(n, n / 2)).collect();
        assert_eq!(physical_cores(&info, 8), 4);
        assert_eq!(physical_cores("processor: 0\n", 6), 6);
        assert_eq!(physical_cores(&info, 2), 2, "in a container with fewer");
        assert_eq!((threads_to_try(4, 8), threads_to_try(1, 1)), (vec![2, 4, 8], vec![1]));
    }

    #[test]
    fn a_cache_gets_what_whole_layers_take_in_its_workload() {
        let tuned = Tuned { threads: 1, ubatch: 512, n_cpu_moe: 3, cache_mib: 4, fit_target_mib: 0 };
        let said = |model_mib: f64, context_mib: f64| Memory { model_mib, context_mib, ..Memory::default() };
        let (without, whole) = (said(1.2, 5.0), said(4.6, 8.1));
        assert_eq!(for_workload(tuned, Some(&without), Some(&whole)).cache_mib, 7, "3.4 of experts, 3.1 of scratch");
        assert_eq!(for_workload(tuned, Some(&whole), Some(&without)).cache_mib, 1);
        assert_eq!(for_workload(tuned, None, Some(&whole)), tuned);
        // The device's own figures come first.
        let device = |mib: i64, memory: Memory| Memory { device_mib: Some(mib), device_noise_mib: Some(0), ..memory };
        assert_eq!(for_workload(tuned, Some(&device(500, without)), Some(&device(600, whole))).cache_mib, 100);
    }

    #[test]
    fn an_ubatch_longer_than_the_prompt_is_not_tried() {
        assert_eq!((ubatches_to_try(&[64]), ubatches_to_try(&[512, 1024])), (vec![512], vec![512, 1024]));
    }

    #[test]
    fn as_many_whole_layers_as_fit_are_tried_and_fewer() {
        let layers: Vec<_> = (0..6).map(|n| layer(n, 10)).collect();
        assert_eq!(whole_layers_to_try(&layers, 20.0, 50).unwrap(), [3, 4, 5]);
        assert_eq!(whole_layers_to_try(&layers, 20.0, 35).unwrap(), [5]);
        // The first layer has no experts: its number changes nothing.
        let layers: Vec<_> = (1..4).map(|n| layer(n, 10)).collect();
        assert_eq!(whole_layers_to_try(&layers, 0.0, 25).unwrap(), [2, 3]);
    }

    #[test]
    fn memory_that_no_run_could_have_is_refused_at_once() {
        let layers = [layer(0, 10), layer(1, 20)];
        let refusal = |vram: Option<u64>, free: u64| {
            let vram = vram.map(|mib| Bytes::from_mib(mib).0);
            let machine = Machine { device_free_mib: free, ..machine() };
            check_vram(&Settings { vram, ..settings() }, &machine, &layers).err().map(|error| error.to_string())
        };
        assert_eq!((refusal(Some(250), 250), refusal(Some(10), 250), refusal(None, 1034)), (None, None, None));
        let said = |vram, free| refusal(vram, free).unwrap();
        assert_eq!(said(Some(251), 250), "--vram 251 MiB: RPC0 has 250 MiB free of 300 MiB; expected at most that");
        assert_eq!(said(Some(9), 250), "--vram 9.0 MiB: the experts of one layer alone take 10 MiB; expected more");
        assert!(said(None, 1024).contains("has 1024 MiB free, of which 1024 MiB are left alone; expected --vram SIZE"));
    }

    #[test]
    fn memory_in_which_there_is_nothing_to_compare_is_refused() {
        let layers: Vec<_> = (0..6).map(|n| layer(n, 10)).collect();
        for (vram, said) in [
            (10, "--vram 10 MiB: the model takes 20 MiB without any expert; expected more"),
            (25, "--vram 25 MiB: not even one layer's experts fit beside the rest; expected at least 30 MiB"),
            (80, "--vram 80 MiB: the whole model takes 80 MiB, so there is nothing to compare; expected less"),
        ] {
            assert_eq!(whole_layers_to_try(&layers, 20.0, vram).unwrap_err().to_string(), said);
        }
    }

    #[test]
    fn the_fastest_of_what_was_tried_is_taken_and_the_cache_gets_the_bytes_of_its_layers() {
        let outcome = |tests: &[Test]| Outcome { tests: tests.to_vec(), ..Outcome::default() };
        let memory = Memory { model_mib: 2.5, context_mib: 10.0, ..Memory::default() };
        let mut steps = BTreeMap::from([
            (Step::Threads.key(), outcome(&[test(1, 999, 2.5, 5.0), test(2, 999, 2.5, 9.0), test(4, 999, 2.5, 7.0)])),
            (Step::Memory.key(), Outcome { memory: Some(memory), ..Outcome::default() }),
        ]);
        let before = tuned(&settings(), &machine(), &steps);
        let stock = Memory { model_mib: 2.5, context_mib: 10.0, ..Memory::default() };
        let error =
            check_one_fits(&[test(2, 2, 95.0, 9.0), test(2, 3, 91.5, 9.0)], &stock, 100).unwrap_err().to_string();
        assert!(error.contains("--vram 100 MiB") && error.contains("took 101.5 MiB at least"), "{error}");
        check_one_fits(&[test(2, 2, 95.0, 9.0), test(2, 3, 90.0, 9.0)], &stock, 100).unwrap();
        assert_eq!((before.threads, before.ubatch, before.cache_mib), (2, 512, 0));
        assert_eq!(before.fit_target_mib, 150, "of 250 free, 100 may be taken");
        // N = 2 is the fastest, but takes more than the 100 MiB that there are.
        let tried = [test(2, 2, 95.0, 99.0), test(2, 3, 80.0, 8.0), test(2, 4, 60.2, 9.0)];
        steps.insert(Step::WholeLayers.key(), outcome(&tried));
        let found = tuned(&settings(), &machine(), &steps);
        assert_eq!((found.n_cpu_moe, found.cache_mib), (4, 58));
        let given = Settings { threads: Some(7), ubatch: Some(64), vram: None, ..settings() };
        let found = tuned(&given, &machine(), &steps);
        assert_eq!((found.threads, found.ubatch), (7, 64));
        assert_eq!(vram_mib(&Settings { vram: None, ..settings() }, &machine()), 0, "1 GiB is left free");
    }
}
