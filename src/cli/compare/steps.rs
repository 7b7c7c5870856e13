//! The plan: which steps there are and in which order.
//!
//! Pure. Stock is tuned first, then a profile is recorded and stock's answers are taken, then all arms run in turns; every
//! second pair in the opposite order, so that a machine that warms up or slows down favours nobody.

use super::arm::Arm;
use super::settings::Settings;

/// One thing to do, whose result is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Which number of threads decodes fastest.
    Threads,
    /// Which ubatch reads a prompt fastest.
    Ubatch,
    /// What stock takes on the device without experts there.
    Memory,
    /// Which of the `--n-cpu-moe N` that fit is fastest.
    WholeLayers,
    /// A profile, from prompts that are not measured.
    Record,
    /// Stock's answers, which all others are compared with.
    Reference,
    /// llama-bench.
    Bench(u32, Arm),
    /// Prompts through llama-server.
    Server(u32, Arm),
    /// Times of layers, in a run of its own, since taking them takes time.
    Waits(Arm),
    /// Stock's logits.
    LogitsBase,
    /// An arm's logits against stock's.
    Logits(Arm),
}

impl Step {
    /// Its name in `results.json`; a file may be called so.
    pub fn key(self) -> String {
        match self {
            Self::Threads => "tune-threads".into(),
            Self::Ubatch => "tune-ubatch".into(),
            Self::Memory => "tune-memory".into(),
            Self::WholeLayers => "tune-whole-layers".into(),
            Self::Record => "record".into(),
            Self::Reference => "reference".into(),
            Self::Bench(pair, arm) => format!("bench-{pair}-{}", arm.name()),
            Self::Server(pair, arm) => format!("server-{pair}-{}", arm.name()),
            Self::Waits(arm) => format!("waits-{}", arm.name()),
            Self::LogitsBase => "logits-base".into(),
            Self::Logits(arm) => format!("logits-{}", arm.name()),
        }
    }

    /// What is done, for a list and the progress bar.
    pub fn what(self) -> String {
        match self {
            Self::Threads => "tune stock: threads".into(),
            Self::Ubatch => "tune stock: ubatch size".into(),
            Self::Memory => "stock's memory without experts".into(),
            Self::WholeLayers => "tune stock: --n-cpu-moe N, of those that fit".into(),
            Self::Record => "record a profile".into(),
            Self::Reference => "stock's answers, to compare with".into(),
            Self::Bench(_, _) => "llama-bench".into(),
            Self::Server(_, _) => "prompts through llama-server".into(),
            Self::Waits(_) => "times of layers".into(),
            Self::LogitsBase => "stock's logits".into(),
            Self::Logits(_) => "logits against stock's".into(),
        }
    }

    /// Pair and arm, where it has them.
    pub fn place(self) -> (Option<u32>, Option<Arm>) {
        match self {
            Self::Bench(pair, arm) | Self::Server(pair, arm) => (Some(pair), Some(arm)),
            Self::Waits(arm) | Self::Logits(arm) => (None, Some(arm)),
            _ => (None, None),
        }
    }

    /// Steps of one kind take about the same time.
    pub fn is_like(self, other: Self) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

/// All steps. `says_times`: whether the server can say what its layers wait for.
pub fn steps(settings: &Settings, says_times: bool) -> Vec<Step> {
    let mut steps = Vec::new();
    if settings.threads.is_none() {
        steps.push(Step::Threads);
    }
    if settings.ubatch.is_none() {
        steps.push(Step::Ubatch);
    }
    // The server's memory counts too, and the answers show it.
    steps.extend([Step::Memory, Step::Reference, Step::WholeLayers]);
    if settings.arms.iter().any(|arm| matches!(arm, Arm::HotFixed | Arm::HotProfile)) {
        steps.push(Step::Record);
    }
    for pair in 0..settings.pairs {
        let mut arms = settings.arms.clone();
        if pair % 2 == 1 {
            arms.reverse();
        }
        steps.extend(arms.iter().map(|&arm| Step::Bench(pair, arm)));
        steps.extend(arms.iter().map(|&arm| Step::Server(pair, arm)));
    }
    if says_times {
        steps.extend(settings.arms.iter().filter(|arm| arm.is_ours()).map(|&arm| Step::Waits(arm)));
    }
    steps.push(Step::LogitsBase);
    steps.extend(settings.arms.iter().map(|&arm| Step::Logits(arm)));
    steps
}

#[cfg(test)]
mod tests {
    use super::super::settings::testing::settings;
    use super::*;
    use std::collections::BTreeSet;

    fn arms_of(steps: &[Step], pair: u32) -> Vec<Arm> {
        steps
            .iter()
            .filter_map(|step| if let Step::Bench(p, arm) = step { (*p == pair).then_some(*arm) } else { None })
            .collect()
    }

    #[test]
    fn every_arm_runs_once_in_every_pair_and_the_order_alternates() {
        let steps = steps(&settings(), false);
        let (first, mut second) = (arms_of(&steps, 0), arms_of(&steps, 1));
        assert_eq!(first, settings().arms);
        second.reverse();
        assert_eq!(first, second);
        assert_eq!(steps.iter().filter(|step| matches!(step, Step::Server(..))).count(), 2 * first.len());
    }

    #[test]
    fn stock_is_tuned_before_anything_is_measured() {
        let steps = steps(&settings(), false);
        let place = |wanted: Step| steps.iter().position(|&step| step == wanted).unwrap();
        let first_run = place(Step::Bench(0, Arm::CpuMoe));
        for tuning in [Step::Threads, Step::Ubatch, Step::Memory, Step::WholeLayers, Step::Record, Step::Reference] {
            assert!(place(tuning) < first_run, "{tuning:?}");
        }
        assert!(place(Step::Threads) < place(Step::Memory) && place(Step::Memory) < place(Step::WholeLayers));
        assert!(place(Step::Reference) < place(Step::WholeLayers));
        assert!(place(Step::LogitsBase) < place(Step::Logits(Arm::CpuMoe)));
    }

    #[test]
    fn what_is_given_is_not_tuned_and_what_is_not_used_is_not_recorded() {
        let given =
            Settings { threads: Some(2), ubatch: Some(512), arms: vec![Arm::NCpuMoe, Arm::HotCold], ..settings() };
        let steps = steps(&given, true);
        for absent in [Step::Threads, Step::Ubatch, Step::Record] {
            assert!(!steps.contains(&absent), "{absent:?}");
        }
        assert!(steps.contains(&Step::Waits(Arm::HotCold)) && !steps.contains(&Step::Waits(Arm::NCpuMoe)));
    }

    #[test]
    fn every_step_has_a_key_of_its_own_that_can_be_a_files_name() {
        let steps = steps(&settings(), true);
        let keys: BTreeSet<_> = steps.iter().map(|step| step.key()).collect();
        assert_eq!(keys.len(), steps.len());
        assert!(keys.iter().all(|key| key.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')));
    }
}
