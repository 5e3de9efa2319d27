//! The driver's side of a split virtqueue (virtio 1.2, 2.7).
//!
//! The chains of all slots are laid out once: with indirect descriptors each slot has a table of
//! its own and one descriptor of the ring; without, it has its own row of descriptors. For a
//! request only the direction of the data changes.

use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};

use crate::client::memory::Memory;
use crate::client::parts::{Places, RingSetup, Strange, Used};
use crate::client::slots::{DESCRIPTOR_BYTES, INDIRECT, NEXT, Slots, WRITE};

const INDEX: usize = 2;
const RING: usize = 4;
const USED_ELEMENT_BYTES: usize = 8;
/// The wish for a call is put so far ahead of what was seen, and again after half of that.
const FAR_AHEAD: u16 = 1 << 15;

const NO_CALLS: u16 = 1;
const _: () = assert!(NO_CALLS as u32 == VRING_AVAIL_F_NO_INTERRUPT);

pub(crate) struct SplitRing {
    places: Places,
    size: u16,
    indirect: bool,
    event_index: bool,
    slots: Slots,
    /// Which way the data of each slot's chain goes.
    writes: Vec<bool>,
    /// The next available entry, and the index that the device was shown.
    available: u16,
    shown: u16,
    /// The next used entry to look at.
    used: u16,
    /// What `used` was when the device was last told not to call.
    quiet: u16,
}

impl SplitRing {
    /// Bytes of descriptors, available ring and used ring (virtio 1.2, 2.7).
    pub(crate) fn part_bytes(size: u16) -> [usize; 3] {
        let size = usize::from(size);
        [size * DESCRIPTOR_BYTES, RING + size * 2 + 2, RING + size * USED_ELEMENT_BYTES + 2]
    }

    pub(crate) fn new(memory: &Memory, setup: &RingSetup, slots: Slots) -> SplitRing {
        let RingSetup { places, size, indirect, event_index } = *setup;
        let ring = SplitRing {
            places,
            size,
            indirect,
            event_index,
            slots,
            writes: vec![false; usize::from(slots.count())],
            available: 0,
            shown: 0,
            used: 0,
            quiet: 0,
        };
        for slot in 0..slots.count() {
            ring.lay_out(memory, slot);
        }
        memory.u16(places.driver).store(NO_CALLS.to_le(), Ordering::Relaxed);
        ring.ask_for_no_calls(memory);
        ring
    }

    /// The used index.
    pub(crate) fn base(&self, memory: &Memory) -> u32 {
        let index = memory.u16(self.places.device + INDEX).load(Ordering::Acquire);
        u32::from(u16::from_le(index))
    }

    /// The descriptor of a slot's piece, and what links to the next one.
    fn descriptor(&self, slot: u16, index: u16) -> (usize, u16) {
        let bytes = |count: u16| usize::from(count) * DESCRIPTOR_BYTES;
        if self.indirect {
            return (self.slots.table(slot) + bytes(index), index + 1);
        }
        let number = slot * self.slots.chain() + index;
        (self.places.descriptors + bytes(number), number + 1)
    }

    fn lay_out(&self, memory: &Memory, slot: u16) {
        let chain = self.slots.chain();
        for index in 0..chain {
            let piece = self.slots.piece(memory, slot, index, false);
            let (at, next) = self.descriptor(slot, index);
            let last = index == chain - 1;
            let link = if last { 0 } else { NEXT };
            let flags = link | if piece.writable { WRITE } else { 0 };
            describe(memory, at, piece.address, piece.len, flags, if last { 0 } else { next });
        }
        if self.indirect {
            let at = self.places.descriptors + usize::from(slot) * DESCRIPTOR_BYTES;
            let table = memory.address(self.slots.table(slot));
            describe(memory, at, table, self.slots.table_bytes(), INDIRECT, 0);
        }
    }

    /// Makes the chain of a slot available. The device sees it after [`SplitRing::show`].
    #[inline]
    pub(crate) fn add(&mut self, memory: &Memory, slot: u16, write: bool) {
        let known = &mut self.writes[usize::from(slot)];
        if *known != write {
            *known = write;
            for index in 1..self.slots.chain() - 1 {
                let flags = NEXT | if write { 0 } else { WRITE };
                let (at, _) = self.descriptor(slot, index);
                memory.u16(at + 12).store(flags.to_le(), Ordering::Relaxed);
            }
        }
        let head = if self.indirect { slot } else { slot * self.slots.chain() };
        let entry = self.places.driver + RING + usize::from(self.available % self.size) * 2;
        memory.u16(entry).store(head.to_le(), Ordering::Relaxed);
        self.available = self.available.wrapping_add(1);
    }

    /// Shows what was added. True if the device wants to be kicked (virtio 1.2, 2.7.13.3 and
    /// 2.7.13.4).
    #[inline]
    pub(crate) fn show(&mut self, memory: &Memory) -> bool {
        let (old, new) = (self.shown, self.available);
        if old == new {
            return false;
        }
        // Release: descriptors and entries are visible before the index.
        memory.u16(self.places.driver + INDEX).store(new.to_le(), Ordering::Release);
        self.shown = new;
        // The index is stored before the device's wish is read; the device stores its wish before
        // it reads the index again. Without the fence both could miss the other's store.
        fence(Ordering::SeqCst);
        if self.event_index {
            let at = self.places.device + RING + usize::from(self.size) * USED_ELEMENT_BYTES;
            let event = u16::from_le(memory.u16(at).load(Ordering::Relaxed));
            return new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old);
        }
        let flags = u16::from_le(memory.u16(self.places.device).load(Ordering::Relaxed));
        u32::from(flags) & VRING_USED_F_NO_NOTIFY == 0
    }

    /// The next chain that the device has used (virtio 1.2, 2.7.14).
    #[inline]
    pub(crate) fn next_used(&mut self, memory: &Memory) -> Result<Option<Used>, Strange> {
        // Acquire: the entry, the status and the data are read after the index that shows them.
        let index = memory.u16(self.places.device + INDEX).load(Ordering::Acquire);
        let index = u16::from_le(index);
        if index == self.used {
            return Ok(None);
        }
        if index.wrapping_sub(self.used) > self.size {
            return Err(Strange::Jump { from: self.used, to: index });
        }
        let entry = RING + usize::from(self.used % self.size) * USED_ELEMENT_BYTES;
        let at = self.places.device + entry;
        let id = u32::from_le(memory.u32(at).load(Ordering::Relaxed));
        let bytes = u32::from_le(memory.u32(at + 4).load(Ordering::Relaxed));
        self.used = self.used.wrapping_add(1);
        if self.used.wrapping_sub(self.quiet) >= FAR_AHEAD / 2 {
            self.quiet = self.used;
            self.ask_for_no_calls(memory);
        }
        let row = if self.indirect { 1 } else { u32::from(self.slots.chain()) };
        let slot = u16::try_from(id / row).ok().filter(|slot| *slot < self.slots.count());
        match slot.filter(|_| id.is_multiple_of(row)) {
            Some(slot) => Ok(Some(Used { slot, bytes })),
            None => Err(Strange::Id(id)),
        }
    }

    /// With an event index: the entry that a call is wished for is one that never comes near.
    fn ask_for_no_calls(&self, memory: &Memory) {
        let at = self.places.driver + RING + usize::from(self.size) * 2;
        let event = self.used.wrapping_add(FAR_AHEAD);
        memory.u16(at).store(event.to_le(), Ordering::Relaxed);
    }
}

/// Virtio 1.2, 2.7.5 The Virtqueue Descriptor Table.
fn describe(memory: &Memory, at: usize, address: u64, len: u32, flags: u16, next: u16) {
    memory.u64(at).store(address.to_le(), Ordering::Relaxed);
    memory.u32(at + 8).store(len.to_le(), Ordering::Relaxed);
    memory.u16(at + 12).store(flags.to_le(), Ordering::Relaxed);
    memory.u16(at + 14).store(next.to_le(), Ordering::Relaxed);
}
