//! The command line of every run: what all arms have in common, and what tells them apart.
//!
//! Stock arms are started as they are. Ours go through the launcher, as a user would start them. No setting of llama.cpp's
//! or ours comes from the environment or a configuration file.

use super::arm::{Arm, Tuned};
use super::settings::Settings;
use crate::options::host::{self, BACKEND_PATH, CONFIG_HOME};
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Tokens of a chunk of which logits are compared, and of a batch: so few that every batch is the cache's.
pub const LOGITS_CONTEXT: u32 = 128;
const LOGITS_BATCH: u32 = 16;
/// Chunks at most.
pub const LOGITS_CHUNKS: u32 = 8;
/// llama.cpp's own default for `-b`.
const BATCH: u32 = 2048;
/// What `auto` calls a model's profile.
const AUTO_PROFILE: &str = ".experts.json";

/// Makes command lines.
pub struct Commands<'a> {
    /// What was asked.
    pub settings: &'a Settings,
    /// Our own executable.
    pub launcher: PathBuf,
    /// Where profiles and links are, inside the folder of the comparison.
    pub work: PathBuf,
    /// The recorded profile.
    pub profile: PathBuf,
    /// Whether the server keeps prompts of earlier conversations in main memory unless told not to.
    pub has_cache_ram: bool,
}

/// llama-bench's tests.
pub struct Tests {
    /// Lengths of prompts.
    pub pp: Vec<u32>,
    /// Tokens decoded.
    pub tg: u32,
    /// Tokens in the context before.
    pub depth: Vec<u32>,
    /// Repetitions, the warm-up included.
    pub repetitions: u32,
    /// `-t`, several to choose from.
    pub threads: Vec<u16>,
    /// `-ub`, several to choose from.
    pub ubatch: Vec<u32>,
}

impl Commands<'_> {
    /// llama-bench with an arm.
    pub fn bench(&self, arm: Arm, tuned: &Tuned, tests: &Tests) -> Result<Command> {
        let ubatch = tests.ubatch.iter().copied().max().unwrap_or(tuned.ubatch);
        let mut words = self.common(&list(&tests.ubatch), ubatch, &list(&tests.threads));
        let tg = tests.tg.to_string();
        let pp = if tests.pp.is_empty() { "0".to_owned() } else { list(&tests.pp) };
        words.extend(owned(&["-p", &pp]));
        words.extend(owned(&["-n", &tg, "-d", &list(&tests.depth), "-r", &tests.repetitions.to_string()]));
        words.extend(owned(&["--repack", "0", "-dev", &self.settings.device, "-o", "json", "-v"]));
        if arm == Arm::Fit {
            words.extend(owned(&["-fitc", &self.settings.longest_context().to_string()]));
        }
        self.arm(&self.settings.bench, arm, tuned, words, arm.bench_placement(tuned))
    }

    /// llama-bench without experts on the device, only to see what the longest context takes.
    pub fn bench_memory(&self, tuned: &Tuned) -> Result<Command> {
        let (prompt, depth) = self.settings.longest_test();
        let tests = Tests {
            pp: vec![prompt],
            tg: 0,
            depth: vec![depth],
            repetitions: 1,
            threads: vec![tuned.threads],
            ubatch: vec![tuned.ubatch],
        };
        let mut command = self.bench(Arm::CpuMoe, tuned, &tests)?;
        command.arg("--no-warmup");
        Ok(command)
    }

    /// llama-server with an arm, on a port of 127.0.0.1.
    pub fn server(&self, arm: Arm, tuned: &Tuned, port: u16) -> Result<Command> {
        let mut words = self.common(&tuned.ubatch.to_string(), tuned.ubatch, &tuned.threads.to_string());
        words.extend(owned(&["--host", "127.0.0.1", "--port", &port.to_string()]));
        words.extend(owned(&["-c", &self.settings.context.to_string(), "-np", "1"]));
        words.extend(owned(&["--no-repack", "--device", &self.settings.device, "-lv", "4"]));
        if self.has_cache_ram {
            words.extend(owned(&["--cache-ram", "0"]));
        }
        self.arm(&self.settings.server, arm, tuned, words, arm.placement(tuned))
    }

    /// The same without a cache, which records a profile.
    pub fn recording(&self, tuned: &Tuned, port: u16) -> Result<Command> {
        let stock = self.server(Arm::CpuMoe, tuned, port)?;
        let mut command = self.clean(&self.launcher);
        command.arg(stock.get_program()).args(stock.get_args()).arg("--moe-layer-perf-out").arg(&self.profile);
        Ok(command)
    }

    /// llama-perplexity that writes logits of `text` to `base`, or compares its own with those.
    pub fn logits(&self, arm: Arm, tuned: &Tuned, text: &Path, base: &Path, compares: bool) -> Result<Command> {
        let [context, batch, chunks] = [LOGITS_CONTEXT, LOGITS_BATCH, LOGITS_CHUNKS].map(|n| n.to_string());
        let mut words = self.common(&batch, 0, &tuned.threads.to_string());
        words.extend(owned(&["-f", &text.display().to_string(), "-c", &context, "--chunks", &chunks]));
        words.extend(owned(&["--no-repack", "--device", &self.settings.device]));
        words.extend(owned(&["--kl-divergence-base", &base.display().to_string()]));
        if compares {
            words.push("--kl-divergence".into());
        }
        let mut command = self.arm(&self.settings.perplexity, arm, tuned, words, arm.placement(tuned))?;
        if arm.is_ours() {
            // llama.cpp may lose the last lines of its log at this program's end, and with them ours.
            command.arg("--moe-layer-perf-out").arg(self.hits());
        }
        Ok(command)
    }

    /// Where a run of [`Self::logits`] counts its hits.
    pub fn hits(&self) -> PathBuf {
        self.work.join("hits.json")
    }

    /// What all arms and programs are told. `batch`: the largest ubatch; 0 for one as large as the ubatch itself.
    fn common(&self, ubatch: &str, batch: u32, threads: &str) -> Vec<String> {
        let settings = self.settings;
        let batch = if batch == 0 { ubatch.to_owned() } else { batch.max(BATCH).to_string() };
        let mut words = owned(&["-t", threads, "-ub", ubatch, "-b", &batch]);
        words.extend(owned(&["-ctk", &settings.cache_type, "-ctv", &settings.cache_type, "-fa", &settings.flash_attn]));
        if let Some(servers) = &settings.rpc {
            words.extend(owned(&["--rpc", servers]));
        }
        words
    }

    fn arm(
        &self,
        program: &Path,
        arm: Arm,
        tuned: &Tuned,
        words: Vec<String>,
        placement: Vec<String>,
    ) -> Result<Command> {
        let mut command = self.clean(if arm.is_ours() { &self.launcher } else { program });
        if arm.is_ours() {
            command.arg(program);
        }
        command.arg("-m").arg(if arm == Arm::HotCold { self.cold_model()? } else { self.settings.model.clone() });
        command.args(words).args(placement);
        if arm.is_ours() {
            let profile = match arm {
                Arm::HotFixed => self.profile.clone().into_os_string(),
                Arm::HotProfile => self.learning_profile()?.into_os_string(),
                _ => OsString::from("auto"),
            };
            command.arg("--moe-hot-cache").arg(profile);
            command.args(["--moe-hot-cache-max-mib", &tuned.cache_mib.to_string()]);
            command.args(["--moe-hot-cache-device", &self.settings.device]);
            if arm == Arm::HotFixed {
                command.args(["--moe-hot-cache-update-rate", "0"]);
            }
        }
        Ok(command)
    }

    /// A program that sees no setting but those on its command line.
    fn clean(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env_remove(BACKEND_PATH).env(CONFIG_HOME, "/dev/null");
        host::option_variables().for_each(|variable| {
            command.env_remove(variable);
        });
        command
    }

    /// A copy of the profile, since what is learnt goes into it.
    fn learning_profile(&self) -> Result<PathBuf> {
        let copy = self.work.join("learning.json");
        fs::copy(&self.profile, &copy).with_context(|| copy.display().to_string())?;
        Ok(copy)
    }

    /// The model under another name, so that `auto` finds no profile beside it.
    fn cold_model(&self) -> Result<PathBuf> {
        let folder = self.work.join("cold");
        let done = || -> std::io::Result<PathBuf> {
            if folder.exists() {
                fs::remove_dir_all(&folder)?;
            }
            fs::create_dir_all(&folder)?;
            let model = &self.settings.model;
            let name = model.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let parts = name.split_once("-00001-of-").map(|(first, _)| format!("{first}-0"));
            let siblings = fs::read_dir(model.parent().unwrap_or(Path::new("/")))?;
            for sibling in siblings {
                let sibling = sibling?;
                let other = sibling.file_name().to_string_lossy().into_owned();
                let is_part = parts.as_ref().is_some_and(|first| other.starts_with(first.as_str()));
                if other == name || (is_part && !other.ends_with(AUTO_PROFILE)) {
                    symlink(sibling.path(), folder.join(&other))?;
                }
            }
            Ok(folder.join(name))
        };
        done().with_context(|| folder.display().to_string())
    }
}

/// A command line as one would type it.
pub fn typed(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| quoted(&word.to_string_lossy())).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

fn list<T: ToString>(values: &[T]) -> String {
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::arm::ARMS;
    use super::super::settings::testing::settings;
    use super::*;

    const TUNED: Tuned = Tuned { threads: 3, ubatch: 512, n_cpu_moe: 4, cache_mib: 6, fit_target_mib: 100 };

    /// Of every arm, what llama-bench, the server and llama-perplexity are told.
    fn commands() -> Vec<(Arm, [String; 3])> {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("m.gguf");
        let profile = folder.path().join("profile.json");
        for file in [&model, &profile] {
            fs::write(file, "x").unwrap();
        }
        let settings = Settings { model, ..settings() };
        let commands = Commands {
            settings: &settings,
            launcher: "/bin/moe-hot".into(),
            work: folder.path().into(),
            profile,
            has_cache_ram: true,
        };
        let tests =
            Tests { pp: vec![64, 128], tg: 16, depth: vec![0], repetitions: 2, threads: vec![3], ubatch: vec![512] };
        let of = |arm: Arm| {
            [
                commands.bench(arm, &TUNED, &tests).unwrap(),
                commands.server(arm, &TUNED, 1).unwrap(),
                commands.logits(arm, &TUNED, Path::new("t"), Path::new("b"), true).unwrap(),
            ]
            .map(|command| typed(&command))
        };
        ARMS.into_iter().map(|arm| (arm, of(arm))).collect()
    }

    #[test]
    fn all_arms_have_the_same_threads_ubatch_cache_type_attention_and_device() {
        for (arm, lines) in commands() {
            for line in &lines {
                for word in ["-t 3", "-ctk f16 -ctv f16", "-fa auto", "RPC0"] {
                    assert!(line.contains(word), "{arm:?}: {line}");
                }
            }
            assert!(lines[0].contains("-ub 512 -b 2048") && lines[0].contains("--repack 0"), "{}", lines[0]);
            assert!(lines[0].contains("-p 64,128 -n 16 -d 0 -r 2"), "{}", lines[0]);
            assert!(lines[1].contains("-c 512 -np 1") && lines[1].contains("--no-repack"), "{}", lines[1]);
            assert!(lines[2].contains("-ub 16 -b 16"), "{}", lines[2]);
        }
    }

    #[test]
    fn only_ours_goes_through_the_launcher_and_has_a_cache() {
        for (arm, lines) in commands() {
            for line in lines {
                assert_eq!(line.starts_with("/bin/moe-hot "), arm.is_ours(), "{line}");
                assert_eq!(line.contains("--moe-hot-cache-max-mib 6"), arm.is_ours(), "{line}");
                assert_eq!(line.contains("--moe-hot-cache-update-rate 0"), arm == Arm::HotFixed, "{line}");
                assert_eq!(line.contains("--moe-hot-cache auto"), arm == Arm::HotCold, "{line}");
            }
        }
    }

    #[test]
    fn a_cold_start_sees_the_whole_model_and_no_profile() {
        let folder = tempfile::tempdir().unwrap();
        let names =
            ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "m-00001-of-00002.gguf.experts.json", "other.gguf"];
        for name in names {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        let settings = Settings { model: folder.path().join(names[0]), ..settings() };
        let work = tempfile::tempdir().unwrap();
        let commands = Commands {
            settings: &settings,
            launcher: "m".into(),
            work: work.path().into(),
            profile: "p".into(),
            has_cache_ram: false,
        };
        let model = commands.cold_model().unwrap();
        fs::write(model.with_file_name("m-00001-of-00002.gguf.experts.json"), "learnt").unwrap();
        let model = commands.cold_model().unwrap();
        let mut seen: Vec<_> =
            fs::read_dir(model.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        seen.sort();
        assert_eq!(seen, names[..2]);
    }

    #[test]
    fn command_lines_can_be_typed() {
        let mut command = Command::new("/a b");
        command.args(["-m", "it's", "-p", ""]);
        assert_eq!(typed(&command), r"'/a b' -m 'it'\''s' -p ''");
    }
}
