//! What the types of `src/ggml` forbid. Each file in `compile-fail` must be refused by the compiler, with the message beside it.
//!
//! `cargo test --release --features compile-fail-tests --test compile_fail`; with `TRYBUILD=overwrite` it writes the messages anew.

#[test]
fn what_the_types_forbid_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile-fail/*.rs");
}
