//! Generates the ggml bindings and tells the linker where the pinned llama.cpp was built.

#[path = "../../ggml-hooks/bindgen.rs"]
mod hooks;

use anyhow::{Context, Result};
use std::env;
use std::path::PathBuf;

fn main() -> Result<()> {
    let package = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let root = package.ancestors().nth(2).context("the package lies in tests/fake-device")?;
    hooks::link_ggml(root)?;
    hooks::generate_bindings(root)
}
