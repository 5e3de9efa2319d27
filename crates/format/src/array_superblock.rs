//! What an array is and which of its members can be trusted: two slots on every member.
//!
//! Invariant: the superblock with the largest generation, on any member, decides. A member that
//! missed a write is marked in a newer generation on every trusted member before that write is
//! acknowledged; so an old superblock never makes a stale member look good.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::dirty_map::{PAGES_MAX, REGIONS_PER_PAGE};
use crate::record::{self, Header, Kind, Record, RecordError};

pub const VERSION: u16 = 1;
/// Most members of one array.
pub const MEMBERS_MAX: usize = 64;
/// Most stripes: with the smallest chunk, members of 64 TiB.
pub const STRIPES_MAX: u64 = 1 << 32;
/// Bytes of an array's name.
pub const NAME_BYTES: usize = 64;
/// Slots for superblocks on a member; generation `g` is written to slot `g % SLOTS`.
pub const SLOTS: u64 = 2;

/// How redundant data is arranged. The number is on drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    Raid0 = 0,
    Raid1 = 1,
    Raid5 = 5,
    Raid6 = 6,
    Raid10 = 10,
}

impl Level {
    pub const ALL: [Level; 5] =
        [Level::Raid0, Level::Raid1, Level::Raid5, Level::Raid6, Level::Raid10];

    pub fn from_number(number: u8) -> Option<Level> {
        Level::ALL.into_iter().find(|level| *level as u8 == number)
    }

    /// Parity chunks a stripe.
    pub fn parity(self) -> u8 {
        match self {
            Level::Raid0 | Level::Raid1 | Level::Raid10 => 0,
            Level::Raid5 => 1,
            Level::Raid6 => 2,
        }
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
    /// Stripes below `rebuilt_stripes` can be read.
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
    reserved: [u8; 7],
    pub rebuilt_stripes: U64,
}
const _: () = assert!(size_of::<StoredMember>() == 32);

impl StoredMember {
    pub fn new(drive: [u8; 16], state: MemberState, rebuilt_stripes: u64) -> StoredMember {
        let rebuilt_stripes = U64::new(rebuilt_stripes);
        StoredMember { drive, state: state as u8, reserved: [0; 7], rebuilt_stripes }
    }

    pub fn state(&self) -> Result<MemberState, RecordError> {
        MemberState::from_number(self.state).ok_or(RecordError::Field("state of a member"))
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
    reserved: [u8; 1872],
}
const _: () = assert!(size_of::<ArraySuperblock>() == 4096);
const _: () = assert!(std::mem::offset_of!(ArraySuperblock, level) == 144);
const _: () = assert!(std::mem::offset_of!(ArraySuperblock, members) == 176);

impl ArraySuperblock {
    pub const BYTES: u64 = size_of::<ArraySuperblock>() as u64;

    /// All zero; the caller fills it in and seals it.
    pub fn blank() -> ArraySuperblock {
        zerocopy::FromZeros::new_zeroed()
    }

    pub fn level(&self) -> Result<Level, RecordError> {
        Level::from_number(self.level).ok_or(RecordError::Field("level"))
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
        let (data, parity) = (u16::from(self.data_chunks), u16::from(self.parity_chunks));
        let copies = u16::from(self.copies);
        if data == 0
            || copies == 0
            || parity != u16::from(level.parity())
            || copies > 1 && parity > 0
        {
            return Err(RecordError::Field("chunks a stripe"));
        }
        if usize::from(count) > MEMBERS_MAX || count != data * copies + parity {
            return Err(RecordError::Field("member count"));
        }
        if self.member.get() >= count {
            return Err(RecordError::Field("own member"));
        }
        let chunk = self.chunk_bytes.get();
        if !chunk.is_power_of_two() || !(16 << 10..=1 << 20).contains(&chunk) {
            return Err(RecordError::Field("chunk size"));
        }
        if self.stripes.get() > STRIPES_MAX {
            return Err(RecordError::Field("stripes"));
        }
        let region = u64::from(self.region_stripes.get());
        if region == 0 || self.stripes.get().div_ceil(region) > PAGES_MAX * REGIONS_PER_PAGE {
            return Err(RecordError::Field("stripes a region"));
        }
        for member in self.members() {
            member.state()?;
            if member.rebuilt_stripes.get() > self.stripes.get() {
                return Err(RecordError::Field("rebuilt stripes"));
            }
        }
        if self.reserved.iter().any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes"));
        }
        Ok(())
    }
}
