//! Medians, spreads and ratios of runs that were taken in turns.
//!
//! Pure. A value that is missing (a run that is marked) takes its whole pair out of a ratio, and is in no median.

use serde::{Deserialize, Serialize};

/// Several values of one thing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The middle one; of an even number the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
    /// How many there are.
    pub n: usize,
}

impl Spread {
    /// Of finite values; `None` if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let median = match n {
            0 => return None,
            n if n % 2 == 1 => sorted[n / 2],
            n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
        };
        Some(Self { median, least: sorted[0], most: sorted[n - 1], n })
    }
}

/// How many times as fast as the baseline an arm was, pair by pair.
///
/// `is_time`: the values are times, of which the smaller is the faster.
pub fn ratios(arm: &[Option<f64>], baseline: &[Option<f64>], is_time: bool) -> Vec<Option<f64>> {
    let ratio = |(arm, baseline): (&Option<f64>, &Option<f64>)| {
        let (over, under) = if is_time { (*baseline, *arm) } else { (*arm, *baseline) };
        over.zip(under).filter(|&(_, under)| under > 0.0).map(|(over, under)| over / under)
    };
    arm.iter().zip(baseline).map(ratio).collect()
}

/// The index of the largest value; of equal ones the first.
pub fn fastest(speeds: &[f64]) -> Option<usize> {
    let better = |best: Option<usize>, n: usize| match best {
        Some(best) if speeds[best] >= speeds[n] => Some(best),
        _ => Some(n),
    };
    (0..speeds.len()).filter(|&n| speeds[n].is_finite()).fold(None, better)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_known_samples() {
        let odd = Spread::of([3.0, 1.0, 2.0]).unwrap();
        assert_eq!((odd.median, odd.least, odd.most, odd.n), (2.0, 1.0, 3.0, 3));
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(Spread::of([7.0]).unwrap(), Spread { median: 7.0, least: 7.0, most: 7.0, n: 1 });
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([f64::NAN, f64::INFINITY, 5.0]).unwrap().n, 1, "what is no number counts for nothing");
    }

    #[test]
    fn one_slow_run_does_not_move_the_median() {
        assert_eq!(Spread::of([10.0, 10.0, 10.0, 10.0, 0.1]).unwrap().median, 10.0);
    }

    #[test]
    fn ratios_are_of_pairs_and_say_how_many_times_as_fast() {
        let (ours, stock) = ([Some(30.0), Some(10.0), None, Some(4.0)], [Some(20.0), Some(20.0), Some(1.0), None]);
        assert_eq!(ratios(&ours, &stock, false), [Some(1.5), Some(0.5), None, None]);
        assert_eq!(ratios(&ours, &stock, true), [Some(20.0 / 30.0), Some(2.0), None, None]);
        assert_eq!(ratios(&[Some(1.0)], &[Some(0.0)], false), [None], "nothing is divided by zero");
        // The median of ratios is not the ratio of medians: a machine that gets slower slows both of a pair.
        let slower = ratios(&[Some(20.0), Some(10.0), Some(5.0)], &[Some(10.0), Some(5.0), Some(2.5)], false);
        assert_eq!(
            Spread::of(slower.into_iter().flatten()).unwrap(),
            Spread { median: 2.0, least: 2.0, most: 2.0, n: 3 }
        );
    }

    #[test]
    fn the_fastest_wins_and_of_equals_the_first() {
        assert_eq!(fastest(&[1.0, 3.0, 3.0, 2.0]), Some(1));
        assert_eq!(fastest(&[f64::NAN, 1.0]), Some(1));
        assert_eq!(fastest(&[]), None);
    }
}
