//! Any bytes are a GGUF header or an error, and no tensor's place overflows.
#![no_main]

use ggml_moe_hot::gguf::Header;
use std::io::Cursor;

libfuzzer_sys::fuzz_target!(|file: &[u8]| {
    let Ok(header) = Header::read(Cursor::new(file), file.len() as u64) else { return };
    for tensor in header.tensors.values() {
        assert!(tensor.offset.checked_add(tensor.n_bytes).is_some());
    }
});
