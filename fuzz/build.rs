//! The targets use the plugin's library, which uses ggml: link to the pinned build of it.

fn main() {
    let libs = concat!(env!("CARGO_MANIFEST_DIR"), "/../build/stock/bin");
    println!("cargo:rustc-link-search=native={libs}");
    println!("cargo:rustc-link-arg=-Wl,--as-needed,-lggml,-lggml-base,-rpath,{libs}");
}
