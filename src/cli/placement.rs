//! Whether the user has said where experts go.

use crate::gguf::ModelFile;
use crate::options::host::{CPU_MOE, N_CPU_MOE, OVERRIDE_TENSOR, Settings, whole_number};
use regress::Regex;
use std::iter;

/// Whether anything that the program is told places experts of this model.
///
/// A number of layers does unless it is 0, which is the program's default. A pattern does if it is found in the name of an
/// expert tensor. `model` is `None` where its file cannot be read, as before a download: then the names are those of llama.cpp's
/// own pattern for experts, `\.ffn_(up|down|gate|gate_up)_(ch|)exps`, in as many layers as a model may have.
pub fn places_experts(settings: &Settings, model: Option<&ModelFile>) -> bool {
    let numbers = settings.all(&N_CPU_MOE).any(|value| has_layers(&value.to_string_lossy()));
    let mut patterns = settings.all(&OVERRIDE_TENSOR).map(|value| value.to_string_lossy().into_owned());
    settings.has(&CPU_MOE) || numbers || patterns.any(|list| has_expert_pattern(&list, model))
}

/// Whether a value of `--n-cpu-moe` is more than 0; of llama-bench's lists and ranges (`0,4`, `0-8+4`), any.
fn has_layers(value: &str) -> bool {
    value.split([',', '-', '+', '*']).any(|number| whole_number(number).is_some_and(|number| number > 0))
}

/// Whether one of several `PATTERN=BUFFER`, separated by `,` (llama-bench: by `;` too), is for an expert tensor.
fn has_expert_pattern(list: &str, model: Option<&ModelFile>) -> bool {
    let pairs = list.split([',', ';']).filter_map(|pair| pair.split_once('='));
    pairs.into_iter().any(|(pattern, _)| match regex(pattern) {
        Some(regex) => match model {
            Some(model) => model.experts().any(|expert| regex.find(expert.name).is_some()),
            None => usual_names().any(|name| regex.find(&name).is_some()),
        },
        // Either llama.cpp cannot read it either, or we do not know what it matches: nothing is added to it.
        None => true,
    })
}

/// llama.cpp's patterns are C++'s: ECMAScript's, with POSIX's classes of characters, searched for anywhere in a name.
fn regex(pattern: &str) -> Option<Regex> {
    const CLASSES: [(&str, &str); 12] = [
        ("[:alnum:]", "A-Za-z0-9"),
        ("[:alpha:]", "A-Za-z"),
        ("[:blank:]", " \\t"),
        ("[:digit:]", "0-9"),
        ("[:d:]", "0-9"),
        ("[:lower:]", "a-z"),
        ("[:punct:]", "!-\\/:-@\\[-`{-~"),
        ("[:space:]", "\\s"),
        ("[:s:]", "\\s"),
        ("[:upper:]", "A-Z"),
        ("[:w:]", "\\w"),
        ("[:xdigit:]", "A-Fa-f0-9"),
    ];
    let pattern = CLASSES.iter().fold(pattern.to_owned(), |pattern, (class, range)| pattern.replace(class, range));
    Regex::new(&pattern).ok()
}

fn usual_names() -> impl Iterator<Item = String> {
    const MOST_LAYERS: u32 = 512; // LLAMA_MAX_LAYERS
    const PARTS: [&str; 4] = ["up", "down", "gate", "gate_up"];
    let in_layer = |layer| PARTS.into_iter().zip(iter::repeat(layer));
    (0..MOST_LAYERS)
        .flat_map(in_layer)
        .flat_map(|(part, layer)| ["", "ch"].map(|kind| format!("blk.{layer}.ffn_{part}_{kind}exps.weight")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const SHIPPED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/moe-small.gguf");

    #[test]
    fn a_pattern_counts_if_it_is_found_in_an_expert_tensors_name() {
        let model = ModelFile::open(Path::new(SHIPPED)).unwrap();
        for (list, expected) in [
            ("exps=CPU", true),
            (r"blk\.[01]\.ffn_.*_exps=CPU", true),
            (r"^blk\.\d+\.ffn_(up|gate)_exps\.weight$=CUDA0", true),
            ("blk.[[:digit:]]+.ffn_down_exps=CPU", true),
            ("token_embd=CPU,ffn_up_exps=MoEHot", true),
            ("=CPU", true),
            (r"blk\.(?!0)\d\.ffn_up_exps=CPU", true),
            (r"(=CPU", true), // no pattern: nothing is added
            ("per_layer_token_embd.weight=CPU,token_embd.weight=CPU", false),
            (r"^ffn_.*exps=CPU", false),
            ("ffn_up_EXPS=CPU", false),
            ("ffn_gate_inp=CPU", false),
            ("attn_.*=CPU", false),
            ("output=CPU", false),
            ("exps", false), // which ends the program
        ] {
            assert_eq!(has_expert_pattern(list, Some(&model)), expected, "{list}");
            assert_eq!(has_expert_pattern(list, None), expected, "{list}, of a model that is not here");
        }
        let no_layer = r"blk\.([2-9]\d|1\d\d)\.ffn_.*_exps=CPU";
        assert!(!has_expert_pattern(no_layer, Some(&model)) && has_expert_pattern(no_layer, None));
    }

    #[test]
    fn a_number_of_layers_counts_unless_it_is_0() {
        for (value, expected) in
            [("2", true), ("0", false), ("", false), ("0,4", true), ("0-8+2", true), ("0-0", false), ("x", false)]
        {
            assert_eq!(has_layers(value), expected, "{value}");
        }
    }
}
