//! What runs beside decoding: filling a model's cache, and the fetches that follow.

pub mod fetch;
pub mod fill;
