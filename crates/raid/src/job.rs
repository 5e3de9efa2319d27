//! Long work on an array: what runs, how far and how fast it is, what it found.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use ashlar_reactor::backend::Instant;
use ashlar_reactor::window::HALF_WINDOW;

use crate::status::{Progress, Replayed, ScrubReport, ScrubState, Worked};

/// Bytes that were worked off lately: in one to two half windows, and less at the beginning.
#[derive(Clone, Copy, Debug)]
struct Rate {
    previous: Half,
    current: Half,
}

#[derive(Clone, Copy, Debug)]
struct Half {
    began: Instant,
    bytes: u64,
}

impl Rate {
    fn new(now: Instant) -> Rate {
        let nothing = Half { began: now, bytes: 0 };
        Rate { previous: nothing, current: nothing }
    }

    fn add(&mut self, now: Instant, bytes: u64) {
        *self = self.at(now);
        self.current.bytes += bytes;
    }

    fn bytes_per_second(self, now: Instant) -> u64 {
        let Rate { previous, current } = self.at(now);
        let bytes = u128::from(previous.bytes + current.bytes);
        let rate = (bytes * 1_000_000_000).checked_div(now.since(previous.began).as_nanos());
        rate.and_then(|rate| u64::try_from(rate).ok()).unwrap_or(0)
    }

    /// What is old is forgotten.
    fn at(self, now: Instant) -> Rate {
        let age = now.since(self.current.began);
        let current = Half { began: now, bytes: 0 };
        if age < HALF_WINDOW {
            return self;
        }
        if age < 2 * HALF_WINDOW {
            return Rate { previous: self.current, current };
        }
        let half_ns = u64::try_from(HALF_WINDOW.as_nanos()).unwrap_or(u64::MAX);
        let began = Instant::from_ns(now.as_ns().saturating_sub(half_ns));
        Rate { previous: Half { began, bytes: 0 }, current }
    }
}

/// How far one piece of work is.
#[derive(Clone, Copy, Debug)]
struct Running {
    began: Instant,
    done: u64,
    total: u64,
    /// Bytes that are left to do: stripes that were never written take no time.
    left_bytes: u64,
    rate: Rate,
}

impl Running {
    fn progress(&self, now: Instant) -> Progress {
        let elapsed_ms = u64::try_from(now.since(self.began).as_millis()).unwrap_or(u64::MAX);
        let rate = self.rate.bytes_per_second(now);
        let expected = u128::from(self.left_bytes) * 1000;
        let remaining = expected.checked_div(u128::from(rate));
        Progress {
            stripes_done: self.done,
            stripes_total: self.total,
            elapsed_ms,
            bytes_per_second: rate,
            remaining_ms: remaining.and_then(|ms| u64::try_from(ms).ok()),
        }
    }
}

/// One slot for each kind of work.
#[derive(Default)]
pub(crate) struct Jobs {
    /// What the start had to put in place.
    pub(crate) replayed: Cell<Option<Replayed>>,
    resync: Slot,
    rebuild: Slot,
    scrub: Slot,
    restripe: Slot,
    restripe_error: RefCell<Option<String>>,
    /// Bytes of the array that the restripe could not read just now.
    pub(crate) not_moved: RefCell<Option<Range<u64>>>,
    rebuild_error: RefCell<Option<String>>,
    /// Members that the rebuild has given up are to be tried again.
    pub(crate) rebuild_again: Cell<bool>,
    /// When it last ended.
    pub(crate) rebuild_ended: Cell<Instant>,
    pub(crate) scrub_report: RefCell<Option<ScrubReport>>,
    /// The scrub is to end, or has ended, before its end.
    pub(crate) scrub_stopped: Cell<bool>,
    /// Of the newest report that members have.
    pub(crate) scrub_sequence: Cell<u64>,
}

#[derive(Default)]
pub(crate) struct Slot {
    running: Cell<Option<Running>>,
    /// Bytes that were worked off since the array was started.
    worked: Cell<u64>,
}

impl Slot {
    pub(crate) fn is_running(&self) -> bool {
        self.running.get().is_some()
    }

    /// `left_bytes`: that will have to be worked off. What runs already goes on with these.
    pub(crate) fn begin(&self, now: Instant, done: u64, total: u64, left_bytes: u64) {
        let (began, rate) = match self.running.get() {
            Some(running) => (running.began, running.rate),
            None => (now, Rate::new(now)),
        };
        self.running.set(Some(Running { began, done, total, left_bytes, rate }));
    }

    /// So many bytes are worked off.
    pub(crate) fn worked(&self, now: Instant, bytes: u64) {
        self.worked.set(self.worked.get() + bytes);
        if let Some(mut running) = self.running.get() {
            running.rate.add(now, bytes);
            running.left_bytes = running.left_bytes.saturating_sub(bytes);
            self.running.set(Some(running));
        }
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

    pub(crate) fn has_rebuild_error(&self) -> bool {
        self.rebuild_error.borrow().is_some()
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

    pub(crate) fn worked(&self) -> Worked {
        Worked {
            rebuild_bytes: self.rebuild.worked.get(),
            resync_bytes: self.resync.worked.get(),
            scrub_bytes: self.scrub.worked.get(),
            restripe_bytes: self.restripe.worked.get(),
        }
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

#[cfg(test)]
mod tests {
    //! Goal: the rate is that of the last seconds, and the end is expected from it and from what is
    //! left to do, not from stripes that are passed over.
    //! Method: made-up moments.

    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_ns(ms * 1_000_000)
    }

    #[test]
    fn the_rate_is_of_lately() {
        let slot = Slot::default();
        // It was under way before this: the array has been up for a while.
        slot.begin(at(100_000), 0, 1000, 30_000_000);
        let shown = |ms| slot.progress(at(ms)).map(|its| (its.bytes_per_second, its.remaining_ms));
        assert_eq!(shown(100_000), Some((0, None)));
        // A second at 1 MB/s, then at 100 kB/s.
        (1..=10).for_each(|its| slot.worked(at(100_000 + its * 100), 100_000));
        assert_eq!(shown(101_000), Some((1_000_000, Some(29_000))));
        (11..300).for_each(|its| slot.worked(at(100_000 + its * 100), 10_000));
        assert_eq!(shown(130_000), Some((100_000, Some(261_100))));
        // It stands still: nobody knows when it ends.
        assert_eq!(shown(145_000), Some((0, None)));
        slot.end();
        assert_eq!((shown(145_000), slot.worked.get()), (None, 3_890_000));
    }

    #[test]
    fn what_goes_on_keeps_its_rate() {
        let slot = Slot::default();
        slot.begin(at(1000), 0, 10, 0);
        slot.worked(at(2000), 4_000_000);
        slot.begin(at(2000), 5, 20, 8_000_000);
        let progress = slot.progress(at(3000)).unwrap();
        assert_eq!((progress.stripes_done, progress.stripes_total), (5, 20));
        assert_eq!((progress.bytes_per_second, progress.elapsed_ms), (2_000_000, 2000));
        assert_eq!(progress.remaining_ms, Some(4000));
        // What comes after it begins anew.
        slot.end();
        slot.begin(at(4000), 0, 10, 1);
        assert_eq!(slot.progress(at(5000)).unwrap().bytes_per_second, 0);
    }
}
