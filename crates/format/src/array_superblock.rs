//! What an array is and which of its members can be trusted: two slots on every member.
//!
//! Invariant: the superblock with the largest generation, on any member, decides. A member that
//! missed a write is marked in a newer generation on every trusted member before that write is
//! acknowledged; so an old superblock never makes a stale member look good.

use std::ops::Range;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::record::{self, Header, Kind, Record, RecordError, SEQUENCE_MAX, Upgrade};
use crate::region_map::{PAGES_MAX, REGIONS_PER_PAGE};
use crate::upgrade;

pub const VERSION: u16 = 7;
/// Most members of one array.
pub const MEMBERS_MAX: usize = 64;
/// Most stripes: with the smallest chunk, members of 64 TiB.
pub const STRIPES_MAX: u64 = 1 << 32;
/// Most stripes of a region: twice what the most stripes need, since regions double as an array
/// grows.
pub const REGION_STRIPES_MAX: u64 = 1 << 16;
const _: () = assert!(REGION_STRIPES_MAX >= 2 * STRIPES_MAX.div_ceil(PAGES_MAX * REGIONS_PER_PAGE));
/// Bytes of an array's name.
pub const NAME_BYTES: usize = 64;
/// Slots for superblocks on a member; generation `g` is written to slot `g % SLOTS`.
pub const SLOTS: u64 = 2;
/// Sequences of the journal's batches in one era, as a power of two.
pub const ERA_SEQUENCES_LOG2: u32 = 32;
/// Eras that a start of the array may use before a superblock says so.
pub const ERAS_PER_START: u64 = 2;
/// Eras that a start by force goes ahead: more than members that are away can have gone meanwhile,
/// so that they are the old ones when they are back.
pub const ERAS_PER_FORCE: u64 = 1 << 12;
/// Largest era: all sequences of the next start are believed.
pub const ERA_MAX: u64 = (SEQUENCE_MAX >> ERA_SEQUENCES_LOG2) - 2 * ERAS_PER_START;
/// Largest era that a start goes on from: what is beyond was made up. Behind it there is room for
/// what the start itself writes.
pub const ERA_BELIEVED_MAX: u64 = ERA_MAX - (ERAS_PER_FORCE << 12);

/// How redundant data is arranged. The number is on drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    Raid0 = 0,
    Raid1 = 1,
    Raid5 = 5,
    Raid6 = 6,
    /// Three parity chunks a stripe ("7.3").
    Raid7 = 7,
    Raid10 = 10,
    /// Stripes over groups, each of them a RAID 5.
    Raid50 = 50,
    Raid60 = 60,
    Raid70 = 70,
    /// Any number of parity chunks a stripe, up to [`PARITY_MAX`].
    RaidNm = 100,
}

/// Most parity chunks in a stripe.
pub const PARITY_MAX: u8 = 8;

impl Level {
    pub const ALL: [Level; 10] = [
        Level::Raid0,
        Level::Raid1,
        Level::Raid5,
        Level::Raid6,
        Level::Raid7,
        Level::Raid10,
        Level::Raid50,
        Level::Raid60,
        Level::Raid70,
        Level::RaidNm,
    ];

    pub fn from_number(number: u8) -> Option<Level> {
        Level::ALL.into_iter().find(|level| *level as u8 == number)
    }

    /// Parity chunks a stripe; `None` where that is free to choose.
    pub fn parity(self) -> Option<u8> {
        match self {
            Level::Raid0 | Level::Raid1 | Level::Raid10 => Some(0),
            Level::Raid5 | Level::Raid50 => Some(1),
            Level::Raid6 | Level::Raid60 => Some(2),
            Level::Raid7 | Level::Raid70 => Some(3),
            Level::RaidNm => None,
        }
    }

    pub fn is_mirrored(self) -> bool {
        matches!(self, Level::Raid1 | Level::Raid10)
    }

    /// Whether its members form groups that keep parity each for itself.
    pub fn is_grouped(self) -> bool {
        matches!(self, Level::Raid50 | Level::Raid60 | Level::Raid70)
    }
}

/// What is durable before a write is acknowledged. The number is on drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Policy {
    /// The region's dirty bit, then the write in place: resync of dirty regions after a crash.
    Bitmap = 0,
    /// A record with the data in the journals of as many members as may be lost, plus one.
    Journal = 1,
    /// The write in place: resync of everything after a crash.
    None = 2,
}

impl Policy {
    pub const ALL: [Policy; 3] = [Policy::Bitmap, Policy::Journal, Policy::None];

    fn from_number(number: u8) -> Option<Policy> {
        Policy::ALL.into_iter().find(|policy| *policy as u8 == number)
    }
}

/// What is known of one member's data.
///
/// ```text
///   Trusted ──missed a write──► Stale ──replaced or rebuilt──► Rebuilding ──all stripes──► Trusted
///                                 ▲────────missed a write─────────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum MemberState {
    /// Holds everything that was acknowledged.
    Trusted = 1,
    /// Missed a write; must not be read.
    Stale = 2,
    /// Stripes below `rebuilt_stripes`, and those in `rebuilt_ahead`, can be read.
    Rebuilding = 3,
}

impl MemberState {
    pub const ALL: [MemberState; 3] =
        [MemberState::Trusted, MemberState::Stale, MemberState::Rebuilding];

    fn from_number(number: u8) -> Option<MemberState> {
        MemberState::ALL.into_iter().find(|state| *state as u8 == number)
    }
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct StoredMember {
    pub drive: [u8; 16],
    pub state: u8,
    /// 1: of a member that is stale or rebuilding; all it may lack is in the maps of missed and of
    /// dirty regions, or in the journal.
    pub catches_up: u8,
    reserved: [u8; 2],
    /// Low half of the generation of the newest superblock that the member's own drive was asked to
    /// take: what comes back with one far beyond was used elsewhere.
    pub asked_generation: U32,
    /// Of a rebuilding member.
    pub rebuilt_stripes: U64,
}
const _: () = assert!(size_of::<StoredMember>() == 32);

impl StoredMember {
    pub fn new(drive: [u8; 16], state: MemberState, rebuilt_stripes: u64) -> StoredMember {
        let rebuilt_stripes = U64::new(rebuilt_stripes);
        StoredMember { drive, state: state as u8, rebuilt_stripes, ..StoredMember::default() }
    }

    fn check(&self) -> Result<(), RecordError> {
        let trusted = self.state()? == MemberState::Trusted;
        if self.catches_up > 1 || trusted && self.catches_up != 0 || self.reserved != [0; 2] {
            return Err(RecordError::Field("a member"));
        }
        Ok(())
    }

    pub fn state(&self) -> Result<MemberState, RecordError> {
        MemberState::from_number(self.state).ok_or(RecordError::Field("state of a member"))
    }
}

/// Stripes, none if both are zero.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct StoredRange {
    pub from: U64,
    /// Stripe after the last.
    pub to: U64,
}
const _: () = assert!(size_of::<StoredRange>() == 16);

impl StoredRange {
    pub fn new(stripes: &Range<u64>) -> StoredRange {
        StoredRange { from: stripes.start.into(), to: stripes.end.into() }
    }

    pub fn stripes(&self) -> Range<u64> {
        self.from.get()..self.to.get()
    }
}

/// What an operator can set. Zero everywhere but in `hedge_percent`: the default.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C)]
pub struct StoredSettings {
    /// Share of bandwidth for a rebuild.
    pub rebuild_percent: u8,
    /// Share of reads that may be answered by reconstruction when a member is slow.
    pub hedge_percent: u8,
    reserved: [u8; 3],
    /// Writes up to this many bytes are atomic; journal policy only.
    pub atomic_bytes: U32,
    /// A member may be away that long before a spare takes its place.
    pub spare_delay_s: U32,
    /// Between the beginnings of two scrubs.
    pub scrub_period_s: U32,
    reserved_b: [u8; 4],
}
const _: () = assert!(size_of::<StoredSettings>() == 21);

impl StoredSettings {
    fn check(&self) -> Result<(), RecordError> {
        if self.rebuild_percent > 100 || self.hedge_percent > 100 {
            return Err(RecordError::Field("a percentage"));
        }
        if !self.atomic_bytes.get().is_multiple_of(512) {
            return Err(RecordError::Field("atomic bytes"));
        }
        if self.reserved.iter().chain(&self.reserved_b).any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes of the settings"));
        }
        Ok(())
    }
}

#[derive(Clone, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ArraySuperblock {
    /// `sequence` is the array's generation.
    pub header: Header,
    pub array: [u8; 16],
    pub name: [u8; NAME_BYTES],
    pub level: u8,
    /// Copies of each data chunk: 1 for parity levels.
    pub copies: u8,
    /// Data chunks and parity chunks in a stripe.
    pub data_chunks: u8,
    pub parity_chunks: u8,
    pub member_count: U16,
    /// The member whose drive this superblock is on.
    pub member: U16,
    pub chunk_bytes: U32,
    /// Stripes covered by one bit of the dirty map.
    pub region_stripes: U32,
    pub stripes: U64,
    /// Every write since is in the stripe journal, in records of this sequence and later; zero
    /// while the array does not use the journal.
    pub journal_from: U64,
    pub members: [StoredMember; MEMBERS_MAX],
    pub policy: u8,
    /// Groups that keep parity each for itself; 1 but for grouped levels.
    pub groups: u8,
    /// 1: members keep a checksum of every block.
    pub integrity: u8,
    pub settings: StoredSettings,
    /// A scrub goes on from this stripe; zero when none is under way.
    pub scrub_next: U64,
    /// When the last scrub began, in seconds since 1970; zero: never.
    pub scrub_began: U64,
    /// Version 1's `journal_from`, of records that this version cannot store again.
    v1_journal_from: U64,
    /// Stripes below are of the shape above, the others have `old_data_chunks`. Zero but while
    /// members are being added.
    pub restriped: U64,
    /// Data chunks of a stripe before members were added; zero: all stripes have the same shape.
    pub old_data_chunks: u8,
    reserved_a: [u8; 7],
    /// Sequences of the journal, in every ring of the array, are below those of this era and of the
    /// next: `era + 2 << 32`. What counts them is not the generation: that grows a thousand times
    /// a second, and this with every start.
    pub era: U64,
    /// For each member the low half of the generation of a superblock that its own drive surely
    /// took: one that is older is a copy of before. Zero: unknown.
    pub sure_generations: [U32; MEMBERS_MAX],
    /// Stripes beyond its `rebuilt_stripes` that a rebuilding member holds, too: those that it and
    /// others lacked were filled first.
    pub rebuilt_ahead: [StoredRange; MEMBERS_MAX],
    /// A batch of this sequence is durable in the stripe journal. Its place is given to no other
    /// before a superblock is durable that names a later one, or none (zero). So after a crash it
    /// is found, or a later one.
    pub journal_newest: U64,
    reserved: [u8; 512],
}
const _: () = assert!(size_of::<ArraySuperblock>() == 4096);
const _: () = assert!(std::mem::offset_of!(ArraySuperblock, level) == 144);
const _: () = assert!(std::mem::offset_of!(ArraySuperblock, members) == 176);
const _: () = assert!(std::mem::offset_of!(ArraySuperblock, policy) == 2224);
const _: () = assert!(std::mem::offset_of!(ArraySuperblock, scrub_next) == 2248);
const _: () = assert!(std::mem::offset_of!(ArraySuperblock, restriped) == 2272);
const _: () = assert!(std::mem::offset_of!(ArraySuperblock, era) == 2288);
const _: () = assert!(std::mem::offset_of!(ArraySuperblock, sure_generations) == 2296);
const _: () = assert!(std::mem::offset_of!(ArraySuperblock, rebuilt_ahead) == 2552);
const _: () = assert!(std::mem::offset_of!(ArraySuperblock, journal_newest) == 3576);

impl ArraySuperblock {
    pub const BYTES: u64 = size_of::<ArraySuperblock>() as u64;

    /// Of two superblocks of one array, the older one is smaller. Members that the others went on
    /// without may have written more of them than those; but a later start has a larger era.
    pub fn age(&self) -> (u64, u64) {
        (self.era.get(), self.header.sequence.get())
    }

    /// All zero; the caller fills it in and seals it.
    pub fn blank() -> ArraySuperblock {
        zerocopy::FromZeros::new_zeroed()
    }

    pub fn level(&self) -> Result<Level, RecordError> {
        Level::from_number(self.level).ok_or(RecordError::Field("level"))
    }

    pub fn policy(&self) -> Result<Policy, RecordError> {
        Policy::from_number(self.policy).ok_or(RecordError::Field("policy"))
    }

    pub fn name(&self) -> Result<&str, RecordError> {
        record::name_from(&self.name)
    }

    /// The entries in use.
    pub fn members(&self) -> &[StoredMember] {
        let count = usize::from(self.member_count.get()).min(MEMBERS_MAX);
        &self.members[..count]
    }
}

impl Record for ArraySuperblock {
    const KIND: Kind = Kind::ArraySuperblock;
    const VERSION: u16 = VERSION;
    const UPGRADES: &'static [Upgrade] = &upgrade::ARRAY_SUPERBLOCK_UPGRADES;

    fn header(&self) -> &Header {
        &self.header
    }

    fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    fn check(&self) -> Result<(), RecordError> {
        let level = self.level()?;
        self.name()?;
        let count = self.member_count.get();
        self.policy()?;
        self.check_shape(level)?;
        if self.v1_journal_from.get() != 0 {
            return Err(RecordError::Field(
                "a stripe journal of version 1: start and stop the array with the build that \
                 wrote it",
            ));
        }
        if self.member.get() >= count {
            return Err(RecordError::Field("own member"));
        }
        let chunk = self.chunk_bytes.get();
        if !chunk.is_power_of_two() || !(16 << 10..=1 << 20).contains(&chunk) {
            return Err(RecordError::Field("chunk size"));
        }
        // Every group has as many stripes as the others, and one at least.
        let stripes = self.stripes.get();
        if !(1..=STRIPES_MAX).contains(&stripes) || !stripes.is_multiple_of(self.groups.into()) {
            return Err(RecordError::Field("stripes"));
        }
        let region = u64::from(self.region_stripes.get());
        if !(1..=REGION_STRIPES_MAX).contains(&region)
            || stripes.div_ceil(region) > PAGES_MAX * REGIONS_PER_PAGE
        {
            return Err(RecordError::Field("stripes a region"));
        }
        for (member, ahead) in self.members().iter().zip(&self.rebuilt_ahead) {
            member.check()?;
            let (rebuilt, ahead) = (member.rebuilt_stripes.get(), ahead.stripes());
            let apart = ahead == (0..0) || rebuilt < ahead.start && ahead.start < ahead.end;
            if rebuilt.max(ahead.end) > self.stripes.get() || !apart {
                return Err(RecordError::Field("rebuilt stripes"));
            }
        }
        self.settings.check()?;
        if self.integrity > 1 {
            return Err(RecordError::Field("integrity"));
        }
        if self.scrub_next.get() > self.stripes.get() {
            return Err(RecordError::Field("scrub"));
        }
        let moving = self.old_data_chunks > 0;
        let grows = self.old_data_chunks < self.data_chunks && self.groups == 1;
        if moving && !grows || self.restriped.get() > if moving { self.stripes.get() } else { 0 } {
            return Err(RecordError::Field("restriped"));
        }
        if self.era.get() > ERA_MAX {
            return Err(RecordError::Field("era"));
        }
        if self.reserved_a.iter().chain(&self.reserved).any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes"));
        }
        Ok(())
    }
}

impl ArraySuperblock {
    fn check_shape(&self, level: Level) -> Result<(), RecordError> {
        let (data, parity) = (u32::from(self.data_chunks), u32::from(self.parity_chunks));
        let (copies, groups) = (u32::from(self.copies), u32::from(self.groups));
        let wrong_parity = match level.parity() {
            Some(fixed) => self.parity_chunks != fixed,
            None => !(1..=PARITY_MAX).contains(&self.parity_chunks),
        };
        if data == 0 || copies == 0 || wrong_parity || copies > 1 && parity > 0 {
            return Err(RecordError::Field("chunks a stripe"));
        }
        if groups == 0 || (groups > 1) != level.is_grouped() {
            return Err(RecordError::Field("groups"));
        }
        let count = self.member_count.get();
        let is_all = u32::from(count) == groups * (data * copies + parity);
        if usize::from(count) > MEMBERS_MAX || !is_all {
            return Err(RecordError::Field("member count"));
        }
        Ok(())
    }
}

/// Version 1 knew no groups and no policy but the bitmap; its journal had other records.
pub(crate) fn v1_to_v2(bytes: &mut [u8]) {
    const FROM: usize = std::mem::offset_of!(ArraySuperblock, journal_from);
    const OLD: usize = std::mem::offset_of!(ArraySuperblock, v1_journal_from);
    bytes[std::mem::offset_of!(ArraySuperblock, groups)] = 1;
    bytes.copy_within(FROM..FROM + 8, OLD);
    bytes[FROM..FROM + 8].fill(0);
}

/// All stripes of version 2 have the same shape.
pub(crate) fn v2_to_v3(_bytes: &mut [u8]) {}

/// A start of version 3 took its sequences from the generation: each generation was an era.
pub(crate) fn v3_to_v4(bytes: &mut [u8]) {
    const FROM: usize = std::mem::offset_of!(Header, sequence);
    const TO: usize = std::mem::offset_of!(ArraySuperblock, era);
    bytes.copy_within(FROM..FROM + 8, TO);
}

/// What drives surely took, version 4 did not say.
pub(crate) fn v4_to_v5(_bytes: &mut [u8]) {}

/// Version 5 stored nothing of what was filled ahead.
pub(crate) fn v5_to_v6(_bytes: &mut [u8]) {}

/// Version 6 named no batch.
pub(crate) fn v6_to_v7(_bytes: &mut [u8]) {}
