//! When a scrub begins by itself, and where it goes on after a restart.

/// As a superblock has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubMark {
    /// It goes on from this stripe; zero: none is under way.
    pub next: u64,
    /// When the last one began, in seconds since 1970; zero: never.
    pub began_s: u64,
}

impl ScrubMark {
    /// Whether another should begin. One that began in the future began when the machine's clock
    /// was wrong: that is waited for no longer than a period.
    pub(crate) fn is_due(self, period_s: Option<u32>, now_s: u64) -> bool {
        let Some(period_s) = period_s.map(u64::from) else { return false };
        now_s >= self.began_s.saturating_add(period_s)
            || self.began_s > now_s.saturating_add(period_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrub_is_due_once_a_period() {
        let began = |began_s| ScrubMark { next: 0, began_s };
        let hour = Some(3600);
        assert!(began(0).is_due(hour, 1_700_000_000), "never scrubbed");
        for (now_s, due) in [(10_000, false), (13_599, false), (13_600, true), (6400, false)] {
            assert_eq!(began(10_000).is_due(hour, now_s), due, "{now_s}");
        }
        assert!(began(10_000).is_due(hour, 6399), "its clock was wrong");
        assert!(!began(0).is_due(None, u64::MAX), "by hand only");
        assert!(!began(u64::MAX).is_due(hour, u64::MAX - 1));
    }
}
