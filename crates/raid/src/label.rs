//! Labels: planned, written when a drive joins an array, read when arrays are put together.

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_format::array_superblock::{ArraySuperblock, SLOTS};
use ashlar_format::bad_blocks::{self, BadBlocks};
use ashlar_format::block_sums;
use ashlar_format::drive_label::{DriveLabel, MemberLayout};
use ashlar_format::journal_batch::ring_bytes_min;
use ashlar_format::lease::{self, Lease};
use ashlar_format::record::{self, Record};
use ashlar_format::region_map::{self, MapKind, PAGES_MAX, RegionMapPage};
use ashlar_format::units::{Area, to_usize};
use ashlar_format::volume_table::VolumeTable;
use ashlar_reactor::executor::Reactor;

const SUPERBLOCKS_AT: u64 = 64 << 10;
const DIRTY_MAP_AT: u64 = 128 << 10;
const WRITTEN_MAP_AT: u64 = 192 << 10;
const VOLUME_TABLE_AT: u64 = 256 << 10;
const MISSED_MAP_AT: u64 = 576 << 10;
const BAD_BLOCKS_AT: u64 = 640 << 10;
const LEASE_AT: u64 = 704 << 10;
const JOURNAL_AT: u64 = 1 << 20;
const AREA_ALIGN: u64 = 1 << 20;
/// The journal takes a 16th of a drive; not more than this, since all of it is read after a crash,
/// and twice as much may be pending in memory; nor less than it needs.
const JOURNAL_BYTES_MAX: u64 = 128 << 20;
const DATA_BYTES_MIN: u64 = 1 << 20;
/// Kept free before the last label copy.
const TAIL_BYTES: u64 = 64 << 10;

const MAP_BYTES: u64 = PAGES_MAX * region_map::SLOTS * RegionMapPage::BYTES;
const BAD_BLOCKS_BYTES: u64 = bad_blocks::SLOTS * BadBlocks::BYTES;
const LEASE_BYTES: u64 = lease::SLOTS * Lease::BYTES;
const _: () = assert!(SUPERBLOCKS_AT >= 2 * DriveLabel::BYTES);
const _: () = assert!(SUPERBLOCKS_AT + SLOTS * ArraySuperblock::BYTES <= DIRTY_MAP_AT);
const _: () = assert!(DIRTY_MAP_AT + MAP_BYTES <= WRITTEN_MAP_AT);
const _: () = assert!(WRITTEN_MAP_AT + MAP_BYTES <= VOLUME_TABLE_AT);
const _: () = assert!(VOLUME_TABLE_AT + 2 * VolumeTable::BYTES <= MISSED_MAP_AT);
const _: () = assert!(MISSED_MAP_AT + MAP_BYTES <= BAD_BLOCKS_AT);
const _: () = assert!(BAD_BLOCKS_AT + BAD_BLOCKS_BYTES <= LEASE_AT);
const _: () = assert!(LEASE_AT + LEASE_BYTES <= JOURNAL_AT);

/// Smallest drive that holds anything.
pub const DRIVE_BYTES_MIN: u64 = 8 << 20;

/// Where things go on a drive of `drive_bytes`, member of an array with so many parity chunks;
/// `None` if it is too small.
pub fn plan(drive_bytes: u64, parity: u8) -> Option<MemberLayout> {
    let journal = (drive_bytes / 16).min(JOURNAL_BYTES_MAX).max(ring_bytes_min(parity));
    plan_with(drive_bytes, journal.next_multiple_of(AREA_ALIGN))
}

/// The same with a journal of this size.
fn plan_with(drive_bytes: u64, journal: u64) -> Option<MemberLayout> {
    let data_at = JOURNAL_AT + journal;
    if drive_bytes < DRIVE_BYTES_MIN || drive_bytes < data_at + DATA_BYTES_MIN + TAIL_BYTES {
        return None;
    }
    Some(MemberLayout {
        superblocks: Area { offset: SUPERBLOCKS_AT, len: SLOTS * ArraySuperblock::BYTES },
        dirty_map: Area { offset: DIRTY_MAP_AT, len: MAP_BYTES },
        written_map: Area { offset: WRITTEN_MAP_AT, len: MAP_BYTES },
        volume_table: Area { offset: VOLUME_TABLE_AT, len: 2 * VolumeTable::BYTES },
        missed_map: Area { offset: MISSED_MAP_AT, len: MAP_BYTES },
        bad_blocks: Area { offset: BAD_BLOCKS_AT, len: BAD_BLOCKS_BYTES },
        lease: Area { offset: LEASE_AT, len: LEASE_BYTES },
        journal: Area { offset: JOURNAL_AT, len: journal },
        integrity: Area { offset: data_at, len: 0 },
        data: Area { offset: data_at, len: drive_bytes - TAIL_BYTES - data_at },
    })
}

/// The same for a member that may keep checksums of its blocks: they stand before the data.
pub fn plan_for(drive_bytes: u64, parity: u8, integrity: bool) -> Option<MemberLayout> {
    plan(drive_bytes, parity).and_then(|areas| with_sums(areas, integrity))
}

/// The same for a drive that takes the place of one with this journal, beside so many bytes of
/// data: that of a drive of its own size may leave less, where the other's was planned otherwise.
pub(crate) fn plan_in_place_of(
    drive_bytes: u64,
    (parity, integrity): (u8, bool),
    journal: u64,
    data: u64,
) -> Option<MemberLayout> {
    let fits = |areas: &MemberLayout| areas.data.len >= data;
    plan_for(drive_bytes, parity, integrity).filter(fits).or_else(|| {
        let areas = plan_with(drive_bytes, journal.max(ring_bytes_min(parity)))?;
        with_sums(areas, integrity).filter(fits)
    })
}

fn with_sums(mut areas: MemberLayout, integrity: bool) -> Option<MemberLayout> {
    if !integrity {
        return Some(areas);
    }
    let len = block_sums::area_bytes(areas.data.len).next_multiple_of(AREA_ALIGN);
    areas.integrity.len = len;
    areas.data.offset += len;
    areas.data.len = areas.data.len.checked_sub(len).filter(|left| *left >= DATA_BYTES_MIN)?;
    Some(areas)
}

/// Where a map of regions is on a member.
pub fn map_area(areas: &MemberLayout, kind: MapKind) -> Area {
    match kind {
        MapKind::Dirty => areas.dirty_map,
        MapKind::Written => areas.written_map,
        MapKind::Missed => areas.missed_map,
    }
}

/// What of so many bytes of a drive is used.
pub(crate) fn whole_blocks(bytes: u64) -> u64 {
    bytes / 4096 * 4096
}

/// The usable size of a drive: whole 4 KiB blocks.
pub fn usable_bytes(drive: &Drive) -> u64 {
    whole_blocks(drive.limits().bytes)
}

/// A drive's label, opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    pub drive_uuid: [u8; 16],
    pub array: [u8; 16],
    pub layout: MemberLayout,
}

/// Data bytes whose checksums fit in the areas.
pub fn sums_for(areas: &MemberLayout) -> u64 {
    block_sums::blocks_in(areas.integrity.len).saturating_mul(block_sums::BLOCK_BYTES.into())
}

/// The same areas, and all that a larger drive has beyond them for data.
pub fn extend(areas: MemberLayout, drive_bytes: u64) -> MemberLayout {
    let room = room_for_data(&areas, drive_bytes);
    // A block without room for its checksum is of no use.
    let room = if lacks_sums(&areas, drive_bytes) { sums_for(&areas) } else { room };
    let len = room.max(areas.data.len);
    MemberLayout { data: Area { len, ..areas.data }, ..areas }
}

/// Whether the drive has room for more blocks than for their checksums.
pub fn lacks_sums(areas: &MemberLayout, drive_bytes: u64) -> bool {
    areas.integrity.len > 0 && room_for_data(areas, drive_bytes) > sums_for(areas)
}

fn room_for_data(areas: &MemberLayout, drive_bytes: u64) -> u64 {
    drive_bytes.saturating_sub(TAIL_BYTES).saturating_sub(areas.data.offset)
}

/// Where the last copy of the label with these areas is.
pub fn last_home(areas: &MemberLayout) -> u64 {
    areas.data.range().end + TAIL_BYTES - DriveLabel::BYTES
}

/// Writes every copy of a label, one after the other, so that a crash leaves some that open: the
/// old ones or the new ones. Durable when this returns.
pub async fn write(
    reactor: &Reactor,
    drive: &Rc<Drive>,
    label: &Label,
    member: u32,
) -> Result<(), DriveError> {
    for home in DriveLabel::homes(usable_bytes(drive)) {
        write_copy(reactor, drive, label, member, home).await?;
    }
    Ok(())
}

async fn write_copy(
    reactor: &Reactor,
    drive: &Rc<Drive>,
    label: &Label,
    member: u32,
    home: u64,
) -> Result<(), DriveError> {
    let mut copy = DriveLabel::new(label.array, member, usable_bytes(drive), &label.layout);
    write_record(reactor, drive, &mut copy, label.drive_uuid, home, 1).await?;
    drive.flush().await
}

/// The first copy that opens; `None` if none does.
pub async fn read(reactor: &Reactor, drive: &Rc<Drive>) -> Result<Option<Label>, DriveError> {
    for home in DriveLabel::homes(usable_bytes(drive)) {
        match read_copy(reactor, drive, home).await {
            Ok(None) | Err(DriveError::Media) => {}
            found => return found,
        }
    }
    Ok(None)
}

async fn read_copy(
    reactor: &Reactor,
    drive: &Rc<Drive>,
    home: u64,
) -> Result<Option<Label>, DriveError> {
    let mut bytes = read_bytes(reactor, drive, home, DriveLabel::BYTES).await?;
    record::upgrade::<DriveLabel>(&mut bytes);
    let opened = record::open::<DriveLabel>(&bytes, None, home).ok();
    let fits = opened.filter(|label| label.drive_bytes.get() <= usable_bytes(drive));
    Ok(fits.map(|label| {
        let (drive_uuid, array, layout) = (label.header.owner, label.array, label.layout());
        Label { drive_uuid, array, layout }
    }))
}

/// What stands where a drive begins.
pub(crate) enum Front {
    /// A copy of its label.
    Label,
    /// Something else. No crash does that: copies are written one after the other.
    Foreign,
    /// Nothing there can be read.
    Unreadable,
}

pub(crate) async fn front(reactor: &Reactor, drive: &Rc<Drive>) -> Front {
    let [first, second, _] = DriveLabel::homes(usable_bytes(drive));
    let mut front = Front::Unreadable;
    for home in [first, second] {
        match read_copy(reactor, drive, home).await {
            Ok(Some(_)) => return Front::Label,
            Ok(None) => front = Front::Foreign,
            Err(_) => {}
        }
    }
    front
}

/// Whether some copy can be read, whatever it says.
pub async fn answers(reactor: &Reactor, drive: &Rc<Drive>) -> bool {
    for home in DriveLabel::homes(usable_bytes(drive)) {
        match read_bytes(reactor, drive, home, DriveLabel::BYTES).await {
            Ok(_) => return true,
            Err(DriveError::Media) => {}
            Err(_) => return false,
        }
    }
    false
}

/// Writes those copies again that do not open, or say something else: a crash came between them, or
/// one cannot be read. One that opens is not touched before those that do not are there again: a
/// crash may tear it.
pub async fn heal(
    reactor: &Reactor,
    drive: &Rc<Drive>,
    label: &Label,
    member: u32,
) -> Result<(), DriveError> {
    let mut wrong = Vec::new();
    for home in DriveLabel::homes(usable_bytes(drive)) {
        let copy = read_copy(reactor, drive, home).await.ok().flatten();
        if copy.as_ref() != Some(label) {
            wrong.push((copy.is_some(), home));
        }
    }
    wrong.sort_unstable();
    for (_, home) in wrong {
        write_copy(reactor, drive, label, member, home).await?;
    }
    Ok(())
}

/// Seals `record` for its drive and place and writes it. Not flushed.
pub async fn write_record<T: Record>(
    reactor: &Reactor,
    drive: &Rc<Drive>,
    record: &mut T,
    drive_uuid: [u8; 16],
    home: u64,
    sequence: u64,
) -> Result<(), DriveError> {
    // It would take the place of one that opens, and never open itself.
    assert!(record.check().is_ok(), "{:?} of its own making", record.check());
    record::seal(record, drive_uuid, home, sequence);
    let buffer = reactor.buffer(size_of::<T>());
    buffer.copy_from_slice(record.as_bytes());
    drive.write(home, buffer.into()).await
}

/// `len` bytes at `offset`.
pub async fn read_bytes(
    reactor: &Reactor,
    drive: &Rc<Drive>,
    offset: u64,
    len: u64,
) -> Result<Vec<u8>, DriveError> {
    let buffer = reactor.buffer(to_usize(len));
    drive.read(offset, buffer.clone().into()).await?;
    let mut bytes = Vec::new();
    buffer.append_to(&mut bytes);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_fit_their_drives() {
        assert!(plan(DRIVE_BYTES_MIN - 1, 0).is_none());
        for bytes in [DRIVE_BYTES_MIN, 64 << 20, 2 << 30, 30 << 40] {
            let layout = plan(bytes, 1).unwrap();
            DriveLabel::new([0; 16], 0, bytes, &layout).check().unwrap();
            assert!(layout.data.len > bytes / 2);
            assert_eq!(last_home(&layout), DriveLabel::homes(bytes)[2]);
            assert_eq!(extend(layout, bytes), layout);
            let larger = extend(layout, 3 * bytes);
            DriveLabel::new([0; 16], 0, 3 * bytes, &larger).check().unwrap();
            assert_eq!(larger.data.len, layout.data.len + 2 * bytes);
        }
    }

    #[test]
    fn a_drive_takes_the_place_of_one_of_its_size() {
        for (bytes, integrity) in [(512 << 20, false), (4 << 30, false), (4 << 30, true)] {
            // As drives were planned before: a 64th of them is the journal.
            let old = with_sums(plan_with(bytes, bytes / 64).unwrap(), integrity).unwrap();
            assert!(plan_for(bytes, 1, integrity).unwrap().data.len < old.data.len);
            let place =
                |bytes: u64| plan_in_place_of(bytes, (1, integrity), old.journal.len, old.data.len);
            assert_eq!(place(bytes).unwrap().data.len, old.data.len);
            assert_eq!(place(bytes - AREA_ALIGN), None);
            assert_eq!(place(2 * bytes), plan_for(2 * bytes, 1, integrity), "with room for more");
        }
    }

    #[test]
    fn checksums_have_room_for_all_data() {
        for bytes in [DRIVE_BYTES_MIN, 64 << 20, 2 << 30, 30 << 40] {
            let layout = plan_for(bytes, 1, true).unwrap();
            DriveLabel::new([0; 16], 0, bytes, &layout).check().unwrap();
            assert!(layout.integrity.len >= block_sums::area_bytes(layout.data.len));
            let plain = plan(bytes, 1).unwrap().data.len;
            // 4.27 bytes of 4096.
            assert!(plain - layout.data.len <= plain / 950 + AREA_ALIGN);
        }
    }
}
