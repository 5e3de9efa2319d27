//! A durable set of regions: which may have parity or copies that do not agree (dirty), which were
//! ever written, which a member missed.
//!
//! Invariant: a region's bit is durable on every member that keeps metadata before `mark` returns,
//! and is cleared only after every write to the region is durable.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::error::DriveError;
use ashlar_format::region_map::{MapKind, PAGES_MAX, REGIONS_PER_PAGE, RegionMapPage};
use ashlar_format::units::{MemberIndex, RegionIndex, StripeIndex, to_usize};
use ashlar_reactor::backend::Instant;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use ashlar_reactor::wait_list::WaitList;

use crate::error::ArrayError;
use crate::label;
use crate::members::{Identity, Members};

/// A region that nobody wrote to for this long is cleaned.
pub const QUIET_BEFORE_CLEAN: Duration = Duration::from_secs(3);
/// Fewest stripes of one region.
const REGION_STRIPES_MIN: u64 = 16;

/// Stripes covered by one bit, for an array of `stripes`.
pub fn region_stripes_for(stripes: u64) -> u32 {
    let wanted = stripes.div_ceil(PAGES_MAX * REGIONS_PER_PAGE);
    u32::try_from(wanted.max(REGION_STRIPES_MIN)).expect("less than 2^32 stripes a region")
}

#[derive(Clone, Copy, Default)]
struct Region {
    /// The bit shall be set.
    wanted: bool,
    /// The bit is known to be set on the drives.
    durable: bool,
    writers: u32,
    last_write: Instant,
}

struct Page {
    sequence: Cell<u64>,
    writing: Cell<bool>,
}

pub struct RegionMap {
    kind: MapKind,
    reactor: Reactor,
    identity: Rc<Identity>,
    members: Rc<Members>,
    regions: RefCell<Vec<Region>>,
    pages: Vec<Page>,
    waiting: WaitList,
}

/// Keeps a region dirty while a write to it is under way.
pub struct RegionGuard {
    map: Rc<RegionMap>,
    region: RegionIndex,
}

impl Drop for RegionGuard {
    fn drop(&mut self) {
        let now = self.map.reactor.now();
        let region = &mut self.map.regions.borrow_mut()[to_usize(self.region.0)];
        region.writers -= 1;
        region.last_write = now;
    }
}

impl RegionMap {
    /// `inside`: regions whose bit is set on the drives; `sequences`: of the pages there.
    pub fn new(
        kind: MapKind,
        reactor: &Reactor,
        identity: Rc<Identity>,
        members: Rc<Members>,
        inside: &[bool],
        sequences: &[u64],
    ) -> Rc<RegionMap> {
        let region = |bit: &bool| Region { wanted: *bit, durable: *bit, ..Region::default() };
        let page = |s: &u64| Page { sequence: Cell::new(*s), writing: Cell::new(false) };
        Rc::new(RegionMap {
            kind,
            reactor: reactor.clone(),
            identity,
            members,
            regions: RefCell::new(inside.iter().map(region).collect()),
            pages: sequences.iter().map(page).collect(),
            waiting: WaitList::default(),
        })
    }

    pub fn region_count(stripes: u64, region_stripes: u32) -> u64 {
        stripes.div_ceil(u64::from(region_stripes))
    }

    pub fn region_of(&self, stripe: StripeIndex) -> RegionIndex {
        RegionIndex(stripe.0 / u64::from(self.identity.region_stripes))
    }

    /// Stripes of a region.
    pub fn stripes_of(&self, region: RegionIndex) -> std::ops::Range<u64> {
        let size = u64::from(self.identity.region_stripes);
        let end = ((region.0 + 1) * size).min(self.identity.layout.stripes);
        region.0 * size..end
    }

    pub fn count(&self) -> u64 {
        self.regions.borrow().iter().filter(|region| region.durable).count() as u64
    }

    /// Returns once the region's bit is durable. The bit stays while the guard lives.
    pub async fn mark(self: &Rc<Self>, region: RegionIndex) -> Result<RegionGuard, ArrayError> {
        let index = to_usize(region.0);
        let durable = {
            let region = &mut self.regions.borrow_mut()[index];
            region.writers += 1;
            region.wanted = true;
            region.durable
        };
        let guard = RegionGuard { map: self.clone(), region };
        if !durable {
            let page = to_usize(region.0 / REGIONS_PER_PAGE);
            // Another page write may be under way, begun before this bit was wanted.
            while !self.regions.borrow()[index].durable {
                self.write_page_or_wait(page).await?;
            }
        }
        Ok(guard)
    }

    /// Dirty regions that nobody wrote to for `quiet_for`: they could be cleaned, were all their
    /// writes durable.
    pub fn quiet(&self, quiet_for: Duration) -> Vec<RegionIndex> {
        let now = self.reactor.now();
        let regions = self.regions.borrow();
        let quiet = regions.iter().enumerate().filter(|(_, region)| {
            let idle = now.since(region.last_write) >= quiet_for;
            region.durable && region.writers == 0 && idle
        });
        quiet.map(|(index, _)| RegionIndex(index as u64)).collect()
    }

    /// Clears the bits of regions that were `quiet` before a flush of all members that has
    /// succeeded since, and that nobody wrote to meanwhile.
    pub async fn clean(
        &self,
        quiet: &[RegionIndex],
        flush_began: Instant,
    ) -> Result<(), ArrayError> {
        let mut pages = Vec::new();
        for region in quiet {
            let state = &mut self.regions.borrow_mut()[to_usize(region.0)];
            if state.writers == 0 && state.last_write < flush_began {
                // From here a new writer waits for the bit again.
                state.wanted = false;
                state.durable = false;
                pages.push(to_usize(region.0 / REGIONS_PER_PAGE));
            }
        }
        pages.dedup();
        for page in pages {
            self.write_page(page).await?;
        }
        Ok(())
    }

    /// Writes every page to all members, as it is: for a member that has just joined.
    pub async fn write_all(&self) -> Result<(), ArrayError> {
        for page in 0..self.pages.len() {
            self.write_page(page).await?;
        }
        Ok(())
    }

    /// Group commit: one page write at a time serves all who wait.
    async fn write_page_or_wait(&self, page: usize) -> Result<(), ArrayError> {
        if self.pages[page].writing.get() {
            self.waiting.until(&self.reactor, || !self.pages[page].writing.get()).await;
            return Ok(());
        }
        self.write_page(page).await
    }

    async fn write_page(&self, page: usize) -> Result<(), ArrayError> {
        while self.pages[page].writing.get() {
            self.waiting.until(&self.reactor, || !self.pages[page].writing.get()).await;
        }
        self.pages[page].writing.set(true);
        let result = self.write_page_now(page).await;
        self.pages[page].writing.set(false);
        self.waiting.wake_all(&self.reactor);
        result
    }

    async fn write_page_now(&self, page: usize) -> Result<(), ArrayError> {
        let sequence = self.pages[page].sequence.get() + 1;
        self.pages[page].sequence.set(sequence);
        let first = page * to_usize(REGIONS_PER_PAGE);
        let wanted: Vec<bool> = {
            let regions = self.regions.borrow();
            let end = regions.len().min(first + to_usize(REGIONS_PER_PAGE));
            regions[first..end].iter().map(|region| region.wanted).collect()
        };
        let number = u32::try_from(page).expect("few pages");
        let mut record = RegionMapPage::empty(self.identity.uuid, self.kind, number);
        wanted.iter().enumerate().for_each(|(index, inside)| record.set(index, *inside));
        let targets: Vec<MemberIndex> = {
            let list = self.members.list();
            let kept = (0..list.len()).filter(|i| list[*i].keeps_metadata().is_some());
            kept.map(MemberIndex::new).collect()
        };
        let writes = targets.iter().map(|t| self.write_to(t.index(), record.clone(), sequence));
        let results = join_all(writes).await;
        self.members.fence_failed(&targets, &results).await?;
        for (index, wanted) in wanted.iter().enumerate() {
            let region = &mut self.regions.borrow_mut()[first + index];
            region.durable |= *wanted && region.wanted;
        }
        Ok(())
    }

    async fn write_to(
        &self,
        member: usize,
        mut record: RegionMapPage,
        sequence: u64,
    ) -> Result<(), DriveError> {
        let (drive, drive_uuid, at) = {
            let list = self.members.list();
            let drive = list[member].drive.clone().ok_or(DriveError::Gone)?;
            let area = label::map_area(&list[member].areas, self.kind);
            (drive, list[member].drive_uuid, area.offset)
        };
        let home = at + RegionMapPage::slot_offset(record.page.get(), sequence);
        label::write_record(&self.reactor, &drive, &mut record, drive_uuid, home, sequence).await?;
        drive.flush().await
    }
}
