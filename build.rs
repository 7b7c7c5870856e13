//! Generates the ggml bindings and tells the linker where the pinned llama.cpp was built.

use anyhow::{Context, Result, ensure};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::{env, fs};

const HEADER: &str = "ggml-hooks/bindings.h";
const PIN: &str = "ggml-hooks/pin.env";

fn main() -> Result<()> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    export_pin(&root)?;
    link_ggml(&root)?;
    generate_bindings(&root)
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

fn link_ggml(root: &Path) -> Result<()> {
    let libs = root.join("build/stock/bin");
    ensure!(
        libs.join("libggml-base.so").exists(),
        "{} holds no libggml-base.so: run scripts/setup first",
        libs.display()
    );
    // Cargo lets test programs find shared libraries in OUT_DIR; the plugin itself uses its host's copy.
    let links = PathBuf::from(env::var("OUT_DIR")?).join("lib");
    fs::create_dir_all(&links)?;
    for name in ["libggml.so", "libggml.so.0", "libggml-base.so", "libggml-base.so.0"] {
        let link = links.join(name);
        if fs::symlink_metadata(&link).is_err() {
            symlink(libs.join(name), &link).with_context(|| format!("linking {}", link.display()))?;
        }
    }
    println!("cargo:rustc-link-search=native={}", links.display());
    println!("cargo:rustc-link-arg=-Wl,--as-needed,-lggml,-lggml-base");
    // A refused load is followed by dlclose: keep the code mapped, whatever the host does.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    Ok(())
}

fn generate_bindings(root: &Path) -> Result<()> {
    println!("cargo:rerun-if-changed={HEADER}");
    let ggml = root.join("llama.cpp/ggml");
    ensure!(ggml.join("include/ggml.h").exists(), "{} holds no ggml headers: run scripts/setup first", ggml.display());
    bindgen::Builder::default()
        .header(root.join(HEADER).display().to_string())
        .clang_arg(format!("-I{}", ggml.join("include").display()))
        .clang_arg(format!("-I{}", ggml.join("src").display()))
        .allowlist_function("ggml_.*")
        .allowlist_type("ggml_.*")
        .allowlist_var("GGML_.*")
        .blocklist_function("ggml_.*_va")
        .prepend_enum_name(false)
        .generate()
        .context("generating bindings for ggml")?
        .write_to_file(PathBuf::from(env::var("OUT_DIR")?).join("ggml.rs"))
        .context("writing the bindings")
}
