//! What a comparison was asked to do: the part of `results.json` that must be the same for it to go on.

use super::arm::Arm;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;

/// Everything that decides what is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The model, absolute; of a split model the first part.
    pub model: PathBuf,
    /// Bytes of that file, so that another one in its place is noticed.
    pub model_bytes: u64,
    /// Device memory for everything, bytes; `None`: what is free, less 1 GiB.
    pub vram: Option<u64>,
    /// Prompt lengths, tokens.
    pub pp: Vec<u32>,
    /// Tokens decoded in a test.
    pub tg: u32,
    /// Tokens in the context before a test.
    pub depth: Vec<u32>,
    /// Pairs: how often every arm runs.
    pub pairs: u32,
    /// Where the prompts are from.
    pub prompts: String,
    /// Start of their SHA-256.
    pub prompts_sha256: String,
    /// Tokens of an answer.
    pub answer: u32,
    /// The server's context, tokens.
    pub context: u32,
    /// The arms, in the order of tables.
    pub arms: Vec<Arm>,
    /// ggml's name of the device.
    pub device: String,
    /// RPC servers, as given.
    pub rpc: Option<String>,
    /// llama-bench.
    pub bench: PathBuf,
    /// llama-server.
    pub server: PathBuf,
    /// llama-perplexity.
    pub perplexity: PathBuf,
    /// llama.cpp's revision, as the programs say it.
    pub revision: String,
    /// `-t`, if it is not to be tuned.
    pub threads: Option<u16>,
    /// `-ub`, if it is not to be tuned.
    pub ubatch: Option<u32>,
    /// `-ctk` and `-ctv`.
    pub cache_type: String,
    /// `-fa`.
    pub flash_attn: String,
    /// Version of moe-hot.
    pub moe_hot: String,
    /// Start of the SHA-256 of moe-hot and its plugin, so that another build of the same version is noticed.
    #[serde(default)]
    pub moe_hot_build: String,
    /// Variables that change what all programs do, `NAME=VALUE`.
    pub environment: Vec<String>,
}

/// What a user calls a setting.
const FLAGS: [(&str, &str); 19] = [
    ("model", "--model"),
    ("vram", "--vram"),
    ("pp", "--pp"),
    ("tg", "--tg"),
    ("depth", "--depth"),
    ("pairs", "--pairs"),
    ("prompts", "--prompts"),
    ("prompts_sha256", "the text of --prompts"),
    ("answer", "--answer"),
    ("context", "--ctx-size"),
    ("arms", "--arms"),
    ("device", "--device"),
    ("rpc", "--rpc"),
    ("threads", "--threads"),
    ("ubatch", "--ubatch-size"),
    ("revision", "the revision of llama.cpp"),
    ("moe_hot", "moe-hot"),
    ("moe_hot_build", "the build of moe-hot"),
    ("environment", "the environment"),
];

impl Settings {
    /// The first setting in which `other` differs: what it is called, its value here and there.
    pub fn difference(&self, other: &Self) -> Option<(String, String, String)> {
        let (Ok(Value::Object(mine)), Ok(Value::Object(theirs))) =
            (serde_json::to_value(self), serde_json::to_value(other))
        else {
            return Some(("settings".into(), "unknown".into(), "unknown".into()));
        };
        let show = |value: Option<&Value>| match value {
            None | Some(Value::Null) => "not given".to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(values)) => values.iter().map(plain).collect::<Vec<_>>().join(","),
            Some(value) => value.to_string(),
        };
        let (name, value) = mine.iter().find(|(name, value)| theirs.get(name.as_str()) != Some(value))?;
        let flag = FLAGS
            .iter()
            .find(|(known, _)| known == name)
            .map_or_else(|| format!("--{}", name.replace('_', "-")), |(_, flag)| (*flag).to_owned());
        Some((flag, show(Some(value)), show(theirs.get(name))))
    }

    /// The longest prompt of llama-bench's tests, and the most tokens that are in the context before it.
    pub fn longest_test(&self) -> (u32, u32) {
        let most = |values: &[u32]| values.iter().copied().max().unwrap_or(0);
        (most(&self.pp), most(&self.depth))
    }

    /// Tokens of the longest context of llama-bench's tests.
    pub fn longest_context(&self) -> u32 {
        let (prompt, depth) = self.longest_test();
        depth.saturating_add(prompt.max(self.tg))
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
pub mod testing {
    use super::*;
    use crate::cli::compare::arm::ARMS;

    /// Settings for tests.
    pub fn settings() -> Settings {
        Settings {
            model: "/m.gguf".into(),
            model_bytes: 1,
            vram: Some(100 << 20),
            pp: vec![64, 128],
            tg: 16,
            depth: vec![0, 32],
            pairs: 2,
            prompts: "built in".into(),
            prompts_sha256: "00".into(),
            answer: 8,
            context: 512,
            arms: ARMS.to_vec(),
            device: "RPC0".into(),
            rpc: None,
            bench: "/bin/llama-bench".into(),
            server: "/bin/llama-server".into(),
            perplexity: "/bin/llama-perplexity".into(),
            revision: "11312 (0c1e57098)".into(),
            threads: None,
            ubatch: None,
            cache_type: "f16".into(),
            flash_attn: "auto".into(),
            moe_hot: "0.1.0".into(),
            moe_hot_build: "00".into(),
            environment: vec!["X=1".into()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::settings;
    use super::*;

    #[test]
    fn other_settings_are_named_as_the_user_types_them() {
        let begun = settings();
        assert_eq!(begun.difference(&settings()), None);
        let other = Settings { pairs: 3, ..settings() };
        assert_eq!(begun.difference(&other).unwrap(), ("--pairs".into(), "2".into(), "3".into()));
        let other = Settings { depth: vec![0], ..settings() };
        assert_eq!(begun.difference(&other).unwrap(), ("--depth".into(), "0,32".into(), "0".into()));
        let other = Settings { vram: None, ..settings() };
        assert_eq!(begun.difference(&other).unwrap().2, "not given");
        let other = Settings { arms: vec![Arm::CpuMoe, Arm::HotCold], ..settings() };
        assert_eq!(begun.difference(&other).unwrap().2, "cpu-moe,hot-cold");
    }

    #[test]
    fn every_setting_that_differs_is_found() {
        let Value::Object(fields) = serde_json::to_value(settings()).unwrap() else { panic!("no object") };
        for name in fields.keys() {
            let mut changed = fields.clone();
            let value = &mut changed[name];
            *value = match &*value {
                Value::String(_) => Value::from("other"),
                Value::Null if name == "rpc" => Value::from("other"),
                Value::Array(_) if name == "arms" => serde_json::json!(["fit"]),
                Value::Array(_) if name == "environment" => serde_json::json!(["Y=2"]),
                Value::Array(_) => serde_json::json!([7]),
                _ => Value::from(7),
            };
            let other: Settings = serde_json::from_value(Value::Object(changed)).unwrap();
            let flag = settings().difference(&other).unwrap().0;
            assert!(
                flag.replace('-', "_").contains(name.split('_').next().unwrap())
                    || FLAGS.iter().any(|(_, f)| *f == flag)
            );
        }
    }

    #[test]
    fn memory_is_planned_for_the_longest_context() {
        assert_eq!((settings().longest_test(), settings().longest_context()), ((128, 32), 160));
        assert_eq!(Settings { tg: 500, ..settings() }.longest_context(), 532);
    }
}
