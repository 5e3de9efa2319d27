//! A set of regions of an array, as pages of bits. Three of them are kept: which regions may have
//! parity or copies that do not agree, which were ever written, and which a member missed.
//!
//! Each page has two slots on every member, written in turn, so that a torn write leaves the page
//! before it. Bits of all trusted members are taken together: a bit too many costs time, a bit
//! too few would cost data.
//!
//! An array that grows may need larger regions. Its pages are then written for these beside those
//! that still count, and the superblock's `stripes a region` says in one step which ones do.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::record::{Header, Kind, Record, RecordError, Upgrade};
use crate::upgrade;

pub const VERSION: u16 = 2;
pub const SLOTS: u64 = 2;
const BITS_BYTES: usize = 3968;
/// Most pages of one map: enough for a quarter of a million regions.
pub const PAGES_MAX: u64 = 8;
/// Regions in one page.
pub const REGIONS_PER_PAGE: u64 = BITS_BYTES as u64 * 8;

/// What a set of regions says. The number is on drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MapKind {
    /// Parity or copies may not agree.
    Dirty = 0,
    /// Something was written since the array was made, or since the region was discarded.
    Written = 1,
    /// Written while a member was away that may come back.
    Missed = 2,
}

#[derive(Clone, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RegionMapPage {
    pub header: Header,
    pub array: [u8; 16],
    /// Number of this page; its first region is `page * REGIONS_PER_PAGE`.
    pub page: U32,
    /// A [`MapKind`].
    pub map: U32,
    /// The page counts while the superblock says the same; zero, in version 1: always.
    pub region_stripes: U32,
    reserved: [u8; 36],
    /// Bit `r % 8` of byte `r / 8` is region `r` of the page.
    pub bits: [u8; BITS_BYTES],
}
const _: () = assert!(size_of::<RegionMapPage>() == 4096);
const _: () = assert!(std::mem::offset_of!(RegionMapPage, bits) == 128);

impl RegionMapPage {
    pub const BYTES: u64 = size_of::<RegionMapPage>() as u64;

    /// A page with no region in the set.
    pub fn empty(array: [u8; 16], kind: MapKind, page: u32, region_stripes: u32) -> RegionMapPage {
        RegionMapPage {
            header: Header::default(),
            array,
            page: U32::new(page),
            map: U32::new(kind as u32),
            region_stripes: U32::new(region_stripes),
            reserved: [0; 36],
            bits: [0; BITS_BYTES],
        }
    }

    /// `region` counts within the page.
    pub fn contains(&self, region: usize) -> bool {
        self.bits[region / 8] & (1 << (region % 8)) != 0
    }

    pub fn set(&mut self, region: usize, inside: bool) {
        let bit = 1 << (region % 8);
        if inside {
            self.bits[region / 8] |= bit;
        } else {
            self.bits[region / 8] &= !bit;
        }
    }

    /// Whether it counts in an array with so many stripes a region.
    pub fn is_for(&self, region_stripes: u32) -> bool {
        [0, region_stripes].contains(&self.region_stripes.get())
    }

    /// Offset of a page's slot inside the map's area.
    pub fn slot_offset(page: u32, sequence: u64) -> u64 {
        (u64::from(page) * SLOTS + sequence % SLOTS) * Self::BYTES
    }

    /// Pages needed for `regions`.
    pub fn pages_for(regions: u64) -> u64 {
        regions.div_ceil(REGIONS_PER_PAGE)
    }
}

impl Record for RegionMapPage {
    const KIND: Kind = Kind::RegionMapPage;
    const VERSION: u16 = VERSION;
    const UPGRADES: &'static [Upgrade] = &upgrade::REGION_MAP_UPGRADES;

    fn header(&self) -> &Header {
        &self.header
    }

    fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    fn check(&self) -> Result<(), RecordError> {
        if self.map.get() > MapKind::Missed as u32 {
            return Err(RecordError::Field("kind of a region map"));
        }
        if self.reserved.iter().any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes"));
        }
        Ok(())
    }
}

/// Version 1 knew regions of one size only: its pages say nothing of it.
pub(crate) fn v1_to_v2(_bytes: &mut [u8]) {}
