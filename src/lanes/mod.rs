//! Where expert FFNs are computed: the cold lane on the CPU, the hot lane on a device, and how their rows meet.
//!
//! They run what they are given and choose nothing.
#![forbid(unsafe_code)]

mod cold;
mod hot;
mod job;
mod pool;
mod requests;

pub use cold::ColdLane;
pub use hot::{HotIndex, HotLane, Trial, try_out};
pub use pool::{Pool, PoolWriter, padding};
pub use requests::{Form, Requests};
