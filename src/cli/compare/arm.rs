//! The arms of a comparison: the ways to run one model in the same GPU memory, and the words each program has for them.
//!
//! Pure: knows llama.cpp's flags and ours, starts nothing.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// One way to run the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// Stock llama.cpp with all experts in main memory
    CpuMoe,
    /// Stock with as many whole layers' experts on the GPU as are fastest
    NCpuMoe,
    /// Stock, which places the model by itself
    Fit,
    /// The expert cache of later llama.cpp revisions
    MoeCacheMib,
    /// moe-hot with the experts of a profile, which stay
    HotFixed,
    /// moe-hot that begins with nothing and learns
    HotCold,
    /// moe-hot that begins with a profile and learns
    HotProfile,
}

/// All of them, in the order of tables.
pub const ARMS: [Arm; 7] =
    [Arm::CpuMoe, Arm::NCpuMoe, Arm::Fit, Arm::MoeCacheMib, Arm::HotFixed, Arm::HotCold, Arm::HotProfile];

/// What the tuning has found, the same for all arms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuned {
    /// `-t`.
    pub threads: u16,
    /// `-ub`, tokens.
    pub ubatch: u32,
    /// `--n-cpu-moe`: the fastest of those that fit.
    pub n_cpu_moe: u32,
    /// MiB that the experts of the whole layers take on the device, rounded up: what a cache may take. In a workload that has been
    /// measured with whole layers: what they took there above stock without experts.
    pub cache_mib: u64,
    /// `--fit-target`: MiB of the device that stock leaves free.
    pub fit_target_mib: u64,
}

impl Arm {
    /// Its name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::CpuMoe => "cpu-moe",
            Self::NCpuMoe => "n-cpu-moe",
            Self::Fit => "fit",
            Self::MoeCacheMib => "moe-cache-mib",
            Self::HotFixed => "hot-fixed",
            Self::HotCold => "hot-cold",
            Self::HotProfile => "hot-profile",
        }
    }

    /// What it is, for readers of a table.
    pub fn label(self) -> &'static str {
        match self {
            Self::CpuMoe => "stock --cpu-moe",
            Self::NCpuMoe => "stock --n-cpu-moe, best N",
            Self::Fit => "stock --fit",
            Self::MoeCacheMib => "llama.cpp's --moe-cache-mib",
            Self::HotFixed => "moe-hot, fixed profile",
            Self::HotCold => "moe-hot, learning from cold",
            Self::HotProfile => "moe-hot, learning from a profile",
        }
    }

    /// Whether moe-hot's cache is on.
    pub fn is_ours(self) -> bool {
        matches!(self, Self::HotFixed | Self::HotCold | Self::HotProfile)
    }

    /// Whether it must have the memory of the whole layers, no more and no less.
    pub fn has_equal_memory(self) -> bool {
        self.is_ours() || self == Self::MoeCacheMib
    }

    /// Where the experts go, in llama-bench's words.
    pub fn bench_placement(self, tuned: &Tuned) -> Vec<String> {
        match self {
            Self::Fit => words(&["-fitt", &tuned.fit_target_mib.to_string()]),
            Self::NCpuMoe => words(&["-ngl", ALL_LAYERS, "-ncmoe", &tuned.n_cpu_moe.to_string()]),
            Self::MoeCacheMib => {
                words(&["-ngl", ALL_LAYERS, "-ncmoe", EVERY_BLOCK, "--moe-cache-mib", &tuned.cache_mib.to_string()])
            }
            _ => words(&["-ngl", ALL_LAYERS, "-ncmoe", EVERY_BLOCK]),
        }
    }

    /// Where the experts go, in the words of all other programs.
    pub fn placement(self, tuned: &Tuned) -> Vec<String> {
        match self {
            Self::Fit => words(&["--fit", "on", "--fit-target", &tuned.fit_target_mib.to_string()]),
            Self::NCpuMoe => words(&["--fit", "off", "-ngl", ALL_LAYERS, "--n-cpu-moe", &tuned.n_cpu_moe.to_string()]),
            Self::MoeCacheMib => {
                let mib = tuned.cache_mib.to_string();
                words(&["--fit", "off", "-ngl", ALL_LAYERS, "--cpu-moe", "--moe-cache-mib", &mib])
            }
            _ => words(&["--fit", "off", "-ngl", ALL_LAYERS, "--cpu-moe"]),
        }
    }
}

/// More than any model has.
const ALL_LAYERS: &str = "99";
/// llama-bench has no `--cpu-moe`.
const EVERY_BLOCK: &str = "999";

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TUNED: Tuned = Tuned { threads: 2, ubatch: 512, n_cpu_moe: 3, cache_mib: 6, fit_target_mib: 100 };

    #[test]
    fn names_are_those_of_the_command_line_and_of_files() {
        for arm in ARMS {
            assert_eq!(arm.to_possible_value().unwrap().get_name(), arm.name());
            assert_eq!(serde_json::to_value(arm).unwrap(), arm.name());
        }
    }

    #[test]
    fn only_one_cache_is_ever_on() {
        for arm in ARMS {
            let said = [arm.placement(&TUNED), arm.bench_placement(&TUNED)].concat();
            assert_eq!(said.iter().any(|word| word == "--moe-cache-mib"), arm == Arm::MoeCacheMib);
            assert!(!(arm.is_ours() && arm == Arm::MoeCacheMib));
        }
    }

    #[test]
    fn ours_places_experts_as_stock_without_a_cache_does() {
        for arm in ARMS.into_iter().filter(|arm| arm.is_ours()) {
            assert_eq!(arm.placement(&TUNED), Arm::CpuMoe.placement(&TUNED));
            assert_eq!(arm.bench_placement(&TUNED), Arm::CpuMoe.bench_placement(&TUNED));
        }
    }
}
