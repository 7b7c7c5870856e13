//! The expert cache that later revisions of llama.cpp have themselves.

use crate::options::host::{self, MOE_CACHE_MIB, Settings, whole_number};
use crate::options::{Config, HOT_CACHE};
use anyhow::{Result, bail};
use std::ffi::{OsStr, OsString};

/// llama.cpp's own cache and ours would keep the same experts. `settings`: what each process that loads a model is told.
pub fn refuse_two_caches<'a>(config: &Config, settings: impl Iterator<Item = &'a Settings>) -> Result<()> {
    let mut sizes: Vec<_> =
        settings.filter_map(|settings| settings.last(&MOE_CACHE_MIB)).map(OsStr::to_owned).collect();
    if sizes.is_empty() {
        sizes.extend(host::variable(MOE_CACHE_MIB.variable)); // whether the program knows it yet or not
    }
    let is_on = |size: &&OsString| whole_number(&size.to_string_lossy()) != Some(0);
    if config.caches()
        && let Some(size) = sizes.iter().find(is_on)
    {
        bail!(
            "{} (or {}) is {}: llama.cpp's own cache would keep the experts, and ours would never be asked for them; \
             expected either that or {}",
            MOE_CACHE_MIB.flags[0],
            MOE_CACHE_MIB.variable,
            size.display(),
            HOT_CACHE.flag
        );
    }
    Ok(())
}
