//! What makes a comparison unfair, and is refused: another llama.cpp in one of the arms, or more or less memory.
//!
//! Pure. The device's own figures are taken where they are steady; else what llama.cpp and moe-hot say that they took.

use super::outcome::Memory;
use anyhow::{Result, ensure};

/// Memory may differ by this share ...
const MOST_APART: f64 = 0.02;
/// ... or by what our line rounds to, MiB.
const RESOLUTION_MIB: f64 = 1.0;
/// The device's own figure counts if what was free before and after differs by no more than this share of it ...
const MOST_NOISE: f64 = 0.01;
/// ... and if it is not so small, MiB, that what the driver takes decides.
const LEAST_DEVICE_MIB: i64 = 256;
/// Characters of a commit that are compared.
const COMMIT: usize = 7;

/// Two figures of memory, MiB, from the same source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compared {
    /// Of the arm.
    pub arm_mib: f64,
    /// Of the whole layers.
    pub baseline_mib: f64,
    /// Whether the device itself says so.
    pub by_device: bool,
}

impl Compared {
    /// Chooses the source.
    pub fn of(arm: &Memory, baseline: &Memory) -> Self {
        let by_device = |memory: &Memory| {
            let (used, noise) = memory.device_mib.zip(memory.device_noise_mib)?;
            let is_steady = used >= LEAST_DEVICE_MIB && noise.abs() as f64 <= MOST_NOISE * used as f64;
            is_steady.then_some(used as f64)
        };
        match by_device(arm).zip(by_device(baseline)) {
            Some((arm_mib, baseline_mib)) => Self { arm_mib, baseline_mib, by_device: true },
            None => Self { arm_mib: arm.said_mib(), baseline_mib: baseline.said_mib(), by_device: false },
        }
    }

    /// Refuses memory that is not equal. `slot_mib`: one slot in every layer, by which a cache cannot come closer: with less
    /// than the whole layers have it is at a disadvantage, which is fair.
    pub fn check(&self, name: &str, slot_mib: f64) -> Result<()> {
        let apart = self.arm_mib - self.baseline_mib;
        let allowed = (MOST_APART * self.baseline_mib).max(RESOLUTION_MIB);
        let is_fair = apart <= allowed && -apart <= allowed + slot_mib;
        ensure!(
            is_fair,
            "{name} took {:.1} MiB of the device, {:+.1} % of the {:.1} MiB of --n-cpu-moe ({}); expected at most {:.0} % apart, \
             since anything else is no fair comparison",
            self.arm_mib,
            100.0 * apart / self.baseline_mib,
            self.baseline_mib,
            if self.by_device { "by the device's own figures" } else { "by what llama.cpp and moe-hot say" },
            100.0 * MOST_APART,
        );
        Ok(())
    }
}

/// The commit in a version such as `0.5.0 (build 11312, commit 0c1e57098)` or `11312 (0c1e57098)`; `None` where it names none.
fn commit(version: &str) -> Option<&str> {
    let mut words = version.split(|c: char| !c.is_ascii_alphanumeric());
    let is_commit = |word: &&str| word.len() >= COMMIT && word.chars().all(|c| c.is_ascii_hexdigit());
    words.rfind(is_commit).map(|commit| &commit[..COMMIT])
}

/// Refuses a run of another llama.cpp than the comparison began with.
pub fn check_revision(name: &str, began_with: &str, ran: &str) -> Result<()> {
    let (Some(expected), Some(found)) = (commit(began_with), commit(ran)) else { return Ok(()) };
    ensure!(
        expected == found,
        "{name} ran in llama.cpp {ran}, and the comparison began with {began_with}; expected one revision for all arms"
    );
    Ok(())
}

/// Refuses a run on another device than earlier runs.
pub fn check_device(name: &str, earlier: Option<&str>, ran: Option<&str>) -> Result<()> {
    let (Some(expected), Some(found)) = (earlier, ran) else { return Ok(()) };
    ensure!(
        expected == found,
        "{name} ran on the device {found}, and the comparison began on {expected}; expected one device for all runs, or another --output"
    );
    Ok(())
}

/// Refuses programs of different revisions.
pub fn check_programs(versions: &[(String, Option<String>)]) -> Result<()> {
    let known: Vec<_> = versions.iter().filter_map(|(name, version)| Some((name, version.as_ref()?))).collect();
    if let Some(((first, expected), rest)) = known.split_first() {
        for (name, version) in rest {
            ensure!(
                version == expected,
                "{name} is llama.cpp {version}, and {first} is {expected}; expected programs of one revision (--programs DIR)"
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(mib: f64) -> Memory {
        Memory { model_mib: mib, ..Memory::default() }
    }

    fn check(arm: &Memory, baseline: &Memory, slot_mib: f64) -> Result<()> {
        Compared::of(arm, baseline).check("moe-hot", slot_mib)
    }

    #[test]
    fn memory_that_is_off_by_more_than_two_percent_is_refused() {
        let baseline = said(1000.0);
        for fair in [1000.0, 1019.0, 981.0] {
            check(&said(fair), &baseline, 0.0).unwrap();
        }
        for unfair in [1021.0, 979.0] {
            let error = check(&said(unfair), &baseline, 0.0).unwrap_err().to_string();
            assert!(error.contains("moe-hot took") && error.contains("at most 2 % apart"), "{error}");
        }
        let error = check(&said(1021.0), &baseline, 0.0).unwrap_err().to_string();
        assert!(error.contains("1021.0 MiB of the device, +2.1 % of the 1000.0 MiB"), "{error}");
    }

    #[test]
    fn a_cache_may_have_less_by_what_one_slot_per_layer_takes_and_never_more() {
        check(&said(930.0), &said(1000.0), 60.0).unwrap();
        assert!(check(&said(910.0), &said(1000.0), 60.0).is_err());
        assert!(check(&said(1030.0), &said(1000.0), 60.0).is_err());
    }

    #[test]
    fn small_models_may_differ_by_the_mib_that_our_line_rounds_to() {
        check(&said(13.9), &said(13.0), 0.0).unwrap();
        assert!(check(&said(14.1), &said(13.0), 0.0).is_err());
    }

    #[test]
    fn the_devices_own_figures_decide_where_they_are_steady() {
        let device = |said_mib: f64, used: i64, noise: i64| Memory {
            device_mib: Some(used),
            device_noise_mib: Some(noise),
            ..said(said_mib)
        };
        // What is said is equal, what is taken is not.
        let error = check(&device(1000.0, 1100, 2), &device(1000.0, 1000, -3), 0.0).unwrap_err().to_string();
        assert!(error.contains("by the device's own figures"), "{error}");
        // Other programs come and go: their memory says nothing.
        check(&device(1000.0, 1100, 200), &device(1000.0, 1000, 0), 0.0).unwrap();
        check(&device(100.0, 110, 0), &device(100.0, 100, 0), 0.0).unwrap();
        assert!(!Compared::of(&device(1.0, 1000, 0), &said(1.0)).by_device, "both or none");
    }

    #[test]
    fn another_device_is_refused() {
        let [first, second] = ["(GPU) (0000:01:00.0)", "(GPU) (0000:02:00.0)"];
        for (earlier, ran) in [(Some(first), Some(first)), (None, Some(first)), (Some(first), None)] {
            check_device("stock", earlier, ran).unwrap();
        }
        let error = check_device("stock", Some(first), Some(second)).unwrap_err().to_string();
        assert!(error.contains("0000:02:00.0") && error.contains("one device for all runs"), "{error}");
    }

    #[test]
    fn another_revision_is_refused() {
        let began = "0.5.0-dev (build 11312, commit 0c1e57098)";
        for same in ["11312 (0c1e57098)", "b11312-0c1e57098", "0 (unknown)"] {
            check_revision("stock", began, same).unwrap();
        }
        let error = check_revision("moe-hot", began, "11434 (79c1160b0)").unwrap_err().to_string();
        assert!(error.contains("moe-hot ran in llama.cpp 11434") && error.contains("one revision"), "{error}");
        let version = |text: &str| Some(text.to_owned());
        let programs = [("a".to_owned(), version("1 (x)")), ("b".to_owned(), None), ("c".to_owned(), version("2 (y)"))];
        let error = check_programs(&programs).unwrap_err().to_string();
        assert!(error.contains("c is llama.cpp 2 (y), and a is 1 (x)"), "{error}");
        check_programs(&programs[..2]).unwrap();
    }
}
