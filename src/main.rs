//! The `moe-hot` command; see `ggml_moe_hot::cli`.

fn main() -> std::process::ExitCode {
    ggml_moe_hot::cli::main()
}
