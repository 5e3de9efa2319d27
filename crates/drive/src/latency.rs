//! How long a drive takes, over the last seconds.

use std::time::Duration;

use ashlar_reactor::backend::Instant;
use ashlar_reactor::histogram;

/// Half of the time that is looked back on: a window is one to two of these.
pub const HALF_WINDOW: Duration = Duration::from_secs(5);

/// In units of 64 ns.
type Histogram = histogram::Histogram<6>;

fn summary(its: &Histogram) -> LatencySummary {
    LatencySummary {
        samples: its.samples(),
        p50_ns: its.percentile(500_000),
        p99_ns: its.percentile(990_000),
        p999_ns: its.percentile(999_000),
    }
}

/// Times of the last window. Percentiles are zero without samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencySummary {
    pub samples: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
}

/// What a drive did lately, from submission to completion of each attempt that succeeded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    pub reads: LatencySummary,
    pub writes: LatencySummary,
}

/// The operations of this half window, and of the one before.
#[derive(Default)]
pub(crate) struct Window {
    current: Histogram,
    previous: Histogram,
    began: Instant,
}

impl Window {
    pub(crate) fn add(&mut self, now: Instant, took: Duration) {
        self.roll(now);
        self.current.add(took);
    }

    pub(crate) fn summary(&mut self, now: Instant) -> LatencySummary {
        self.roll(now);
        let mut all = self.previous.clone();
        all.add_all(&self.current);
        summary(&all)
    }

    fn roll(&mut self, now: Instant) {
        let age = now.since(self.began);
        if age < HALF_WINDOW {
            return;
        }
        let current = std::mem::take(&mut self.current);
        self.previous = if age < 2 * HALF_WINDOW { current } else { Histogram::default() };
        self.began = now;
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what is old is forgotten.
    //! Method: made-up moments.

    use super::*;

    #[test]
    fn a_window_forgets() {
        let at = |ms: u64| Instant::from_ns(ms * 1_000_000);
        let mut window = Window::default();
        let mut samples = |ms: u64, add: bool| {
            if add {
                window.add(at(ms), Duration::from_micros(100));
            }
            window.summary(at(ms)).samples
        };
        assert_eq!((samples(0, true), samples(4_999, true)), (1, 2));
        // The second half begins; then the first is dropped.
        assert_eq!((samples(5_000, true), samples(9_999, false)), (3, 3));
        assert_eq!((samples(10_000, false), samples(15_000, false)), (1, 0));
        assert_eq!((samples(16_000, true), samples(26_000, false)), (1, 0));
    }
}
