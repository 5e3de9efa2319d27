//! Which array a drive belongs to, and where things are on it.
//!
//! Written when a drive joins an array and not changed while it is a member. Two copies stand at
//! the front, one at the end; the first that opens is enough. See `docs/FORMAT.md`.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::record::{Header, Kind, Record, RecordError};
use crate::units::Area;

pub const VERSION: u16 = 1;

/// Least bytes of each area, in the order of [`MemberLayout::areas`].
const AREA_BYTES_MIN: [u64; 5] = [8 << 10, 64 << 10, 264 << 10, 1 << 20, 16 << 10];
/// A journal is read whole after a crash.
pub const JOURNAL_BYTES_MAX: u64 = 1 << 30;

/// A byte range of this drive, as stored.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct StoredArea {
    pub offset: U64,
    pub len: U64,
}

impl From<Area> for StoredArea {
    fn from(area: Area) -> StoredArea {
        StoredArea { offset: U64::new(area.offset), len: U64::new(area.len) }
    }
}

impl From<StoredArea> for Area {
    fn from(stored: StoredArea) -> Area {
        Area { offset: stored.offset.get(), len: stored.len.get() }
    }
}

#[derive(Clone, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DriveLabel {
    pub header: Header,
    pub array: [u8; 16],
    /// Bytes of the drive that the layout uses; the last label copy ends here.
    pub drive_bytes: U64,
    /// The member index this drive had when it was labelled.
    pub member: U32,
    reserved_a: [u8; 4],
    pub superblocks: StoredArea,
    pub dirty_map: StoredArea,
    pub volume_table: StoredArea,
    pub journal: StoredArea,
    pub data: StoredArea,
    reserved: [u8; 3920],
}
const _: () = assert!(size_of::<DriveLabel>() == 4096);
const _: () = assert!(std::mem::offset_of!(DriveLabel, superblocks) == 96);
const _: () = assert!(std::mem::offset_of!(DriveLabel, reserved) == 176);

impl DriveLabel {
    pub const BYTES: u64 = size_of::<DriveLabel>() as u64;

    pub fn new(array: [u8; 16], member: u32, drive_bytes: u64, layout: &MemberLayout) -> Self {
        DriveLabel {
            header: Header::default(),
            array,
            drive_bytes: U64::new(drive_bytes),
            member: U32::new(member),
            reserved_a: [0; 4],
            superblocks: layout.superblocks.into(),
            dirty_map: layout.dirty_map.into(),
            volume_table: layout.volume_table.into(),
            journal: layout.journal.into(),
            data: layout.data.into(),
            reserved: [0; 3920],
        }
    }

    pub fn layout(&self) -> MemberLayout {
        MemberLayout {
            superblocks: self.superblocks.into(),
            dirty_map: self.dirty_map.into(),
            volume_table: self.volume_table.into(),
            journal: self.journal.into(),
            data: self.data.into(),
        }
    }

    /// Where the copies of a label are on a drive of `drive_bytes`.
    pub fn homes(drive_bytes: u64) -> [u64; 3] {
        [0, Self::BYTES, drive_bytes.saturating_sub(Self::BYTES)]
    }
}

impl Record for DriveLabel {
    const KIND: Kind = Kind::DriveLabel;
    const VERSION: u16 = VERSION;

    fn header(&self) -> &Header {
        &self.header
    }

    fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    fn check(&self) -> Result<(), RecordError> {
        let areas = self.layout().areas();
        let mut end = 2 * Self::BYTES;
        for area in areas {
            if area.offset < end || !area.offset.is_multiple_of(4096) {
                return Err(RecordError::Field("areas overlap or are not aligned"));
            }
            end = area.end().ok_or(RecordError::Field("an area's end"))?;
        }
        let lengths = areas.map(|area| area.len);
        if lengths.iter().zip(AREA_BYTES_MIN).any(|(len, least)| *len < least)
            || lengths[3] > JOURNAL_BYTES_MAX
        {
            return Err(RecordError::Field("length of an area"));
        }
        if end.checked_add(Self::BYTES).is_none_or(|end| end > self.drive_bytes.get()) {
            return Err(RecordError::Field("areas exceed the drive"));
        }
        let reserved = self.reserved_a.iter().chain(&self.reserved);
        if reserved.into_iter().any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes"));
        }
        Ok(())
    }
}

/// Where things are on one member. All in bytes, all multiples of 4 KiB, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberLayout {
    pub superblocks: Area,
    pub dirty_map: Area,
    pub volume_table: Area,
    /// The stripe journal.
    pub journal: Area,
    pub data: Area,
}

impl MemberLayout {
    pub fn areas(&self) -> [Area; 5] {
        [self.superblocks, self.dirty_map, self.volume_table, self.journal, self.data]
    }
}
