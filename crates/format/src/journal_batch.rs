//! One batch of the journal: writes that are acknowledged before they are in place, and what is
//! about to be stored with them.
//!
//! The batch is followed by its payload, the bytes of its entries in order, or by a share of that.
//! Batches stand in a ring of 4 KiB blocks; `sequence` orders them. See `docs/FORMAT.md`.

use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::xxh3_64_with_secret;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::record::{Header, Kind, Record, RecordError, Upgrade};
use crate::upgrade;

pub const VERSION: u16 = 3;
/// Most payload bytes of one batch.
pub const PAYLOAD_BYTES_MAX: u32 = 256 << 10;
/// Most shares of one batch: chunks of the widest stripe, and its parity chunks.
const SHARES_MAX: u32 = 64;
const PARITY_SHARES_MAX: u8 = 8;
/// Most entries of one batch.
pub const ENTRIES_MAX: usize = 82;

/// The first so many parity chunks of a stripe have sums in the journal; others stand there
/// themselves: with three chunks lost, parity that is new in part is not always enough to tell what
/// they held.
pub const SUMMED_PARITY_MAX: u8 = 2;
/// Most stripes that one entry of zeroes is of, unless a region of the array has more.
const ZEROED_STRIPES_MAX: u32 = 1024;
/// Rows that one sum is of: a drive writes so many, or none of them.
pub const SUM_ROWS: u32 = 512;
/// Bytes of a sum.
pub const SUM_BYTES: u32 = 8;

const HEADER_BYTES: u64 = 4096;
/// What a batch takes of the ring is a multiple of this, and so is a share.
pub const BLOCK_BYTES: u32 = 4096;
const RING_BYTES_MIN: u64 = 2 << 20;

/// Bytes of the ring for parity of all that one batch can hold, in batches of a few entries each,
/// and for what is lost where the ring turns.
pub const fn reserve_bytes(parity: u8) -> u64 {
    let payload = PAYLOAD_BYTES_MAX as u64;
    parity as u64 * (payload + 4 * HEADER_BYTES) + payload + 8 * HEADER_BYTES
}

/// Bytes of the ring for what it must hold of the parity of so many pending bytes: a quarter more
/// than the parity itself, for headers and for batches that are not full; of sums, a quarter of the
/// bytes, which is nearly all headers. (More is needed while all writes are of one sector, each in
/// a stripe of its own: then the oldest are put in place one batch after the other.)
pub const fn parity_bytes_max(parity: u8, pending: u64) -> u64 {
    let in_full = parity.saturating_sub(SUMMED_PARITY_MAX);
    in_full as u64 * pending + parity as u64 * (pending / 4)
}

/// Sums of parity: XXH3 of 64 bits (the xxHash specification), with the first eight bytes of the
/// array's UUID as its seed, so that no guest can make two parities alike. Made once for an array:
/// what XXH3 makes of a seed takes as long as a good part of a sum.
#[derive(Clone)]
pub struct ParitySum {
    secret: [u8; 192],
}

impl ParitySum {
    pub fn of_array(uuid: &[u8; 16]) -> ParitySum {
        let seed = uuid.first_chunk().expect("a UUID has more than eight bytes");
        ParitySum { secret: const_custom_default_secret(u64::from_le_bytes(*seed)) }
    }

    /// Of `SUM_ROWS` rows; to fewer than 241 bytes XXH3 would bring the seed by itself.
    pub fn of(&self, rows: &[u8; SUM_ROWS as usize]) -> u64 {
        xxh3_64_with_secret(rows, &self.secret)
    }
}

/// Least bytes of a ring for stripes with so many parity chunks: a third stays free for parity.
pub const fn ring_bytes_min(parity: u8) -> u64 {
    let wanted = 3 * reserve_bytes(parity);
    if wanted < RING_BYTES_MIN { RING_BYTES_MIN } else { wanted.next_multiple_of(1 << 20) }
}

/// Most stripes that one entry of zeroes is of, in an array with regions of so many stripes.
pub fn zeroed_stripes_max(region_stripes: u32) -> u32 {
    region_stripes.max(ZEROED_STRIPES_MAX)
}

/// What an entry holds. The number is on drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum EntryKind {
    /// Bytes of a data chunk.
    Data = 1,
    /// Bytes of a parity chunk that belong to data of other entries.
    Parity = 2,
    /// Whole stripes read as zeroes from here on; `len` counts them. No payload.
    Zeroes = 3,
    /// Bytes of a data chunk of a stripe that gets a new shape: they count once the superblock says
    /// that it has it.
    Moved = 4,
    /// Sums of parity that belongs to data of other entries: one of each `SUM_ROWS` of `len`.
    ParitySums = 5,
}

impl EntryKind {
    pub const ALL: [EntryKind; 5] = [
        EntryKind::Data,
        EntryKind::Parity,
        EntryKind::Zeroes,
        EntryKind::Moved,
        EntryKind::ParitySums,
    ];

    pub fn is_parity(self) -> bool {
        matches!(self, EntryKind::Parity | EntryKind::ParitySums)
    }

    fn from_number(number: u8) -> Option<EntryKind> {
        EntryKind::ALL.into_iter().find(|kind| *kind as u8 == number)
    }
}

/// Rows of one position of a stripe.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct StoredEntry {
    pub stripe: U64,
    /// First row, in bytes inside the chunk.
    pub row: U32,
    /// Bytes; of zeroes: stripes.
    pub len: U32,
    /// Of parity: the data chunks, as bits, whose new bytes it belongs to. They are in entries of
    /// other batches.
    pub chunks: U64,
    /// Of parity: these batches are not after this one.
    pub newest: U64,
    /// Of parity: the first of these batches.
    pub oldest: U64,
    pub kind: u8,
    pub position: u8,
    reserved: [u8; 6],
}
const _: () = assert!(size_of::<StoredEntry>() == 48);

impl StoredEntry {
    pub fn new(kind: EntryKind, stripe: u64, position: u8, row: u32, len: u32) -> StoredEntry {
        let (row, len) = (U32::new(row), U32::new(len));
        let kind = kind as u8;
        StoredEntry { stripe: stripe.into(), row, len, kind, position, ..StoredEntry::default() }
    }

    pub fn kind(&self) -> Result<EntryKind, RecordError> {
        EntryKind::from_number(self.kind).ok_or(RecordError::Field("kind of an entry"))
    }

    /// Bytes it has in the payload; zero for a kind that is not known.
    pub fn payload_len(&self) -> u32 {
        match self.kind() {
            Ok(EntryKind::Data | EntryKind::Parity | EntryKind::Moved) => self.len.get(),
            Ok(EntryKind::ParitySums) => self.len.get() / SUM_ROWS * SUM_BYTES,
            Ok(EntryKind::Zeroes) | Err(_) => 0,
        }
    }

    fn check(&self) -> Result<(), RecordError> {
        let counts_bytes = self.kind()? != EntryKind::Zeroes;
        if self.len.get() == 0 || counts_bytes && !self.len.get().is_multiple_of(512) {
            return Err(RecordError::Field("length of an entry"));
        }
        if !self.row.get().is_multiple_of(512) {
            return Err(RecordError::Field("row of an entry"));
        }
        if self.reserved.iter().any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes of an entry"));
        }
        Ok(())
    }
}

/// How a payload is divided among members: into `data` shares of equal length, the last one filled
/// up with zeroes, and `parity` shares of parity of these, which is that of a stripe with so many
/// chunks. Any `data` of them give it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    pub data: u8,
    pub parity: u8,
}

impl Division {
    /// Shares in all.
    pub fn shares(self) -> u8 {
        self.data + self.parity
    }

    /// Bytes of each share of so much payload.
    pub fn share_bytes(self, payload: u32) -> u32 {
        payload.div_ceil(self.data.into()).next_multiple_of(BLOCK_BYTES)
    }
}

/// Bytes of the ring that a batch with so much payload takes on each member.
pub fn ring_bytes(payload: u32, division: Option<Division>) -> u64 {
    let stored = division.map_or(payload, |division| division.share_bytes(payload));
    HEADER_BYTES + u64::from(stored.next_multiple_of(BLOCK_BYTES))
}

#[derive(Clone, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct JournalBatch {
    pub header: Header,
    pub array: [u8; 16],
    /// Batches with a smaller sequence are stored and durable in place.
    pub tail_sequence: U64,
    pub entry_count: U32,
    pub payload_bytes: U32,
    /// CRC32C of the payload, or of the share that follows here.
    pub payload_checksum: U32,
    /// Of the division; zero: the whole payload follows.
    data_shares: u8,
    parity_shares: u8,
    /// Which share follows here: data first.
    pub share: u8,
    reserved_a: [u8; 25],
    pub entries: [StoredEntry; ENTRIES_MAX],
    reserved: [u8; 32],
}
const _: () = assert!(size_of::<JournalBatch>() as u64 == HEADER_BYTES);
const _: () = assert!(std::mem::offset_of!(JournalBatch, entries) == 128);

impl JournalBatch {
    pub const BYTES: u64 = HEADER_BYTES;

    /// All zero; the caller fills it in and seals it.
    pub fn blank() -> JournalBatch {
        zerocopy::FromZeros::new_zeroed()
    }

    /// How the payload is divided; `None`: all of it follows.
    pub fn division(&self) -> Option<Division> {
        let division = Division { data: self.data_shares, parity: self.parity_shares };
        (division.data > 0).then_some(division)
    }

    pub fn set_division(&mut self, division: Option<Division>) {
        (self.data_shares, self.parity_shares) =
            division.map_or((0, 0), |its| (its.data, its.parity));
    }

    /// Bytes that follow and that the checksum is of: the payload, or a share of it.
    pub fn bytes_that_follow(&self) -> u32 {
        let payload = self.payload_bytes.get();
        self.division().map_or(payload, |division| division.share_bytes(payload))
    }

    /// The entries in use.
    pub fn entries(&self) -> &[StoredEntry] {
        &self.entries[..(self.entry_count.get() as usize).min(ENTRIES_MAX)]
    }
}

impl Record for JournalBatch {
    const KIND: Kind = Kind::JournalBatch;
    const VERSION: u16 = VERSION;
    const UPGRADES: &'static [Upgrade] = &upgrade::JOURNAL_BATCH_UPGRADES;

    fn header(&self) -> &Header {
        &self.header
    }

    fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    fn check(&self) -> Result<(), RecordError> {
        if self.entry_count.get() as usize > ENTRIES_MAX {
            return Err(RecordError::Field("entry count"));
        }
        self.entries().iter().try_for_each(StoredEntry::check)?;
        let total: u64 = self.entries().iter().map(|entry| u64::from(entry.payload_len())).sum();
        if total != u64::from(self.payload_bytes.get())
            || self.payload_bytes.get() > PAYLOAD_BYTES_MAX
        {
            return Err(RecordError::Field("payload length"));
        }
        let (data, parity) = (self.data_shares, self.parity_shares);
        let shares = u32::from(data) + u32::from(parity);
        let is_divided =
            data > 0 && (1..=PARITY_SHARES_MAX).contains(&parity) && self.payload_bytes.get() > 0;
        let is_share = is_divided && shares <= SHARES_MAX && u32::from(self.share) < shares;
        if !is_share && (data, parity, self.share) != (0, 0, 0) {
            return Err(RecordError::Field("division of the payload"));
        }
        let reserved = self.reserved_a.iter().chain(&self.reserved);
        if reserved.into_iter().any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes"));
        }
        Ok(())
    }
}

/// Version 1 had no divided batches.
pub(crate) fn v1_to_v2(_bytes: &mut [u8]) {}

/// Up to version 2 all parity of a band had sums, or none: of more than two chunks.
pub(crate) fn v2_to_v3(_bytes: &mut [u8]) {}
