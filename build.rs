//! Generates the ggml bindings, and tells the linker where unit tests find the pinned llama.cpp. With the feature `llama` it
//! builds that first, and its patched programs.

#[path = "ggml-hooks/bindgen.rs"]
mod hooks;
#[cfg(feature = "llama")]
#[path = "ggml-hooks/llama.rs"]
mod llama;
#[path = "ggml-hooks/look_up.rs"]
mod look_up;

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::{env, fs};

const PIN: &str = "ggml-hooks/pin.env";

fn main() -> Result<()> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    export_pin(&root)?;
    #[cfg(feature = "llama")]
    llama::build_stock(&root)?;
    hooks::link_ggml(&root)?;
    #[cfg(feature = "llama")]
    llama::build_patched(&root)?;
    hooks::generate_bindings(&root)?;
    look_up::split_bindings(&root)
}

/// Makes `LLAMA_COMMIT`, `LLAMA_BUILD` and `GGML_VERSION` readable with `env!`.
fn export_pin(root: &Path) -> Result<()> {
    println!("cargo:rerun-if-changed={PIN}");
    let text = fs::read_to_string(root.join(PIN)).with_context(|| format!("reading {PIN}"))?;
    for (key, value) in text.lines().filter_map(|line| line.split_once('=')) {
        println!("cargo:rustc-env={key}={value}");
    }
    Ok(())
}
