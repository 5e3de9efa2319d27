//! Drives of one array that were used without each other: which of them have what others lack.

use ashlar_format::array_superblock::{ArraySuperblock, MemberState, StoredMember};
use ashlar_format::record::Header;
use ashlar_format::units::MemberIndex;
use zerocopy::IntoBytes;

use crate::candidate::{Candidate, known_of, layout_of, newest_among, sequence, trusts};
use crate::error::AssembleError;
use crate::layout::Layout;
use crate::member::{Member, are_enough};
use crate::own_generation::OwnGeneration;

/// Where a member is that can tell what another has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Relied {
    Here,
    Away,
    /// It was relied on, until it missed something, and was used nowhere else since.
    Before,
}

/// Such a member.
pub(crate) struct Peer {
    pub(crate) drive: [u8; 16],
    pub(crate) relied: Relied,
    /// [`Layout::set_of`].
    pub(crate) set: Option<usize>,
    pub(crate) own: OwnGeneration,
}

/// Those of an array, as its superblock of generation `newest` knows them.
pub(crate) struct Peers {
    pub(crate) newest: u64,
    pub(crate) peers: Vec<Peer>,
}

/// Whether a drive that took what it was never given by `others` has what they lack: as its own
/// superblock has it, it holds everything, without them.
pub(crate) fn went_on_alone(own: &ArraySuperblock, drive: [u8; 16], others: &Peers) -> bool {
    trusts(own, drive) && relies_on_none(own, drive, others)
}

/// Whether a drive that took what it was never given by `others` was used without them. (When
/// somebody is fenced, all of the same set that are relied on from there on have a superblock that
/// says so, and nothing of the set is acknowledged before: see `Members::fence_those_beside`. So
/// where one of them that never heard of it is relied on, it has nothing that they lack. Of one
/// that is away nobody knows what it heard, unless it surely took something later from the others:
/// then they have what it had, also if they went on without it since.)
fn relies_on_none(own: &ArraySuperblock, drive: [u8; 16], others: &Peers) -> bool {
    let index = own.members().iter().position(|its| its.drive == drive);
    let set = index.and_then(|index| set_of(own, index));
    let is_beside = |its: &&Peer| its.set.is_some() && its.set == set;
    let trusts = |its: &Peer| trusts(own, its.drive);
    let took_later = |its: &Peer| its.own.is_past(sequence(own), others.newest);
    let all = || others.peers.iter();
    let mut before = all().filter(|its| its.relied == Relied::Before).filter(is_beside);
    if before.any(|its| took_later(its) && trusts(its)) {
        return false;
    }
    let now = || all().filter(|its| its.relied != Relied::Before);
    let is_unaware = |its: &Peer| its.relied == Relied::Here || took_later(its);
    let can_tell = now().any(is_unaware);
    // Where nobody can tell, nobody tells that it has nothing which they lack.
    let asked = || now().filter(|its| !can_tell || is_unaware(its));
    if asked().any(|its| is_beside(&its)) {
        return !asked().filter(is_beside).any(trusts);
    }
    // Where none is left of the set, the others can tell, if it has fenced nobody of its own.
    let trusts_its_own = now().filter(is_beside).all(trusts);
    asked().next().is_some() && !(trusts_its_own && asked().any(trusts))
}

fn set_of(superblock: &ArraySuperblock, index: usize) -> Option<usize> {
    Some(layout_of(superblock)?.set_of(MemberIndex::new(index)))
}

/// Drives of an array, as one of its superblocks tells them apart.
struct Apart<'a> {
    /// That it relies on.
    ours: Vec<&'a Candidate>,
    /// These, those that are away, and those that it relied on before.
    peers: Peers,
    /// That took what it never gave them.
    beyond: Vec<(MemberIndex, &'a Candidate)>,
}

impl<'a> Apart<'a> {
    fn by(newest: &ArraySuperblock, candidates: &'a [Candidate]) -> Apart<'a> {
        // Two histories may be of one age.
        let has_newest =
            |own: &ArraySuperblock| own.age() == newest.age() && says_the_same(own, newest);
        let (mut ours, mut beyond) = (Vec::new(), Vec::new());
        for candidate in candidates {
            let drive = candidate.label.drive_uuid;
            let index = newest.members().iter().position(|stored| stored.drive == drive);
            let (Some(own), Some(index)) = (&candidate.superblock, index) else { continue };
            if !has_newest(own) && known_of(newest, index).is_beyond(sequence(own)) {
                beyond.push((MemberIndex::new(index), candidate));
            } else if trusts(newest, drive) {
                ours.push(candidate);
            }
        }
        let peer = |(index, stored): (usize, &StoredMember)| {
            let drive = stored.drive;
            let is_it = |its: &Candidate| its.label.drive_uuid == drive;
            let was_relied_on = stored.state() == Ok(MemberState::Stale) && stored.catches_up == 1;
            let relied = if trusts(newest, drive) && ours.iter().any(|its| is_it(its)) {
                Relied::Here
            } else if trusts(newest, drive) && !candidates.iter().any(is_it) {
                Relied::Away
            } else if was_relied_on && !beyond.iter().any(|(_, its)| is_it(its)) {
                Relied::Before
            } else {
                return None;
            };
            let (set, own) = (set_of(newest, index), known_of(newest, index));
            Some(Peer { drive, relied, set, own })
        };
        let peers = newest.members().iter().enumerate().filter_map(peer).collect();
        let peers = Peers { newest: sequence(newest), peers };
        Apart { peers, ours, beyond }
    }

    /// Whether a drive that took what it was never given by those that are relied on was used
    /// without them.
    fn is_without_ours(&self, its: &Candidate) -> bool {
        let drive = its.label.drive_uuid;
        its.superblock.as_ref().is_some_and(|own| relies_on_none(own, drive, &self.peers))
    }

    /// Those that were.
    fn strays(&self) -> impl Iterator<Item = (MemberIndex, &'a Candidate)> {
        let beyond = self.beyond.iter().copied();
        beyond.filter(|(_, its)| self.is_without_ours(its))
    }

    /// Strays that have what the others lack. One that was just filled has not.
    fn others(&self) -> Vec<&'a Candidate> {
        let holds_all = |its: &Candidate| {
            its.superblock.as_ref().is_some_and(|own| trusts(own, its.label.drive_uuid))
        };
        self.strays().map(|(_, its)| its).filter(|its| holds_all(its)).collect()
    }

    fn refused(&self) -> AssembleError {
        let name = |its: &&Candidate| its.drive.name().to_owned();
        let names = |drives: &[&Candidate]| drives.iter().map(name).collect::<Vec<_>>();
        let mut ours = names(&self.ours);
        if ours.is_empty() {
            ours.push("absent members".into());
        }
        AssembleError::Apart { ours, others: names(&self.others()) }
    }
}

/// Of drives that went on without each other, those that this host had last, and what belongs to
/// them, if none of the others has a later lease than it knows of.
/// `last`: of the lease that this host knows of.
pub(crate) fn choose(
    candidates: Vec<Candidate>,
    had: impl Fn([u8; 16]) -> bool,
    last: u64,
) -> Vec<Candidate> {
    let is_ours = |its: &&Candidate| had(its.label.drive_uuid);
    let is_apart = |newest| !Apart::by(newest, &candidates).others().is_empty();
    let ours = newest_among(candidates.iter().filter(is_ours));
    let Some(ours) = ours.filter(|_| newest_among(&candidates).is_some_and(is_apart)) else {
        return candidates;
    };
    let apart = Apart::by(ours, &candidates);
    // It would decide, though it may have nothing that ours lack.
    let is_newer = |its: &Candidate| {
        let own = its.superblock.as_ref();
        own.is_some_and(|own| own.age() >= ours.age() && !says_the_same(own, ours))
    };
    let is_stray = |its: &Candidate| {
        let is_it = |other: &Candidate| other.label.drive_uuid == its.label.drive_uuid;
        // Without a place among ours it may have, with the others, that of one of ours.
        let mut named = ours.members().iter();
        match named.any(|named| named.drive == its.label.drive_uuid) {
            true if is_newer(its) => apart.beyond.iter().any(|(_, beyond)| is_it(beyond)),
            true => apart.strays().any(|(_, stray)| is_it(stray)),
            false => is_newer(its) || apart.is_without_ours(its),
        }
    };
    let stray: Vec<bool> = candidates.iter().map(is_stray).collect();
    let is_later = |its: &Candidate| its.epoch.is_none_or(|epoch| epoch > last);
    let mut strays = candidates.iter().zip(&stray).filter(|(_, is_stray)| **is_stray);
    if strays.any(|(its, _)| is_ours(&its) || is_later(its)) {
        return candidates;
    }
    let all = candidates.into_iter().zip(stray);
    all.filter(|(_, is_stray)| !is_stray).map(|(its, _)| its).collect()
}

/// Members to be read whose drives were used apart. None are but by force, if they have what the
/// others lack; and only if those that the newest superblock relies on are enough.
pub(crate) fn strayed(
    newest: &ArraySuperblock,
    layout: &Layout,
    members: &[Member],
    candidates: &[Candidate],
    force: bool,
) -> Result<Vec<MemberIndex>, AssembleError> {
    let apart = Apart::by(newest, candidates);
    let mut strays: Vec<MemberIndex> = apart.strays().map(|(index, _)| index).collect();
    let may_go = force && survives_without(layout, members, &strays);
    if !apart.others().is_empty() && !may_go {
        return Err(apart.refused());
    }
    strays.retain(|index| members[index.index()].state != MemberState::Stale);
    Ok(strays)
}

/// Whether two superblocks are one, as different drives have it.
fn says_the_same(one: &ArraySuperblock, other: &ArraySuperblock) -> bool {
    let mut one = one.clone();
    one.member = other.member;
    let content = |its: &ArraySuperblock| its.as_bytes()[size_of::<Header>()..].to_vec();
    content(&one) == content(other)
}

/// Whether the trusted members that are here are enough without these.
pub(crate) fn survives_without(
    layout: &Layout,
    members: &[Member],
    without: &[MemberIndex],
) -> bool {
    are_enough(layout, members, |index, its| its.is_relied_on() && !without.contains(&index))
}
