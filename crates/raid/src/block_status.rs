//! What is zero without a look at any drive, since nobody wrote it: for who copies a volume, and
//! would rather not read that.

use std::ops::Range;
use std::rc::Rc;

use ashlar_format::units::RegionIndex;

use crate::array::Array;
use crate::error::ArrayError;
use crate::zero_step::REGIONS_LOOKED_AT;

/// The beginning of a range, all of which is alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockStatus {
    /// In bytes.
    pub len: u64,
    /// It reads as zeroes. If not, it may be anything.
    pub is_zero: bool,
}

impl Array {
    /// Of a range that is not empty, in bytes; as of now. Regions are told apart, nothing smaller,
    /// and no more of them are looked at than take no time. An error: the range is not in the
    /// array, or nobody can tell any more whether that is ours.
    pub async fn block_status(
        self: &Rc<Self>,
        range: Range<u64>,
    ) -> Result<BlockStatus, ArrayError> {
        let _request = self.admit().await?;
        if !self.contains(range.start, range.end - range.start) {
            return Err(ArrayError::Range);
        }
        let stripes = self.stripes_of(range.start, range.end - range.start);
        // Regions are others while members are added.
        let is_sure = !self.is_restriping() && self.is_settled(&stripes);
        let is_zero = |region| is_sure && self.is_blank(RegionIndex(region));
        let status = first_alike(range, self.region_bytes(), is_zero);
        self.still_ours().await?;
        Ok(status)
    }
}

fn first_alike(range: Range<u64>, region: u64, is_zero: impl Fn(u64) -> bool) -> BlockStatus {
    let first = range.start / region;
    let last = range.end.div_ceil(region).min(first + REGIONS_LOOKED_AT);
    let is_first_zero = is_zero(first);
    let end = (first + 1..last).find(|region| is_zero(*region) != is_first_zero).unwrap_or(last);
    let len = range.end.min(end * region) - range.start;
    BlockStatus { len, is_zero: is_first_zero }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_alike_ends_where_regions_differ() {
        // Regions 0, 3 and 4 are zero.
        let alike = |range| first_alike(range, 100, |region| [0, 3, 4].contains(&region));
        let zero = |len| BlockStatus { len, is_zero: true };
        let data = |len| BlockStatus { len, is_zero: false };
        assert_eq!(alike(0..100), zero(100));
        assert_eq!(alike(30..1000), zero(70));
        assert_eq!(alike(30..40), zero(10));
        assert_eq!(alike(100..250), data(150));
        assert_eq!(alike(299..301), data(1));
        assert_eq!(alike(350..600), zero(150));
        assert_eq!(alike(500..1000), data(500));
        assert_eq!(alike(550..u64::MAX / 2), data(REGIONS_LOOKED_AT * 100 - 50));
    }
}
