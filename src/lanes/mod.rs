//! Where expert FFNs are computed. They run what they are given and choose nothing.

mod cold;

pub use cold::ColdLane;
