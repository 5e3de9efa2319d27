//! What is on the drives, read without the engine: the truth that checkers and the fault budget
//! compare with. Dead drives are read, too.

use ashlar_format::array_superblock::{ArraySuperblock, SLOTS};
use ashlar_format::drive_label::DriveLabel;
use ashlar_format::record;
use ashlar_format::region_map::{self, MapKind, RegionMapPage};
use ashlar_raid::label;

use crate::drive::SimDrive;

/// The newest superblock of one drive.
pub fn superblock(drive: &SimDrive) -> Option<ArraySuperblock> {
    let home = label::plan(drive.traits.bytes)?.superblocks.offset;
    let slots = (0..SLOTS).filter_map(|slot| {
        let at = home + slot * ArraySuperblock::BYTES;
        let bytes = drive.peek(at, size_of::<ArraySuperblock>());
        record::open::<ArraySuperblock>(&bytes, Some(owner(drive)?), at).ok().cloned()
    });
    slots.max_by_key(|superblock| superblock.header.sequence.get())
}

/// The uuid in the drive's label.
pub fn owner(drive: &SimDrive) -> Option<[u8; 16]> {
    let mut homes = DriveLabel::homes(drive.traits.bytes).into_iter();
    homes.find_map(|home| {
        let bytes = drive.peek(home, size_of::<DriveLabel>());
        Some(record::open::<DriveLabel>(&bytes, None, home).ok()?.header.owner)
    })
}

/// The first page of a map of one drive: the only one, on drives this small.
fn map_page(kind: MapKind, drive: &SimDrive) -> Option<RegionMapPage> {
    let area = label::map_area(&label::plan(drive.traits.bytes)?, kind).offset;
    let slots = (0..region_map::SLOTS).filter_map(|slot| {
        let home = area + RegionMapPage::slot_offset(0, slot);
        let bytes = drive.peek(home, size_of::<RegionMapPage>());
        record::open::<RegionMapPage>(&bytes, Some(owner(drive)?), home).ok().cloned()
    });
    slots.max_by_key(|page| page.header.sequence.get())
}

/// The page of a map that decides among these drives.
pub fn newest_page<'a>(
    kind: MapKind,
    drives: impl Iterator<Item = &'a SimDrive>,
) -> Option<RegionMapPage> {
    drives.filter_map(|drive| map_page(kind, drive)).max_by_key(|page| page.header.sequence.get())
}

/// The superblock that decides among these drives.
pub fn newest<'a>(drives: impl Iterator<Item = &'a SimDrive>) -> Option<ArraySuperblock> {
    drives.filter_map(superblock).max_by_key(|superblock| superblock.header.sequence.get())
}

/// Copies of the label that do not open.
pub fn bad_labels(drive: &SimDrive) -> usize {
    let homes = DriveLabel::homes(drive.traits.bytes).into_iter();
    let bad = homes.filter(|home| {
        let bytes = drive.peek(*home, size_of::<DriveLabel>());
        record::open::<DriveLabel>(&bytes, None, *home).is_err()
    });
    bad.count()
}
