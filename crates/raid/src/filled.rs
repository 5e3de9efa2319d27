//! Which stripes of a rebuilding member hold what they should.

use std::ops::Range;

use ashlar_format::units::StripeIndex;

/// All stripes below one, and some ranges beyond that were more urgent. A superblock has room for
/// the longest of these: after a restart the others are filled again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Filled {
    up_to: u64,
    /// Ascending, with gaps between them.
    ahead: Vec<Range<u64>>,
}

/// How many stripes are in both.
pub(crate) fn count_in_both(one: &Range<u64>, other: &Range<u64>) -> u64 {
    one.end.min(other.end).saturating_sub(one.start.max(other.start))
}

impl Filled {
    pub(crate) fn up_to(stripes: u64) -> Filled {
        Filled { up_to: stripes, ahead: Vec::new() }
    }

    /// `ahead`: as of [`Filled::longest_ahead`].
    pub(crate) fn stored(up_to: u64, ahead: Range<u64>) -> Filled {
        assert!(ahead.is_empty() || up_to < ahead.start, "{ahead:?} beyond {up_to}");
        let mut filled = Filled::up_to(up_to);
        filled.add(ahead);
        filled
    }

    /// What a superblock has room for.
    pub(crate) fn storable(&self) -> Filled {
        Filled::stored(self.up_to, self.longest_ahead())
    }

    /// Of the ranges beyond the first gap; empty: there is none.
    pub(crate) fn longest_ahead(&self) -> Range<u64> {
        let longest = self.ahead.iter().max_by_key(|range| range.end - range.start);
        longest.cloned().unwrap_or_default()
    }

    /// Stripes below this one are filled.
    pub(crate) fn first_gap(&self) -> u64 {
        self.up_to
    }

    pub(crate) fn contains(&self, stripe: StripeIndex) -> bool {
        stripe.0 < self.up_to || self.ahead.iter().any(|range| range.contains(&stripe.0))
    }

    pub(crate) fn count(&self) -> u64 {
        self.up_to + self.ahead.iter().map(|range| range.end - range.start).sum::<u64>()
    }

    /// Stripes of these that are filled.
    pub(crate) fn count_in(&self, stripes: &Range<u64>) -> u64 {
        let up_to = 0..self.up_to;
        let filled = std::iter::once(&up_to).chain(&self.ahead);
        filled.map(|its| count_in_both(its, stripes)).sum()
    }

    /// Where what is filled and what is not meet.
    pub(crate) fn borders(&self) -> impl Iterator<Item = u64> {
        let ahead = self.ahead.iter().flat_map(|range| [range.start, range.end]);
        std::iter::once(self.up_to).chain(ahead)
    }

    pub(crate) fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        self.ahead.push(range);
        self.ahead.push(0..self.up_to);
        self.ahead.sort_unstable_by_key(|range| range.start);
        self.ahead.dedup_by(|next, before| {
            let meets = next.start <= before.end;
            if meets {
                before.end = before.end.max(next.end);
            }
            meets
        });
        if self.ahead[0].start == 0 {
            self.up_to = self.ahead.remove(0).end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_together() {
        let mut filled = Filled::up_to(10);
        filled.add(50..60);
        filled.add(30..40);
        assert_eq!((filled.first_gap(), filled.count()), (10, 30));
        assert_eq!(filled.borders().collect::<Vec<_>>(), [10, 30, 40, 50, 60]);
        for (stripes, count) in [(0..100, 30), (5..35, 10), (10..30, 0), (35..55, 10), (60..70, 0)]
        {
            assert_eq!(filled.count_in(&stripes), count, "{stripes:?}");
        }
        for (stripe, inside) in [(9, true), (10, false), (30, true), (40, false), (59, true)] {
            assert_eq!(filled.contains(StripeIndex(stripe)), inside, "{stripe}");
        }
        filled.add(40..50);
        assert_eq!(filled.borders().collect::<Vec<_>>(), [10, 30, 60]);
        filled.add(10..11);
        assert_eq!(filled.first_gap(), 11);
        filled.add(11..30);
        assert_eq!(filled, Filled::up_to(60));
        filled.add(60..60);
        assert_eq!(filled, Filled::up_to(60));
        assert_eq!(filled.storable(), filled);
        let mut empty = Filled::default();
        empty.add(5..6);
        assert_eq!((empty.first_gap(), empty.count()), (0, 1));
        empty.add(0..5);
        assert_eq!(empty, Filled::up_to(6));
    }

    #[test]
    fn the_longest_range_ahead_is_stored() {
        let mut filled = Filled::up_to(10);
        filled.add(30..40);
        filled.add(50..65);
        filled.add(70..80);
        let stored = filled.storable();
        assert_eq!((stored.first_gap(), stored.longest_ahead(), stored.count()), (10, 50..65, 25));
        assert_eq!(Filled::stored(10, 50..65), stored);
        assert_eq!(Filled::up_to(10).longest_ahead(), 0..0);
    }
}
