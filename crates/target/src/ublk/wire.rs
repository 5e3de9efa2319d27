//! What the ublk driver and its server say to each other, in the machine's byte order (Linux
//! `include/uapi/linux/ublk_cmd.h`, Documentation/block/ublk.rst).

use std::mem::offset_of;

use ashlar_reactor::op::{COMMAND_BYTES, command_bytes};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Features, which are also flags of a device.
pub(super) mod feature {
    /// The device outlives its server, which another one can replace.
    pub(in crate::ublk) const USER_RECOVERY: u64 = 1 << 3;
    /// That one gets the requests which the old one had.
    pub(in crate::ublk) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands have numbers as those of ioctl(2) have.
    pub(in crate::ublk) const IOCTL_ENCODE: u64 = 1 << 6;
    /// The server fetches and puts data itself, by pread(2) and pwrite(2). Linux 6.5.
    pub(in crate::ublk) const USER_COPY: u64 = 1 << 7;
    /// A device can grow while it is in use. Linux 6.16.
    pub(in crate::ublk) const UPDATE_SIZE: u64 = 1 << 10;
}

/// Numbers as the kernel makes them of direction, length of the argument, `u`, and a number
/// (ioctl(2), `_IOC`).
const fn number(direction: u32, bytes: usize, number: u32) -> u32 {
    let bytes = bytes.to_le_bytes();
    direction << 30 | (bytes[0] as u32) << 16 | (b'u' as u32) << 8 | number
}
const READS: u32 = 2;
const READS_AND_WRITES: u32 = 3;

const fn reading(its: u32) -> u32 {
    number(READS, size_of::<ControlCommand>(), its)
}

const fn changing(its: u32) -> u32 {
    number(READS_AND_WRITES, size_of::<ControlCommand>(), its)
}

/// Of the control device.
pub(super) const GET_DEVICE: u32 = reading(0x02);
pub(super) const ADD_DEVICE: u32 = changing(0x04);
pub(super) const DELETE_DEVICE: u32 = changing(0x05);
pub(super) const START_DEVICE: u32 = changing(0x06);
pub(super) const STOP_DEVICE: u32 = changing(0x07);
pub(super) const SET_PARAMETERS: u32 = changing(0x08);
pub(super) const GET_PARAMETERS: u32 = reading(0x09);
pub(super) const START_RECOVERY: u32 = changing(0x10);
pub(super) const END_RECOVERY: u32 = changing(0x11);
pub(super) const GET_FEATURES: u32 = reading(0x13);
pub(super) const UPDATE_SIZE: u32 = changing(0x15);

/// Of a device's queues.
pub(super) const FETCH: u32 = number(READS_AND_WRITES, size_of::<QueueCommand>(), 0x20);
pub(super) const COMMIT_AND_FETCH: u32 = number(READS_AND_WRITES, size_of::<QueueCommand>(), 0x21);

/// `struct ublksrv_ctrl_cmd`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub(super) struct ControlCommand {
    pub(super) device: u32,
    pub(super) queue: u16,
    /// Of the memory at `address`.
    pub(super) len: u16,
    pub(super) address: u64,
    pub(super) value: u64,
    pub(super) path_len: u16,
    pub(super) unused_a: u16,
    pub(super) unused_b: u32,
}
const _: () = assert!(size_of::<ControlCommand>() == 32);
const _: () = assert!(offset_of!(ControlCommand, address) == 8);
const _: () = assert!(offset_of!(ControlCommand, path_len) == 24);

/// Of a command that is not about one queue.
pub(super) const NO_QUEUE: u16 = u16::MAX;

/// `struct ublksrv_ctrl_dev_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub(super) struct DeviceInfo {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: u16,
    pub(super) unused_a: u16,
    /// Of one request's data.
    pub(super) data_bytes_max: u32,
    pub(super) device: u32,
    /// The process that serves it; -1: none.
    pub(super) server: i32,
    pub(super) unused_b: u32,
    pub(super) features: u64,
    /// The server's own, which the driver keeps and leaves alone.
    pub(super) mark: u64,
    pub(super) owner: [u32; 2],
    pub(super) unused_c: [u64; 2],
}
const _: () = assert!(size_of::<DeviceInfo>() == 64);
const _: () = assert!(offset_of!(DeviceInfo, data_bytes_max) == 8);
const _: () = assert!(offset_of!(DeviceInfo, features) == 24);
const _: () = assert!(offset_of!(DeviceInfo, owner) == 40);

/// States of a device.
pub(super) const STATE_DEAD: u16 = 0;
pub(super) const STATE_LIVE: u16 = 1;
pub(super) const STATE_QUIESCED: u16 = 2;
pub(super) const STATE_FAILING: u16 = 3;

/// `struct ublk_params`, as far as it is of use here.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
pub(super) struct Parameters {
    pub(super) len: u32,
    pub(super) kinds: u32,
    pub(super) attributes: u32,
    pub(super) logical_block_log2: u8,
    pub(super) physical_block_log2: u8,
    pub(super) io_optimal_log2: u8,
    pub(super) io_min_log2: u8,
    pub(super) sectors_max: u32,
    pub(super) chunk_sectors: u32,
    pub(super) device_sectors: u64,
    pub(super) boundary_mask: u64,
    pub(super) discard_alignment: u32,
    /// In bytes, both.
    pub(super) discard_granularity: u32,
    pub(super) discard_sectors_max: u32,
    pub(super) zeroes_sectors_max: u32,
    pub(super) discard_segments_max: u16,
    pub(super) unused_a: u16,
    pub(super) unused_b: u32,
}
const _: () = assert!(size_of::<Parameters>() == 64);
const _: () = assert!(offset_of!(Parameters, logical_block_log2) == 12);
const _: () = assert!(offset_of!(Parameters, device_sectors) == 24);
const _: () = assert!(offset_of!(Parameters, discard_alignment) == 40);
const _: () = assert!(offset_of!(Parameters, discard_segments_max) == 56);

pub(super) const KIND_BASIC: u32 = 1 << 0;
pub(super) const KIND_DISCARD: u32 = 1 << 1;
pub(super) const ATTRIBUTE_VOLATILE_CACHE: u32 = 1 << 2;
pub(super) const ATTRIBUTE_FUA: u32 = 1 << 3;

/// `struct ublksrv_io_cmd`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub(super) struct QueueCommand {
    pub(super) queue: u16,
    pub(super) tag: u16,
    /// Bytes, or a negative error number.
    pub(super) result: i32,
    /// Zero where the server fetches data itself.
    pub(super) address: u64,
}
const _: () = assert!(size_of::<QueueCommand>() == 16);

impl QueueCommand {
    pub(super) fn bytes(queue: u16, tag: u16, result: i32) -> [u8; COMMAND_BYTES] {
        command_bytes(&QueueCommand { queue, tag, result, address: 0 })
    }
}

/// `struct ublksrv_io_desc`: a request as the driver shows it.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
pub(super) struct Descriptor {
    /// The operation in the lowest byte, flags above.
    pub(super) operation: u32,
    pub(super) sectors: u32,
    pub(super) first_sector: u64,
    pub(super) address: u64,
}
const _: () = assert!(size_of::<Descriptor>() == 24);

pub(super) const OPERATION_MASK: u32 = 0xff;
pub(super) const OPERATION_READ: u32 = 0;
pub(super) const OPERATION_WRITE: u32 = 1;
pub(super) const OPERATION_FLUSH: u32 = 2;
pub(super) const OPERATION_DISCARD: u32 = 3;
pub(super) const OPERATION_WRITE_ZEROES: u32 = 5;
/// The write is durable before it is answered.
pub(super) const FLAG_FUA: u32 = 1 << 13;

/// Most requests of a queue; also the distance of two queues' descriptors.
pub(super) const DEPTH_MAX: u64 = 4096;
/// Largest number of a device, and one more (`UBLK_MAX_UBLKS`: as many as there are minor numbers).
pub(super) const DEVICES_MAX: u32 = 1 << 20;

/// Where the data of requests begins in the character device, and how places there are made.
const DATA_OFFSET: u64 = 0x8000_0000;
const TAG_SHIFT: u32 = 25;
const QUEUE_SHIFT: u32 = 41;

/// Where a queue's descriptors are in the character device, in bytes.
pub(super) fn descriptors_offset(queue: u16) -> u64 {
    u64::from(queue) * DEPTH_MAX * size_of::<Descriptor>() as u64
}

/// Where a request's data is.
pub(super) fn data_offset(queue: u16, tag: u16) -> u64 {
    DATA_OFFSET + (u64::from(queue) << QUEUE_SHIFT | u64::from(tag) << TAG_SHIFT)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the kernel's own macros, worked out by a C compiler from its header.
    #[test]
    fn numbers_and_places_are_the_kernels() {
        assert_eq!((GET_DEVICE, ADD_DEVICE), (0x8020_7502, 0xc020_7504));
        assert_eq!((START_DEVICE, STOP_DEVICE), (0xc020_7506, 0xc020_7507));
        assert_eq!((GET_PARAMETERS, SET_PARAMETERS), (0x8020_7509, 0xc020_7508));
        assert_eq!((START_RECOVERY, END_RECOVERY), (0xc020_7510, 0xc020_7511));
        assert_eq!((GET_FEATURES, UPDATE_SIZE), (0x8020_7513, 0xc020_7515));
        assert_eq!((FETCH, COMMIT_AND_FETCH), (0xc010_7520, 0xc010_7521));
        assert_eq!((descriptors_offset(0), descriptors_offset(3)), (0, 3 * 98_304));
        assert_eq!(data_offset(0, 0), 0x8000_0000);
        assert_eq!(data_offset(1, 2), 0x8000_0000 + (1 << 41) + (2 << 25));
    }

    #[test]
    fn commands_are_where_the_driver_reads_them() {
        let bytes = QueueCommand::bytes(3, 7, -5);
        assert_eq!(bytes[..8], [3, 0, 7, 0, 0xfb, 0xff, 0xff, 0xff]);
        assert!(bytes[8..].iter().all(|byte| *byte == 0));
    }
}
