//! Which array a drive belongs to, and where things are on it.
//!
//! Written when a drive joins an array and not changed while it is a member. Two copies stand at
//! the front, one at the end; the first that opens is enough. See `docs/FORMAT.md`.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::record::{Header, Kind, Record, RecordError, Upgrade};
use crate::units::Area;
use crate::upgrade;

pub const VERSION: u16 = 2;

/// Areas on one member.
const AREAS: usize = 10;
/// Least bytes of each area, in the order of [`MemberLayout::areas`].
const AREA_BYTES_MIN: [u64; AREAS] =
    [8 << 10, 64 << 10, 64 << 10, 264 << 10, 64 << 10, 64 << 10, 8 << 10, 1 << 20, 0, 16 << 10];
/// Where version 1 left space for what version 2 brought: offset and length in bytes.
const V2_AREAS: [(u64, u64); 4] =
    [(192 << 10, 64 << 10), (576 << 10, 64 << 10), (640 << 10, 64 << 10), (704 << 10, 8 << 10)];
/// A journal is read whole after a crash.
pub const JOURNAL_BYTES_MAX: u64 = 1 << 30;
/// Maps, volume table, bad blocks and lease are each read whole, and at once: no build made any of
/// them longer than 264 KiB.
pub const METADATA_BYTES_MAX: u64 = 1 << 20;

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
    pub written_map: StoredArea,
    pub volume_table: StoredArea,
    pub missed_map: StoredArea,
    pub bad_blocks: StoredArea,
    pub lease: StoredArea,
    pub journal: StoredArea,
    pub integrity: StoredArea,
    pub data: StoredArea,
    reserved: [u8; 3840],
}
const _: () = assert!(size_of::<DriveLabel>() == 4096);
const _: () = assert!(std::mem::offset_of!(DriveLabel, superblocks) == 96);
const _: () = assert!(std::mem::offset_of!(DriveLabel, reserved) == 256);

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
            written_map: layout.written_map.into(),
            volume_table: layout.volume_table.into(),
            missed_map: layout.missed_map.into(),
            bad_blocks: layout.bad_blocks.into(),
            lease: layout.lease.into(),
            journal: layout.journal.into(),
            integrity: layout.integrity.into(),
            data: layout.data.into(),
            reserved: [0; 3840],
        }
    }

    pub fn layout(&self) -> MemberLayout {
        MemberLayout {
            superblocks: self.superblocks.into(),
            dirty_map: self.dirty_map.into(),
            written_map: self.written_map.into(),
            volume_table: self.volume_table.into(),
            missed_map: self.missed_map.into(),
            bad_blocks: self.bad_blocks.into(),
            lease: self.lease.into(),
            journal: self.journal.into(),
            integrity: self.integrity.into(),
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
    const UPGRADES: &'static [Upgrade] = &upgrade::DRIVE_LABEL_UPGRADES;

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
        // All but superblocks, journal, checksums and data.
        let [_, at_once @ .., _, _, _] = areas;
        if lengths.iter().zip(AREA_BYTES_MIN).any(|(len, least)| *len < least)
            || at_once.iter().any(|area| area.len > METADATA_BYTES_MAX)
            || self.layout().journal.len > JOURNAL_BYTES_MAX
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
    /// Which regions were ever written.
    pub written_map: Area,
    pub volume_table: Area,
    /// Which regions were written while a member was away.
    pub missed_map: Area,
    pub bad_blocks: Area,
    pub lease: Area,
    pub journal: Area,
    /// Checksums of blocks; empty where the array keeps none.
    pub integrity: Area,
    pub data: Area,
}

impl MemberLayout {
    pub fn areas(&self) -> [Area; AREAS] {
        [
            self.superblocks,
            self.dirty_map,
            self.written_map,
            self.volume_table,
            self.missed_map,
            self.bad_blocks,
            self.lease,
            self.journal,
            self.integrity,
            self.data,
        ]
    }
}

/// Version 1 had superblocks, dirty map, volume table, journal and data, in this order.
pub(crate) fn v1_to_v2(bytes: &mut [u8]) {
    const AREAS_AT: usize = std::mem::offset_of!(DriveLabel, superblocks);
    const AREA: usize = size_of::<StoredArea>();
    let old = |index: usize| -> [u8; AREA] {
        let at = AREAS_AT + index * AREA;
        let mut area = [0; AREA];
        area.copy_from_slice(&bytes[at..at + AREA]);
        area
    };
    let [written, missed, bad, lease] = V2_AREAS.map(|(offset, len)| {
        let mut area = [0; AREA];
        area[..8].copy_from_slice(&offset.to_le_bytes());
        area[8..].copy_from_slice(&len.to_le_bytes());
        area
    });
    let mut no_integrity = [0; AREA];
    no_integrity[..8].copy_from_slice(&old(4)[..8]);
    let areas = [old(0), old(1), written, old(2), missed, bad, lease, old(3), no_integrity, old(4)];
    bytes[AREAS_AT..AREAS_AT + AREAS * AREA].copy_from_slice(areas.as_flattened());
}
