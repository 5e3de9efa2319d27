//! How many operations took how long: counted in classes, so that percentiles of any number of them
//! cost the same memory.
//!
//! Classes are log-linear: every power of two is cut into 16 of equal width, so a time is known to
//! a sixteenth, and to the unit. (The idea is HdrHistogram's, by Gil Tene.) Integer arithmetic
//! only, no allocation, one increment an operation.

use std::time::Duration;

const STEPS_LOG2: u32 = 4;
const STEPS: u64 = 1 << STEPS_LOG2;
/// Longer times count as this long: 2^36 ns are 69 s.
const NS_LOG2_MAX: u32 = 36;
/// Of the finest unit; coarser ones leave the last of them empty.
const CLASSES: usize = class_of::<0>(u64::MAX) + 1;

const PPM: u64 = 1_000_000;

/// Units of 64 ns: 1000 ns are 15 units, class 15; 70 000 ns are 1093 units, in 1024..2048 cut into
/// 64s: 1088..1152 is the second of them, class (10 - 3) × 16 + 1.
#[expect(clippy::cast_possible_truncation, reason = "below CLASSES")]
const fn class_of<const UNIT_LOG2: u32>(ns: u64) -> usize {
    let units_max = (1 << (NS_LOG2_MAX - UNIT_LOG2)) - 1;
    let units = if ns >> UNIT_LOG2 > units_max { units_max } else { ns >> UNIT_LOG2 };
    if units < STEPS {
        return units as usize;
    }
    let octave = units.ilog2() - STEPS_LOG2;
    ((octave as u64 + 1) * STEPS + ((units >> octave) & (STEPS - 1))) as usize
}

/// The longest time of a class.
const fn class_end_ns<const UNIT_LOG2: u32>(class: usize) -> u64 {
    let class = class as u64;
    if class < STEPS {
        return ((class + 1) << UNIT_LOG2) - 1;
    }
    let octave = class / STEPS - 1;
    ((STEPS + class % STEPS + 1) << octave << UNIT_LOG2) - 1
}

/// How many operations took how long, in units of `2^UNIT_LOG2` ns.
#[derive(Clone)]
pub struct Histogram<const UNIT_LOG2: u32> {
    counts: [u32; CLASSES],
    total: u64,
}

impl<const UNIT_LOG2: u32> Default for Histogram<UNIT_LOG2> {
    fn default() -> Self {
        Histogram { counts: [0; CLASSES], total: 0 }
    }
}

impl<const UNIT_LOG2: u32> Histogram<UNIT_LOG2> {
    pub fn add(&mut self, took: Duration) {
        self.add_ns(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    pub fn add_ns(&mut self, took_ns: u64) {
        let class = class_of::<UNIT_LOG2>(took_ns);
        self.counts[class] = self.counts[class].saturating_add(1);
        self.total += 1;
    }

    pub fn add_all(&mut self, other: &Histogram<UNIT_LOG2>) {
        for (count, its) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*its);
        }
        self.total += other.total;
    }

    /// How many took less than `2^(UNIT_LOG2 + 4)` ns, and then how many less than twice as long as
    /// the ones before: 27 counts in units of 64 ns, the first of less than 1024 ns, the last of
    /// 34 s and more.
    pub fn octaves(&self) -> impl Iterator<Item = u64> {
        let octaves = (NS_LOG2_MAX - UNIT_LOG2 - STEPS_LOG2 + 1) as usize;
        let counts = self.counts.chunks(1 << STEPS_LOG2).take(octaves);
        counts.map(|counts| counts.iter().copied().map(u64::from).sum())
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
        class.map_or(0, class_end_ns::<UNIT_LOG2>)
    }
}

#[cfg(test)]
mod tests {
    //! Goal: percentiles are right to a sixteenth, in coarse units and in fine ones.
    //! Method: every class against its neighbours, known distributions.

    use super::*;

    fn classes_follow_each_other<const UNIT_LOG2: u32>() {
        let last = class_of::<UNIT_LOG2>(u64::MAX);
        assert!(last < CLASSES);
        for class in 0..=last {
            let end = class_end_ns::<UNIT_LOG2>(class);
            assert_eq!(class_of::<UNIT_LOG2>(end), class);
            if class < last {
                assert_eq!(class_of::<UNIT_LOG2>(end + 1), class + 1, "{end} ns");
                let width = class_end_ns::<UNIT_LOG2>(class + 1) - end;
                assert!(width <= 1 << UNIT_LOG2 || width * 16 <= end + 1, "{width} of {end}");
            }
        }
    }

    #[test]
    fn classes_follow_each_other_without_gaps() {
        classes_follow_each_other::<0>();
        classes_follow_each_other::<6>();
        assert_eq!((class_of::<6>(1000), class_of::<6>(70_000)), (15, 113));
    }

    fn known_times<const UNIT_LOG2: u32>() {
        let mut histogram = Histogram::<UNIT_LOG2>::default();
        assert_eq!((histogram.samples(), histogram.percentile(990_000)), (0, 0));
        for us in 1..=10_000 {
            histogram.add(Duration::from_micros(us));
        }
        for (ppm, us) in [(500_000, 5000), (990_000, 9900), (999_000, 9990), (1_000_000, 10_000)] {
            let ns = histogram.percentile(ppm);
            assert!(ns >= us * 1000 && ns <= us * 1000 * 17 / 16, "{ppm}: {ns}");
        }
        let least = class_end_ns::<UNIT_LOG2>(class_of::<UNIT_LOG2>(1000));
        assert_eq!(histogram.percentile(0), least);
        let mut one = Histogram::<UNIT_LOG2>::default();
        one.add(Duration::MAX);
        assert_eq!(one.percentile(1), (1 << NS_LOG2_MAX) - 1);
        histogram.add_all(&one);
        assert_eq!((histogram.samples(), histogram.percentile(PPM)), (10_001, one.percentile(PPM)));
    }

    #[test]
    fn percentiles_of_known_times() {
        known_times::<0>();
        known_times::<6>();
    }

    #[test]
    fn octaves_are_powers_of_two() {
        let mut histogram = Histogram::<6>::default();
        for ns in [0, 1023, 1024, 2047, 2048, 1 << 34, u64::MAX] {
            histogram.add_ns(ns);
        }
        let octaves: Vec<u64> = histogram.octaves().collect();
        assert_eq!((octaves.len(), &octaves[..4]), (27, &[2, 2, 1, 0][..]));
        assert_eq!(&octaves[24..], [0, 1, 1]);
        assert_eq!(octaves.iter().sum::<u64>(), histogram.samples());
    }

    #[test]
    fn fine_units_tell_short_times_apart() {
        let mut fine = Histogram::<0>::default();
        (0..100).for_each(|ns| fine.add_ns(150 + ns % 2 * 20));
        assert!(fine.percentile(500_000) < 160 && fine.percentile(990_000) >= 170);
    }
}
