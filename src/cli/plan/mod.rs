//! `moe-hot plan`: what a cache would bring in so much GPU memory, against whole layers in the same memory.

mod estimate;
mod speed;
mod verdict;
mod view;

use super::calibrate::{Calibration, this_machine};
use super::failure::{Failure, OrFail, named_by_user};
use super::formats;
use super::model::Model;
use super::output::{print, print_json};
use super::same_model::check_model;
use super::size;
use crate::units::Bytes;
use anyhow::Context;
use clap::Args;
use estimate::{Estimate, Room};
use std::path::PathBuf;
use verdict::Verdict;
use view::{Known, View};

/// The longest context that can be asked for.
const MAX_CONTEXT: i64 = 1 << 30;

/// Say what a cache in so much GPU memory would bring, against --n-cpu-moe in the same memory, and which to use
#[derive(Args, Debug)]
#[command(
    after_help = "The speed is predicted from this machine's bandwidths (moe-hot calibrate stores them) and the profile's hit rate.\n\n\
    Examples:\n  moe-hot plan model.gguf --profile experts.json --vram 12GiB\n  \
    moe-hot plan model.gguf --vram 8G -c 16384 --json"
)]
pub struct PlanArgs {
    /// The model (GGUF); of a split model the first part
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// A profile or trace of the model, in any format; without one all experts count as used alike
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// GPU memory for everything: 12GiB, 12G, 12288MiB, or bytes
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = size::parse)]
    vram: Bytes,
    /// Tokens of context
    #[arg(short = 'c', long = "ctx-size", value_name = "N", default_value = "4096", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=MAX_CONTEXT))]
    context: u32,
    /// GPU memory that stays free for compute buffers and other programs
    #[arg(long, value_name = "SIZE", default_value = "1GiB", allow_hyphen_values = true, value_parser = size::parse)]
    reserve: Bytes,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Plans and prints.
pub fn plan(args: &PlanArgs) -> Result<(), Failure> {
    let (model, file) = Model::read(&args.model).map_err(named_by_user)?;
    let profile = args.profile.as_deref().map(formats::read_profile).transpose().context("--profile");
    let profile = profile.map_err(named_by_user)?;
    if let (Some(profile), Some(path)) = (&profile, &args.profile) {
        check_model(profile, &file).with_context(|| format!("--profile {}", path.display())).or_input()?;
    }
    let room = Room::new(&model, args.vram, args.reserve, args.context);
    let estimate =
        Estimate::new(&model, profile.as_ref(), &room).with_context(|| args.model.display().to_string()).or_input()?;
    let known = known()?;
    let verdict = Verdict::of(&model, &room, &estimate, known.calibration.as_ref(), profile.is_some());
    let view = View::new(&args.model, args.profile.as_deref(), &model, room, &estimate, known, verdict);
    if args.json { print_json(&view) } else { print(&view.text()) }
}

/// This machine's figures, and what is to be said of them.
fn known() -> Result<Known, Failure> {
    let path = Calibration::path().or_internal()?;
    let stored = Calibration::load(&path).with_context(|| path.display().to_string()).or_input()?;
    let here = this_machine();
    let note = match &stored {
        None => Some("this machine has not been measured: run moe-hot calibrate --gpu-bandwidth GB/s".to_owned()),
        Some(stored) if stored.machine != here => Some(format!(
            "what is stored was measured on another machine ({}): run moe-hot calibrate here",
            stored.machine
        )),
        Some(stored) if stored.gpu_gb_per_s.is_none() => {
            Some("the GPU's bandwidth is unknown: run moe-hot calibrate --gpu-bandwidth GB/s".to_owned())
        }
        Some(_) => None,
    };
    Ok(Known { calibration: stored.filter(|stored| stored.machine == here), note })
}
