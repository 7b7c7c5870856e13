//! What a patched llama.cpp program asks before it loads a model: the same checks as the launcher's, and what follows from them.
//!
//! The program has read its command line, environment and INI files itself.

use super::devices::{self, Device};
use super::failure::{Failure, OrFail};
use super::fit::{self, Fitting};
use super::flags::Flags;
use crate::ggml;
use crate::gguf::ModelFile;
use crate::options::host::{DEVICE, FIT, FIT_TARGET, NO_HOST, PREPARED, ValueOption, variable};
use crate::options::{HOT_CACHE_DEVICE, OPTIONS};
use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

const MIB: u64 = 1 << 20;

/// What the program's user has said.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// Our options by flag, as far as they were not given in the environment.
    options: BTreeMap<String, String>,
    /// Whether the user has said where experts go.
    places_experts: bool,
    /// The model's file, if it is known yet.
    model: String,
    fits: Fits,
    /// MiB that a fit leaves free, by device, in the program's order.
    fit_target_mib: Vec<u64>,
    /// The devices that were chosen for the model; empty: all.
    #[serde(default)]
    devices: Vec<String>,
    #[serde(default)]
    no_host: bool,
    /// Whether it only starts others, which will ask for themselves.
    #[serde(default)]
    is_router: bool,
}

/// Whether and how the program fits the model to its devices.
#[derive(Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Fits {
    Never,
    /// Margins are for devices.
    Always,
    /// Margins are tests of their own.
    Each,
}

/// What follows.
#[derive(Default, Serialize)]
struct Answer {
    /// To be set before a model is loaded.
    environment: BTreeMap<&'static str, String>,
    /// Whether all experts are to be kept off the GPUs.
    place_experts: bool,
    /// What a fit is to leave free instead: one for all devices, or a list; empty: as it is.
    fit_target_mib: Vec<u64>,
}

/// Why the program is to end.
#[derive(Serialize)]
struct Refusal {
    error: String,
    code: u8,
}

/// Answers a program, JSON for JSON.
pub fn prepare(request: &str) -> String {
    let answer = match serde_json::from_str(request).or_internal().and_then(|request| answer(&request)) {
        Ok(answer) => serde_json::to_string(&answer),
        Err(failure) => serde_json::to_string(&Refusal { error: failure.line(), code: failure.code() }),
    };
    answer.unwrap_or_default()
}

fn answer(request: &Request) -> Result<Answer, Failure> {
    let given = request.options.iter().map(|(flag, value)| {
        let option = OPTIONS.into_iter().find(|option| option.flag == flag);
        let option = option.ok_or_else(|| anyhow!("{flag}: no such option"))?;
        if value.is_empty() {
            bail!("{flag}: expected {}", option.value_name);
        }
        match option.check(value.as_ref()) {
            Ok(()) => Ok((option, OsString::from(value))),
            Err(expected) => Err(anyhow!("{flag}: {value:?}: {expected}")),
        }
    });
    let mut flags = Flags::of(given.collect::<anyhow::Result<_>>().or_input()?);
    let model = Some(&request.model).filter(|path| !path.is_empty());
    let model = model.and_then(|path| ModelFile::open(Path::new(path)).ok());
    flags.validate(model.as_ref())?;
    let config = flags.config();
    let mut answer = Answer::default();
    for (name, value) in flags.environment() {
        answer.environment.insert(name, value.to_string_lossy().into_owned());
    }
    if request.no_host {
        answer.environment.insert(NO_HOST, "1".into());
    }
    // The launcher has seen to the rest.
    if request.is_router || variable(PREPARED).is_some() {
        return Ok(answer);
    }
    if config.caches() {
        let needs_memory = request.fits != Fits::Never;
        let devices: Vec<_> = ggml::Device::all().filter_map(|device| as_listed(device, needs_memory)).collect();
        if let Some(name) = &config.device {
            devices::check_name(name, &devices).context(HOT_CACHE_DEVICE.flag).or_input()?;
        }
        let args = args_of_fit(request);
        let fitting = match request.fits {
            Fits::Never => Fitting::Never,
            Fits::Always => Fitting::Automatic,
            Fits::Each => Fitting::OnDemand,
        };
        let target = fit::target(fitting, &args, &config, &devices, model.as_ref().and_then(ModelFile::expert_bytes));
        answer.fit_target_mib =
            target.iter().flat_map(|list| list.split(',')).filter_map(|mib| mib.parse().ok()).collect();
    }
    answer.place_experts = config.takes_experts() && !request.places_experts;
    Ok(answer)
}

/// A device as `--list-devices` prints it.
fn as_listed(device: ggml::Device, needs_memory: bool) -> Option<Device> {
    if device.is_ours() || device.is_cpu() {
        return None;
    }
    let (free, total) = if needs_memory { device.memory() } else { (0, 0) };
    Some(Device { name: device.name().into_owned(), total_mib: total / MIB, free_mib: free / MIB })
}

/// The command line that the launcher would have seen.
fn args_of_fit(request: &Request) -> Vec<OsString> {
    let mut args = Vec::new();
    let mut add = |option: &ValueOption, value: String| {
        args.extend(option.flags.last().map(OsString::from));
        args.push(value.into());
    };
    add(&FIT, "on".into());
    let mut targets = request.fit_target_mib.clone();
    if request.fits == Fits::Always {
        // One for all devices comes as many.
        while targets.len() > 1 && targets[targets.len() - 2..].iter().all(|last| *last == targets[0]) {
            targets.pop();
        }
    }
    if !targets.is_empty() {
        add(&FIT_TARGET, targets.iter().map(u64::to_string).collect::<Vec<_>>().join(","));
    }
    if !request.devices.is_empty() {
        add(&DEVICE, request.devices.join(","));
    }
    args
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::testing::load_cpu;
    use serde_json::{Value, json};

    fn ask(change: &Value) -> Value {
        load_cpu();
        let mut request = json!({
            "options": {}, "places_experts": false, "model": "", "fits": "never", "fit_target_mib": [],
        });
        for (key, value) in change.as_object().unwrap() {
            request[key] = value.clone();
        }
        serde_json::from_str(&prepare(&request.to_string())).unwrap()
    }

    #[test]
    fn a_recording_places_experts_unless_the_user_has() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("experts.json");
        let options = json!({ "--moe-layer-perf-out": file });
        let answer = ask(&json!({ "options": options }));
        assert_eq!(answer["environment"], json!({ "LLAMA_ARG_MOE_LAYER_PERF_OUT": file }));
        assert_eq!(answer["place_experts"], true);
        assert_eq!(ask(&json!({ "options": options, "places_experts": true }))["place_experts"], false);
        assert_eq!(ask(&json!({ "options": options, "is_router": true }))["place_experts"], false);
        assert_eq!(ask(&json!({ "no_host": true }))["environment"], json!({ "MOE_HOT_NO_HOST": "1" }));
    }

    #[test]
    fn what_the_launcher_refuses_is_refused_in_its_words() {
        for (options, said) in [
            (
                json!({ "--moe-hot-cache-max-mib": "much" }),
                "--moe-hot-cache-max-mib: \"much\": expected a whole number",
            ),
            (json!({ "--moe-hot-cache-max-mib": "7" }), "--moe-hot-cache-max-mib does nothing without a profile"),
            (json!({ "--moe-hot-cache": "/nothing/here" }), "--moe-hot-cache: /nothing/here: no such file"),
            (json!({ "--moe-hot-cache-device": "" }), "--moe-hot-cache-device: expected NAME"),
        ] {
            let answer = ask(&json!({ "options": options }));
            assert!(answer["error"].as_str().unwrap().starts_with(said), "{answer}");
            assert_eq!(answer["code"], 2);
        }
    }

    #[test]
    fn margins_of_all_devices_are_told_from_a_list() {
        let args = |fits: &str, targets: Value| {
            let request = json!({
                "options": {}, "places_experts": false, "model": "", "fits": fits, "fit_target_mib": targets,
            });
            let args = args_of_fit(&serde_json::from_value(request).unwrap());
            FIT_TARGET.given(&args).map(|list| list.into_string().unwrap())
        };
        assert_eq!(args("always", json!([1024, 1024, 1024])).unwrap(), "1024");
        assert_eq!(args("always", json!([5, 1024, 1024])).unwrap(), "5,1024,1024");
        assert_eq!(args("each", json!([7, 7])).unwrap(), "7,7");
        assert_eq!(args("each", json!([])), None);
    }
}
