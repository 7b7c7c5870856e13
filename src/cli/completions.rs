//! `moe-hot completions`: what a shell needs to complete our commands and options.

use super::failure::Failure;
use super::output::print;
use clap::{Args, Command};
use clap_complete::{Shell, generate};

/// Print a shell's completions for moe-hot
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  moe-hot completions bash > ~/.local/share/bash-completion/completions/moe-hot\n  \
    moe-hot completions zsh > ~/.zfunc/_moe-hot\n  \
    moe-hot completions fish > ~/.config/fish/completions/moe-hot.fish"
)]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Prints the completions of `command`.
pub fn completions(args: &CompletionsArgs, mut command: Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    let name = command.get_name().to_owned();
    generate(args.shell, &mut command, name, &mut script);
    print(&String::from_utf8_lossy(&script))
}
