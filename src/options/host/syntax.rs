//! Which flags and variables a program has, by its own help.

use super::{HostOption, spelling};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

/// What a program says in its help that it reads.
#[derive(Debug, Default)]
pub struct Syntax {
    /// How many values follow a flag, by its spelling.
    flags: BTreeMap<String, usize>,
    help: String,
}

/// A flag on a command line, with what follows it.
pub struct Given<'a> {
    /// Where it stands.
    pub at: usize,
    /// As llama.cpp compares it; `None` where that is no text.
    pub flag: Option<String>,
    /// Its values.
    pub values: &'a [OsString],
    /// Whether the command line ends before its last value.
    pub is_cut: bool,
}

/// Descriptions stand further to the right.
const MOST_INDENT: usize = 4;

impl Syntax {
    /// Reads a help text, of llama-bench's format or of all other programs'.
    ///
    /// A line such as `-m,    --model FNAME   model path to load`: spellings, after one space what stands for a value, after
    /// more spaces or on the next line a description.
    pub fn parse(help: &str) -> Self {
        let mut flags = BTreeMap::new();
        for line in help.lines() {
            let mut rest = line.trim_start_matches(' ');
            if line.len() - rest.len() > MOST_INDENT {
                continue;
            }
            let (mut spellings, mut n_spaces) = (Vec::new(), 0);
            while rest.starts_with('-') {
                let end = rest.find([' ', ',']).unwrap_or(rest.len());
                spellings.push(&rest[..end]);
                let behind = rest[end..].strip_prefix(',').unwrap_or(&rest[end..]);
                rest = behind.trim_start_matches(' ');
                n_spaces = behind.len() - rest.len();
            }
            let n_values = if n_spaces == 1 { values_in(rest) } else { 0 };
            flags.extend(spellings.into_iter().map(|flag| (flag.to_owned(), n_values)));
        }
        Self { flags, help: help.to_owned() }
    }

    /// Whether the program has this flag.
    pub fn knows(&self, flag: &str) -> bool {
        self.flags.contains_key(flag)
    }

    /// Whether the program reads this option from the environment.
    pub fn reads_variable(&self, option: &HostOption) -> bool {
        self.help.contains(&format!("(env: {})", option.variable))
    }

    /// Whether the program reads variables and configuration files at all; llama-bench does not.
    pub fn reads_environment(&self) -> bool {
        self.help.contains("(env: LLAMA_ARG_")
    }

    /// How many values follow a flag; `None` for what the program does not know.
    pub fn values_of(&self, arg: &OsStr) -> Option<usize> {
        self.flags.get(&spelling(arg)?).copied()
    }

    /// The flags of a command line. A value is never taken for a flag.
    pub fn flags<'a>(&self, args: &'a [OsString]) -> Vec<Given<'a>> {
        let mut found = Vec::new();
        let mut at = 0;
        while let Some(arg) = args.get(at) {
            let flag = spelling(arg);
            let ours = flag.as_deref().and_then(HostOption::of_flag).map(|option| usize::from(option.takes_value));
            let n_values = self.values_of(arg).or(ours).unwrap_or(0);
            let next = at + 1 + n_values;
            let values = &args[at + 1..next.min(args.len())];
            found.push(Given { at, flag, values, is_cut: next > args.len() });
            at = next;
        }
        found
    }
}

/// How many values a flag takes whose help goes on like this: one, or two such as `START END`.
fn values_in(rest: &str) -> usize {
    let names = rest.split("  ").next().unwrap_or_default();
    let is_name = |word: &str| word.chars().all(|c| c.is_ascii_uppercase());
    let words: Vec<_> = names.split(' ').collect();
    if words.iter().all(|word| is_name(word)) { words.len() } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::super::{CPU_MOE, N_CPU_MOE};
    use super::*;

    const HELP: &str = "----- common params -----\n\n\
        -h,    --help, --usage                  print usage and exit\n\
        -cl,   --cache-list                     show list of models in cache\n\
        -fa,   --flash-attn [on|off|auto]       set Flash Attention use\n\
        -ot,   --override-tensor <tensor name pattern>=<buffer type>,...\n\
        \x20                                       override tensor buffer type\n\
        \x20                                       - mmap: not a flag\n\
        -cmoe, --cpu-moe                        keep all\n\
        \x20                                       (env: LLAMA_ARG_CPU_MOE)\n\
        --spec-draft-cpu-moe, -cmoed, --cpu-moe-draft\n\
        --control-vector-layer-range START END\n\
        -p,    --prompt PROMPT                  prompt to start with; see --n-cpu-moe\n";
    const BENCH: &str = "usage: llama-bench [options]\n\noptions:\n  -h, --help\n  -v, --verbose                               verbose\n  \
        --delay <0...N> (seconds)                   delay\n  -ncmoe, --n-cpu-moe <n>                           (default: 0)\n  \
        -ot --override-tensor <tensor name pattern>=<buffer type>;...\n  --no-host <0|1>                                   (default: 0)\n";

    #[test]
    fn flags_and_the_number_of_their_values_are_read() {
        for (help, flag, n_values) in [
            (HELP, "--usage", Some(0)),
            (HELP, "-cl", Some(0)),
            (HELP, "-fa", Some(1)),
            (HELP, "--override_tensor", Some(1)),
            (HELP, "-cmoe", Some(0)),
            (HELP, "-cmoed", Some(0)),
            (HELP, "--control-vector-layer-range", Some(2)),
            (HELP, "-", None),
            (HELP, "--n-cpu-moe", None),
            (BENCH, "--help", Some(0)),
            (BENCH, "-v", Some(0)),
            (BENCH, "--delay", Some(1)),
            (BENCH, "-ncmoe", Some(1)),
            (BENCH, "-ot", Some(1)),
            (BENCH, "--no_host", Some(1)),
        ] {
            assert_eq!(Syntax::parse(help).values_of(OsStr::new(flag)), n_values, "{flag}");
        }
    }

    #[test]
    fn variables_are_read_where_the_help_names_them() {
        let syntax = Syntax::parse(HELP);
        assert!(syntax.reads_environment() && syntax.reads_variable(&CPU_MOE) && !syntax.reads_variable(&N_CPU_MOE));
        assert!(!Syntax::parse(BENCH).reads_environment());
    }

    #[test]
    fn a_value_is_no_flag() {
        let args = ["-p", "--cpu-moe", "--n_cpu_moe", "2", "x", "-fa"].map(OsString::from);
        let syntax = Syntax::parse(HELP);
        let flags = syntax.flags(&args);
        let found: Vec<_> =
            flags.iter().map(|given| (given.at, given.flag.as_deref().unwrap(), given.is_cut)).collect();
        assert_eq!(found, [(0, "-p", false), (2, "--n-cpu-moe", false), (4, "x", false), (5, "-fa", true)]);
        assert_eq!(flags[1].values, ["2"], "known to us, where the program's help says nothing");
    }
}
