//! The rules of CONTRIBUTING.md that a reader of the source can check: which folder may use which, no circle among files,
//! where `unsafe` and the environment are.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::visit::Visit;

/// What each part of the crate may use of the others. `all`: everything.
const MAY_USE: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("units", &["error"]),
    ("options", &["units"]),
    ("files", &[]),
    ("ggml", &["error"]),
    ("gguf", &["units", "error"]),
    ("moe", &["ggml", "error"]),
    ("device", &["ggml", "units", "error"]),
    ("lanes", &["ggml", "moe", "device", "units", "error"]),
    ("cache", &["units", "error"]),
    ("profile", &["files", "gguf", "units", "error"]),
    ("trace", &["units", "error"]),
    ("replay", &["cache", "trace", "units", "error"]),
    (
        "runtime",
        &["cache", "device", "error", "files", "ggml", "gguf", "lanes", "moe", "options", "profile", "trace", "units"],
    ),
    ("plugin", &["cli", "runtime", "ggml", "error"]),
    ("cli", &["cache", "error", "files", "ggml", "gguf", "options", "profile", "replay", "trace", "units"]),
];

/// Folders whose code may be `unsafe`.
const UNSAFE: [&str; 3] = ["ggml", "plugin", "device/cuda"];

/// One source file, without what is compiled for tests only.
struct Source {
    /// Below `src`.
    path: PathBuf,
    /// As a path of modules, such as `["cache", "policy"]`.
    module: Vec<String>,
    syntax: syn::File,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            files_below(&entry, found);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            found.push(entry);
        }
    }
}

fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            list.tokens.to_string().split(|c: char| !c.is_alphanumeric()).any(|word| word == "test")
        }
        _ => false,
    })
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        _ => &[],
    }
}

/// All files of the library but those that only tests compile.
fn sources() -> Vec<Source> {
    let mut paths = Vec::new();
    files_below(&root(), &mut paths);
    let parse = |path: &PathBuf| syn::parse_file(&fs::read_to_string(path).unwrap()).unwrap();
    let module_of = |path: &Path| -> Vec<String> {
        let inside = path.strip_prefix(root()).unwrap().with_extension("");
        let mut names: Vec<_> = inside.iter().map(|name| name.to_str().unwrap().to_owned()).collect();
        names.pop_if(|last| ["mod", "lib", "main"].contains(&last.as_str()));
        names
    };
    let all: Vec<_> = paths.iter().map(|path| (path, module_of(path), parse(path))).collect();
    // `#[cfg(test)] mod name;` takes the whole file out, and what is below it.
    let mut for_tests: Vec<Vec<String>> = Vec::new();
    for (_, module, syntax) in &all {
        for item in &syntax.items {
            if let syn::Item::Mod(inner) = item
                && is_for_tests(&inner.attrs)
            {
                for_tests.push(module.iter().cloned().chain([inner.ident.to_string()]).collect());
            }
        }
    }
    let is_kept = |module: &Vec<String>| !for_tests.iter().any(|outer| module.starts_with(outer));
    let mut kept = Vec::new();
    for (path, module, mut syntax) in all {
        let name = path.file_name().unwrap();
        if is_kept(&module) && name != "main.rs" && name != "lib.rs" {
            syntax.items.retain(|item| !is_for_tests(attributes(item)));
            kept.push(Source { path: path.strip_prefix(root()).unwrap().into(), module, syntax });
        }
    }
    assert!(kept.len() > 50, "{} files", kept.len());
    kept
}

/// Every path in a file that begins with `crate`, `super` or `self`, and the names that it imports so.
#[derive(Default)]
struct Paths {
    found: Vec<Vec<String>>,
    /// `pub use`: name to path.
    exported: Vec<(String, Vec<String>)>,
}

impl Paths {
    fn of(source: &Source) -> Self {
        let mut paths = Self::default();
        for item in &source.syntax.items {
            match item {
                syn::Item::Use(item) => {
                    let is_export = !matches!(item.vis, syn::Visibility::Inherited);
                    paths.add_tree(&item.tree, &mut Vec::new(), is_export);
                }
                item => paths.visit_item(item),
            }
        }
        paths
    }

    fn add_tree(&mut self, tree: &syn::UseTree, before: &mut Vec<String>, is_export: bool) {
        match tree {
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.add_tree(&path.tree, before, is_export);
                before.pop();
            }
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_tree(tree, before, is_export)),
            syn::UseTree::Name(name) => self.add(before, &name.ident.to_string(), None, is_export),
            syn::UseTree::Rename(name) => {
                self.add(before, &name.ident.to_string(), Some(name.rename.to_string()), is_export);
            }
            syn::UseTree::Glob(_) => self.add(before, "*", None, is_export),
        }
    }

    fn add(&mut self, before: &[String], name: &str, renamed: Option<String>, is_export: bool) {
        let path: Vec<_> = before.iter().cloned().chain([name.to_owned()]).collect();
        if is_export {
            self.exported.push((renamed.unwrap_or_else(|| name.to_owned()), path));
        } else {
            self.found.push(path);
        }
    }
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.add_tree(&item.tree, &mut Vec::new(), false);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if names.len() > 1 && ["crate", "super", "self"].contains(&names[0].as_str()) {
            self.found.push(names);
        }
        syn::visit::visit_path(self, path);
    }
}

/// The path from the crate's root. Relative ones are of `module`; `None` for other crates'.
fn absolute(path: &[String], module: &[String], modules: &BTreeSet<Vec<String>>) -> Option<Vec<String>> {
    let mut at = module.to_vec();
    let mut rest = path;
    match path[0].as_str() {
        "crate" => {
            at.clear();
            rest = &path[1..];
        }
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|name| name == "super") {
                at.pop();
                rest = &rest[1..];
            }
        }
        first => {
            // A child module of this one, or another crate.
            at.push(first.to_owned());
            if !modules.contains(&at) {
                return None;
            }
            rest = &path[1..];
        }
    }
    at.extend_from_slice(rest);
    Some(at)
}

/// Which file uses which, re-exports followed to where a name is defined.
fn arrows(sources: &[Source]) -> BTreeMap<usize, BTreeSet<usize>> {
    let modules: BTreeSet<_> = sources.iter().map(|source| source.module.clone()).collect();
    let by_module: BTreeMap<_, _> = sources.iter().enumerate().map(|(n, source)| (source.module.clone(), n)).collect();
    let paths: Vec<_> = sources.iter().map(Paths::of).collect();
    let mut exported: BTreeMap<Vec<String>, Vec<String>> = BTreeMap::new();
    for (source, paths) in sources.iter().zip(&paths) {
        for (name, path) in &paths.exported {
            if let Some(path) = absolute(path, &source.module, &modules) {
                exported.insert(source.module.iter().cloned().chain([name.clone()]).collect(), path);
            }
        }
    }
    let resolve = |mut path: Vec<String>| -> Option<usize> {
        for _ in 0..8 {
            let longest = (0..=path.len()).rev().find(|&n| modules.contains(&path[..n]))?;
            match path.get(..longest + 1).and_then(|name| exported.get(name)) {
                Some(to) => path = to.iter().chain(&path[longest + 1..]).cloned().collect(),
                None => return by_module.get(&path[..longest]).copied(),
            }
        }
        None
    };
    let mut arrows: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for (n, (source, paths)) in sources.iter().zip(&paths).enumerate() {
        for path in &paths.found {
            let to = absolute(path, &source.module, &modules).and_then(resolve);
            arrows.entry(n).or_default().extend(to.filter(|&to| to != n));
        }
    }
    arrows
}

#[test]
fn each_folder_uses_only_what_the_table_allows() {
    let sources = sources();
    let parts: BTreeSet<_> = sources.iter().map(|source| source.module[0].clone()).collect();
    let known: BTreeSet<_> = MAY_USE.iter().map(|(part, _)| (*part).to_owned()).collect();
    assert_eq!(parts, known, "every folder of src has its row, and every row its folder");
    let mut wrong = BTreeSet::new();
    for (from, to) in arrows(&sources) {
        for to in to {
            let (from, to) = (&sources[from], &sources[to]);
            let (_, allowed) = MAY_USE.iter().find(|(part, _)| *part == from.module[0]).unwrap();
            if from.module[0] != to.module[0] && !allowed.contains(&to.module[0].as_str()) {
                wrong.insert(format!("{} uses {}", from.path.display(), to.path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn no_files_use_each_other_in_a_circle() {
    let sources = sources();
    let arrows = arrows(&sources);
    let reachable = |from: usize| {
        let (mut found, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(file) = next.pop() {
            next.extend(arrows.get(&file).into_iter().flatten().filter(|&&to| found.insert(to)));
        }
        found
    };
    let in_circle: BTreeSet<_> = arrows.keys().copied().filter(|&file| reachable(file).contains(&file)).collect();
    let name = |n: &usize| sources[*n].path.display().to_string();
    let uses = |n: &usize| arrows[n].intersection(&in_circle).map(name).collect::<Vec<_>>();
    let circles: BTreeMap<_, _> = in_circle.iter().map(|n| (name(n), uses(n))).collect();
    assert!(circles.is_empty(), "{circles:#?}");
}

/// Whether a file has `unsafe` code.
#[derive(Default)]
struct HasUnsafe(bool);

impl<'ast> Visit<'ast> for HasUnsafe {
    fn visit_expr_unsafe(&mut self, _: &'ast syn::ExprUnsafe) {
        self.0 = true;
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.0 |= matches!(signature.safety, syn::Safety::Unsafe(_));
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.0 |= item.unsafety.is_some();
        syn::visit::visit_item_impl(self, item);
    }
}

#[test]
fn unsafe_code_stands_where_it_may() {
    let may = |path: &Path| UNSAFE.iter().any(|folder| path.starts_with(folder));
    let has_unsafe = |source: &&Source| {
        let mut found = HasUnsafe::default();
        found.visit_file(&source.syntax);
        found.0
    };
    let sources = sources();
    let wrong: Vec<_> = sources.iter().filter(|source| !may(&source.path)).filter(has_unsafe).collect();
    assert!(wrong.is_empty(), "{:#?}", wrong.iter().map(|source| &source.path).collect::<Vec<_>>());
    assert!(sources.iter().any(|source| has_unsafe(&source)), "the check sees nothing");
}

/// Paths such as `env::var`, as a file writes them.
struct ReadsEnvironment(bool);

impl<'ast> Visit<'ast> for ReadsEnvironment {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<_> = path.segments.iter().rev().take(2).map(|segment| segment.ident.to_string()).collect();
        const READERS: [&str; 4] = ["var", "var_os", "vars", "vars_os"];
        self.0 |= matches!(names.as_slice(), [last, env] if env == "env" && READERS.contains(&last.as_str()));
        syn::visit::visit_path(self, path);
    }
}

#[test]
fn the_environment_is_read_in_one_place() {
    let reads = |source: &&Source| {
        let mut found = ReadsEnvironment(false);
        found.visit_file(&source.syntax);
        found.0
    };
    let found: Vec<_> = sources().iter().filter(reads).map(|source| source.module[0].clone()).collect();
    assert!(found.iter().all(|part| part == "options") && !found.is_empty(), "{found:?}");
}
