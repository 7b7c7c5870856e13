//! Every format: what is written is read back, and what is wrong is told.

use super::*;
use crate::trace::{Calls, LayerInfo, LayerTrace};
use std::path::PathBuf;

fn profile() -> RecordedProfile {
    let counts =
        BTreeMap::from([(0, BTreeMap::from([(0, 5), (3, 70_000)])), (2, BTreeMap::from([(1, 1), (2, 2), (3, 3)]))]);
    profile_of(counts, Some(4), Some(2)).unwrap()
}

fn trace() -> Trace {
    let calls = |tokens: &[&[u16]]| {
        let mut calls = Calls::default();
        tokens.iter().for_each(|ids| calls.push(ids.len() as u32 / 2, ids.iter().copied().map(Expert)));
        calls
    };
    let layer = |layer, prompt: &[&[u16]]| LayerTrace {
        info: LayerInfo { layer, n_expert: 8, n_used: 2, expert_bytes: Some(64) },
        prompt: calls(prompt),
        decode: calls(&[&[0, 7], &[1, 2, 3, 4], &[7, 6]]),
    };
    Trace { fingerprint: None, layers: vec![layer(1, &[&[0, 1, 2, 3]]), layer(4, &[&[5, 6]])], is_cut: false }
}

fn file(text: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("anything.bin");
    fs::write(&path, text).unwrap();
    (folder, path)
}

fn refusal(text: &[u8]) -> String {
    let (_folder, path) = file(text);
    format!("{:#}", read(&path).unwrap_err())
}

fn requests(profile: &RecordedProfile) -> Vec<(u32, &[crate::profile::Count])> {
    profile.layers.iter().map(|(&layer, recorded)| (layer, &recorded.requests[..])).collect()
}

#[test]
fn every_format_of_profiles_gives_back_what_was_written() {
    let profile = profile();
    for format in [Format::PerfJson, Format::OptPerfJson, Format::SparkCsv, Format::CountsCsv, Format::Imatrix] {
        let bytes = write(&Recording::Profile(profile.clone()), format).unwrap();
        let (_folder, path) = file(&bytes);
        let (Recording::Profile(read), told) = read(&path).unwrap() else { panic!("{format:?}: a trace") };
        assert_eq!((told, requests(&read)), (format, requests(&profile)));
        assert_eq!((read.n_expert, read.layers[&2].n_expert.unwrap_or(4)), (Some(4), 4), "{format:?}");
        if ![Format::CountsCsv, Format::Imatrix].contains(&format) {
            assert_eq!(read.n_used, Some(2), "{format:?}");
        }
    }
}

#[test]
fn a_trace_gives_back_its_tokens_and_counts_the_decoded_ones() {
    let trace = trace();
    let bytes = write(&Recording::Trace(trace.clone()), Format::RouteCsv).unwrap();
    let (_folder, path) = file(&bytes);
    let (Recording::Trace(read), Format::RouteCsv) = read(&path).unwrap() else { panic!("no trace") };
    let tokens = |trace: &Trace| -> Vec<Vec<Expert>> {
        trace
            .layers
            .iter()
            .map(|layer| layer.prompt.iter().chain(layer.decode.iter()).flatten().copied().collect())
            .collect()
    };
    assert_eq!((tokens(&read), read.layers[1].info), (tokens(&trace), trace.layers[1].info));
    assert_eq!(read.layers[0].decode.len(), 4, "a token each");
    let counted = profile_of_trace(&trace).unwrap();
    assert_eq!(requests(&counted), requests(&read_profile(&path).unwrap()));
    assert_eq!(counted.layers[&4].requests.last(), Some(&(7, 2)));
}

#[test]
fn layers_that_differ_are_told_apart() {
    let mut profile = profile();
    profile.layers.get_mut(&2).unwrap().n_expert = Some(9);
    let (read, _) = perf::read(&perf::write(&profile, false).unwrap()).unwrap();
    assert_eq!((read.layers[&0].n_expert, read.layers[&2].n_expert), (Some(4), Some(9)));
}

#[test]
fn what_is_in_no_format_is_refused_with_those_there_are() {
    for text in ["hello", "a,b,c\n1,2,3\n", "# a comment\n", "[1]", "\0\0"] {
        let message = refusal(text.as_bytes());
        assert!(message.contains("no known format") && message.contains("spark-csv"), "{text}: {message}");
    }
    assert!(refusal(b" \n").contains("is empty"));
    assert!(format!("{:#}", read(Path::new("/")).unwrap_err()).contains("folder"));
    assert!(format!("{:#}", read(Path::new("/dev/null")).unwrap_err()).contains("regular file"));
    let model = crate::gguf::testing::moe(1, 8).finish(0);
    assert!(refusal(&model).contains("is a model"));
    assert!(refusal(b"GGUF....").contains("GGUF version"));
}

#[test]
fn wrong_tables_are_refused_with_line_and_value() {
    let spark =
        |rest: &str| refusal(format!("# hotness table: n_layer=2 n_expert=3 n_expert_used=1\nnote\n{rest}").as_bytes());
    for (rest, words) in [
        ("1,2,3\n", "1 rows; expected 2"),
        ("1,2,3\n1,2\n", "line 4: 2 counts; expected 3"),
        ("1,2,3\n1,2,3,4\n", "line 4: more than 3"),
        ("1,2,3\n1,2,3\n1,2,3\n", "line 5: more rows"),
        ("1,-2,3\n", "line 3: count is \"-2\""),
        ("1,1.5,3\n", "line 3: count is \"1.5\""),
        ("0,0,0\n0,0,0\n", "counts no request"),
    ] {
        let message = spark(rest);
        assert!(message.contains(words), "{rest:?}: {message}");
    }
    for (head, words) in [
        ("n_layer=2", "no n_expert="),
        ("n_layer=0 n_expert=3", "n_layer is \"0\""),
        ("n_layer=1 n_expert=99999999", "n_expert is \"99999999\""),
        ("n_layer=1 n_expert=2 n_expert_used=3", "n_expert_used is \"3\""),
    ] {
        let message = refusal(format!("# hotness table: {head}\n1,2\n").as_bytes());
        assert!(message.contains(words), "{head}: {message}");
    }
    for (rows, words) in [
        ("0,0,1\n0,0,2\n", "line 3: expert 0 of layer 0 is there twice"),
        ("0,65536,1\n", "line 2: expert is \"65536\""),
        ("-1,0,1\n", "line 2: layer is \"-1\""),
        ("0,0,nan\n", "line 2: count is \"nan\""),
        ("0,0\n", "line 2: count is \"\""),
        ("0,0,9007199254740993\n", "line 2: count is \"9007199254740993\""),
        ("0,0,0\n", "counts no request"),
        ("", "counts no request"),
    ] {
        let message = refusal(format!("layer,expert,count\n{rows}").as_bytes());
        assert!(message.contains(words), "{rows:?}: {message}");
    }
}

#[test]
fn counts_of_an_imatrix_that_are_no_counts_are_refused() {
    let good = imatrix::write(&profile()).unwrap();
    for (value, words) in
        [(f32::NAN, "NaN tokens"), (-1.0, "-1 tokens"), (f32::INFINITY, "inf tokens"), (1e30, "tokens")]
    {
        let mut bad = good.clone();
        let at = bad.len() - 32;
        bad[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let message = refusal(&bad);
        assert!(message.contains(words) && message.contains("expert 0"), "{value}: {message}");
    }
    assert!(refusal(&good[..good.len() - 40]).contains("the file is cut off"));
}

#[test]
fn a_profile_cannot_become_a_trace() {
    let error = write(&Recording::Profile(profile()), Format::RouteCsv).unwrap_err();
    assert!(error.to_string().contains("expected a trace"));
}

#[test]
fn a_table_that_nobody_could_read_is_not_written() {
    let counts = BTreeMap::from([(65_535, BTreeMap::from([(65_535, 1)]))]);
    let profile = Recording::Profile(profile_of(counts, Some(65_536), None).unwrap());
    assert!(write(&profile, Format::SparkCsv).unwrap_err().to_string().contains("4294967296 experts"));
    assert!(write(&profile, Format::CountsCsv).is_ok());
}
