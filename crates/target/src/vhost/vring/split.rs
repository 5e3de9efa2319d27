//! A split virtqueue (virtio 1.2, 2.7): a table of descriptors, a ring of the chains that the
//! driver made available, a ring of those that the device has used.
//!
//! Invariants:
//! - an available entry is popped only after [`SplitRing::look`] saw it;
//! - used entries are written before the used index that shows them.

use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_AVAIL_F_NO_INTERRUPT,
    VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_USED_F_NO_NOTIFY,
};

use crate::vhost::dirty::{Marked, RingLog};
use crate::vhost::fault::Fault;
use crate::vhost::inflight::Section;
use crate::vhost::inflight::split::SplitLog;
use crate::vhost::memory::{GuestMemory, Window};
use crate::vhost::vring::{
    CHAIN_MAX, Chain, DESCRIPTOR_BYTES, Popped, RingAddresses, RingSetup, Segment, WARM_MAX,
    find_marked, find_part, indirect_table, warm_request,
};

const AVAILABLE_INDEX: usize = 2;
const AVAILABLE_RING: usize = 4;
const USED_INDEX: usize = 2;
const USED_RING: usize = 4;
const USED_ELEMENT_BYTES: usize = 8;

/// Virtio 1.2, 2.7.5 The Virtqueue Descriptor Table.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    segment: Segment,
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
            segment: Segment { address: all as u64, len: (all >> 64) as u32 },
            flags: (all >> 96) as u16,
            next: (all >> 112) as u16,
        }
    }

    fn has(self, flag: u32) -> bool {
        u32::from(self.flags) & flag != 0
    }
}

/// The three parts of a ring, as they lie in guest memory.
#[derive(Debug)]
struct Parts {
    descriptors: Window,
    available: Window,
    used: Marked,
}

impl Parts {
    fn find(memory: &GuestMemory, at: RingAddresses, size: u16) -> Result<Parts, Fault> {
        let size = usize::from(size);
        let available_bytes = AVAILABLE_RING + size * 2 + 2;
        let used_bytes = USED_RING + size * USED_ELEMENT_BYTES + 2;
        // Sizes and alignments: virtio 1.2, 2.7. Both rings end in a 16-bit event index.
        Ok(Parts {
            descriptors: find_part(memory, at.descriptors, size * DESCRIPTOR_BYTES, 16)?,
            available: find_part(memory, at.available, available_bytes, 2)?,
            used: find_marked(memory, at.used, used_bytes, 4)?,
        })
    }
}

/// An index, from a number of chains of one ring.
fn low(chains: usize) -> u16 {
    u16::try_from(chains).expect("at most RING_SIZE_MAX")
}

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
    /// The same when the guest was last called, or did not want to be.
    used_told: u16,
    /// The guest is to be called whatever it asked for: its call file is new.
    call_owed: bool,
    log: Option<SplitLog>,
    dirty: Option<RingLog>,
    /// Heads of chains that the process before had in flight, the next one last.
    again: Vec<u16>,
}

impl SplitRing {
    pub(crate) fn new(
        memory: &GuestMemory,
        setup: &RingSetup,
        log: Option<Section>,
    ) -> Result<SplitRing, Fault> {
        let size = u16::try_from(setup.size).map_err(|_| Fault::RingSize(setup.size))?;
        let base = u16::try_from(setup.base).map_err(|_| Fault::RingBase(setup.base))?;
        let parts = Parts::find(memory, setup.addresses, size)?;
        // The protocol gives the available index only; the used index is where it was left.
        let used = parts.used.window().load_u16(USED_INDEX, Ordering::Acquire);
        let opened = log.map(|section| SplitLog::open(section, size, used)).transpose()?;
        let (log, again) = opened.map_or((None, None), |(log, again)| (Some(log), again));
        // All that was popped is used or in flight. What a front end says that lost us is less.
        let next = again.as_ref().map_or(base, |heads| used.wrapping_add(low(heads.len())));
        let ring = SplitRing {
            parts,
            addresses: setup.addresses,
            size,
            event_index: setup.has(VIRTIO_RING_F_EVENT_IDX),
            indirect: setup.has(VIRTIO_RING_F_INDIRECT_DESC),
            available_next: next,
            available_seen: next,
            used_next: used,
            used_shown: used,
            used_told: used,
            call_owed: true,
            log,
            dirty: None,
            again: again.unwrap_or_default(),
        };
        ring.disable_kicks();
        Ok(ring)
    }

    pub(crate) fn find_again(&mut self, memory: &GuestMemory) {
        if let Ok(parts) = Parts::find(memory, self.addresses, self.size) {
            self.parts = parts;
            self.log_to(memory, self.dirty.clone());
        }
    }

    pub(crate) fn log_to(&mut self, _memory: &GuestMemory, log: Option<RingLog>) {
        self.parts.used.log_to(log.clone().map(|its| (its.log, its.used)));
        self.dirty = log;
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// Index of the first entry that was not popped.
    pub(crate) fn base(&self) -> u32 {
        u32::from(self.available_next)
    }

    pub(crate) fn owe_call(&mut self) {
        self.call_owed = true;
    }

    fn mask(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
    }

    /// Reads the available index.
    pub(crate) fn look(&mut self) -> Result<bool, Fault> {
        // Acquire: entries and descriptors are read after the index that announces them
        // (virtio 1.2, 2.7.13.3).
        let index = self.parts.available.load_u16(AVAILABLE_INDEX, Ordering::Acquire);
        let new = index.wrapping_sub(self.available_seen);
        let (from, size) = (self.available_next, self.size);
        if index.wrapping_sub(from) > size || new > size {
            return Err(Fault::AvailableJump { from, to: index, size });
        }
        self.available_seen = index;
        Ok(self.has_more())
    }

    pub(crate) fn has_more(&self) -> bool {
        self.is_behind() || self.available_next != self.available_seen
    }

    pub(crate) fn is_behind(&self) -> bool {
        !self.again.is_empty()
    }

    /// See [`Ring::warm`](super::Ring::warm).
    pub(crate) fn warm(&self, memory: &GuestMemory) {
        let count = self.available_seen.wrapping_sub(self.available_next).min(WARM_MAX);
        let head = |ahead: u16| {
            let entry = AVAILABLE_RING + self.mask(self.available_next.wrapping_add(ahead)) * 2;
            let head = self.parts.available.load_u16(entry, Ordering::Relaxed);
            (head < self.size).then_some(head)
        };
        let heads = || (0..count).filter_map(head);
        for head in heads() {
            self.parts.descriptors.prefetch(usize::from(head) * DESCRIPTOR_BYTES);
        }
        let first = |head| Descriptor::load(&self.parts.descriptors, head);
        let tables = || heads().map(first).filter(|first| first.has(VRING_DESC_F_INDIRECT));
        for pointer in tables() {
            memory.prefetch(pointer.segment.address);
        }
        for pointer in tables() {
            warm_request(memory, pointer.segment);
        }
    }

    pub(crate) fn pop(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<bool, Fault> {
        if let Some(head) = self.again.pop() {
            chain.begin();
            chain.id = head;
            self.walk(memory, chain)?;
            return Ok(true);
        }
        if !self.has_more() {
            return Ok(false);
        }
        let entry = AVAILABLE_RING + self.mask(self.available_next) * 2;
        let head = self.parts.available.load_u16(entry, Ordering::Relaxed);
        self.available_next = self.available_next.wrapping_add(1);
        chain.begin();
        chain.id = head;
        self.walk(memory, chain)?;
        if let Some(log) = &mut self.log {
            log.popped(head);
        }
        Ok(true)
    }

    /// Follows the chain from its head, and into an indirect table at its end.
    fn walk(&self, memory: &GuestMemory, chain: &mut Chain) -> Result<(), Fault> {
        let mut index = chain.id;
        while chain.descriptors < self.size {
            if index >= self.size {
                return Err(Fault::DescriptorIndex { index, count: self.size });
            }
            let descriptor = Descriptor::load(&self.parts.descriptors, index);
            chain.descriptors += 1;
            if descriptor.has(VRING_DESC_F_INDIRECT) {
                return self.walk_indirect(memory, chain, descriptor);
            }
            chain.push(descriptor.segment, descriptor.has(VRING_DESC_F_WRITE))?;
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
        let (table, count) = indirect_table(memory, pointer.segment)?;
        let mut index = 0;
        while chain.segments.len() < usize::from(CHAIN_MAX) {
            if index >= count {
                return Err(Fault::DescriptorIndex { index, count });
            }
            let descriptor = Descriptor::load(&table, index);
            if descriptor.has(VRING_DESC_F_INDIRECT) {
                return Err(Fault::IndirectNested);
            }
            chain.push(descriptor.segment, descriptor.has(VRING_DESC_F_WRITE))?;
            if !descriptor.has(VRING_DESC_F_NEXT) {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(Fault::ChainLength(CHAIN_MAX))
    }

    pub(crate) fn push_used(&mut self, popped: Popped, bytes: u32) {
        let head = popped.id;
        let entry = USED_RING + self.mask(self.used_next) * USED_ELEMENT_BYTES;
        self.parts.used.write(entry, USED_ELEMENT_BYTES, |used| {
            used.store_u32(entry, u32::from(head), Ordering::Relaxed);
            used.store_u32(entry + 4, bytes, Ordering::Relaxed);
        });
        self.used_next = self.used_next.wrapping_add(1);
        if let Some(log) = &mut self.log {
            log.used(head);
        }
    }

    pub(crate) fn leave(&self, front_end_knows: bool) {
        // The used index is in guest memory, and front ends go on from there; the log does, too.
        if front_end_knows {
            self.log.iter().for_each(SplitLog::blank);
        }
    }

    pub(crate) fn unshown(&self) -> u16 {
        self.used_next.wrapping_sub(self.used_shown)
    }

    pub(crate) fn show_used(&mut self) {
        // Release: data, status and used entries are visible before the index is.
        self.set_u16(USED_INDEX, self.used_next, Ordering::Release);
        self.used_shown = self.used_next;
        if let Some(log) = &mut self.log {
            log.shown(self.used_next);
        }
    }

    /// Stores to what only the device writes to.
    fn set_u16(&self, at: usize, value: u16, order: Ordering) {
        self.parts.used.write(at, size_of::<u16>(), |used| used.store_u16(at, value, order));
    }

    pub(crate) fn is_untold(&self) -> bool {
        self.used_next != self.used_told || self.call_owed
    }

    /// Virtio 1.2, 2.7.7.2: whether the guest wants to be called.
    pub(crate) fn tell_used(&mut self) -> bool {
        if self.unshown() > 0 {
            self.show_used();
        }
        let (old, new) = (self.used_told, self.used_shown);
        self.used_told = new;
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

    /// Virtio 1.2, 2.7.10.1.
    pub(crate) fn enable_kicks(&self) -> bool {
        if self.event_index {
            let at = USED_RING + usize::from(self.size) * USED_ELEMENT_BYTES;
            self.set_u16(at, self.available_seen, Ordering::Relaxed);
        } else {
            self.set_u16(0, 0, Ordering::Relaxed);
        }
        // The wish is stored before the index is read again, as in `tell_used` on the other side.
        fence(Ordering::SeqCst);
        let index = self.parts.available.load_u16(AVAILABLE_INDEX, Ordering::Acquire);
        index != self.available_next || self.is_behind()
    }

    /// With an event index nothing is to be done, since the guest kicks only when it passes the
    /// entry that was asked for.
    pub(crate) fn disable_kicks(&self) {
        if !self.event_index {
            let flags = u16::try_from(VRING_USED_F_NO_NOTIFY).unwrap_or(1);
            self.set_u16(0, flags, Ordering::Relaxed);
        }
    }
}
