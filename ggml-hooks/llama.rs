//! With the feature `llama`: builds llama.cpp untouched (`build/stock`), then its programs with our patches (`build/patched`).

use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// What is wanted of the untouched tree.
const STOCK_PROGRAMS: [&str; 8] = [
    "llama-server",
    "llama-bench",
    "llama-completion",
    "llama-quantize",
    "llama-perplexity",
    "llama-imatrix",
    "ggml-rpc-server",
    "test-backend-ops",
];
/// What is wanted of the patched one.
const PATCHED_PROGRAMS: [&str; 4] = ["llama-server", "llama-cli", "llama-completion", "llama-bench"];
/// Folders of llama.cpp with files that the patches touch; the glue's headers come into the first.
const PATCHED_FOLDERS: [&str; 3] = ["common", "tools/server", "tools/llama-bench"];
const PATCHES: &str = "ggml-hooks/patches";
const GLUE: &str = "ggml-hooks/glue";
/// The page that the server shows.
const PAGE: &str = "ggml-hooks/page.html";
/// The plugin's file name.
const PLUGIN: &str = "libggml_moe_hot.so";
/// Names another folder than `build/patched`.
const OTHER_FOLDER: &str = "MOE_HOT_PATCHED_BUILD";
/// Names a folder that holds another llama.cpp as the repository's root holds ours: `llama.cpp` and `build/stock`, to which
/// `build/patched` is added (`scripts/setup --llama`).
const OTHER_HOME: &str = "MOE_HOT_LLAMA_HOME";

/// llama.cpp as it is, where it has not been built yet.
pub fn build_stock(root: &Path) -> Result<()> {
    println!("cargo:rerun-if-env-changed={OTHER_HOME}");
    if env::var_os(OTHER_HOME).is_some() {
        return Ok(()); // The script has built it.
    }
    let folder = root.join("build/stock");
    let source = root.join("llama.cpp");
    ensure!(source.join("CMakeLists.txt").exists(), "{} is empty: run scripts/fetch-llama first", source.display());
    if STOCK_PROGRAMS.iter().all(|program| folder.join("bin").join(program).exists()) {
        return Ok(());
    }
    // The crate builds in a folder `build` below the one that it is given.
    let outer = root.join("build/stock.outer");
    fs::create_dir_all(&folder)?;
    fs::create_dir_all(&outer)?;
    link(&folder, &outer.join("build"))?;
    let mut config = configuration(&source, &outer, &STOCK_PROGRAMS, &Build::pinned(root)?);
    for option in ["GGML_AVX2", "GGML_FMA", "GGML_F16C", "GGML_BMI2", "GGML_RPC", "LLAMA_BUILD_TESTS"] {
        config.define(option, "ON");
    }
    config.define("CMAKE_PROJECT_INCLUDE", root.join("ggml-hooks/stock.cmake"));
    config.build();
    Ok(())
}

/// The patched programs, linked with what `build_stock` has made.
pub fn build_patched(root: &Path) -> Result<()> {
    for input in [PATCHES, GLUE, PAGE, "ggml-hooks/patched.cmake", "ggml-hooks/llama.rs"] {
        println!("cargo:rerun-if-changed={input}");
    }
    println!("cargo:rerun-if-env-changed={OTHER_FOLDER}");
    let home = env::var_os(OTHER_HOME).map(PathBuf::from);
    let build = home.as_deref().map_or_else(|| Build::pinned(root), Build::of_home)?;
    let home = home.unwrap_or_else(|| root.to_owned());
    let folder = env::var_os(OTHER_FOLDER).map_or_else(|| home.join("build/patched"), PathBuf::from);
    let (stock, llama) = (home.join("build/stock"), home.join("llama.cpp"));
    let tree = folder.join("llama.cpp");
    make_tree(root, &llama, &tree)?;

    let glue = folder.join("glue");
    fs::create_dir_all(&glue)?;
    let page = fs::read_to_string(root.join(PAGE)).with_context(|| format!("reading {PAGE}"))?;
    fs::write(glue.join("page.inc"), format!("R\"moe_hot_page({page})moe_hot_page\""))?;
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file(root.join(GLUE).join("moe-hot.cpp"))
        .includes(["common", "include", "ggml/include", "vendor"].map(|part| tree.join(part)))
        .include(&glue)
        .out_dir(&glue)
        .cargo_metadata(false)
        .try_compile("moe_hot_glue")?;

    let mut config = configuration(&tree, &folder, &PATCHED_PROGRAMS, &build);
    config
        .define("CMAKE_PROJECT_INCLUDE", root.join("ggml-hooks/patched.cmake"))
        .define("MOE_HOT_STOCK", &stock)
        .define("MOE_HOT_LLAMA", &llama)
        .define("MOE_HOT_GLUE", glue.join("libmoe_hot_glue.a"))
        .define("LLAMA_BUILD_TESTS", "OFF")
        .build();

    let bin = folder.join("build/bin");
    for library in fs::read_dir(stock.join("bin"))? {
        let library = library?.path();
        let name = library.file_name().and_then(OsStr::to_str).unwrap_or_default();
        if ["libggml", "libllama.so", "libmtmd.so"].iter().any(|start| name.starts_with(start)) {
            link(&library, &bin.join(name))?;
        }
    }
    // Cargo puts it there once this script is done.
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let profile = out.ancestors().nth(3).context("OUT_DIR lies below the profile's folder")?;
    link(&profile.join(PLUGIN), &bin.join(PLUGIN))?;
    link(&bin, &folder.join("bin"))
}

/// What programs say that they are.
struct Build {
    commit: String,
    number: String,
}

impl Build {
    /// The pinned revision.
    fn pinned(root: &Path) -> Result<Self> {
        let text = fs::read_to_string(root.join(super::PIN))?;
        let pin = |name: &str| -> Result<String> {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            Ok(value.with_context(|| format!("{name} in {}", super::PIN))?.to_owned())
        };
        let commit = pin("LLAMA_COMMIT")?.get(..9).unwrap_or_default().to_owned();
        Ok(Self { commit, number: pin("LLAMA_BUILD")? })
    }

    /// The llama.cpp in another home: what its untouched build was told.
    fn of_home(home: &Path) -> Result<Self> {
        let cache = home.join("build/stock/CMakeCache.txt");
        let text = fs::read_to_string(&cache).with_context(|| format!("reading {}", cache.display()))?;
        let told = |name: &str| -> Result<String> {
            let value =
                text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.split_once('=')?.1));
            Ok(value.with_context(|| format!("{name} in {}", cache.display()))?.to_owned())
        };
        Ok(Self { commit: told("LLAMA_BUILD_COMMIT")?, number: told("LLAMA_BUILD_NUMBER")? })
    }
}

/// What both trees are built with, in `folder/build`.
fn configuration(source: &Path, folder: &Path, programs: &[&str], build: &Build) -> cmake::Config {
    let mut config = cmake::Config::new(source);
    config
        .out_dir(folder)
        .generator("Ninja")
        .profile("Release")
        .no_default_flags(true)
        .build_target("moe-hot-programs")
        .define("MOE_HOT_PROGRAMS", programs.join(";"))
        .define("BUILD_SHARED_LIBS", "ON")
        .define("GGML_BACKEND_DL", "ON")
        .define("GGML_NATIVE", "OFF")
        .define("GIT_EXE", "0")
        .define("LLAMA_BUILD_COMMIT", &build.commit)
        .define("LLAMA_BUILD_NUMBER", &build.number);
    for option in ["LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_UI", "LLAMA_BUILD_APP", "LLAMA_USE_PREBUILT_UI"] {
        config.define(option, "OFF");
    }
    if Command::new("ccache").arg("--version").output().is_ok_and(|output| output.status.success()) {
        config.define("CMAKE_C_COMPILER_LAUNCHER", "ccache").define("CMAKE_CXX_COMPILER_LAUNCHER", "ccache");
    }
    config
}

/// A tree of links to `llama`, but for the patched folders. A file that stays as it is keeps its time.
fn make_tree(root: &Path, llama: &Path, tree: &Path) -> Result<()> {
    let fresh = tree.with_extension("new");
    if fresh.exists() {
        fs::remove_dir_all(&fresh)?;
    }
    link_all(llama, &fresh, Path::new(""))?;
    let mut patches: Vec<_> =
        fs::read_dir(root.join(PATCHES))?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    patches.sort();
    for patch in patches {
        // Not a checkout, whatever is around it.
        let mut command = Command::new("git");
        command.args(["apply", "--whitespace=nowarn"]).arg(&patch).current_dir(&fresh);
        let applied = command.env("GIT_CEILING_DIRECTORIES", fresh.parent().unwrap_or(root)).output()?;
        let said = String::from_utf8_lossy(&applied.stderr);
        ensure!(applied.status.success(), "{} does not apply: {said}", patch.display());
    }
    for file in fs::read_dir(root.join(GLUE))? {
        let file = file?.path();
        if file.extension() == Some(OsStr::new("h")) {
            fs::copy(&file, fresh.join(PATCHED_FOLDERS[0]).join(file.file_name().unwrap_or_default()))?;
        }
    }
    update(&fresh, tree)?;
    fs::remove_dir_all(&fresh)?;
    Ok(())
}

/// Links what lies in `folder` of `from`; patched folders are copied, and those that hold one are gone into.
fn link_all(from: &Path, to: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(to.join(folder))?;
    for entry in fs::read_dir(from.join(folder))? {
        let path = folder.join(entry?.file_name());
        if PATCHED_FOLDERS.iter().any(|patched| path == Path::new(patched)) {
            copy_all(&from.join(&path), &to.join(&path))?;
        } else if PATCHED_FOLDERS.iter().any(|patched| Path::new(patched).starts_with(&path)) {
            link_all(from, to, &path)?;
        } else {
            link(&from.join(&path), &to.join(&path))?;
        }
    }
    Ok(())
}

fn copy_all(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_all(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Makes `to` what `from` is, and touches nothing that is so already.
fn update(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let names =
        |folder: &Path| -> Result<BTreeSet<_>> { fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect() };
    let wanted = names(from)?;
    for name in names(to)?.difference(&wanted) {
        let old = to.join(name);
        if fs::symlink_metadata(&old)?.is_dir() { fs::remove_dir_all(&old)? } else { fs::remove_file(&old)? }
    }
    for name in &wanted {
        let (from, to) = (from.join(name), to.join(name));
        let kind = fs::symlink_metadata(&from)?.file_type();
        if kind.is_symlink() {
            link(&fs::read_link(&from)?, &to)?;
        } else if kind.is_dir() {
            update(&from, &to)?;
        } else if fs::read(&to).ok() != Some(fs::read(&from)?) {
            fs::copy(&from, &to).with_context(|| format!("writing {}", to.display()))?;
        }
    }
    Ok(())
}

/// A symbolic link, in the place of another one.
fn link(target: &Path, at: &Path) -> Result<()> {
    if fs::read_link(at).is_ok_and(|present| present == target) {
        return Ok(());
    }
    if fs::symlink_metadata(at).is_ok() {
        fs::remove_file(at).with_context(|| format!("replacing {}", at.display()))?;
    }
    symlink(target, at).with_context(|| format!("linking {}", at.display()))
}
