//! When a read is also asked of the others, because its own member is late: how long it is waited
//! for, and how many reads at most. (Dean and Barroso, "The Tail at Scale", Communications of the
//! ACM 56, 2013: to ask twice after the 95th percentile costs little and cuts the tail.)

use std::cell::{Cell, RefCell};
use std::time::Duration;

use ashlar_drive::latency::LatencySummary;
use ashlar_drive::slow::siblings_of;

/// No drive is late before this, however fast its siblings are: to ask them costs more than to
/// wait.
const PATIENCE_MIN: Duration = Duration::from_micros(200);
/// Where siblings did too little lately to say what is usual: longer than a drive that is well
/// needs.
const PATIENCE_UNKNOWN: Duration = Duration::from_millis(50);
/// Reads that may be hedged in a row after many that were not.
const SAVED_MAX: u32 = 16;

/// How long a member is waited for: as long as its siblings need for 99 reads of 100.
pub(crate) fn patience(members: &[Option<LatencySummary>], index: usize) -> Duration {
    let usual = siblings_of(members, index).map(|its| Duration::from_nanos(its.p99_ns));
    usual.map_or(PATIENCE_UNKNOWN, |usual| usual.max(PATIENCE_MIN))
}

/// Lets so many reads of a hundred be hedged.
#[derive(Clone, Copy, Debug, Default)]
struct Budget {
    hundredths: u32,
}

impl Budget {
    /// There was a read.
    fn earn(self, percent: u8) -> Budget {
        Budget { hundredths: (self.hundredths + u32::from(percent)).min(100 * SAVED_MAX) }
    }

    /// `None`: not now.
    fn spend(self) -> Option<Budget> {
        self.hundredths.checked_sub(100).map(|hundredths| Budget { hundredths })
    }
}

/// What an array knows for it.
#[derive(Default)]
pub(crate) struct Hedging {
    patience: RefCell<Vec<Duration>>,
    budget: Cell<Budget>,
}

impl Hedging {
    /// Maintenance has looked at the members' drives.
    pub(crate) fn learn(&self, members: &[Option<LatencySummary>]) {
        let all = (0..members.len()).map(|index| patience(members, index));
        *self.patience.borrow_mut() = all.collect();
    }

    pub(crate) fn patience(&self, member: usize) -> Duration {
        self.patience.borrow().get(member).copied().unwrap_or(PATIENCE_UNKNOWN)
    }

    pub(crate) fn earn(&self, percent: u8) {
        self.budget.set(self.budget.get().earn(percent));
    }

    /// Whether a read may be hedged now.
    pub(crate) fn spend(&self) -> bool {
        let left = self.budget.get().spend();
        left.inspect(|left| self.budget.set(*left)).is_some()
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a member is waited for as long as is usual, and no more reads are hedged than may be.
    //! Method: made-up percentiles on both sides of every bound; a thousand reads.

    use ashlar_drive::slow::SAMPLES_MIN;

    use super::*;

    fn its(samples: u64, p99_us: u64) -> Option<LatencySummary> {
        let p99_ns = p99_us * 1000;
        Some(LatencySummary { samples, p50_ns: p99_ns / 2, p99_ns, p999_ns: p99_ns })
    }

    #[test]
    fn siblings_say_what_is_usual() {
        let many = SAMPLES_MIN;
        let members = [its(many, 900), its(many, 300), its(many, 9000), its(many, 400)];
        let us = |index| patience(&members, index).as_micros();
        // Medians of three; of its own pace nothing counts.
        assert_eq!([us(0), us(1), us(2), us(3)], [400, 900, 400, 900]);
        let fast = [its(many, 20), its(many, 30)];
        assert_eq!(patience(&fast, 0), PATIENCE_MIN);
        for unknown in [[its(many, 1), None], [its(many, 1), its(many - 1, 300)]] {
            assert_eq!(patience(&unknown, 0), PATIENCE_UNKNOWN);
        }
        let hedging = Hedging::default();
        assert_eq!(hedging.patience(3), PATIENCE_UNKNOWN, "nobody has looked yet");
        hedging.learn(&members);
        assert_eq!(hedging.patience(3).as_micros(), 900);
    }

    #[test]
    fn the_budget_is_kept() {
        for percent in [0, 1, 7, 50, 100] {
            let hedging = Hedging::default();
            let mut hedged = 0;
            for _ in 0..1000 {
                hedging.earn(percent);
                hedged += u32::from(hedging.spend());
            }
            assert_eq!(hedged, u32::from(percent) * 10);
        }
        let hedging = Hedging::default();
        (0..10_000).for_each(|_| hedging.earn(10));
        let in_a_row = (0..1000).take_while(|_| hedging.spend()).count();
        assert_eq!(in_a_row, SAVED_MAX as usize);
    }
}
