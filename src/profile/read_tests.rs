//! Hostile profiles, mutated profiles, and what a good one gives.

use super::error::ProfileError;
use super::format::{MAX_COUNT, MAX_EXPERTS, MAX_LAYER, SCHEMA};
use super::read::RecordedProfile;
use super::testing::profile;
use crate::Error;
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Instant;

const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hostile");

fn read(layers: &str) -> Result<RecordedProfile, ProfileError> {
    RecordedProfile::from_slice(format!(r#"{{"schema":"{SCHEMA}","layers":{layers}}}"#).as_bytes())
}

fn refusal(path: &Path) -> String {
    let error = RecordedProfile::read(path).unwrap_err();
    assert!(matches!(&error, Error::File { what, .. } if what.is::<ProfileError>()));
    error.to_string()
}

#[test]
fn every_file_of_the_corpus_is_refused_with_its_own_reason() {
    let expected = fs::read_to_string(Path::new(CORPUS).join("expected.json")).unwrap();
    let expected: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&expected).unwrap();
    for (name, case) in &expected {
        let message = refusal(&Path::new(CORPUS).join(name));
        assert!(message.contains(name.as_str()) && message.lines().count() == 1, "{message:?}");
        for words in case["says"].as_array().unwrap() {
            assert!(message.contains(words.as_str().unwrap()), "{message} should say {words}");
        }
    }
    assert_eq!(expected.len() + 1, fs::read_dir(CORPUS).unwrap().count(), "a file without an expectation");
}

#[test]
fn our_own_profile_is_read_with_its_model() {
    let profile = profile("a", 9);
    let recorded = RecordedProfile::from_slice(&serde_json::to_vec(&profile).unwrap()).unwrap();
    assert_eq!(recorded.model, profile.model);
    assert_eq!((recorded.n_expert, &recorded.layers[&0].requests[..]), (Some(8), &[(7, 9)][..]));
}

#[test]
fn hot_and_cold_counts_are_added_and_experts_stand_in_only_where_both_are_zero() {
    let recorded = read(
        r#"[{"layer":4,"experts":[[9,9]],"hot_experts":[[3,1],[1,2]],"cold_experts":[[2,0],[1,5]],"more":1},
            {"layer":2,"experts":[[5,6],[4,1],[6,0]],"hot_experts":[[1,0]]},
            {"layer":1}]"#,
    );
    let layers = recorded.unwrap().layers;
    assert_eq!(layers.keys().collect::<Vec<_>>(), [&1, &2, &4]);
    assert_eq!(layers[&4].requests, [(1, 7), (3, 1)]);
    assert_eq!(layers[&2].requests, [(4, 1), (5, 6)]);
    assert_eq!((layers[&1].n_expert, &layers[&1].requests[..]), (None, &[][..]));
}

#[test]
fn counts_that_are_too_many_together_are_refused() {
    let experts: Vec<_> = (0..2049).map(|expert| (expert, MAX_COUNT)).collect();
    let layers = serde_json::json!([{"layer": 6, "experts": experts}]);
    assert!(matches!(read(&layers.to_string()), Err(ProfileError::Overflow { layer: 6 })));
}

#[test]
fn only_a_readable_regular_file_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("file"), "{}").unwrap();
    symlink("file", at("link")).unwrap();
    symlink("nothing", at("dangling")).unwrap();
    symlink("circle", at("circle")).unwrap();
    for (path, words) in [
        (at("none"), "no such file"),
        (folder.path().into(), "is a folder"),
        ("/dev/null".into(), "regular file"),
        (at("link"), "missing field `schema`"),
        (at("circle"), "cannot be read: Too many levels of symbolic links"),
        (at("dangling"), "symbolic link to \"nothing\", where nothing is"),
        (at("file/below"), "cannot be read: Not a directory"),
    ] {
        assert!(refusal(&path).contains(words), "{}", refusal(&path));
    }
}

#[test]
fn a_large_profile_takes_little_time_and_a_larger_one_is_not_read() {
    let experts: Vec<_> = (0..512).map(|expert| (expert, 1_000_000_000 + expert)).collect();
    let layers: Vec<_> = (0..200)
        .map(|layer| serde_json::json!({"layer": layer, "experts": experts, "cold_experts": experts}))
        .collect();
    let text = serde_json::json!(layers).to_string();
    // Against serde_json's own reading of the same text, in turns: the best of each counts.
    let time = |read: &dyn Fn() -> usize| {
        let start = Instant::now();
        assert_eq!(read(), 200);
        start.elapsed()
    };
    let ours = || read(&text).unwrap().layers.len();
    let plain = || serde_json::from_str::<serde_json::Value>(&text).unwrap().as_array().unwrap().len();
    let pairs: Vec<_> = (0..5).map(|_| (time(&ours), time(&plain))).collect();
    let ours = pairs.iter().map(|pair| pair.0).min().unwrap();
    let plain = pairs.iter().map(|pair| pair.1).min().unwrap();
    assert!(ours < 10 * plain, "{ours:?}, serde_json alone {plain:?}");

    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 40).unwrap();
    assert!(refusal(file.path()).contains("larger than 64 MiB"));
}

/// Text that is nearly a profile: a whole one with some bytes replaced, cut off or repeated.
fn nearly_a_profile() -> impl Strategy<Value = Vec<u8>> {
    let number = || prop_oneof![0..12u64, Just(MAX_COUNT), Just(MAX_COUNT + 1), any::<u64>()];
    let counts = || prop::collection::vec((number(), number()), 0..6);
    let layer = (number(), counts(), counts(), counts()).prop_map(|(layer, experts, hot, cold)| {
        serde_json::json!({"layer": layer, "experts": experts, "hot_experts": hot, "cold_experts": cold})
    });
    let own = prop::collection::vec((number(), number()), 0..3);
    let whole = (number(), prop::collection::vec(layer, 0..4), own).prop_map(|(n_expert, layers, own)| {
        let own: Vec<_> = own.iter().map(|(l, n)| serde_json::json!({"layer": l, "n_expert": n})).collect();
        serde_json::json!({"schema": SCHEMA, "n_expert": n_expert, "layers": layers, "moe_hot": {"layers": own}})
    });
    let edits = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 0..3);
    (whole, edits).prop_map(|(whole, edits)| {
        let mut text = whole.to_string().into_bytes();
        for (at, byte, kind) in edits {
            let at = at.index(text.len().max(1)).min(text.len().saturating_sub(1));
            match kind {
                0 => text.truncate(at),
                1 => text.insert(at, byte),
                2 => text.extend_from_within(at..),
                _ => text[at..].iter_mut().take(1).for_each(|old| *old = byte),
            }
        }
        text
    })
}

proptest! {
    #[test]
    fn whatever_is_read_keeps_the_promises_of_its_type(text in nearly_a_profile()) {
        check_promises(&text);
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in prop::collection::vec(any::<u8>(), 0..200)) {
        check_promises(&text);
    }
}

/// What [`RecordedProfile`] says of itself.
fn check_promises(text: &[u8]) {
    let Ok(recorded) = RecordedProfile::from_slice(text) else { return };
    let mut total = 0u64;
    for (layer, of_layer) in &recorded.layers {
        assert!(*layer <= MAX_LAYER);
        assert!(of_layer.n_expert.is_none_or(|n| (1..=MAX_EXPERTS).contains(&n)));
        assert!(of_layer.requests.is_sorted_by(|a, b| a.0 < b.0));
        for &(expert, count) in &of_layer.requests {
            assert!(expert < of_layer.n_expert.or(recorded.n_expert).unwrap_or(MAX_EXPERTS) && count > 0);
            total = total.checked_add(count).unwrap();
        }
    }
    assert!(total > 0 && !recorded.layers.is_empty());
}
