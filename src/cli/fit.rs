//! Room for the cache where llama.cpp fits a model to its devices by itself (`--fit`): we raise what is to be left free.
//!
//! llama.cpp fits before it loads anything, and knows nothing of a cache that is filled later.

use super::devices::Device;
use crate::options::host::{DEVICE, FIT, FIT_TARGET, Settings, Syntax, is_no, whole_number};
use crate::options::{Budget, Config};

/// llama.cpp's own default of `--fit-target`.
const DEFAULT_TARGET_MIB: u64 = 1024;
/// An automatic cache is expected to take at most this share of what is free: the rest of the model wants room too.
const AUTOMATIC_SHARE: u64 = 2;
const MIB: u64 = 1 << 20;

/// What the program's own help says of fitting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fitting {
    /// It does not.
    Never,
    /// Where `--fit-target` is given; values in a list are tests of their own (llama-bench).
    OnDemand,
    /// Unless it is told not to; values in a list are for devices.
    Automatic,
}

impl Fitting {
    /// Whether and when a program fits a model to its devices.
    pub fn of(syntax: &Syntax) -> Self {
        match (syntax.knows("--fit-target"), syntax.knows("--fit")) {
            (false, _) => Self::Never,
            (true, false) => Self::OnDemand,
            (true, true) => Self::Automatic,
        }
    }
}

/// What the program must leave free, in MiB, in the place of what the user says; `None` to change nothing.
pub fn target(
    fitting: Fitting,
    settings: &Settings,
    config: &Config,
    devices: &[Device],
    expert_bytes: Option<u64>,
) -> Option<Vec<u64>> {
    let given = match fitting {
        Fitting::Never => return None,
        Fitting::OnDemand => {
            let tests: Vec<_> = settings.all(&FIT_TARGET).map(|value| value.to_string_lossy()).collect();
            Some(tests.join(",")).filter(|tests| !tests.is_empty())?
        }
        Fitting::Automatic if settings.last(&FIT).is_some_and(is_no) => return None,
        Fitting::Automatic => match settings.last(&FIT_TARGET) {
            Some(value) => value.to_str()?.to_owned(),
            None => DEFAULT_TARGET_MIB.to_string(),
        },
    };
    if !config.caches() {
        return None;
    }
    let hot = hot_device(config.device.as_deref(), devices)?;
    let extra = wanted_mib(config.max_mib, hot, expert_bytes)?;
    let position = if fitting == Fitting::Automatic { position(hot, settings, devices) } else { None };
    raise(&given, position, extra)
}

/// One `--fit-target` for all: where several models are told different ones, the largest of each device.
pub fn join(targets: Vec<Vec<u64>>) -> Option<String> {
    let larger = |a: Vec<u64>, b: Vec<u64>| {
        let at = |values: &[u64], n: usize| match values {
            [one] => *one, // is for all devices
            values => values.get(n).copied().unwrap_or(DEFAULT_TARGET_MIB),
        };
        (0..a.len().max(b.len())).map(|n| at(&a, n).max(at(&b, n))).collect()
    };
    let joined = targets.into_iter().reduce(larger)?;
    Some(joined.iter().map(u64::to_string).collect::<Vec<_>>().join(","))
}

/// How the names of devices on other machines begin.
const REMOTE: &str = "RPC";

/// The device that will hold the cache: the one that is named, else the first with memory that is in this machine.
fn hot_device<'a>(name: Option<&str>, devices: &'a [Device]) -> Option<&'a Device> {
    match name {
        Some(name) => devices.iter().find(|device| device.name == name),
        None => devices.iter().find(|device| device.total_mib > 0 && !device.name.starts_with(REMOTE)),
    }
}

/// MiB that the cache will want of the device.
fn wanted_mib(budget: Budget, hot: &Device, expert_bytes: Option<u64>) -> Option<u64> {
    match budget {
        Budget::Off => None,
        Budget::Mib(mib) => Some(mib),
        Budget::Automatic => {
            let share = hot.free_mib / AUTOMATIC_SHARE;
            Some(expert_bytes.map_or(share, |bytes| share.min(bytes.div_ceil(MIB)))).filter(|&mib| mib > 0)
        }
    }
}

/// Which of the model's devices it is, where that is certain.
fn position(hot: &Device, settings: &Settings, devices: &[Device]) -> Option<usize> {
    match settings.last(&DEVICE) {
        Some(list) => list.to_str()?.split(',').position(|name| name.eq_ignore_ascii_case(&hot.name)),
        None => (devices.len() == 1).then_some(0), // llama.cpp sorts several in its own way
    }
}

/// The given list, separated by `,` or `/`, with `extra` added where the hot device is, or else everywhere.
///
/// `None` where the list is not one: the program will say so.
fn raise(given: &str, position: Option<usize>, extra: u64) -> Option<Vec<u64>> {
    let mut values: Vec<_> = given.split([',', '/']).collect();
    values.pop_if(|last| last.is_empty()); // llama.cpp takes several separators for one, and one at the end for none
    let is_list = |(n, value): &(usize, &str)| *n == 0 || !value.is_empty();
    let values = values.into_iter().enumerate().filter(is_list).map(|(_, value)| whole_number(value));
    let mut values = values.collect::<Option<Vec<u64>>>()?;
    match position {
        Some(position) if values.len() > 1 => {
            values.resize(values.len().max(position + 1), DEFAULT_TARGET_MIB);
            values[position] = values[position].saturating_add(extra);
        }
        _ => values.iter_mut().for_each(|value| *value = value.saturating_add(extra)),
    }
    Some(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::CacheProfile;
    use crate::options::host::Source;
    use std::ffi::OsString;

    fn device(name: &str, free_mib: u64) -> Device {
        Device { name: name.into(), description: "x".into(), total_mib: 24_000, free_mib }
    }

    fn config(max_mib: Option<Budget>, device: Option<&str>) -> Config {
        let none = Config::from_lookup(|_| None);
        let max_mib = max_mib.unwrap_or_default();
        Config { hot_cache: Some(CacheProfile::Auto), max_mib, device: device.map(Into::into), ..none }
    }

    fn settings(text: &str) -> Settings {
        let args: Vec<_> = text.split_whitespace().map(OsString::from).collect();
        Source { syntax: &Syntax::default(), args: &args }.targets().remove(0).settings
    }

    fn of(
        fitting: Fitting,
        text: &str,
        config: &Config,
        devices: &[Device],
        experts_mib: Option<u64>,
    ) -> Option<String> {
        let target = target(fitting, &settings(text), config, devices, experts_mib.map(|mib| mib * MIB));
        join(target.into_iter().collect())
    }

    fn automatic(text: &str, config: &Config, devices: &[Device], experts_mib: Option<u64>) -> Option<String> {
        of(Fitting::Automatic, text, config, devices, experts_mib)
    }

    #[test]
    fn a_given_size_is_left_free_on_top_of_the_target() {
        let config = config(Some(Budget::Mib(700)), None);
        let gpu = [device("CUDA0", 8000)];
        assert_eq!(automatic("", &config, &gpu, None).unwrap(), "1724");
        assert_eq!(automatic("-fitt 300", &config, &gpu, None).unwrap(), "1000");
        assert_eq!(automatic("--fit-target 300/400", &config, &gpu, None).unwrap(), "1000,400");
        assert_eq!(
            automatic("--fit_target 1 -fitt 300M,,5/", &config, &gpu, None).unwrap(),
            "1000,5",
            "as C++ reads it"
        );
    }

    #[test]
    fn an_automatic_size_is_half_of_what_is_free_or_all_experts() {
        let gpu = [device("CUDA0", 8000)];
        assert_eq!(automatic("", &config(None, None), &gpu, None).unwrap(), "5024");
        assert_eq!(automatic("", &config(None, None), &gpu, Some(100)).unwrap(), "1124");
        assert_eq!(automatic("", &config(None, None), &gpu, Some(90_000)).unwrap(), "5024");
        assert_eq!(automatic("", &config(None, None), &[device("CUDA0", 0)], None), None);
    }

    #[test]
    fn of_a_list_only_the_hot_device_is_raised_where_its_place_is_known() {
        let gpus = [device("CUDA0", 8000), device("CUDA1", 8000)];
        let config = config(Some(Budget::Mib(10)), Some("CUDA1"));
        assert_eq!(automatic("-dev CUDA0,CUDA1 -fitt 1,2", &config, &gpus, None).unwrap(), "1,12");
        assert_eq!(automatic("-dev cuda1,cuda0 -fitt 1,2", &config, &gpus, None).unwrap(), "11,2");
        assert_eq!(automatic("-dev A,B,CUDA1 -fitt 1,2", &config, &gpus, None).unwrap(), "1,2,1034");
        assert_eq!(automatic("-fitt 1,2", &config, &gpus, None).unwrap(), "11,12", "llama.cpp's order is not ours");
        assert_eq!(automatic("-dev CUDA0,CUDA1 -fitt 1", &config, &gpus, None).unwrap(), "11", "one is for all");
    }

    #[test]
    fn several_models_get_the_largest_of_their_targets() {
        assert_eq!(join(vec![vec![3, 4], vec![2, 9]]).unwrap(), "3,9");
        assert_eq!(join(vec![vec![5], vec![2, 9, 1]]).unwrap(), "5,9,5");
        assert_eq!(join(Vec::new()), None);
    }

    #[test]
    fn nothing_changes_where_there_is_no_fit_no_cache_or_no_device() {
        let gpu = [device("CUDA0", 8000)];
        let some = config(Some(Budget::Mib(700)), None);
        assert_eq!(automatic("--fit off", &some, &gpu, None), None);
        assert_eq!(automatic("", &config(Some(Budget::Off), None), &gpu, None), None);
        assert_eq!(automatic("", &Config::from_lookup(|_| None), &gpu, None), None);
        assert_eq!(automatic("", &some, &[], None), None);
        assert_eq!(automatic("", &config(None, Some("CPU")), &gpu, None), None);
        assert_eq!(automatic("-fitt much", &some, &gpu, None), None, "left to the program");
        assert_eq!(of(Fitting::Never, "-fitt 1", &some, &gpu, None), None);
        assert_eq!(of(Fitting::OnDemand, "", &some, &gpu, None), None);
        assert_eq!(of(Fitting::OnDemand, "-fitt 1,2 -fitt 3", &some, &gpu, None).unwrap(), "701,702,703");
    }
}
