//! The log of a packed ring. Used descriptors take the places of others that are still in flight,
//! so it keeps copies: entries are lists, each the descriptors of a chain, and one list of those
//! that are free.
//!
//! ```text
//! popped   entries from the head of the free list, "in flight", then the free list's new head
//! shown    the batch's entries onto the free list, and the used place, both beside the old values;
//!          the ring's flags; no more "in flight" one by one; the new values become the old
//! ```
//!
//! Heads of the free list are one store, used places another: old and new in one. Where the used
//! places differ, the flags in the ring say which one counts.

use std::sync::atomic::Ordering;

use crate::vhost::fault::Fault;
use crate::vhost::inflight::{Before, Section, in_order};
use crate::vhost::place::Place;

/// `QueueRegionPacked`: features, version, size, then these. New and old head of the free list:
const FREE: usize = 12;
/// New and old used index, their wrap counters, and reserved bytes.
const USED: usize = 16;
pub(super) const HEADER_BYTES: usize = 32;
/// `DescStatePacked`.
pub(super) const ENTRY_BYTES: usize = 32;
const IN_FLIGHT: usize = 0;
/// Links to the next entry; of a head also to the last one, and how many there are.
const NEXT: usize = 2;
const LAST: usize = 4;
const COUNT: usize = 6;
const COUNTER: usize = 8;
/// The copy: buffer id and flags, length, address.
const ID: usize = 16;
const FLAGS: usize = 18;
const LEN: usize = 20;
const ADDRESS: usize = 24;

fn entry(index: u16) -> usize {
    HEADER_BYTES + usize::from(index) * ENTRY_BYTES
}

/// A descriptor of the ring as it was when it was popped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) id: u16,
    pub(crate) flags: u16,
}

/// A chain that was in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) head: u16,
    pub(crate) descriptors: u16,
}

/// A log, and if it was one already: the next place to use in its ring, and the chains in flight,
/// the first of them last. Their descriptors are those from that place on.
type Opened = (PackedLog, Option<(Place, Vec<Found>)>);

#[derive(Debug)]
pub(crate) struct PackedLog {
    section: Section,
    size: u16,
    counter: u64,
    /// As in the region, by entry; the region is not read while a ring is served.
    next: Vec<u16>,
    /// By entry of a head.
    last: Vec<u16>,
    /// `size`: there is none.
    free: u16,
    used: Place,
    /// Of the chain that is being popped.
    begun: Begun,
    /// The heads that were used and are not shown.
    batch: Vec<u16>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Begun {
    count: u16,
    last: u16,
    /// The next free entry.
    next: u16,
}

impl PackedLog {
    /// A log that was not one yet has to be begun. `is_shown`: whether the guest sees the
    /// descriptor at this place as used.
    pub(crate) fn open(
        section: Section,
        size: u16,
        is_shown: impl Fn(Place) -> bool,
    ) -> Result<Opened, Fault> {
        let state = section.find(size).ok_or(Fault::Inflight)?;
        let mut log = PackedLog {
            section,
            size,
            counter: 0,
            next: (1..=size).collect(),
            last: vec![0; usize::from(size)],
            free: 0,
            used: Place { index: 0, wrap: true },
            begun: Begun::default(),
            batch: Vec::with_capacity(usize::from(size)),
        };
        let found = match state {
            Before::Blank => None,
            Before::Log => Some(log.recover(is_shown)?),
        };
        Ok((log, found))
    }

    /// Nothing is in flight, and this is the next place to use.
    pub(crate) fn begin_at(&mut self, used: Place) {
        for index in 0..self.size {
            self.section.region.store_u8(entry(index) + IN_FLIGHT, 0);
            self.link(index, index + 1);
        }
        self.used = used;
        self.settle();
        self.section.begin(self.size);
    }

    fn recover(&mut self, is_shown: impl Fn(Place) -> bool) -> Result<(Place, Vec<Found>), Fault> {
        let free = self.section.region.load_u32(FREE, Ordering::Acquire).to_le_bytes();
        let [free, free_old] = [[free[0], free[1]], [free[2], free[3]]].map(u16::from_le_bytes);
        let used = self.section.region.load_u64(USED).to_le_bytes();
        let place = |index: [u8; 2], wrap: u8| {
            let place = Place { index: u16::from_le_bytes(index), wrap: wrap != 0 };
            (place.index < self.size && wrap <= 1).then_some(place).ok_or(Fault::Inflight)
        };
        let old = place([used[2], used[3]], used[5])?;
        let new = place([used[0], used[1]], used[4])?;
        let is_done = new != old && is_shown(old);
        (self.free, self.used) = if is_done { (free, new) } else { (free_old, old) };
        for index in 0..self.size {
            let next = self.section.region.load_u16(entry(index) + NEXT, Ordering::Relaxed);
            self.next[usize::from(index)] = next;
        }
        let free = self.free_entries()?;
        free.iter().for_each(|index| self.section.region.store_u8(entry(*index) + IN_FLIGHT, 0));
        self.settle();
        Ok((self.used, self.find_chains(free.len())?))
    }

    /// All of the free list.
    fn free_entries(&self) -> Result<Vec<u16>, Fault> {
        let (mut all, mut at) = (Vec::new(), self.free);
        while at != self.size {
            let next = self.next.get(usize::from(at)).ok_or(Fault::Inflight)?;
            if all.len() == usize::from(self.size) {
                return Err(Fault::Inflight);
            }
            all.push(at);
            at = *next;
        }
        Ok(all)
    }

    /// Each entry is free, or of one chain in flight.
    fn find_chains(&mut self, free: usize) -> Result<Vec<Found>, Fault> {
        let region = &self.section.region;
        let (mut taken, mut chains) = (0usize, Vec::new());
        for head in 0..self.size {
            if region.load_u8(entry(head) + IN_FLIGHT) == 0 {
                continue;
            }
            let count = region.load_u16(entry(head) + COUNT, Ordering::Relaxed);
            let last = region.load_u16(entry(head) + LAST, Ordering::Relaxed);
            let mut at = head;
            for _ in 1..count {
                at = *self.next.get(usize::from(at)).ok_or(Fault::Inflight)?;
            }
            if count == 0 || at != last || last >= self.size {
                return Err(Fault::Inflight);
            }
            self.last[usize::from(head)] = last;
            taken += usize::from(count);
            let chain = Found { head, descriptors: count };
            chains.push((region.load_u64(entry(head) + COUNTER), chain));
        }
        if taken + free != usize::from(self.size) {
            return Err(Fault::Inflight);
        }
        let (counter, chains) = in_order(chains);
        self.counter = counter;
        Ok(chains)
    }

    /// The descriptors of a chain that was found in flight.
    pub(crate) fn copies(&self, found: Found) -> impl Iterator<Item = Copied> {
        let region = &self.section.region;
        let next = |at: &u16| self.next.get(usize::from(*at)).copied().filter(|at| *at < self.size);
        let entries = std::iter::successors(Some(found.head), next);
        let entries = entries.take(usize::from(found.descriptors));
        entries.map(|at| Copied {
            address: region.load_u64(entry(at) + ADDRESS),
            len: region.load_u32(entry(at) + LEN, Ordering::Relaxed),
            id: region.load_u16(entry(at) + ID, Ordering::Relaxed),
            flags: region.load_u16(entry(at) + FLAGS, Ordering::Relaxed),
        })
    }

    fn link(&mut self, index: u16, next: u16) {
        self.section.region.store_u16(entry(index) + NEXT, next, Ordering::Release);
        self.next[usize::from(index)] = next;
    }

    fn store_free(&self, new: u16, old: u16) {
        let both = u32::from(new) | u32::from(old) << 16;
        self.section.region.store_u32(FREE, both, Ordering::Release);
    }

    fn store_used(&self, new: Place, old: Place) {
        let indices = u64::from(new.index) | u64::from(old.index) << 16;
        let wraps = u64::from(new.wrap) << 32 | u64::from(old.wrap) << 40;
        self.section.region.store_u64(USED, indices | wraps);
    }

    /// What is new becomes what was.
    fn settle(&self) {
        self.store_free(self.free, self.free);
        self.store_used(self.used, self.used);
    }

    /// A chain is about to be popped.
    pub(crate) fn begin(&mut self) {
        self.begun = Begun { count: 0, last: self.free, next: self.free };
    }

    /// One descriptor of it.
    pub(crate) fn copy(&mut self, copied: Copied) {
        let at = self.begun.next;
        let region = &self.section.region;
        region.store_u64(entry(at) + ADDRESS, copied.address);
        region.store_u32(entry(at) + LEN, copied.len, Ordering::Release);
        region.store_u16(entry(at) + FLAGS, copied.flags, Ordering::Release);
        region.store_u16(entry(at) + ID, copied.id, Ordering::Release);
        let count = self.begun.count + 1;
        self.begun = Begun { count, last: at, next: self.next[usize::from(at)] };
    }

    /// It is popped. Returns its entry.
    pub(crate) fn popped(&mut self) -> u16 {
        let (head, Begun { count, last, next }) = (self.free, self.begun);
        assert!(count > 0, "a chain of nothing");
        let region = &self.section.region;
        region.store_u16(entry(head) + LAST, last, Ordering::Release);
        region.store_u16(entry(head) + COUNT, count, Ordering::Release);
        region.store_u64(entry(head) + COUNTER, self.counter);
        region.store_u8(entry(head) + IN_FLIGHT, 1);
        self.store_free(next, next);
        self.last[usize::from(head)] = last;
        self.free = next;
        self.counter = self.counter.wrapping_add(1);
        head
    }

    pub(crate) fn used(&mut self, head: u16) {
        self.batch.push(head);
    }

    /// The flags of the first used descriptor will be stored next: that shows the batch. The next
    /// place to use is `used` then.
    pub(crate) fn show(&mut self, used: Place) {
        let (free_old, used_old) = (self.free, self.used);
        for at in 0..self.batch.len() {
            let head = self.batch[at];
            self.link(self.last[usize::from(head)], self.free);
            self.free = head;
        }
        self.used = used;
        self.store_free(self.free, free_old);
        self.store_used(used, used_old);
    }

    /// They are.
    pub(crate) fn shown(&mut self) {
        for head in self.batch.drain(..) {
            self.section.region.store_u8(entry(head) + IN_FLIGHT, 0);
        }
        self.settle();
    }

    pub(crate) fn blank(&self) {
        self.section.blank();
    }
}
