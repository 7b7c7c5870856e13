//! The `moe-hot` command.
/// Runs it.
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
