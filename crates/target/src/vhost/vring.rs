//! The device's side of a virtqueue (virtio 1.2, 2.6): what its two layouts have in common, and
//! the choice between them.
//!
//! Invariants, in both layouts:
//! - each field of guest memory is read once, compared with its limits, and used as read;
//! - a chain is popped once, in the order in which the driver made it available;
//! - used entries are written before the guest is shown the first of them.

mod split;
mod packed;

use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;

use crate::vhost::dirty::{Marked, RingLog};
use crate::vhost::fault::Fault;
use crate::vhost::inflight::Section;
use crate::vhost::memory::{GuestMemory, Window};
use crate::vhost::vring::packed::PackedRing;
use crate::vhost::vring::split::SplitRing;

/// Largest ring a guest may set up.
pub(crate) const RING_SIZE_MAX: u16 = 1024;
/// Most descriptors of one chain, those of its indirect table included. Drivers may go above the
/// ring's size with indirect tables, and Linux does.
pub(crate) const CHAIN_MAX: u16 = 1024;
const _: () = assert!(CHAIN_MAX >= RING_SIZE_MAX);
/// Descriptors that a new [`Chain`] has room for: more than any well-behaved guest uses.
const CHAIN_USUAL: usize = 130;
/// Of either layout.
const DESCRIPTOR_BYTES: usize = 16;

/// Addresses of a ring's parts, in the front end's address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingAddresses {
    pub(crate) descriptors: u64,
    /// What the driver writes: the available ring, or the driver's event suppression structure.
    pub(crate) available: u64,
    /// What the device writes: the used ring, or the device's event suppression structure.
    pub(crate) used: u64,
}

/// Chains whose way into the cache is begun before the first of them is popped.
const WARM_MAX: u16 = 16;

/// What a ring is set up with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingSetup {
    pub(crate) size: u32,
    pub(crate) addresses: RingAddresses,
    /// Where to go on, as [`Ring::base`] returned it.
    pub(crate) base: u32,
    pub(crate) features: u64,
}

impl RingSetup {
    pub(crate) fn has(&self, feature: u32) -> bool {
        self.features & (1 << feature) != 0
    }
}

/// Whether a ring may have so many descriptors under these features (virtio 1.2, 2.7 and 2.8: only
/// split rings need a power of two).
pub(crate) fn is_ring_size(size: u32, features: u64) -> bool {
    let packed = features & (1 << VIRTIO_F_RING_PACKED) != 0;
    size > 0 && size <= u32::from(RING_SIZE_MAX) && (packed || size.is_power_of_two())
}

/// A piece of guest memory that a descriptor names. Not yet compared with the guest's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) len: u32,
}

/// A popped chain as its ring knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Popped {
    pub(crate) id: u16,
    /// How many descriptors of the ring it takes up.
    pub(crate) descriptors: u16,
    pub(crate) entry: u16,
}

/// The pieces of one popped chain: first those that the device reads, then those that it writes.
#[derive(Debug)]
pub(crate) struct Chain {
    id: u16,
    descriptors: u16,
    /// In the log of what is in flight, of a packed ring.
    entry: u16,
    segments: Vec<Segment>,
    readable_count: usize,
    readable_bytes: u64,
    writable_bytes: u64,
}

impl Chain {
    /// Room for a chain, to be used again and again.
    pub(crate) fn new() -> Chain {
        Chain {
            id: 0,
            descriptors: 0,
            entry: 0,
            segments: Vec::with_capacity(CHAIN_USUAL),
            readable_count: 0,
            readable_bytes: 0,
            writable_bytes: 0,
        }
    }

    /// How the guest knows the chain: its first descriptor, or its buffer id.
    pub(crate) fn id(&self) -> u16 {
        self.id
    }

    /// What is to be given back.
    pub(crate) fn popped(&self) -> Popped {
        Popped { id: self.id, descriptors: self.descriptors, entry: self.entry }
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

    fn begin(&mut self) {
        self.segments.clear();
        (self.id, self.descriptors, self.entry) = (0, 0, 0);
        (self.readable_count, self.readable_bytes, self.writable_bytes) = (0, 0, 0);
    }

    fn push(&mut self, segment: Segment, writable: bool) -> Result<(), Fault> {
        let len = u64::from(segment.len);
        if len == 0 {
            return Err(Fault::EmptyDescriptor);
        }
        // No sum overflows: at most CHAIN_MAX times 4 GiB.
        if writable {
            self.writable_bytes += len;
        } else if self.writable_bytes > 0 {
            // Virtio 1.2, 2.7.4.2 and 2.8.17: the driver puts device-writable elements after all
            // others.
            return Err(Fault::DescriptorOrder);
        } else {
            self.readable_bytes += len;
            self.readable_count += 1;
        }
        self.segments.push(segment);
        Ok(())
    }
}

/// Finds an indirect table, and how many descriptors it has.
fn indirect_table(memory: &GuestMemory, at: Segment) -> Result<(Window, u16), Fault> {
    let (address, len) = (at.address, u64::from(at.len));
    let one = DESCRIPTOR_BYTES as u64;
    let count = u16::try_from(len / one).unwrap_or(u16::MAX);
    if count == 0 || count > CHAIN_MAX || !len.is_multiple_of(one) {
        return Err(Fault::IndirectLength(at.len));
    }
    let table = memory.view(address, len).ok_or(Fault::Unmapped { address, len })?;
    Ok((Window::new(table), count))
}

/// Begins to fetch what a request with an indirect table of the usual shape is read from first: its
/// header, which the first descriptor names, and where its status goes, which the last one does.
fn warm_request(memory: &GuestMemory, table: Segment) {
    let Ok((table, count)) = indirect_table(memory, table) else { return };
    for index in [0, count - 1] {
        let mut address = [0; 8];
        table.load_bytes(usize::from(index) * DESCRIPTOR_BYTES, &mut address);
        memory.prefetch(u64::from_le_bytes(address));
    }
}

/// Looks a part of a ring up in guest memory.
fn find_part(memory: &GuestMemory, user: u64, len: usize, align: usize) -> Result<Window, Fault> {
    let view = memory.view_of_user(user, len as u64).ok_or(Fault::RingUnmapped)?;
    Window::aligned(view, align).ok_or(Fault::RingAlignment)
}

/// The same of a part that the device writes to.
fn find_marked(memory: &GuestMemory, user: u64, len: usize, align: usize) -> Result<Marked, Fault> {
    find_part(memory, user, len, align).map(Marked::new)
}

/// One ring that is being served.
#[derive(Debug)]
pub(crate) enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

/// Does the same in either layout.
macro_rules! either {
    ($ring:expr, $name:ident => $does:expr) => {
        match $ring {
            Ring::Split($name) => $does,
            Ring::Packed($name) => $does,
        }
    };
}

impl Ring {
    /// `log`: where what is in flight is kept beyond this process.
    pub(crate) fn new(
        memory: &GuestMemory,
        setup: &RingSetup,
        log: Option<Section>,
    ) -> Result<Ring, Fault> {
        if !is_ring_size(setup.size, setup.features) {
            return Err(Fault::RingSize(setup.size));
        }
        if setup.has(VIRTIO_F_RING_PACKED) {
            return Ok(Ring::Packed(PackedRing::new(memory, setup, log)?));
        }
        Ok(Ring::Split(SplitRing::new(memory, setup, log)?))
    }

    /// Looks the ring up in a changed memory table. Where the new table does not have it, the old
    /// pages go on being used: a front end changes a region by taking it away and adding it.
    pub(crate) fn find_again(&mut self, memory: &GuestMemory) {
        either!(self, ring => ring.find_again(memory));
    }

    /// What the device writes to the ring is marked from now on, and at once what it may have
    /// written before; or not any more.
    pub(crate) fn log_to(&mut self, memory: &GuestMemory, log: Option<RingLog>) {
        either!(self, ring => ring.log_to(memory, log));
    }

    pub(crate) fn size(&self) -> u16 {
        either!(self, ring => ring.size())
    }

    /// Where another device would have to go on, as the front end is told (vhost-user, "A vring
    /// state description").
    pub(crate) fn base(&self) -> u32 {
        either!(self, ring => ring.base())
    }

    /// Looks for chains. True if there is one to pop.
    pub(crate) fn look(&mut self) -> Result<bool, Fault> {
        either!(self, ring => ring.look())
    }

    /// Whether there is another chain to pop, as far as is known without looking.
    pub(crate) fn has_more(&self) -> bool {
        either!(self, ring => ring.has_more())
    }

    /// Whether there are chains left that the process before had in flight. They are the first to
    /// be popped, and a ring can be left only without them.
    pub(crate) fn is_behind(&self) -> bool {
        either!(self, ring => ring.is_behind())
    }

    /// Pops the next chain into `chain`. False if there is none.
    pub(crate) fn pop(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<bool, Fault> {
        either!(self, ring => ring.pop(memory, chain))
    }

    /// Begins to fetch the next chains, all at once: each line of a guest's memory comes from the
    /// cache of another core, and to wait for one after the other takes longer than all the work.
    /// What is read here is used for nothing else.
    pub(crate) fn warm(&self, memory: &GuestMemory) {
        either!(self, ring => ring.warm(memory));
    }

    /// Writes a used entry for a popped chain. The guest sees it after the next
    /// [`Ring::show_used`] or [`Ring::tell_used`].
    pub(crate) fn push_used(&mut self, popped: Popped, bytes: u32) {
        either!(self, ring => ring.push_used(popped, bytes));
    }

    /// How many used entries, or descriptors that they stand for, the guest cannot see yet.
    pub(crate) fn unshown(&self) -> u16 {
        either!(self, ring => ring.unshown())
    }

    /// Shows all used entries, at least one, to a guest that looks. It may have to be told later.
    pub(crate) fn show_used(&mut self) {
        either!(self, ring => ring.show_used());
    }

    /// Whether there are used entries that the guest was not told of, or a call is owed.
    pub(crate) fn is_untold(&self) -> bool {
        either!(self, ring => ring.is_untold())
    }

    /// Shows what is not shown yet. True if the guest wants to be called for anything that was
    /// shown since this was last asked.
    pub(crate) fn tell_used(&mut self) -> bool {
        either!(self, ring => ring.tell_used())
    }

    /// The guest must be called at the next [`Ring::tell_used`].
    pub(crate) fn owe_call(&mut self) {
        either!(self, ring => ring.owe_call());
    }

    /// Asks the guest to kick for the next chain. True if there is one already.
    pub(crate) fn enable_kicks(&self) -> bool {
        either!(self, ring => ring.enable_kicks())
    }

    /// Kicks are not needed: someone polls.
    pub(crate) fn disable_kicks(&self) {
        either!(self, ring => ring.disable_kicks());
    }

    /// The ring is at rest. Who serves it next may never have heard of [`Ring::base`]; if
    /// `front_end_knows` it, that is all that counts.
    pub(crate) fn leave(&self, front_end_knows: bool) {
        either!(self, ring => ring.leave(front_end_knows));
    }

    /// The front end knows now where a ring stands that was left before.
    pub(crate) fn forget_left(
        memory: &GuestMemory,
        at: RingAddresses,
        features: u64,
        log: Option<RingLog>,
    ) {
        if features & (1 << VIRTIO_F_RING_PACKED) != 0 {
            PackedRing::forget_left(memory, at, log);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
