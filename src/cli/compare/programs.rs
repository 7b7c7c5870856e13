//! The programs that are compared: where they are, which llama.cpp they are, and what they know.

use super::fairness::check_programs;
use crate::cli::devices::Device;
use crate::cli::failure::{Failure, OrFail};
use crate::cli::launch::own_folder;
use crate::cli::program::{self, Program};
use crate::options::HOT_CACHE;
use anyhow::{Context, anyhow};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

const BENCH: &str = "llama-bench";
const SERVER: &str = "llama-server";
const PERPLEXITY: &str = "llama-perplexity";
const MOE_CACHE: &str = "--moe-cache-mib";

/// All of them, of one revision.
pub struct Programs {
    /// llama-bench, to be asked for devices.
    pub bench: Program,
    /// Its path.
    pub bench_path: PathBuf,
    /// llama-server's path.
    pub server_path: PathBuf,
    /// llama-perplexity's path.
    pub perplexity_path: PathBuf,
    /// llama.cpp's revision.
    pub revision: String,
    /// Whether llama-server and llama-perplexity have llama.cpp's own expert cache.
    pub server_knows_moe_cache: bool,
    /// Whether llama-bench has.
    pub bench_knows_moe_cache: bool,
    /// Whether the server is patched, and says the times of its layers.
    pub says_times: bool,
    /// Whether the server knows `--cache-ram`.
    pub server_has_cache_ram: bool,
}

impl Programs {
    /// Finds them in `folder`, else as the launcher does: beside us, in our own build of stock, in PATH.
    pub fn find(folder: Option<&Path>) -> Result<Self, Failure> {
        let own = own_folder().or_internal()?;
        let find = |name: &str| {
            let path = match folder.map(|folder| in_folder(folder, name)) {
                // llama.cpp's patched programs are without it.
                Some(path) if name != PERPLEXITY || path.exists() => {
                    program::find(path.as_os_str(), &own).context("--programs")
                }
                _ => program::find(OsStr::new(name), &own),
            };
            let path = path.or_input()?;
            path.canonicalize().with_context(|| path.display().to_string()).or_internal()
        };
        let (bench_path, server_path, perplexity_path) = (find(BENCH)?, find(SERVER)?, find(PERPLEXITY)?);
        let learn = |path: &Path| Program::learn(path.to_path_buf(), None);
        let (bench, server, perplexity) = (learn(&bench_path)?, learn(&server_path)?, learn(&perplexity_path)?);
        let all = [(&bench, &bench_path), (&server, &server_path), (&perplexity, &perplexity_path)];
        let versions = all.map(|(program, path)| (path.display().to_string(), program.version().map(str::to_owned)));
        check_programs(&versions).or_input()?;
        let Some(revision) = versions.into_iter().find_map(|(_, version)| version) else {
            return Err(Failure::Input(anyhow!(
                "{}: does not say which llama.cpp it is; expected a program of llama.cpp",
                bench_path.display()
            )));
        };
        Ok(Self {
            revision,
            server_knows_moe_cache: server.syntax.knows(MOE_CACHE),
            bench_knows_moe_cache: bench.syntax.knows(MOE_CACHE),
            says_times: server.syntax.knows(HOT_CACHE.flag),
            server_has_cache_ram: server.syntax.knows("--cache-ram"),
            bench,
            bench_path,
            server_path,
            perplexity_path,
        })
    }

    /// The devices that llama-bench sees.
    pub fn devices(&self, rpc: Option<&str>) -> Result<Vec<Device>, Failure> {
        let servers: Vec<_> = rpc.into_iter().map(OsStr::new).collect();
        Ok(self.bench.devices(&servers)?.unwrap_or_default())
    }
}

/// A path, whatever the folder is called: a bare name would be looked for elsewhere.
fn in_folder(folder: &Path, name: &str) -> PathBuf {
    Path::new(".").join(folder).join(name)
}
