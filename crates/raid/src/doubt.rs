//! Members that were trusted last, of which others may not have heard (see `members::trust`).

use ashlar_format::array_superblock::{ArraySuperblock, MemberState};
use ashlar_format::units::MemberIndex;

use crate::candidate::{Candidate, owner_of, trusts};
use crate::filled::Filled;
use crate::layout::Layout;
use crate::member::{Member, are_enough};

/// Whom each member trusts, by its own superblock.
pub(crate) struct Trust(Vec<Option<Vec<bool>>>);

impl Trust {
    pub(crate) fn of(members: &[Member], candidates: &[Candidate]) -> Trust {
        // Of members that were added since nobody could go on without those that know.
        let trusted = |own: &ArraySuperblock| {
            let is_one = |(index, its): (usize, &Member)| {
                own.members().len() <= index || trusts(own, its.drive_uuid)
            };
            members.iter().enumerate().map(is_one).collect()
        };
        let by = |member: &Member| owner_of(member, candidates)?.superblock.as_ref().map(trusted);
        Trust(members.iter().map(by).collect())
    }

    /// `None`: it has no superblock that can be read, and is not started alone.
    fn knows(&self, member: MemberIndex, of: MemberIndex) -> Option<bool> {
        self.0[member.index()].as_ref().map(|trusted| trusted[of.index()])
    }
}

/// Members of which not enough of the others know that they are trusted: their rebuild was about to
/// end, and nothing rests on them yet. They are rebuilding, with everything filled, if the others
/// are enough. Whether any are.
pub(crate) fn doubt(layout: &Layout, members: &mut [Member], trust: &Trust) -> bool {
    let mut doubted = false;
    for index in (0..members.len()).map(MemberIndex::new) {
        if is_doubtful(layout, members, trust, index) {
            let all = Filled::up_to(layout.stripes);
            let member = &mut members[index.index()];
            member.state = MemberState::Rebuilding;
            (member.filled, member.filled_flushed) = (all.clone(), all);
            doubted = true;
        }
    }
    doubted
}

fn is_doubtful(layout: &Layout, members: &[Member], trust: &Trust, index: MemberIndex) -> bool {
    let is_other = |other: MemberIndex, its: &Member| other != index && its.is_relied_on();
    let is_told = |other: MemberIndex| trust.knows(other, index).unwrap_or(true);
    members[index.index()].is_relied_on()
        && are_enough(layout, members, is_other)
        && !are_enough(layout, members, |other, its| is_other(other, its) && is_told(other))
}

/// Whether members that could not be given the newest superblock, and absent ones, could be started
/// by themselves, as if nobody had gone on without them.
pub(crate) fn could_be_left_behind(
    layout: &Layout,
    members: &[Member],
    trust: &Trust,
    untold: &[MemberIndex],
) -> bool {
    let is_trusted = |its: &Member| its.state == MemberState::Trusted;
    let is_absent = |its: &Member| is_trusted(its) && its.drive.is_none();
    let is_apart = |index: MemberIndex, its: &Member| {
        is_absent(its) || is_trusted(its) && untold.contains(&index)
    };
    let stays = |index: MemberIndex, its: &Member| is_trusted(its) && !is_apart(index, its);
    let is_split = are_enough(layout, members, is_apart) && are_enough(layout, members, stays);
    // Who holds everything, as it says itself, waits for those that it knows of, if these are
    // enough.
    let knows = |by: MemberIndex, of: MemberIndex| trust.knows(by, of) == Some(true);
    let decide = || untold.iter().filter(|by| knows(**by, **by));
    let is_waited_for = |index: MemberIndex, its: &Member| {
        stays(index, its) && decide().all(|by| knows(*by, index))
    };
    // Of those that are absent nobody knows what they know, nor whether what others say is
    // outdated beside it.
    let is_sure = !members.iter().any(is_absent) && are_enough(layout, members, is_waited_for);
    !untold.is_empty() && is_split && !is_sure
}
