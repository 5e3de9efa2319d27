//! Members that were trusted last, of which others may not have heard (see `members::trust`).

use ashlar_format::array_superblock::{ArraySuperblock, MemberState};
use ashlar_format::units::MemberIndex;

use crate::candidate::{Candidate, trusts};
use crate::filled::Filled;
use crate::layout::Layout;
use crate::member::Member;

/// Members of which not enough of the others know that they are trusted: their rebuild was about to
/// end, and nothing rests on them yet. They are rebuilding, with everything filled, if the others
/// are enough. Whether any are.
pub(crate) fn doubt(layout: &Layout, members: &mut [Member], candidates: &[Candidate]) -> bool {
    let mut doubted = false;
    for index in (0..members.len()).map(MemberIndex::new) {
        if is_doubtful(layout, members, candidates, index) {
            let all = Filled::up_to(layout.stripes);
            let member = &mut members[index.index()];
            member.state = MemberState::Rebuilding;
            (member.filled, member.filled_flushed) = (all.clone(), all);
            doubted = true;
        }
    }
    doubted
}

fn is_doubtful(
    layout: &Layout,
    members: &[Member],
    candidates: &[Candidate],
    index: MemberIndex,
) -> bool {
    let others = |is_one: &dyn Fn(MemberIndex) -> bool| {
        let is_it = |(at, other): (usize, &Member)| {
            let at = MemberIndex::new(at);
            at != index && other.is_relied_on() && is_one(at)
        };
        layout.survives(&members.iter().enumerate().map(is_it).collect::<Vec<_>>())
    };
    let knows = |other: MemberIndex| knows_of(own(members, candidates, other), members, index);
    members[index.index()].is_relied_on() && others(&|_| true) && !others(&knows)
}

/// A member that holds everything as it says itself, and has not heard of all that are relied on.
pub(crate) struct Unheard {
    pub(crate) member: MemberIndex,
    /// Whether it trusts each member.
    knows: Vec<bool>,
}

pub(crate) fn unheard(members: &[Member], candidates: &[Candidate]) -> Vec<Unheard> {
    let all = || (0..members.len()).map(MemberIndex::new);
    let is_relied_on = |index: &MemberIndex| members[index.index()].is_relied_on();
    let knows = |index: MemberIndex| {
        let own = own(members, candidates, index);
        let knows = all().map(|other| knows_of(own, members, other)).collect();
        Unheard { member: index, knows }
    };
    let has_not_heard = |its: &Unheard| {
        its.knows[its.member.index()] && all().any(|it| is_relied_on(&it) && !its.knows[it.index()])
    };
    all().filter(is_relied_on).map(knows).filter(has_not_heard).collect()
}

/// Whether these, with those that are away, could be started by themselves: they are enough, and
/// those of the others that they know of are not.
pub(crate) fn could_be_left_behind(
    layout: &Layout,
    members: &[Member],
    unheard: &[Unheard],
) -> bool {
    let enough = |is_one: &dyn Fn(MemberIndex, &Member) -> bool| {
        let is_it = |(index, its): (usize, &Member)| {
            its.state == MemberState::Trusted && is_one(MemberIndex::new(index), its)
        };
        layout.survives(&members.iter().enumerate().map(is_it).collect::<Vec<_>>())
    };
    let is_apart = |index: MemberIndex, its: &Member| {
        its.alive().is_none() || unheard.iter().any(|unheard| unheard.member == index)
    };
    let is_known = |index: MemberIndex| unheard.iter().all(|its| its.knows[index.index()]);
    !unheard.is_empty()
        && enough(&is_apart)
        && !enough(&|index, its| !is_apart(index, its) && is_known(index))
}

/// What a member says itself.
fn own<'a>(
    members: &[Member],
    candidates: &'a [Candidate],
    index: MemberIndex,
) -> Option<&'a ArraySuperblock> {
    let drive = members[index.index()].drive_uuid;
    candidates.iter().find(|its| its.label.drive_uuid == drive)?.superblock.as_ref()
}

/// Whether a superblock says that a member is trusted. Without one nobody is started alone; and of
/// members that were added since, nobody could go on without those that know.
fn knows_of(own: Option<&ArraySuperblock>, members: &[Member], index: MemberIndex) -> bool {
    let is_told = |own: &ArraySuperblock| {
        own.members().len() <= index.index() || trusts(own, members[index.index()].drive_uuid)
    };
    own.is_none_or(is_told)
}
