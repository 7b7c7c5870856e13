//! The devices that a program says it has (`--list-devices`), asked without the plugin.

use anyhow::{Result, ensure};

/// ggml's name for the CPU, which `--list-devices` leaves out.
const CPU: &str = "CPU";

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// ggml's name, for example `CUDA0`.
    pub name: String,
    /// What it is, for example a GPU's name; empty where that is not asked for.
    pub description: String,
    /// Its memory in MiB; 0 where it has none of its own.
    pub total_mib: u64,
    /// What of it is free now.
    pub free_mib: u64,
}

/// Reads what a program prints to `--list-devices`; `None` if that is no list.
pub fn parse(output: &str) -> Option<Vec<Device>> {
    let mut lines = output.lines();
    lines.find(|line| line.eq_ignore_ascii_case("available devices:"))?;
    Some(lines.filter_map(device).collect())
}

/// `  NAME: description (TOTAL MiB, FREE MiB free)`.
fn device(line: &str) -> Option<Device> {
    let (name, rest) = line.strip_prefix("  ")?.split_once(": ")?;
    let (rest, free) = rest.strip_suffix(" MiB free)")?.rsplit_once(" MiB, ")?;
    let (description, total) = rest.rsplit_once(" (")?;
    let description = description.into();
    Some(Device { name: name.into(), description, total_mib: total.parse().ok()?, free_mib: free.parse().ok()? })
}

/// Refuses a device that the program does not have.
pub fn check_name<'a>(name: &str, devices: impl IntoIterator<Item = &'a Device>) -> Result<()> {
    let mut names: Vec<_> = devices.into_iter().map(|device| device.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    names.push(CPU);
    ensure!(names.contains(&name), "no device {name:?}; expected one of {}", names.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_among_other_lines() {
        let output = "load_backend: loaded\nAvailable devices:\n  CUDA0: NVIDIA (x) (24000 MiB, 20500 MiB free)\n  \
                      RPC0: 127.0.0.1:50052 (8 MiB, 7 MiB free)\n  odd line\n";
        let devices = parse(output).unwrap();
        assert_eq!(
            devices[0],
            Device { name: "CUDA0".into(), description: "NVIDIA (x)".into(), total_mib: 24_000, free_mib: 20_500 }
        );
        assert_eq!((devices[1].name.as_str(), devices.len()), ("RPC0", 2));
        assert_eq!(parse("Available devices:\n  (none)\n"), Some(Vec::new()));
        assert_eq!(parse("error: invalid argument"), None);
    }

    #[test]
    fn an_unknown_device_is_refused_with_those_there_are() {
        let devices = [Device { name: "CUDA0".into(), description: "x".into(), total_mib: 1, free_mib: 1 }];
        assert!(check_name("CUDA0", &devices).is_ok() && check_name("CPU", &devices).is_ok());
        let message = check_name("CUDA1", &devices).unwrap_err().to_string();
        assert!(message.contains("\"CUDA1\"") && message.contains("CUDA0, CPU"), "{message}");
    }
}
