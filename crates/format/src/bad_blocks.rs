//! Blocks that are lost for good, until they are written again: one list, two slots, on every
//! member.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::record::{Header, Kind, Record, RecordError, Upgrade};
use crate::upgrade;

pub const VERSION: u16 = 1;
pub const SLOTS: u64 = 2;
/// Most ranges of the list.
pub const RANGES_MAX: usize = 1360;

/// Rows of one data chunk.
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
pub struct StoredBadRange {
    pub stripe: U64,
    /// First row, in bytes inside the chunk.
    pub row: U32,
    /// In bytes.
    pub len: U32,
    pub chunk: u8,
    /// 1: parity of these rows may not agree yet with what stands in place.
    pub unsettled: u8,
    reserved: [u8; 6],
}
const _: () = assert!(size_of::<StoredBadRange>() == 24);

impl StoredBadRange {
    pub fn new(stripe: u64, chunk: u8, row: u32, len: u32) -> StoredBadRange {
        let (row, len) = (U32::new(row), U32::new(len));
        StoredBadRange { stripe: stripe.into(), row, len, chunk, unsettled: 0, reserved: [0; 6] }
    }

    fn check(&self) -> Result<(), RecordError> {
        let whole = self.row.get().is_multiple_of(512) && self.len.get().is_multiple_of(512);
        let end = self.row.get().checked_add(self.len.get());
        let reserved = self.unsettled > 1 || self.reserved != [0; 6];
        if !whole || end.is_none() || self.len.get() == 0 || reserved {
            return Err(RecordError::Field("a bad range"));
        }
        Ok(())
    }
}

#[derive(Clone, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct BadBlocks {
    pub header: Header,
    pub array: [u8; 16],
    pub range_count: U32,
    reserved_a: [u8; 44],
    pub ranges: [StoredBadRange; RANGES_MAX],
}
const _: () = assert!(size_of::<BadBlocks>() == 32 << 10);
const _: () = assert!(std::mem::offset_of!(BadBlocks, ranges) == 128);

impl BadBlocks {
    pub const BYTES: u64 = size_of::<BadBlocks>() as u64;

    /// An empty list.
    pub fn empty(array: [u8; 16]) -> Box<BadBlocks> {
        let mut list: Box<BadBlocks> = zerocopy::FromZeros::new_box_zeroed().expect("32 KiB");
        list.array = array;
        list
    }

    /// The entries in use.
    pub fn ranges(&self) -> &[StoredBadRange] {
        &self.ranges[..(self.range_count.get() as usize).min(RANGES_MAX)]
    }
}

impl Record for BadBlocks {
    const KIND: Kind = Kind::BadBlocks;
    const VERSION: u16 = VERSION;
    const UPGRADES: &'static [Upgrade] = &upgrade::BAD_BLOCKS_UPGRADES;

    fn header(&self) -> &Header {
        &self.header
    }

    fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    fn check(&self) -> Result<(), RecordError> {
        if self.range_count.get() as usize > RANGES_MAX {
            return Err(RecordError::Field("count of bad ranges"));
        }
        for range in self.ranges() {
            range.check()?;
        }
        if self.reserved_a.iter().any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes"));
        }
        Ok(())
    }
}
