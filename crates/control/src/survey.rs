//! What Ashlar wrote on a drive: every copy of every record, and whether it can be believed.
//!
//! Reads only, and needs no engine: `drive attach` looks at labels and superblocks with it,
//! `inspect` at everything.

use std::io;

use ashlar_format::array_superblock::{ArraySuperblock, SLOTS as SUPERBLOCK_SLOTS};
use ashlar_format::drive_label::{DriveLabel, MemberLayout};
use ashlar_format::lease::{Lease, SLOTS as LEASE_SLOTS};
use ashlar_format::record::{self, MAGIC, Record, RecordError};
use ashlar_format::region_map::{REGIONS_PER_PAGE, RegionMapPage, SLOTS as DIRTY_MAP_SLOTS};
use ashlar_format::units::{Area, to_usize};
use ashlar_format::volume_table::{SLOTS as TABLE_SLOTS, VolumeTable};

use crate::disk::Disk;
use crate::pages::{PAGE_BYTES, read_pages};

/// Most pages of a dirty map that are looked at; more than any array has.
const DIRTY_MAP_PAGES_MAX: u64 = 4096;

/// A drive, and how much of it there is.
#[derive(Clone, Copy)]
pub struct Medium<'a> {
    pub disk: &'a Disk,
    pub bytes: u64,
}

impl Medium<'_> {
    /// Bytes that records may be on: whole pages.
    fn usable_bytes(&self) -> u64 {
        self.bytes - self.bytes % PAGE_BYTES
    }

    fn read(&self, area: Area) -> io::Result<crate::pages::Pages> {
        if area.end().is_none_or(|end| end > self.usable_bytes()) {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "beyond the drive's end"));
        }
        read_pages(self.disk, area.offset, area.len)
    }
}

/// Why a copy is not to be believed.
#[derive(Debug)]
pub enum Flaw {
    Record(RecordError),
    /// It could not be read at all.
    Unreadable(io::Error),
}

impl std::fmt::Display for Flaw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Flaw::Record(error) => error.fmt(f),
            Flaw::Unreadable(error) => write!(f, "cannot be read: {error}"),
        }
    }
}

/// One place where a record should be.
#[derive(Debug)]
pub struct Copy {
    pub home: u64,
    /// The sequence of a good one.
    pub found: Result<u64, Flaw>,
    /// It begins like one of our records, good or not.
    pub has_magic: bool,
}

/// All places of one record, and the newest good one.
pub struct Copies<T> {
    pub copies: Vec<Copy>,
    pub newest: Option<Box<T>>,
}

impl<T: Record> Copies<T> {
    fn read(medium: Medium<'_>, owner: Option<[u8; 16]>, homes: &[u64]) -> Copies<T> {
        let mut survey = Copies { copies: Vec::new(), newest: None };
        let len = size_of::<T>() as u64;
        for home in homes {
            let area = Area { offset: *home, len };
            let copy = match medium.read(area) {
                Ok(mut pages) => {
                    record::upgrade::<T>(pages.bytes_mut());
                    survey.take(pages.bytes(), owner, *home)
                }
                Err(error) => {
                    Copy { home: *home, found: Err(Flaw::Unreadable(error)), has_magic: false }
                }
            };
            survey.copies.push(copy);
        }
        survey
    }

    fn take(&mut self, bytes: &[u8], owner: Option<[u8; 16]>, home: u64) -> Copy {
        let has_magic = bytes.starts_with(&MAGIC);
        let found = match record::open::<T>(bytes, owner, home) {
            Ok(record) => {
                let sequence = record.header().sequence.get();
                let newest = self.newest.as_ref().map(|known| known.header().sequence.get());
                if newest.is_none_or(|newest| sequence > newest) {
                    let copy = T::read_from_bytes(record.as_bytes()).expect("the same length");
                    self.newest = Some(Box::new(copy));
                }
                Ok(sequence)
            }
            Err(error) => Err(Flaw::Record(error)),
        };
        Copy { home, found, has_magic }
    }
}

/// The label's copies. `label.newest` says where everything else is.
pub fn read_label(medium: Medium<'_>) -> Copies<DriveLabel> {
    let bytes = medium.usable_bytes();
    let mut survey = Copies::<DriveLabel>::read(medium, None, &DriveLabel::homes(bytes));
    // A layout may end before the drive does; then the last copy is where the others say.
    let named = survey.newest.as_ref().map(|label| label.drive_bytes.get());
    if let Some(named) = named.filter(|named| *named != bytes) {
        let [_, _, last] = DriveLabel::homes(named);
        survey.copies.pop();
        let last = Copies::<DriveLabel>::read(medium, None, &[last]);
        survey.copies.extend(last.copies);
    }
    survey
}

/// Whether good copies of a label name different arrays: parts of two drives in one.
pub fn labels_disagree(medium: Medium<'_>, labels: &Copies<DriveLabel>) -> bool {
    let good = labels.copies.iter().filter(|copy| copy.found.is_ok());
    let read = |copy: &Copy| Copies::<DriveLabel>::read(medium, None, &[copy.home]).newest;
    let mut arrays = good.filter_map(read).map(|label| label.array);
    let first = arrays.next();
    arrays.any(|array| Some(array) != first)
}

pub fn read_superblocks(medium: Medium<'_>, label: &DriveLabel) -> Copies<ArraySuperblock> {
    let start = label.layout().superblocks.offset;
    let homes: Vec<u64> =
        (0..SUPERBLOCK_SLOTS).map(|slot| start + slot * ArraySuperblock::BYTES).collect();
    Copies::read(medium, Some(label.header.owner), &homes)
}

pub fn read_volume_table(medium: Medium<'_>, label: &DriveLabel) -> Copies<VolumeTable> {
    let start = label.layout().volume_table.offset;
    let homes: Vec<u64> = (0..TABLE_SLOTS).map(|slot| start + slot * VolumeTable::BYTES).collect();
    Copies::read(medium, Some(label.header.owner), &homes)
}

pub fn read_lease(medium: Medium<'_>, label: &DriveLabel) -> Copies<Lease> {
    let start = label.layout().lease.offset;
    let homes: Vec<u64> = (0..LEASE_SLOTS).map(|slot| start + slot * Lease::BYTES).collect();
    Copies::read(medium, Some(label.header.owner), &homes)
}

/// What the dirty map of one drive says.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct DirtySummary {
    pub pages: u64,
    /// Pages without any good copy.
    pub pages_bad: u64,
    pub regions_dirty: u64,
}

/// Of the pages that the array uses.
pub fn read_dirty_map(
    medium: Medium<'_>,
    label: &DriveLabel,
    superblock: &ArraySuperblock,
) -> DirtySummary {
    let MemberLayout { dirty_map: area, .. } = label.layout();
    let room = (area.len / (DIRTY_MAP_SLOTS * RegionMapPage::BYTES)).min(DIRTY_MAP_PAGES_MAX);
    let region_stripes = superblock.region_stripes.get().max(1);
    let regions = superblock.stripes.get().div_ceil(region_stripes.into());
    let pages = RegionMapPage::pages_for(regions).min(room);
    let mut summary = DirtySummary { pages, ..DirtySummary::default() };
    for page in 0..pages {
        let number = u32::try_from(page).expect("below DIRTY_MAP_PAGES_MAX");
        let homes: Vec<u64> = (0..DIRTY_MAP_SLOTS)
            .map(|slot| area.offset + RegionMapPage::slot_offset(number, slot))
            .collect();
        let copies = Copies::<RegionMapPage>::read(medium, Some(label.header.owner), &homes);
        match copies.newest {
            Some(map) => {
                let regions = 0..to_usize(REGIONS_PER_PAGE);
                summary.regions_dirty += regions.filter(|r| map.contains(*r)).count() as u64;
            }
            None => summary.pages_bad += 1,
        }
    }
    summary
}
