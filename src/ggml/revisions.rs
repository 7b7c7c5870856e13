//! Which revisions of ggml this plugin serves: one library for all whose layouts are known.
#![forbid(unsafe_code)]

use super::sys;
use std::ops::RangeInclusive;

/// The version of the tables by which host and backends know each other (`GGML_BACKEND_API_VERSION`), as far as we know them.
/// They differ in the table of buffer types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendApi {
    /// b11312 has it.
    V2,
    /// Since b11382 at the latest.
    V3,
}

impl BackendApi {
    /// The version with this number, if it is served.
    pub fn of_number(number: i32) -> Option<Self> {
        let known = [Self::V2, Self::V3].into_iter().find(|api| api.number() == number)?;
        // A plugin that is built for another tree knows the numbers and structs of that tree only.
        let is_served = OTHER_TREE.is_none() || number == sys::GGML_BACKEND_API_VERSION as i32;
        is_served.then_some(known)
    }

    /// As tables state it.
    pub fn number(self) -> i32 {
        match self {
            Self::V2 => 2,
            Self::V3 => 3,
        }
    }
}

/// The tree that this plugin was built for, if not for the revisions below (`scripts/setup --llama`).
const OTHER_TREE: Option<&str> = option_env!("MOE_HOT_OTHER_TREE");

/// The first and the last build that have been looked at; all between have the layouts of one of them.
fn served_builds() -> RangeInclusive<u32> {
    let number = |digits: &str| digits.parse().unwrap_or(0);
    number(env!("LLAMA_BUILD"))..=number(env!("LAST_BUILD"))
}

/// Whether llama.cpp's build of this number is known to be served. Of others, and of those that state no number (0), the
/// plugin itself finds out by their layouts when it is loaded.
pub fn is_served_build(number: u32) -> bool {
    OTHER_TREE.is_none() && served_builds().contains(&number)
}

/// How the line begins that says that the plugin does not serve its host; the reason follows.
pub const NOT_SERVED: &str = "not loaded, the host goes on without it: ";

/// What is served, in words that follow a verb.
pub fn served_revisions() -> String {
    match OTHER_TREE {
        None => {
            let (first, last) = served_builds().into_inner();
            format!("llama.cpp b{first} (API 2) to b{last} (API 3) and builds with the same layouts")
        }
        Some(tree) => format!("the llama.cpp in {tree} (API {})", sys::GGML_BACKEND_API_VERSION),
    }
}

/// For messages: what is served, and what to do about another revision.
pub fn served() -> String {
    const COMMAND: &str =
        "to build the plugin for this very one, run in moe-hot's folder: scripts/setup --llama PATH-OF-ITS-LLAMA.CPP";
    let verb = if OTHER_TREE.is_none() { "are" } else { "is" };
    format!("served {verb} {}; {COMMAND}", served_revisions())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_between_the_first_and_the_last_are_served() {
        for (number, expected) in
            [(0, false), (11311, false), (11312, true), (11400, true), (11434, true), (11435, false)]
        {
            assert_eq!(is_served_build(number), expected, "{number}");
        }
    }

    #[test]
    fn an_api_is_known_by_its_number() {
        let known = [0, 1, 2, 3, 4, -1].map(BackendApi::of_number);
        assert_eq!(known, [None, None, Some(BackendApi::V2), Some(BackendApi::V3), None, None]);
    }

    #[test]
    fn what_is_served_is_said_with_the_way_out() {
        let text = served();
        for part in ["b11312 (API 2)", "b11434 (API 3)", "scripts/setup --llama"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
