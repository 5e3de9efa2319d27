//! How a volume presents itself to the block layer.

use ashlar_format::units::SECTOR_BYTES;

use crate::ublk::wire::{
    ATTRIBUTE_FUA, ATTRIBUTE_VOLATILE_CACHE, KIND_BASIC, KIND_DISCARD, Parameters,
};

/// Most bytes of one request's data: one buffer of the engine's.
pub(super) const DATA_BYTES_MAX: u32 = 1 << 20;
const _: () = assert!(DATA_BYTES_MAX as usize == ashlar_reactor::buffer::BUFFER_BYTES_MAX);
/// Most bytes of one discard or write-zeroes request.
const ZEROES_BYTES_MAX: u64 = 64 << 20;
/// What the engine works with: 4096 bytes.
const PHYSICAL_BLOCK_LOG2: u8 = 12;
/// What programs can be given to address, in bytes.
pub const BLOCK_BYTES: [u32; 2] = [512, 4096];

/// What the parameters are made from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub(super) volume_bytes: u64,
    /// Data of one stripe, which is also the smallest range that a discard gives back.
    pub(super) stripe_bytes: u64,
    /// One of [`BLOCK_BYTES`].
    pub(super) block_bytes: u32,
}

pub(super) fn parameters(facts: &Facts) -> Parameters {
    let stripe = facts.stripe_bytes.max(SECTOR_BYTES);
    // A discard that ends inside a stripe gives nothing back there, so limits are whole stripes.
    let discard_max = (ZEROES_BYTES_MAX - ZEROES_BYTES_MAX % stripe).max(SECTOR_BYTES);
    Parameters {
        len: u32::try_from(size_of::<Parameters>()).expect("a few bytes"),
        kinds: KIND_BASIC | KIND_DISCARD,
        attributes: ATTRIBUTE_VOLATILE_CACHE | ATTRIBUTE_FUA,
        logical_block_log2: log2(facts.block_bytes.into()),
        physical_block_log2: PHYSICAL_BLOCK_LOG2,
        io_optimal_log2: log2(stripe).max(PHYSICAL_BLOCK_LOG2),
        io_min_log2: PHYSICAL_BLOCK_LOG2,
        sectors_max: sectors(DATA_BYTES_MAX.into()),
        device_sectors: facts.volume_bytes / SECTOR_BYTES,
        discard_granularity: u32::try_from(stripe).unwrap_or(u32::MAX),
        discard_sectors_max: sectors(discard_max),
        zeroes_sectors_max: sectors(ZEROES_BYTES_MAX),
        discard_segments_max: 1,
        ..Parameters::default()
    }
}

fn sectors(bytes: u64) -> u32 {
    u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX)
}

/// The driver takes powers of two only. Of 192 KiB, the largest by which it can be divided: 64 KiB,
/// so that what is aligned to three of them is a stripe still.
fn log2(bytes: u64) -> u8 {
    u8::try_from(bytes.trailing_zeros()).expect("at most 64")
}

#[cfg(test)]
mod tests {
    use ashlar_reactor::buffer::BUFFER_BYTES_MAX;

    use super::*;

    fn facts(stripe_bytes: u64) -> Facts {
        Facts { volume_bytes: 1 << 30, stripe_bytes, block_bytes: 512 }
    }

    #[test]
    fn what_the_block_layer_is_told() {
        let its = parameters(&facts(192 << 10));
        assert_eq!((its.len, its.kinds, its.attributes), (64, 3, 12));
        assert_eq!((its.logical_block_log2, its.physical_block_log2), (9, 12));
        assert_eq!((its.io_min_log2, its.io_optimal_log2), (12, 16));
        assert_eq!((its.device_sectors, its.sectors_max), (2 << 20, 2048));
        // 64 MiB are 341 stripes of 192 KiB and a rest.
        assert_eq!((its.discard_granularity, its.discard_sectors_max), (192 << 10, 341 * 384));
        assert_eq!((its.zeroes_sectors_max, its.discard_segments_max), (131_072, 1));
        let its = parameters(&Facts { block_bytes: 4096, ..facts(4 << 20) });
        assert_eq!((its.logical_block_log2, its.io_optimal_log2), (12, 22));
    }

    /// As the driver checks them; a device with others cannot be started.
    #[test]
    fn the_driver_takes_them() {
        for stripe in [4096, 64 << 10, 192 << 10, 7 << 20, 64 << 20, 96 << 20] {
            for block_bytes in BLOCK_BYTES {
                let its = parameters(&Facts { block_bytes, ..facts(stripe) });
                assert_eq!(1 << its.logical_block_log2, block_bytes, "{its:?}");
                assert!(its.logical_block_log2 <= its.physical_block_log2, "{its:?}");
                // The whole of a buffer is used, and no more.
                assert_eq!(u64::from(its.sectors_max) << 9, BUFFER_BYTES_MAX as u64, "{its:?}");
                assert_eq!(stripe % (1 << its.io_optimal_log2), 0, "{its:?}");
                assert_eq!(u64::from(its.discard_granularity), stripe, "{its:?}");
                let discard_max = u64::from(its.discard_sectors_max) << 9;
                let is_whole = discard_max > 0 && discard_max % stripe == 0;
                // A stripe that is larger than any request is given back by none.
                assert!(is_whole || stripe > 64 << 20 && discard_max > 0, "{its:?}");
                assert_eq!(its.discard_segments_max, 1);
            }
        }
    }
}
