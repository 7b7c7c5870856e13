//! Room for the cache where llama.cpp fits a model to its devices by itself (`--fit`): we raise what is to be left free.
//!
//! llama.cpp fits before it loads anything, and knows nothing of a cache that is filled later.

use super::devices::Device;
use crate::options::host::{DEVICE, FIT, FIT_TARGET, is_no};
use crate::options::{Budget, Config};
use std::ffi::OsString;

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

/// `--fit-target` for the program, to be put in the place of what the user says; `None` to change nothing.
pub fn target(
    fitting: Fitting,
    args: &[OsString],
    config: &Config,
    devices: &[Device],
    expert_bytes: Option<u64>,
) -> Option<String> {
    let given = FIT_TARGET.value(args);
    let is_on = match fitting {
        Fitting::Never => false,
        Fitting::OnDemand => given.is_some(),
        Fitting::Automatic => !FIT.value(args).is_some_and(|value| is_no(&value)),
    };
    if !is_on || !config.caches() {
        return None;
    }
    let hot = hot_device(config.device.as_deref(), devices)?;
    let extra = wanted_mib(config.max_mib, hot, expert_bytes)?;
    let given = given.map_or(Some(DEFAULT_TARGET_MIB.to_string()), |value| value.into_string().ok())?;
    let position = if fitting == Fitting::Automatic { position(hot, args, devices) } else { None };
    raise(&given, position, extra)
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
fn position(hot: &Device, args: &[OsString], devices: &[Device]) -> Option<usize> {
    match DEVICE.value(args) {
        Some(list) => list.to_str()?.split(',').position(|name| name == hot.name),
        None => (devices.len() == 1).then_some(0), // llama.cpp sorts several in its own way
    }
}

/// The given list, separated by `,` or `/`, with `extra` added where the hot device is, or else everywhere.
///
/// `None` where the list is not one: the program will say so.
fn raise(given: &str, position: Option<usize>, extra: u64) -> Option<String> {
    let values = given.split([',', '/']).map(|value| value.parse().ok());
    let mut values = values.collect::<Option<Vec<u64>>>()?;
    match position {
        Some(position) if values.len() > 1 => {
            values.resize(values.len().max(position + 1), DEFAULT_TARGET_MIB);
            values[position] = values[position].saturating_add(extra);
        }
        _ => values.iter_mut().for_each(|value| *value = value.saturating_add(extra)),
    }
    Some(values.iter().map(u64::to_string).collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, free_mib: u64) -> Device {
        Device { name: name.into(), total_mib: 24_000, free_mib }
    }

    fn config(max_mib: Option<Budget>, device: Option<&str>) -> Config {
        let none = Config::from_lookup(|_| None);
        let max_mib = max_mib.unwrap_or_default();
        Config { hot_cache: Some("e".into()), max_mib, device: device.map(Into::into), ..none }
    }

    fn args(text: &str) -> Vec<OsString> {
        text.split_whitespace().map(OsString::from).collect()
    }

    fn automatic(text: &str, config: &Config, devices: &[Device], experts_mib: Option<u64>) -> Option<String> {
        target(Fitting::Automatic, &args(text), config, devices, experts_mib.map(|mib| mib * MIB))
    }

    #[test]
    fn a_given_size_is_left_free_on_top_of_the_target() {
        let config = config(Some(Budget::Mib(700)), None);
        let gpu = [device("CUDA0", 8000)];
        assert_eq!(automatic("", &config, &gpu, None).unwrap(), "1724");
        assert_eq!(automatic("-fitt 300", &config, &gpu, None).unwrap(), "1000");
        assert_eq!(automatic("--fit-target 300/400", &config, &gpu, None).unwrap(), "1000,400");
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
        assert_eq!(automatic("-dev CUDA1,CUDA0 -fitt 1,2", &config, &gpus, None).unwrap(), "11,2");
        assert_eq!(automatic("-dev A,B,CUDA1 -fitt 1,2", &config, &gpus, None).unwrap(), "1,2,1034");
        assert_eq!(automatic("-fitt 1,2", &config, &gpus, None).unwrap(), "11,12", "llama.cpp's order is not ours");
        assert_eq!(automatic("-dev CUDA0,CUDA1 -fitt 1", &config, &gpus, None).unwrap(), "11", "one is for all");
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
        assert_eq!(target(Fitting::Never, &args("-fitt 1"), &some, &gpu, None), None);
        assert_eq!(target(Fitting::OnDemand, &[], &some, &gpu, None), None);
        assert_eq!(target(Fitting::OnDemand, &args("-fitt 1,2"), &some, &gpu, None).unwrap(), "701,702");
    }
}
