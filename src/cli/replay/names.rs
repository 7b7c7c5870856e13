//! What `moe-hot replay` calls things on its command line.

use clap::ValueEnum;

/// A policy by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PolicyName {
    All,
    Lru,
    Lfu,
    Blend,
    Belady,
    Default,
    Fixed,
}

/// What is known before the first decoded token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Warm {
    None,
    Prompt,
    Profile,
}

/// How a value is written on the command line.
pub fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}
