//! The device's side of a split virtqueue (virtio 1.2, 2.7).
//!
//! Invariants:
//! - each field of guest memory is read once, compared with its limits, and used as read;
//! - an available entry is popped once, in order, and only after [`SplitRing::look`] saw it: so one
//!   turn of the reactor takes at most one ring of work;
//! - used entries are written before the used index that shows them.
//!
//! A packed ring would be a sibling of [`SplitRing`] with the same functions, and `queue.rs` would
//! hold an enum of the two.

use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_AVAIL_F_NO_INTERRUPT,
    VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_USED_F_NO_NOTIFY,
};

use crate::vhost::fault::Fault;
use crate::vhost::memory::{GuestMemory, Window};

/// Largest ring a guest may set up.
pub(crate) const RING_SIZE_MAX: u16 = 1024;
/// Most descriptors of one chain, those of its indirect table included. Drivers may go above the
/// ring's size with indirect tables, and Linux does.
pub(crate) const CHAIN_MAX: u16 = 1024;
const _: () = assert!(CHAIN_MAX >= RING_SIZE_MAX);
/// Descriptors that a new [`Chain`] has room for: more than any well-behaved guest uses.
const CHAIN_USUAL: usize = 130;

const DESCRIPTOR_BYTES: usize = 16;
const AVAILABLE_INDEX: usize = 2;
const AVAILABLE_RING: usize = 4;
const USED_INDEX: usize = 2;
const USED_RING: usize = 4;
const USED_ELEMENT_BYTES: usize = 8;

/// Addresses of a ring's parts, in the front end's address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingAddresses {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// What a ring is set up with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingSetup {
    pub(crate) size: u32,
    pub(crate) addresses: RingAddresses,
    /// Index of the first available entry to pop.
    pub(crate) base: u16,
    pub(crate) features: u64,
}

/// Virtio 1.2, 2.7.5 The Virtqueue Descriptor Table.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn load(table: &Window, index: u16) -> Descriptor {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        table.load_bytes(usize::from(index) * DESCRIPTOR_BYTES, &mut bytes);
        // address: 64, len: 32, flags: 16, next: 16 bits, the first lowest.
        let all = u128::from_le_bytes(bytes);
        #[expect(clippy::cast_possible_truncation, reason = "the fields are cut out of one number")]
        Descriptor {
            address: all as u64,
            len: (all >> 64) as u32,
            flags: (all >> 96) as u16,
            next: (all >> 112) as u16,
        }
    }

    fn has(self, flag: u32) -> bool {
        u32::from(self.flags) & flag != 0
    }
}

/// A piece of guest memory that a descriptor names. Not yet compared with the guest's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) len: u32,
}

/// The pieces of one popped chain: first those that the device reads, then those that it writes.
#[derive(Debug)]
pub(crate) struct Chain {
    head: u16,
    segments: Vec<Segment>,
    readable_count: usize,
    readable_bytes: u64,
    writable_bytes: u64,
}

impl Chain {
    /// Room for a chain, to be used again and again.
    pub(crate) fn new() -> Chain {
        Chain {
            head: 0,
            segments: Vec::with_capacity(CHAIN_USUAL),
            readable_count: 0,
            readable_bytes: 0,
            writable_bytes: 0,
        }
    }

    /// How the guest knows the chain.
    pub(crate) fn head(&self) -> u16 {
        self.head
    }

    pub(crate) fn readable(&self) -> &[Segment] {
        self.segments.get(..self.readable_count).unwrap_or_default()
    }

    pub(crate) fn writable(&self) -> &[Segment] {
        self.segments.get(self.readable_count..).unwrap_or_default()
    }

    pub(crate) fn readable_bytes(&self) -> u64 {
        self.readable_bytes
    }

    pub(crate) fn writable_bytes(&self) -> u64 {
        self.writable_bytes
    }

    fn begin(&mut self, head: u16) {
        self.head = head;
        self.segments.clear();
        (self.readable_count, self.readable_bytes, self.writable_bytes) = (0, 0, 0);
    }

    fn push(&mut self, descriptor: Descriptor) -> Result<(), Fault> {
        let Descriptor { address, len, .. } = descriptor;
        if len == 0 {
            return Err(Fault::EmptyDescriptor);
        }
        // No sum overflows: at most CHAIN_MAX times 4 GiB.
        if descriptor.has(VRING_DESC_F_WRITE) {
            self.writable_bytes += u64::from(len);
        } else if self.writable_bytes > 0 {
            // Virtio 1.2, 2.7.4.2: the driver puts device-writable elements after all others.
            return Err(Fault::DescriptorOrder);
        } else {
            self.readable_bytes += u64::from(len);
            self.readable_count += 1;
        }
        self.segments.push(Segment { address, len });
        Ok(())
    }
}

/// The three parts of a ring, as they lie in guest memory.
#[derive(Debug)]
struct Parts {
    descriptors: Window,
    available: Window,
    used: Window,
}

impl Parts {
    fn find(memory: &GuestMemory, at: RingAddresses, size: u16) -> Result<Parts, Fault> {
        let find = |user: u64, bytes: usize, align: usize| {
            let view = memory.view_of_user(user, bytes as u64).ok_or(Fault::RingUnmapped)?;
            Window::aligned(view, align).ok_or(Fault::RingAlignment)
        };
        let size = usize::from(size);
        // Sizes and alignments: virtio 1.2, 2.7. Both rings end in a 16-bit event index.
        Ok(Parts {
            descriptors: find(at.descriptors, size * DESCRIPTOR_BYTES, 16)?,
            available: find(at.available, AVAILABLE_RING + size * 2 + 2, 2)?,
            used: find(at.used, USED_RING + size * USED_ELEMENT_BYTES + 2, 4)?,
        })
    }
}

/// One ring that is being served.
#[derive(Debug)]
pub(crate) struct SplitRing {
    parts: Parts,
    addresses: RingAddresses,
    size: u16,
    event_index: bool,
    indirect: bool,
    /// The next available entry to pop.
    available_next: u16,
    /// The available index as last read; entries below it can be popped.
    available_seen: u16,
    /// The next used entry to write.
    used_next: u16,
    /// The used index as the guest sees it.
    used_shown: u16,
    /// The guest is to be called whatever it asked for: its call file is new.
    call_owed: bool,
}

impl SplitRing {
    pub(crate) fn new(memory: &GuestMemory, setup: &RingSetup) -> Result<SplitRing, Fault> {
        let size = u16::try_from(setup.size).map_err(|_| Fault::RingSize(setup.size))?;
        if !size.is_power_of_two() || size > RING_SIZE_MAX {
            return Err(Fault::RingSize(setup.size));
        }
        let parts = Parts::find(memory, setup.addresses, size)?;
        // The protocol gives the available index only; the used index is where it was left.
        let used = parts.used.load_u16(USED_INDEX, Ordering::Acquire);
        let ring = SplitRing {
            parts,
            addresses: setup.addresses,
            size,
            event_index: setup.features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0,
            indirect: setup.features & (1 << VIRTIO_RING_F_INDIRECT_DESC) != 0,
            available_next: setup.base,
            available_seen: setup.base,
            used_next: used,
            used_shown: used,
            call_owed: true,
        };
        ring.disable_kicks();
        Ok(ring)
    }

    /// Looks the ring up in a changed memory table. Where the new table does not have it, the old
    /// pages go on being used: a front end changes a region by taking it away and adding it.
    pub(crate) fn find_again(&mut self, memory: &GuestMemory) {
        if let Ok(parts) = Parts::find(memory, self.addresses, self.size) {
            self.parts = parts;
        }
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// Index of the first entry that was not popped.
    pub(crate) fn base(&self) -> u16 {
        self.available_next
    }

    /// The guest must be called at the next [`SplitRing::show_used`].
    pub(crate) fn owe_call(&mut self) {
        self.call_owed = true;
    }

    fn mask(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
    }

    /// Reads the available index. Returns how many entries are new since the last look.
    pub(crate) fn look(&mut self) -> Result<u16, Fault> {
        // Acquire: entries and descriptors are read after the index that announces them
        // (virtio 1.2, 2.7.13.3).
        let index = self.parts.available.load_u16(AVAILABLE_INDEX, Ordering::Acquire);
        let new = index.wrapping_sub(self.available_seen);
        if new == 0 {
            return Ok(0);
        }
        let (from, size) = (self.available_next, self.size);
        if index.wrapping_sub(from) > size || new > size {
            return Err(Fault::AvailableJump { from, to: index, size });
        }
        self.available_seen = index;
        Ok(new)
    }

    /// Pops the next chain that was seen into `chain`. False if there is none.
    pub(crate) fn pop(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<bool, Fault> {
        if self.available_next == self.available_seen {
            return Ok(false);
        }
        let entry = AVAILABLE_RING + self.mask(self.available_next) * 2;
        let head = self.parts.available.load_u16(entry, Ordering::Relaxed);
        self.available_next = self.available_next.wrapping_add(1);
        chain.begin(head);
        self.walk(memory, chain)?;
        Ok(true)
    }

    /// Follows the chain from its head, and into an indirect table at its end.
    fn walk(&self, memory: &GuestMemory, chain: &mut Chain) -> Result<(), Fault> {
        let mut index = chain.head;
        for _ in 0..self.size {
            if index >= self.size {
                return Err(Fault::DescriptorIndex { index, count: self.size });
            }
            let descriptor = Descriptor::load(&self.parts.descriptors, index);
            if descriptor.has(VRING_DESC_F_INDIRECT) {
                return self.walk_indirect(memory, chain, descriptor);
            }
            chain.push(descriptor)?;
            if !descriptor.has(VRING_DESC_F_NEXT) {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(Fault::ChainLength(self.size))
    }

    /// Virtio 1.2, 2.7.5.3 Indirect Descriptors.
    fn walk_indirect(
        &self,
        memory: &GuestMemory,
        chain: &mut Chain,
        pointer: Descriptor,
    ) -> Result<(), Fault> {
        if !self.indirect {
            return Err(Fault::IndirectUnexpected);
        }
        if pointer.has(VRING_DESC_F_NEXT) {
            return Err(Fault::IndirectChained);
        }
        let (address, len) = (pointer.address, u64::from(pointer.len));
        let one = DESCRIPTOR_BYTES as u64;
        let count = u16::try_from(len / one).unwrap_or(u16::MAX);
        if count == 0 || count > CHAIN_MAX || !len.is_multiple_of(one) {
            return Err(Fault::IndirectLength(pointer.len));
        }
        let table = memory.view(address, len).ok_or(Fault::Unmapped { address, len })?;
        let table = Window::new(table);
        let mut index = 0;
        while chain.segments.len() < usize::from(CHAIN_MAX) {
            if index >= count {
                return Err(Fault::DescriptorIndex { index, count });
            }
            let descriptor = Descriptor::load(&table, index);
            if descriptor.has(VRING_DESC_F_INDIRECT) {
                return Err(Fault::IndirectNested);
            }
            chain.push(descriptor)?;
            if !descriptor.has(VRING_DESC_F_NEXT) {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(Fault::ChainLength(CHAIN_MAX))
    }

    /// Writes a used entry. The guest sees it after the next [`SplitRing::show_used`].
    pub(crate) fn push_used(&mut self, head: u16, bytes: u32) {
        let entry = USED_RING + self.mask(self.used_next) * USED_ELEMENT_BYTES;
        self.parts.used.store_u32(entry, u32::from(head));
        self.parts.used.store_u32(entry + 4, bytes);
        self.used_next = self.used_next.wrapping_add(1);
    }

    /// Whether there are used entries that the guest cannot see yet, or a call is owed.
    pub(crate) fn has_unshown(&self) -> bool {
        self.used_next != self.used_shown || self.call_owed
    }

    /// Shows all used entries to the guest. True if it wants to be called (virtio 1.2, 2.7.7.2).
    pub(crate) fn show_used(&mut self) -> bool {
        let (old, new) = (self.used_shown, self.used_next);
        // Release: data, status and used entries are visible before the index is.
        self.parts.used.store_u16(USED_INDEX, new, Ordering::Release);
        self.used_shown = new;
        if std::mem::take(&mut self.call_owed) {
            return true;
        }
        // The index is stored before the guest's wish is read; the guest stores its wish before it
        // reads the index. Without the fence both could miss the other's store.
        fence(Ordering::SeqCst);
        if self.event_index {
            let at = AVAILABLE_RING + usize::from(self.size) * 2;
            let event = self.parts.available.load_u16(at, Ordering::Relaxed);
            return new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old);
        }
        let flags = self.parts.available.load_u16(0, Ordering::Relaxed);
        u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0
    }

    /// Asks the guest to kick for the next entry. True if there is one already (virtio 1.2,
    /// 2.7.10.1).
    pub(crate) fn enable_kicks(&self) -> bool {
        let (available, used) = (&self.parts.available, &self.parts.used);
        if self.event_index {
            let at = USED_RING + usize::from(self.size) * USED_ELEMENT_BYTES;
            used.store_u16(at, self.available_seen, Ordering::Relaxed);
        } else {
            used.store_u16(0, 0, Ordering::Relaxed);
        }
        // The wish is stored before the index is read again, as in `show_used` on the other side.
        fence(Ordering::SeqCst);
        available.load_u16(AVAILABLE_INDEX, Ordering::Acquire) != self.available_seen
    }

    /// Kicks are not needed: someone polls. With an event index nothing is to be done, since the
    /// guest kicks only when it passes the entry that was asked for.
    pub(crate) fn disable_kicks(&self) {
        if !self.event_index {
            let flags = u16::try_from(VRING_USED_F_NO_NOTIFY).unwrap_or(1);
            self.parts.used.store_u16(0, flags, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
