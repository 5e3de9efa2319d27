//! How a long zeroing or TRIM is cut, for whoever paces it by what it writes. Pure.
//!
//! Forgetting whole regions, and what is blank, costs nothing however long it is; whole stripes are
//! zeroed by drives that can. The rest is ordinary writes, which come in pieces that a pace can be
//! kept by.

use std::ops::Range;

/// Stripes that are zeroed under one set of locks.
pub(crate) const STRIPES_AT_ONCE: u64 = 64;
/// Regions that are looked at in one go: nobody waits long for that.
pub(crate) const REGIONS_LOOKED_AT: u64 = 4096;
/// Bytes of zeroes in one ordinary write, and in one step, unless a stripe is larger.
pub(crate) const ZEROES_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroing {
    /// TRIM: nothing is written where drives cannot zero.
    Discard,
    /// All of the range is zero afterwards.
    WriteZeroes,
}

/// The beginning of a range that is zeroed in one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroStep {
    /// In bytes.
    pub len: u64,
    /// Bytes that are written for it as if they were data.
    pub written: u64,
}

/// What the drives do of a zeroing, as far as is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Helpers {
    /// Each its part; also if none was asked yet.
    All,
    /// Some do, for the others zeroes are written.
    Some,
    None,
}

/// What there is of an array, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) stripe: u64,
    pub(crate) region: u64,
    pub(crate) capacity: u64,
    /// Members are being added: nothing is given back, nothing is zeroed by drives.
    pub(crate) restriping: bool,
    pub(crate) helpers: Helpers,
}

impl Grid {
    /// The first step of a range that is not empty; `is_blank`: of a region.
    pub(crate) fn step(
        &self,
        zeroing: Zeroing,
        range: Range<u64>,
        is_blank: impl Fn(u64) -> bool,
    ) -> ZeroStep {
        assert!(range.start < range.end && range.end <= self.capacity, "{range:?}");
        let Range { start, end } = range.clone();
        if self.restriping {
            return match zeroing {
                Zeroing::Discard => ZeroStep { len: end - start, written: 0 },
                Zeroing::WriteZeroes => self.written_step(range),
            };
        }
        let end_of = |region: u64| ((region + 1) * self.region).min(self.capacity);
        let is_free = |region: u64| {
            let is_whole = start <= region * self.region && end_of(region) <= end;
            is_whole || is_blank(region)
        };
        let first = start / self.region;
        let last = end.div_ceil(self.region).min(first + REGIONS_LOOKED_AT);
        let to = (first..last).find(|region| !is_free(*region)).unwrap_or(last);
        let free_to = (to * self.region).clamp(start, end);
        if free_to > start {
            return ZeroStep { len: free_to - start, written: 0 };
        }
        let part = start..end.min(end_of(first));
        match (self.helpers, zeroing) {
            (Helpers::None, Zeroing::Discard) => ZeroStep { len: part.end - start, written: 0 },
            (Helpers::None | Helpers::Some, _) => self.written_step(part),
            (Helpers::All, _) => {
                let len = self.step_len(&part, STRIPES_AT_ONCE * self.stripe);
                let end = start + len;
                let first = start.next_multiple_of(self.stripe).min(end);
                let by_drives = (end / self.stripe * self.stripe).saturating_sub(first);
                // Of what is beside whole stripes TRIM does nothing.
                let written = if zeroing == Zeroing::Discard { 0 } else { len - by_drives };
                ZeroStep { len, written }
            }
        }
    }

    fn written_step(&self, range: Range<u64>) -> ZeroStep {
        let len = self.step_len(&range, ZEROES_BYTES.max(self.stripe));
        ZeroStep { len, written: len }
    }

    /// At most so much, up to the end of a stripe: a part of one needs reads.
    fn step_len(&self, range: &Range<u64>, most: u64) -> u64 {
        let end = (range.start + most) / self.stripe * self.stripe;
        end.min(range.end) - range.start
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what is written is paid for, what is not is not, and steps are short where they cost.
    //! Method: an array of four regions, of sixteen stripes of 192 KiB, by hand; then all ranges of
    //! a small one.

    use super::*;

    const STRIPE: u64 = 192 << 10;
    const REGION: u64 = 16 * STRIPE;
    const GRID: Grid = Grid {
        stripe: STRIPE,
        region: REGION,
        // The last region is a short one.
        capacity: 4 * REGION - STRIPE,
        restriping: false,
        helpers: Helpers::None,
    };

    fn zeroes(grid: Grid, range: Range<u64>) -> (u64, u64) {
        let step = grid.step(Zeroing::WriteZeroes, range, |region| region == 1);
        (step.len, step.written)
    }

    fn discard(grid: Grid, range: Range<u64>) -> (u64, u64) {
        let step = grid.step(Zeroing::Discard, range, |region| region == 1);
        (step.len, step.written)
    }

    #[test]
    fn whole_regions_and_blank_ones_cost_nothing() {
        for helpers in [Helpers::All, Helpers::Some, Helpers::None] {
            let grid = Grid { helpers, ..GRID };
            assert_eq!(zeroes(grid, 0..GRID.capacity), (GRID.capacity, 0));
            assert_eq!(zeroes(grid, REGION + 512..2 * REGION - 512), (REGION - 1024, 0));
            // Up to the region of which only a part is wanted.
            assert_eq!(discard(grid, 0..2 * REGION + 512), (2 * REGION, 0));
        }
    }

    #[test]
    fn what_drives_cannot_zero_is_written_in_pieces_that_end_with_stripes() {
        let pieces = 5 * STRIPE;
        assert_eq!(zeroes(GRID, 0..REGION - 512), (pieces, pieces));
        assert_eq!(zeroes(GRID, 512..REGION), (pieces - 512, pieces - 512));
        assert_eq!(zeroes(GRID, 2 * REGION - 512..2 * REGION), (512, 0));
        assert_eq!(zeroes(GRID, 4096..8192), (4096, 4096));
        assert_eq!(discard(GRID, 512..REGION), (REGION - 512, 0), "nothing is done");
        let some = Grid { helpers: Helpers::Some, ..GRID };
        assert_eq!(zeroes(some, 0..REGION - 512), (pieces, pieces));
        assert_eq!(discard(some, 0..REGION - 512), (pieces, pieces));
        let wide = Grid { stripe: 3 << 20, region: 48 << 20, capacity: 96 << 20, ..GRID };
        assert_eq!(zeroes(wide, 512..9 << 20), ((3 << 20) - 512, (3 << 20) - 512));
    }

    #[test]
    fn of_what_drives_zero_only_parts_of_stripes_are_written() {
        let grid = Grid { helpers: Helpers::All, ..GRID };
        assert_eq!(zeroes(grid, 0..REGION - STRIPE), (REGION - STRIPE, 0));
        assert_eq!(zeroes(grid, 512..REGION), (REGION - 512, STRIPE - 512));
        assert_eq!(zeroes(grid, 512..4096), (3584, 3584));
        assert_eq!(discard(grid, 512..REGION), (REGION - 512, 0));
        let wide = Grid { region: 1000 * STRIPE, capacity: 4000 * STRIPE, ..grid };
        assert_eq!(zeroes(wide, 0..999 * STRIPE), (STRIPES_AT_ONCE * STRIPE, 0));
    }

    #[test]
    fn while_members_are_added_all_is_written_and_nothing_given_back() {
        let grid = Grid { helpers: Helpers::All, restriping: true, ..GRID };
        assert_eq!(zeroes(grid, 0..GRID.capacity), (5 * STRIPE, 5 * STRIPE));
        assert_eq!(discard(grid, 0..GRID.capacity), (GRID.capacity, 0));
    }

    #[test]
    fn steps_cover_a_range_and_no_more() {
        const UNIT: u64 = 512;
        let stripe = 2 * UNIT;
        let (region, capacity) = (4 * stripe, 15 * stripe);
        for helpers in [Helpers::All, Helpers::Some, Helpers::None] {
            let grid = Grid { stripe, region, capacity, restriping: false, helpers };
            for (start, end) in (0..30).flat_map(|a| (a + 1..=30).map(move |b| (a, b))) {
                for (blank, zeroing) in
                    (0..16).flat_map(|b| [(b, Zeroing::Discard), (b, Zeroing::WriteZeroes)])
                {
                    let (mut at, end) = (start * UNIT, end * UNIT);
                    while at < end {
                        let is_blank = |region: u64| blank >> region & 1 == 1;
                        let step = grid.step(zeroing, at..end, is_blank);
                        assert!(step.len > 0 && step.written <= step.len, "{step:?}");
                        at += step.len;
                    }
                    assert_eq!(at, end);
                }
            }
        }
    }
}
