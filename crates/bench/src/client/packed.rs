//! The driver's side of a packed virtqueue (virtio 1.2, 2.8).
//!
//! One ring of descriptors, written by the driver and overwritten by the device. Whose turn it is
//! is said by two bits of the flags, which change their meaning each time the ring wraps.

use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::{
    VRING_PACKED_DESC_F_AVAIL, VRING_PACKED_DESC_F_USED, VRING_PACKED_EVENT_F_WRAP_CTR,
    VRING_PACKED_EVENT_FLAG_DESC, VRING_PACKED_EVENT_FLAG_DISABLE,
};

use crate::client::memory::Memory;
use crate::client::parts::{Places, RingSetup, Strange, Used};
use crate::client::slots::{DESCRIPTOR_BYTES, INDIRECT, NEXT, Piece, Slots, WRITE};

const NO_CALLS: u16 = 1;
const _: () = assert!(NO_CALLS as u32 == VRING_PACKED_EVENT_FLAG_DISABLE);
const AVAILABLE: u16 = 1 << VRING_PACKED_DESC_F_AVAIL;
const USED: u16 = 1 << VRING_PACKED_DESC_F_USED;
const WRAP: u16 = 1 << VRING_PACKED_EVENT_F_WRAP_CTR;
/// Of an event suppression structure (virtio 1.2, 2.8.14): offset and wrap, then flags.
const EVENT_FLAGS: usize = 2;
pub(crate) const EVENT_BYTES: usize = 4;

/// A place in the ring, and whether the wrap counter is 1 there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cursor {
    index: u16,
    wrap: bool,
}

impl Cursor {
    fn after(self, count: u16, size: u16) -> Cursor {
        let index = self.index + count;
        if index < size {
            return Cursor { index, ..self };
        }
        Cursor { index: index - size, wrap: !self.wrap }
    }
}

pub(crate) struct PackedRing {
    places: Places,
    size: u16,
    indirect: bool,
    event_index: bool,
    slots: Slots,
    writes: Vec<bool>,
    next: Cursor,
    /// Descriptors that were added since the device was last asked whether it wants a kick.
    added: u16,
    used: Cursor,
}

impl PackedRing {
    /// Bytes of the ring, and of the driver's and the device's event suppression.
    pub(crate) fn part_bytes(size: u16) -> [usize; 3] {
        [usize::from(size) * DESCRIPTOR_BYTES, EVENT_BYTES, EVENT_BYTES]
    }

    pub(crate) fn new(memory: &Memory, setup: &RingSetup, slots: Slots) -> PackedRing {
        let RingSetup { places, size, indirect, event_index } = *setup;
        let start = Cursor { index: 0, wrap: true };
        let ring = PackedRing {
            places,
            size,
            indirect,
            event_index,
            slots,
            writes: vec![false; usize::from(slots.count())],
            next: start,
            added: 0,
            used: start,
        };
        if indirect {
            (0..slots.count()).for_each(|slot| ring.lay_out(memory, slot, false));
        }
        // It polls: the device need not call.
        memory.u16(places.driver + EVENT_FLAGS).store(NO_CALLS.to_le(), Ordering::Relaxed);
        ring
    }

    /// The table of a slot (virtio 1.2, 2.8.8): of the flags only the direction counts.
    fn lay_out(&self, memory: &Memory, slot: u16, write: bool) {
        for index in 0..self.slots.chain() {
            let piece = self.slots.piece(memory, slot, index, write);
            let at = self.slots.table(slot) + usize::from(index) * DESCRIPTOR_BYTES;
            describe(memory, at, &piece, 0);
            memory.u16(at + 14).store(direction(&piece).to_le(), Ordering::Relaxed);
        }
    }

    /// Makes the chain of a slot available, at once: the device sees it when the flags of its first
    /// descriptor change, which are written last (virtio 1.2, 2.8.21.1).
    #[inline]
    pub(crate) fn add(&mut self, memory: &Memory, slot: u16, write: bool) {
        let first = self.next;
        if self.indirect {
            let known = &mut self.writes[usize::from(slot)];
            if std::mem::replace(known, write) != write {
                self.lay_out(memory, slot, write);
            }
            let len = self.slots.table_bytes();
            let address = memory.address(self.slots.table(slot));
            describe(memory, self.at(first), &Piece { address, len, writable: false }, slot);
            self.publish(memory, first, INDIRECT);
            self.advance(1);
            return;
        }
        let chain = self.slots.chain();
        let mut head_flags = 0;
        for index in 0..chain {
            let cursor = first.after(index, self.size);
            let piece = self.slots.piece(memory, slot, index, write);
            describe(memory, self.at(cursor), &piece, slot);
            let link = if index == chain - 1 { 0 } else { NEXT };
            let flags = direction(&piece) | link;
            if index == 0 {
                head_flags = flags;
            } else {
                let flags = flags | turn(cursor.wrap);
                memory.u16(self.at(cursor) + 14).store(flags.to_le(), Ordering::Relaxed);
            }
        }
        self.publish(memory, first, head_flags);
        self.advance(chain);
    }

    fn publish(&self, memory: &Memory, first: Cursor, flags: u16) {
        let flags = flags | turn(first.wrap);
        // Release: everything else of the chain is visible before.
        memory.u16(self.at(first) + 14).store(flags.to_le(), Ordering::Release);
    }

    fn advance(&mut self, count: u16) {
        self.next = self.next.after(count, self.size);
        self.added += count;
    }

    fn at(&self, cursor: Cursor) -> usize {
        self.places.descriptors + usize::from(cursor.index) * DESCRIPTOR_BYTES
    }

    /// Whether the device wants to be kicked for what was added (virtio 1.2, 2.8.21.3.1).
    #[inline]
    pub(crate) fn show(&mut self, memory: &Memory) -> bool {
        let added = std::mem::take(&mut self.added);
        if added == 0 {
            return false;
        }
        // As in a split ring: the flags are stored before the device's wish is read.
        fence(Ordering::SeqCst);
        // Both halves of the wish at once.
        let wish = u32::from_le(memory.u32(self.places.device).load(Ordering::Relaxed));
        let [low, high, flags, _] = wish.to_le_bytes();
        let (event, flags) = (u16::from_le_bytes([low, high]), u32::from(flags & 3));
        if flags == VRING_PACKED_EVENT_FLAG_DISABLE {
            return false;
        }
        if flags != VRING_PACKED_EVENT_FLAG_DESC || !self.event_index {
            return true;
        }
        wants_kick(event, self.next, added, self.size)
    }

    /// The next chain that the device has used (virtio 1.2, 2.8.22).
    #[inline]
    pub(crate) fn next_used(&mut self, memory: &Memory) -> Result<Option<Used>, Strange> {
        let at = self.at(self.used);
        // Acquire: id, length, status and data are read after the flags that show them.
        let flags = u16::from_le(memory.u16(at + 14).load(Ordering::Acquire));
        let (available, used) = (flags & AVAILABLE != 0, flags & USED != 0);
        if available != used || used != self.used.wrap {
            return Ok(None);
        }
        let bytes = u32::from_le(memory.u32(at + 8).load(Ordering::Relaxed));
        let id = u16::from_le(memory.u16(at + 12).load(Ordering::Relaxed));
        if id >= self.slots.count() {
            return Err(Strange::Id(id.into()));
        }
        let row = if self.indirect { 1 } else { self.slots.chain() };
        self.used = self.used.after(row, self.size);
        Ok(Some(Used { slot: id, bytes }))
    }
}

/// The flags of a descriptor that the device may take.
fn turn(wrap: bool) -> u16 {
    if wrap { AVAILABLE } else { USED }
}

fn direction(piece: &Piece) -> u16 {
    if piece.writable { WRITE } else { 0 }
}

/// Whether the place that the device asked for is among the `added` descriptors before `next`.
fn wants_kick(event: u16, next: Cursor, added: u16, size: u16) -> bool {
    let (at, wrap) = (event & !WRAP, event & WRAP != 0);
    // 16 descriptors, next at 2 in its second lap: 15 of the lap before is -1, 3 places back.
    let at = if wrap == next.wrap { at } else { at.wrapping_sub(size) };
    next.index.wrapping_sub(at).wrapping_sub(1) < added
}

/// Virtio 1.2, 2.8.13: all but the flags, which say whose it is.
fn describe(memory: &Memory, at: usize, piece: &Piece, id: u16) {
    memory.u64(at).store(piece.address.to_le(), Ordering::Relaxed);
    memory.u32(at + 8).store(piece.len.to_le(), Ordering::Relaxed);
    memory.u16(at + 12).store(id.to_le(), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    //! Goal: a kick is sent exactly when what the device asked for is among what is new.
    //! Method: every place that can be asked for, in both laps, beside the definition.

    use super::*;

    #[test]
    fn kicks_are_for_what_was_asked_for() {
        const SIZE: u16 = 8;
        for position in 0..2 * SIZE {
            let next = Cursor { index: position % SIZE, wrap: position < SIZE };
            for added in 1..=SIZE {
                for asked in 0..2 * SIZE {
                    let wrap = if asked < SIZE { WRAP } else { 0 };
                    let back = (2 * SIZE + position - asked - 1) % (2 * SIZE);
                    // What lies a lap or more back, or is not there yet, is not new.
                    let expected = back < added;
                    let found = wants_kick((asked % SIZE) | wrap, next, added, SIZE);
                    assert_eq!(found, expected, "{asked} of {added} before {position}");
                }
            }
        }
    }

    #[test]
    fn cursors_wrap() {
        let start = Cursor { index: 0, wrap: true };
        assert_eq!(start.after(7, 8), Cursor { index: 7, wrap: true });
        assert_eq!(start.after(8, 8), Cursor { index: 0, wrap: false });
        assert_eq!(start.after(5, 8).after(5, 8), Cursor { index: 2, wrap: false });
    }
}
