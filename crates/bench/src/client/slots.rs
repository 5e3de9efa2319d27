//! Where the parts of each request lie: header, status, table of descriptors, data. A slot serves
//! one request at a time, so all but a few bytes of it stay as they were laid out.

use std::sync::atomic::Ordering;

use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use crate::client::Wish;
use crate::client::memory::Memory;

/// Virtio 1.2, 5.2.6: type, a reserved word, and the sector.
pub(crate) const HEADER_BYTES: u32 = 16;
const STATUS_AT: usize = 16;
const TABLE_AT: usize = 32;
/// Of one descriptor, in a split or a packed ring.
pub(crate) const DESCRIPTOR_BYTES: usize = 16;
const DESCRIPTOR_BYTES_LOG2: u32 = 4;
const _: () = assert!(DESCRIPTOR_BYTES == 1 << DESCRIPTOR_BYTES_LOG2);
/// Flags of a descriptor, in either.
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;
const _: () = assert!(NEXT as u32 == VRING_DESC_F_NEXT && WRITE as u32 == VRING_DESC_F_WRITE);
const _: () = assert!(INDIRECT as u32 == VRING_DESC_F_INDIRECT);
/// No status of the specification: so an answer that was never written is seen.
const UNWRITTEN: u8 = 0xff;
const SECTOR_BYTES: u64 = 512;
const PAGE_BYTES: usize = 4096;

/// One piece of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) writable: bool,
}

/// What every slot looks like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotShape {
    segments: u16,
    segment_bytes: u32,
}

impl SlotShape {
    pub(crate) fn new(wish: &Wish) -> SlotShape {
        let segments = wish.segments;
        SlotShape { segments, segment_bytes: wish.block_bytes / u32::from(segments) }
    }

    /// Pieces of a chain: header, data, status.
    pub(crate) fn chain(&self) -> u16 {
        self.segments + 2
    }

    /// Of header, status and table, whole cache lines.
    fn head_bytes(&self) -> usize {
        (TABLE_AT + usize::from(self.chain()) * DESCRIPTOR_BYTES).next_multiple_of(64)
    }

    /// From one piece of data to the next: with a gap, so that nobody can join them.
    fn stride(&self) -> usize {
        let bytes = (self.segment_bytes as usize).next_multiple_of(PAGE_BYTES);
        if self.segments > 1 { bytes + PAGE_BYTES } else { bytes }
    }

    /// Of `count` slots.
    pub(crate) fn bytes(&self, count: u16) -> usize {
        let heads = (self.head_bytes() * usize::from(count)).next_multiple_of(PAGE_BYTES);
        heads + self.stride() * usize::from(self.segments) * usize::from(count)
    }
}

/// The slots of one queue, from a byte of the memory on, which begins a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slots {
    shape: SlotShape,
    start: usize,
    count: u16,
}

impl Slots {
    pub(crate) fn new(shape: SlotShape, start: usize, count: u16) -> Slots {
        Slots { shape, start, count }
    }

    pub(crate) fn count(&self) -> u16 {
        self.count
    }

    pub(crate) fn chain(&self) -> u16 {
        self.shape.chain()
    }

    /// Of one slot's table.
    pub(crate) fn table_bytes(&self) -> u32 {
        u32::from(self.chain()) << DESCRIPTOR_BYTES_LOG2
    }

    fn head(&self, slot: u16) -> usize {
        self.start + self.shape.head_bytes() * usize::from(slot)
    }

    pub(crate) fn table(&self, slot: u16) -> usize {
        self.head(slot) + TABLE_AT
    }

    fn data(&self, slot: u16, segment: u16) -> usize {
        let heads = self.shape.head_bytes() * usize::from(self.count);
        let index = usize::from(slot) * usize::from(self.shape.segments) + usize::from(segment);
        self.start + heads.next_multiple_of(PAGE_BYTES) + self.shape.stride() * index
    }

    /// A piece of the chain of `slot`, for a request that reads from the disk or writes to it.
    pub(crate) fn piece(&self, memory: &Memory, slot: u16, index: u16, write: bool) -> Piece {
        if index == 0 {
            let address = memory.address(self.head(slot));
            return Piece { address, len: HEADER_BYTES, writable: false };
        }
        if index == self.chain() - 1 {
            let address = memory.address(self.head(slot) + STATUS_AT);
            return Piece { address, len: 1, writable: true };
        }
        let address = memory.address(self.data(slot, index - 1));
        Piece { address, len: self.shape.segment_bytes, writable: !write }
    }

    /// Writes header and status (virtio 1.2, 5.2.6 Device Operation).
    #[inline]
    pub(crate) fn prepare(&self, memory: &Memory, slot: u16, offset: u64, write: bool) {
        let head = self.head(slot);
        let kind = if write { VIRTIO_BLK_T_OUT } else { VIRTIO_BLK_T_IN };
        memory.u32(head).store(kind.to_le(), Ordering::Relaxed);
        memory.u64(head + 8).store((offset / SECTOR_BYTES).to_le(), Ordering::Relaxed);
        memory.u8(head + STATUS_AT).store(UNWRITTEN, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn status(&self, memory: &Memory, slot: u16) -> u8 {
        memory.u8(self.head(slot) + STATUS_AT).load(Ordering::Relaxed)
    }

    pub(crate) fn write_data(&self, memory: &Memory, slot: u16, from: &[u8]) {
        let pieces = from.chunks(self.shape.segment_bytes as usize);
        pieces.zip(0..).for_each(|(part, index)| memory.write(self.data(slot, index), part));
    }

    pub(crate) fn read_data(&self, memory: &Memory, slot: u16, to: &mut [u8]) {
        let pieces = to.chunks_mut(self.shape.segment_bytes as usize);
        pieces.zip(0..).for_each(|(part, index)| memory.read(self.data(slot, index), part));
    }
}
