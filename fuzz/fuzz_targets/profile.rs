//! Any bytes are a profile or an error, and an accepted profile keeps what its type promises.
#![no_main]

use ggml_moe_hot::profile::RecordedProfile;

libfuzzer_sys::fuzz_target!(|text: &[u8]| {
    let Ok(profile) = RecordedProfile::from_slice(text) else { return };
    assert!(!profile.layers.is_empty());
    for layer in profile.layers.values() {
        assert!(layer.requests.is_sorted_by(|a, b| a.0 < b.0));
        assert!(layer.requests.iter().all(|&(_, count)| count > 0));
    }
});
