//! Checksums of a member's blocks: a CRC32C for each 4 KiB of its data area, in sectors of 512
//! bytes that each stand for themselves.
//!
//! A sector does not begin with a [`crate::record::Header`], which would take an eighth of it. Its
//! own checksum covers array, drive and place as well, though they are not stored: a sector that
//! is torn, foreign or misdirected does not open. A torn write of a page loses no sector of it:
//! drives write 512 bytes whole.
//!
//! It has no version either: to whoever does not know its form it is damaged, and is written anew.
//! So a form that this build does not know needs a version of the superblock that it does not know.
//!
//! What is not known of a block is *said* to be not known (`known`): no value of a checksum means
//! that the block need not be checked.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::record::{PayloadDigest, payload_checksum};

/// Bytes that one checksum is of.
pub const BLOCK_BYTES: u32 = 4096;
/// Checksums in a sector.
pub const SUMS_PER_SECTOR: usize = 120;
/// Sectors that are read and written together.
pub const SECTORS_PER_PAGE: usize = 8;
/// Blocks that a page has checksums of: 3.75 MiB of a member.
pub const BLOCKS_PER_PAGE: u64 = (SUMS_PER_SECTOR * SECTORS_PER_PAGE) as u64;
pub const SECTOR_BYTES: u64 = size_of::<SumSector>() as u64;
pub const PAGE_BYTES: u64 = SECTOR_BYTES * SECTORS_PER_PAGE as u64;
const MAGIC_V1: [u8; 4] = *b"SUM\x01";
const _: () = assert!(PAGE_BYTES == 4096);

/// Whose a sector is, and where it is.
#[derive(Clone, Copy, Debug)]
pub struct Home {
    pub array: [u8; 16],
    pub drive: [u8; 16],
    /// Byte offset of the sector on the drive.
    pub offset: u64,
}

#[derive(Clone, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SumSector {
    /// CRC32C of array, drive and offset, and of all that follows.
    checksum: U32,
    magic: [u8; 4],
    /// Bit `b % 8` of byte `b / 8`: the checksum of block `b` of the sector is known.
    known: [u8; 16],
    sums: [U32; SUMS_PER_SECTOR],
    reserved: [u8; 8],
}
const _: () = assert!(size_of::<SumSector>() == 512);
const _: () = assert!(std::mem::offset_of!(SumSector, sums) == 24);
const _: () = assert!(SUMS_PER_SECTOR <= 16 * 8);

/// As they stand one behind the other on a drive.
pub type SumPage = [SumSector; SECTORS_PER_PAGE];

impl SumSector {
    /// Nothing is known of any block.
    pub fn blank() -> SumSector {
        SumSector { magic: MAGIC_V1, ..SumSector::new_zeroed() }
    }

    /// The checksum of a block of the sector, if it is known.
    pub fn get(&self, block: usize) -> Option<u32> {
        (self.known[block / 8] & 1 << (block % 8) != 0).then(|| self.sums[block].get())
    }

    pub fn set(&mut self, block: usize, sum: u32) {
        self.known[block / 8] |= 1 << (block % 8);
        self.sums[block] = U32::new(sum);
    }

    /// Whether the checksums of all blocks are known.
    pub fn is_full(&self) -> bool {
        self.known.iter().map(|bits| bits.count_ones()).sum::<u32>() as usize == SUMS_PER_SECTOR
    }

    /// Takes over what is known there and not here.
    pub fn complete_from(&mut self, older: &SumSector) {
        for block in 0..SUMS_PER_SECTOR {
            if let (None, Some(sum)) = (self.get(block), older.get(block)) {
                self.set(block, sum);
            }
        }
    }

    pub fn seal(&mut self, home: &Home) {
        self.checksum = U32::new(self.sum_at(home));
    }

    /// The sector in `bytes` that were read at `home`; `None`: there is none.
    pub fn open<'a>(bytes: &'a [u8], home: &Home) -> Option<&'a SumSector> {
        let sector = SumSector::ref_from_bytes(bytes).ok()?;
        let beyond = sector.known[SUMS_PER_SECTOR / 8..].iter().any(|bits| *bits != 0);
        let sealed = sector.checksum.get() == sector.sum_at(home);
        let ours = sector.magic == MAGIC_V1 && sealed && !beyond && sector.reserved == [0; 8];
        ours.then_some(sector)
    }

    fn sum_at(&self, home: &Home) -> u32 {
        let mut digest = PayloadDigest::default();
        digest.update(&home.array);
        digest.update(&home.drive);
        digest.update(&home.offset.to_le_bytes());
        digest.update(&self.as_bytes()[size_of::<U32>()..]);
        digest.finish()
    }
}

/// The checksum of a block.
pub fn block_sum(block: &[u8]) -> u32 {
    payload_checksum(block)
}

/// Bytes of the checksums of a data area.
pub fn area_bytes(data_bytes: u64) -> u64 {
    let blocks = data_bytes.div_ceil(BLOCK_BYTES.into());
    blocks.div_ceil(BLOCKS_PER_PAGE) * PAGE_BYTES
}

/// Blocks whose checksums fit in an area.
pub fn blocks_in(area_bytes: u64) -> u64 {
    area_bytes / PAGE_BYTES * BLOCKS_PER_PAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOME: Home = Home { array: [1; 16], drive: [2; 16], offset: 3 << 20 };

    fn sector() -> SumSector {
        let mut sector = SumSector::blank();
        sector.set(0, 7);
        sector.set(119, u32::MAX);
        sector.set(60, 0);
        sector.seal(&HOME);
        sector
    }

    /// The bytes are a format: neither the seal nor the checksum of a block may change.
    #[test]
    fn sectors_and_checksums_stay_as_they_are() {
        assert_eq!(block_sum(b"123456789"), 0xe306_9283, "RFC 3720, the check value of CRC32C");
        let sealed = sector();
        assert_eq!(sealed.as_bytes()[4..12], *b"SUM\x01\x01\0\0\0");
        assert_eq!(payload_checksum(sealed.as_bytes()), 3_458_748_549);
    }

    #[test]
    fn a_sector_opens_at_its_home_alone() {
        let sealed = sector();
        let bytes = sealed.as_bytes();
        let opened = SumSector::open(bytes, &HOME).unwrap();
        assert_eq!([0, 1, 60, 119].map(|b| opened.get(b)), [Some(7), None, Some(0), Some(!0)]);
        for other in [
            Home { array: [9; 16], ..HOME },
            Home { drive: [9; 16], ..HOME },
            Home { offset: HOME.offset + 512, ..HOME },
        ] {
            assert!(SumSector::open(bytes, &other).is_none(), "{other:?}");
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 0x10;
            assert!(SumSector::open(&damaged, &HOME).is_none(), "byte {at}");
        }
        assert!(SumSector::open(&[0; 512], &HOME).is_none());
        assert!(SumSector::open(&bytes[1..], &HOME).is_none());
    }

    #[test]
    fn what_is_newer_stays() {
        let mut newer = SumSector::blank();
        newer.set(0, 1);
        newer.complete_from(&sector());
        assert_eq!([0, 1, 119].map(|b| newer.get(b)), [Some(1), None, Some(!0)]);
        assert!(!newer.is_full());
        (0..SUMS_PER_SECTOR).for_each(|block| newer.set(block, 5));
        assert!(newer.is_full());
    }

    #[test]
    fn areas_have_room_for_every_block() {
        assert_eq!(area_bytes(0), 0);
        assert_eq!(area_bytes(1), 4096);
        assert_eq!(area_bytes(960 * 4096), 4096);
        assert_eq!(area_bytes(960 * 4096 + 1), 8192);
        assert_eq!(blocks_in(8192), 2 * 960);
    }
}
