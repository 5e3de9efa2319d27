//! What goes over the wire, in network byte order (NBD protocol, doc/proto.md of the
//! NetworkBlockDevice project: "Values", "Request message", "Structured reply chunk message").

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// ASCII `NBDMAGIC`.
pub(super) const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// ASCII `IHAVEOPT`.
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags and the client's: the bits are the same.
pub(super) const FIXED_NEWSTYLE: u16 = 1 << 0;
pub(super) const NO_ZEROES: u16 = 1 << 1;

pub(super) mod option {
    pub(in crate::nbd) const EXPORT_NAME: u32 = 1;
    pub(in crate::nbd) const ABORT: u32 = 2;
    pub(in crate::nbd) const LIST: u32 = 3;
    pub(in crate::nbd) const INFO: u32 = 6;
    pub(in crate::nbd) const GO: u32 = 7;
    pub(in crate::nbd) const STRUCTURED_REPLY: u32 = 8;
    pub(in crate::nbd) const LIST_META_CONTEXT: u32 = 9;
    pub(in crate::nbd) const SET_META_CONTEXT: u32 = 10;
}

/// What an option is answered with.
pub(super) mod answer {
    pub(in crate::nbd) const ACK: u32 = 1;
    pub(in crate::nbd) const SERVER: u32 = 2;
    pub(in crate::nbd) const INFO: u32 = 3;
    pub(in crate::nbd) const META_CONTEXT: u32 = 4;
    pub(in crate::nbd) const UNSUPPORTED: u32 = 1 << 31 | 1;
    pub(in crate::nbd) const INVALID: u32 = 1 << 31 | 3;
    pub(in crate::nbd) const UNKNOWN: u32 = 1 << 31 | 6;
}

pub(super) mod info {
    pub(in crate::nbd) const EXPORT: u16 = 0;
    pub(in crate::nbd) const NAME: u16 = 1;
    pub(in crate::nbd) const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags.
pub(super) mod offers {
    pub(in crate::nbd) const HAS_FLAGS: u16 = 1 << 0;
    pub(in crate::nbd) const FLUSH: u16 = 1 << 2;
    pub(in crate::nbd) const FUA: u16 = 1 << 3;
    pub(in crate::nbd) const TRIM: u16 = 1 << 5;
    pub(in crate::nbd) const WRITE_ZEROES: u16 = 1 << 6;
    pub(in crate::nbd) const DONT_FRAGMENT: u16 = 1 << 7;
    pub(in crate::nbd) const MULTI_CONN: u16 = 1 << 8;
    pub(in crate::nbd) const CACHE: u16 = 1 << 10;
    pub(in crate::nbd) const FAST_ZERO: u16 = 1 << 11;
}

pub(super) mod command {
    pub(in crate::nbd) const READ: u16 = 0;
    pub(in crate::nbd) const WRITE: u16 = 1;
    pub(in crate::nbd) const DISCONNECT: u16 = 2;
    pub(in crate::nbd) const FLUSH: u16 = 3;
    pub(in crate::nbd) const TRIM: u16 = 4;
    pub(in crate::nbd) const CACHE: u16 = 5;
    pub(in crate::nbd) const WRITE_ZEROES: u16 = 6;
    pub(in crate::nbd) const BLOCK_STATUS: u16 = 7;
}

/// Command flags.
pub(super) mod flag {
    pub(in crate::nbd) const FUA: u16 = 1 << 0;
    pub(in crate::nbd) const NO_HOLE: u16 = 1 << 1;
    pub(in crate::nbd) const DONT_FRAGMENT: u16 = 1 << 2;
    pub(in crate::nbd) const ONE_EXTENT: u16 = 1 << 3;
    pub(in crate::nbd) const FAST_ZERO: u16 = 1 << 4;
}

/// Kinds of structured replies.
pub(super) mod chunk {
    pub(in crate::nbd) const NONE: u16 = 0;
    pub(in crate::nbd) const OFFSET_DATA: u16 = 1;
    pub(in crate::nbd) const BLOCK_STATUS: u16 = 5;
    pub(in crate::nbd) const ERROR: u16 = 1 << 15 | 1;
    /// A flag: the last of its request.
    pub(in crate::nbd) const DONE: u16 = 1 << 0;
}

/// Error values of replies: the protocol's own numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Refusal {
    Io = 5,
    Invalid = 22,
    NoSpace = 28,
    /// Zeroing that shall only be done if it is fast, and is not.
    Unsupported = 95,
}

#[repr(C)]
#[derive(IntoBytes, Immutable, Unaligned)]
pub(super) struct Greeting {
    pub(super) magic: U64,
    pub(super) option_magic: U64,
    pub(super) flags: U16,
}
const _: () = assert!(size_of::<Greeting>() == 18);

#[repr(C)]
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub(super) struct OptionHeader {
    pub(super) magic: U64,
    pub(super) option: U32,
    pub(super) len: U32,
}
pub(super) const OPTION_HEADER_BYTES: usize = 16;
const _: () = assert!(size_of::<OptionHeader>() == OPTION_HEADER_BYTES);

#[repr(C)]
#[derive(IntoBytes, Immutable, Unaligned)]
pub(super) struct OptionReply {
    pub(super) magic: U64,
    pub(super) option: U32,
    pub(super) kind: U32,
    pub(super) len: U32,
}
const _: () = assert!(size_of::<OptionReply>() == 20);

#[repr(C)]
#[derive(IntoBytes, Immutable, Unaligned)]
pub(super) struct ExportInfo {
    pub(super) kind: U16,
    pub(super) bytes: U64,
    pub(super) flags: U16,
}
const _: () = assert!(size_of::<ExportInfo>() == 12);

#[repr(C)]
#[derive(IntoBytes, Immutable, Unaligned)]
pub(super) struct BlockSizes {
    pub(super) kind: U16,
    pub(super) least: U32,
    pub(super) preferred: U32,
    pub(super) most: U32,
}
const _: () = assert!(size_of::<BlockSizes>() == 14);

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub(super) struct RequestHeader {
    pub(super) magic: U32,
    pub(super) flags: U16,
    pub(super) command: U16,
    /// The client's name for the request.
    pub(super) cookie: U64,
    pub(super) offset: U64,
    pub(super) len: U32,
}
pub(super) const REQUEST_HEADER_BYTES: usize = 28;
const _: () = assert!(size_of::<RequestHeader>() == REQUEST_HEADER_BYTES);

#[repr(C)]
#[derive(IntoBytes, Immutable, Unaligned)]
pub(super) struct SimpleReply {
    pub(super) magic: U32,
    pub(super) error: U32,
    pub(super) cookie: U64,
}
const _: () = assert!(size_of::<SimpleReply>() == 16);

#[repr(C)]
#[derive(IntoBytes, Immutable, Unaligned)]
pub(super) struct Chunk {
    pub(super) magic: U32,
    pub(super) flags: U16,
    pub(super) kind: U16,
    pub(super) cookie: U64,
    pub(super) len: U32,
}
const _: () = assert!(size_of::<Chunk>() == 20);

/// After the head of an error chunk: no text follows.
#[repr(C)]
#[derive(IntoBytes, Immutable, Unaligned)]
pub(super) struct ChunkError {
    pub(super) error: U32,
    pub(super) text_len: U16,
}
const _: () = assert!(size_of::<ChunkError>() == 6);

/// Flags of the context `base:allocation`.
pub(super) mod state {
    /// Nothing is stored of it.
    pub(in crate::nbd) const HOLE: u32 = 1 << 0;
    /// It reads as zeroes.
    pub(in crate::nbd) const ZERO: u32 = 1 << 1;
}

/// The data of a block status chunk.
#[repr(C)]
#[derive(IntoBytes, Immutable, Unaligned)]
pub(super) struct ChunkStatus {
    pub(super) context: U32,
    pub(super) len: U32,
    pub(super) flags: U32,
}
pub(super) const CHUNK_STATUS_BYTES: u32 = 12;
const _: () = assert!(size_of::<ChunkStatus>() == CHUNK_STATUS_BYTES as usize);
