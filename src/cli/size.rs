//! Sizes as users write and read them.

use crate::units::Bytes;
use parse_size::Config;

/// No GPU has less, and a bare number was meant as GiB.
const LEAST: Bytes = Bytes::from_mib(1);

/// A size that is none.
#[derive(Debug, thiserror::Error)]
pub enum InvalidSize {
    /// Not a number with a unit.
    #[error("expected a size such as 12GiB, 12G or 12288MiB")]
    NotASize,
    /// Only a number.
    #[error("that is less than 1 MiB; expected a size such as 12GiB, 12G or 12288MiB")]
    TooSmall,
}

/// Reads `12GiB`, `12G`, `12GB`, `12288MiB` or a number of bytes. G and GB are taken for GiB, as makers of graphics cards do.
pub fn parse(text: &str) -> Result<Bytes, InvalidSize> {
    let bytes = Config::new().with_binary().parse_size(text).map(Bytes).map_err(|_| InvalidSize::NotASize)?;
    if bytes < LEAST { Err(InvalidSize::TooSmall) } else { Ok(bytes) }
}

/// `9.5 GiB`, `312 MiB`, `1.5 MiB`, `96 KiB`.
pub fn show(bytes: Bytes) -> String {
    const UNITS: [&str; 4] = ["B", "KiB", "MiB", "GiB"];
    let (mut value, mut unit) = (bytes.0 as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 100.0 { 0 } else { usize::from(value < 10.0) + usize::from(unit == 3) };
    format!("{value:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ways_to_write_a_size_are_read() {
        for text in ["12GiB", "12 GiB", "12G", "12g", "12GB", "12288MiB", "12288 MB", "12884901888", "12.0GiB"] {
            assert_eq!(parse(text).unwrap(), Bytes::from_mib(12 << 10), "{text}");
        }
        for text in ["", "x", "-1GiB", "12", "0", "nan", "1e30GiB", "12XiB", "GiB", "99999999999999GiB"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_in_three_digits_or_so() {
        let shown = |bytes| show(Bytes(bytes));
        assert_eq!([shown(0), shown(1023), shown(96 << 10)], ["0 B", "1023 B", "96 KiB"]);
        assert_eq!([shown(3 << 19), shown(312 << 20), shown(19 << 29)], ["1.5 MiB", "312 MiB", "9.50 GiB"]);
        assert_eq!(shown(u64::MAX), "17179869184 GiB");
    }
}
