//! llama.cpp's INI files (common/preset.cpp).

use std::collections::BTreeMap;

/// The section of what stands before any header.
pub const DEFAULT: &str = "default";
/// The section that holds for all models.
pub const ALL: &str = "*";

/// Values by section and key. Both are sorted, which is the order in which llama.cpp goes through them.
pub type Sections = BTreeMap<String, BTreeMap<String, String>>;

/// Reads a file; `None` where a line is none, which ends the program.
///
/// A value ends before the first `;` or `#`, wherever it stands. A section that is opened again begins anew.
pub fn parse(text: &str) -> Option<Sections> {
    let mut sections = Sections::new();
    let mut section = DEFAULT.to_owned();
    for line in text.split(['\n', '\r']) {
        if is_blank(line) {
            continue;
        }
        if let Some(rest) = line.strip_prefix('[') {
            let (name, rest) = trim_start(rest).split_once(']')?;
            if name.is_empty() || !is_blank(rest) {
                return None;
            }
            name.clone_into(&mut section);
            sections.insert(section.clone(), BTreeMap::new());
            continue;
        }
        let (key, value) = line.split_once('=')?;
        let key = key.trim_end_matches(BLANKS);
        if !is_key(key) {
            return None;
        }
        let value = value.split(COMMENT).next().unwrap_or_default().trim_matches(BLANKS);
        sections.entry(section.clone()).or_default().insert(key.to_owned(), value.to_owned());
    }
    Some(sections)
}

const BLANKS: [char; 2] = [' ', '\t'];
const COMMENT: [char; 2] = [';', '#'];

fn trim_start(text: &str) -> &str {
    text.trim_start_matches(BLANKS)
}

/// Whether nothing is there but a comment.
fn is_blank(text: &str) -> bool {
    let text = trim_start(text);
    text.is_empty() || text.starts_with(COMMENT)
}

fn is_key(text: &str) -> bool {
    let is_first = |c: char| c.is_ascii_alphabetic() || c == '_';
    text.starts_with(is_first) && text.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str, section: &str, key: &str) -> Option<String> {
        parse(text)?.get(section)?.get(key).cloned()
    }

    #[test]
    fn sections_keys_and_values_are_read_as_llama_cpp_reads_them() {
        let text = "rpc = first\r\n; comment\n  # another\n\n[ *]  ; all\nn-cpu-moe=4#not this\n[a:Q4]\nm =  x y.gguf \t; z\ncmoe =\n";
        for (section, key, expected) in [
            ("default", "rpc", Some("first")),
            ("*", "n-cpu-moe", Some("4")),
            ("a:Q4", "m", Some("x y.gguf")),
            ("a:Q4", "cmoe", Some("")),
            ("a:Q4", "rpc", None),
        ] {
            assert_eq!(value(text, section, key).as_deref(), expected, "[{section}] {key}");
        }
    }

    #[test]
    fn a_section_that_is_opened_again_begins_anew() {
        assert_eq!(value("[a]\nm = x\n[a]\nrpc = y\n", "a", "m"), None);
        assert_eq!(value("m = x\n[default]\n", DEFAULT, "m"), None);
    }

    #[test]
    fn what_ends_the_program_is_no_file() {
        for text in [" m = x", "m x", "[a", "[]", "[a] b", "1m = x", "m[0] = x", " [a]"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
