//! How long a drive takes: counted in classes, over the last seconds.
//!
//! Classes are log-linear: every power of two is cut into 16 of equal width, so a time is known to
//! a sixteenth, and to 64 ns. (The idea is HdrHistogram's, by Gil Tene.) Integer arithmetic only,
//! no allocation, one increment an operation.

use std::time::Duration;

use ashlar_reactor::backend::Instant;

/// Half of the time that is looked back on: a window is one to two of these.
pub const HALF_WINDOW: Duration = Duration::from_secs(5);

const UNIT_LOG2: u32 = 6;
const STEPS_LOG2: u32 = 4;
const STEPS: u64 = 1 << STEPS_LOG2;
/// Longer times count as this long: 2^36 ns are 69 s.
const UNITS_MAX: u64 = (1 << (36 - UNIT_LOG2)) - 1;
const CLASSES: usize = class_of(UNITS_MAX << UNIT_LOG2) + 1;

const PPM: u64 = 1_000_000;

/// 1000 ns are 15 units, class 15; 70 000 ns are 1093 units, in 1024..2048 cut into 64s: 1088..1152
/// is the second of them, class (10 - 3) × 16 + 1.
#[expect(clippy::cast_possible_truncation, reason = "below CLASSES")]
const fn class_of(ns: u64) -> usize {
    let units = if ns >> UNIT_LOG2 > UNITS_MAX { UNITS_MAX } else { ns >> UNIT_LOG2 };
    if units < STEPS {
        return units as usize;
    }
    let octave = units.ilog2() - STEPS_LOG2;
    ((octave as u64 + 1) * STEPS + ((units >> octave) & (STEPS - 1))) as usize
}

/// The longest time of a class.
const fn class_end_ns(class: usize) -> u64 {
    let class = class as u64;
    if class < STEPS {
        return ((class + 1) << UNIT_LOG2) - 1;
    }
    let octave = class / STEPS - 1;
    ((STEPS + class % STEPS + 1) << octave << UNIT_LOG2) - 1
}

/// How many operations took how long.
#[derive(Clone)]
pub struct Histogram {
    counts: [u32; CLASSES],
    total: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: [0; CLASSES], total: 0 }
    }
}

impl Histogram {
    pub fn add(&mut self, took: Duration) {
        let class = class_of(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        self.counts[class] = self.counts[class].saturating_add(1);
        self.total += 1;
    }

    fn add_all(&mut self, other: &Histogram) {
        for (count, its) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*its);
        }
        self.total += other.total;
    }

    pub fn samples(&self) -> u64 {
        self.total
    }

    /// The time in nanoseconds that `ppm` millionths of the operations kept to, rounded up to the
    /// end of its class; zero without operations.
    pub fn percentile(&self, ppm: u64) -> u64 {
        let wanted = (u128::from(self.total) * u128::from(ppm.min(PPM))).div_ceil(PPM.into());
        let mut seen = 0;
        let class = self.counts.iter().position(|count| {
            seen += u128::from(*count);
            seen > 0 && seen >= wanted
        });
        class.map_or(0, class_end_ns)
    }

    pub fn summary(&self) -> LatencySummary {
        LatencySummary {
            samples: self.samples(),
            p50_ns: self.percentile(500_000),
            p99_ns: self.percentile(990_000),
            p999_ns: self.percentile(999_000),
        }
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
        all.summary()
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
    //! Goal: percentiles are right to a sixteenth, and what is old is forgotten.
    //! Method: every class against its neighbours, known distributions, made-up moments.

    use super::*;

    #[test]
    fn classes_follow_each_other_without_gaps() {
        for class in 0..CLASSES {
            let end = class_end_ns(class);
            assert_eq!(class_of(end), class);
            if class + 1 < CLASSES {
                assert_eq!(class_of(end + 1), class + 1, "{end} ns");
                let width = class_end_ns(class + 1) - end;
                assert!(width <= 64 || width * 16 <= end + 1, "{width} of {end}");
            }
        }
        assert_eq!((class_of(1000), class_of(70_000)), (15, 113));
        assert_eq!(class_of(u64::MAX), CLASSES - 1);
    }

    #[test]
    fn percentiles_of_known_times() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.summary(), LatencySummary::default());
        for us in 1..=10_000 {
            histogram.add(Duration::from_micros(us));
        }
        for (ppm, us) in [(500_000, 5000), (990_000, 9900), (999_000, 9990), (1_000_000, 10_000)] {
            let ns = histogram.percentile(ppm);
            assert!(ns >= us * 1000 && ns <= us * 1000 * 17 / 16, "{ppm}: {ns}");
        }
        assert_eq!(histogram.percentile(0), class_end_ns(class_of(1000)));
        let mut one = Histogram::default();
        one.add(Duration::MAX);
        assert_eq!(one.percentile(1), class_end_ns(CLASSES - 1));
    }

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
