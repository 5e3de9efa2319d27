//! A job's turns: it works for a while, then it stays away, as `pace` decides.

use std::time::Duration;

use ashlar_reactor::backend::Instant;

use crate::array::Array;
use crate::pace::rest;

/// A job works for this long before it stays away: long beside the time of one stripe, short beside
/// what a person notices.
const SHIFT: Duration = Duration::from_millis(25);
/// While it stays away it looks this often whether it still should.
const LOOK: Duration = Duration::from_millis(100);

/// Says that a job is at work while it lives.
struct Working<'a>(&'a Array);

impl<'a> Working<'a> {
    fn begin(array: &'a Array) -> Working<'a> {
        array.pace.working.set(array.pace.working.get() + 1);
        Working(array)
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        let pace = &self.0.pace;
        pace.working.set(pace.working.get() - 1);
        pace.ceased.set(self.0.reactor.now());
    }
}

/// A job's time at work, and then away.
pub(crate) struct Shift<'a> {
    array: &'a Array,
    working: Option<Working<'a>>,
    began: Instant,
    requests_before: u64,
}

impl<'a> Shift<'a> {
    pub(crate) fn begin(array: &'a Array) -> Shift<'a> {
        let (began, requests_before) = (array.reactor.now(), array.pace.requests());
        Shift { array, working: Some(Working::begin(array)), began, requests_before }
    }

    /// Whether the job should let its work end and then `rest`.
    pub(crate) fn is_over(&mut self) -> bool {
        let active = self.lasts();
        if active < SHIFT {
            return false;
        }
        if self.rest_after(active).is_zero() {
            // Nothing to stay away for: the next one, without a break.
            *self = Shift::begin(self.array);
            return false;
        }
        true
    }

    /// Whether guests have asked for anything in this shift.
    pub(crate) fn is_crowded(&self) -> bool {
        self.array.pace.requests() > self.requests_before
    }

    /// Stays away; then the next shift begins. Nothing of the job is under way.
    pub(crate) async fn rest(&mut self) {
        let active = self.lasts();
        self.working = None;
        while !self.array.is_stopping() {
            let away = self.lasts() - active;
            let left = self.rest_after(active).saturating_sub(away);
            if left.is_zero() {
                break;
            }
            self.array.pause(left.min(LOOK)).await;
        }
        *self = Shift::begin(self.array);
    }

    fn lasts(&self) -> Duration {
        self.array.reactor.now().since(self.began)
    }

    fn rest_after(&self, active: Duration) -> Duration {
        let load = self.array.pace.load(self.lasts(), self.requests_before);
        rest(active, self.array.settings().rebuild_percent(), load)
    }
}
