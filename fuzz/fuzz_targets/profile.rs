//! Any bytes are a profile or a fault, and an accepted profile keeps what its type promises.
#![no_main]

use ggml_moe_hot::profile::Demand;

libfuzzer_sys::fuzz_target!(|text: &[u8]| {
    let Ok(demand) = Demand::from_slice(text) else { return };
    assert!(!demand.layers.is_empty());
    for layer in demand.layers.values() {
        assert!(layer.requests.is_sorted_by(|a, b| a.0 < b.0));
        assert!(layer.requests.iter().all(|&(_, count)| count > 0));
    }
});
