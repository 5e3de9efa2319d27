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

/// An entry that is on a second list, or on one twice, or is none, is a fault: so no walk is longer
/// than the log.
fn visit(seen: &mut [bool], at: u16) -> Result<(), Fault> {
    let seen = seen.get_mut(usize::from(at)).ok_or(Fault::Inflight)?;
    if std::mem::replace(seen, true) { Err(Fault::Inflight) } else { Ok(()) }
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
        // Each entry is free, or of one chain in flight.
        let mut seen = vec![false; usize::from(self.size)];
        let free = self.free_entries(&mut seen)?;
        free.iter().for_each(|index| self.section.region.store_u8(entry(*index) + IN_FLIGHT, 0));
        self.settle();
        let chains = self.find_chains(&mut seen)?;
        if seen.contains(&false) {
            return Err(Fault::Inflight);
        }
        Ok((self.used, chains))
    }

    /// All of the free list.
    fn free_entries(&self, seen: &mut [bool]) -> Result<Vec<u16>, Fault> {
        let (mut all, mut at) = (Vec::new(), self.free);
        while at != self.size {
            visit(seen, at)?;
            all.push(at);
            at = self.next[usize::from(at)];
        }
        Ok(all)
    }

    fn find_chains(&mut self, seen: &mut [bool]) -> Result<Vec<Found>, Fault> {
        let region = &self.section.region;
        let mut chains = Vec::new();
        for head in 0..self.size {
            if region.load_u8(entry(head) + IN_FLIGHT) == 0 {
                continue;
            }
            let count = region.load_u16(entry(head) + COUNT, Ordering::Relaxed);
            let last = region.load_u16(entry(head) + LAST, Ordering::Relaxed);
            let mut at = head;
            visit(seen, at)?;
            for _ in 1..count {
                at = self.next[usize::from(at)];
                visit(seen, at)?;
            }
            if count == 0 || at != last {
                return Err(Fault::Inflight);
            }
            self.last[usize::from(head)] = last;
            let chain = Found { head, descriptors: count };
            chains.push((region.load_u64(entry(head) + COUNTER), chain));
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

#[cfg(test)]
mod tests {
    //! Goal: whatever a front end gives as a region becomes a log that can be used, or a fault.
    //! Method: entries written as a front end could; a log that is taken is used to the full.

    use std::sync::mpsc;

    use ashlar_reactor::prng::Prng;

    use super::*;
    use crate::vhost::inflight::{Inflight, MappedInflight, Shape, create};
    use crate::vhost::sigbus::Alarm;

    const SIZE: u16 = 8;

    /// A region with these links, from all of which nothing is in flight; `chains`: head, count,
    /// last.
    fn open(next: [u16; 8], free: u16, chains: &[(u16, u16, u16)]) -> Result<Opened, Fault> {
        let shape = Shape::new(1, SIZE, (1, SIZE)).unwrap();
        let (described, file) = create(shape).unwrap();
        let alarm = Alarm::new().unwrap();
        let mapped = MappedInflight::map(&file, shape, (0, described.mmap_size), &alarm).unwrap();
        let (graveyard, _retired) = mpsc::channel();
        let section = Inflight::adopt(mapped, &graveyard).of_queue(0).unwrap();
        let (mut log, _) = PackedLog::open(section.clone(), SIZE, |_| false)?;
        log.begin_at(Place { index: 0, wrap: true });
        (0..SIZE).zip(next).for_each(|(index, next)| log.link(index, next));
        log.store_free(free, free);
        for (head, count, last) in chains {
            let store = |at, value| section.region.store_u16(at, value, Ordering::Release);
            store(entry(*head) + LAST, *last);
            store(entry(*head) + COUNT, *count);
            section.region.store_u8(entry(*head) + IN_FLIGHT, 1);
        }
        PackedLog::open(section, SIZE, |_| false)
    }

    /// Answers all that is in flight, then pops as many descriptors as the ring has.
    fn use_up((mut log, found): Opened) {
        let (used, chains) = found.unwrap();
        for found in chains.into_iter().rev() {
            assert_eq!(log.copies(found).count(), usize::from(found.descriptors));
            log.used(found.head);
        }
        log.show(used);
        log.shown();
        for _ in 0..SIZE {
            log.begin();
            log.copy(Copied { address: 0, len: 1, id: 0, flags: 0 });
            log.popped();
        }
    }

    #[test]
    fn lists_that_overlap_are_faults() {
        let next = [5, 2, 3, 4, 5, 6, 7, 8];
        use_up(open(next, 6, &[(0, 2, 5), (1, 4, 4)]).unwrap());
        // As many entries as there are, and two of them twice.
        let overlap = [(0, 2, 5), (1, 1, 1), (2, 1, 2)];
        assert_eq!(open(next, 4, &overlap).unwrap_err(), Fault::Inflight);
        assert_eq!(
            open([1, 0, 3, 4, 5, 6, 7, 8], 2, &[(0, 65535, 0)]).unwrap_err(),
            Fault::Inflight
        );
        assert_eq!(
            open([1, 0, 3, 4, 5, 6, 7, 8], 0, &[]).unwrap_err(),
            Fault::Inflight,
            "a circle"
        );
        assert_eq!(open(next, 9, &[]).unwrap_err(), Fault::Inflight, "no entry");
        assert_eq!(open(next, 6, &[(0, 2, 5)]).unwrap_err(), Fault::Inflight, "on no list");
    }

    #[test]
    fn random_regions_are_used_or_refused() {
        let mut prng = Prng::from_seed(1);
        let mut taken = 0;
        for _ in 0..20_000 {
            let mut below = |end: u64| u16::try_from(prng.below(end)).unwrap();
            let mut next: [u16; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
            (0..below(3)).for_each(|_| next[usize::from(below(8))] = below(10));
            let (split, free) = (below(8), below(9));
            let chains = [(0, split, split.saturating_sub(1)), (split, below(9), below(8))];
            if let Ok(opened) = open(next, free, &chains[..usize::from(below(3))]) {
                taken += 1;
                use_up(opened);
            }
        }
        assert!(taken > 100, "{taken} were well-formed: too few to mean anything");
    }
}
