//! Policies that only replay needs: those to compare with, one that knows the future, and the look-ahead.

mod belady;
mod fixed;
mod lfu;
mod look_ahead;
mod lru;

pub use belady::Belady;
pub use fixed::Fixed;
pub use lfu::Lfu;
pub use look_ahead::LookAhead;
pub use lru::Lru;
