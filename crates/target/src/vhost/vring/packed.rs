//! A packed virtqueue (virtio 1.2, 2.8): one ring of descriptors, in which the driver makes chains
//! available and the device marks them used, and a structure on each side that says when it wants
//! to be told.
//!
//! Invariants:
//! - a used entry takes the place of a descriptor that was popped: `used` never passes `available`;
//! - of the used entries that the guest has not seen, the first is shown last;
//! - where there is a log of what is in flight, it tells where the ring stands;
//! - else, at rest, guest memory does ([`PackedRing::leave`]), unless the front end was told.
//!   Nothing else does: a front end cannot see it, and the descriptors of a chain that was used
//!   look like available ones, but for the first. So without a log a ring that was left in the
//!   middle of its work is refused.

use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT,
    VRING_DESC_F_WRITE, VRING_PACKED_EVENT_FLAG_DESC, VRING_PACKED_EVENT_FLAG_DISABLE,
    VRING_PACKED_EVENT_FLAG_ENABLE,
};

use crate::vhost::dirty::{Marked, RingLog};
use crate::vhost::fault::Fault;
use crate::vhost::inflight::Section;
use crate::vhost::inflight::packed::{Copied, Found, PackedLog};
use crate::vhost::memory::{GuestMemory, Window};
use crate::vhost::place::{AVAILABLE, Place, USED};
use crate::vhost::vring::{
    Chain, DESCRIPTOR_BYTES, Popped, RING_SIZE_MAX, RingAddresses, RingSetup, Segment, WARM_MAX,
    find_marked, find_part, indirect_table, warm_request,
};

const USED_LEN: usize = 8;
const USED_ID: usize = 12;
const FLAGS: usize = 14;

/// Virtio 1.2, 2.8.14 Event Suppression Structure Format: a place, and flags.
const EVENT_BYTES: usize = 4;
const EVENT_FLAGS_BITS: u32 = 2;
/// In the place of our own structure while it means nothing to the driver: this ring is served.
const SERVED: u16 = 0x7fff;
const _: () = assert!(SERVED > RING_SIZE_MAX);
/// In the reserved bits of our own structure while no device is at work: the place is where the
/// next one has to go on. While one is, they are zero.
const LEFT: u16 = 0x2b1d;

/// Virtio 1.2, 2.8.13 The Virtqueue Descriptor Table.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    segment: Segment,
    id: u16,
    flags: u16,
}

impl Descriptor {
    fn load(table: &Window, index: u16) -> Descriptor {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        table.load_bytes(usize::from(index) * DESCRIPTOR_BYTES, &mut bytes);
        // address: 64, len: 32, id: 16, flags: 16 bits, the first lowest.
        let all = u128::from_le_bytes(bytes);
        #[expect(clippy::cast_possible_truncation, reason = "the fields are cut out of one number")]
        Descriptor {
            segment: Segment { address: all as u64, len: (all >> 64) as u32 },
            id: (all >> 96) as u16,
            flags: (all >> 112) as u16,
        }
    }

    fn has(self, flag: u32) -> bool {
        u32::from(self.flags) & flag != 0
    }

    fn copied(self) -> Copied {
        let Descriptor { segment: Segment { address, len }, id, flags } = self;
        Copied { address, len, id, flags }
    }
}

impl From<Copied> for Descriptor {
    fn from(copied: Copied) -> Descriptor {
        let Copied { address, len, id, flags } = copied;
        Descriptor { segment: Segment { address, len }, id, flags }
    }
}

/// The three parts of a ring, as they lie in guest memory.
#[derive(Debug)]
struct Parts {
    descriptors: Marked,
    /// What the driver wants to be told.
    driver: Window,
    /// What the device wants to be told.
    device: Marked,
}

impl Parts {
    /// Sizes and alignments: virtio 1.2, 2.8.10.1.
    fn find(memory: &GuestMemory, at: RingAddresses, size: u16) -> Result<Parts, Fault> {
        let bytes = usize::from(size) * DESCRIPTOR_BYTES;
        Ok(Parts {
            descriptors: find_marked(memory, at.descriptors, bytes, 16)?,
            driver: find_part(memory, at.available, EVENT_BYTES, 4)?,
            device: find_marked(memory, at.used, EVENT_BYTES, 4)?,
        })
    }

    fn flags(&self, at: Place) -> u16 {
        // Acquire: the rest of the chain is read after the flags that announce it.
        self.descriptors.window().load_u16(flags_of(at), Ordering::Acquire)
    }

    /// Says what the device wants to be told; one store, so that the driver sees all of it.
    fn want(&self, place: u16, flags: u16) {
        let both = u32::from(place) | u32::from(flags) << 16;
        let store = |device: &Window| device.store_u32(0, both, Ordering::Relaxed);
        self.device.write(0, EVENT_BYTES, store);
    }

    fn set_flags(&self, at: Place, flags: u16) {
        let (at, len) = (flags_of(at), size_of::<u16>());
        self.descriptors.write(at, len, |ring| ring.store_u16(at, flags, Ordering::Release));
    }

    /// Where a device that is gone has left the ring, if it said so.
    fn left_at(&self, event_index: bool, told: Place) -> Result<Option<Place>, Fault> {
        let (place, flags) = halves(self.device.window().load_u32(0, Ordering::Acquire));
        if flags >> EVENT_FLAGS_BITS == LEFT {
            return Ok(Some(Place::from_bits(place)));
        }
        let asks = event_index && u32::from(flags) == VRING_PACKED_EVENT_FLAG_DESC;
        if place == SERVED || (asks && Place::from_bits(place) != told) {
            return Err(Fault::RingAbandoned);
        }
        Ok(None)
    }
}

fn flags_of(at: Place) -> usize {
    usize::from(at.index) * DESCRIPTOR_BYTES + FLAGS
}

fn halves(both: u32) -> (u16, u16) {
    #[expect(clippy::cast_possible_truncation, reason = "two halves")]
    (both as u16, (both >> 16) as u16)
}

/// Where the front end says that the ring stands: the next descriptor to pop, and the next to mark
/// used (vhost-user, "Vring descriptor indices for packed virtqueues").
fn told(base: u32, size: u16) -> Result<(Place, Place), Fault> {
    let (available, used) = halves(base);
    // Front ends of 16 bits say nothing of used descriptors; where nothing is under way, these are
    // the same.
    let used = if used == 0 { available } else { used };
    let (available, used) = (Place::from_bits(available), Place::from_bits(used));
    let inside = available.index < size && used.index < size;
    if !inside || used.distance(available, size) > size {
        return Err(Fault::RingBase(base));
    }
    Ok((available, used))
}

#[derive(Debug)]
pub(crate) struct PackedRing {
    parts: Parts,
    addresses: RingAddresses,
    size: u16,
    event_index: bool,
    indirect: bool,
    /// The next descriptor to pop.
    available: Place,
    /// The next descriptor to mark used.
    used: Place,
    /// The same, as the guest sees it.
    used_shown: Place,
    /// The same when the guest was last called, or did not want to be; and how many descriptors
    /// were used since, which may be more than a lap.
    used_told: Place,
    untold: u32,
    /// The flags that show everything from there on.
    held: u16,
    /// The guest is to be called whatever it asked for: its call file is new.
    call_owed: bool,
    log: Option<PackedLog>,
    dirty: Option<RingLog>,
    /// Chains that the process before had in flight, the next one last.
    again: Vec<Found>,
}

/// Where the front end, or the device before, says that the ring stands.
fn stands(parts: &Parts, setup: &RingSetup, size: u16) -> Result<(Place, Place), Fault> {
    let (mut available, mut used) = told(setup.base, size)?;
    // Some front ends say zero for a new ring, where the wrap counter is 1. On a ring that went
    // round, as zero tells, the last descriptor was made available at least once.
    let last = Place { index: size - 1, wrap: true };
    if setup.base == 0 && parts.flags(last) & (AVAILABLE | USED) == 0 {
        (available.wrap, used.wrap) = (true, true);
    }
    let event_index = setup.has(VIRTIO_RING_F_EVENT_IDX);
    if let Some(left) = parts.left_at(event_index, available)? {
        if left.index >= size {
            return Err(Fault::RingAbandoned);
        }
        (available, used) = (left, left);
    }
    Ok((available, used))
}

/// The log, where the next chain is and where the next is used, and those that are in flight.
type Stand = (PackedLog, (Place, Place), Vec<Found>);

/// The same from the log, if it has anything to say: then the ring goes on from there, and the
/// chains are those that are in flight, the first of them last.
fn stands_by_log(
    parts: &Parts,
    section: Section,
    setup: &RingSetup,
    size: u16,
) -> Result<Stand, Fault> {
    let is_shown = |at: Place| !at.is_available(parts.flags(at));
    let (mut log, found) = PackedLog::open(section, size, is_shown)?;
    let Some((used, found)) = found else {
        let (available, used) = stands(parts, setup, size)?;
        log.begin_at(used);
        return Ok((log, (available, used), Vec::new()));
    };
    let taken = found.iter().map(|chain| chain.descriptors).sum();
    // A batch that was not shown any more has left used descriptors behind the place where the
    // guest waits for the first; it would take them for ours.
    for at in (0..taken).map(|count| used.after(count, size)) {
        parts.set_flags(at, at.available_flags());
    }
    Ok((log, (used.after(taken, size), used), found))
}

impl PackedRing {
    pub(crate) fn new(
        memory: &GuestMemory,
        setup: &RingSetup,
        log: Option<Section>,
    ) -> Result<PackedRing, Fault> {
        let size = u16::try_from(setup.size).map_err(|_| Fault::RingSize(setup.size))?;
        let parts = Parts::find(memory, setup.addresses, size)?;
        let (log, (available, used), again) = match log {
            Some(section) => {
                let (log, places, again) = stands_by_log(&parts, section, setup, size)?;
                (Some(log), places, again)
            }
            None => (None, stands(&parts, setup, size)?, Vec::new()),
        };
        let ring = PackedRing {
            parts,
            addresses: setup.addresses,
            size,
            event_index: setup.has(VIRTIO_RING_F_EVENT_IDX),
            indirect: setup.has(VIRTIO_RING_F_INDIRECT_DESC),
            available,
            used,
            used_shown: used,
            used_told: used,
            untold: 0,
            held: 0,
            call_owed: true,
            log,
            dirty: None,
            again,
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

    /// The front end says where the device's structure is; the ring itself is where it is.
    pub(crate) fn log_to(&mut self, memory: &GuestMemory, log: Option<RingLog>) {
        let ring = memory.guest_of_user(self.addresses.descriptors);
        let ring = log.as_ref().and_then(|its| Some((its.log.clone(), ring?)));
        self.parts.descriptors.log_to(ring);
        self.parts.device.log_to(log.clone().map(|its| (its.log, its.used)));
        self.dirty = log;
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// Both places, the one to pop in the lower half.
    pub(crate) fn base(&self) -> u32 {
        u32::from(self.available.bits()) | u32::from(self.used.bits()) << 16
    }

    pub(crate) fn leave(&self, front_end_knows: bool) {
        if front_end_knows {
            self.log.iter().for_each(PackedLog::blank);
            self.parts.want(0, 0);
        } else if self.taken() == 0 {
            self.parts.want(self.available.bits(), LEFT << EVENT_FLAGS_BITS);
        }
    }

    /// Takes back what `leave` said, if it did.
    pub(crate) fn forget_left(memory: &GuestMemory, at: RingAddresses, log: Option<RingLog>) {
        let Ok(mut device) = find_marked(memory, at.used, EVENT_BYTES, 4) else { return };
        let (_, flags) = halves(device.window().load_u32(0, Ordering::Acquire));
        if flags >> EVENT_FLAGS_BITS == LEFT {
            device.write(0, EVENT_BYTES, |its| its.store_u32(0, 0, Ordering::Relaxed));
            device.log_to(log.map(|its| (its.log, its.used)));
        }
    }

    pub(crate) fn owe_call(&mut self) {
        self.call_owed = true;
    }

    pub(crate) fn look(&mut self) -> Result<bool, Fault> {
        Ok(self.has_more())
    }

    pub(crate) fn has_more(&self) -> bool {
        self.is_behind() || self.available.is_available(self.parts.flags(self.available))
    }

    pub(crate) fn is_behind(&self) -> bool {
        !self.again.is_empty()
    }

    /// See [`Ring::warm`](super::Ring::warm). Descriptors that follow each other the processor
    /// fetches ahead by itself.
    pub(crate) fn warm(&self, memory: &GuestMemory) {
        let ahead = |count| self.available.after(count, self.size);
        let there = |at: &Place| at.is_available(self.parts.flags(*at));
        let count = WARM_MAX.min(self.size);
        let load = |at: Place| Descriptor::load(self.parts.descriptors.window(), at.index);
        let all = || (0..count).map(ahead).take_while(there).map(load);
        let tables = || all().filter(|descriptor| descriptor.has(VRING_DESC_F_INDIRECT));
        for pointer in tables() {
            memory.prefetch(pointer.segment.address);
        }
        for pointer in tables() {
            warm_request(memory, pointer.segment);
        }
    }

    pub(crate) fn pop(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<bool, Fault> {
        if let Some(found) = self.again.pop() {
            chain.begin();
            self.walk_again(memory, chain, found)?;
            return Ok(true);
        }
        let flags = self.parts.flags(self.available);
        if !self.available.is_available(flags) {
            return Ok(false);
        }
        chain.begin();
        if let Some(log) = &mut self.log {
            log.begin();
        }
        self.walk(memory, chain, flags)?;
        if let Some(log) = &mut self.log {
            chain.entry = log.popped();
        }
        self.available = self.available.after(chain.descriptors, self.size);
        Ok(true)
    }

    /// Descriptors that were popped and are not marked used.
    fn taken(&self) -> u16 {
        self.used.distance(self.available, self.size)
    }

    /// Takes descriptor after descriptor, up to the end of the chain.
    fn walk(&mut self, memory: &GuestMemory, chain: &mut Chain, flags: u16) -> Result<(), Fault> {
        // A driver that overwrites what the device still has could go round for ever.
        let free = self.size - self.used_shown.distance(self.available, self.size);
        let mut at = self.available;
        while chain.descriptors < free {
            let mut descriptor = Descriptor::load(self.parts.descriptors.window(), at.index);
            if chain.descriptors == 0 {
                descriptor.flags = flags;
            }
            if let Some(log) = &mut self.log {
                log.copy(descriptor.copied());
            }
            if self.add(memory, chain, descriptor)? {
                return Ok(());
            }
            at = at.after(1, self.size);
        }
        Err(Fault::ChainLength(free))
    }

    /// The same from the log.
    fn walk_again(
        &self,
        memory: &GuestMemory,
        chain: &mut Chain,
        found: Found,
    ) -> Result<(), Fault> {
        chain.entry = found.head;
        for copied in self.log.iter().flat_map(|log| log.copies(found)) {
            let is_last = self.add(memory, chain, Descriptor::from(copied))?;
            if is_last != (chain.descriptors == found.descriptors) {
                return Err(Fault::Inflight);
            }
        }
        let whole = chain.descriptors == found.descriptors;
        whole.then_some(()).ok_or(Fault::Inflight)
    }

    /// Adds a descriptor to the chain. True if it is the last one.
    fn add(
        &self,
        memory: &GuestMemory,
        chain: &mut Chain,
        descriptor: Descriptor,
    ) -> Result<bool, Fault> {
        chain.descriptors += 1;
        // Virtio 1.2, 2.8.6: that of the last descriptor counts.
        chain.id = descriptor.id;
        let has_next = descriptor.has(VRING_DESC_F_NEXT);
        if descriptor.has(VRING_DESC_F_INDIRECT) {
            // Virtio 1.2, 2.8.19: a table is not part of a list.
            if has_next || chain.descriptors > 1 {
                return Err(Fault::IndirectChained);
            }
            self.walk_indirect(memory, chain, descriptor.segment)?;
            return Ok(true);
        }
        chain.push(descriptor.segment, descriptor.has(VRING_DESC_F_WRITE))?;
        Ok(!has_next)
    }

    /// Virtio 1.2, 2.8.7: all descriptors of the table, in order.
    fn walk_indirect(
        &self,
        memory: &GuestMemory,
        chain: &mut Chain,
        at: Segment,
    ) -> Result<(), Fault> {
        if !self.indirect {
            return Err(Fault::IndirectUnexpected);
        }
        let (table, count) = indirect_table(memory, at)?;
        for index in 0..count {
            let descriptor = Descriptor::load(&table, index);
            if descriptor.has(VRING_DESC_F_INDIRECT) {
                return Err(Fault::IndirectNested);
            }
            chain.push(descriptor.segment, descriptor.has(VRING_DESC_F_WRITE))?;
        }
        Ok(())
    }

    pub(crate) fn push_used(&mut self, popped: Popped, bytes: u32) {
        let Popped { id, descriptors, entry } = popped;
        assert!(descriptors > 0 && descriptors <= self.taken(), "used, and never popped");
        let at = self.used;
        // Virtio 1.2, 2.8.3: in a used descriptor it says that something was written.
        let written = if bytes > 0 { VRING_DESC_F_WRITE } else { 0 };
        let lap = if at.wrap { AVAILABLE | USED } else { 0 };
        let flags = lap | u16::try_from(written).unwrap_or(0);
        let is_first = at == self.used_shown;
        if is_first {
            self.held = flags;
        }
        let start = usize::from(at.index) * DESCRIPTOR_BYTES;
        self.parts.descriptors.write(start, DESCRIPTOR_BYTES, |ring| {
            ring.store_u32(start + USED_LEN, bytes, Ordering::Relaxed);
            ring.store_u16(start + USED_ID, id, Ordering::Relaxed);
            if !is_first {
                ring.store_u16(start + FLAGS, flags, Ordering::Release);
            }
        });
        self.used = at.after(descriptors, self.size);
        self.untold += u32::from(descriptors);
        if let Some(log) = &mut self.log {
            log.used(entry);
        }
    }

    /// In descriptors.
    pub(crate) fn unshown(&self) -> u16 {
        self.used_shown.distance(self.used, self.size)
    }

    pub(crate) fn show_used(&mut self) {
        if let Some(log) = &mut self.log {
            log.show(self.used);
        }
        // Release: data, status and the entries behind this one are visible before it is.
        self.parts.set_flags(self.used_shown, self.held);
        self.used_shown = self.used;
        if let Some(log) = &mut self.log {
            log.shown();
        }
    }

    pub(crate) fn is_untold(&self) -> bool {
        self.untold > 0 || self.call_owed
    }

    pub(crate) fn tell_used(&mut self) -> bool {
        if self.unshown() > 0 {
            self.show_used();
        }
        let first = std::mem::replace(&mut self.used_told, self.used);
        let count = std::mem::take(&mut self.untold);
        if std::mem::take(&mut self.call_owed) {
            return true;
        }
        // As in a split ring: without the fence both sides could miss the other's store.
        fence(Ordering::SeqCst);
        let (place, flags) = halves(self.parts.driver.load_u32(0, Ordering::Relaxed));
        match u32::from(flags) & ((1 << EVENT_FLAGS_BITS) - 1) {
            VRING_PACKED_EVENT_FLAG_DISABLE => false,
            VRING_PACKED_EVENT_FLAG_DESC if self.event_index => {
                u32::from(first.distance(Place::from_bits(place), self.size)) < count
            }
            _ => true,
        }
    }

    /// Virtio 1.2, 2.8.10.
    pub(crate) fn enable_kicks(&self) -> bool {
        let (place, flags) = if self.event_index {
            (self.available.bits(), VRING_PACKED_EVENT_FLAG_DESC)
        } else {
            (SERVED, VRING_PACKED_EVENT_FLAG_ENABLE)
        };
        self.parts.want(place, u16::try_from(flags).unwrap_or(0));
        // As in `tell_used`, on the other side.
        fence(Ordering::SeqCst);
        self.has_more()
    }

    pub(crate) fn disable_kicks(&self) {
        self.parts.want(SERVED, u16::try_from(VRING_PACKED_EVENT_FLAG_DISABLE).unwrap_or(1));
    }
}

#[cfg(test)]
mod tests;
