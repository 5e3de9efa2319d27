//! Times as people write them: `90`, `90s`, `3m`, `12h`, `7d`; without a letter, seconds.

use std::fmt::Display;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

const UNITS: [(&str, u32); 4] = [("d", 24 * 3600), ("h", 3600), ("m", 60), ("s", 1)];

/// Whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Period(pub u32);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no time; write a number and s, m, h or d, such as 90s or 7d")]
pub struct PeriodError {
    text: String,
}

impl FromStr for Period {
    type Err = PeriodError;

    fn from_str(text: &str) -> Result<Period, PeriodError> {
        parse(text).map(Period).ok_or_else(|| PeriodError { text: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<u32> {
    let in_unit = |(letter, seconds)| Some((text.strip_suffix(letter)?, seconds));
    let (number, seconds) = UNITS.into_iter().find_map(in_unit).unwrap_or((text, 1));
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    number.parse::<u32>().ok().filter(|_| is_number)?.checked_mul(seconds)
}

impl Display for Period {
    /// In the largest unit that it is a whole number of.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fits = |(_, seconds): &(&str, u32)| self.0 > 0 && self.0.is_multiple_of(*seconds);
        let (letter, seconds) = UNITS.into_iter().find(fits).unwrap_or(("s", 1));
        write!(f, "{}{letter}", self.0 / seconds)
    }
}

/// The time of day, in seconds since 1970.
#[expect(clippy::disallowed_methods, reason = "what people are told, and nothing is decided by")]
pub fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_shown() {
        let known = [("0s", 0), ("90s", 90), ("3m", 180), ("36h", 129_600), ("7d", 604_800)];
        for (text, seconds) in known {
            assert_eq!(text.parse(), Ok(Period(seconds)));
            assert_eq!(Period(seconds).to_string(), text);
        }
        assert_eq!(("90".parse(), "0".parse()), (Ok(Period(90)), Ok(Period(0))));
        for wrong in ["", "d", "-1", "+1s", "1.5h", "7 d", "7w", "4294967296", "99999d"] {
            assert!(wrong.parse::<Period>().is_err(), "{wrong:?}");
        }
    }
}
