use super::data::MAX_EXPERTS;
use super::*;
use crate::units::Expert;
use proptest::prelude::*;
use std::path::Path;

const INFO: LayerInfo = LayerInfo { layer: 3, n_expert: 8, n_used: 2, expert_bytes: Some(100) };
const WIDE: LayerInfo = LayerInfo { layer: 5, n_expert: 300, n_used: 1, expert_bytes: None };

fn experts(ids: &[u16]) -> impl Iterator<Item = Expert> {
    ids.iter().copied().map(Expert)
}

/// Two layers, a prompt of three tokens (one in the last layer), two decoded tokens.
fn written() -> Vec<u8> {
    let mut writer = TraceWriter::new(Vec::new()).unwrap();
    writer.call(INFO, 3, experts(&[0, 1, 2, 3, 4, 5])).unwrap();
    writer.call(WIDE, 1, experts(&[299])).unwrap();
    writer.model("0123456789abcdef").unwrap();
    for token in [6, 7] {
        writer.call(INFO, 1, experts(&[token, 0])).unwrap();
        writer.call(WIDE, 1, experts(&[256 + token])).unwrap();
    }
    writer.into_inner()
}

fn refusal(bytes: &[u8]) -> TraceError {
    Trace::from_slice(bytes).unwrap_err()
}

fn assert_refused(bytes: &[u8], expected: &TraceError) {
    assert_eq!(format!("{:?}", refusal(bytes)), format!("{expected:?}"), "{:?}", String::from_utf8_lossy(bytes));
}

fn csv(rows: &str) -> Vec<u8> {
    format!("# route_trace v1\n# n_expert=8\n# layer=0 expert_bytes=10\nturn,phase,step,layer,slot,expert\n{rows}")
        .into()
}

#[test]
fn what_is_written_is_read_back() {
    let trace = Trace::from_slice(&written()).unwrap();
    assert_eq!((trace.fingerprint.as_deref(), trace.is_cut), (Some("0123456789abcdef"), false));
    assert_eq!(trace.layers.iter().map(|layer| layer.info).collect::<Vec<_>>(), [INFO, WIDE]);
    let [first, last] = &trace.layers[..] else { panic!() };
    assert_eq!((first.prompt.n_tokens(), first.prompt.experts(0).len()), (3, 6));
    assert_eq!((last.prompt.n_tokens(), last.prompt.experts(0)), (1, &[Expert(299)][..]), "the trimmed last layer");
    assert_eq!((first.decode.experts(1), last.decode.experts(1)), (&[Expert(7), Expert(0)][..], &[Expert(263)][..]));
    assert_eq!(trace.n_tokens(), 2);
}

#[test]
fn a_trace_that_was_cut_anywhere_is_read_up_to_there() {
    let whole = written();
    for length in 0..whole.len() {
        match Trace::from_slice(&whole[..length]) {
            Ok(trace) => assert!(trace.n_tokens() >= 1),
            Err(TraceError::NotATrace | TraceError::NoDecode) => {}
            Err(error) => panic!("{length}: {error}"),
        }
    }
    assert!(Trace::from_slice(&whole[..whole.len() - 1]).unwrap().is_cut);
}

#[test]
fn a_writer_refuses_what_it_could_not_read_back_and_writes_nothing_of_it() {
    let mut writer = TraceWriter::new(Vec::new()).unwrap();
    assert!(writer.call(INFO, 1, experts(&[0])).is_err(), "too few ids");
    assert!(writer.call(INFO, 1, experts(&[0, 8])).is_err(), "out of range");
    assert!(writer.call(LayerInfo { n_used: 9, ..INFO }, 1, experts(&[0; 9])).is_err());
    assert!(writer.model("short").is_err());
    writer.call(INFO, 0, experts(&[])).unwrap();
    assert_eq!(writer.into_inner(), binary::MAGIC);
}

#[test]
fn hostile_records_are_refused_with_what_and_where() {
    let with = |records: &[u8]| [&binary::MAGIC[..], records].concat();
    let layer = |n_expert: u16, n_used: u16| {
        [&b"L\x03\0"[..], &n_expert.to_le_bytes(), &n_used.to_le_bytes(), &[0; 8]].concat()
    };
    let then = |more: &[u8]| with(&[&layer(8, 2), more].concat());
    assert_refused(&with(b"X"), &TraceError::Kind { offset: 16, kind: b'X' });
    assert_refused(&with(b"M0123456789abcdeZ"), &TraceError::Fingerprint { offset: 16 });
    for (n_expert, n_used) in [(0, 0), (8, 0), (8, 9), (MAX_EXPERTS + 1, 1)] {
        assert!(matches!(refusal(&with(&layer(n_expert, n_used))), TraceError::Layer { .. }));
    }
    assert_refused(&with(b"B\x03\0\x01\0\0\0"), &TraceError::UnknownLayer { offset: 16, layer: 3 });
    assert_refused(&then(&layer(8, 2)), &TraceError::LayerTwice { offset: 31, layer: 3 });
    assert_refused(&then(b"B\x03\0\0\0"), &TraceError::NoTokens { offset: 31, layer: 3 });
    let expert = TraceError::Expert { offset: 31, layer: 3, expert: 9, n_expert: 8 };
    assert_refused(&then(b"B\x03\0\x01\0\x01\x09"), &expert);
    assert_refused(&then(b"B\x03\0\xff\xff\x01"), &TraceError::NoDecode); // ends within a huge batch
    assert_refused(&with(b""), &TraceError::NoDecode);
}

#[test]
fn rows_of_csv_become_calls() {
    let rows = "0,0,0,0,0,7\n0,0,0,0,1,1\n0,1,1,0,0,2\r\n0,1,1,0,1,3\n0,1,1,4,0,5\n\n0,1,2,0,0,2";
    let trace = Trace::from_slice(&csv(rows)).unwrap();
    let [first, other] = &trace.layers[..] else { panic!() };
    assert_eq!(first.info, LayerInfo { layer: 0, n_expert: 8, n_used: 2, expert_bytes: Some(10) });
    assert_eq!((other.info.layer, other.info.expert_bytes), (4, None));
    assert_eq!(first.prompt.experts(0), [Expert(7), Expert(1)]);
    assert_eq!(first.decode.iter().map(<[Expert]>::len).collect::<Vec<_>>(), [2, 1]);
}

#[test]
fn hostile_csv_is_refused_with_line_and_column() {
    for (row, said) in [
        ("0,1,0,0,0,8", "line 5: expert is \"8\"; expected a whole number below 8"),
        ("0,1,0,0,0,-1", "line 5: expert is \"-1\""),
        ("0,1,0,0,0,1e3", "line 5: expert is \"1e3\""),
        ("0,1,0,0,0", "line 5: expert is \"\""),
        ("0,2,0,0,0,1", "line 5: phase is \"2\"; expected a whole number below 2"),
        ("0,1,0,65536,0,1", "line 5: layer is \"65536\""),
        ("0,1,0,0,0,1\n0,1,0,0,1,1", "line 6: expert 1 is there twice"),
        ("0,0,0,0,0,1", "holds no decoded token"),
        ("0,1,0,0,0,1\n\u{7f}", "line 6: layer is \"\""),
        ("0,1,0,0,0,1\n\n\r\n# n_expert=9\n0,1,1,0,0,8", "line 9: expert is \"8\""),
        ("0,1,0,0,0,1\r\n0,1,1,0,0,8\r\n0,1,2,0,0,1", "line 6: expert is \"8\""),
    ] {
        let message = refusal(&csv(row)).to_string();
        assert!(message.starts_with(said), "{row}: {message}");
    }
    assert_refused(&[csv("0,1,0,0,0,1\n"), vec![0xff, 0xfe]].concat(), &TraceError::Line { line: 6 });
    assert_refused(csv(&"9".repeat(5000)).as_slice(), &TraceError::Line { line: 5 });
    for text in ["", "\n", "GGUF\0", "{\"schema\":1}", "layer,expert\n0,1\n", "\u{feff}phase,layer,expert"] {
        assert_refused(text.as_bytes(), &TraceError::NotATrace);
    }
    assert!(refusal(b"# n_expert=5000\nphase,layer,expert\n").to_string().contains("from 1 to 4096"));
}

#[test]
fn more_layers_than_any_model_has_are_refused() {
    let rows: String = (0..2000).map(|layer| format!("0,1,0,{layer},0,1\n")).collect();
    assert_refused(&csv(&rows), &TraceError::TooManyLayers);
}

#[test]
fn what_is_no_file_is_refused() {
    let message = Trace::read(Path::new("/dev/null")).unwrap_err().to_string();
    assert!(message.contains("/dev/null: is not a regular file"), "{message}");
    let message = Trace::read(Path::new("/nowhere/at/all")).unwrap_err().to_string();
    assert!(message.starts_with("/nowhere/at/all: cannot read: "), "{message}");
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Trace::from_slice(&bytes);
        let _ = Trace::from_slice(&[binary::MAGIC, &bytes[..]].concat());
        let _ = Trace::from_slice(&[csv(""), bytes].concat());
    }

    #[test]
    fn a_trace_with_one_byte_changed_is_read_or_refused(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = written();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = Trace::from_slice(&bytes);
    }
}
