//! Which experts of a model get a place on the hot device, and what state each place is in.
//!
//! Pure and deterministic: the same input gives the same answer on every machine. Knows numbers of layers, experts, slots
//! and bytes; must not know ggml, devices, files, clocks or threads. `engine` joins it to them.
#![forbid(unsafe_code)]

mod cost;
mod guard;
mod plan;
pub mod policy;
mod slots;

pub use cost::{Call, MissCosts};
pub use guard::{Loss, RegressionGuard, gains_nothing};
pub use plan::{LayerDemand, LayerPlan, Plan, PlanError, SlotRule, Spare, TensorBytes};
pub use policy::{Admission, Blend, CopyCost, ReplacementPolicy, ranks, worth_of_ranks};
pub use slots::{SlotState, Slots};
