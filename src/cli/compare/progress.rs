//! How far the comparison is and how long it will take: a bar on a terminal, else a line for each step.

use super::steps::Step;
use crate::cli::output::tell;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, stderr};
use std::time::Duration;

const TICK_INTERVAL: Duration = Duration::from_millis(500);
const STYLE: &str = "{bar:24} {pos}/{len}  {msg}  [{elapsed}]";

/// Where we are in the plan.
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: Vec<Step>,
    /// Seconds of each step that is finished, in this call or an earlier one.
    seconds: Vec<Option<f64>>,
}

impl Progress {
    /// `seconds`: of the steps that are finished already.
    pub fn new(steps: Vec<Step>, seconds: Vec<Option<f64>>) -> Self {
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(steps.len() as u64), ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template(STYLE) {
                bar.set_style(style);
            }
            bar.enable_steady_tick(TICK_INTERVAL);
            bar
        });
        Self { bar, steps, seconds }
    }

    /// Says what is done next.
    pub fn begin(&self, number: usize) {
        let Some(step) = self.steps.get(number) else { return };
        let (pair, arm) = step.place();
        let pair = pair.map(|pair| format!("pair {}, ", pair + 1)).unwrap_or_default();
        let arm = arm.map(|arm| format!("{}: ", arm.label())).unwrap_or_default();
        let left = match left(&self.steps, &self.seconds) {
            Some(seconds) => format!("; {} left", rounded(seconds)),
            None => String::new(),
        };
        let text = format!("{pair}{arm}{}{left}", step.what());
        match &self.bar {
            Some(bar) => {
                bar.set_position(number as u64);
                bar.set_message(text);
            }
            None => tell(&format!("{}/{} {text}", number + 1, self.steps.len())),
        }
    }

    /// A step is finished.
    pub fn finish(&mut self, number: usize, seconds: f64) {
        if let Some(taken) = self.seconds.get_mut(number) {
            *taken = Some(seconds);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Seconds that all unfinished steps will take: as long as finished ones of their kind; `None` while those with the most steps,
/// llama-bench's and the server's, have not been seen.
fn left(steps: &[Step], seconds: &[Option<f64>]) -> Option<f64> {
    let known = |step: Step| {
        let like: Vec<f64> = steps
            .iter()
            .zip(seconds)
            .filter(|(other, _)| step.is_like(**other))
            .filter_map(|(_, taken)| *taken)
            .collect();
        (!like.is_empty()).then(|| like.iter().sum::<f64>() / like.len() as f64)
    };
    let waiting = || steps.iter().zip(seconds).filter(|(_, taken)| taken.is_none()).map(|(step, _)| *step);
    let is_main = |step: &Step| matches!(step, Step::Bench(..) | Step::Server(..));
    if waiting().filter(is_main).any(|step| known(step).is_none()) {
        return None;
    }
    Some(waiting().filter_map(known).sum())
}

/// `1h 5m`, `12m`, `40s`: no more exact than it is known.
fn rounded(seconds: f64) -> String {
    let whole = seconds.ceil() as u64;
    let unit = if whole >= 600 {
        60
    } else if whole >= 60 {
        10
    } else {
        1
    };
    humantime::format_duration(Duration::from_secs(whole.div_ceil(unit) * unit)).to_string()
}

#[cfg(test)]
mod tests {
    use super::super::arm::Arm;
    use super::*;

    #[test]
    fn the_time_left_is_that_of_steps_of_the_same_kind() {
        let steps = [
            Step::Memory,
            Step::Bench(0, Arm::CpuMoe),
            Step::Bench(0, Arm::Fit),
            Step::Server(0, Arm::CpuMoe),
            Step::Server(0, Arm::Fit),
            Step::Logits(Arm::Fit),
        ];
        assert_eq!(left(&steps, &[Some(1.0), None, None, None, None, None]), None);
        assert_eq!(left(&steps, &[Some(1.0), Some(10.0), None, None, None, None]), None);
        assert_eq!(left(&steps, &[Some(1.0), Some(10.0), None, Some(20.0), None, None]), Some(30.0));
        assert_eq!(left(&steps, &[Some(1.0); 6]), Some(0.0));
        assert_eq!([rounded(3.2), rounded(61.0), rounded(3900.0)], ["4s", "1m 10s", "1h 5m"]);
    }
}
