//! The types of options' values, and what each must look like.

use crate::units::MissRule;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The largest number of MiB that still is a number of bytes.
pub const MAX_MIB: u64 = u64::MAX >> 20;

/// Why a value cannot be used: what was expected.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidValue {
    /// Not UTF-8.
    #[error("expected UTF-8")]
    NotText,
    /// Not a [`Budget`].
    #[error("expected a whole number of MiB up to {MAX_MIB}, 0 for off or -1 for automatic")]
    Budget,
    /// Not a [`Reserve`].
    #[error("expected a whole number of MiB from 0 to {MAX_MIB}")]
    Reserve,
    /// Not an [`UpdateRate`].
    #[error("expected a number from 0 to 1")]
    UpdateRate,
    /// Not a [`MissRule`].
    #[error("expected cpu, copy or auto")]
    MissRule,
    /// Not a number.
    #[error("expected a whole number")]
    Number,
}

/// The profile that a cache begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheProfile {
    /// Each model's own, which is kept beside the model, or made there.
    Auto,
    /// This file.
    File(PathBuf),
}

impl CacheProfile {
    /// How [`Self::Auto`] is written. A file of that name is `./auto`.
    pub const AUTO: &str = "auto";

    /// The file, if it is one that the user has named.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Auto => None,
            Self::File(path) => Some(path),
        }
    }
}

/// How much of a device's memory experts may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Budget {
    /// What the device has left, less the reserve.
    #[default]
    Automatic,
    /// Nothing: no cache.
    Off,
    /// At most so many MiB, 1 to [`MAX_MIB`].
    Mib(u64),
}

impl FromStr for Budget {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        if text == "-1" {
            return Ok(Self::Automatic);
        }
        match text.parse().map_err(|_| InvalidValue::Budget)? {
            0 => Ok(Self::Off),
            mib if mib <= MAX_MIB => Ok(Self::Mib(mib)),
            _ => Err(InvalidValue::Budget),
        }
    }
}

/// MiB that an automatic budget leaves free, 0 to [`MAX_MIB`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserve(pub u64);

impl Default for Reserve {
    fn default() -> Self {
        Self(1024)
    }
}

impl FromStr for Reserve {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        text.parse().ok().filter(|&mib| mib <= MAX_MIB).map(Self).ok_or(InvalidValue::Reserve)
    }
}

/// The largest share of a layer's slots that may be replaced per 1,000 tokens, 0 to 1; 0: none ever.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateRate(pub f32);

impl Eq for UpdateRate {}

impl FromStr for UpdateRate {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        text.parse().ok().filter(|rate| (0.0..=1.0).contains(rate)).map(Self).ok_or(InvalidValue::UpdateRate)
    }
}

impl FromStr for MissRule {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "copy" => Ok(Self::Copy),
            "auto" => Ok(Self::Auto),
            _ => Err(InvalidValue::MissRule),
        }
    }
}

impl fmt::Display for MissRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Copy => "copy",
            Self::Auto => "auto",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_a_number_of_mib_that_fits_into_bytes() {
        assert_eq!("-1".parse(), Ok(Budget::Automatic));
        assert_eq!("0".parse(), Ok(Budget::Off));
        assert_eq!("17592186044415".parse(), Ok(Budget::Mib(MAX_MIB)));
        for bad in ["-2", "17592186044416", "99999999999999999999", "1.5", "1G", "", " 1"] {
            assert_eq!(bad.parse::<Budget>(), Err(InvalidValue::Budget), "{bad:?}");
        }
        assert!("-1".parse::<Reserve>().is_err() && "17592186044416".parse::<Reserve>().is_err());
    }

    #[test]
    fn rules_are_read_as_they_are_written() {
        for rule in [MissRule::Cpu, MissRule::Copy, MissRule::Auto] {
            assert_eq!(rule.to_string().parse(), Ok(rule));
        }
        assert!("gpu".parse::<MissRule>().is_err() && "1.5".parse::<UpdateRate>().is_err());
    }
}
