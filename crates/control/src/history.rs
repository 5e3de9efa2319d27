//! What went wrong with a drive since it is known here, over all starts: an array counts since its
//! own start only, and would call a drive healthy again that has failed a moment before.
//!
//! It is kept in the state directory, by the uuid of the drive's label; so another host does not
//! know of it. Invariant: a counter never goes back.

use std::collections::BTreeMap;

use uuid::Uuid;

use crate::api::drive::{DriveCounters, DriveHealth, DriveHistory};

/// Between two times that counters alone are stored, in seconds.
const STORE_PERIOD_S: u64 = 60;
/// Drives that are remembered; of more, those that had their first error last.
const DRIVES_MAX: usize = 1024;

/// Of all drives.
pub type Stored = BTreeMap<Uuid, DriveHistory>;

/// How a drive was at the last look.
#[derive(Clone, Copy)]
struct Look {
    counters: DriveCounters,
    health: DriveHealth,
}

/// See the file's head.
#[derive(Default)]
pub struct Histories {
    drives: Stored,
    /// Of drives that arrays use.
    looks: BTreeMap<Uuid, Look>,
    unstored: Unstored,
    stored_s: u64,
}

/// What is not in the state directory yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Unstored {
    #[default]
    Nothing,
    Counters,
    /// A drive has failed, or was forgiven.
    State,
}

impl Histories {
    pub fn new(drives: Stored) -> Histories {
        Histories { drives, ..Histories::default() }
    }

    pub fn of(&self, drive: Uuid) -> Option<&DriveHistory> {
        self.drives.get(&drive)
    }

    /// After a look at a drive that an array uses: what it counts, since that began to use it.
    pub fn note(&mut self, drive: Uuid, now_s: u64, health: DriveHealth, counters: DriveCounters) {
        let now = Look { counters, health };
        let before = self.looks.insert(drive, now).filter(|before| !is_anew(before, &now));
        let more = errors_since(before.map(|before| before.counters), &counters);
        let has_more = more != DriveCounters::default();
        if has_more {
            add(self.entry(drive), now_s, &more);
            self.unstored = self.unstored.max(Unstored::Counters);
        }
        let was_failed = before.is_some_and(|before| before.health == DriveHealth::Failed);
        // One that was pulled by hand has failed at nothing just now.
        if health == DriveHealth::Failed
            && !was_failed
            && has_more
            && let Some(why) = errors_text(&counters)
        {
            let history = self.entry(drive);
            (history.failed_s, history.failure) = (Some(now_s), Some(why));
            self.unstored = Unstored::State;
        }
    }

    fn entry(&mut self, drive: Uuid) -> &mut DriveHistory {
        if self.drives.len() >= DRIVES_MAX && !self.drives.contains_key(&drive) {
            let oldest = self.drives.iter().min_by_key(|(_, its)| its.since_s);
            let oldest = oldest.map(|(drive, _)| *drive);
            oldest.and_then(|oldest| self.drives.remove(&oldest));
        }
        self.drives.entry(drive).or_default()
    }

    /// Forgets what went wrong with a drive. False: nothing did.
    pub fn clear(&mut self, drive: Uuid) -> bool {
        let known = self.drives.remove(&drive).is_some();
        if known {
            self.unstored = Unstored::State;
        }
        known
    }

    /// What has to be stored now, if anything; counters wait for their time.
    pub fn to_store(&self, now_s: u64) -> Option<&Stored> {
        let due = match self.unstored {
            Unstored::Nothing => false,
            Unstored::Counters => now_s.abs_diff(self.stored_s) >= STORE_PERIOD_S,
            Unstored::State => true,
        };
        due.then_some(&self.drives)
    }

    /// All of it, whether its time has come or not.
    pub fn unstored(&self) -> Option<&Stored> {
        (self.unstored != Unstored::Nothing).then_some(&self.drives)
    }

    pub fn stored(&mut self, now_s: u64) {
        (self.unstored, self.stored_s) = (Unstored::Nothing, now_s);
    }
}

fn add(its: &mut DriveHistory, now_s: u64, more: &DriveCounters) {
    if its.since_s == 0 {
        its.since_s = now_s;
    }
    its.read_errors += more.read_errors;
    its.write_errors += more.write_errors;
    its.timeouts += more.timeouts;
    its.wrong_blocks += more.wrong_blocks;
    its.wrong_checksums += more.wrong_checksums;
}

/// Whether the drive was opened again since: then it counts from zero.
fn is_anew(before: &Look, now: &Look) -> bool {
    let counts = |its: &Look| {
        let its = &its.counters;
        let errors = [its.read_errors, its.write_errors, its.timeouts];
        let wrong = [its.wrong_blocks, its.wrong_checksums];
        [its.reads, its.writes, its.flushes].into_iter().chain(errors).chain(wrong)
    };
    let revived = before.health == DriveHealth::Failed && now.health != DriveHealth::Failed;
    revived || counts(before).zip(counts(now)).any(|(before, now)| now < before)
}

/// The errors alone.
fn errors_since(before: Option<DriveCounters>, now: &DriveCounters) -> DriveCounters {
    let before = before.unwrap_or_default();
    DriveCounters {
        read_errors: now.read_errors.saturating_sub(before.read_errors),
        write_errors: now.write_errors.saturating_sub(before.write_errors),
        timeouts: now.timeouts.saturating_sub(before.timeouts),
        wrong_blocks: now.wrong_blocks.saturating_sub(before.wrong_blocks),
        wrong_checksums: now.wrong_checksums.saturating_sub(before.wrong_checksums),
        ..DriveCounters::default()
    }
}

/// Why it failed.
fn errors_text(its: &DriveCounters) -> Option<String> {
    let (reads, writes) = (its.read_errors, its.write_errors);
    let failed =
        (reads + writes > 0).then(|| format!("{reads} reads and {writes} writes had failed"));
    let silent = (its.timeouts > 0).then(|| "it left an operation without an answer".to_owned());
    match (silent, failed) {
        (Some(silent), Some(failed)) => Some(format!("{silent}, and {failed}")),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    //! Goal: errors add up over starts, each once; a failure is known until it is forgiven.
    //! Method: made-up looks.

    use super::*;

    const DRIVE: Uuid = Uuid::from_bytes([7; 16]);

    fn counted(reads: u64, read_errors: u64) -> DriveCounters {
        DriveCounters { reads, read_errors, ..DriveCounters::default() }
    }

    #[test]
    fn errors_add_up_over_starts() {
        let mut all = Histories::default();
        let mut look = |s, health, reads, errors| {
            all.note(DRIVE, s, health, counted(reads, errors));
            all.of(DRIVE).map(|its| (its.since_s, its.read_errors))
        };
        let (good, suspect) = (DriveHealth::Healthy, DriveHealth::Suspect);
        assert_eq!(look(10, good, 100, 0), None);
        assert_eq!(look(11, suspect, 200, 2), Some((11, 2)));
        assert_eq!(look(12, suspect, 300, 2), Some((11, 2)));
        assert_eq!(look(13, suspect, 400, 3), Some((11, 3)));
        // Its array was started again, and it has failed to read as often before the next look.
        assert_eq!(look(14, suspect, 50, 3), Some((11, 6)));
        // A daemon that is started with what was stored.
        let mut next = Histories::new(all.drives.clone());
        next.note(DRIVE, 99, suspect, counted(5, 1));
        assert_eq!(next.of(DRIVE).unwrap().errors().unwrap(), "7 read");
    }

    #[test]
    fn a_failure_is_known_until_it_is_forgiven() {
        let mut all = Histories::default();
        all.note(DRIVE, 10, DriveHealth::Failed, counted(1, 16));
        let failed = |all: &Histories| all.of(DRIVE).and_then(|its| its.failed_s);
        assert_eq!(failed(&all), Some(10));
        all.note(DRIVE, 11, DriveHealth::Failed, counted(1, 16));
        all.note(DRIVE, 12, DriveHealth::Healthy, counted(0, 0));
        assert_eq!(failed(&all), Some(10), "it is used again, and that is known");
        assert_eq!(all.of(DRIVE).unwrap().read_errors, 16);
        assert!(all.clear(DRIVE) && !all.clear(DRIVE));
        assert_eq!(failed(&all), None);
        // One that was pulled.
        all.note(DRIVE, 13, DriveHealth::Failed, counted(9, 0));
        assert_eq!(all.of(DRIVE), None);
        // And one that had an error before.
        all.note(DRIVE, 14, DriveHealth::Healthy, counted(20, 1));
        all.note(DRIVE, 15, DriveHealth::Failed, counted(20, 1));
        assert_eq!((failed(&all), all.of(DRIVE).unwrap().read_errors), (None, 1));
    }

    #[test]
    fn counters_are_stored_once_a_minute_and_failures_at_once() {
        let mut all = Histories::default();
        all.stored(100);
        assert!(all.to_store(500).is_none() && all.unstored().is_none());
        all.note(DRIVE, 110, DriveHealth::Suspect, counted(1, 1));
        assert!(all.to_store(159).is_none() && all.to_store(160).is_some());
        assert!(all.unstored().is_some(), "as when it stops");
        all.note(DRIVE, 120, DriveHealth::Failed, counted(1, 2));
        assert!(all.to_store(120).is_some());
        all.stored(120);
        assert!(all.to_store(999).is_none());
        all.clear(DRIVE);
        assert!(all.to_store(121).is_some());
    }
}
