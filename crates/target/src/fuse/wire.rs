//! What kernel and file server say to each other, in the machine's byte order (Linux
//! `include/uapi/linux/fuse.h`, protocol 7.42; Documentation/filesystems/fuse/fuse-io-uring.rst).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub(super) const VERSION_MAJOR: u32 = 7;
/// The first whose INIT has more than 32 flags is 36; what is new in later ones is not used, but
/// for commands by io_uring, which have a flag.
pub(super) const VERSION_MINOR: u32 = 42;
pub(super) const VERSION_MINOR_MIN: u32 = 31;
pub(super) const ROOT: u64 = 1;

pub(super) mod opcode {
    pub(in crate::fuse) const FORGET: u32 = 2;
    pub(in crate::fuse) const GETATTR: u32 = 3;
    pub(in crate::fuse) const SETATTR: u32 = 4;
    pub(in crate::fuse) const OPEN: u32 = 14;
    pub(in crate::fuse) const READ: u32 = 15;
    pub(in crate::fuse) const WRITE: u32 = 16;
    pub(in crate::fuse) const STATFS: u32 = 17;
    pub(in crate::fuse) const RELEASE: u32 = 18;
    pub(in crate::fuse) const FSYNC: u32 = 20;
    pub(in crate::fuse) const INIT: u32 = 26;
    pub(in crate::fuse) const INTERRUPT: u32 = 36;
    pub(in crate::fuse) const DESTROY: u32 = 38;
    pub(in crate::fuse) const BATCH_FORGET: u32 = 42;
    pub(in crate::fuse) const FALLOCATE: u32 = 43;
    pub(in crate::fuse) const LSEEK: u32 = 46;
}

/// Flags of INIT.
pub(super) mod init {
    pub(in crate::fuse) const ASYNC_READ: u64 = 1 << 0;
    pub(in crate::fuse) const BIG_WRITES: u64 = 1 << 5;
    /// Direct I/O does not wait for one request before the next.
    pub(in crate::fuse) const ASYNC_DIO: u64 = 1 << 15;
    pub(in crate::fuse) const MAX_PAGES: u64 = 1 << 22;
    /// There are flags beyond the 32nd.
    pub(in crate::fuse) const EXT: u64 = 1 << 30;
    pub(in crate::fuse) const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub(in crate::fuse) const OVER_IO_URING: u64 = 1 << 41;
}

/// Flags of an opened file: nothing of it is cached, and writes do not wait for one another.
pub(super) const OPEN_DIRECT_IO: u32 = 1 << 0;
pub(super) const OPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
/// Of SETATTR: which fields are meant.
pub(super) const SET_MODE: u32 = 1 << 0;
pub(super) const SET_OWNER: u32 = 1 << 1 | 1 << 2;
pub(super) const SET_SIZE: u32 = 1 << 3;

/// Commands by io_uring.
pub(super) const COMMAND_REGISTER: u32 = 1;
pub(super) const COMMAND_COMMIT_AND_FETCH: u32 = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub(super) struct InHeader {
    pub(super) len: u32,
    pub(super) opcode: u32,
    pub(super) unique: u64,
    pub(super) node: u64,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) pid: u32,
    pub(super) extension_words: u16,
    pub(super) unused: u16,
}
pub(super) const IN_HEADER_BYTES: usize = 40;
const _: () = assert!(size_of::<InHeader>() == IN_HEADER_BYTES);

#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub(super) struct OutHeader {
    pub(super) len: u32,
    /// An error's number, negative, or 0.
    pub(super) error: i32,
    pub(super) unique: u64,
}
pub(super) const OUT_HEADER_BYTES: usize = 16;
const _: () = assert!(size_of::<OutHeader>() == OUT_HEADER_BYTES);

#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable)]
pub(super) struct InitIn {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) readahead_max: u32,
    pub(super) flags: u32,
    /// Of kernels with [`init::EXT`], and so on.
    pub(super) flags2: u32,
    pub(super) unused: [u32; 11],
}
const _: () = assert!(size_of::<InitIn>() == 64);

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
pub(super) struct InitOut {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) readahead_max: u32,
    pub(super) flags: u32,
    pub(super) background_max: u16,
    pub(super) congestion_threshold: u16,
    pub(super) write_max: u32,
    pub(super) time_granularity: u32,
    pub(super) pages_max: u16,
    pub(super) map_alignment: u16,
    pub(super) flags2: u32,
    pub(super) stack_depth_max: u32,
    pub(super) request_timeout: u16,
    pub(super) unused: [u16; 11],
}
const _: () = assert!(size_of::<InitOut>() == 64);

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
pub(super) struct AttrOut {
    pub(super) valid_s: u64,
    pub(super) valid_ns: u32,
    pub(super) unused: u32,
    pub(super) node: u64,
    pub(super) bytes: u64,
    pub(super) sectors: u64,
    /// Of access, of changed content, of changed attributes.
    pub(super) times_s: [u64; 3],
    pub(super) times_ns: [u32; 3],
    pub(super) mode: u32,
    pub(super) links: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) device: u32,
    pub(super) block_bytes: u32,
    pub(super) flags: u32,
}
const _: () = assert!(size_of::<AttrOut>() == 104);

#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable)]
pub(super) struct SetAttrIn {
    pub(super) valid: u32,
    pub(super) unused_a: u32,
    pub(super) handle: u64,
    pub(super) bytes: u64,
    pub(super) unused_b: [u64; 8],
}
const _: () = assert!(size_of::<SetAttrIn>() == 88);

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
pub(super) struct OpenOut {
    pub(super) handle: u64,
    pub(super) flags: u32,
    pub(super) backing: i32,
}
const _: () = assert!(size_of::<OpenOut>() == 16);

/// Of READ and WRITE.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable)]
pub(super) struct RangeIn {
    pub(super) handle: u64,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) hints: u32,
    pub(super) lock_owner: u64,
    /// Of the opened file, and of this request (`O_DSYNC`).
    pub(super) flags: u32,
    pub(super) unused: u32,
}
pub(super) const RANGE_IN_BYTES: usize = 40;
const _: () = assert!(size_of::<RangeIn>() == RANGE_IN_BYTES);

#[repr(C)]
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
pub(super) struct WriteOut {
    pub(super) len: u32,
    pub(super) unused: u32,
}
const _: () = assert!(size_of::<WriteOut>() == 8);

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
pub(super) struct StatfsOut {
    pub(super) blocks: u64,
    pub(super) blocks_free: u64,
    pub(super) blocks_available: u64,
    pub(super) files: u64,
    pub(super) files_free: u64,
    pub(super) block_bytes: u32,
    pub(super) name_bytes_max: u32,
    pub(super) fragment_bytes: u32,
    pub(super) unused: [u32; 7],
}
const _: () = assert!(size_of::<StatfsOut>() == 80);

#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable)]
pub(super) struct FallocateIn {
    pub(super) handle: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) mode: u32,
    pub(super) unused: u32,
}
const _: () = assert!(size_of::<FallocateIn>() == 32);

#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable)]
pub(super) struct SeekIn {
    pub(super) handle: u64,
    pub(super) offset: u64,
    pub(super) whence: u32,
    pub(super) unused: u32,
}
const _: () = assert!(size_of::<SeekIn>() == 24);

/// Bytes of what precedes a request's data, at most.
pub(super) const OPERATION_BYTES: usize = 128;

/// The first of the two pieces of memory that an entry of a ring has; the other one is for data.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub(super) struct RingHeaders {
    pub(super) request: InHeader,
    pub(super) unused_a: [u8; 128 - IN_HEADER_BYTES],
    pub(super) operation: [u8; OPERATION_BYTES],
    pub(super) entry: RingEntry,
}
pub(super) const RING_HEADERS_BYTES: usize = 288;
const _: () = assert!(size_of::<RingHeaders>() == RING_HEADERS_BYTES);
/// Where in it the answer goes.
pub(super) const RING_ENTRY_OFFSET: usize = 256;
const _: () = assert!(std::mem::offset_of!(RingHeaders, entry) == RING_ENTRY_OFFSET);

#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub(super) struct RingEntry {
    pub(super) flags: u64,
    /// Names the request when it is answered.
    pub(super) commit: u64,
    pub(super) payload_len: u32,
    pub(super) unused_a: u32,
    pub(super) unused_b: u64,
}
const _: () = assert!(size_of::<RingEntry>() == 32);

/// The command itself.
#[repr(C)]
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
pub(super) struct RingCommand {
    pub(super) flags: u64,
    pub(super) commit: u64,
    pub(super) queue: u16,
    pub(super) unused: [u8; 6],
}
const _: () = assert!(size_of::<RingCommand>() == 24);
