//! A job's turns: it works for a while, then it stays away, as `pace` decides.

use std::time::Duration;

use ashlar_reactor::backend::Instant;

use crate::array::Array;
use crate::pace::rest;

/// A job works for this long before it stays away: long beside the time of one stripe, short beside
/// what a person notices.
const SHIFT: Duration = Duration::from_millis(25);
/// Under way on each member: more than any drive needs to be kept busy.
const UNDER_WAY_BYTES: u64 = 1 << 20;
/// Stripes under way, however large their chunks are.
const UNDER_WAY_MIN: u64 = 4;
/// While it stays away it looks this often whether it still should.
const LOOK: Duration = Duration::from_millis(100);

/// Says that a job is at work while it lives.
struct Working<'a>(&'a Array);

impl<'a> Working<'a> {
    fn begin(array: &'a Array) -> Working<'a> {
        array.pace.working.set(array.pace.working.get() + 1);
        array.members.view().into_iter().for_each(|view| view.set_crowded(true));
        Working(array)
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        let Working(array) = self;
        let pace = &array.pace;
        pace.working.set(pace.working.get() - 1);
        pace.ceased.set(array.reactor.now());
        let crowded = pace.working.get() > 0;
        array.members.view().into_iter().for_each(|view| view.set_crowded(crowded));
    }
}

/// A job's time at work, and then away.
pub(crate) struct Shift<'a> {
    array: &'a Array,
    working: Option<Working<'a>>,
    began: Instant,
    /// Of the time since, what was not the job's.
    beside: Duration,
    requests_before: u64,
}

impl<'a> Shift<'a> {
    pub(crate) fn begin(array: &'a Array) -> Shift<'a> {
        array.hear_readers();
        let (began, requests_before) = (array.reactor.now(), array.pace.requests());
        let working = Some(Working::begin(array));
        Shift { array, working, began, beside: Duration::ZERO, requests_before }
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

    /// How many stripes keep a group's drives busy; fewer while guests ask for anything, whose
    /// requests wait behind them.
    pub(crate) fn stripes_at_once(&self) -> u64 {
        self.array.hear_readers();
        let chunk = u64::from(self.array.layout().chunk_bytes);
        let crowded = self.array.pace.requests() > self.requests_before;
        let wanted = if crowded { 0 } else { UNDER_WAY_BYTES / chunk };
        wanted.max(UNDER_WAY_MIN) * u64::from(self.array.layout().groups)
    }

    /// Stays away while another job is more urgent. Nothing of this one is under way.
    pub(crate) async fn wait_while(&mut self, urgent: impl Fn() -> bool) {
        self.working = None;
        while urgent() && !self.array.is_stopping() {
            self.array.pause(LOOK).await;
        }
        *self = Shift::begin(self.array);
    }

    /// Does what the job needs and is no work of its own: what guests have written is put in place,
    /// say. It is not paid for, however long it takes. Nothing of the job is under way.
    pub(crate) async fn beside<T>(&mut self, other: impl Future<Output = T>) -> T {
        let since = self.array.reactor.now();
        let done = other.await;
        self.beside += self.array.reactor.now().since(since);
        done
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

    /// How long it has worked, or after that stayed away.
    fn lasts(&self) -> Duration {
        self.cycle().saturating_sub(self.beside)
    }

    fn cycle(&self) -> Duration {
        self.array.reactor.now().since(self.began)
    }

    fn rest_after(&self, active: Duration) -> Duration {
        self.array.hear_readers();
        let load = self.array.pace.load(self.cycle(), self.requests_before);
        rest(active, self.array.settings().rebuild_percent(), load)
    }
}
