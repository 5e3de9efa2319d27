//! The log of a split ring: an entry for each descriptor, that of a chain's head says whether it is
//! under way.
//!
//! ```text
//! popped   counter, then "in flight"
//! used     the batch: each head links to the one before it, the header has the last
//! shown    the ring's used index, then no more "in flight" one by one, then the used index here
//! ```
//!
//! So while the two used indices differ, their difference is the length of a batch that the guest
//! can see and that may still be called in flight.

use std::sync::atomic::Ordering;

use crate::vhost::fault::Fault;
use crate::vhost::inflight::{Before, Section, in_order};

/// `QueueRegionSplit`: features, version, size, then these.
const LAST_BATCH_HEAD: usize = 12;
const USED_INDEX: usize = 14;
const HEADER_BYTES: usize = 16;
/// `DescStateSplit`.
pub(super) const ENTRY_BYTES: usize = 16;
const IN_FLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

fn entry(head: u16) -> usize {
    HEADER_BYTES + usize::from(head) * ENTRY_BYTES
}

#[derive(Debug)]
pub(crate) struct SplitLog {
    section: Section,
    counter: u64,
    /// The heads that were used and are not shown.
    batch: Vec<u16>,
    last_batch_head: u16,
}

/// A log, and if it was one already: the heads that are in flight, the first of them last.
type Opened = (SplitLog, Option<Vec<u16>>);

impl SplitLog {
    /// `used`: the ring's used index.
    pub(crate) fn open(section: Section, size: u16, used: u16) -> Result<Opened, Fault> {
        let batch = Vec::with_capacity(usize::from(size));
        let mut log = SplitLog { section, counter: 0, batch, last_batch_head: 0 };
        let heads = match log.section.find(size).ok_or(Fault::Inflight)? {
            Before::Blank => {
                (0..size).for_each(|head| log.set_in_flight(head, false));
                log.set_used(used);
                log.section.begin(size);
                return Ok((log, None));
            }
            Before::Log => log.recover(size, used)?,
        };
        Ok((log, Some(heads)))
    }

    fn recover(&mut self, size: u16, used: u16) -> Result<Vec<u16>, Fault> {
        let region = &self.section.region;
        let batch = used.wrapping_sub(region.load_u16(USED_INDEX, Ordering::Relaxed));
        if batch > size {
            return Err(Fault::Inflight);
        }
        self.last_batch_head = region.load_u16(LAST_BATCH_HEAD, Ordering::Relaxed);
        let mut head = self.last_batch_head;
        for _ in 0..batch {
            if head >= size {
                return Err(Fault::Inflight);
            }
            self.set_in_flight(head, false);
            head = region.load_u16(entry(head) + NEXT, Ordering::Relaxed);
        }
        self.set_used(used);
        let is_in_flight = |head: &u16| region.load_u8(entry(*head) + IN_FLIGHT) != 0;
        let counted = |head| (region.load_u64(entry(head) + COUNTER), head);
        let (counter, heads) = in_order((0..size).filter(is_in_flight).map(counted).collect());
        self.counter = counter;
        Ok(heads)
    }

    fn set_in_flight(&self, head: u16, is: bool) {
        self.section.region.store_u8(entry(head) + IN_FLIGHT, is.into());
    }

    fn set_used(&self, used: u16) {
        self.section.region.store_u16(USED_INDEX, used, Ordering::Release);
    }

    pub(crate) fn popped(&mut self, head: u16) {
        self.section.region.store_u64(entry(head) + COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.set_in_flight(head, true);
    }

    pub(crate) fn used(&mut self, head: u16) {
        let region = &self.section.region;
        region.store_u16(entry(head) + NEXT, self.last_batch_head, Ordering::Release);
        region.store_u16(LAST_BATCH_HEAD, head, Ordering::Release);
        self.last_batch_head = head;
        self.batch.push(head);
    }

    /// The ring's used index shows all that was used.
    pub(crate) fn shown(&mut self, used: u16) {
        for head in self.batch.drain(..) {
            self.section.region.store_u8(entry(head) + IN_FLIGHT, 0);
        }
        self.set_used(used);
    }

    pub(crate) fn blank(&self) {
        self.section.blank();
    }
}
