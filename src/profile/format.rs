//! What the readers and the writer of profiles agree on.

/// The schema that other programs read and write.
pub const SCHEMA: &str = "llama.cpp.moe_layer_perf.v1";
/// The schema of a profile that was optimised; the same fields.
pub const OPT_SCHEMA: &str = "llama.cpp.moe_layer_opt_perf.v1";
/// Larger files are not read: a profile of 512 experts in 200 layers stays below 8 MiB.
pub const MAX_MIB: u64 = 64;
/// The highest layer number.
pub const MAX_LAYER: u32 = 65_535;
/// The most experts that a layer may have.
pub const MAX_EXPERTS: u32 = 65_536;
/// The highest count: larger whole numbers are not exact in readers that use 64-bit floats.
pub const MAX_COUNT: u64 = 1 << 53;
/// Levels of JSON that are promised to be read; a profile has five. `serde_json` gives up at 128.
pub const MAX_DEPTH: u32 = 127;

/// `[expert, count]`.
pub type Count = (u32, u64);
