//! Pure decisions about a read of what is away: what it is worked out from, and whether what else
//! is asked of its stripe is read with that.

use std::ops::Range;

use ashlar_format::units::{StripeIndex, to_usize};

use crate::layout::{Layout, Piece, Positions};
use crate::write_plan::{bits, each};

/// `k` of the `usable` positions of a stripe, of which there are as many, to read what is away;
/// those in `wanted` before others. All members that are left do the same.
pub(crate) fn sources(
    layout: &Layout,
    stripe: StripeIndex,
    usable: Positions,
    wanted: Positions,
) -> Positions {
    let instead = stand_in(layout, stripe, usable, wanted).map_or(0, |position| 1 << position);
    in_turn(layout, stripe, usable, wanted | instead)
}

/// `k` of the `usable` positions; those in `first` before others. Of the others those left out turn
/// with the stripes.
pub(crate) fn in_turn(
    layout: &Layout,
    stripe: StripeIndex,
    usable: Positions,
    first: Positions,
) -> Positions {
    let others = usable & !first;
    let turn = turn(layout, stripe);
    let begin = turn % (others.count_ones() as usize).max(1);
    let in_turn = each(others).chain(each(others)).skip(begin).take(others.count_ones() as usize);
    let chosen = each(usable & first).chain(in_turn).take(layout.data.into());
    chosen.fold(0, |bits, position| bits | 1 << position)
}

/// Where all data is wanted, and one chunk of it is away: the parity to read in its place.
///
/// Parity of such stripes is on the members that follow the one that is away, most of it on those
/// in the middle. Let it begin d members after that one, 1 to k. The turns of all stripes, in order
/// of d, are shared out evenly over the n - 1 members in their order: each stripe then gets one
/// that has parity of it. (Data, of all stripes, is on all members alike.)
fn stand_in(
    layout: &Layout,
    stripe: StripeIndex,
    usable: Positions,
    wanted: Positions,
) -> Option<u8> {
    let data = bits(0..layout.data);
    let (away, parity) = (data & !usable, bits(layout.parity_positions()));
    if away.count_ones() != 1 || wanted & data != data || parity == 0 || parity & !usable != 0 {
        return None;
    }
    let (k, others) = (usize::from(layout.data), usize::from(layout.positions()) - 1);
    let before = k - 1 - away.trailing_zeros() as usize;
    let member = (before * others + turn(layout, stripe) % others) / k;
    Some(layout.data + u8::try_from(member - before).expect("few positions"))
}

/// Parity moves by one member from stripe to stripe: once it has been on all, another turn begins.
fn turn(layout: &Layout, stripe: StripeIndex) -> usize {
    to_usize(stripe.0) / layout.members()
}

/// The rows of `pieces`, which are of one stripe, where reading `k` positions of it once moves
/// fewer bytes than reading each piece that is `held`, and `k` others for each that is not.
pub(crate) fn less_together(k: u8, pieces: &[Piece], held: Positions) -> Option<Range<u32>> {
    let len = |rows: &Range<u32>| u64::from(rows.end - rows.start);
    let reads = |piece: &Piece| if held & 1 << piece.chunk == 0 { u64::from(k) } else { 1 };
    let alone: u64 = pieces.iter().map(|piece| reads(piece) * len(&piece.rows)).sum();
    let first = pieces.iter().map(|piece| piece.rows.start).min()?;
    let rows = first..pieces.iter().map(|piece| piece.rows.end).max()?;
    (u64::from(k) * len(&rows) < alone).then_some(rows)
}

#[cfg(test)]
mod tests {
    use ashlar_format::array_superblock::Level;
    use ashlar_format::units::MemberIndex;

    use super::*;
    use crate::layout::Shape;

    const K: u64 = 1 << 10;

    /// Goal: what one member held is read from all others alike, and so are whole stripes.
    #[test]
    fn all_that_are_left_share_the_work() {
        let nm = Shape { parity: 5, ..Shape::default() };
        let raid60 = Shape { group_members: 6, ..Shape::default() };
        for (level, members, shape) in [
            (Level::Raid5, 5, Shape::default()),
            (Level::Raid6, 6, Shape::default()),
            (Level::Raid6, 11, Shape::default()),
            (Level::Raid7, 7, Shape::default()),
            (Level::Raid7, 8, Shape::default()),
            (Level::RaidNm, 12, nm),
            (Level::Raid60, 12, raid60),
        ] {
            let mut layout = Layout::new(level, members, shape, 64 << 10).unwrap();
            layout.stripes = (members * usize::from(layout.positions() - 1)) as u64;
            for wanted in [0, bits(0..layout.data)] {
                let reads = reads_of_each(&layout, MemberIndex(2), wanted);
                assert!(reads.iter().all(|count| *count == reads[0]), "{level:?} {reads:?}");
            }
        }
    }

    /// Of the other members of its group: of what it has, and of what else is wanted.
    fn reads_of_each(layout: &Layout, away: MemberIndex, wanted: Positions) -> Vec<u32> {
        let mut reads = vec![0; layout.positions().into()];
        let of_its_group = |stripe: &StripeIndex| layout.group_of(*stripe).start == 0;
        for stripe in (0..layout.stripes).map(StripeIndex).filter(of_its_group) {
            let lost = layout.position_of(stripe, away).unwrap();
            let usable = bits(0..layout.positions()) & !(1 << lost);
            let mut from = wanted;
            if lost < layout.data {
                from = sources(layout, stripe, usable, wanted);
                assert_eq!(from & !usable, 0);
                assert_eq!(from.count_ones(), u32::from(layout.data));
                assert_eq!(from & wanted, usable & wanted);
            }
            each(from).for_each(|p| reads[layout.member_at(stripe, p).index()] += 1);
        }
        assert_eq!(reads.remove(away.index()), 0);
        reads
    }

    #[test]
    fn what_is_wanted_is_among_the_sources() {
        let layout = Layout::new(Level::Raid6, 6, Shape::default(), 64 << 10).unwrap();
        for stripe in (0..60).map(StripeIndex) {
            let from = sources(&layout, stripe, 0b111_101, 0b001_101);
            assert_eq!(from & 0b001_101, 0b001_101);
            assert!(from == 0b011_101 || from == 0b101_101);
        }
    }

    #[test]
    fn together_if_that_is_less() {
        let mut layout = Layout::new(Level::Raid5, 5, Shape::default(), 64 << 10).unwrap();
        layout.stripes = 4;
        let rows = |at: u64, len: u64, held| {
            let pieces: Vec<Piece> = layout.pieces(at * K, len * K).collect();
            less_together(layout.data, &pieces, held)
        };
        let whole = Some(0..64 << 10);
        // A whole stripe: 4 reads, not 3 + 4.
        assert_eq!(rows(0, 256, 0b1_0111), whole);
        assert_eq!(rows(0, 256, 0b0_1111), None, "parity is not asked for");
        // Two chunks: 4 reads, not 1 + 4.
        assert_eq!(rows(128, 128, 0b1_0111), whole);
        assert_eq!(rows(192, 64, 0b1_0111), None, "no other is asked for");
        // 4 KiB on each side of a chunk's end: 8 reads of rows that hardly anybody wants.
        assert_eq!(rows(188, 8, 0b1_0111), None);
        // Half a chunk, one that is away, half a chunk: 4 · 64 KiB, not 32 + 4 · 64 + 32.
        assert_eq!(rows(96, 128, 0b1_1011), whole);
        assert_eq!(rows(160, 40, 0b1_0111), None);
    }
}
