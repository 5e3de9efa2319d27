//! How well a drive is, from what it answered.
//!
//! ```text
//!   Healthy ──an error after retries──► Suspect ──too many, or gone──► Failed
//!      ▲──────────enough good answers in a row──────────┘
//! ```

use crate::error::DriveError;

/// Errors (after retries) that make a suspect drive a failed one, unless good answers come between.
pub const ERRORS_MAX: u32 = 16;
/// Good answers in a row after which errors are forgiven.
pub const GOOD_ANSWERS_FORGIVE: u32 = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthState {
    Healthy,
    Suspect,
    /// It answers nothing useful any more; it is used no longer.
    Failed,
}

impl HealthState {
    pub fn name(self) -> &'static str {
        match self {
            HealthState::Healthy => "healthy",
            HealthState::Suspect => "suspect",
            HealthState::Failed => "failed",
        }
    }
}

/// State and counters since the drive was opened.
#[derive(Clone, Copy, Debug)]
pub struct Health {
    pub state: HealthState,
    pub read_errors: u64,
    pub write_errors: u64,
    recent_errors: u32,
    good_in_a_row: u32,
}

impl Default for Health {
    fn default() -> Health {
        Health {
            state: HealthState::Healthy,
            read_errors: 0,
            write_errors: 0,
            recent_errors: 0,
            good_in_a_row: 0,
        }
    }
}

impl Health {
    pub(crate) fn good_answer(&mut self) {
        if self.state == HealthState::Suspect {
            self.good_in_a_row += 1;
            if self.good_in_a_row >= GOOD_ANSWERS_FORGIVE {
                self.state = HealthState::Healthy;
                self.recent_errors = 0;
            }
        }
    }

    /// An operation failed for good. A full file system, or a request the drive was not made for,
    /// says nothing about how well it is.
    pub(crate) fn error(&mut self, error: DriveError, read: bool) {
        if error.is_innocent() {
            return;
        }
        if read {
            self.read_errors += 1;
        } else {
            self.write_errors += 1;
        }
        self.good_in_a_row = 0;
        self.recent_errors += 1;
        if error == DriveError::Gone || self.recent_errors >= ERRORS_MAX {
            self.state = HealthState::Failed;
        } else if self.state == HealthState::Healthy {
            self.state = HealthState::Suspect;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_add_up_and_good_answers_forgive() {
        let mut health = Health::default();
        health.error(DriveError::NoSpace, false);
        assert_eq!(health.state, HealthState::Healthy);
        health.error(DriveError::Media, true);
        assert_eq!(health.state, HealthState::Suspect);
        (0..GOOD_ANSWERS_FORGIVE).for_each(|_| health.good_answer());
        assert_eq!(health.state, HealthState::Healthy);
        (0..ERRORS_MAX).for_each(|_| health.error(DriveError::Media, true));
        assert_eq!(health.state, HealthState::Failed);
        (0..GOOD_ANSWERS_FORGIVE).for_each(|_| health.good_answer());
        assert_eq!(health.state, HealthState::Failed, "only a new drive is healthy again");
        let mut pulled = Health::default();
        pulled.error(DriveError::Gone, false);
        assert_eq!(pulled.state, HealthState::Failed);
    }
}
