//! What the build scripts of this workspace share: linking with the pinned llama.cpp's ggml, and bindings to it.

use anyhow::{Context, Result, ensure};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::{env, fs};

const HEADER: &str = "ggml-hooks/bindings.h";
/// The sources of another llama.cpp to build for (`scripts/setup --llama`).
const OTHER_TREE: &str = "MOE_HOT_OTHER_TREE";
const API: &str = "ggml-hooks/moe_hot_api.h";

/// Links with ggml in `build/stock`, below the repository's root: unit tests call it. The plugin needs none.
pub fn link_ggml(root: &Path) -> Result<()> {
    // A host may call dlclose on a backend it has refused or knows already: keep the code mapped, whatever it does.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    if env::var_os(OTHER_TREE).is_some() {
        return Ok(());
    }
    let libs = root.join("build/stock/bin");
    ensure!(
        libs.join("libggml-base.so").exists(),
        "{} holds no libggml-base.so: run scripts/setup first",
        libs.display()
    );
    // Cargo lets test programs find shared libraries in OUT_DIR; a backend itself uses its host's copy.
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
    Ok(())
}

/// Writes `OUT_DIR/ggml.rs`.
pub fn generate_bindings(root: &Path) -> Result<()> {
    let header = root.join(HEADER);
    println!("cargo:rerun-if-changed={}", header.display());
    println!("cargo:rerun-if-changed={}", root.join(API).display());
    println!("cargo:rerun-if-env-changed={OTHER_TREE}");
    let tree = env::var_os(OTHER_TREE).map_or_else(|| root.join("llama.cpp"), PathBuf::from);
    let ggml = tree.join("ggml");
    ensure!(ggml.join("include/ggml.h").exists(), "{} holds no ggml headers: run scripts/setup first", ggml.display());
    bindgen::Builder::default()
        .header(header.display().to_string())
        .clang_arg(format!("-I{}", ggml.join("include").display()))
        .clang_arg(format!("-I{}", ggml.join("src").display()))
        .allowlist_function("ggml_.*")
        .allowlist_type("ggml_.*|moe_hot_.*")
        .allowlist_var("GGML_.*|MOE_HOT_API_VERSION")
        .blocklist_function("ggml_.*_va")
        .prepend_enum_name(false)
        .generate()
        .context("generating bindings for ggml")?
        .write_to_file(PathBuf::from(env::var("OUT_DIR")?).join("ggml.rs"))
        .context("writing the bindings")
}
