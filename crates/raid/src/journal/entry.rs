//! What a batch of the journal says.

use ashlar_format::journal_batch::{EntryKind, StoredEntry};
use ashlar_format::units::StripeIndex;
use ashlar_reactor::buffer::Buffer;
use smallvec::SmallVec;

use crate::layout::Positions;

/// What parity is about to be stored with: these chunks, with the newest bytes of their rows in
/// the batches up to `newest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NewData {
    pub(crate) chunks: Positions,
    pub(crate) newest: u64,
    /// The first batch that has some of these bytes.
    pub(crate) oldest: u64,
}

impl NewData {
    /// An entry of parity with this.
    fn of(&self, mut entry: StoredEntry) -> StoredEntry {
        entry.chunks = self.chunks.into();
        entry.newest = self.newest.into();
        entry.oldest = self.oldest.into();
        entry
    }
}

/// One thing that a batch says.
#[derive(Clone)]
pub(crate) enum Entry {
    Data {
        stripe: StripeIndex,
        chunk: u8,
        row: u32,
        bytes: Buffer,
    },
    Parity {
        stripe: StripeIndex,
        position: u8,
        row: u32,
        bytes: Buffer,
        data: NewData,
    },
    /// Sums of `len` bytes of parity.
    ParitySums {
        stripe: StripeIndex,
        position: u8,
        row: u32,
        len: u32,
        sums: Buffer,
        data: NewData,
    },
    Zeroes {
        stripes: std::ops::Range<u64>,
    },
    /// Data of a stripe of the new shape. Who appends it makes it pending.
    Moved {
        stripe: StripeIndex,
        chunk: u8,
        row: u32,
        bytes: Buffer,
    },
}

/// Of one caller: nearly always one.
pub(crate) type Entries = SmallVec<[Entry; 1]>;

impl Entry {
    pub(super) fn payload(&self) -> Option<&Buffer> {
        match self {
            Entry::Data { bytes, .. }
            | Entry::Moved { bytes, .. }
            | Entry::Parity { bytes, .. } => Some(bytes),
            Entry::ParitySums { sums, .. } => Some(sums),
            Entry::Zeroes { .. } => None,
        }
    }

    /// The stripe, if it is of parity.
    pub(super) fn parity_of(&self) -> Option<StripeIndex> {
        match self {
            Entry::Parity { stripe, .. } | Entry::ParitySums { stripe, .. } => Some(*stripe),
            Entry::Data { .. } | Entry::Moved { .. } | Entry::Zeroes { .. } => None,
        }
    }

    pub(crate) fn payload_bytes(&self) -> u64 {
        self.payload().map_or(0, |bytes| bytes.len() as u64)
    }

    pub(super) fn stored(&self) -> StoredEntry {
        let len = |bytes: &Buffer| u32::try_from(bytes.len()).expect("at most a chunk");
        match self {
            Entry::Data { stripe, chunk, row, bytes } => {
                StoredEntry::new(EntryKind::Data, stripe.0, *chunk, *row, len(bytes))
            }
            Entry::Moved { stripe, chunk, row, bytes } => {
                StoredEntry::new(EntryKind::Moved, stripe.0, *chunk, *row, len(bytes))
            }
            Entry::Parity { stripe, position, row, bytes, data } => {
                let kind = EntryKind::Parity;
                data.of(StoredEntry::new(kind, stripe.0, *position, *row, len(bytes)))
            }
            Entry::ParitySums { stripe, position, row, len, data, .. } => {
                let kind = EntryKind::ParitySums;
                data.of(StoredEntry::new(kind, stripe.0, *position, *row, *len))
            }
            Entry::Zeroes { stripes } => {
                let count = u32::try_from(stripes.end - stripes.start).expect("few at once");
                StoredEntry::new(EntryKind::Zeroes, stripes.start, 0, 0, count)
            }
        }
    }
}

/// Of several entries.
pub(super) fn payload_bytes(entries: &[Entry]) -> u64 {
    entries.iter().map(Entry::payload_bytes).sum()
}
