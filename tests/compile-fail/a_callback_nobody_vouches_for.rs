//! Whoever makes a callback that C will call vouches for it.

use ggml_moe_hot::ggml::AbortCallback;

fn main() {
    let _ = AbortCallback::new(None, std::ptr::null_mut());
}
