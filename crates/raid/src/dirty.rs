//! Regions that are or were lately written in place, and what a member misses that is away.
//!
//! Invariants:
//! - a region stays in here until every write to it is durable on every member that was not behind;
//! - while a member is behind that may come back, a region leaves here, and a batch leaves the
//!   journal, only after the region is in the map of missed regions, durably. So whatever such a
//!   member lacks is in one of the two maps or in the journal, before and after a crash;
//! - where the journal does not cover a write, its region is in the dirty map, durably, before it
//!   begins: after a crash its parity or copies are made anew.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::units::{RegionIndex, to_usize};
use ashlar_reactor::backend::Instant;
use ashlar_reactor::executor::Reactor;

use crate::error::ArrayError;
use crate::members::{Members, Size};
use crate::missed::Behind;
use crate::region_map::RegionMap;

/// A region that nobody wrote to for this long is cleaned.
pub const QUIET_BEFORE_CLEAN: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Default)]
struct Region {
    /// Written since it was cleaned.
    touched: bool,
    writers: u32,
    last_write: Instant,
}

pub struct Dirty {
    reactor: Reactor,
    members: Rc<Members>,
    pub(crate) map: Rc<RegionMap>,
    pub(crate) missed: Rc<RegionMap>,
    regions: RefCell<Vec<Region>>,
}

/// Keeps a region from being cleaned while a write to it is under way.
pub struct RegionGuard {
    dirty: Rc<Dirty>,
    region: RegionIndex,
}

impl Drop for RegionGuard {
    fn drop(&mut self) {
        let now = self.dirty.reactor.now();
        let region = &mut self.dirty.regions.borrow_mut()[to_usize(self.region.0)];
        region.writers -= 1;
        region.last_write = now;
    }
}

impl Dirty {
    pub fn new(
        reactor: &Reactor,
        members: Rc<Members>,
        map: Rc<RegionMap>,
        missed: Rc<RegionMap>,
    ) -> Rc<Dirty> {
        let mut regions = vec![Region::default(); to_usize(map.regions())];
        for region in map.inside() {
            regions[to_usize(region.0)].touched = true;
        }
        let (reactor, regions) = (reactor.clone(), RefCell::new(regions));
        Rc::new(Dirty { reactor, members, map, missed, regions })
    }

    /// See `RegionMap::prepare`.
    pub(crate) async fn prepare(&self, size: Size) -> Result<(), ArrayError> {
        self.map.prepare(size).await?;
        self.missed.prepare(size).await
    }

    /// See `RegionMap::adopt`. It is idle.
    pub(crate) fn adopt(&self, size: Size) {
        let merged = self.map.merged(size, &self.regions.borrow(), |parts| Region {
            touched: parts.iter().any(|part| part.touched),
            writers: parts.iter().map(|part| part.writers).sum(),
            last_write: parts.iter().map(|part| part.last_write).max().unwrap_or_default(),
        });
        assert!(merged.iter().all(|region| region.writers == 0), "a region is being written");
        *self.regions.borrow_mut() = merged;
        self.map.adopt(size);
        self.missed.adopt(size);
    }

    /// Before a write that the journal covers.
    pub fn touch(self: &Rc<Self>, region: RegionIndex) -> RegionGuard {
        let state = &mut self.regions.borrow_mut()[to_usize(region.0)];
        state.writers += 1;
        state.touched = true;
        RegionGuard { dirty: self.clone(), region }
    }

    /// Before any other: returns once the region's bit is durable.
    pub async fn mark(self: &Rc<Self>, region: RegionIndex) -> Result<RegionGuard, ArrayError> {
        let guard = self.touch(region);
        self.map.insert(&[region]).await?;
        Ok(guard)
    }

    /// As after writes to all of these; returns once their bits are durable.
    pub(crate) async fn mark_all(&self, regions: &[RegionIndex]) -> Result<(), ArrayError> {
        for region in regions {
            self.regions.borrow_mut()[to_usize(region.0)].touched = true;
        }
        self.map.insert(regions).await
    }

    /// Regions that nobody wrote to for `quiet_for`: they could be cleaned, were all their writes
    /// durable.
    pub fn quiet(&self, quiet_for: Duration) -> Vec<RegionIndex> {
        let now = self.reactor.now();
        self.regions_that(|r| r.touched && r.writers == 0 && now.since(r.last_write) >= quiet_for)
    }

    /// Whether nobody has a guard.
    pub fn is_idle(&self) -> bool {
        self.regions.borrow().iter().all(|region| region.writers == 0)
    }

    /// Whether nothing was written in place since all was cleaned.
    pub fn is_clean(&self) -> bool {
        self.map.count() == 0 && !self.regions.borrow().iter().any(|region| region.touched)
    }

    fn regions_that(&self, wanted: impl Fn(&Region) -> bool) -> Vec<RegionIndex> {
        let regions = self.regions.borrow();
        let wanted = regions.iter().enumerate().filter(|(_, region)| wanted(region));
        wanted.map(|(index, _)| RegionIndex(index as u64)).collect()
    }

    /// Cleans regions that were `quiet` before a flush of all members that has succeeded since, and
    /// that nobody wrote to meanwhile.
    pub async fn clean(
        &self,
        quiet: &[RegionIndex],
        flush_began: Instant,
    ) -> Result<(), ArrayError> {
        let _joins = self.members.hold_joins().await;
        self.note_missed(quiet).await?;
        let mut clean = Vec::new();
        for region in quiet {
            let state = &mut self.regions.borrow_mut()[to_usize(region.0)];
            if state.writers == 0 && state.last_write < flush_began {
                state.touched = false;
                clean.push(*region);
            }
        }
        clean.retain(|region| self.map.contains(*region));
        self.map.remove(&clean).await
    }

    /// Before batches of the journal are forgotten, and after the flush that made what they hold
    /// durable in place: nobody could tell any more what a member that was behind then lacks. The
    /// caller holds the joins.
    pub async fn before_release(&self) -> Result<(), ArrayError> {
        self.note_missed(&self.regions_that(|region| region.touched)).await
    }

    /// Makes sure that these regions are not forgotten for a member that is behind, by any who is
    /// believed.
    async fn note_missed(&self, regions: &[RegionIndex]) -> Result<(), ArrayError> {
        if !self.members.is_any_behind() {
            return Ok(());
        }
        self.missed.insert(regions).await?;
        self.members.fence_absent().await
    }

    /// What a member that comes back now lacks, at most.
    pub fn behind(&self) -> Behind {
        let lately = self.regions_that(|region| region.touched);
        self.map.set_of(self.missed.inside().into_iter().chain(lately))
    }

    /// Forgets what was missed, once nobody is behind.
    pub async fn clear_missed(&self) -> Result<(), ArrayError> {
        if self.members.is_any_behind() || self.missed.count() == 0 {
            return Ok(());
        }
        self.missed.remove(&self.missed.inside()).await
    }
}
