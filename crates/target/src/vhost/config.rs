//! The device's configuration space and the features it offers (virtio 1.2, 5.2.3 and 5.2.4).

use ashlar_format::units::SECTOR_BYTES;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes, KnownLayout};

/// Length of the space in bytes; some clients read all of it and insist on a full answer.
pub(crate) const CONFIG_BYTES: usize = 256;
/// Most data segments of one request.
pub(crate) const SEGMENTS_MAX: u32 = 126;
/// Most bytes of one segment.
pub(crate) const SEGMENT_BYTES_MAX: u32 = 256 << 10;
/// Most bytes of one discard or write-zeroes request.
pub(crate) const ZEROES_BYTES_MAX: u64 = 64 << 20;
/// The feature that opens the vhost-user extensions; not a virtio feature.
pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Pages of guest memory that are written to are to be marked; not a virtio feature either.
pub(crate) const LOG_ALL: u64 = 1 << 26;

/// Every feature that can be negotiated.
pub(crate) const FEATURES: u64 = (1 << VIRTIO_F_VERSION_1)
    | (1 << VIRTIO_F_RING_PACKED)
    | (1 << VIRTIO_RING_F_EVENT_IDX)
    | (1 << VIRTIO_RING_F_INDIRECT_DESC)
    | (1 << VIRTIO_BLK_F_SIZE_MAX)
    | (1 << VIRTIO_BLK_F_SEG_MAX)
    | (1 << VIRTIO_BLK_F_BLK_SIZE)
    | (1 << VIRTIO_BLK_F_TOPOLOGY)
    | (1 << VIRTIO_BLK_F_FLUSH)
    | (1 << VIRTIO_BLK_F_CONFIG_WCE)
    | (1 << VIRTIO_BLK_F_MQ)
    | (1 << VIRTIO_BLK_F_DISCARD)
    | (1 << VIRTIO_BLK_F_WRITE_ZEROES)
    | LOG_ALL
    | PROTOCOL_FEATURES;

/// Whether writes must be durable before they are answered (virtio 1.2, 5.2.6.2): always for a
/// driver that cannot flush, or when it chose so.
pub(crate) fn is_write_through(features: u64, write_back: bool) -> bool {
    let has = |bit: u32| features & (1 << bit) != 0;
    !has(VIRTIO_BLK_F_FLUSH) || (has(VIRTIO_BLK_F_CONFIG_WCE) && !write_back)
}

/// What the space is made from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) volume_bytes: u64,
    /// Smallest range that a discard gives back.
    pub(crate) discard_bytes: u64,
    pub(crate) queues_max: u16,
    pub(crate) write_back: bool,
}

/// `struct virtio_blk_config`, up to the fields of features that are not offered.
#[repr(C)]
#[derive(IntoBytes, KnownLayout, Immutable)]
struct Config {
    capacity_sectors: U64,
    size_max: U32,
    seg_max: U32,
    geometry: [u8; 4],
    block_bytes: U32,
    physical_block_log2: u8,
    alignment_offset: u8,
    io_min_blocks: U16,
    io_optimal_blocks: U32,
    write_back: u8,
    unused_a: u8,
    queues: U16,
    discard_sectors_max: U32,
    discard_segments_max: U32,
    discard_alignment_sectors: U32,
    zeroes_sectors_max: U32,
    zeroes_segments_max: U32,
    zeroes_may_unmap: u8,
    unused_b: [u8; 3],
}
const _: () = assert!(size_of::<Config>() == 60);
const _: () = assert!(std::mem::offset_of!(Config, write_back) == WRITE_BACK_OFFSET);
const _: () = assert!(std::mem::offset_of!(Config, queues) == 34);
const _: () = assert!(std::mem::offset_of!(Config, zeroes_may_unmap) == 56);

/// Where the guest may write: one byte, 1 for write back, 0 for write through.
pub(crate) const WRITE_BACK_OFFSET: usize = 32;

/// What guests address: sectors.
const BLOCK_BYTES: u32 = 512;
const _: () = assert!(BLOCK_BYTES as u64 == SECTOR_BYTES);
/// What the engine works with: 4096 bytes, 2^3 sectors.
const PHYSICAL_BLOCK_LOG2: u8 = 3;

fn sectors(bytes: u64) -> U32 {
    U32::new(u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX))
}

/// All of the space; zero behind the struct.
pub(crate) fn space(facts: &Facts) -> [u8; CONFIG_BYTES] {
    // A discard that ends inside a stripe gives nothing back there, so limits are whole stripes.
    let stripe = facts.discard_bytes.max(SECTOR_BYTES);
    let discard_max = (ZEROES_BYTES_MAX - ZEROES_BYTES_MAX % stripe).max(SECTOR_BYTES);
    let config = Config {
        capacity_sectors: U64::new(facts.volume_bytes / SECTOR_BYTES),
        size_max: U32::new(SEGMENT_BYTES_MAX),
        seg_max: U32::new(SEGMENTS_MAX),
        geometry: [0; 4],
        block_bytes: U32::new(BLOCK_BYTES),
        physical_block_log2: PHYSICAL_BLOCK_LOG2,
        alignment_offset: 0,
        io_min_blocks: U16::new(1 << PHYSICAL_BLOCK_LOG2),
        io_optimal_blocks: sectors(stripe),
        // A driver that reads 0 here takes the device for write through and never flushes.
        write_back: u8::from(facts.write_back),
        unused_a: 0,
        queues: U16::new(facts.queues_max),
        discard_sectors_max: sectors(discard_max),
        discard_segments_max: U32::new(1),
        discard_alignment_sectors: sectors(stripe),
        zeroes_sectors_max: sectors(ZEROES_BYTES_MAX),
        zeroes_segments_max: U32::new(1),
        zeroes_may_unmap: 1,
        unused_b: [0; 3],
    };
    let mut space = [0; CONFIG_BYTES];
    for (to, from) in space.iter_mut().zip(config.as_bytes()) {
        *to = *from;
    }
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts { volume_bytes: 1 << 30, discard_bytes: 192 << 10, queues_max: 4, write_back: true }
    }

    #[test]
    fn fields_are_where_drivers_read_them() {
        let space = space(&facts());
        let u32_at = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
        assert_eq!(space[..8], (2u64 << 20).to_le_bytes());
        assert_eq!((u32_at(8), u32_at(12), u32_at(20)), (256 << 10, 126, 512));
        assert_eq!((space[24], space[26], u32_at(28)), (3, 8, 384));
        assert_eq!((space[32], space[34]), (1, 4));
        // 64 MiB are 341 stripes of 192 KiB and a rest.
        assert_eq!((u32_at(36), u32_at(40), u32_at(44)), (341 * 384, 1, 384));
        assert_eq!((u32_at(48), u32_at(52), space[56]), (131_072, 1, 1));
        assert!(space[60..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn write_through_only_where_the_driver_cannot_or_will_not_flush() {
        let flush = 1 << VIRTIO_BLK_F_FLUSH;
        let choice = 1 << VIRTIO_BLK_F_CONFIG_WCE;
        assert!(is_write_through(0, true) && is_write_through(choice, true));
        assert!(!is_write_through(flush, true) && !is_write_through(flush, false));
        assert!(!is_write_through(flush | choice, true));
        assert!(is_write_through(flush | choice, false));
    }
}
