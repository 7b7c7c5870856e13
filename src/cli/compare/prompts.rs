//! The prompts of the real workload: kinds of text, each with several turns, and how they become conversations.
//!
//! A file has a line `== NAME ==` for each kind and a line `---` between prompts. The first prompt of a kind is for the
//! recording alone, so that a profile never knows what it is measured on; the last is kept for the switch.

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::Path;

/// What is asked unless the user has prompts of their own.
const BUILT_IN: &str = include_str!("prompts.txt");
/// Where it comes from, for readers.
pub const BUILT_IN_NAME: &str = "built in";
/// One for the recording, one to measure, one for the switch.
const LEAST_PER_KIND: usize = 3;
/// More than anybody writes.
const MAX_BYTES: u64 = 16 << 20;
/// The conversation in which every turn is of another kind.
pub const SWITCH: &str = "switch";

/// Kinds of text with their prompts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompts {
    /// A file, or [`BUILT_IN_NAME`].
    pub source: String,
    /// Start of the SHA-256 of the text, so that other text is noticed.
    pub sha256: String,
    kinds: Vec<Kind>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Kind {
    name: String,
    prompts: Vec<String>,
}

/// Turns that follow each other; each sees those before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// The kind, or [`SWITCH`].
    pub name: String,
    /// The kind of each prompt, and the prompt.
    pub turns: Vec<(String, String)>,
}

impl Prompts {
    /// The user's, or those that are built in.
    pub fn read(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Self::parse(BUILT_IN_NAME, BUILT_IN) };
        let what = || format!("--prompts {}", path.display());
        let meta = fs::metadata(path).with_context(what)?;
        ensure!(meta.is_file(), "{}: is no regular file; expected a file of prompts", what());
        ensure!(meta.len() <= MAX_BYTES, "{}: {} bytes; expected at most {MAX_BYTES}", what(), meta.len());
        let bytes = fs::read(path).with_context(what)?;
        let Ok(text) = String::from_utf8(bytes) else { bail!("{}: is not UTF-8; expected text", what()) };
        Self::parse(&path.display().to_string(), &text).with_context(what)
    }

    fn parse(source: &str, text: &str) -> Result<Self> {
        let mut kinds: Vec<Kind> = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let name = line.strip_prefix("== ").and_then(|rest| rest.strip_suffix(" =="));
            if let Some(name) = name.map(str::trim) {
                ensure!(name != SWITCH, "line {}: {SWITCH:?} is our own; expected another name", number + 1);
                let is_new = !name.is_empty() && kinds.iter().all(|kind| kind.name != name);
                ensure!(is_new, "line {}: {name:?}; expected a name that no other kind has", number + 1);
                kinds.push(Kind { name: name.to_owned(), prompts: vec![String::new()] });
                continue;
            }
            let Some(kind) = kinds.last_mut() else {
                ensure!(line.trim().is_empty(), "line {}: expected a line such as == story == first", number + 1);
                continue;
            };
            match kind.prompts.last_mut() {
                Some(prompt) if line.trim_end() != "---" => {
                    prompt.push_str(line);
                    prompt.push('\n');
                }
                _ => kind.prompts.push(String::new()),
            }
        }
        ensure!(!kinds.is_empty(), "no kind of text; expected lines such as == story ==, and prompts below them");
        for kind in &mut kinds {
            kind.prompts = kind.prompts.iter().map(|prompt| prompt.trim().to_owned()).collect();
            kind.prompts.retain(|prompt| !prompt.is_empty());
            ensure!(
                kind.prompts.len() >= LEAST_PER_KIND,
                "{:?} has {} prompts; expected at least {LEAST_PER_KIND}, with --- between them: one to record, one to \
                 measure, one for the switch",
                kind.name,
                kind.prompts.len()
            );
        }
        let hash = Sha256::digest(text.as_bytes());
        let sha256 = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { source: source.to_owned(), sha256, kinds })
    }

    /// Names of the kinds, in the file's order.
    pub fn kinds(&self) -> impl Iterator<Item = &str> {
        self.kinds.iter().map(|kind| kind.name.as_str())
    }

    /// What the profile is recorded from: the first prompt of each kind.
    pub fn recorded(&self) -> Vec<Conversation> {
        let of_kind = |kind: &Kind| Conversation {
            name: kind.name.clone(),
            turns: kind.prompts.iter().take(1).map(|prompt| (kind.name.clone(), prompt.clone())).collect(),
        };
        self.kinds.iter().map(of_kind).collect()
    }

    /// What is measured: one conversation of each kind, then one in which every turn is of another kind.
    pub fn measured(&self) -> Vec<Conversation> {
        let turn = |kind: &Kind, prompt: &String| (kind.name.clone(), prompt.clone());
        let of_kind = |kind: &Kind| Conversation {
            name: kind.name.clone(),
            turns: kind.prompts[1..kind.prompts.len() - 1].iter().map(|prompt| turn(kind, prompt)).collect(),
        };
        let mut conversations: Vec<_> = self.kinds.iter().map(of_kind).collect();
        let last = |kind: &Kind| kind.prompts.last().map(|prompt| turn(kind, prompt));
        conversations
            .push(Conversation { name: SWITCH.to_owned(), turns: self.kinds.iter().filter_map(last).collect() });
        conversations
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\n== a ==\none\nmore\n---\ntwo\n---\nthree\n\n---\nfour\n== b ==\nx\n---\ny\n---\nz\n";

    fn turns(conversation: &Conversation) -> Vec<&str> {
        conversation.turns.iter().map(|(_, prompt)| prompt.as_str()).collect()
    }

    #[test]
    fn what_is_recorded_is_never_measured() {
        let prompts = Prompts::parse("x", TEXT).unwrap();
        let recorded = prompts.recorded();
        assert_eq!(recorded.iter().map(turns).collect::<Vec<_>>(), [["one\nmore"], ["x"]]);
        let measured = prompts.measured();
        assert_eq!(
            measured.iter().map(turns).collect::<Vec<_>>(),
            [vec!["two", "three"], vec!["y"], vec!["four", "z"]]
        );
        assert_eq!(measured.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["a", "b", SWITCH]);
        assert_eq!(measured[2].turns[1].0, "b", "every turn of the switch is of another kind");
    }

    #[test]
    fn three_kinds_with_several_turns_are_built_in() {
        let prompts = Prompts::read(None).unwrap();
        assert!(prompts.kinds().count() >= 3);
        let measured = prompts.measured();
        assert!(measured.iter().all(|one| one.turns.len() >= 2), "several turns");
        assert_ne!(prompts.sha256, Prompts::parse("x", TEXT).unwrap().sha256);
    }

    #[test]
    fn bad_prompts_are_refused_with_what_was_expected() {
        for (text, said) in [
            ("", "no kind of text"),
            ("hello\n== a ==\n", "line 1: expected a line such as == story =="),
            ("== a ==\none\n---\ntwo\n", "\"a\" has 2 prompts; expected at least 3"),
            ("== a ==\n== a ==\n", "line 2: \"a\"; expected a name that no other kind has"),
            ("== switch ==\n", "line 1: \"switch\" is our own"),
            ("==  ==\n", "line 1: \"\"; expected a name"),
        ] {
            let error = format!("{:#}", Prompts::parse("x", text).unwrap_err());
            assert!(error.contains(said), "{text:?}: {error}");
        }
        assert!(format!("{:#}", Prompts::read(Some(Path::new("/"))).unwrap_err()).contains("no regular file"));
    }
}
