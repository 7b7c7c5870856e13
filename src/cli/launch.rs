//! Starting the program: environment, expert placement, exec.

use super::failure::{Failure, OrFail, named_by_user};
use super::flags::{self, Flags};
use super::program::{Program, places_experts};
use super::{devices, fit};
use crate::gguf::ModelFile;
use crate::options::HOT_CACHE_DEVICE;
use crate::options::host::{self, BACKEND_PATH, FIT_TARGET, MODEL, NO_HOST, PREPARED};
use anyhow::{Context, Error, Result, ensure};
use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The plugin's file name.
const PLUGIN: &str = "libggml_moe_hot.so";

/// Replaces this process by the program. Returns only if that fails.
pub fn launch(command: Vec<OsString>) -> Failure {
    let mut command = match own_files().or_internal().and_then(|(folder, plugin)| prepare(command, &folder, &plugin)) {
        Ok(command) => command,
        Err(failure) => return failure,
    };
    let error = command.exec();
    let what = format!("{}: cannot be started", Path::new(command.get_program()).display());
    named_by_user(Error::new(error).context(what))
}

/// The folder of this executable, and the plugin in or near it.
fn own_files() -> Result<(PathBuf, PathBuf)> {
    let own = env::current_exe().and_then(|path| path.canonicalize()).context("finding our own executable")?;
    let folder = own.parent().context("finding our own folder")?.to_path_buf();
    let candidates = [folder.join(PLUGIN), folder.join("../lib").join(PLUGIN)];
    let plugin = candidates.iter().find(|path| path.is_file());
    let plugin = plugin
        .with_context(|| format!("{}: the plugin is missing; build it with scripts/setup", candidates[0].display()))?;
    Ok((folder, plugin.clone()))
}

/// Everything that can be refused before the program starts.
fn prepare(command: Vec<OsString>, own_folder: &Path, plugin: &Path) -> Result<Command, Failure> {
    let mut command = command.into_iter();
    let name = command.next().context("expected a llama.cpp program such as llama-server").or_input()?;
    let (mut flags, args) = flags::take(command.collect()).or_input()?;
    let model = MODEL.value(&args).and_then(|path| ModelFile::open(Path::new(&path)).ok());
    flags.validate(model.as_ref())?;
    refuse_another_backend(plugin).or_input()?;
    let program = Program::find(&name, own_folder).or_input()?;
    program.check_revision()?;

    let fit_target = fit_target(&program, &args, &flags, model.as_ref())?;
    let mut run = Command::new(&program.path);
    if flags.config().takes_experts() && !places_experts(&args, host::is_set) {
        run.args(program.all_experts_on_cpu()?);
    }
    if args.iter().any(|arg| arg == "--no-host") {
        run.env(NO_HOST, "1");
    }
    match fit_target {
        Some(target) => {
            run.env_remove(FIT_TARGET.variable); // else the program warns that it is overwritten
            run.args(FIT_TARGET.remove_from(args)).args(["--fit-target", &target])
        }
        None => run.args(args),
    };
    run.env(BACKEND_PATH, plugin).env(PREPARED, "1").envs(flags.environment());
    Ok(run)
}

/// Checks the cache's device, and says how much memory the program must leave for the cache when it fits the model.
fn fit_target(
    program: &Program,
    args: &[OsString],
    flags: &Flags,
    model: Option<&ModelFile>,
) -> Result<Option<String>, Failure> {
    let config = flags.config();
    if !config.caches() {
        return Ok(None);
    }
    let Some(devices) = program.devices(args)? else { return Ok(None) };
    if let Some(name) = &config.device {
        devices::check_name(name, &devices).context(HOT_CACHE_DEVICE.flag).or_input()?;
    }
    Ok(fit::target(program.fitting()?, args, &config, &devices, model.and_then(ModelFile::expert_bytes)))
}

/// llama.cpp loads one backend from elsewhere; if the user has chosen another, it is not ours to replace.
fn refuse_another_backend(plugin: &Path) -> Result<()> {
    let Some(other) = host::variable(BACKEND_PATH) else { return Ok(()) };
    let is_ours =
        Path::new(&other).canonicalize().is_ok_and(|other| plugin.canonicalize().is_ok_and(|ours| ours == other));
    ensure!(
        is_ours,
        "{BACKEND_PATH} is {}; expected it unset: llama.cpp loads only one backend from there",
        Path::new(&other).display()
    );
    Ok(())
}
