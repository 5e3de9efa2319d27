//! Sizes as people write them: `10G`, `64K`, `1.5T`. Letters count in steps of 1024.

use std::fmt::Display;
use std::str::FromStr;

const LETTERS: [char; 6] = ['K', 'M', 'G', 'T', 'P', 'E'];
/// Digits after the point that are looked at; more could not name a whole byte anyway.
const FRACTION_DIGITS_MAX: usize = 18;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no size; write a number and K, M, G or T, such as 64K or 10G")]
pub struct SizeError {
    text: String,
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Size, SizeError> {
        parse(text).map(Size).ok_or_else(|| SizeError { text: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = unit_bytes(unit)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.len() > FRACTION_DIGITS_MAX {
        return None;
    }
    let whole: u128 = whole.parse().ok()?;
    let mut bytes = whole.checked_mul(unit)?;
    if !fraction.is_empty() {
        // 1.5T: 5 × 2^40 / 10, which must be a whole number of bytes.
        let scale = 10u128.pow(u32::try_from(fraction.len()).ok()?);
        let part = fraction.parse::<u128>().ok()? * unit;
        if !part.is_multiple_of(scale) {
            return None;
        }
        bytes = bytes.checked_add(part / scale)?;
    } else if number.ends_with('.') {
        return None;
    }
    u64::try_from(bytes).ok()
}

/// `""`, `B`, `K`, `KB` and `KiB`, in either case.
fn unit_bytes(unit: &str) -> Option<u128> {
    let unit = unit.to_ascii_uppercase();
    if unit.is_empty() || unit == "B" {
        return Some(1);
    }
    let mut rest = unit.chars();
    let letter = rest.next()?;
    let power = LETTERS.iter().position(|known| *known == letter)? + 1;
    match rest.as_str() {
        "" | "B" | "IB" => Some(1 << (10 * power)),
        _ => None,
    }
}

impl Display for Size {
    /// Exact where that is short (`10G`, `1536K`), else rounded down to a tenth (`9.3G`).
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let steps = LETTERS.len().min(self.0.checked_ilog2().unwrap_or(0) as usize / 10);
        if steps == 0 {
            return f.pad(&format!("{}B", self.0));
        }
        let (unit, below) = (1u64 << (10 * steps), 1u64 << (10 * (steps - 1)));
        let (whole, rest) = (self.0 / unit, self.0 % unit);
        let letter = LETTERS[steps - 1];
        if rest == 0 {
            return f.pad(&format!("{whole}{letter}"));
        }
        if whole < 10 && self.0.is_multiple_of(below) && steps >= 2 {
            return f.pad(&format!("{}{}", self.0 / below, LETTERS[steps - 2]));
        }
        let tenths = u128::from(rest) * 10 / u128::from(unit);
        f.pad(&format!("{whole}.{tenths}{letter}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_people_write() {
        let good = [
            ("0", 0),
            ("512", 512),
            ("4096B", 4096),
            ("64K", 64 << 10),
            ("64k", 64 << 10),
            ("64KiB", 64 << 10),
            ("64KB", 64 << 10),
            ("10G", 10 << 30),
            ("1.5T", 3 << 39),
            ("0.5M", 1 << 19),
            ("2P", 2 << 50),
            ("15E", 15 << 60),
        ];
        for (text, bytes) in good {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size() {
        for text in [
            "", "G", "-1", "1.G", ".5G", "1..5G", "1 G", "10X", "10GG", "10KiBs", "0.3", "16E",
            "1e3",
        ] {
            assert!(text.parse::<Size>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn sizes_are_printed_short() {
        let cases = [
            (0, "0B"),
            (512, "512B"),
            (64 << 10, "64K"),
            (10 << 30, "10G"),
            (1536 << 10, "1536K"),
            ((10 << 30) - 1, "9.9G"),
            ((93 << 30) / 10, "9.2G"),
            (u64::MAX, "15.9E"),
        ];
        for (bytes, text) in cases {
            assert_eq!(Size(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>6}", Size(1 << 10)), "    1K");
    }
}
