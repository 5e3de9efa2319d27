//! What is on the drives, read without the engine: the truth that checkers and the fault budget
//! compare with. Dead drives are read, too.

use std::collections::BTreeSet;

use ashlar_format::array_superblock::{ArraySuperblock, SLOTS};
use ashlar_format::bad_blocks::{self, BadBlocks};
use ashlar_format::drive_label::DriveLabel;
use ashlar_format::lease::{self, Lease};
use ashlar_format::record;
use ashlar_format::region_map::{self, MapKind, RegionMapPage};
use ashlar_format::units::{Area, StripeIndex, to_usize};
use ashlar_raid::label;
use ashlar_raid::layout::Layout;
use ashlar_raid::parity::{Kernels, PARITY_CHUNKS_MAX};
use smallvec::SmallVec;

use crate::drive::{BLOCK_BYTES, Block, SimDrive, ZEROES};

/// The newest superblock of one drive.
pub fn superblock(drive: &SimDrive) -> Option<ArraySuperblock> {
    let home = label::plan(drive.traits.bytes, 0)?.superblocks.offset;
    let owner = owner(drive)?;
    let slots = (0..SLOTS).filter_map(|slot| {
        let at = home + slot * ArraySuperblock::BYTES;
        let bytes = drive.peek(at, size_of::<ArraySuperblock>());
        record::open::<ArraySuperblock>(&bytes, Some(owner), at).ok().cloned()
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

/// Of the newest lease on a drive; 0: there is none.
pub fn epoch(drive: &SimDrive) -> u64 {
    let Some((areas, owner)) = label::plan(drive.traits.bytes, 0).zip(owner(drive)) else {
        return 0;
    };
    let epochs = (0..lease::SLOTS).filter_map(|slot| {
        let home = areas.lease.offset + slot * Lease::BYTES;
        let bytes = drive.peek(home, size_of::<Lease>());
        Some(record::open::<Lease>(&bytes, Some(owner), home).ok()?.epoch.get())
    });
    epochs.max().unwrap_or(0)
}

/// The first page of a map of one drive: the only one, on drives this small.
fn map_page(kind: MapKind, drive: &SimDrive) -> Option<RegionMapPage> {
    let area = label::map_area(&label::plan(drive.traits.bytes, 0)?, kind).offset;
    let owner = owner(drive)?;
    let slots = (0..region_map::SLOTS).filter_map(|slot| {
        let home = area + RegionMapPage::slot_offset(0, slot);
        let bytes = drive.peek(home, size_of::<RegionMapPage>());
        record::open::<RegionMapPage>(&bytes, Some(owner), home).ok().cloned()
    });
    slots.max_by_key(|page| page.header.sequence.get())
}

/// The page of a map that decides among these drives.
fn newest_page<'a>(
    kind: MapKind,
    drives: impl Iterator<Item = &'a SimDrive>,
) -> Option<RegionMapPage> {
    drives.filter_map(|drive| map_page(kind, drive)).max_by_key(|page| page.header.sequence.get())
}

/// The superblock that decides among these drives.
pub fn newest<'a>(drives: impl Iterator<Item = &'a SimDrive>) -> Option<ArraySuperblock> {
    drives.filter_map(superblock).max_by_key(ArraySuperblock::age)
}

/// Stripes that wait for resync once an array of these drives has started: none, if the journal
/// covers what was under way.
pub fn unsure_stripes<'a>(drives: impl Iterator<Item = &'a SimDrive> + Clone) -> BTreeSet<u64> {
    let newest = newest(drives.clone()).filter(|newest| newest.journal_from.get() == 0);
    let Some(newest) = newest else { return BTreeSet::new() };
    let region_stripes = u64::from(newest.region_stripes.get());
    let written = newest_page(MapKind::Written, drives.clone());
    let dirty = newest_page(MapKind::Dirty, drives);
    let has = |page: &Option<RegionMapPage>, stripe: u64| {
        let region = to_usize(stripe / region_stripes);
        page.as_ref().is_none_or(|page| page.contains(region))
    };
    (0..newest.stripes.get()).filter(|s| has(&written, *s) && has(&dirty, *s)).collect()
}

/// Stripes in the list of bad blocks that decides among these drives.
pub fn bad_stripes<'a>(drives: impl Iterator<Item = &'a SimDrive>) -> BTreeSet<u64> {
    let newest = drives.filter_map(bad_blocks).max_by_key(|list| list.header.sequence.get());
    let stripes = newest.iter().flat_map(|list| list.ranges()).map(|range| range.stripe.get());
    stripes.collect()
}

fn bad_blocks(drive: &SimDrive) -> Option<BadBlocks> {
    let area = label::plan(drive.traits.bytes, 0)?.bad_blocks.offset;
    let owner = owner(drive)?;
    let slots = (0..bad_blocks::SLOTS).filter_map(|slot| {
        let home = area + slot * BadBlocks::BYTES;
        let bytes = drive.peek(home, size_of::<BadBlocks>());
        record::open::<BadBlocks>(&bytes, Some(owner), home).ok().cloned()
    });
    slots.max_by_key(|list| list.header.sequence.get())
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

/// Blocks of one row of a stripe, by position.
type Row<'a> = SmallVec<[Option<&'a Block>; 8]>;

/// The rows of a stripe in which any of the members' drives has more than zeroes. `data`: the data
/// area of each.
fn rows<'a>(
    (members, data): (&[&'a SimDrive], Area),
    layout: &Layout,
    stripe: StripeIndex,
) -> impl Iterator<Item = Row<'a>> {
    let data = data.offset;
    let rows = (0..layout.chunk_bytes).step_by(BLOCK_BYTES);
    let row = move |row: u32| -> Row<'a> {
        let at = data + layout.member_offset(stripe, row);
        let positions = 0..layout.positions();
        positions.map(|p| members[layout.member_at(stripe, p).index()].block(at)).collect()
    };
    rows.map(row).filter(|row| row.iter().any(Option::is_some))
}

/// Whether a stripe reads as zeroes wherever it is read from.
pub fn is_blank(members: (&[&SimDrive], Area), layout: &Layout, stripe: StripeIndex) -> bool {
    rows(members, layout, stripe).next().is_none()
}

/// Whether parity or copies of a stripe agree with its data: what a scrub verifies.
pub fn agrees(members: (&[&SimDrive], Area), layout: &Layout, stripe: StripeIndex) -> bool {
    rows(members, layout, stripe).all(|row| {
        let row: SmallVec<[&[u8]; 8]> =
            row.iter().map(|block| block.unwrap_or(&ZEROES).as_slice()).collect();
        if layout.is_mirrored() {
            return row.chunks(layout.copies.into()).all(|copies| {
                let (first, others) = copies.split_first().expect("copies");
                others.iter().all(|copy| copy == first)
            });
        }
        let (data, parity) = row.split_at(layout.data.into());
        let mut should = [ZEROES; PARITY_CHUNKS_MAX];
        let mut outputs: SmallVec<[&mut [u8]; 2]> =
            should.iter_mut().take(parity.len()).map(|block| block.as_mut_slice()).collect();
        Kernels::detect().encode(data, &mut outputs);
        outputs.iter().zip(parity).all(|(should, is)| should == is)
    })
}
