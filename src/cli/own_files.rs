//! The files that the user names for us: each is looked at before the program starts.

use super::failure::told;
use super::same_model::{RecordedFrom, check_model};
use crate::files::{check, is_same_file, open_to_read, read_start};
use crate::gguf::ModelFile;
use crate::options::host;
use crate::options::launcher::SAID_QUANTISATION;
use crate::options::{Config, PERF_OUT, TRACE_OUT};
use crate::profile::{OutputFile, RecordedProfile, other_quantisation};
use crate::trace::MAGIC;
use anyhow::{Context, Error, Result, bail};
use std::io;
use std::path::{Path, PathBuf};

/// A path where a trace may be written: absolute, free or an earlier trace, in a folder or on a file that we may write to.
pub fn trace_to_write(path: &Path) -> Result<PathBuf> {
    const EXPECTED: &str = "expected a new file or an earlier trace";
    let path = absolute(path)?;
    let with_path = || path.display().to_string();
    check(&path).map_err(told).context(EXPECTED).with_context(with_path)?;
    match open_to_read(&path).and_then(|file| read_start(&file, MAGIC.len())) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::new(error).context("cannot be read")).with_context(with_path)
        }
        Ok(start) if !start.is_empty() && start != MAGIC => bail!("{}: {EXPECTED}", with_path()),
        _ => Ok(path),
    }
}

/// A path where a profile may be written: absolute, free or held by a profile, in a folder or on a file that we may write to.
pub fn profile_to_write(path: &Path) -> Result<PathBuf> {
    const EXPECTED: &str = "expected a new file or an earlier profile";
    let path = absolute(path)?;
    check(&path).map_err(told).with_context(|| path.display().to_string()).context(EXPECTED)?;
    OutputFile::check(&path).context(EXPECTED)?;
    Ok(path)
}

/// A profile to read: absolute, whole, and of this model, or of another quantisation of it, which is said.
pub fn profile_to_read(path: &Path, model: Option<&ModelFile>, learns: bool) -> Result<(PathBuf, RecordedFrom)> {
    let path = absolute(path)?;
    let profile = RecordedProfile::read(&path)?;
    let Some(model) = model else { return Ok((path, RecordedFrom::ThisModel)) };
    let from = check_model(&profile, model).map_err(|error| crate::Error::file(&path, error))?;
    if from == RecordedFrom::OtherQuantisation && host::variable(SAID_QUANTISATION).is_none() {
        eprintln!("moe-hot: {}", other_quantisation(&path, learns));
    }
    Ok((path, from))
}

/// Fails if one file is to be both a trace and a profile.
pub fn check_apart(config: &Config) -> Result<()> {
    match (&config.trace_out, &config.perf_out) {
        (Some(trace), Some(profile)) if is_same_file(trace, profile) => bail!(
            "{} and {} name one file, {}; expected a file for each",
            TRACE_OUT.flag,
            PERF_OUT.flag,
            profile.display()
        ),
        _ => Ok(()),
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("{path:?}: expected a file name"))
}
