//! The crate's small vocabulary: numbers of layers, experts and slots, sizes in bytes, and what to do with a miss.
#![forbid(unsafe_code)]

use std::fmt;

/// A layer of the model, by the number in its tensors' names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Layer(pub u16);

/// An expert within its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Expert(pub u16);

/// A place for one expert in its layer's device pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u16);

/// A size in bytes. Arithmetic stops at [`Bytes::MAX`] and at zero and never wraps around.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    /// More than any memory holds: what a sum that cannot be counted comes to.
    pub const MAX: Self = Self(u64::MAX);
    /// Nothing.
    pub const ZERO: Self = Self(0);
    const MIB: u64 = 1 << 20;

    /// This many MiB.
    pub const fn from_mib(mib: u64) -> Self {
        Self(mib.saturating_mul(Self::MIB))
    }

    /// Whole MiB, rounded down: never claims more than there is.
    pub const fn mib(self) -> u64 {
        self.0 / Self::MIB
    }

    /// Whole MiB, rounded up: what to ask for so that this many bytes fit.
    pub const fn mib_up(self) -> u64 {
        self.0.div_ceil(Self::MIB)
    }

    /// The sum, at most [`Bytes::MAX`].
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// The difference, at least zero.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// `times` of it, at most [`Bytes::MAX`].
    pub const fn saturating_mul(self, times: u64) -> Self {
        Self(self.0.saturating_mul(times))
    }

    /// The next multiple of `alignment`, at most [`Bytes::MAX`]. An alignment of zero means none.
    pub const fn round_up(self, alignment: Self) -> Self {
        match alignment.0 {
            0 => self,
            alignment => Self(self.0.div_ceil(alignment).saturating_mul(alignment)),
        }
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::ZERO, Self::saturating_add)
    }
}

/// Whole MiB, rounded down: `32 MiB`.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.mib())
    }
}

macro_rules! display_as_number {
    ($($id:ty),*) => {$(
        impl fmt::Display for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}
display_as_number!(Layer, Expert, Slot);

/// The N of `blk.N.` in a tensor's name. For numbering only.
pub fn layer_number(tensor_name: &str) -> Option<u32> {
    tensor_name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// What to do with an expert that is not resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissRule {
    /// The CPU computes it.
    Cpu,
    /// It is copied at once and the device computes it, as far as there are spare slots.
    Copy,
    /// Whichever is cheaper, by what both cost.
    Auto,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stop_at_both_ends_instead_of_wrapping_around() {
        assert_eq!(Bytes::MAX.saturating_add(Bytes(1)), Bytes::MAX);
        assert_eq!(Bytes(1).saturating_sub(Bytes(2)), Bytes::ZERO);
        assert_eq!(Bytes(1 << 40).saturating_mul(1 << 40), Bytes::MAX);
        assert_eq!(Bytes::from_mib(u64::MAX), Bytes::MAX);
        assert_eq!([Bytes::MAX, Bytes(7)].into_iter().sum::<Bytes>(), Bytes::MAX);
        assert_eq!(Bytes::MAX.round_up(Bytes(4096)), Bytes::MAX);
    }

    #[test]
    fn what_there_is_counts_in_mib_rounded_down_and_what_is_needed_rounded_up() {
        assert_eq!((Bytes::from_mib(3).mib(), Bytes::from_mib(3).mib_up()), (3, 3));
        let more = Bytes::from_mib(3).saturating_add(Bytes(1));
        assert_eq!((more.mib(), more.mib_up(), more.to_string()), (3, 4, "3 MiB".to_owned()));
    }

    #[test]
    fn layers_are_numbered_by_their_names() {
        assert_eq!(layer_number("blk.17.ffn_up_exps.weight"), Some(17));
        assert_eq!(layer_number("blk.x.ffn_up_exps.weight"), None);
        assert_eq!(layer_number("output.weight"), None);
    }

    #[test]
    fn rounding_up_reaches_the_next_multiple_and_no_further() {
        let rounded = |bytes, alignment| Bytes(bytes).round_up(Bytes(alignment)).0;
        assert_eq!([rounded(0, 32), rounded(1, 32), rounded(32, 32), rounded(33, 32)], [0, 32, 32, 64]);
        assert_eq!([rounded(33, 0), rounded(33, 1), rounded(33, 48)], [33, 33, 48]);
    }
}
