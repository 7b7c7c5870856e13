//! Starting the program: environment, expert placement, exec.

use super::backend_path::check_backend_path;
use super::devices::{self, Device};
use super::failure::{Failure, OrFail, named_by_user};
use super::fit;
use super::flags;
use super::placement::places_experts;
use super::program::{self, Program};
use super::threshold;
use super::two_caches::refuse_two_caches;
use crate::gguf::ModelFile;
use crate::options::host::{
    self, BACKEND_PATH, FIT_TARGET, LAUNCHER_NO_HOST, MODEL, N_CPU_MOE, NO_HOST, PREPARED, RPC, Source, Syntax, Target,
};
use crate::options::{Config, HOT_CACHE_DEVICE};
use anyhow::{Context, Error, Result};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The plugin's file name.
const PLUGIN: &str = "libggml_moe_hot.so";

/// Replaces this process by the program. Returns only if that fails.
pub fn launch(command: Vec<OsString>) -> Failure {
    let mut command = match own_folder().or_internal().and_then(|folder| prepare(command, &folder)) {
        Ok(command) => command,
        Err(failure) => return failure,
    };
    let error = command.exec();
    let what = format!("{}: cannot be started", Path::new(command.get_program()).display());
    named_by_user(Error::new(error).context(what))
}

/// The folder of this executable.
pub fn own_folder() -> Result<PathBuf> {
    let own = env::current_exe().and_then(|path| path.canonicalize()).context("finding our own executable")?;
    Ok(own.parent().context("finding our own folder")?.to_path_buf())
}

/// The plugin, in or near our own folder.
pub fn plugin(own_folder: &Path) -> Result<PathBuf> {
    let candidates = [own_folder.join(PLUGIN), own_folder.join("../lib").join(PLUGIN)];
    let plugin = candidates.iter().find(|path| path.is_file());
    let plugin = plugin
        .with_context(|| format!("{}: the plugin is missing; build it with scripts/setup", candidates[0].display()))?;
    Ok(plugin.clone())
}

/// A model that the program, or a child of it, loads.
struct Loaded {
    target: Target,
    /// `None` where it cannot be read.
    model: Option<ModelFile>,
}

/// Everything that can be refused before the program starts. Without any of our flags and variables it is started as it is.
fn prepare(command: Vec<OsString>, own_folder: &Path) -> Result<Command, Failure> {
    let mut command = command.into_iter();
    let name = command.next().context("expected a llama.cpp program such as llama-server").or_input()?;
    let args: Vec<_> = command.collect();
    let path = program::find(&name, own_folder).or_input()?;
    let mut run = Command::new(&path);
    if !flags::are_given(&args) {
        run.args(args);
        return Ok(run);
    }
    let program = Program::learn(path, flags::first_of_theirs(&args).as_deref())?;
    let (mut flags, mut args) = flags::take(args, &program.syntax).or_input()?;
    let loaded = loaded(&program.syntax, &args);
    flags.validate(one(&loaded).and_then(|loaded| loaded.model.as_ref()))?;
    if flags.are_none() {
        run.args(args); // it was a prompt that looks like a flag
        return Ok(run);
    }
    let plugin = plugin(own_folder).or_internal()?;
    program.check(&name, &args, &plugin)?;
    check_backend_path(&plugin).or_input()?;
    let config = flags.config();
    refuse_two_caches(&config, loaded.iter().map(|loaded| &loaded.target.settings)).or_input()?;

    let fit_target = fit_target(&program, &config, &loaded)?;
    let placement = if config.takes_experts() { placement(&program.syntax, &loaded) } else { &[] };
    if !program.syntax.flags(&args).iter().any(|given| given.is_cut) {
        // Behind the user's own: of several placements the first that matches a tensor counts.
        if !placement.is_empty() && !program.syntax.reads_environment() {
            args = without(&program.syntax, args, &N_CPU_MOE); // which llama-bench would add up
        }
        if fit_target.is_some() {
            run.env_remove(FIT_TARGET.variable); // else the program warns that it is overwritten
            args = without(&program.syntax, args, &FIT_TARGET);
        }
        args.extend(placement.iter().map(OsString::from));
        args.extend(fit_target.into_iter().flat_map(|target| ["--fit-target".into(), target.into()]));
    }
    if loaded.iter().any(|loaded| loaded.target.settings.has(&NO_HOST)) {
        run.env(LAUNCHER_NO_HOST, "1");
    }
    if let Some(loaded) = one(&loaded).filter(|_| config.takes_experts()) {
        run.envs(threshold::environment(&loaded.target.settings, loaded.model.as_ref()));
    }
    run.args(args).env(BACKEND_PATH, plugin).env(PREPARED, "1").envs(flags.environment());
    Ok(run)
}

fn loaded(syntax: &Syntax, args: &[OsString]) -> Vec<Loaded> {
    let targets = Source { syntax, args }.targets();
    let open = |target: Target| {
        // Several models of llama-bench are tests, each of its own.
        let is_one = syntax.reads_environment() || target.settings.all(&MODEL).count() == 1;
        let path = target.settings.model().filter(|_| is_one);
        let model = path.and_then(|path| ModelFile::open(path).ok());
        Loaded { target, model }
    };
    targets.into_iter().map(open).collect()
}

/// The only one, if there is only one.
fn one<T>(values: &[T]) -> Option<&T> {
    if let [value] = values { Some(value) } else { None }
}

/// A command line without an option. What has no value is left for the program to refuse.
fn without(syntax: &Syntax, args: Vec<OsString>, option: &host::HostOption) -> Vec<OsString> {
    let is_it = |flag: &Option<String>| flag.as_deref().is_some_and(|flag| option.flags.contains(&flag));
    let gone: Vec<_> = syntax
        .flags(&args)
        .iter()
        .filter(|given| is_it(&given.flag) && !given.is_cut)
        .flat_map(|given| given.at..=given.at + given.values.len())
        .collect();
    args.into_iter().enumerate().filter(|(at, _)| !gone.contains(at)).map(|(_, arg)| arg).collect()
}

/// The arguments that keep all experts off the GPUs, in this program's words; none where the user has placed them, or the
/// program has no words for it.
fn placement(syntax: &Syntax, loaded: &[Loaded]) -> &'static [&'static str] {
    let is_placed = |loaded: &&Loaded| places_experts(&loaded.target.settings, loaded.model.as_ref());
    let (placed, others): (Vec<_>, Vec<_>) = loaded.iter().partition(is_placed);
    if !placed.is_empty() {
        let names: Vec<_> = others.iter().filter_map(|loaded| loaded.target.section.as_deref()).collect();
        if !names.is_empty() {
            eprintln!(
                "moe-hot: other models' sections of the presets place experts, so --cpu-moe is not added; expected \
                 cpu-moe = true in [{}] for a cache there",
                names.join("], [")
            );
        }
        &[]
    } else if syntax.knows("--cpu-moe") {
        &["--cpu-moe"]
    } else if syntax.knows("--n-cpu-moe") {
        &["-ncmoe", "999"]
    } else {
        &[]
    }
}

/// Checks the cache's device, and says how much memory the program must leave for the cache when it fits the model.
fn fit_target(program: &Program, config: &Config, loaded: &[Loaded]) -> Result<Option<String>, Failure> {
    if !config.caches() {
        return Ok(None);
    }
    // Most models of a router have the same servers.
    let mut known: BTreeMap<Vec<&OsStr>, Vec<Device>> = BTreeMap::new();
    let mut targets = Vec::new();
    for loaded in loaded {
        let settings = &loaded.target.settings;
        let devices = match known.entry(settings.all(&RPC).collect()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => match program.devices(new.key())? {
                Some(devices) => new.insert(devices),
                None => return Ok(None),
            },
        };
        let expert_bytes = loaded.model.as_ref().and_then(ModelFile::expert_bytes);
        targets.extend(fit::target(fit::Fitting::of(&program.syntax), settings, config, devices, expert_bytes));
    }
    if let Some(name) = &config.device {
        devices::check_name(name, known.values().flatten()).context(HOT_CACHE_DEVICE.flag).or_input()?;
    }
    Ok(fit::join(targets))
}
