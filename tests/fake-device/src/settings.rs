//! Settings: numbers with names, from the environment (`FAKE_LATENCY_US=100`), from the file that `FAKE_CONTROL` names
//! (`latency_us=100`, re-read while running whenever it changes), or from a host in this process (`fake_set`).

use crate::{faults, queue, say};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};
use std::{env, fs, thread};

const PREFIX: &str = "FAKE_";
const FAULT_PREFIX: &str = "fault_";
/// Variables that are no numbers.
const TEXTS: [&str; 4] = ["FAKE_LOAD", "FAKE_STATS", "FAKE_CONTROL", "FAKE_FAULT"];
const CONTROL_INTERVAL: Duration = Duration::from_millis(20);

/// One number with a name; flags are on where it is not 0.
pub(crate) struct Setting {
    name: &'static str,
    #[cfg(test)]
    default: i64,
    value: AtomicI64,
}

impl Setting {
    const fn new(name: &'static str, default: i64) -> Self {
        Self {
            name,
            #[cfg(test)]
            default,
            value: AtomicI64::new(default),
        }
    }

    /// A negative value counts as 0.
    pub(crate) fn get(&self) -> u64 {
        u64::try_from(self.value.load(Relaxed)).unwrap_or(0)
    }

    pub(crate) fn is_on(&self) -> bool {
        self.get() != 0
    }
}

macro_rules! settings {
    ($($(#[$doc:meta])* $constant:ident = $name:literal, $default:literal;)*) => {
        $($(#[$doc])* pub(crate) static $constant: Setting = Setting::new($name, $default);)*
        static ALL: &[&Setting] = &[$(&$constant),*];
    };
}

settings! {
    CAPACITY_MIB = "capacity_mib", 4096;
    /// Added to every graph.
    LATENCY_US = "latency_us", 0;
    /// Of copies between host and device, in MB (10^6 bytes) per second; 0 is unlimited.
    BANDWIDTH_MBS = "bandwidth_mbs", 0;
    /// Skips the mathematics.
    NULL_COMPUTE = "null_compute", 0;
    /// Restricts latency and null compute to small graphs with experts in them.
    NULL_MUL_MAT_ID_ONLY = "null_mul_mat_id_only", 0;
    /// Of each instance's inner CPU backend.
    THREADS = "threads", 1;
    /// The device is an integrated GPU. Read when it is asked for its type.
    INTEGRATED = "integrated", 0;
    /// Instances copy nothing asynchronously, as OpenCL's. Read when one is made.
    NO_ASYNC = "no_async", 0;
    /// The device has a host buffer type.
    HOST_BUFFER = "host_buffer", 0;
    /// Asynchronous writes wait until it is 0 again, and with them their queues.
    HOLD_WRITES = "hold_writes", 0;
    /// Smaller asynchronous writes are not held, and are no occasion for the faults `copy` and `hang`.
    FAULT_MIN_BYTES = "fault_min_bytes", 0;
    /// The first graph with experts of its operations, types and shapes keeps its caller waiting for so long, as a backend does
    /// that compiles or loads kernels.
    FIRST_USE_MS = "first_use_ms", 0;
    /// ... and takes so much of the device's memory for good. Where there is none left the process is aborted, as CUDA does.
    FIRST_USE_KIB = "first_use_kib", 0;
    /// Free memory is reported as less than it is, by up to so much and by another number each time.
    FREE_JUMPS_MIB = "free_jumps_mib", 0;
    /// A captured graph that is not used for so long is dropped.
    CAPTURE_KEEP_MS = "capture_keep_ms", 10_000;
    /// A copy from or to memory that is not of the device's host buffer type keeps its caller waiting until it is done.
    PAGEABLE_BLOCKS = "pageable_blocks", 0;
    /// An allocation that is larger, or makes the total larger, fails; 0 is unlimited.
    FAULT_ALLOC_OVER_MIB = "fault_alloc_over_mib", 0;
}

/// Changes a setting; a fault is `fault_` and its name in `FAKE_FAULT`. False if there is none of that name.
pub(crate) fn set(name: &str, value: i64) -> bool {
    match ALL.iter().find(|setting| setting.name == name) {
        Some(setting) => {
            setting.value.store(value, Relaxed);
            queue::look_at_settings();
            true
        }
        None => name.strip_prefix(FAULT_PREFIX).is_some_and(|fault| faults::set(fault, value)),
    }
}

/// All as at the start, and no faults.
#[cfg(test)]
pub(crate) fn reset() {
    ALL.iter().for_each(|setting| assert!(set(setting.name, setting.default)));
    ["alloc", "copy", "hang", "compute", "init"].iter().for_each(|fault| assert!(faults::set(fault, 0)));
}

/// Commands may be run by the caller where they would take no time anyway.
pub(crate) fn may_run_inline() -> bool {
    NULL_COMPUTE.is_on() && LATENCY_US.get() == 0 && BANDWIDTH_MBS.get() == 0 && !HOLD_WRITES.is_on()
}

/// Reads every variable that begins with `FAKE_`; the error says which one is wrong.
pub(crate) fn load_environment() -> Result<(), String> {
    for (variable, value) in env::vars().filter(|(name, _)| name.starts_with(PREFIX)) {
        if !TEXTS.contains(&variable.as_str()) {
            assign(&variable[PREFIX.len()..].to_lowercase(), &value).map_err(|error| format!("{variable}: {error}"))?;
        }
    }
    for fault in env::var("FAKE_FAULT").unwrap_or_default().split(',').filter(|word| !word.is_empty()) {
        assign_line(&format!("{FAULT_PREFIX}{fault}")).map_err(|error| format!("FAKE_FAULT: {error}"))?;
    }
    if let Some(path) = env::var_os("FAKE_CONTROL").filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        let seen = apply_file(&path, None);
        thread::spawn(move || follow(&path, seen));
    }
    Ok(())
}

fn assign_line(line: &str) -> Result<(), String> {
    let (name, value) = line.split_once('=').ok_or_else(|| format!("\"{line}\" is not of the form name=number"))?;
    assign(name.trim(), value.trim())
}

fn assign(name: &str, value: &str) -> Result<(), String> {
    let number = value.parse().map_err(|_| format!("\"{value}\" is not a whole number"))?;
    if set(name, number) { Ok(()) } else { Err(format!("there is no setting \"{name}\"")) }
}

/// What tells one state of the file from the next.
type Version = Option<(SystemTime, u64)>;

/// Applies the file's lines unless it is still the version `seen`; returns the version applied last.
fn apply_file(path: &Path, seen: Version) -> Version {
    let now = fs::metadata(path).ok().and_then(|data| Some((data.modified().ok()?, data.len())));
    if now.is_none() || now == seen {
        return seen;
    }
    for line in fs::read_to_string(path).unwrap_or_default().lines().filter(|line| !line.trim().is_empty()) {
        if let Err(error) = assign_line(line) {
            say(&format!("FAKE_CONTROL: {}: {error}", path.display()));
        }
    }
    now
}

/// Applies the file whenever it has changed; for ever.
fn follow(path: &Path, mut seen: Version) {
    loop {
        thread::sleep(CONTROL_INTERVAL);
        seen = apply_file(path, seen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{NEVER, Rig};
    use std::time::Instant;

    #[test]
    fn the_control_file_is_followed() {
        let _turn = Rig::new();
        let path = env::temp_dir().join(format!("fake-device-control-{}", std::process::id()));
        let file = path.clone();
        thread::spawn(move || follow(&file, None));
        // Of other lengths: two versions within one tick of the file system's clock differ too.
        for latency in [3, 14, 159] {
            fs::write(&path, format!("null_compute=1\n\nlatency_us={latency}\n")).unwrap();
            let deadline = Instant::now() + NEVER;
            while LATENCY_US.get() != latency {
                assert!(Instant::now() < deadline, "latency {latency} is not applied");
                thread::sleep(CONTROL_INTERVAL);
            }
        }
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_is_not_known_or_no_number_is_refused_by_name() {
        let _turn = Rig::new();
        assert!(assign_line("capacity_mib=4096").is_ok());
        assert!(assign_line("capacity=1").unwrap_err().contains("capacity"));
        assert!(assign_line("latency_us=soon").unwrap_err().contains("soon"));
        assert!(assign_line("latency_us").is_err());
        assert!(assign_line("fault_nothing=1").is_err());
        assert!(assign_line("fault_init_once=0").is_ok());
    }
}
