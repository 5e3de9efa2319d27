//! A map of an array that grows: it gets more regions, and larger ones if there would be too many.
//!
//! Pages for larger regions are written to the slots that do not count now. Which ones do, the
//! superblock says (its `stripes a region`): so a crash finds the map as it was, or as it will be.
//! Nobody changes the map between `prepare` and `adopt`.

use ashlar_format::region_map::{PAGES_MAX, REGIONS_PER_PAGE, RegionMapPage};
use ashlar_format::units::{RegionIndex, to_usize};

use super::{Region, RegionMap, page_of};
use crate::error::ArrayError;
use crate::members::Size;

/// Stripes of one region when there are more stripes: several of today's, if need be.
pub(crate) fn region_stripes_of(stripes: u64, today: u32) -> Option<u32> {
    let enough = |wanted: &u32| stripes.div_ceil((*wanted).into()) <= PAGES_MAX * REGIONS_PER_PAGE;
    let doubled = std::iter::successors(Some(today), |wanted| wanted.checked_mul(2));
    doubled.into_iter().find(enough)
}

impl RegionMap {
    /// Writes what the members must have before the superblock says that the array has this size.
    /// An error: the map is as it was.
    pub(crate) async fn prepare(&self, size: Size) -> Result<(), ArrayError> {
        self.settle().await?;
        if self.merges(size) {
            // Pages of version 1 do not say for which regions they are: none is left after this.
            self.write_all().await?;
        }
        let regions = self.grown(size);
        for page in self.new_pages(size) {
            let inside: Vec<bool> = page_of(&regions, page).iter().map(|r| r.wanted).collect();
            let record = self.record(page, size.region_stripes, &inside);
            self.write_to_all(&record, self.pages[page].sequence.get() + 1).await?;
        }
        Ok(())
    }

    /// What was prepared is the map from now on. The caller changes the array's size at once.
    pub(crate) fn adopt(&self, size: Size) {
        for page in self.new_pages(size) {
            let sequence = &self.pages[page].sequence;
            sequence.set(sequence.get() + 1);
        }
        let regions = self.grown(size);
        self.outside.set(regions.iter().filter(|region| !region.durable).count() as u64);
        *self.regions.borrow_mut() = regions;
        // It was closed, and has no room for the new regions.
        *self.view.borrow_mut() = None;
    }

    /// Regions that are not inside and become a part of one that is.
    pub(crate) fn swallowed(&self, size: Size) -> Vec<RegionIndex> {
        let regions = self.regions.borrow();
        let factor = self.factor(size);
        let merged = regions.chunks(factor).enumerate();
        let mixed = merged.filter(|(_, parts)| parts.iter().any(|region| region.durable));
        let swallowed = mixed.flat_map(|(index, parts)| {
            let outside = parts.iter().enumerate().filter(|(_, region)| !region.durable);
            outside.map(move |(part, _)| RegionIndex((index * factor + part) as u64))
        });
        swallowed.collect()
    }

    /// Today's regions in one of this size.
    fn factor(&self, size: Size) -> usize {
        let today = self.identity.region_stripes();
        assert!(size.region_stripes.is_multiple_of(today), "regions cannot be cut");
        (size.region_stripes / today) as usize
    }

    fn merges(&self, size: Size) -> bool {
        self.factor(size) > 1
    }

    /// Pages that have to be written for this size. Else they stay: their last bits are clear.
    fn new_pages(&self, size: Size) -> std::ops::Range<usize> {
        let regions = RegionMap::region_count(size.stripes, size.region_stripes);
        let pages = to_usize(RegionMapPage::pages_for(regions));
        if self.merges(size) { 0..pages } else { self.page_count()..pages }
    }

    fn grown(&self, size: Size) -> Vec<Region> {
        self.merged(size, &self.regions.borrow(), |parts| Region {
            wanted: parts.iter().any(|part| part.wanted),
            durable: parts.iter().any(|part| part.durable),
        })
    }

    /// What is known of each region of this size, from what is known of those of today.
    pub(crate) fn merged<T: Clone + Default>(
        &self,
        size: Size,
        today: &[T],
        union: impl Fn(&[T]) -> T,
    ) -> Vec<T> {
        let mut merged: Vec<T> = today.chunks(self.factor(size)).map(union).collect();
        let count = RegionMap::region_count(size.stripes, size.region_stripes);
        merged.resize(to_usize(count), T::default());
        merged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_double_until_there_are_few_enough() {
        let most = PAGES_MAX * REGIONS_PER_PAGE;
        assert_eq!(region_stripes_of(16 * most, 16), Some(16));
        assert_eq!(region_stripes_of(16 * most + 1, 16), Some(32));
        assert_eq!(region_stripes_of(100 * most, 17), Some(136));
        assert_eq!(region_stripes_of(u64::MAX, 16), None);
    }
}
