//! Which regions of an array may have parity or copies that do not agree: pages of bits.
//!
//! Each page has two slots on every member, written in turn, so that a torn write leaves the page
//! before it. Bits of all trusted members are taken together: a bit too many costs a resync, a bit
//! too few would cost data.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::record::{Header, Kind, Record, RecordError};

pub const VERSION: u16 = 1;
pub const SLOTS: u64 = 2;
const BITS_BYTES: usize = 3968;
/// Most pages of one map: enough for a quarter of a million regions.
pub const PAGES_MAX: u64 = 8;
/// Regions in one page.
pub const REGIONS_PER_PAGE: u64 = BITS_BYTES as u64 * 8;

#[derive(Clone, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DirtyMapPage {
    pub header: Header,
    pub array: [u8; 16],
    /// Number of this page; its first region is `page * REGIONS_PER_PAGE`.
    pub page: U32,
    reserved: [u8; 44],
    /// Bit `r % 8` of byte `r / 8` is region `r` of the page.
    pub bits: [u8; BITS_BYTES],
}
const _: () = assert!(size_of::<DirtyMapPage>() == 4096);
const _: () = assert!(std::mem::offset_of!(DirtyMapPage, bits) == 128);

impl DirtyMapPage {
    pub const BYTES: u64 = size_of::<DirtyMapPage>() as u64;

    /// A page with every region clean.
    pub fn clean(array: [u8; 16], page: u32) -> DirtyMapPage {
        let header = Header::default();
        DirtyMapPage { header, array, page: U32::new(page), reserved: [0; 44], bits: [0; 3968] }
    }

    /// `region` counts within the page.
    pub fn is_dirty(&self, region: usize) -> bool {
        self.bits[region / 8] & (1 << (region % 8)) != 0
    }

    pub fn set(&mut self, region: usize, dirty: bool) {
        let bit = 1 << (region % 8);
        if dirty {
            self.bits[region / 8] |= bit;
        } else {
            self.bits[region / 8] &= !bit;
        }
    }

    /// Offset of a page's slot inside the dirty-map area.
    pub fn slot_offset(page: u32, sequence: u64) -> u64 {
        (u64::from(page) * SLOTS + sequence % SLOTS) * Self::BYTES
    }

    /// Pages needed for `regions`.
    pub fn pages_for(regions: u64) -> u64 {
        regions.div_ceil(REGIONS_PER_PAGE)
    }
}

impl Record for DirtyMapPage {
    const KIND: Kind = Kind::DirtyMapPage;
    const VERSION: u16 = VERSION;

    fn header(&self) -> &Header {
        &self.header
    }

    fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    fn check(&self) -> Result<(), RecordError> {
        if self.reserved.iter().any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes"));
        }
        Ok(())
    }
}
