//! What stands where a profile is to be written: only enough of it to decide whether it may be replaced.
//!
//! Tolerant, unlike the reader of profiles: an earlier profile of the same model may be replaced whatever its counts are.

use super::error::{NotAProfileError, OutputError};
use super::fingerprint::ModelId;
use super::format::{MAX_MIB, SCHEMA};
use super::json::{Object, short};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// Anything larger is something else.
const MAX_BYTES: u64 = MAX_MIB << 20;

/// What a path holds.
#[derive(Debug)]
pub enum Found {
    /// Nothing, or an empty file.
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

/// Looks at what `path` holds now. Fails where the system does not let us.
pub fn look(path: &Path) -> Result<Found, OutputError> {
    let failed = |action| move |error| OutputError { action, error };
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) => return Err(failed("cannot look at it")(error)),
        Ok(meta) if meta.is_dir() => return Ok(Found::NotAProfile(NotAProfileError::Folder)),
        Ok(meta) if !meta.is_file() => return Ok(Found::NotAProfile(NotAProfileError::NotRegular)),
        Ok(meta) if meta.len() == 0 => return Ok(Found::Nothing),
        Ok(_) => {}
    }
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut text));
    read.map_err(failed("cannot read"))?;
    Ok(model_of(&text).map_or_else(Found::NotAProfile, Found::Profile))
}

/// The model that a profile says it is of.
fn model_of(text: &[u8]) -> Result<Option<ModelId>, NotAProfileError> {
    if text.len() as u64 > MAX_BYTES {
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

    fn refusal(path: &Path) -> String {
        match look(path) {
            Ok(Found::NotAProfile(error)) => error.to_string(),
            found => panic!("{found:?}"),
        }
    }

    #[test]
    fn only_nothing_an_empty_file_or_a_profile_may_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert!(matches!(look(&path), Ok(Found::Nothing)));
        fs::write(&path, "").unwrap();
        assert!(matches!(look(&path), Ok(Found::Nothing)));
        fs::write(&path, "GGUF....").unwrap();
        assert!(refusal(&path).contains("not a routing profile"));
        assert!(refusal(folder.path()).contains("folder"));
        assert!(refusal(Path::new("/dev/null")).contains("regular"));
        assert!(look(&path.join("below")).unwrap_err().to_string().contains("cannot look at it"));
    }

    #[test]
    fn what_is_not_a_profile_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for (text, reason) in [
            (" ", "EOF"),
            ("{}", "schema"),
            (r#"["llama.cpp.moe_layer_perf.v1",[],null]"#, "an object"),
            (r#"{"schema":"other.v2","layers":[]}"#, "other.v2"),
            (r#"{"schema":"llama.cpp.moe_layer_perf.v1"}"#, "layers"),
            (r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[],"model":"a"}"#, "an object"),
            (r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":0"#, "EOF"),
        ] {
            fs::write(&path, text).unwrap();
            let message = refusal(&path);
            assert!(message.contains(reason), "{text:?}: {message}");
        }
        File::create(&path).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert!(refusal(&path).contains("larger than 64 MiB"));
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
