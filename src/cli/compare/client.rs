//! A client of one llama-server on 127.0.0.1: waits until it is ready, turns a conversation into a prompt, and times answers.

use super::children::Running;
use super::limits::LOAD_LIMIT;
use super::outcome::{LayerTimes, Turn};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::thread::sleep;
use std::time::{Duration, Instant};
use ureq::Agent;

const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// What patched servers offer.
const LAYER_PERF: &str = "/moe-layer-perf";

/// A server that runs.
pub struct Client {
    http: Agent,
    url: String,
}

impl Client {
    /// Waits until the server on this port is ready.
    pub fn connect(port: u16, server: &mut Running) -> Result<Self> {
        let config = Agent::config_builder().proxy(None).http_status_as_error(false).build();
        let client = Self { http: config.into(), url: format!("http://127.0.0.1:{port}") };
        let start = Instant::now();
        loop {
            if server.ended()?.is_some() {
                server.check_time()?;
                bail!(server.complaint());
            }
            let health = client.http.get(format!("{}/health", client.url)).call();
            if health.is_ok_and(|answer| answer.status() == 200) {
                return Ok(client);
            }
            ensure!(start.elapsed() < LOAD_LIMIT, "llama-server was not ready within {} s", LOAD_LIMIT.as_secs());
            sleep(POLL_INTERVAL);
        }
    }

    fn get(&self, path: &str) -> Result<Option<Value>> {
        let mut answer = self.http.get(format!("{}{path}", self.url)).call().context("llama-server")?;
        if answer.status() != 200 {
            return Ok(None);
        }
        let text = answer.body_mut().read_to_string().context("llama-server")?;
        Ok(Some(serde_json::from_str(&text).with_context(|| format!("llama-server: {path}"))?))
    }

    fn post(&self, path: &str, body: &Value) -> Result<ureq::http::Response<ureq::Body>> {
        let request = self.http.post(format!("{}{path}", self.url)).header("Content-Type", "application/json");
        let mut answer = request.send(body.to_string()).context("llama-server")?;
        if answer.status() != 200 {
            let said = answer.body_mut().read_to_string().unwrap_or_default();
            let said = serde_json::from_str::<Value>(&said)
                .ok()
                .and_then(|said| Some(said.get("error")?.get("message")?.as_str()?.to_owned()))
                .unwrap_or(said);
            bail!("llama-server: {path}: {} {said}", answer.status());
        }
        Ok(answer)
    }

    /// llama.cpp's revision, as the server says it.
    pub fn revision(&self) -> Result<Option<String>> {
        let props = self.get("/props")?;
        Ok(props.and_then(|props| Some(props.get("build_info")?.as_str()?.to_owned())))
    }

    /// A conversation as the text that the model gets.
    fn prompt(&self, messages: &[Value]) -> Result<String> {
        let mut answer = self.post("/apply-template", &json!({ "messages": messages }))?;
        let text = answer.body_mut().read_to_string().context("llama-server")?;
        let answer: Value = serde_json::from_str(&text).context("llama-server: /apply-template")?;
        let prompt = answer.get("prompt").and_then(Value::as_str);
        Ok(prompt.context("llama-server: /apply-template: expected a prompt")?.to_owned())
    }

    /// The greedy answer of `n` tokens to a conversation whose last message is the user's.
    pub fn answer(&self, messages: &[Value], n: u32) -> Result<Turn> {
        let body = json!({
            "prompt": self.prompt(messages)?,
            "n_predict": n,
            "temperature": 0,
            "ignore_eos": true,
            "cache_prompt": true,
            "stream": true,
            "return_tokens": true,
        });
        let start = Instant::now();
        let answer = self.post("/completion", &body)?;
        let mut lines = BufReader::new(answer.into_body().into_reader()).lines();
        let (mut tokens, mut text, mut first) = (Vec::new(), String::new(), None);
        let timings = loop {
            let line = lines.next().context("llama-server: the answer ends early")?.context("llama-server")?;
            let Some(event) = line.strip_prefix("data: ") else {
                ensure!(!line.starts_with("error: "), "llama-server: {line}");
                continue;
            };
            let event: Value = serde_json::from_str(event).context("llama-server: /completion")?;
            if let Some(said) = event.get("error") {
                bail!("llama-server: /completion: {said}");
            }
            let new = event.get("tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
            if !new.is_empty() {
                first.get_or_insert_with(|| start.elapsed());
            }
            tokens.extend(new.iter().filter_map(|token| u32::try_from(token.as_u64()?).ok()));
            text.push_str(event.get("content").and_then(Value::as_str).unwrap_or_default());
            if event.get("stop").and_then(Value::as_bool) == Some(true) {
                break event.get("timings").cloned().unwrap_or_default();
            }
        };
        let number = |name: &str| timings.get(name).and_then(Value::as_f64);
        let whole = |name: &str| number(name).map_or(0, |number| number as u32);
        let cache = |name: &str| timings.get("moe_hot").and_then(|cache| cache.get(name)?.as_u64());
        Ok(Turn {
            conversation: String::new(),
            kind: String::new(),
            prompt: whole("prompt_n"),
            cached: whole("cache_n"),
            first_token_ms: first.context("llama-server: an answer without tokens")?.as_secs_f64() * 1e3,
            decode: number("predicted_per_second").filter(|speed| speed.is_finite() && *speed > 0.0 && n > 1),
            tokens,
            text,
            requests: cache("requests"),
            hits: cache("hits"),
        })
    }

    /// From now on a patched server takes the times of its layers. Whether it can.
    pub fn take_times(&self) -> bool {
        self.post(LAYER_PERF, &json!({ "mode": "full" })).is_ok()
    }

    /// The times of all layers since then.
    pub fn times(&self) -> Result<Vec<LayerTimes>> {
        let perf = self.get(LAYER_PERF)?.unwrap_or_default();
        let layers = perf.get("layers").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let of_layer = |layer: &Value| {
            let number = |name: &str| layer.get(name)?.as_u64();
            Some(LayerTimes {
                layer: number("layer")?.try_into().ok()?,
                calls: number("calls")?,
                cpu_us: number("cpu_us")?,
                device_us: number("device_us")?,
                wait_us: number("wait_us")?,
            })
        };
        Ok(layers.iter().filter_map(of_layer).collect())
    }
}
