//! A durable set of regions: which may have parity or copies that do not agree (dirty), which were
//! ever written, which a member missed.
//!
//! Invariants:
//! - a page is durable on every member that keeps metadata before `insert` or `remove` returns;
//!   whoever could not take it is fenced before that;
//! - the newest page on any member decides. At start every page is written anew with a sequence
//!   beyond any that a crash may have left half-written, so nothing that was decided then is
//!   decided otherwise when an absent member comes back;
//! - no page for regions of another size is written before the superblock that says so is durable
//!   (but beside the pages that count, see `growth`).

pub(crate) mod growth;

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ashlar_format::drive_label::MemberLayout;
use ashlar_format::region_map::{MapKind, PAGES_MAX, REGIONS_PER_PAGE, RegionMapPage};
use ashlar_format::units::{RegionIndex, StripeIndex, to_usize};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use ashlar_reactor::wait_list::WaitList;

use crate::error::ArrayError;
use crate::filled::count_in_both;
use crate::label;
use crate::member::Keeper;
use crate::members::{Identity, Members};
use crate::missed::Behind;
use crate::own_generation::start_of_sequences;
use crate::view::View;

/// Fewest stripes of one region.
const REGION_STRIPES_MIN: u64 = 16;

/// Stripes covered by one bit, for an array of `stripes`.
pub fn region_stripes_for(stripes: u64) -> u32 {
    let wanted = stripes.div_ceil(PAGES_MAX * REGIONS_PER_PAGE);
    u32::try_from(wanted.max(REGION_STRIPES_MIN)).expect("less than 2^32 stripes a region")
}

/// A map as it was found on the members.
pub struct StoredMap {
    pub inside: Vec<bool>,
    /// Of the newest slot of each page.
    pub sequences: Vec<u64>,
    /// Pages that a crash has left on some members only, and who lacks them.
    pub(crate) lacking: Vec<(Keeper, RegionMapPage)>,
}

impl StoredMap {
    /// No region of the array is inside; no page was ever written.
    pub fn empty(stripes: u64, region_stripes: u32) -> StoredMap {
        let regions = RegionMap::region_count(stripes, region_stripes);
        let pages = RegionMapPage::pages_for(regions);
        StoredMap {
            inside: vec![false; to_usize(regions)],
            sequences: vec![0; to_usize(pages)],
            lacking: Vec::new(),
        }
    }

    /// As `Newest::spread`.
    pub(crate) async fn spread(&self, reactor: &Reactor, kind: MapKind) {
        let writes = self.lacking.iter().map(|(to, page)| {
            let sequence = page.header.sequence.get();
            let slot = RegionMapPage::slot_offset(page.page.get(), sequence);
            to.write(reactor, page, label::map_area(&to.areas, kind).offset + slot, sequence)
        });
        join_all(writes).await;
    }
}

#[derive(Clone, Copy, Default)]
struct Region {
    /// The bit shall be set.
    wanted: bool,
    /// The bit is known to be set on the drives.
    durable: bool,
}

struct Page {
    sequence: Cell<u64>,
    writing: Cell<bool>,
    /// Counts what makes it unknown what a start would find of it: regions that were taken out, and
    /// writes that failed.
    doubts: Cell<u64>,
    /// As many of them are over: it was written since.
    settled: Cell<u64>,
}

impl Page {
    fn doubt(&self) {
        self.doubts.set(self.doubts.get() + 1);
    }
}

pub struct RegionMap {
    kind: MapKind,
    reactor: Reactor,
    identity: Rc<Identity>,
    members: Rc<Members>,
    regions: RefCell<Vec<Region>>,
    /// Regions whose bit is not durable.
    outside: Cell<u64>,
    /// As many as there can be; the first ones are in use.
    pages: Vec<Page>,
    waiting: WaitList,
    /// It is told of regions that come and go.
    view: RefCell<Option<Arc<View>>>,
}

impl RegionMap {
    pub fn new(
        kind: MapKind,
        reactor: &Reactor,
        identity: Rc<Identity>,
        members: Rc<Members>,
        stored: &StoredMap,
    ) -> Rc<RegionMap> {
        let region = |bit: &bool| Region { wanted: *bit, durable: *bit };
        let page = |number: u64| Page {
            sequence: Cell::new(stored.sequences.get(to_usize(number)).copied().unwrap_or(0)),
            writing: Cell::new(false),
            doubts: Cell::new(0),
            settled: Cell::new(0),
        };
        let outside = stored.inside.iter().filter(|inside| !**inside).count() as u64;
        Rc::new(RegionMap {
            kind,
            reactor: reactor.clone(),
            identity,
            members,
            regions: RefCell::new(stored.inside.iter().map(region).collect()),
            outside: Cell::new(outside),
            pages: (0..PAGES_MAX).map(page).collect(),
            waiting: WaitList::default(),
            view: RefCell::default(),
        })
    }

    /// Nobody else is to read these stripes by a view.
    pub(crate) fn hide(&self, stripes: Range<u64>) {
        let Some(last) = stripes.end.checked_sub(1) else { return };
        let region = |stripe| self.region_of(StripeIndex(stripe)).0;
        let regions = region(stripes.start)..region(last) + 1;
        for view in self.view.borrow().iter() {
            regions.clone().for_each(|region| view.forgot(RegionIndex(region)));
        }
    }

    /// Tells it of all regions inside from now on.
    pub(crate) fn watch(&self, view: Arc<View>) {
        self.inside().into_iter().for_each(|region| view.wrote(region));
        *self.view.borrow_mut() = Some(view);
    }

    pub fn region_count(stripes: u64, region_stripes: u32) -> u64 {
        stripes.div_ceil(u64::from(region_stripes))
    }

    pub fn region_of(&self, stripe: StripeIndex) -> RegionIndex {
        RegionIndex(stripe.0 / u64::from(self.identity.region_stripes()))
    }

    /// Stripes of a region.
    pub fn stripes_of(&self, region: RegionIndex) -> std::ops::Range<u64> {
        let size = u64::from(self.identity.region_stripes());
        let end = ((region.0 + 1) * size).min(self.identity.layout().stripes);
        region.0 * size..end
    }

    /// Regions in all.
    pub fn regions(&self) -> u64 {
        self.regions.borrow().len() as u64
    }

    /// A set of regions of this array.
    pub fn set_of(&self, inside: impl Iterator<Item = RegionIndex>) -> Behind {
        Behind::new(self.regions(), self.identity.region_stripes(), inside)
    }

    /// Regions inside.
    pub fn count(&self) -> u64 {
        self.regions.borrow().len() as u64 - self.outside.get()
    }

    /// Whether the region's bit is durable.
    pub fn contains(&self, region: RegionIndex) -> bool {
        // The first is the usual case for most maps, and the only look at them then.
        self.outside.get() == 0 || self.regions.borrow()[to_usize(region.0)].durable
    }

    /// The same of the region of a stripe.
    pub fn has(&self, stripe: StripeIndex) -> bool {
        self.outside.get() == 0 || self.contains(self.region_of(stripe))
    }

    /// Stripes of these that are in regions inside.
    pub fn stripes_inside(&self, stripes: Range<u64>) -> u64 {
        let regions = self.inside().into_iter();
        regions.map(|region| count_in_both(&self.stripes_of(region), &stripes)).sum()
    }

    /// Regions inside, in order.
    pub fn inside(&self) -> Vec<RegionIndex> {
        let regions = self.regions.borrow();
        let inside = regions.iter().enumerate().filter(|(_, region)| region.durable);
        inside.map(|(index, _)| RegionIndex(index as u64)).collect()
    }

    /// Returns once the bits of these regions are durable.
    pub async fn insert(&self, inside: &[RegionIndex]) -> Result<(), ArrayError> {
        let want = |region: &RegionIndex, wanted| {
            let region = &mut self.regions.borrow_mut()[to_usize(region.0)];
            region.wanted = wanted || region.durable;
        };
        inside.iter().for_each(|region| want(region, true));
        for region in inside {
            // Another page write may be under way, begun before this bit was wanted.
            while !self.contains(*region) {
                want(region, true);
                let written = self.write_page_or_wait(to_usize(region.0 / REGIONS_PER_PAGE)).await;
                if written.is_err() {
                    // A later write of the page must not bring it in behind the caller's back.
                    inside.iter().for_each(|region| want(region, false));
                    return written;
                }
            }
        }
        Ok(())
    }

    /// Takes regions out, at once; durably when this returns.
    pub async fn remove(&self, outside: &[RegionIndex]) -> Result<(), ArrayError> {
        let mut pages = Vec::new();
        for region in outside {
            self.view.borrow().iter().for_each(|view| view.forgot(*region));
            let state = &mut self.regions.borrow_mut()[to_usize(region.0)];
            self.outside.set(self.outside.get() + u64::from(state.durable));
            (state.wanted, state.durable) = (false, false);
            pages.push(to_usize(region.0 / REGIONS_PER_PAGE));
        }
        pages.dedup();
        pages.iter().for_each(|page| self.pages[*page].doubt());
        let mut result = Ok(());
        for page in pages {
            result = result.and(self.write_page(page).await);
        }
        result
    }

    /// Whether all that is outside would be so after a crash, too.
    pub fn is_settled(&self) -> bool {
        self.pages.iter().all(|page| page.settled.get() == page.doubts.get())
    }

    /// Makes it so, as far as it concerns what is outside now.
    pub async fn settle(&self) -> Result<(), ArrayError> {
        for (number, page) in self.pages.iter().enumerate() {
            let doubts = page.doubts.get();
            while page.settled.get() < doubts {
                self.write_page_or_wait(number).await?;
            }
        }
        Ok(())
    }

    /// At start: what was found is what holds from now on, whatever an absent member shows later.
    pub async fn write_all_anew(&self) -> Result<(), ArrayError> {
        for page in &self.pages[..self.page_count()] {
            page.sequence.set(start_of_sequences(self.members.era(), page.sequence.get()));
        }
        self.write_all().await
    }

    /// Writes every page to all members, as it is: for a member that has just joined.
    pub async fn write_all(&self) -> Result<(), ArrayError> {
        for page in 0..self.page_count() {
            self.write_page(page).await?;
        }
        Ok(())
    }

    /// Pages in use.
    fn page_count(&self) -> usize {
        to_usize(RegionMapPage::pages_for(self.regions.borrow().len() as u64))
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
        if result.is_err() {
            self.pages[page].doubt();
        }
        self.pages[page].writing.set(false);
        self.waiting.wake_all(&self.reactor);
        result
    }

    async fn write_page_now(&self, page: usize) -> Result<(), ArrayError> {
        // The superblock may be about to say that regions have another size.
        self.members.settled().await?;
        let sequence = self.pages[page].sequence.get() + 1;
        self.pages[page].sequence.set(sequence);
        let doubts = self.pages[page].doubts.get();
        let first = page * to_usize(REGIONS_PER_PAGE);
        let (record, wanted) = {
            let regions = self.regions.borrow();
            let region_stripes = self.identity.region_stripes();
            let wanted: Vec<bool> = page_of(&regions, page).iter().map(|r| r.wanted).collect();
            (self.record(page, region_stripes, &wanted), wanted)
        };
        self.write_to_all(&record, sequence).await?;
        self.pages[page].settled.set(doubts);
        for (index, wanted) in wanted.iter().enumerate() {
            let region = &mut self.regions.borrow_mut()[first + index];
            if *wanted && region.wanted && !region.durable {
                region.durable = true;
                let region = RegionIndex((first + index) as u64);
                self.view.borrow().iter().for_each(|view| view.wrote(region));
                self.outside.set(self.outside.get() - 1);
            }
        }
        Ok(())
    }

    fn record(&self, page: usize, region_stripes: u32, inside: &[bool]) -> RegionMapPage {
        let number = u32::try_from(page).expect("few pages");
        let array = self.identity.uuid;
        let mut record = RegionMapPage::empty(array, self.kind, number, region_stripes);
        inside.iter().enumerate().for_each(|(index, inside)| record.set(index, *inside));
        record
    }

    async fn write_to_all(&self, record: &RegionMapPage, sequence: u64) -> Result<(), ArrayError> {
        let slot = RegionMapPage::slot_offset(record.page.get(), sequence);
        let home = |areas: &MemberLayout| label::map_area(areas, self.kind).offset + slot;
        self.members.write_to_all(record, sequence, home).await
    }
}

/// The regions of one page.
fn page_of(regions: &[Region], page: usize) -> &[Region] {
    let first = page * to_usize(REGIONS_PER_PAGE);
    &regions[first..regions.len().min(first + to_usize(REGIONS_PER_PAGE))]
}
