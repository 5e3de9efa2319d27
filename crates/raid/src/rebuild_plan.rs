//! Which stripes a rebuild fills next, and for whom: those first that lack the most members, and
//! each for all members at once that wait for it.
//!
//! ```text
//! stripes      0        c1             c2            end      one group, two members that wait
//! member A     ─filled──┘
//! member B     ─filled─────────────────┘
//! lacking               1              2
//!                       second leg     first leg: A and B
//! ```

use std::collections::BTreeSet;
use std::ops::Range;

use ashlar_format::units::StripeIndex;

use crate::filled::Filled;
use crate::layout::Layout;

/// What a member has.
#[derive(Clone, Debug)]
pub(crate) enum Standing {
    Whole,
    /// Nothing, and it cannot be filled now.
    Away,
    Filling(Filled),
}

impl Standing {
    fn lacks(&self, stripe: u64) -> bool {
        match self {
            Standing::Whole => false,
            Standing::Away => true,
            Standing::Filling(filled) => !filled.contains(StripeIndex(stripe)),
        }
    }

    fn waits_for(&self, stripe: u64) -> bool {
        matches!(self, Standing::Filling(_)) && self.lacks(stripe)
    }
}

/// Stripes that are filled for the same members, which are bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Leg {
    pub(crate) stripes: Range<u64>,
    pub(crate) members: u64,
}

/// `None`: nobody waits for anything.
pub(crate) fn next_leg(layout: &Layout, members: &[Standing]) -> Option<Leg> {
    assert!(members.len() == layout.members());
    let mut borders = BTreeSet::from([0, layout.stripes]);
    for member in members {
        if let Standing::Filling(filled) = member {
            borders.extend(filled.borders());
        }
    }
    let borders: Vec<u64> = borders.into_iter().collect();
    let (mut best, mut most) = (None, 0);
    for pair in borders.windows(2) {
        let (lacking, waiting) = most_urgent(layout, members, pair[0]);
        if lacking > most {
            (best, most) = (Some(Leg { stripes: pair[0]..pair[1], members: waiting }), lacking);
        }
    }
    best
}

/// How many members a stripe here lacks at its weakest place, and the members that wait for it: of
/// those groups only that lack as many. Groups share no drive, so they are filled side by side.
fn most_urgent(layout: &Layout, members: &[Standing], stripe: u64) -> (usize, u64) {
    let size = usize::from(layout.positions());
    let set = usize::from(layout.set_members());
    let (mut most, mut all) = (0, 0u64);
    for (group, its) in members.chunks(size).enumerate() {
        let waits = |(_, member): &(usize, &Standing)| member.waits_for(stripe);
        let waiting = its.iter().enumerate().filter(waits);
        let waiting = waiting.fold(0, |bits, (index, _)| bits | 1 << (group * size + index));
        if waiting == 0 {
            continue;
        }
        let lacking = |set: &[Standing]| set.iter().filter(|its| its.lacks(stripe)).count();
        let lacking = its.chunks(set).map(lacking).max().unwrap_or(0);
        if lacking > most {
            (most, all) = (lacking, 0);
        }
        if lacking == most {
            all |= waiting;
        }
    }
    (most, all)
}

#[cfg(test)]
mod tests {
    //! Goal: whatever members have, the stripes that lack the most are filled first, each once for
    //! all that wait for it, and in the end everything is filled.
    //! Method: plans are followed to their end on all small arrangements; redundancy is counted
    //! stripe by stripe.

    use super::*;
    use crate::layout::Shape;
    use ashlar_format::array_superblock::Level;

    const STRIPES: u64 = 12;

    fn layout(level: Level, members: usize, shape: Shape) -> Layout {
        let layout = Layout::new(level, members, shape, 16 << 10).unwrap();
        Layout { stripes: STRIPES, ..layout }
    }

    fn layouts() -> Vec<Layout> {
        let groups = Shape { group_members: 3, ..Shape::default() };
        let three = Shape { copies: 3, ..Shape::default() };
        vec![
            layout(Level::Raid6, 4, Shape::default()),
            layout(Level::Raid50, 6, groups),
            layout(Level::Raid10, 6, three),
        ]
    }

    fn filling(stripes: u64) -> Standing {
        Standing::Filling(Filled::up_to(stripes))
    }

    #[test]
    fn the_stripes_that_lack_most_come_first() {
        let layout = layouts()[0];
        let whole = Standing::Whole;
        let mut members = [filling(3), whole.clone(), filling(8), whole.clone()];
        assert_eq!(next_leg(&layout, &members), Some(Leg { stripes: 8..12, members: 0b101 }));
        for index in [0, 2] {
            if let Standing::Filling(filled) = &mut members[index] {
                filled.add(8..12);
            }
        }
        assert_eq!(next_leg(&layout, &members), Some(Leg { stripes: 3..8, members: 0b1 }));
        let layout = layouts()[1];
        let mut members = [(); 6].map(|()| Standing::Whole);
        (members[1], members[3]) = (filling(5), filling(0));
        // Each group lacks one; what both lack is filled for both.
        assert_eq!(next_leg(&layout, &members), Some(Leg { stripes: 0..5, members: 0b1000 }));
        members[4] = Standing::Away;
        assert_eq!(next_leg(&layout, &members), Some(Leg { stripes: 0..5, members: 0b1000 }));
        members[1] = filling(0);
        assert_eq!(next_leg(&layout, &members), Some(Leg { stripes: 0..12, members: 0b1000 }));
        members[4] = Standing::Whole;
        assert_eq!(next_leg(&layout, &members), Some(Leg { stripes: 0..12, members: 0b1010 }));
    }

    /// Members that each stripe of a group lacks at its weakest place.
    fn lacking(layout: &Layout, members: &[Standing], stripe: u64, group: usize) -> usize {
        let size = usize::from(layout.positions());
        let its = &members[group * size..(group + 1) * size];
        let sets = its.chunks(layout.set_members().into());
        sets.map(|set| set.iter().filter(|m| m.lacks(stripe)).count()).max().unwrap()
    }

    fn follow(layout: &Layout, mut members: Vec<Standing>) {
        let size = usize::from(layout.positions());
        for _ in 0..100 {
            let waits: Vec<(u64, usize)> = (0..STRIPES)
                .flat_map(|stripe| (0..members.len()).map(move |index| (stripe, index)))
                .filter(|(stripe, index)| members[*index].waits_for(*stripe))
                .collect();
            let Some(leg) = next_leg(layout, &members) else {
                assert_eq!(waits, []);
                return;
            };
            let weakness =
                |(stripe, index): &(u64, usize)| lacking(layout, &members, *stripe, index / size);
            let most = waits.iter().map(weakness).max().unwrap();
            for (stripe, index) in &waits {
                let inside = leg.stripes.contains(stripe) && leg.members >> index & 1 == 1;
                assert!(!inside || weakness(&(*stripe, *index)) == most, "{leg:?} {members:?}");
                // Nobody of the same stripe is left out.
                let mates = leg.members >> (index / size * size) & ((1 << size) - 1);
                let left_out = leg.stripes.contains(stripe) && mates != 0 && !inside;
                assert!(!left_out, "{leg:?} {members:?}");
            }
            for (index, member) in members.iter_mut().enumerate() {
                if let Standing::Filling(filled) = member
                    && leg.members >> index & 1 == 1
                {
                    filled.add(leg.stripes.clone());
                }
            }
        }
        panic!("no end: {members:?}");
    }

    #[test]
    fn every_plan_leads_to_the_end() {
        for layout in layouts() {
            let count = layout.members();
            let kinds = [Standing::Whole, Standing::Away, filling(0), filling(5), filling(12)];
            for first in 0..count {
                for second in 0..count {
                    for third in 0..count {
                        for kind in 0..125usize {
                            let mut members = vec![Standing::Whole; count];
                            members[first] = kinds[kind % 5].clone();
                            members[second] = kinds[kind / 5 % 5].clone();
                            members[third] = kinds[kind / 25].clone();
                            follow(&layout, members);
                        }
                    }
                }
            }
        }
    }
}
