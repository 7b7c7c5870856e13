//! What stands where a profile is to be written: only enough of it to decide whether it may be replaced.
//!
//! Tolerant, unlike the reader of profiles: an earlier profile of the same model may be replaced whatever its counts are.

use super::error::NotAProfileError;
use super::fingerprint::ModelId;
use super::format::{MAX_MIB, SCHEMA};
use super::json::{Object, short};
use crate::files::read_start;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::fs::File;

/// Anything larger is something else.
const MAX_BYTES: usize = (MAX_MIB as usize) << 20;

/// What a file holds.
#[derive(Debug)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// A profile, and the model it was recorded from if it says so.
    Profile(Option<ModelId>),
    /// Something else, which must stay.
    NotAProfile(NotAProfileError),
}

/// The fields that make a file a profile.
#[derive(Deserialize)]
struct Head {
    schema: String,
    #[serde(rename = "layers")]
    _layers: Vec<IgnoredAny>,
    #[serde(default)]
    model: Option<Object<ModelId>>,
}

/// Looks at what a file holds now, if there is one.
pub fn look(file: Option<&File>) -> Found {
    match file.map_or(Ok(Vec::new()), |file| read_start(file, MAX_BYTES + 1)) {
        Err(error) => Found::NotAProfile(error.into()),
        Ok(text) if text.is_empty() => Found::Nothing,
        Ok(text) => model_of(&text).map_or_else(Found::NotAProfile, Found::Profile),
    }
}

/// The model that a profile says it is of.
fn model_of(text: &[u8]) -> Result<Option<ModelId>, NotAProfileError> {
    if text.len() > MAX_BYTES {
        return Err(NotAProfileError::TooLarge);
    }
    let Object(Head { schema, model, .. }) = serde_json::from_slice(text)?;
    if schema != SCHEMA {
        return Err(NotAProfileError::Schema(short(&schema)));
    }
    Ok(model.map(|Object(model)| model))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    fn found(path: &Path) -> Found {
        look(Some(&File::open(path).unwrap()))
    }

    #[test]
    fn only_nothing_an_empty_file_or_a_profile_may_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert!(matches!(look(None), Found::Nothing));
        fs::write(&path, "").unwrap();
        assert!(matches!(found(&path), Found::Nothing));
        for (text, reason) in [
            ("GGUF....", "not a routing profile"),
            (" ", "EOF"),
            ("{}", "schema"),
            (r#"["llama.cpp.moe_layer_perf.v1",[],null]"#, "an object"),
            (r#"{"schema":"other.v2","layers":[]}"#, "other.v2"),
            (r#"{"schema":"llama.cpp.moe_layer_perf.v1"}"#, "layers"),
            (r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[],"model":"a"}"#, "an object"),
            (r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":0"#, "EOF"),
        ] {
            fs::write(&path, text).unwrap();
            assert!(refusal(&path).contains(reason), "{text:?}: {}", refusal(&path));
        }
        File::create(&path).unwrap().set_len(MAX_BYTES as u64 + 1).unwrap();
        assert!(refusal(&path).contains("larger than 64 MiB"));
    }

    fn refusal(path: &Path) -> String {
        match found(path) {
            Found::NotAProfile(error) => error.to_string(),
            found => panic!("{found:?}"),
        }
    }

    #[test]
    fn a_profile_says_its_model_whatever_else_it_holds() {
        let text = r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":-1}],"more":1}"#;
        assert_eq!(model_of(text.as_bytes()).unwrap(), None, "another program's");
        let text = text.replace("\"more\":1", r#""model":{"fingerprint":"ab","tensors":{"a":"1"}}"#);
        let model = model_of(text.as_bytes()).unwrap().unwrap();
        assert_eq!((model.fingerprint.as_str(), model.tensors["a"].as_str()), ("ab", "1"));
    }
}
