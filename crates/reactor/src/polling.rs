//! How long to go on looking for work before sleeping: decisions, without anything that polls.
//!
//! Polling finds work at once and costs a core; sleeping costs nothing and makes the next work some
//! microseconds late. The gaps of the recent past tell which pays. The rule is that of halt polling
//! in Linux' KVM (Documentation/virt/kvm/halt-polling.rst), with more patience: a gap that a longer
//! window would have bridged makes it longer, two in a row that no window may bridge make it
//! shorter. So a steady load is polled for, also one in which long waits for a drive and short ones
//! for a guest take turns; a sparse one is not, after three times the last window at most.

use std::time::Duration;

use crate::backend::Instant;

/// The window after the first gap that was worth bridging: longer than what a guest needs to answer
/// a completion with its next request.
const FIRST: Duration = Duration::from_micros(10);
/// A shorter window is none: it ends before another turn.
const LAST: Duration = Duration::from_micros(1);

/// The window for the next gap, after `gap` ended and, before it, `gap_before`. Never longer than
/// `max`.
pub(crate) fn next_window(
    window: Duration,
    gap_before: Duration,
    gap: Duration,
    max: Duration,
) -> Duration {
    if gap <= window || (gap > max && gap_before <= max) {
        return window.min(max);
    }
    if gap <= max {
        return (window * 2).max(FIRST).min(max);
    }
    let half = window / 2;
    if half < LAST { Duration::ZERO } else { half.min(max) }
}

/// Watches one source of work, and says when to stop looking at it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Watch {
    window: Duration,
    last_gap: Duration,
    /// Since when there is nothing to do; `None`: there was, when last looked at.
    idle_since: Option<Instant>,
}

impl Watch {
    /// There was work at `now`.
    pub(crate) fn work(&mut self, now: Instant, max: Duration) {
        if let Some(since) = self.idle_since.take() {
            let gap = now.since(since);
            self.window = next_window(self.window, self.last_gap, gap, max);
            self.last_gap = gap;
        }
    }

    /// There was none at `now`. True if looking on does not pay.
    pub(crate) fn nothing(&mut self, now: Instant) -> bool {
        let since = *self.idle_since.get_or_insert(now);
        now.since(since) >= self.window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn a_window_follows_the_gaps() {
        let long = 1_000_000;
        let cases = [
            // Window, the gap before, the gap, most, the next window: in microseconds.
            (0, long, 3, 100, 10),
            (10, 3, 3, 100, 10),
            (10, 3, 10, 100, 10),
            (10, 3, 11, 100, 20),
            (40, 3, 100, 100, 80),
            (80, 3, 100, 100, 100),
            // One long gap says little, two say enough.
            (100, 100, 101, 100, 100),
            (100, 101, 101, 100, 50),
            (100, long, 3, 100, 100),
            (50, long, long, 100, 25),
            (1, long, long, 100, 0),
            (0, long, long, 100, 0),
            // Never longer than it may be.
            (80, 5, 5, 20, 20),
            (80, 5, 50, 20, 20),
            (5, 5, 7, 8, 8),
            (0, 0, 0, 0, 0),
            (0, 0, 1, 0, 0),
            (0, 1, 1, 0, 0),
        ];
        for (window, gap_before, gap, max, after) in cases {
            let next = next_window(window * US, gap_before * US, gap * US, max * US);
            assert_eq!(next, after * US, "{window} {gap_before} {gap} {max}");
        }
    }

    /// Polls every microsecond. Returns how long it looked in vain for work that comes at these
    /// moments, and how often it was asleep when there was some, in microseconds and times.
    fn look_for(max: u32, work: impl Iterator<Item = u64>) -> (u64, u32) {
        let (mut watch, mut now) = (Watch::default(), 0);
        let (mut vain, mut slept) = (0, 0);
        for at in work {
            while now < at {
                if watch.nothing(Instant::from_ns(now * 1000)) {
                    slept += 1;
                    now = at;
                } else {
                    vain += 1;
                    now += 1;
                }
            }
            watch.work(Instant::from_ns(now * 1000), max * US);
            now += 1;
        }
        (vain, slept)
    }

    #[test]
    fn a_steady_load_is_polled_for() {
        // A request each 60 us: two sleeps until the window is long enough, three at most.
        let (_, slept) = look_for(100, (1..1000).map(|i| i * 60));
        assert!(slept <= 4, "{slept}");
    }

    #[test]
    fn a_sparse_load_is_slept_through() {
        // A request each millisecond: nothing is gained by any polling.
        let (vain, slept) = look_for(100, (1..1000).map(|i| i * 1000));
        assert!(vain == 0 && slept == 999, "{vain} {slept}");
        // After a burst the window is given up in steps.
        let burst = (1..100).map(|i| i * 50);
        let (busy, _) = look_for(100, burst.clone());
        let (all, _) = look_for(100, burst.chain((6..1000).map(|i| i * 1000)));
        assert!(all - busy <= 300, "{}", all - busy);
    }

    #[test]
    fn answers_of_drives_and_requests_of_guests_take_turns() {
        // 90 us for the drive, which no window of 50 bridges, then 4 for the guest.
        let moments = (1..1000).flat_map(|i| [i * 100, i * 100 + 5]);
        let (_, slept) = look_for(50, moments);
        assert!(slept <= 1010, "{slept}: the guest's requests are slept through");
    }
}
