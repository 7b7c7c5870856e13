//! `moe-hot inspect`: what a model's file or a profile says of experts.

mod model;
mod profile;

use super::failure::{Failure, named_by_user};
use super::formats;
use super::output::{print, print_json};
use clap::Args;
use std::path::PathBuf;

pub use profile::{Skew, skew};

/// Show a model's experts and which can be cached, or how a profile's requests are spread over experts
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  moe-hot inspect model.gguf\n  moe-hot inspect experts.json\n  moe-hot inspect experts.json --json"
)]
pub struct InspectArgs {
    /// A model (GGUF), or a profile or trace in any format; told by the content
    #[arg(value_name = "MODEL|PROFILE")]
    path: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Looks at the file and prints what is in it.
pub fn inspect(args: &InspectArgs) -> Result<(), Failure> {
    if formats::is_model(&args.path).map_err(named_by_user)? {
        let view = model::view(&args.path).map_err(named_by_user)?;
        if args.json { print_json(&view) } else { print(&view.text()) }
    } else {
        let view = profile::view(&args.path).map_err(named_by_user)?;
        if args.json { print_json(&view) } else { print(&view.text()) }
    }
}
