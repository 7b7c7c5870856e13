//! What a miss costs: computed on the CPU, or copied now and computed on the device. Learnt from calls as they are.
//!
//! Pure: times are told, in nanoseconds; nothing is measured here. What a copy costs is first learnt from copies in the
//! background, so that a slow bus is never tried out while a token waits.

use crate::units::MissRule;

/// The weight of a new sample. Every layer of every token gives one, so this is about a token's worth of memory.
const WEIGHT: f32 = 0.1;
/// The weight where the new sample is worse than expected: a bus that has become slow must be noticed at once.
const WEIGHT_OF_BAD_NEWS: f32 = 0.5;
/// Where every miss is copied, one is left to the CPU after so many calls: that may have become the cheaper way. (Where
/// none is copied, copies in the background tell.)
const PROBE_EVERY: u32 = 128;
/// The weight of a copy in the background.
const WEIGHT_OF_BACKGROUND: f32 = 0.3;

/// A cost that is only known to be below some bound is taken for this share of it.
const SHARE_OF_BOUND: f32 = 0.8;

/// An average that follows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Average(Option<f32>);

impl Average {
    fn add(&mut self, sample: f32, weight: f32) {
        self.0 = Some(self.0.map_or(sample, |old| old + weight * (sample - old)));
    }
}

/// One single-token call of a layer, afterwards.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Experts that the CPU computed.
    pub n_cold: usize,
    /// Nanoseconds that it took for them.
    pub cold_ns: f32,
    /// Experts that were copied first and computed on the device.
    pub n_copied: usize,
    /// Nanoseconds from the launch until the device was known to be done.
    pub device_ns: f32,
    /// Whether the device was waited for: if not, it was done earlier than `device_ns` says.
    pub waited: bool,
    /// Whether copies in the background were under way when it was launched.
    pub beside_copies: bool,
}

/// Moving averages of both costs, of one device.
#[derive(Clone, Debug, Default)]
pub struct MissCosts {
    /// Nanoseconds per expert on the CPU.
    cpu: Average,
    /// Nanoseconds per expert for a copy and the computation on the device.
    copy: Average,
    /// Nanoseconds of the host's part of a copy: reading an expert into the staging ring.
    staging: Average,
    /// Nanoseconds of the device without copies.
    device: Average,
    /// Nanoseconds that a call takes longer where copies in the background are under way: they share the bus.
    delay: Average,
    /// Calls beside a copy in the background.
    delayed_calls: Average,
    /// Those since the last copy.
    delayed_since_copy: u32,
    calls_since_probe: u32,
}

impl MissCosts {
    /// How many of `n_missed` experts to copy at once, if there are `n_spare` slots for them.
    pub fn choose(&mut self, rule: MissRule, n_missed: usize, n_spare: usize) -> usize {
        let most = n_missed.min(n_spare);
        match rule {
            MissRule::Cpu => 0,
            MissRule::Copy => most,
            MissRule::Auto if most == 0 => 0,
            MissRule::Auto => self.choose_cheapest(n_missed, most),
        }
    }

    fn choose_cheapest(&mut self, n_missed: usize, most: usize) -> usize {
        let (Some(cpu), Some(copy)) = (self.cpu.0, self.copy.0) else { return 0 };
        // Both lanes work at once: the layer takes as long as the slower one.
        let device = self.device.0.unwrap_or(0.0);
        let time = |copied: usize| {
            let on_device = if copied == 0 { 0.0 } else { device + copied as f32 * copy };
            on_device.max((n_missed - copied) as f32 * cpu)
        };
        let best = (0..=most).min_by(|&a, &b| time(a).total_cmp(&time(b))).unwrap_or(0);
        self.calls_since_probe = if best == n_missed { self.calls_since_probe + 1 } else { 0 };
        if self.calls_since_probe < PROBE_EVERY {
            return best;
        }
        self.calls_since_probe = 0;
        best - 1
    }

    /// Learns from a copy in the background: how long the host was at it, and how long it took from start to end (`None` if
    /// it waited for others, which says nothing).
    pub fn learn_background(&mut self, staging_ns: f32, copy_ns: Option<f32>) {
        self.staging.add(staging_ns, WEIGHT_OF_BACKGROUND);
        self.delayed_calls.add(std::mem::take(&mut self.delayed_since_copy) as f32, WEIGHT_OF_BACKGROUND);
        if let Some(copy_ns) = copy_ns {
            self.copy.add(copy_ns, WEIGHT_OF_BACKGROUND);
        }
    }

    /// Learns from a call.
    pub fn learn(&mut self, call: &Call) {
        if call.n_cold > 0 {
            self.cpu.add(call.cold_ns / call.n_cold as f32, WEIGHT);
        }
        if call.beside_copies {
            self.delayed_since_copy += 1;
        }
        match (call.n_copied, call.waited) {
            (0, waited) if call.beside_copies => {
                // A device that is done before the CPU delays nobody.
                if let Some(device) = self.device.0 {
                    self.delay.add(if waited { call.device_ns - device } else { 0.0 }, WEIGHT);
                }
            }
            (0, true) => self.device.add(call.device_ns, WEIGHT),
            (0, false) => {}
            (n, waited) => {
                let sample = (call.device_ns - self.device.0.unwrap_or(0.0)).max(0.0) / n as f32;
                if waited {
                    let is_worse = self.copy.0.is_none_or(|old| sample > old);
                    self.copy.add(sample, if is_worse { WEIGHT_OF_BAD_NEWS } else { WEIGHT });
                } else {
                    // It took less than this. How much less is found out by copying more until the device is waited for.
                    self.copy.0 = Some(SHARE_OF_BOUND * self.copy.0.map_or(sample, |old| old.min(sample)));
                }
            }
        }
    }

    /// The price of a copy in the background against that of a miss, for admission. `None` as long as one is unknown.
    ///
    /// Such a copy is not waited for. What it takes from tokens is the host's part, which moves an expert's bytes through the
    /// memory that the CPU computes from, and the time that calls wait longer for the device since their rows share the bus
    /// with it. How long it is under way costs nothing else (it makes copies late, which is told apart).
    pub fn copy_in_misses(&self) -> Option<f32> {
        let bus = self.delay.0.map_or(0.0, |delay| delay.max(0.0) * self.delayed_calls.0.unwrap_or(0.0));
        match (self.staging.0, self.cpu.0) {
            (Some(staging), Some(cpu)) if cpu > 0.0 => Some((staging + bus) / cpu),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which an expert takes the CPU and the bus this long.
    struct Machine {
        cpu_ns: f32,
        copy_ns: f32,
    }

    impl Machine {
        fn call(&self, n_missed: usize, n_copied: usize) -> Call {
            let n_cold = n_missed - n_copied;
            let (cold_ns, busy) = (n_cold as f32 * self.cpu_ns, n_copied as f32 * self.copy_ns);
            Call {
                n_cold,
                cold_ns,
                n_copied,
                device_ns: busy.max(cold_ns),
                waited: busy >= cold_ns,
                beside_copies: false,
            }
        }

        fn run(&self, costs: &mut MissCosts, rule: MissRule, n_calls: usize) -> f32 {
            const MISSED: usize = 6;
            let mut total = 0.0;
            for n in 0..n_calls {
                if n % 50 == 0 {
                    costs.learn_background(0.0, Some(self.copy_ns));
                }
                let call = self.call(MISSED, costs.choose(rule, MISSED, MISSED));
                costs.learn(&call);
                total += call.device_ns.max(call.cold_ns);
            }
            total / n_calls as f32
        }
    }

    const FAST_BUS: Machine = Machine { cpu_ns: 100e3, copy_ns: 34e3 };
    const SLOW_BUS: Machine = Machine { cpu_ns: 100e3, copy_ns: 840e3 };
    /// Layer calls of 50 tokens in a model of 12 layers.
    const FIFTY_TOKENS: usize = 600;

    #[test]
    fn auto_is_no_worse_than_the_better_of_both_rules_before_and_after_the_bus_slows_down() {
        let mut costs = MissCosts::default();
        for machine in [FAST_BUS, SLOW_BUS, FAST_BUS] {
            machine.run(&mut costs, MissRule::Auto, FIFTY_TOKENS);
            let auto = machine.run(&mut costs, MissRule::Auto, FIFTY_TOKENS);
            let rules = [MissRule::Cpu, MissRule::Copy];
            let better = rules
                .map(|rule| machine.run(&mut costs.clone(), rule, FIFTY_TOKENS))
                .into_iter()
                .fold(f32::MAX, f32::min);
            assert!(auto <= 1.05 * better, "auto {auto}, the better of both {better}");
        }
    }

    #[test]
    fn a_slow_bus_is_noticed_within_a_token() {
        let mut costs = MissCosts::default();
        FAST_BUS.run(&mut costs, MissRule::Auto, FIFTY_TOKENS);
        for _ in 0..3 {
            let n_copied = costs.choose(MissRule::Auto, 6, 6);
            costs.learn(&SLOW_BUS.call(6, n_copied));
        }
        assert_eq!(costs.choose(MissRule::Auto, 6, 6), 0);
    }

    #[test]
    fn nothing_is_copied_while_a_token_waits_before_a_copy_has_been_timed_in_the_background() {
        let mut costs = MissCosts::default();
        costs.learn(&FAST_BUS.call(6, 0));
        assert_eq!(costs.choose(MissRule::Auto, 6, 6), 0);
        costs.learn_background(0.0, Some(FAST_BUS.copy_ns));
        assert!(costs.choose(MissRule::Auto, 6, 6) > 0);
    }

    #[test]
    fn a_slow_bus_is_never_tried_out_while_a_token_waits() {
        let mut costs = MissCosts::default();
        let second = Machine { cpu_ns: 100e3, copy_ns: 1e9 };
        costs.learn_background(0.0, Some(second.copy_ns));
        assert!((0..10_000).all(|_| {
            let n_copied = costs.choose(MissRule::Auto, 6, 6);
            costs.learn(&second.call(6, n_copied));
            n_copied == 0
        }));
    }

    #[test]
    fn both_lanes_share_the_misses_when_both_help() {
        let mut costs = MissCosts::default();
        let even = Machine { cpu_ns: 100e3, copy_ns: 100e3 };
        even.run(&mut costs, MissRule::Auto, FIFTY_TOKENS);
        assert_eq!(costs.choose(MissRule::Auto, 6, 6), 3);
    }

    #[test]
    fn a_copy_in_the_background_is_priced_by_what_it_takes_from_the_host() {
        let mut costs = MissCosts::default();
        costs.learn_background(25e3, Some(1e9));
        assert_eq!(costs.copy_in_misses(), None, "what a miss costs is not known");
        costs.learn(&FAST_BUS.call(6, 0));
        assert_eq!(costs.copy_in_misses(), Some(0.25));
    }

    #[test]
    fn a_copy_in_the_background_is_priced_by_what_it_takes_from_the_bus_too() {
        let mut costs = MissCosts::default();
        let call = |device_ns, waited, beside_copies| Call {
            n_cold: 1,
            cold_ns: 100e3,
            n_copied: 0,
            device_ns,
            waited,
            beside_copies,
        };
        costs.learn(&call(120e3, true, false));
        let copies = |costs: &mut MissCosts, device_ns, waited| {
            for _ in 0..30 {
                (0..4).for_each(|_| costs.learn(&call(device_ns, waited, true)));
                costs.learn_background(20e3, None);
            }
            costs.copy_in_misses().unwrap()
        };
        let price = copies(&mut costs, 170e3, true);
        assert!((price - (20.0 + 4.0 * 50.0) / 100.0).abs() < 0.05, "four calls wait 50 µs longer each: {price}");
        let price = copies(&mut costs, 90e3, false);
        assert!((price - 0.2).abs() < 0.05, "the device is done before the CPU: {price}");
    }

    #[test]
    fn rules_and_spare_slots_bound_the_choice() {
        let mut costs = MissCosts::default();
        assert_eq!(costs.choose(MissRule::Cpu, 6, 6), 0);
        assert_eq!(costs.choose(MissRule::Copy, 6, 2), 2);
        assert_eq!(costs.choose(MissRule::Auto, 6, 0), 0);
        assert_eq!(costs.choose(MissRule::Copy, 0, 4), 0);
    }
}
