//! How well a drive is, from what it answered.
//!
//! | state | because of | until |
//! |---|---|---|
//! | Healthy | nothing that counts | an error |
//! | Suspect | an error after retries | `good_answers_forgive` good answers in a row: Healthy |
//! | Suspect | a block that is not what was written | the same |
//! | Suspect | an operation not answered for `answer_within` | the same |
//! | Failed | `errors_max` errors that were not forgiven | for ever: it is used no longer |
//! | Failed | it says that it is gone, or was pulled | the same |
//!
//! A member without a drive is the array's business ("absent"), and a *slow* drive is in any of the
//! first two states: it is reported, and used.

use std::time::Duration;

use crate::error::DriveError;

/// When a drive counts as failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthLimits {
    /// Errors (after retries) that make a suspect drive a failed one, unless good answers come
    /// between.
    pub errors_max: u32,
    /// Good answers in a row after which errors are forgiven.
    pub good_answers_forgive: u32,
    /// How long an operation may go without an answer, for each attempt, until the drive is given
    /// up; several times longer where no sibling that answers could stand for it.
    pub answer_within: Duration,
}

/// Longer than any drive needs that is only slow. (Linux waits 30 s before it resets one.)
pub const ANSWER_WITHIN: Duration = Duration::from_secs(10);

impl Default for HealthLimits {
    fn default() -> HealthLimits {
        HealthLimits { errors_max: 16, good_answers_forgive: 10_000, answer_within: ANSWER_WITHIN }
    }
}

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

/// What an error happened to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum During {
    Read,
    /// Or a flush, or zeroing.
    Write,
}

/// State and counters since the drive was opened.
#[derive(Clone, Copy, Debug)]
pub struct Health {
    pub state: HealthState,
    /// Reads, and writes or flushes, that failed after retries.
    pub read_errors: u64,
    pub write_errors: u64,
    /// Times that it left its oldest operation unanswered for too long.
    pub timeouts: u64,
    /// Blocks that it returned other than they were written, without an error.
    pub wrong_blocks: u64,
    /// Checksums of blocks that it returned so.
    pub wrong_checksums: u64,
    /// Writes that the file system under it, or its thin space, had no room for.
    pub no_space: u64,
    recent_errors: u32,
    good_in_a_row: u32,
    good_since_full: u32,
}

impl Default for Health {
    fn default() -> Health {
        Health {
            state: HealthState::Healthy,
            read_errors: 0,
            write_errors: 0,
            timeouts: 0,
            wrong_blocks: 0,
            wrong_checksums: 0,
            no_space: 0,
            recent_errors: 0,
            good_in_a_row: 0,
            good_since_full: 0,
        }
    }
}

impl Health {
    /// Whether it had no room lately. Writes to what is there already succeed all the while.
    pub fn is_full(&self, limits: &HealthLimits) -> bool {
        self.no_space > 0 && self.good_since_full < limits.good_answers_forgive
    }

    pub(crate) fn good_answer(&mut self, limits: &HealthLimits) {
        self.good_since_full = self.good_since_full.saturating_add(1);
        if self.state == HealthState::Suspect {
            self.good_in_a_row += 1;
            if self.good_in_a_row >= limits.good_answers_forgive {
                self.state = HealthState::Healthy;
                self.recent_errors = 0;
            }
        }
    }

    /// An operation failed for good. A full file system, or a request the drive was not made for,
    /// says nothing about how well it is; nor does an operation that failed with its drive.
    /// `is_needed`, whether its array cannot do without it: then that it cannot read some blocks
    /// does not fail it.
    pub(crate) fn error(
        &mut self,
        limits: &HealthLimits,
        error: DriveError,
        during: During,
        is_needed: impl FnOnce() -> bool,
    ) {
        if error == DriveError::NoSpace {
            self.no_space += 1;
            self.good_since_full = 0;
        }
        if error.is_innocent() || self.state == HealthState::Failed {
            return;
        }
        match during {
            During::Read => self.read_errors += 1,
            During::Write => self.write_errors += 1,
        }
        self.good_in_a_row = 0;
        self.recent_errors += 1;
        let unreadable = error == DriveError::Media && matches!(during, During::Read);
        let too_many = self.recent_errors >= limits.errors_max && !(unreadable && is_needed());
        if error == DriveError::Gone || too_many {
            self.state = HealthState::Failed;
        } else {
            self.state = HealthState::Suspect;
        }
    }

    /// It lied. It is used on, since whoever says so has the truth.
    pub(crate) fn lied(&mut self) {
        self.suspect();
    }

    fn suspect(&mut self) {
        self.good_in_a_row = 0;
        if self.state == HealthState::Healthy {
            self.state = HealthState::Suspect;
        }
    }

    /// It has left an operation unanswered for longer than it may.
    pub(crate) fn timeout(&mut self) {
        self.timeouts += 1;
        self.suspect();
    }

    /// It is used no longer.
    pub(crate) fn fail(&mut self) {
        self.state = HealthState::Failed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `docs/FAULTS.md` says.
    #[test]
    fn sixteen_errors_without_ten_thousand_good_answers_fail_a_drive() {
        let (limits, mut health) = (HealthLimits::default(), Health::default());
        for _ in 0..15 {
            health.error(&limits, DriveError::Media, During::Read, || false);
            (0..9_999).for_each(|_| health.good_answer(&limits));
        }
        assert_eq!(health.state, HealthState::Suspect);
        (0..10_000).for_each(|_| health.good_answer(&limits));
        assert_eq!(health.state, HealthState::Healthy);
        for _ in 0..15 {
            health.error(&limits, DriveError::Media, During::Read, || false);
        }
        assert_eq!(health.state, HealthState::Suspect);
        health.error(&limits, DriveError::Media, During::Read, || false);
        assert_eq!(health.state, HealthState::Failed);
    }

    #[test]
    fn errors_add_up_and_good_answers_forgive() {
        let limits = HealthLimits { errors_max: 3, good_answers_forgive: 5, ..Default::default() };
        let mut health = Health::default();
        let error =
            |health: &mut Health, error| health.error(&limits, error, During::Read, || false);
        let forgive = |health: &mut Health| (0..5).for_each(|_| health.good_answer(&limits));
        error(&mut health, DriveError::NoSpace);
        assert_eq!((health.state, health.no_space), (HealthState::Healthy, 1));
        assert!(health.is_full(&limits));
        forgive(&mut health);
        assert!(!health.is_full(&limits));
        error(&mut health, DriveError::Media);
        error(&mut health, DriveError::Media);
        assert_eq!(health.state, HealthState::Suspect);
        forgive(&mut health);
        assert_eq!(health.state, HealthState::Healthy);
        (0..2).for_each(|_| error(&mut health, DriveError::Media));
        (0..4).for_each(|_| health.good_answer(&limits));
        assert_eq!(health.state, HealthState::Suspect);
        error(&mut health, DriveError::Media);
        assert_eq!((health.state, health.read_errors), (HealthState::Failed, 5));
        forgive(&mut health);
        error(&mut health, DriveError::Gone);
        assert_eq!(health.state, HealthState::Failed, "only a new drive is healthy again");
        assert_eq!((health.read_errors, health.write_errors), (5, 0), "it is judged no more");
    }

    #[test]
    fn a_drive_that_is_needed_is_used_although_it_cannot_read_all() {
        let limits = HealthLimits { errors_max: 3, ..Default::default() };
        let mut health = Health::default();
        for _ in 0..9 {
            health.error(&limits, DriveError::Media, During::Read, || true);
        }
        assert_eq!((health.state, health.read_errors), (HealthState::Suspect, 9));
        health.error(&limits, DriveError::Media, During::Write, || true);
        assert_eq!(health.state, HealthState::Failed);
    }

    #[test]
    fn a_drive_that_is_gone_has_failed_and_a_silent_one_is_suspect() {
        let mut gone = Health::default();
        gone.error(&HealthLimits::default(), DriveError::Gone, During::Write, || true);
        assert_eq!((gone.state, gone.write_errors), (HealthState::Failed, 1));
        let mut silent = Health::default();
        silent.timeout();
        assert_eq!((silent.state, silent.timeouts), (HealthState::Suspect, 1));
        silent.fail();
        assert_eq!(silent.state, HealthState::Failed);
    }
}
