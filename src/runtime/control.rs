//! What a program that was patched with `ggml-hooks/patches` shows of the runtime and changes in it, while tokens are decoded.
//!
//! Tokens wait for nothing here but for copies of a layer's counts.

use super::model::layer::Layer;
use super::model::{Model, Totals};
use super::registry::Runtime;
use super::view::{Mode, Since};
use crate::options::{HOT_CACHE, OPTIONS};
use crate::profile::{LayerPerf, ModelId, ProfileError, RecordedProfile, SCHEMA, Summary, ratio};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The caller can mend it.
    #[error("{0}")]
    Input(String),
    /// There is no cache in this program.
    #[error("{0}")]
    Unsupported(String),
    /// Not now.
    #[error("{0}")]
    Unavailable(String),
    /// Something that should work did not.
    #[error("{0}")]
    Internal(String),
}

impl ControlError {
    fn kind(&self) -> &'static str {
        match self {
            Self::Input(_) => "input",
            Self::Unsupported(_) => "unsupported",
            Self::Unavailable(_) => "unavailable",
            Self::Internal(_) => "internal",
        }
    }
}

impl From<ProfileError> for ControlError {
    fn from(error: ProfileError) -> Self {
        Self::Input(format!("profile: {error}"))
    }
}

/// An answer as text.
fn to_text<T: Serialize>(answer: Result<T, ControlError>) -> String {
    let text = match answer {
        Ok(answer) => serde_json::to_string(&answer),
        Err(error) => {
            let message = error.to_string();
            serde_json::to_string(&serde_json::json!({ "error": { "kind": error.kind(), "message": message } }))
        }
    };
    text.unwrap_or_default()
}

fn key(model: &Arc<Model>, layer: &Layer) -> (usize, u32) {
    (Arc::as_ptr(model) as usize, layer.counts.layer())
}

#[derive(Serialize)]
struct Snapshot<'a> {
    enabled: bool,
    mode: Mode,
    schema: &'static str,
    #[serde(flatten)]
    main: ModelView,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    other_models: Vec<ModelView>,
    cache: CacheView,
    options: BTreeMap<&'a str, String>,
}

/// One model, in the fields of a profile and some of our own.
#[derive(Default, Serialize)]
struct ModelView {
    n_expert: u32,
    n_expert_used: u32,
    updates: u64,
    overflow_resets: u64,
    summary: Summary,
    layers: Vec<LayerView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<ModelId>,
}

#[derive(Serialize)]
struct LayerView {
    #[serde(flatten)]
    perf: LayerPerf,
    n_expert: u32,
    n_expert_used: u32,
    slots: usize,
    resident: Vec<u16>,
    #[serde(flatten)]
    times: Option<TimesView>,
}

/// Microseconds since the mode was set.
#[derive(Serialize)]
struct TimesView {
    cpu_us: u64,
    device_us: u64,
    wait_us: u64,
}

/// The caches of all models.
#[derive(Serialize)]
struct CacheView {
    on: bool,
    device: String,
    /// Why it is not on.
    why: String,
    slots: usize,
    resident: usize,
    copies: u64,
    copied_bytes: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetMode {
    mode: Mode,
    /// Whose, in router mode: the router has seen to that.
    #[serde(default, rename = "model")]
    _model: Option<String>,
}

/// A profile with what to do with it. Without `profile` the text is the profile itself.
#[derive(Deserialize)]
struct ApplyProfile<'a> {
    #[serde(borrow)]
    profile: Option<&'a RawValue>,
    #[serde(default)]
    save_to_disk: bool,
}

#[derive(Serialize)]
struct Applied {
    applied: bool,
    layers: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    saved_to: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    old_kept_as: Option<String>,
}

/// One at a time.
static APPLY: Mutex<()> = Mutex::new(());

impl Runtime {
    /// What was counted since the mode was set, who is resident, and the resolved configuration.
    pub fn snapshot(&self) -> String {
        let since = self.view().since();
        let mode = since.mode;
        let models = if mode == Mode::Off { Vec::new() } else { self.models() };
        let mut views = models.iter().map(|model| model_view(model, &since)).collect::<Vec<_>>().into_iter();
        drop(since);
        let options = OPTIONS.iter().map(|option| (option.flag, self.config().shown(option))).collect();
        to_text(Ok(Snapshot {
            enabled: mode != Mode::Off && self.takes_experts(),
            mode,
            schema: SCHEMA,
            main: views.next().unwrap_or_default(),
            other_models: views.collect(),
            cache: self.cache_view(),
            options,
        }))
    }

    /// Sets what is shown, and begins to count anew.
    pub fn set_mode(&self, body: &[u8]) -> String {
        let SetMode { mode, .. } = match serde_json::from_slice(body) {
            Ok(set) => set,
            Err(error) => {
                let message = format!("expected {{\"mode\": \"full\", \"update\" or \"off\"}}: {error}");
                return to_text::<()>(Err(ControlError::Input(message)));
            }
        };
        let mut layers = BTreeMap::new();
        for model in self.models() {
            for layer in model.layers() {
                layers.insert(key(&model, &layer), (layer.counts.snapshot(), layer.times.ns()));
            }
        }
        *self.view().since() = Since { mode, layers };
        self.snapshot()
    }

    /// Puts a profile in the place of the one that caches began with, and has them filled anew.
    pub fn apply_profile(&self, body: &[u8]) -> String {
        to_text(self.try_apply(body))
    }

    fn try_apply(&self, body: &[u8]) -> Result<Applied, ControlError> {
        let request: ApplyProfile<'_> = match serde_json::from_slice(body) {
            Ok(request) => request,
            Err(error) => {
                // What is wrong with a profile is told in the words that a file gets.
                RecordedProfile::from_slice(body)?;
                return Err(ControlError::Input(format!("expected a profile, or {{\"profile\": …}}: {error}")));
            }
        };
        let text = request.profile.map_or(body, |profile| profile.get().as_bytes());
        let mut profile = Arc::new(RecordedProfile::from_slice(text)?);
        if !self.config().caches() {
            return Err(ControlError::Unsupported(format!(
                "there is no cache; expected {} at the start",
                HOT_CACHE.flag
            )));
        }
        let _one_at_a_time = APPLY.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded: Vec<_> = self.models().into_iter().filter(|model| model.is_loaded()).collect();
        if loaded.is_empty() {
            return Err(ControlError::Unavailable("no model is loaded, or it has not computed anything yet".into()));
        }
        let mut refusals = Vec::new();
        let mut fitting = Vec::new();
        for model in &loaded {
            match model.fits(&profile) {
                Ok(is_other_quantisation) => fitting.push((model, is_other_quantisation)),
                Err(why) => refusals.push(why),
            }
        }
        if fitting.is_empty() {
            return Err(ControlError::Input(format!("profile: {}", refusals.swap_remove(0))));
        }
        if !self.caches() {
            return Err(ControlError::Unsupported(self.cache_view().why));
        }
        if self.has_device_failed() {
            return Err(ControlError::Unavailable(self.cache_view().why));
        }
        let mut applied = Applied { applied: true, layers: profile.layers.len(), saved_to: None, old_kept_as: None };
        if request.save_to_disk {
            // Of several models that it fits the first one's file is the one that the user knows of.
            let model = fitting[0].0;
            let path = model.profile_file(self.config()).ok_or_else(|| {
                ControlError::Unavailable(
                    "there is no file for it yet, or none that can be written: the log says why".into(),
                )
            })?;
            let text = to_be_kept(text, profile.model.is_none().then(|| model.id()).as_ref())?;
            profile = Arc::new(RecordedProfile::from_slice(&text)?);
            let begin = || {
                for (model, is_other_quantisation) in &fitting {
                    model.starting().replace(profile.clone(), *is_other_quantisation, true);
                }
            };
            let old = self.replace_profile(path, &text, begin);
            let old = old.map_err(|error| ControlError::Unavailable(error.to_string()))?;
            applied.saved_to = Some(path.display().to_string());
            applied.old_kept_as = old.map(|old| old.display().to_string());
        }
        for (model, is_other_quantisation) in fitting {
            if !request.save_to_disk {
                model.starting().replace(profile.clone(), is_other_quantisation, false);
            }
            self.end_caches_of(model);
            model.refill().want_again();
        }
        Ok(applied)
    }

    /// Requests of all models since the start, and those of them whose expert was resident.
    pub fn requests_and_hits(&self) -> (u64, u64) {
        let mut sum = (0, 0);
        for model in self.models() {
            for layer in model.layers() {
                let (requests, hits) = layer.counts.requests_and_hits();
                sum = (sum.0 + requests, sum.1 + hits);
            }
        }
        sum
    }

    /// The same and more, for Prometheus. Counters never go back.
    pub fn metrics(&self) -> String {
        let (mut calls, mut requests, mut hits, mut times) = (0, 0, 0, [0; 3]);
        for model in self.models() {
            let totals: Totals = model.totals();
            calls += totals.calls;
            requests += totals.requests;
            hits += totals.hits;
            for layer in model.layers() {
                let ns = layer.times.ns();
                times.iter_mut().zip(ns).for_each(|(sum, ns)| *sum += ns);
            }
        }
        let cache = self.cache_view();
        let mut text = String::new();
        let mut add = |name: &str, kind: &str, help: &str, values: &[(&str, f64)]| {
            // Writing to a string does not fail.
            let _ = writeln!(text, "# HELP moe_hot:{name} {help}\n# TYPE moe_hot:{name} {kind}");
            for (label, value) in values {
                let _ = writeln!(text, "moe_hot:{name}{label} {value}");
            }
        };
        let one = |value: u64| [("", value as f64)];
        add("layer_calls_total", "counter", "Expert FFNs computed.", &one(calls));
        add("requests_total", "counter", "(token, expert) pairs.", &one(requests));
        add("hits_total", "counter", "Those whose expert was resident.", &one(hits));
        add("misses_total", "counter", "Those whose expert was not.", &one(requests.saturating_sub(hits)));
        add("copies_total", "counter", "Experts copied to a device.", &one(cache.copies));
        add("copied_bytes_total", "counter", "Their bytes.", &one(cache.copied_bytes));
        add("resident_experts", "gauge", "Experts on a device.", &one(cache.resident as u64));
        add("slots", "gauge", "Places for them.", &one(cache.slots as u64));
        let seconds = times.map(|ns| ns as f64 / 1e9);
        let lanes = [("{lane=\"cpu\"}", seconds[0]), ("{lane=\"device\"}", seconds[1])];
        add("lane_seconds_total", "counter", "Time that a lane had work.", &lanes);
        add("wait_seconds_total", "counter", "Time that the CPU waited for the device.", &[("", seconds[2])]);
        text
    }

    fn cache_view(&self) -> CacheView {
        let mut view = CacheView {
            on: false,
            device: String::new(),
            why: String::new(),
            slots: 0,
            resident: 0,
            copies: 0,
            copied_bytes: 0,
        };
        for model in self.models() {
            view.copies += model.copied().experts();
            view.copied_bytes += model.copied().bytes();
            for cache in model.layers().iter().filter_map(|layer| layer.cache()) {
                let state = cache.state();
                view.slots += state.slots.n_slots();
                view.resident += state.slots.n_resident();
                view.on |= !cache.handle.is_over();
                view.device = cache.handle.device.device().name().into_owned();
            }
        }
        if !view.on {
            view.why = self.why_no_cache();
        }
        view
    }
}

fn model_view(model: &Arc<Model>, since: &Since) -> ModelView {
    let mut layers = model.layers();
    layers.sort_by_key(|layer| layer.counts.layer());
    let layers: Vec<_> = layers.iter().map(|layer| layer_view(layer, since, key(model, layer))).collect();
    let sum = |of: fn(&LayerPerf) -> u64| layers.iter().map(|layer| of(&layer.perf)).sum::<u64>();
    let (hot, cold) = (sum(|perf| perf.hot_slots_total), sum(|perf| perf.cold_slots_total));
    ModelView {
        n_expert: layers.iter().map(|layer| layer.n_expert).max().unwrap_or(0),
        n_expert_used: layers.iter().map(|layer| layer.n_expert_used).max().unwrap_or(0),
        updates: layers.iter().map(|layer| layer.perf.calls).max().unwrap_or(0),
        overflow_resets: 0,
        summary: Summary { layer_calls: sum(|perf| perf.calls), hot_slot_ratio: ratio(hot, hot + cold) },
        layers,
        model: Some(model.id()),
    }
}

fn layer_view(layer: &Layer, since: &Since, key: (usize, u32)) -> LayerView {
    let (mut counts, mut times) = (layer.counts.snapshot(), layer.times.ns());
    if let Some((earlier, ns)) = since.layers.get(&key) {
        counts = counts.since(earlier);
        times.iter_mut().zip(ns).for_each(|(now, then)| *now = now.saturating_sub(*then));
    }
    let [cpu_us, device_us, wait_us] = times.map(|ns| ns / 1000);
    let cache = layer.cache();
    let mut slots = 0;
    let mut resident = Vec::with_capacity(layer.counts.n_expert() as usize);
    if let Some(cache) = cache {
        let state = cache.state(); // tokens wait for it
        slots = state.slots.n_slots();
        resident.extend(state.slots.staying().map(|expert| expert.0));
    }
    resident.sort_unstable();
    LayerView {
        perf: LayerPerf::of(layer.counts.layer(), &counts),
        n_expert: layer.counts.n_expert(),
        n_expert_used: layer.n_used,
        slots,
        resident,
        times: (since.mode == Mode::Full).then_some(TimesView { cpu_us, device_us, wait_us }),
    }
}

/// A profile's text as it is kept: without what it asks of us, and with the model that it is of where it does not name one, so
/// that what is learnt can be added to it.
fn to_be_kept(text: &[u8], model: Option<&ModelId>) -> Result<Vec<u8>, ControlError> {
    let internal = |error: serde_json::Error| ControlError::Internal(error.to_string());
    let mut fields: BTreeMap<&str, &RawValue> = serde_json::from_slice(text).map_err(internal)?;
    fields.remove("save_to_disk");
    let model = model.map(serde_json::value::to_raw_value).transpose().map_err(internal)?;
    fields.extend(model.as_deref().map(|model| ("model", model)));
    serde_json::to_vec(&fields).map_err(internal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{Config, HOT_CACHE};
    use serde_json::Value;

    fn runtime(variables: &'static [(&str, &str)]) -> Runtime {
        let value = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
        Runtime::new(Config::from_lookup(value))
    }

    fn parsed(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_mode_is_set_or_refused() {
        let runtime = runtime(&[]);
        assert_eq!(parsed(&runtime.snapshot())["mode"], "update");
        assert_eq!(parsed(&runtime.set_mode(br#"{"mode":"full","model":"a"}"#))["mode"], "full");
        for bad in [&b""[..], b"{}", b"{\"mode\":2}", b"{\"mode\":\"on\"}", b"\xff", b"{\"mode\":\"off\",\"other\":1}"]
        {
            assert_eq!(parsed(&runtime.set_mode(bad))["error"]["kind"], "input");
        }
        assert_eq!(parsed(&runtime.snapshot())["mode"], "full", "as before");
    }

    #[test]
    fn a_profile_is_refused_for_what_is_missing() {
        const PROFILE: &str = r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":0,"experts":[[0,1]]}]}"#;
        let kind =
            |runtime: &Runtime, body: &str| parsed(&runtime.apply_profile(body.as_bytes()))["error"]["kind"].clone();
        let (none, some) = (runtime(&[]), runtime(&[(HOT_CACHE.variable, "/e")]));
        assert_eq!(kind(&none, PROFILE), "unsupported");
        assert_eq!(kind(&some, PROFILE), "unavailable");
        assert_eq!(kind(&some, &format!("{{\"profile\":{PROFILE}}}")), "unavailable");
        assert_eq!(kind(&some, r#"{"profile":{}}"#), "input");
    }

    #[test]
    fn what_is_saved_is_the_profile_and_its_model() {
        let text = br#"{"schema":"s","save_to_disk":true,"n":1.50}"#;
        let model = ModelId { fingerprint: "f".into(), tensors: BTreeMap::new(), shapes: BTreeMap::new() };
        let with_model = br#"{"model":{"fingerprint":"f","tensors":{}},"n":1.50,"schema":"s"}"#;
        assert_eq!(to_be_kept(text, Some(&model)).unwrap(), with_model);
        assert_eq!(to_be_kept(br#"{"model":{}}"#, None).unwrap(), br#"{"model":{}}"#, "it knows its model");
    }

    #[test]
    fn metrics_are_lines_that_prometheus_reads() {
        for line in runtime(&[]).metrics().lines() {
            let is_comment = line.starts_with("# HELP moe_hot:") || line.starts_with("# TYPE moe_hot:");
            let number = line.rsplit_once(' ').and_then(|(_, value)| value.parse::<f64>().ok());
            assert!(is_comment || (line.starts_with("moe_hot:") && number.is_some()), "{line}");
        }
    }
}
