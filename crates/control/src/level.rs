//! RAID levels as operators write them: `5`, `7.3`, `60`, or `10+4` for stripes of ten data and
//! four parity chunks.

use ashlar_format::array_superblock::{Level, PARITY_MAX};
use ashlar_raid::layout::level_name;

/// What there is.
pub const LEVELS: &str =
    "0, 1, 5, 6, 7.3, 10, 50, 60, 70, or N+M such as 10+4 (M up to 8, N+M up to 64)";

/// A level, and of N+M levels the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notation {
    pub level: Level,
    /// Zero where the level and the count of members say it.
    pub data: u8,
    pub parity: u8,
}

impl Notation {
    /// `None` if there is no such level.
    pub fn parse(text: &str) -> Option<Notation> {
        let Some((data, parity)) = text.split_once('+') else {
            let mut levels = Level::ALL.into_iter().filter(|level| *level != Level::RaidNm);
            let level = levels.find(|level| level_name(*level) == text)?;
            return Some(Notation { level, data: 0, parity: 0 });
        };
        let (data, parity) = (number(data)?, number(parity)?);
        let possible = data > 0 && (1..=PARITY_MAX).contains(&parity);
        possible.then_some(Notation { level: Level::RaidNm, data, parity })
    }
}

/// Digits only: no sign, no zero before another digit.
fn number(text: &str) -> Option<u8> {
    let number: u8 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// Whether `text` is written like a level, so that only knowledge of levels can refuse it.
pub fn is_written_like_one(text: &str) -> bool {
    let numbers: Vec<&str> = text.split(['.', '+']).collect();
    let digits = |part: &&str| !part.is_empty() && part.bytes().all(|c| c.is_ascii_digit());
    numbers.len() <= 2 && numbers.iter().all(digits)
}

/// How operators write the level of an array with these chunks in a stripe.
pub fn notation(level: Level, data: u8, parity: u8) -> String {
    match level {
        Level::RaidNm => format!("{data}+{parity}"),
        Level::Raid0
        | Level::Raid1
        | Level::Raid5
        | Level::Raid6
        | Level::Raid7
        | Level::Raid10
        | Level::Raid50
        | Level::Raid60
        | Level::Raid70 => level_name(level).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for level in Level::ALL.into_iter().filter(|level| *level != Level::RaidNm) {
            let read = Notation::parse(&notation(level, 3, 1));
            assert_eq!(read, Some(Notation { level, data: 0, parity: 0 }));
        }
        for (data, parity) in [(1, 1), (4, 1), (10, 4), (56, 8), (255, 1)] {
            let read = Notation::parse(&notation(Level::RaidNm, data, parity));
            assert_eq!(read, Some(Notation { level: Level::RaidNm, data, parity }));
        }
    }

    #[test]
    fn nonsense_is_no_level() {
        let like_one = ["4", "7", "7.30", "05", "100", "0+1", "4+0", "4+9", "256+1", "04+1"];
        let unlike = ["", "five", "RAID5", "5 ", "n+m", "4+", "+1", "4++1", "4+-1", "1+2+3", "-1"];
        for text in like_one {
            assert!(is_written_like_one(text), "{text:?}");
        }
        for text in unlike {
            assert!(!is_written_like_one(text), "{text:?}");
        }
        for text in like_one.into_iter().chain(unlike) {
            assert_eq!(Notation::parse(text), None, "{text:?}");
        }
    }
}
