//! The one place where llama.cpp looks for a backend from elsewhere, which the plugin needs.

use crate::options::host::{self, BACKEND_PATH};
use anyhow::{Result, bail};
use std::path::Path;

/// Refuses what the user has put there, unless it is the plugin: it is not ours to replace.
pub fn check_backend_path(plugin: &Path) -> Result<()> {
    match host::variable(BACKEND_PATH) {
        Some(path) => check(Path::new(&path), plugin),
        None => Ok(()),
    }
}

fn check(given: &Path, plugin: &Path) -> Result<()> {
    let (shown, ours) = (given.display(), plugin.display());
    if given.is_dir() {
        bail!("{BACKEND_PATH} is {shown}, a folder; expected it unset, or a library's file: {ours}");
    }
    let Ok(library) = given.canonicalize() else {
        bail!("{BACKEND_PATH} is {shown}, where nothing is; expected it unset, or {ours}");
    };
    if !plugin.canonicalize().is_ok_and(|plugin| plugin == library) {
        bail!(
            "{BACKEND_PATH} is {shown}, another library; llama.cpp loads only one from there: expected it unset, or none \
             of moe-hot's options"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_the_plugin_itself_may_be_there() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("plugin.so"), "").unwrap();
        fs::write(at("other.so"), "").unwrap();
        symlink(at("plugin.so"), at("link.so")).unwrap();
        assert!(check(&at("plugin.so"), &at("plugin.so")).is_ok() && check(&at("link.so"), &at("plugin.so")).is_ok());
        for (name, said) in [("other.so", "only one"), ("none.so", "where nothing is"), ("", "a folder")] {
            let message = check(&at(name), &at("plugin.so")).unwrap_err().to_string();
            assert!(message.contains(said) && message.contains("expected it unset"), "{message}");
        }
    }
}
