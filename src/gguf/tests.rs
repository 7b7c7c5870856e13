//! Headers that are whole, wrong, cut and mutated; models of several files.

use super::testing::{Writer, moe, text};
use super::{Fact, GgufError, Header, ModelFile};
use crate::Error;
use proptest::prelude::*;
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

const SHIPPED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/moe-small.gguf");

fn read(file: &[u8]) -> Result<Header, GgufError> {
    Header::read(Cursor::new(file), file.len() as u64)
}

/// The file that cannot be opened, and why.
fn unopened(path: &Path) -> (PathBuf, GgufError) {
    match ModelFile::open(path) {
        Err(Error::File { path, what }) => (path, *what.downcast().unwrap()),
        _ => panic!("{} was opened", path.display()),
    }
}

fn refusal(writer: Writer) -> String {
    read(&writer.finish(0)).unwrap_err().to_string()
}

#[test]
fn tensors_are_found_behind_all_kinds_of_metadata() {
    let mut names = 8u32.to_le_bytes().to_vec();
    names.extend(2u64.to_le_bytes());
    names.extend([text("a"), text("bc")].concat());
    let mut numbers = 6u32.to_le_bytes().to_vec();
    numbers.extend(3u64.to_le_bytes());
    numbers.extend([0; 12]);
    let writer = Writer::new()
        .entry("general.architecture", 8, &text("qwen3moe"))
        .entry("tokens", 9, &names)
        .entry("scores", 9, &numbers)
        .entry("flag", 7, &[1])
        .entry("split.count", 2, &3u16.to_le_bytes())
        .entry("general.alignment", 4, &64u32.to_le_bytes())
        .tensor("a", 12, &[256, 2], 288);
    let header = read(&writer.finish(0)).unwrap();
    let info = &header.tensors["a"];
    assert_eq!((header.n_parts, info.kind.name, info.shape, info.n_bytes), (3, "q4_K", [256, 2, 1, 1], 288));
    assert_eq!(info.offset % 64, 0);
}

#[test]
fn facts_are_kept_where_they_are_of_a_kind_that_is_used() {
    let list = |kind: u32, n: u64, values: &[u8]| [&kind.to_le_bytes()[..], &n.to_le_bytes(), values].concat();
    let header = Writer::new()
        .entry("general.architecture", 8, &text("x"))
        .entry("x.block_count", 4, &3u32.to_le_bytes())
        .entry("x.expert_used_count", 5, &(-1i32).to_le_bytes())
        .entry("x.embedding_length", 6, &1f32.to_le_bytes())
        .entry("x.attention.head_count_kv", 9, &list(5, 2, &[1, 0, 0, 0, 2, 0, 0, 0]))
        .entry("x.attention.head_count", 9, &list(8, 1, &text("many")))
        .entry("x.attention.key_length", 9, &list(0, 5000, &[1; 5000]))
        .entry("general.name", 8, &text(&"n".repeat(5000)))
        .tensor("a", 0, &[1], 4);
    let facts = read(&header.finish(0)).unwrap().facts;
    let expected = [
        ("general.architecture", Fact::Text("x".into())),
        ("x.attention.head_count_kv", Fact::Numbers(vec![1, 2])),
        ("x.block_count", Fact::Number(3)),
    ];
    assert_eq!(facts, expected.map(|(key, fact)| (key.to_owned(), fact)).into());
}

#[test]
fn a_model_of_which_a_part_or_data_is_missing_is_not_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let whole = moe(1, 8).finish(0);
    let says = |file: &[u8]| {
        fs::write(&path, file).unwrap();
        ModelFile::open(&path).unwrap().check_whole().map_err(|error| error.to_string())
    };
    assert_eq!(says(&whole), Ok(()));
    assert!(says(&whole[..whole.len() - 1]).unwrap_err().contains("cut off"));
    let part = moe(1, 8).entry("split.count", 2, &3u16.to_le_bytes()).finish(0);
    assert!(says(&part).unwrap_err().contains("one of 3 parts of a model, and 1 of them"));
}

#[test]
fn wrong_headers_are_refused_with_the_reason() {
    for (writer, words) in [
        (Writer::new().tensor("a", 99, &[1], 4), "type 99"),
        (Writer::new().tensor("a", 12, &[255], 4), "whole blocks"),
        (Writer::new().tensor("a", 0, &[u64::MAX, 2], 4), "below 2^63"),
        (Writer::new().tensor("a", 0, &[1; 5], 4), "dimensions of a tensor: 5"),
        (Writer::new().tensor("a", 0, &[1], 4).tensor("a", 0, &[1], 4), "twice"),
        (Writer::new().tensor(&"a".repeat(64), 0, &[1], 4), "64; expected at most 63"),
        (Writer::new().tensor_at("a", 0, &[1], u64::MAX - 7), "size below"),
        (Writer::new().entry("general.alignment", 4, &24u32.to_le_bytes()), "alignment is 24"),
        (Writer::new().entry("general.alignment", 8, &text("x")), "unsigned integer"),
        (Writer::new().entry("split.count", 4, &u32::MAX.to_le_bytes()), "parts: 4294967295"),
        (Writer::new().entry("x", 13, &[]), "type 13"),
        (Writer::new().entry("x", 8, &u64::MAX.to_le_bytes()), "in the middle"),
        (Writer::new().entry("x", 9, &[[9, 0, 0, 0].as_slice(), &[1; 8]].concat()), "no list in a list"),
        (Writer::new().entry("x", 9, &[[8, 0, 0, 0].as_slice(), &[255; 8]].concat()), "in the middle"),
        (Writer::new().entry("x", 9, &[[10, 0, 0, 0].as_slice(), &[255; 8]].concat()), "in the middle"),
    ] {
        let message = refusal(writer);
        assert!(message.contains(words), "{message} should say {words}");
    }
    assert!(matches!(read(b"{\"schema\""), Err(GgufError::Magic(_))));
    assert!(matches!(read(b"GGUF\x01\0\0\0"), Err(GgufError::Version(1))));
    assert!(matches!(read(b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff"), Err(GgufError::TooMany { .. })));
}

#[test]
fn every_shorter_header_is_refused() {
    let writer = moe(2, 4).entry("general.architecture", 8, &text("x"));
    let file = writer.finish(0);
    let header = file.len() - 2 * 32 * 4 - 8 * 4;
    let whole = (0..file.len()).find(|&len| read(&file[..len]).is_ok()).unwrap();
    assert!(whole <= header && whole > header - 32, "{whole} {header}");
}

#[test]
fn the_shipped_models_experts_are_counted_and_measured() {
    let model = ModelFile::open(Path::new(SHIPPED)).unwrap();
    let experts: Vec<_> = model.experts().collect();
    assert!(experts.len() >= 3 && experts.iter().all(|tensor| tensor.n_expert == experts[0].n_expert));
    let bytes = model.expert_bytes().unwrap();
    assert!(bytes > 0 && bytes < fs::metadata(SHIPPED).unwrap().len());
}

#[test]
fn a_model_in_parts_is_read_from_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let part = |number: u32| folder.path().join(format!("m-{number:05}-of-00002.gguf"));
    let count = 2u16.to_le_bytes();
    fs::write(part(1), moe(1, 4).entry("split.count", 2, &count).finish(1)).unwrap();
    assert_eq!(unopened(&part(1)).0, part(2), "the missing part is named");
    let second = Writer::new().entry("split.count", 2, &count).tensor("blk.1.ffn_up_exps.weight", 0, &[4, 2, 4], 128);
    fs::write(part(2), second.finish(2)).unwrap();
    let model = ModelFile::open(&part(1)).unwrap();
    assert_eq!(model.expert_bytes(), Some(256));
    let mut byte = [0];
    model.tensor("blk.1.ffn_up_exps.weight").unwrap().read_exact_at(&mut byte, 127).unwrap();
    assert_eq!(byte, [2], "the second part's data");
}

#[test]
fn data_that_is_not_there_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let file = moe(1, 4).finish(1);
    fs::write(&path, &file[..file.len() - 40]).unwrap();
    let model = ModelFile::open(&path).unwrap();
    let tensor = model.tensor("blk.0.ffn_up_exps.weight").unwrap();
    let last = tensor.info.n_bytes - 1;
    assert!(tensor.read_exact_at(&mut [0], 0).is_ok() && tensor.read_exact_at(&mut [0], last).is_err());
    assert!(tensor.read_exact_at(&mut [0], u64::MAX).is_err());
    assert!(model.tensor("blk.7.ffn_up_exps.weight").is_none());
}

#[test]
fn a_pipe_is_not_waited_for() {
    assert!(matches!(unopened(Path::new("/dev/null")).1, GgufError::NotRegular));
}

proptest! {
    #[test]
    fn no_mutated_header_makes_the_reader_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut file = moe(3, 4).entry("split.count", 2, &[1, 0]).entry("a", 8, &text("b")).finish(0);
        for (at, byte) in edits {
            let at = at.index(file.len());
            file[at] = byte;
        }
        file.truncate(file.len() - cut.index(8));
        if let Ok(header) = read(&file) {
            for info in header.tensors.values() {
                prop_assert!(info.offset.checked_add(info.n_bytes).is_some());
            }
        }
    }
}
