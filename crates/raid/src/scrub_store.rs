//! What a scrub has found, as the members keep it: a restart goes on counting from there, and tells
//! what the last one found.
//!
//! The record is written before the superblock's mark: it counts what was found up to a stripe at
//! least as far as the mark says. A crash in between is a scrub that goes on from the record.

use ashlar_format::array_superblock::MEMBERS_MAX;
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::record;
use ashlar_format::scrub_report::{PLACES_MAX, Phase, SLOTS, ScrubReport as Record, StoredPlace};
use ashlar_format::units::MemberIndex;
use ashlar_reactor::executor::Reactor;

use crate::array::Array;
use crate::label;
use crate::member::Member;
use crate::status::{SCRUB_PLACES_MAX, ScrubPlace, ScrubReport};

const _: () = assert!(SCRUB_PLACES_MAX == PLACES_MAX);

/// As it was found on the members.
pub(crate) struct StoredScrub {
    pub(crate) report: ScrubReport,
    pub(crate) phase: Phase,
    /// It counts what was found in stripes below.
    pub(crate) next: u64,
    sequence: u64,
}

/// The newest of the scrub that began then, on any member that is not stale: one that was begun
/// since may have been stored before a superblock told of it. Also: the sequence of the newest of
/// any.
pub(crate) async fn read(
    reactor: &Reactor,
    array: [u8; 16],
    members: &[Member],
    began_s: u64,
) -> (Option<StoredScrub>, u64) {
    let (mut newest, mut last): (Option<StoredScrub>, u64) = (None, 0);
    for member in members {
        let (Some(drive), Some(area)) = (member.keeps_metadata(), Record::area(&member.areas))
        else {
            continue;
        };
        for slot in 0..SLOTS {
            let home = area.offset + slot * Record::BYTES;
            let Ok(bytes) = label::read_bytes(reactor, drive, home, Record::BYTES).await else {
                continue;
            };
            let Ok(stored) = record::open::<Record>(&bytes, Some(member.drive_uuid), home) else {
                continue;
            };
            let sequence = stored.header.sequence.get();
            let is_newer = newest.as_ref().is_none_or(|newest| sequence > newest.sequence);
            if stored.array != array {
                continue;
            }
            last = last.max(sequence);
            if is_newer && stored.began.get() == began_s {
                newest = opened(stored);
            }
        }
    }
    (newest, last)
}

fn opened(stored: &Record) -> Option<StoredScrub> {
    let place = |its: &StoredPlace| ScrubPlace {
        stripe: its.stripe.get(),
        offset: its.offset.get(),
        len: its.len.get(),
        member: its.member().map(MemberIndex),
        // A record with any other does not open.
        flaw: its.flaw().unwrap_or_default(),
        repaired: its.repaired == 1,
    };
    let wrong = stored.wrong.iter().enumerate().filter(|(_, count)| count.get() > 0);
    let report = ScrubReport {
        began_s: stored.began.get(),
        ended_s: Some(stored.ended.get()).filter(|ended| *ended > 0),
        repairs: stored.repairs == 1,
        first_stripe: stored.first.get(),
        mismatched_stripes: stored.mismatched_stripes.get(),
        undecided_stripes: stored.undecided_stripes.get(),
        damaged_stripes: stored.damaged_stripes.get(),
        repaired_stripes: stored.repaired_stripes.get(),
        unreadable_stripes: stored.unreadable_stripes.get(),
        bad_stripes: stored.bad_stripes.get(),
        places: stored.places().iter().map(place).collect(),
        wrong_by_member: wrong.map(|(i, count)| (MemberIndex::new(i), count.get())).collect(),
    };
    let (next, sequence) = (stored.next.get(), stored.header.sequence.get());
    Some(StoredScrub { report, phase: stored.phase().ok()?, next, sequence })
}

fn record_of(report: &ScrubReport, array: [u8; 16], phase: Phase, next: u64) -> Record {
    let mut record = Record::new(array, phase);
    record.began = report.began_s.into();
    record.ended = report.ended_s.unwrap_or(0).into();
    record.repairs = report.repairs.into();
    (record.first, record.next) = (report.first_stripe.min(next).into(), next.into());
    record.mismatched_stripes = report.mismatched_stripes.into();
    record.undecided_stripes = report.undecided_stripes.into();
    record.damaged_stripes = report.damaged_stripes.into();
    record.repaired_stripes = report.repaired_stripes.into();
    record.unreadable_stripes = report.unreadable_stripes.into();
    record.bad_stripes = report.bad_stripes.into();
    for (member, count) in &report.wrong_by_member {
        record.wrong[member.index() % MEMBERS_MAX] = (*count).into();
    }
    for (stored, place) in record.places.iter_mut().zip(&report.places) {
        let member = place.member.map(|member| member.0);
        let bytes = (place.offset, place.len);
        *stored = StoredPlace::new(place.stripe, bytes, member).with_flaw(place.flaw);
        stored.repaired = place.repaired.into();
    }
    let places = report.places.len().min(PLACES_MAX);
    record.place_count = u8::try_from(places).expect("few places");
    record
}

impl Array {
    /// What the last scrub found, or the one that is under way.
    pub(crate) fn recall_scrub(&self, stored: &StoredScrub) {
        self.jobs.scrub_stopped.set(stored.phase != Phase::Finished);
        *self.jobs.scrub_report.borrow_mut() = Some(stored.report.clone());
    }

    /// Makes durable what was found in stripes below `next`. What cannot be stored is looked for
    /// again after a restart.
    pub(crate) async fn save_scrub_report(&self, phase: Phase, next: u64) {
        let report = self.jobs.scrub_report.borrow().clone().unwrap_or_default();
        let record = record_of(&report, self.uuid(), phase, next);
        let fits = |its: &Member| Record::area(&its.areas).is_some();
        if !self.members.list().iter().all(fits) {
            return;
        }
        let sequence = self.jobs.scrub_sequence.get() + 1;
        self.jobs.scrub_sequence.set(sequence);
        let slot = sequence % SLOTS * Record::BYTES;
        // All have room: it was just looked at.
        let home = |areas: &MemberLayout| areas.lease.range().end + slot;
        self.members.write_each(&record, sequence, home).await;
    }
}
