//! What was done again and again: how often, how many bytes, how long it took; since the beginning,
//! and over the last seconds.
//!
//! No allocation, a handful of additions each time. What percentiles cost is paid by who looks.

use std::ops::Add;
use std::time::Duration;

use crate::backend::Instant;
use crate::histogram::Histogram;

/// Half of the time that is looked back on: a window is one to two of these, and longer only for
/// what was not used.
pub const HALF_WINDOW: Duration = Duration::from_nanos(HALF_WINDOW_NS);
const HALF_WINDOW_NS: u64 = 5_000_000_000;
/// Of [`Total::octaves`].
pub const OCTAVES: usize = 27;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    count: u64,
    bytes: u64,
    time_ns: u64,
}

impl Sum {
    fn plus(self, other: Sum) -> Sum {
        Sum {
            count: self.count + other.count,
            bytes: self.bytes + other.bytes,
            time_ns: self.time_ns.saturating_add(other.time_ns),
        }
    }
}

/// Part of a window.
#[derive(Clone, Default)]
struct Half {
    /// In units of 64 ns.
    times: Histogram<6>,
    sum: Sum,
    longest_ns: u64,
}

impl Half {
    fn add_all(&mut self, other: &Half) {
        self.times.add_all(&other.times);
        self.sum = self.sum.plus(other.sum);
        self.longest_ns = self.longest_ns.max(other.longest_ns);
    }

    fn lately(&self, span: Duration) -> Lately {
        Lately {
            span_ns: u64::try_from(span.as_nanos()).unwrap_or(u64::MAX),
            count: self.sum.count,
            bytes: self.sum.bytes,
            time_ns: self.sum.time_ns,
            p50_ns: self.percentile(500_000),
            p99_ns: self.percentile(990_000),
            p999_ns: self.percentile(999_000),
            longest_ns: self.longest_ns,
        }
    }

    /// The histogram knows the end of a class, which none of them may have reached.
    fn percentile(&self, ppm: u64) -> u64 {
        self.times.percentile(ppm).min(self.longest_ns)
    }

    fn total(&self) -> Total {
        let Sum { count, bytes, time_ns } = self.sum;
        let mut octaves = [0; OCTAVES];
        octaves.iter_mut().zip(self.times.octaves()).for_each(|(octave, its)| *octave = its);
        Total { count, bytes, time_ns, octaves }
    }
}

/// Since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Total {
    pub count: u64,
    pub bytes: u64,
    /// All of them together.
    pub time_ns: u64,
    /// How many took less than 1024 ns; then how many less than 2048 ns and not less than that; and
    /// so on, each twice as long as the one before.
    pub octaves: [u64; OCTAVES],
}

/// Of the last seconds. Times are zero where nothing was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lately {
    /// What it is told of.
    pub span_ns: u64,
    pub count: u64,
    pub bytes: u64,
    /// All of them together: so many were under way, on average, as this is spans (Little's law).
    pub time_ns: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
    pub longest_ns: u64,
}

impl Lately {
    pub fn per_second(&self) -> u64 {
        per_second(self.count, self.span_ns)
    }

    pub fn bytes_per_second(&self) -> u64 {
        per_second(self.bytes, self.span_ns)
    }
}

impl Add for Total {
    type Output = Total;

    fn add(self, other: Total) -> Total {
        Total {
            count: self.count + other.count,
            bytes: self.bytes + other.bytes,
            time_ns: self.time_ns.saturating_add(other.time_ns),
            octaves: std::array::from_fn(|at| self.octaves[at] + other.octaves[at]),
        }
    }
}

/// Of two places together; what one in so many took is that of the slower place, at most.
impl Add for Lately {
    type Output = Lately;

    fn add(self, other: Lately) -> Lately {
        Lately {
            span_ns: self.span_ns.max(other.span_ns),
            count: self.count + other.count,
            bytes: self.bytes + other.bytes,
            time_ns: self.time_ns.saturating_add(other.time_ns),
            p50_ns: self.p50_ns.max(other.p50_ns),
            p99_ns: self.p99_ns.max(other.p99_ns),
            p999_ns: self.p999_ns.max(other.p999_ns),
            longest_ns: self.longest_ns.max(other.longest_ns),
        }
    }
}

/// Rounded to the nearest.
fn per_second(count: u64, span_ns: u64) -> u64 {
    let span_ns = u128::from(span_ns.max(1));
    let rate = (u128::from(count) * 1_000_000_000 + span_ns / 2) / span_ns;
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// See the file's head.
#[derive(Clone, Default)]
pub struct Window {
    current: Half,
    previous: Half,
    /// When the current half began, and the one before.
    began: Instant,
    previous_began: Instant,
    /// Of what is not in the current half.
    total: Total,
}

impl Window {
    pub fn add(&mut self, now: Instant, took: Duration, bytes: u64) {
        self.roll(now);
        let time_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let current = &mut self.current;
        current.times.add_ns(time_ns);
        current.sum = current.sum.plus(Sum { count: 1, bytes, time_ns });
        current.longest_ns = current.longest_ns.max(time_ns);
    }

    pub fn total(&self) -> Total {
        self.total + self.current.total()
    }

    pub fn lately(&mut self, now: Instant) -> Lately {
        self.both(now).lately(now.since(self.previous_began))
    }

    /// What was done in both windows, as if it had been one: unlike a sum of two [`Lately`], it has
    /// the percentiles of all.
    pub fn lately_with(&mut self, other: &mut Window, now: Instant) -> Lately {
        let mut both = self.both(now);
        both.add_all(&other.both(now));
        both.lately(now.since(self.previous_began.min(other.previous_began)))
    }

    /// Both halves.
    fn both(&mut self, now: Instant) -> Half {
        self.roll(now);
        let mut both = self.previous.clone();
        both.add_all(&self.current);
        both
    }

    fn roll(&mut self, now: Instant) {
        let age = now.since(self.began);
        if age >= HALF_WINDOW {
            self.turn_over(now, age);
        }
    }

    #[cold]
    fn turn_over(&mut self, now: Instant, age: Duration) {
        let current = std::mem::take(&mut self.current);
        self.total = self.total + current.total();
        if age < 2 * HALF_WINDOW {
            (self.previous, self.previous_began) = (current, self.began);
        } else {
            let half_ago = Instant::from_ns(now.as_ns().saturating_sub(HALF_WINDOW_NS));
            (self.previous, self.previous_began) = (Half::default(), half_ago);
        }
        self.began = now;
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what is old is forgotten, but for the total; rates are those of the time they tell of.
    //! Method: made-up moments.

    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_ns(ms * 1_000_000)
    }

    #[test]
    fn a_window_forgets() {
        let mut window = Window::default();
        let mut count = |ms: u64, add: bool| {
            if add {
                window.add(at(ms), Duration::from_micros(100), 4096);
            }
            window.lately(at(ms)).count
        };
        assert_eq!((count(0, true), count(4_999, true)), (1, 2));
        // The second half begins; then the first is dropped.
        assert_eq!((count(5_000, true), count(9_999, false)), (3, 3));
        assert_eq!((count(10_000, false), count(15_000, false)), (1, 0));
        assert_eq!((count(16_000, true), count(26_000, false)), (1, 0));
        let total = window.total();
        assert_eq!((total.count, total.bytes, total.time_ns), (4, 4 * 4096, 400_000));
        // 100 us are more than 65 536 ns and less than twice that: 10 and 7 doublings.
        assert_eq!((total.octaves[7], total.octaves.iter().sum::<u64>()), (4, 4));
    }

    #[test]
    fn rates_are_those_of_the_span() {
        let mut window = Window::default();
        for ms in 100_000..112_000 {
            window.add(at(ms), Duration::from_micros(2500), 8192);
        }
        let lately = window.lately(at(112_000));
        assert_eq!(lately.span_ns, 7_000_000_000);
        assert_eq!((lately.per_second(), lately.bytes_per_second()), (1000, 8_192_000));
        // Little's law: a thousand a second, each for 2.5 ms.
        assert_eq!(lately.time_ns * 10 / lately.span_ns, 25);
        assert_eq!((lately.longest_ns, window.total().count), (2_500_000, 12_000));
        assert_eq!([lately.p50_ns, lately.p99_ns, lately.p999_ns], [2_500_000; 3]);
        // The longest is of the window only.
        window.add(at(112_000), Duration::from_secs(3), 0);
        assert_eq!(window.lately(at(116_000)).longest_ns, 3_000_000_000);
        let later = window.lately(at(140_000));
        assert_eq!((later.longest_ns, later.per_second(), later.p99_ns), (0, 0, 0));
        assert_eq!(window.total().count, 12_001);
    }

    #[test]
    fn two_windows_are_one_with_the_percentiles_of_all() {
        let (mut few, mut many) = (Window::default(), Window::default());
        for ms in 100_000..101_000 {
            many.add(at(ms), Duration::from_micros(100), 512);
        }
        (0..100).for_each(|_| few.add(at(101_000), Duration::from_millis(9), 512));
        let both = many.lately_with(&mut few, at(101_000));
        assert_eq!((both.count, both.bytes, both.longest_ns), (1100, 1100 * 512, 9_000_000));
        assert!(both.p50_ns < 110_000 && both.p99_ns >= 9_000_000, "{both:?}");
        assert_eq!(both, few.lately_with(&mut many, at(101_000)));
        assert_eq!((few.lately(at(101_000)).count, many.lately(at(101_000)).count), (100, 1000));
        // Each forgets by itself.
        assert_eq!(many.lately_with(&mut few, at(112_000)).count, 0);
    }

    #[test]
    fn nothing_is_no_rate() {
        let lately = Window::default().lately(at(0));
        assert_eq!((lately, lately.per_second()), (Lately::default(), 0));
    }
}
