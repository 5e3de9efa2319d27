//! What is zero without a look at any drive, since nobody wrote it: for who copies a volume, and
//! would rather not read that.

use std::ops::Range;
use std::rc::Rc;

use ashlar_format::units::RegionIndex;

use crate::array::Array;
use crate::error::ArrayError;

/// The beginning of a range, all of which is alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// In bytes.
    pub len: u64,
    /// It reads as zeroes. If not, it may be anything.
    pub is_zero: bool,
}

impl Array {
    /// The first extent of a range that is not empty, in bytes; as of now. Regions are told apart,
    /// and nothing smaller. An error: the range is not in the array, or nobody can tell any more
    /// whether it is ours.
    pub async fn extent(self: &Rc<Self>, range: Range<u64>) -> Result<Extent, ArrayError> {
        let _request = self.admit().await?;
        if !self.contains(range.start, range.end - range.start) {
            return Err(ArrayError::Range);
        }
        let stripes = self.stripes_of(range.start, range.end - range.start);
        // Regions are others while members are added. What is about to be zero is not yet.
        let is_sure =
            !self.is_restriping() && self.written.is_settled() && !self.is_half_forgotten(&stripes);
        let is_zero = |region| is_sure && self.is_blank(RegionIndex(region));
        let extent = first_extent(range, self.region_bytes(), is_zero);
        self.still_ours().await?;
        Ok(extent)
    }
}

fn first_extent(range: Range<u64>, region: u64, is_zero: impl Fn(u64) -> bool) -> Extent {
    let mut regions = range.start / region..range.end.div_ceil(region);
    let first = regions.next().is_some_and(&is_zero);
    let end = regions.find(|region| is_zero(*region) != first);
    Extent { len: end.map_or(range.end, |end| end * region) - range.start, is_zero: first }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_end_where_regions_differ() {
        // Regions 0, 3 and 4 are zero.
        let first = |range| first_extent(range, 100, |region| [0, 3, 4].contains(&region));
        let zero = |len| Extent { len, is_zero: true };
        let data = |len| Extent { len, is_zero: false };
        assert_eq!(first(0..100), zero(100));
        assert_eq!(first(30..1000), zero(70));
        assert_eq!(first(30..40), zero(10));
        assert_eq!(first(100..250), data(150));
        assert_eq!(first(299..301), data(1));
        assert_eq!(first(350..600), zero(150));
        assert_eq!(first(500..1000), data(500));
    }
}
