//! docs/troubleshooting.md has every line that the plugin prints; links between documents lead somewhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::fs;
use std::path::{Path, PathBuf};
use syn::visit::Visit;

/// Functions that print, or say why something is off.
const PRINTING: [&str; 6] = ["log", "warn", "turn_off", "give_up", "refuse", "tell"];
/// What a line has at least; shorter parts of one are no more than glue.
const MIN_PART: usize = 12;

/// The texts of one file that users may see.
#[derive(Default)]
struct Texts {
    found: Vec<String>,
    /// Whether what is visited now is printed.
    is_printed: bool,
}

impl Texts {
    fn add_tokens(&mut self, tokens: proc_macro2::TokenStream) {
        for token in tokens {
            match token {
                proc_macro2::TokenTree::Group(group) => self.add_tokens(group.stream()),
                proc_macro2::TokenTree::Literal(literal) => {
                    if let Ok(syn::Lit::Str(text)) = syn::parse_str::<syn::Lit>(&literal.to_string()) {
                        self.found.push(text.value());
                    }
                }
                _ => {}
            }
        }
    }

    fn printed(&mut self, is_printed: bool, visit: impl FnOnce(&mut Self)) {
        let before = self.is_printed;
        self.is_printed |= is_printed;
        visit(self);
        self.is_printed = before;
    }
}

impl<'ast> Visit<'ast> for Texts {
    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        let name = match &*call.func {
            syn::Expr::Path(path) => path.path.segments.last().map(|last| last.ident.to_string()),
            _ => None,
        };
        let is_printed = name.is_some_and(|name| PRINTING.contains(&name.as_str()));
        self.printed(is_printed, |texts| syn::visit::visit_expr_call(texts, call));
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let is_printed = PRINTING.contains(&call.method.to_string().as_str());
        self.printed(is_printed, |texts| syn::visit::visit_expr_method_call(texts, call));
    }

    fn visit_lit_str(&mut self, text: &'ast syn::LitStr) {
        if self.is_printed {
            self.found.push(text.value());
        }
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        if self.is_printed {
            self.add_tokens(call.tokens.clone());
        }
    }

    /// Errors of the runtime end up in a line; documentation does not.
    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if let (syn::Meta::List(list), true) = (&attribute.meta, attribute.path().is_ident("error")) {
            let first = list.tokens.clone().into_iter().next();
            self.add_tokens(first.into_iter().collect());
        }
    }

    fn visit_item(&mut self, item: &'ast syn::Item) {
        let is_test = matches!(item, syn::Item::Mod(module) if module.ident == "tests");
        if !is_test {
            syn::visit::visit_item(self, item);
        }
    }
}

/// The parts of a line between what differs from case to case.
fn parts(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut depth = 0;
    for c in text.chars() {
        match c {
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                parts.push(String::new());
            }
            c if depth == 0 => parts.last_mut().unwrap().push(c),
            _ => {}
        }
    }
    let words = |part: String| part.split_whitespace().collect::<Vec<_>>().join(" ");
    parts.into_iter().map(words).map(|part| part.trim_matches([';', ':', ',', '(', ')', ' ']).to_owned()).collect()
}

fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            files_below(&entry, found);
        } else if entry.extension().is_some_and(|extension| extension == "rs") && !entry.ends_with("tests.rs") {
            found.push(entry);
        }
    }
}

/// A heading as links name it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase();
    kept.chars().filter(|c| c.is_alphanumeric() || "- _".contains(*c)).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn links_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages: Vec<_> = ["README.md", "CONTRIBUTING.md", "profiles/README.md"].map(|name| root.join(name)).into();
    pages.extend(fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path()));
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    let (mut n_links, mut dead) = (0, Vec::new());
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link) {
            if link.contains("://") {
                continue;
            }
            n_links += 1;
            let (file, place) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            let has_place = || {
                let text = fs::read_to_string(&target).unwrap();
                text.lines().filter(|line| line.starts_with('#')).any(|heading| anchor(heading) == place)
            };
            if !target.exists() || !(place.is_empty() || has_place()) {
                dead.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(n_links > 40, "{n_links} links");
    assert!(dead.is_empty(), "dead links:\n{}", dead.join("\n"));
}

#[test]
fn every_line_is_explained() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/troubleshooting.md")).unwrap();
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut files = Vec::new();
    for folder in ["runtime", "plugin", "device"] {
        files_below(&root.join("src").join(folder), &mut files);
    }
    files.extend(["src/cache/plan.rs", "src/ggml/memory.rs"].map(|file| root.join(file)));
    files.retain(|file| !file.ends_with("runtime/control.rs")); // it answers requests, and prints nothing
    let (mut n_texts, mut missing) = (0, Vec::new());
    for file in files {
        let mut texts = Texts::default();
        texts.visit_file(&syn::parse_file(&fs::read_to_string(&file).unwrap()).unwrap());
        for text in texts.found {
            n_texts += 1;
            let is_said = |part: &String| part.len() < MIN_PART || page.contains(part.as_str());
            let unsaid: Vec<_> = parts(&text).into_iter().filter(|part| !is_said(part)).collect();
            if !unsaid.is_empty() {
                missing.push(format!("{}: {unsaid:?}", file.display()));
            }
        }
    }
    assert!(n_texts > 40, "{n_texts} texts");
    assert!(missing.is_empty(), "docs/troubleshooting.md lacks\n{}", missing.join("\n"));
}
