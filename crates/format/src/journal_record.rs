//! One record of the stripe journal: what a write to a degraded stripe is about to store.
//!
//! The record is followed by its payload, the bytes of its slices in order. Records stand in a ring
//! of 4 KiB blocks; `sequence` orders them. See `docs/FORMAT.md`.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::array_superblock::MEMBERS_MAX;
use crate::record::{Header, Kind, Record, RecordError};

pub const VERSION: u16 = 1;
/// Most payload bytes of one record.
pub const PAYLOAD_BYTES_MAX: u32 = 512 << 10;

/// Rows of one position of the stripe.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct StoredSlice {
    pub position: u8,
    reserved: [u8; 3],
    /// First row, in bytes inside the chunk.
    pub row: U32,
    pub len: U32,
    reserved_b: [u8; 4],
}
const _: () = assert!(size_of::<StoredSlice>() == 16);

impl StoredSlice {
    pub fn new(position: u8, row: u32, len: u32) -> StoredSlice {
        let (row, len) = (U32::new(row), U32::new(len));
        StoredSlice { position, row, len, ..StoredSlice::default() }
    }
}

#[derive(Clone, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct JournalRecord {
    pub header: Header,
    pub array: [u8; 16],
    pub stripe: U64,
    /// Records with a smaller sequence are stored and durable in place.
    pub tail_sequence: U64,
    pub slice_count: U32,
    pub payload_bytes: U32,
    /// CRC32C of the payload.
    pub payload_checksum: U32,
    reserved_a: [u8; 20],
    pub slices: [StoredSlice; MEMBERS_MAX],
    reserved: [u8; 2944],
}
const _: () = assert!(size_of::<JournalRecord>() == 4096);
const _: () = assert!(std::mem::offset_of!(JournalRecord, slices) == 128);

impl JournalRecord {
    pub const BYTES: u64 = size_of::<JournalRecord>() as u64;

    /// All zero; the caller fills it in and seals it.
    pub fn blank() -> JournalRecord {
        zerocopy::FromZeros::new_zeroed()
    }

    /// The entries in use.
    pub fn slices(&self) -> &[StoredSlice] {
        &self.slices[..(self.slice_count.get() as usize).min(MEMBERS_MAX)]
    }
}

impl Record for JournalRecord {
    const KIND: Kind = Kind::JournalRecord;
    const VERSION: u16 = VERSION;
    const UPGRADES: &'static [crate::record::Upgrade] = &[];

    fn header(&self) -> &Header {
        &self.header
    }

    fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    fn check(&self) -> Result<(), RecordError> {
        if self.slice_count.get() as usize > MEMBERS_MAX {
            return Err(RecordError::Field("slice count"));
        }
        if self.slices().iter().any(|s| s.len.get() == 0 || !s.len.get().is_multiple_of(512)) {
            return Err(RecordError::Field("length of a slice"));
        }
        let total: u64 = self.slices().iter().map(|slice| u64::from(slice.len.get())).sum();
        if total != u64::from(self.payload_bytes.get())
            || self.payload_bytes.get() > PAYLOAD_BYTES_MAX
        {
            return Err(RecordError::Field("payload length"));
        }
        let reserved = self.reserved_a.iter().chain(&self.reserved);
        if reserved.into_iter().any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes"));
        }
        Ok(())
    }
}
