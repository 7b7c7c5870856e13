//! Where expert FFNs are computed. They run what they are given and choose nothing.
#![forbid(unsafe_code)]

mod cold;

pub use cold::ColdLane;
