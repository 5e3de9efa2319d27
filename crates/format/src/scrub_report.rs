//! What the scrub that is under way has found so far, or the last one in all: one record, two
//! slots, on every member, right behind the lease.
//!
//! No label tells of it, so that builds that do not know it open the array as ever. It decides
//! nothing: where it is missing or older than the superblock's mark, that is all that is known.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::array_superblock::MEMBERS_MAX;
use crate::drive_label::MemberLayout;
use crate::record::{Header, Kind, Record, RecordError, Upgrade};
use crate::units::Area;
use crate::upgrade;

pub const VERSION: u16 = 1;
pub const SLOTS: u64 = 2;
/// Places that are told.
pub const PLACES_MAX: usize = 16;
/// As the member of a place: it could not be told which.
const NO_MEMBER: u16 = u16::MAX;

/// Where a scrub is. The number is on drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    Running = 1,
    /// By hand, before its end.
    Stopped = 2,
    Finished = 3,
}

impl Phase {
    pub const ALL: [Phase; 3] = [Phase::Running, Phase::Stopped, Phase::Finished];
}

/// What was wrong at a place. The number is on drives; builds that know of mismatches only do not
/// open a record that tells of another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Flaw {
    /// Parity or copies did not agree.
    #[default]
    Mismatch = 0,
    /// Blocks did not fit their checksums.
    Block = 1,
    /// Checksums were lost or wrong; their blocks were right.
    Checksum = 2,
    /// The drive could not read them.
    Unreadable = 3,
}

impl Flaw {
    pub const ALL: [Flaw; 4] = [Flaw::Mismatch, Flaw::Block, Flaw::Checksum, Flaw::Unreadable];
}

/// Bytes of the array that were not as they should be.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct StoredPlace {
    pub stripe: U64,
    pub offset: U64,
    pub len: U64,
    member: U16,
    pub repaired: u8,
    flaw: u8,
    reserved: [u8; 4],
}
const _: () = assert!(size_of::<StoredPlace>() == 32);

impl StoredPlace {
    /// `member`: whose bytes were wrong, where that could be told.
    pub fn new(stripe: u64, (offset, len): (u64, u64), member: Option<u8>) -> StoredPlace {
        let member = member.map_or(NO_MEMBER, u16::from).into();
        let (stripe, offset, len) = (stripe.into(), offset.into(), len.into());
        StoredPlace { stripe, offset, len, member, ..StoredPlace::default() }
    }

    pub fn with_flaw(self, flaw: Flaw) -> StoredPlace {
        StoredPlace { flaw: flaw as u8, ..self }
    }

    pub fn member(&self) -> Option<u8> {
        u8::try_from(self.member.get()).ok()
    }

    pub fn flaw(&self) -> Result<Flaw, RecordError> {
        let known = Flaw::ALL.into_iter().find(|flaw| *flaw as u8 == self.flaw);
        known.ok_or(RecordError::Field("what was wrong at a place of the scrub"))
    }

    fn check(&self) -> Result<(), RecordError> {
        let member = self.member.get();
        let known = member == NO_MEMBER || usize::from(member) < MEMBERS_MAX;
        if !known || self.repaired > 1 || self.reserved != [0; 4] {
            return Err(RecordError::Field("a place of the scrub"));
        }
        self.flaw().map(|_| ())
    }
}

#[derive(Clone, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ScrubReport {
    pub header: Header,
    pub array: [u8; 16],
    /// As in the superblock's mark: of which scrub this is. In seconds since 1970.
    pub began: U64,
    /// Zero while it runs.
    pub ended: U64,
    /// What is counted was found in stripes below this one,
    pub next: U64,
    /// and not below this one: what was found there is not known.
    pub first: U64,
    pub mismatched_stripes: U64,
    /// Of these, stripes where it could not be told which chunk is wrong.
    pub undecided_stripes: U64,
    pub repaired_stripes: U64,
    pub unreadable_stripes: U64,
    /// Stripes with blocks that are lost until they are written again.
    pub bad_stripes: U64,
    pub phase: u8,
    /// 1: where it cannot be told what is wrong, it makes stripes agree.
    pub repairs: u8,
    pub place_count: u8,
    reserved_a: [u8; 5],
    /// Stripes in which a member's chunk was wrong.
    pub wrong: [U64; MEMBERS_MAX],
    pub places: [StoredPlace; PLACES_MAX],
    /// Stripes that agreed once blocks of them that could not be read, or did not fit their
    /// checksums, were worked out from the others.
    pub damaged_stripes: U64,
    reserved: [u8; 2904],
}
const _: () = assert!(size_of::<ScrubReport>() == 4096);
const _: () = assert!(std::mem::offset_of!(ScrubReport, phase) == 152);
const _: () = assert!(std::mem::offset_of!(ScrubReport, wrong) == 160);
const _: () = assert!(std::mem::offset_of!(ScrubReport, places) == 672);
const _: () = assert!(std::mem::offset_of!(ScrubReport, damaged_stripes) == 1184);

impl ScrubReport {
    pub const BYTES: u64 = size_of::<ScrubReport>() as u64;

    /// Of a scrub that has found nothing yet.
    pub fn new(array: [u8; 16], phase: Phase) -> ScrubReport {
        let mut report: ScrubReport = zerocopy::FromZeros::new_zeroed();
        (report.array, report.phase) = (array, phase as u8);
        report
    }

    /// Where it is on a member; `None`: there is no room for it.
    pub fn area(areas: &MemberLayout) -> Option<Area> {
        let (offset, len) = (areas.lease.end()?, SLOTS * Self::BYTES);
        (offset.checked_add(len)? <= areas.journal.offset).then_some(Area { offset, len })
    }

    pub fn phase(&self) -> Result<Phase, RecordError> {
        let mut all = Phase::ALL.into_iter();
        let known = all.find(|phase| *phase as u8 == self.phase);
        known.ok_or(RecordError::Field("phase of the scrub"))
    }

    /// The entries in use.
    pub fn places(&self) -> &[StoredPlace] {
        &self.places[..usize::from(self.place_count).min(PLACES_MAX)]
    }
}

impl Record for ScrubReport {
    const KIND: Kind = Kind::ScrubReport;
    const VERSION: u16 = VERSION;
    const UPGRADES: &'static [Upgrade] = &upgrade::SCRUB_REPORT_UPGRADES;

    fn header(&self) -> &Header {
        &self.header
    }

    fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    fn check(&self) -> Result<(), RecordError> {
        let running = self.phase()? == Phase::Running;
        if running && self.ended.get() != 0 || self.repairs > 1 {
            return Err(RecordError::Field("state of the scrub"));
        }
        if self.first.get() > self.next.get() {
            return Err(RecordError::Field("stripes of the scrub"));
        }
        if usize::from(self.place_count) > PLACES_MAX {
            return Err(RecordError::Field("count of the scrub's places"));
        }
        self.places().iter().try_for_each(StoredPlace::check)?;
        if self.reserved_a.iter().chain(&self.reserved).any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes"));
        }
        Ok(())
    }
}
