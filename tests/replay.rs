//! `moe-hot replay` as users run it: hit rates on known traces, its JSON, its speed, and what it says of bad input.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use ggml_moe_hot::trace::{LayerInfo, Trace, TraceWriter};
use ggml_moe_hot::units::Expert;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

fn moe_hot(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moe-hot")).args(args).output().unwrap()
}

fn rows(args: &[&str]) -> Vec<Value> {
    let done = moe_hot(&[&["replay", "--json", "-"], args].concat());
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap()
}

fn hits(rows: &[Value], policy: &str) -> Vec<f64> {
    let of_policy = rows.iter().filter(|row| row["policy"] == policy);
    of_policy.map(|row| row["hit"].as_f64().unwrap()).collect()
}

fn checked_in(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces").join(name).display().to_string()
}

/// The public traces of docs/policy.md (Sources) lie beside the repository, or where MOE_HOT_TRACES says.
fn shared(name: &str) -> Option<String> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/traces");
    let path = std::env::var_os("MOE_HOT_TRACES").map_or_else(beside, PathBuf::from).join(name);
    if !path.is_file() {
        eprintln!("skipped: {} is not there; MOE_HOT_TRACES names another folder", path.display());
        return None;
    }
    Some(path.display().to_string())
}

fn assert_near(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= tolerance + 0.0005, "{what}: {found:.4}, expected {expected}");
    }
}

/// Reference hit rates (docs/policy.md), cold, at 8, 16, 24, 32 and 48 slots. They have three digits.
fn compare_with_the_reference(trace: &str, policies: [(&str, [f64; 5], f64); 4]) {
    let Some(path) = shared(trace) else { return };
    let rows = rows(&[&path, "--slots", "8,16,24,32,48"]);
    for (policy, expected, tolerance) in policies {
        assert_near(&hits(&rows, policy), &expected, tolerance, &format!("{trace} {policy}"));
    }
    let (ours, blend) = (hits(&rows, "default"), policies[2].1);
    assert!(ours.iter().zip(blend).all(|(ours, blend)| *ours >= blend - 0.005), "{ours:?}");
}

#[test]
fn qwens_trace_gives_the_reference_hit_rates() {
    let policies = [
        ("lru", [0.427, 0.607, 0.722, 0.805, 0.889], 0.002),
        ("belady", [0.612, 0.771, 0.845, 0.885, 0.913], 0.002),
        ("blend", [0.468, 0.656, 0.760, 0.824, 0.894], 0.005),
        ("lfu", [0.436, 0.627, 0.748, 0.821, 0.892], 0.005),
    ];
    compare_with_the_reference("qwen.route.csv", policies);
}

#[test]
fn gemmas_trace_gives_the_reference_hit_rates() {
    let policies = [
        ("lru", [0.409, 0.606, 0.709, 0.777, 0.872], 0.002),
        ("belady", [0.606, 0.758, 0.828, 0.869, 0.906], 0.002),
        ("blend", [0.473, 0.649, 0.742, 0.803, 0.878], 0.005),
        ("lfu", [0.442, 0.620, 0.723, 0.792, 0.875], 0.005),
    ];
    compare_with_the_reference("gemma.route.csv", policies);
}

#[test]
fn a_warm_cache_gives_the_reference_hit_rates() {
    let Some(path) = shared("qwen.route.csv") else { return };
    let rows = rows(&[&path, "--slots", "8,16,24,32,48", "--warm", "prompt"]);
    assert_near(&hits(&rows, "lru"), &[0.429, 0.612, 0.728, 0.817, 0.917], 0.002, "lru");
    assert_near(&hits(&rows, "belady"), &[0.622, 0.791, 0.875, 0.922, 0.962], 0.002, "belady");
    assert_near(&hits(&rows, "blend"), &[0.477, 0.662, 0.767, 0.840, 0.925], 0.005, "blend");
}

#[test]
fn the_default_policy_bears_late_copies() {
    for (trace, least) in [("qwen.route.csv", 0.58), ("gemma.route.csv", 0.60)] {
        let Some(path) = shared(trace) else { continue };
        let late = ["--lag", "4", "--inserts", "1", "--warm", "prompt", "--slots", "16", "--policy", "default"];
        let hit = hits(&rows(&[&[path.as_str()], &late[..]].concat()), "default")[0];
        assert!(hit >= least, "{trace}: {hit}");
    }
}

#[test]
fn dearer_copies_are_fewer() {
    let Some(path) = shared("qwen.route.csv") else { return };
    let copies = |price| {
        let rows = rows(&[&path, "--slots", "16", "--policy", "default", "--copy-price", price]);
        rows[0]["copies_per_token"].as_f64().unwrap()
    };
    let copies = ["0", "0.1", "0.5", "1", "4"].map(copies);
    assert!(copies.is_sorted_by(|a, b| a > b), "{copies:?}");
}

/// Results on the synthetic trace as they were when each was last looked at; MOE_HOT_BLESS=1 writes them anew.
#[test]
fn a_small_trace_gives_the_same_results_as_ever() {
    let path = checked_in("synthetic.route.csv");
    let late = ["--lag", "0,2", "--inserts", "1", "--slots", "3,6", "--warm", "prompt"];
    let mut found = rows(&[&path, "--slots", "3,6,12"]);
    found.extend(rows(&[&[path.as_str()], &late[..]].concat()));
    found.extend(rows(&[&path, "--policy", "default", "--slots", "6", "--look-ahead", "--copy-price", "0.5"]));
    found.iter_mut().for_each(|row| row["trace"] = "synthetic.route.csv".into());
    let golden = checked_in("golden.json");
    if std::env::var_os("MOE_HOT_BLESS").is_some() {
        std::fs::write(&golden, serde_json::to_string_pretty(&found).unwrap() + "\n").unwrap();
    }
    let expected: Vec<Value> = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found, expected);
    }
}

#[test]
fn json_has_the_promised_fields_and_the_table_the_same_rows() {
    let path = checked_in("synthetic.route.csv");
    let args = [path.as_str(), "--policy", "lru,default", "--slots", "4,8", "--lag", "0,4"];
    let rows = rows(&args);
    assert_eq!(rows.len(), 8);
    let mut fields: Vec<_> = rows[0].as_object().unwrap().keys().map(String::as_str).collect();
    fields.sort_unstable();
    let promised = ["bytes_per_token", "copies_per_token", "hit", "inserts", "lag", "policy", "slots", "trace", "warm"];
    assert_eq!(fields, promised);
    let table = moe_hot(&[&["replay"], &args[..]].concat());
    assert_eq!(String::from_utf8(table.stdout).unwrap().lines().count(), 1 + rows.len());
}

/// The CSV has no batches, so its prompt is written as one batch per layer.
#[test]
fn both_formats_give_the_same_results() {
    let csv = checked_in("synthetic.route.csv");
    let trace = Trace::read(Path::new(&csv)).unwrap();
    let mut writer = TraceWriter::new(Vec::new()).unwrap();
    for layer in &trace.layers {
        let n_tokens = u16::try_from(layer.prompt.n_tokens()).unwrap();
        writer.call(layer.info, n_tokens, layer.prompt.iter().flatten().copied()).unwrap();
    }
    for call in 0..trace.layers[0].decode.len() {
        for layer in &trace.layers {
            writer.call(layer.info, 1, layer.decode.experts(call).iter().copied()).unwrap();
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("own.trace").display().to_string();
    std::fs::write(&path, writer.into_inner()).unwrap();
    let results = |path: &str| {
        let mut rows = rows(&[path, "--slots", "4,8", "--look-ahead"]);
        rows.iter_mut().for_each(|row| row["trace"] = Value::Null);
        rows
    };
    assert_eq!(results(&path), results(&csv));
}

#[test]
fn a_trace_of_a_killed_program_is_replayed_with_a_warning() {
    let info = LayerInfo { layer: 0, n_expert: 4, n_used: 1, expert_bytes: None };
    let mut writer = TraceWriter::new(Vec::new()).unwrap();
    (0..9).for_each(|id| writer.call(info, 1, [Expert(id % 2)].into_iter()).unwrap());
    let mut bytes = writer.into_inner();
    bytes.pop();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.trace").display().to_string();
    std::fs::write(&path, bytes).unwrap();
    let done = moe_hot(&["replay", &path]);
    assert!(done.status.success());
    assert!(String::from_utf8_lossy(&done.stderr).contains("ends in the middle of a record"));
}

#[test]
fn bytes_are_unknown_unless_the_trace_or_the_user_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.csv").display().to_string();
    std::fs::write(&path, "phase,layer,expert\n1,0,3\n1,1,2\n1,0,1\n").unwrap();
    assert_eq!(rows(&[&path, "--policy", "lru"])[0]["bytes_per_token"], Value::Null);
    let row = rows(&[&path, "--policy", "lru", "--expert-bytes", "10"]).remove(0);
    assert_eq!(row["bytes_per_token"].as_f64().unwrap(), 10.0 * row["copies_per_token"].as_f64().unwrap());
}

#[test]
fn a_profile_is_a_fixed_list_or_a_warm_start() {
    let folder = tempfile::tempdir().unwrap();
    let (trace, profile) = (folder.path().join("t.csv"), folder.path().join("e.json"));
    std::fs::write(&trace, "# n_expert=4\nstep,phase,layer,expert\n0,1,0,3\n1,1,0,2\n2,1,0,3\n3,1,0,2\n").unwrap();
    let text = r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":0,"experts":[[3,9],[1,1]]}]}"#;
    std::fs::write(&profile, text).unwrap();
    let (trace, profile) = (trace.display().to_string(), profile.display().to_string());
    let hit =
        |args: &[&str]| rows(&[&[&*trace, "--slots", "1", "--profile", &profile], args].concat())[0]["hit"].clone();
    assert_eq!(hit(&["--policy", "fixed"]), 0.5);
    assert_eq!(hit(&["--policy", "lru"]), 0.0);
    assert_eq!(hit(&["--policy", "lru", "--warm", "profile"]), 0.25);
}

#[test]
fn bad_input_is_told_in_one_line_with_exit_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("a.txt").display().to_string();
    std::fs::write(&text, "hello\n").unwrap();
    let other = folder.path().join("other.json").display().to_string();
    std::fs::write(&other, r#"{"schema":"llama.cpp.moe_layer_perf.v1","layers":[{"layer":0,"experts":[[99,9]]}]}"#)
        .unwrap();
    let trace = checked_in("synthetic.route.csv");
    for (args, said) in [
        (&["/nowhere/trace"][..], "/nowhere/trace: cannot read"),
        (&[&text], "is no trace"),
        (&[folder.path().to_str().unwrap()], "is not a regular file"),
        (&[&trace, "--slots", "0"], "--slots"),
        (&[&trace, "--slots", "x"], "--slots"),
        (&[&trace, "--policy", "best"], "--policy"),
        (&[&trace, "--copy-price", "-1"], "--copy-price"),
        (&[&trace, "--warm", "profile"], "expected --profile FILE too"),
        (&[&trace, "--policy", "fixed"], "expected --profile FILE too"),
        (&[&trace, "--profile", &text], "is not JSON"),
        (&[&trace, "--profile", &other], "counts expert 99"),
        (&[&trace, "--no-such-flag"], "--no-such-flag"),
        (&[], "TRACE"),
    ] {
        let done = moe_hot(&[&["replay"], args].concat());
        let complaint = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(2), "{args:?}: {complaint}");
        assert_eq!(complaint.lines().count(), 1, "{complaint}");
        assert!(complaint.contains(said) && complaint.starts_with("moe-hot: "), "{args:?}: {complaint}");
    }
}

#[test]
fn no_policy_takes_much_longer_than_lru() {
    const MOST_OF_LRU: f64 = 8.0;
    const N_TOKENS: usize = 10_000;
    const N_USED: usize = 8;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.csv");
    let mut text = "# n_expert=128\nstep,phase,layer,expert\n".to_owned();
    for step in 0..N_TOKENS {
        for index in 0..N_USED {
            text += &format!("{step},1,0,{}\n", index * 16 + (step * step / 3 + index) % 16);
        }
    }
    std::fs::write(&path, text).unwrap();
    let path = path.display().to_string();
    let seconds = |policy: &str| {
        let start = Instant::now();
        rows(&[&path, "--slots", "8,16,24,32,48", "--policy", policy]);
        start.elapsed().as_secs_f64()
    };
    // LRU is the yardstick, in turns: what a machine can do differs. The best of three pairs counts.
    for policy in ["lfu", "blend", "belady", "default"] {
        let ratio = (0..3).map(|_| seconds(policy) / seconds("lru")).fold(f64::INFINITY, f64::min);
        println!("{policy}: {ratio:.1} times as long as LRU, reading included");
        assert!(ratio < MOST_OF_LRU, "{policy}: {ratio} times as long as LRU");
    }
}
