//! A set of bad rows, in memory. A bad row is lost for good, until it is written again.
//!
//! Invariant: of one chunk, ranges neither overlap nor touch.

use std::collections::BTreeMap;
use std::ops::Range;

use ashlar_format::units::StripeIndex;

/// Rows of one data chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRange {
    pub stripe: StripeIndex,
    pub chunk: u8,
    /// In bytes inside the chunk; whole sectors.
    pub rows: Range<u32>,
}

#[derive(Clone, Default)]
pub(crate) struct BadSet {
    /// By stripe; in order of chunk and row.
    stripes: BTreeMap<u64, Vec<(u8, Range<u32>)>>,
}

impl BadSet {
    pub(crate) fn is_empty(&self) -> bool {
        self.stripes.is_empty()
    }

    /// Ranges in all.
    pub(crate) fn count(&self) -> usize {
        self.stripes.values().map(Vec::len).sum()
    }

    pub(crate) fn ranges(&self) -> impl Iterator<Item = BadRange> {
        self.stripes.iter().flat_map(|(stripe, ranges)| {
            let range = |(chunk, rows): &(u8, Range<u32>)| BadRange {
                stripe: StripeIndex(*stripe),
                chunk: *chunk,
                rows: rows.clone(),
            };
            ranges.iter().map(range)
        })
    }

    /// Bad rows of a stripe, of any chunk.
    pub(crate) fn of(&self, stripe: StripeIndex) -> &[(u8, Range<u32>)] {
        self.stripes.get(&stripe.0).map_or(&[], Vec::as_slice)
    }

    /// The bad parts of these rows, in order.
    pub(crate) fn within(
        &self,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
    ) -> impl Iterator<Item = Range<u32>> {
        let of_chunk = self.of(stripe).iter().filter(move |(c, _)| *c == chunk);
        let parts = of_chunk.map(|(_, bad)| bad.start.max(rows.start)..bad.end.min(rows.end));
        parts.filter(|part| !part.is_empty())
    }

    /// Whether a write of these rows would leave a part of a bad range: that may make two of one.
    pub(crate) fn is_cut_by(&self, stripe: StripeIndex, chunk: u8, rows: &Range<u32>) -> bool {
        self.of(stripe).iter().any(|(c, bad)| {
            let overlap = bad.start < rows.end && rows.start < bad.end;
            *c == chunk && overlap && (bad.start < rows.start || rows.end < bad.end)
        })
    }

    pub(crate) fn insert(&mut self, range: &BadRange) {
        let BadRange { stripe, chunk, rows } = range;
        let ranges = self.stripes.entry(stripe.0).or_default();
        let mut all = rows.clone();
        ranges.retain(|(c, bad)| {
            let touches = c == chunk && bad.start <= all.end && all.start <= bad.end;
            if touches {
                all = all.start.min(bad.start)..all.end.max(bad.end);
            }
            !touches
        });
        let at = ranges.partition_point(|(c, bad)| (*c, bad.start) < (*chunk, all.start));
        ranges.insert(at, (*chunk, all));
    }

    /// True if some of these rows were bad.
    pub(crate) fn remove(&mut self, stripe: StripeIndex, chunk: u8, rows: &Range<u32>) -> bool {
        if self.within(stripe, chunk, rows).next().is_none() {
            return false;
        }
        let ranges = self.stripes.remove(&stripe.0).unwrap_or_default();
        let left = ranges.into_iter().flat_map(|(c, bad)| {
            let (before, after) = if c == chunk {
                (bad.start..bad.end.min(rows.start), bad.start.max(rows.end)..bad.end)
            } else {
                (bad, 0..0)
            };
            [(c, before), (c, after)].into_iter().filter(|(_, part)| !part.is_empty())
        });
        let left: Vec<_> = left.collect();
        if !left.is_empty() {
            self.stripes.insert(stripe.0, left);
        }
        true
    }

    /// True if some of these stripes had bad rows.
    pub(crate) fn remove_stripes(&mut self, stripes: Range<u64>) -> bool {
        let inside: Vec<u64> = self.stripes.range(stripes).map(|(stripe, _)| *stripe).collect();
        inside.iter().for_each(|stripe| drop(self.stripes.remove(stripe)));
        !inside.is_empty()
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;
    use ashlar_reactor::prng::Prng;

    /// Against rows that are marked one by one.
    #[test]
    fn a_set_of_bad_rows() {
        const ROWS: u32 = 24;
        let mut prng = Prng::from_seed(3);
        let (mut set, mut plain) = (BadSet::default(), vec![false; 2 * 2 * ROWS as usize]);
        let index = |stripe: u64, chunk: u8, row: u32| {
            (stripe as usize * 2 + usize::from(chunk)) * ROWS as usize + row as usize
        };
        for _ in 0..4000 {
            let (stripe, chunk) = (prng.below(2), prng.chance(1, 2) as u8);
            let start = prng.below(ROWS.into()) as u32;
            let rows = start..start + 1 + prng.below(u64::from(ROWS - start)) as u32;
            let was_bad = rows.clone().filter(|row| plain[index(stripe, chunk, *row)]).count();
            let parts = set.within(StripeIndex(stripe), chunk, &rows);
            assert_eq!(parts.map(|part| part.len()).sum::<usize>(), was_bad);
            let insert = prng.chance(1, 2);
            let before = set.count();
            let is_cut = set.is_cut_by(StripeIndex(stripe), chunk, &rows);
            if insert {
                let (stripe, rows) = (StripeIndex(stripe), rows.clone());
                set.insert(&BadRange { stripe, chunk, rows });
            } else {
                assert_eq!(set.remove(StripeIndex(stripe), chunk, &rows), was_bad > 0);
                assert!(is_cut || set.count() <= before);
                assert!(set.count() <= before + 1);
            }
            rows.for_each(|row| plain[index(stripe, chunk, row)] = insert);
            let mut last: Option<BadRange> = None;
            for range in set.ranges() {
                let apart = |last: &BadRange| {
                    let place = |range: &BadRange| (range.stripe.0, range.chunk);
                    place(last) < place(&range) || last.rows.end < range.rows.start
                };
                assert!(!range.rows.is_empty() && last.as_ref().is_none_or(apart), "{range:?}");
                last = Some(range);
            }
            let bad = set.ranges().map(|range| range.rows.len()).sum::<usize>();
            assert_eq!(bad, plain.iter().filter(|bad| **bad).count());
            if prng.chance(1, 40) {
                let any = plain[..index(1, 0, 0)].contains(&true);
                assert_eq!(set.remove_stripes(0..1), any);
                plain[..index(1, 0, 0)].fill(false);
            }
        }
    }
}
