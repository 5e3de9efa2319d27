//! Long work on an array: what runs, how far it is, what it found.

use std::cell::{Cell, RefCell};

use ashlar_reactor::backend::Instant;

use crate::status::{Progress, ScrubReport, ScrubState};

/// How far one piece of work is.
#[derive(Clone, Copy, Debug)]
struct Running {
    began: Instant,
    /// Done before it was taken up (again); not counted in the rate.
    done_before: u64,
    done: u64,
    total: u64,
}

impl Running {
    fn progress(&self, now: Instant) -> Progress {
        let elapsed_ms = u64::try_from(now.since(self.began).as_millis()).unwrap_or(u64::MAX);
        let worked = self.done - self.done_before;
        let left = self.total - self.done;
        let expected = u128::from(elapsed_ms) * u128::from(left);
        let remaining = expected.checked_div(u128::from(worked));
        Progress {
            stripes_done: self.done,
            stripes_total: self.total,
            elapsed_ms,
            remaining_ms: remaining.and_then(|ms| u64::try_from(ms).ok()),
        }
    }
}

/// One slot for each kind of work.
#[derive(Default)]
pub(crate) struct Jobs {
    resync: Slot,
    rebuild: Slot,
    scrub: Slot,
    restripe: Slot,
    restripe_error: RefCell<Option<String>>,
    rebuild_error: RefCell<Option<String>>,
    pub(crate) scrub_report: RefCell<Option<ScrubReport>>,
    /// The scrub is to end, or has ended, before its end.
    pub(crate) scrub_stopped: Cell<bool>,
}

#[derive(Default)]
pub(crate) struct Slot {
    running: Cell<Option<Running>>,
}

impl Slot {
    pub(crate) fn is_running(&self) -> bool {
        self.running.get().is_some()
    }

    pub(crate) fn begin(&self, now: Instant, done: u64, total: u64) {
        let running = Running { began: now, done_before: done, done, total };
        self.running.set(Some(running));
    }

    pub(crate) fn advance(&self, done: u64) {
        if let Some(mut running) = self.running.get() {
            running.done = done.clamp(running.done, running.total);
            self.running.set(Some(running));
        }
    }

    pub(crate) fn advance_by(&self, more: u64) {
        if let Some(running) = self.running.get() {
            self.advance(running.done + more);
        }
    }

    /// How far it is; zero if it does not run.
    pub(crate) fn done(&self) -> u64 {
        self.running.get().map_or(0, |running| running.done)
    }

    pub(crate) fn end(&self) {
        self.running.set(None);
    }

    fn progress(&self, now: Instant) -> Option<Progress> {
        self.running.get().map(|running| running.progress(now))
    }
}

impl Jobs {
    pub(crate) fn resync_slot(&self) -> &Slot {
        &self.resync
    }

    pub(crate) fn rebuild_slot(&self) -> &Slot {
        &self.rebuild
    }

    pub(crate) fn scrub_slot(&self) -> &Slot {
        &self.scrub
    }

    pub(crate) fn restripe_slot(&self) -> &Slot {
        &self.restripe
    }

    pub(crate) fn set_restripe_error(&self, error: Option<String>) {
        *self.restripe_error.borrow_mut() = error;
    }

    pub(crate) fn restripe(&self, now: Instant) -> Option<Progress> {
        self.restripe.progress(now)
    }

    pub(crate) fn restripe_error(&self) -> Option<String> {
        self.restripe_error.borrow().clone()
    }

    pub(crate) fn set_rebuild_error(&self, error: Option<String>) {
        *self.rebuild_error.borrow_mut() = error;
    }

    pub(crate) fn resync(&self, now: Instant) -> Option<Progress> {
        self.resync.progress(now)
    }

    pub(crate) fn rebuild(&self, now: Instant) -> Option<Progress> {
        self.rebuild.progress(now)
    }

    pub(crate) fn rebuild_error(&self) -> Option<String> {
        self.rebuild_error.borrow().clone()
    }

    pub(crate) fn scrub(&self, now: Instant) -> ScrubState {
        let Some(report) = self.scrub_report.borrow().clone() else { return ScrubState::Never };
        match self.scrub.progress(now) {
            Some(progress) => ScrubState::Running { progress, report },
            None if self.scrub_stopped.get() => ScrubState::Stopped { report },
            None => ScrubState::Finished { report },
        }
    }
}
