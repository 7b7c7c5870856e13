//! What a patched llama.cpp program asks before it loads a model: the same checks as the launcher's, and what follows from them.
//!
//! The program has read its command line, environment and INI files itself.

use super::devices::{self, Device};
use super::failure::{Failure, OrFail};
use super::fit::{self, Fitting};
use super::flags::Flags;
use super::placement::places_experts;
use super::threshold;
use super::two_caches::refuse_two_caches;
use crate::ggml;
use crate::gguf::ModelFile;
use crate::options::host::{
    CPU_MOE, DEVICE, FIT, FIT_TARGET, GPU_LAYERS, HostOption, LAUNCHER_NO_HOST, LOAD_MODE, N_CPU_MOE, NO_HOST,
    NO_OP_OFFLOAD, OVERRIDE_TENSOR, PREPARED, Settings, THREADS, variable,
};
use crate::options::{HOT_CACHE_DEVICE, OPTIONS};
use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::iter;
use std::path::Path;

const MIB: u64 = 1 << 20;
/// What patched programs make of `--cpu-moe`, and of `--n-cpu-moe` with the layer in front: llama.cpp's `LLM_FFN_EXPS_REGEX`.
const CPU_MOE_PATTERN: &str = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps";

/// What the program's user has said.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// Our options by flag, as far as they were not given in the environment.
    options: BTreeMap<String, String>,
    /// The models' files, as far as they are known yet. Several are tests of their own.
    models: Vec<String>,
    /// Patterns of the tensors that the user has placed.
    overrides: Vec<String>,
    /// How many layers' experts stay on the CPU, where that is not among the patterns; several are tests of their own.
    #[serde(default)]
    n_cpu_moe: Vec<i64>,
    fits: Fits,
    /// MiB that a fit leaves free, by device, in the program's order.
    fit_target_mib: Vec<u64>,
    /// The devices that were chosen for the model; empty: all.
    #[serde(default)]
    devices: Vec<String>,
    #[serde(default)]
    no_host: bool,
    /// Threads for prompts, where given; several are tests of their own.
    #[serde(default)]
    n_threads: Vec<i64>,
    /// Layers on GPUs, where given as a number.
    #[serde(default)]
    n_gpu_layers: Vec<i64>,
    /// Whether the model's file is read in another way than llama.cpp chooses.
    #[serde(default)]
    has_load_mode: bool,
    #[serde(default)]
    no_op_offload: bool,
    /// Whether it only starts others, which will ask for themselves.
    #[serde(default)]
    is_router: bool,
}

/// Whether and how the program fits the model to its devices.
#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
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
    /// To be set before devices are loaded: the program is to be started anew with it.
    restart_with: BTreeMap<&'static str, String>,
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
    let model = match request.models.as_slice() {
        [path] if !path.is_empty() => ModelFile::open(Path::new(path)).ok(),
        _ => None,
    };
    flags.validate(model.as_ref())?;
    let (config, settings) = (flags.config(), request.settings());
    refuse_two_caches(&config, iter::once(&settings)).or_input()?;
    let mut answer = Answer::default();
    // A router's children read what the user has said by themselves.
    let environment: Vec<_> = if request.is_router { flags.facts().collect() } else { flags.environment().collect() };
    for (name, value) in environment {
        // What is there of the launcher, or of a router, goes for all that they start.
        if flags.facts().all(|(fact, _)| fact != name) || variable(name).is_none() {
            answer.environment.insert(name, value.to_string_lossy().into_owned());
        }
    }
    if settings.has(&NO_HOST) {
        answer.environment.insert(LAUNCHER_NO_HOST, "1".into());
    }
    if !request.is_router && config.takes_experts() {
        answer.restart_with = threshold::environment(&settings, model.as_ref()).into_iter().collect();
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
        let expert_bytes = model.as_ref().and_then(ModelFile::expert_bytes);
        let target = fit::target(request.fits.into(), &settings, &config, &devices, expert_bytes);
        answer.fit_target_mib = target.unwrap_or_default();
    }
    answer.place_experts = config.takes_experts() && !places_experts(&settings, model.as_ref());
    Ok(answer)
}

impl From<Fits> for Fitting {
    fn from(fits: Fits) -> Self {
        match fits {
            Fits::Never => Self::Never,
            Fits::Always => Self::Automatic,
            Fits::Each => Self::OnDemand,
        }
    }
}

/// A device as `--list-devices` prints it.
fn as_listed(device: ggml::Device, needs_memory: bool) -> Option<Device> {
    if device.is_ours() || device.is_cpu() {
        return None;
    }
    let (free, total) = if needs_memory { device.memory() } else { (0, 0) };
    let (name, description) = (device.name().into_owned(), String::new());
    Some(Device { name, description, total_mib: total / MIB, free_mib: free / MIB })
}

impl Request {
    /// The same as the launcher would have read it.
    fn settings(&self) -> Settings {
        let mut given: Vec<(&'static HostOption, OsString)> = Vec::new();
        let mut add = |option, value: String| given.push((option, value.into()));
        for pattern in &self.overrides {
            if pattern.ends_with(CPU_MOE_PATTERN) {
                add(&CPU_MOE, "1".into());
            } else {
                add(&OVERRIDE_TENSOR, format!("{pattern}=CPU"));
            }
        }
        self.n_cpu_moe.iter().for_each(|n| add(&N_CPU_MOE, n.to_string()));
        if self.no_host {
            add(&NO_HOST, "1".into());
        }
        add(&FIT, if self.fits == Fits::Never { "off" } else { "on" }.into());
        let mut targets = self.fit_target_mib.clone();
        if self.fits == Fits::Always {
            // One for all devices comes as many.
            while targets.len() > 1 && targets[targets.len() - 2..].iter().all(|last| *last == targets[0]) {
                targets.pop();
            }
        }
        if !targets.is_empty() {
            add(&FIT_TARGET, targets.iter().map(u64::to_string).collect::<Vec<_>>().join(","));
        }
        self.n_threads.iter().for_each(|n| add(&THREADS, n.to_string()));
        self.n_gpu_layers.iter().for_each(|n| add(&GPU_LAYERS, n.to_string()));
        if self.has_load_mode {
            add(&LOAD_MODE, "other".into());
        }
        if self.no_op_offload {
            add(&NO_OP_OFFLOAD, "1".into());
        }
        if !self.devices.is_empty() {
            add(&DEVICE, self.devices.join(","));
        }
        Settings::of(given)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ggml::testing::load_cpu;
    use crate::options::launcher::SESSION_BEGAN;
    use serde_json::{Value, json};

    fn ask(change: &Value) -> Value {
        load_cpu();
        let mut request = json!({
            "options": {}, "models": [""], "overrides": [], "fits": "never", "fit_target_mib": [],
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
        assert_eq!(answer["environment"]["LLAMA_ARG_MOE_LAYER_PERF_OUT"], json!(file));
        assert!(answer["environment"][SESSION_BEGAN].is_string());
        assert_eq!(answer["place_experts"], true);
        let router = ask(&json!({ "options": options, "is_router": true }));
        assert_eq!(router["place_experts"], false);
        let names: Vec<_> = router["environment"].as_object().unwrap().keys().collect();
        assert_eq!(names, [SESSION_BEGAN], "its children read the rest by themselves");
        assert_eq!(ask(&json!({ "no_host": true }))["environment"]["MOE_HOT_NO_HOST"], "1");
        for (said, is_placed) in [
            (json!({ "overrides": ["ffn_up_exps"] }), true),
            (json!({ "overrides": ["blk\\.0\\.ffn_(up|down|gate|gate_up)_(ch|)exps"] }), true),
            (json!({ "overrides": ["token_embd", "attn_.*"] }), false),
            (json!({ "n_cpu_moe": [0, 4] }), true),
            (json!({ "n_cpu_moe": [0] }), false),
        ] {
            let mut request = said.clone();
            request["options"] = options.clone();
            assert_eq!(ask(&request)["place_experts"], !is_placed, "{said}");
        }
    }

    #[test]
    fn a_named_device_must_be_there() {
        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/moe-small.gguf");
        let folder = tempfile::tempdir().unwrap();
        let profile = folder.path().join("experts.json");
        std::fs::write(
            &profile,
            r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":0,"experts":[[0,1]]}]}"#,
        )
        .unwrap();
        let options = json!({ "--moe-hot-cache": profile, "--moe-hot-cache-device": "CUDA7" });
        let answer = ask(&json!({ "options": options, "models": [shipped] }));
        assert!(
            answer["error"].as_str().unwrap().starts_with("--moe-hot-cache-device: no device \"CUDA7\""),
            "{answer}"
        );
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
            let request =
                json!({ "options": {}, "models": [], "overrides": [], "fits": fits, "fit_target_mib": targets });
            let request: Request = serde_json::from_value(request).unwrap();
            request.settings().last(&FIT_TARGET).map(|list| list.to_str().unwrap().to_owned())
        };
        assert_eq!(args("always", json!([1024, 1024, 1024])).unwrap(), "1024");
        assert_eq!(args("always", json!([5, 1024, 1024])).unwrap(), "5,1024,1024");
        assert_eq!(args("each", json!([7, 7])).unwrap(), "7,7");
        assert_eq!(args("each", json!([])), None);
    }
}
