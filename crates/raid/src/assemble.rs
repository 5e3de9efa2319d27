//! Putting an array together from what is on its drives.
//!
//! The newest superblock decides who is a member and who can be trusted. The recovery table, for
//! one member named by it:
//!
//! | its state there | drive here | becomes |
//! |---|---|---|
//! | trusted | yes | trusted; rebuilding, if too few of the others know that, and are enough |
//! | trusted, rebuilding | yes, with a copy of before | stale, if the others can stand for it |
//! | trusted, rebuilding | yes, and its beginning was written over | the same |
//! | any | yes, after it went on without those that are trusted | refused; by force stale |
//! | trusted | no | absent; it starts if the others are enough, and the absent ones are not |
//! | trusted | yes, and its superblocks were written over, too | as an absent one, too |
//! | trusted | yes, but does not take that superblock | as an absent one, if it knew less |
//! | rebuilding | yes | rebuilding, from where it was |
//! | rebuilding, stale | no | absent |
//! | stale | yes | rebuilding, what it missed only, if that is known; else stale |
//!
//! A drive with this array's label whose uuid the newest superblock does not name was replaced: it
//! is left alone. So is, of drives that went on without each other, what this host did not have
//! last, if it has no later lease than this host knows of: the table is for the rest then.

use std::cell::Cell;
use std::cmp::Ordering;
use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{ArraySuperblock, MemberState, Policy};
use ashlar_format::record;
use ashlar_format::region_map::{self, MapKind, REGIONS_PER_PAGE, RegionMapPage};
use ashlar_format::units::{MemberIndex, to_usize};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;

use crate::apart::{choose, strayed, survives_without};
use crate::candidate::{
    Candidate, candidates, known_of, layout_of, newest_among, owner_of, sequence,
};
use crate::doubt::{Trust, doubt};
use crate::error::AssembleError;
use crate::filled::Filled;
use crate::label;
use crate::layout::Layout;
use crate::lease::{Claim, Host, Place};
use crate::member::{Keeper, Member, are_enough};
use crate::members::{Identity, Restripe};
use crate::own_generation::{SEQUENCES_PER_START, in_slot_of};
use crate::policy::is_journaled;
use crate::region_map::StoredMap;
use crate::scrub_plan::ScrubMark;
use crate::settings::Settings;

/// How careful to be when an array is started.
#[derive(Clone, Debug, Default)]
pub struct AssembleOptions {
    /// Go on although absent members may hold newer data.
    pub force: bool,
    /// What this host remembers of the array.
    pub known: Option<Known>,
    /// Who wants the array. `None`: no other host can reach these drives.
    pub host: Option<Host>,
    /// Pages of checksums in memory, for tests; `None`: the usual number.
    pub sum_pages_max: Option<usize>,
    /// True from when `host` may have the array, whatever becomes of the start.
    pub taken: Rc<Cell<bool>>,
}

/// The array as this host last had it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Members of a smaller one are old.
    pub generation: u64,
    /// Of the lease it had then; 0: none. Members of the generation are new enough as long as
    /// nobody took the array since: another host may have gone on without those that are here. (If
    /// those of `current` are enough: of others, who is absent may not have heard.)
    pub epoch: u64,
    /// Of the lease that it took last: `epoch`, or a later one with which nothing else is known.
    pub last_epoch: u64,
    /// Drives of the members that held everything then. Without any of them, those that are here
    /// may be what was left behind, whatever they have become since. Of drives that went on without
    /// each other, these go on, also by force.
    pub current: Vec<[u8; 16]>,
}

impl AssembleOptions {
    /// Whether this drive held everything when this host had the array last.
    pub(crate) fn had(&self, drive: [u8; 16]) -> bool {
        self.known.as_ref().is_some_and(|known| known.current.contains(&drive))
    }
}

/// What the drives say the array is.
pub(crate) struct Found {
    pub(crate) identity: Rc<Identity>,
    pub(crate) members: Vec<Member>,
    /// Some are stale that no superblock says so of yet.
    pub(crate) fences: bool,
    /// Larger than that of any superblock of its drives.
    pub(crate) generation: u64,
    pub(crate) newest: Newest,
    pub(crate) journal: JournalMark,
    pub(crate) policy: Policy,
    pub(crate) settings: Settings,
    pub(crate) scrub: ScrubMark,
    /// The largest that any of the drives names.
    pub(crate) era: u64,
    /// On all its drives, whether they are members or left alone.
    pub(crate) leases: Vec<Place>,
}

/// What a superblock says of the journal (see its fields).
#[derive(Clone, Copy, Debug)]
pub(crate) struct JournalMark {
    pub(crate) from: u64,
    pub(crate) newest: u64,
}

/// The newest superblock, which a crash may have left on some members only.
pub(crate) struct Newest {
    superblock: ArraySuperblock,
    lacking: Vec<MemberIndex>,
    /// As members had it before.
    pub(crate) trust: Trust,
}

impl Newest {
    /// Gives it to those that lack it: the next one takes the place of the one before it, which is
    /// the newest that they have, and a power cut may tear that. Who cannot take this one cannot
    /// take the next, either. Returns those.
    pub(crate) async fn spread(&self, reactor: &Reactor, keepers: &[Keeper]) -> Vec<MemberIndex> {
        let generation = sequence(&self.superblock);
        let lacking = || keepers.iter().filter(|its| self.lacking.contains(&its.index));
        let writes =
            lacking().map(|to| to.write_superblock(reactor, self.superblock.clone(), generation));
        let results = join_all(writes).await;
        let took = lacking().zip(results).filter(|(_, result)| result.is_ok());
        let took: Vec<MemberIndex> = took.map(|(to, _)| to.index).collect();
        self.lacking.iter().copied().filter(|index| !took.contains(index)).collect()
    }
}

/// `claim`: the lease that this host has taken for it.
pub(crate) async fn find(
    reactor: &Reactor,
    drives: Vec<Rc<Drive>>,
    options: &AssembleOptions,
    claim: Option<&Claim>,
) -> Result<Found, AssembleError> {
    let candidates = candidates(reactor, drives).await?;
    let array = candidates.first().ok_or(AssembleError::NoLabel)?.label.array;
    if candidates.iter().any(|other| other.label.array != array) {
        return Err(AssembleError::Mixed);
    }
    let leases = candidates.iter().map(|its| Place::on(&its.drive, &its.label));
    let leases: Vec<Place> = leases.collect();
    let epoch = match claim {
        Some(claim) => claim.epoch_before(),
        None => candidates.iter().filter_map(|its| its.epoch).max().unwrap_or(0),
    };
    let last = options.known.as_ref().map_or(0, |known| known.epoch);
    let candidates = choose(candidates, |drive| options.had(drive), last);
    let superblocks = || candidates.iter().filter_map(|candidate| candidate.superblock.as_ref());
    let era = superblocks().map(|superblock| superblock.era.get()).max().unwrap_or(0);
    let newest = newest_among(&candidates).ok_or(AssembleError::NoSuperblock)?.clone();
    let generation = sequence(&newest);
    let highest = superblocks().map(sequence).max().unwrap_or(generation);
    let identity = identity_of(&newest).ok_or(AssembleError::NoSuperblock)?;
    let mut members = members_of(&newest, &candidates)?;
    let mut outdated = outdated(&members, &candidates, generation);
    let silent = silent(&members, &candidates);
    outdated.extend(strayed(&newest, &identity.layout(), &members, &candidates, options.force)?);
    let fences = distrust(&identity.layout(), &mut members, &outdated, &candidates, options)?;
    let policy = newest.policy().map_err(|_| AssembleError::NoSuperblock)?;
    let age = Age { generation, epoch };
    let journal =
        JournalMark { from: newest.journal_from.get(), newest: newest.journal_newest.get() };
    // What was moved to new stripes may be in the journal only.
    let journaled = journal.from != 0 || is_journaled(policy, &identity.layout(), || true);
    judge(&identity.layout(), journaled, &members, &silent, &age, options)?;
    let trust = Trust::of(&members, &candidates);
    let fences = doubt(&identity.layout(), &mut members, &trust) || fences;
    let settings = Settings::from_stored(newest.settings);
    let scrub = ScrubMark { next: newest.scrub_next.get(), began_s: newest.scrub_began.get() };
    let identity = Rc::new(identity);
    let lacking = lacking(&members, &candidates, generation);
    let newest = Newest { superblock: newest, lacking, trust };
    let generation = first_generation(generation, highest);
    Ok(Found {
        identity,
        members,
        fences,
        generation,
        newest,
        journal,
        policy,
        settings,
        scrub,
        era,
        leases,
    })
}

/// What a start goes on from: beyond all that any member has, absent ones too as far as can be. The
/// first superblock that is written is not in the place of the one that is `newest`.
fn first_generation(newest: u64, highest: u64) -> u64 {
    in_slot_of(newest, highest + SEQUENCES_PER_START)
}

fn identity_of(superblock: &ArraySuperblock) -> Option<Identity> {
    let layout = layout_of(superblock)?;
    let (name, integrity) = (superblock.name().ok()?.to_owned(), superblock.integrity != 0);
    let region_stripes = superblock.region_stripes.get();
    let identity = Identity::new(superblock.array, name, layout, region_stripes, integrity);
    let (old_data, cursor) = (superblock.old_data_chunks, superblock.restriped.get());
    let restripe = Restripe { old_data, cursor, saved: cursor };
    identity.set_restripe((old_data > 0).then_some(restripe));
    Some(identity)
}

fn members_of(
    newest: &ArraySuperblock,
    candidates: &[Candidate],
) -> Result<Vec<Member>, AssembleError> {
    let mut members = Vec::new();
    for (index, stored) in newest.members().iter().enumerate() {
        let mut owners = candidates.iter().filter(|c| c.label.drive_uuid == stored.drive);
        let owner = owners.next();
        if owners.next().is_some() {
            return Err(AssembleError::Twice(MemberIndex::new(index)));
        }
        let nowhere =
            label::plan(label::DRIVE_BYTES_MIN, 0).expect("the smallest drive has a plan");
        let needs =
            newest.stripes.get() / u64::from(newest.groups) * u64::from(newest.chunk_bytes.get());
        let room = |owner: &Candidate| match newest.integrity {
            0 => owner.label.layout.data.len,
            _ => label::sums_for(&owner.label.layout).min(owner.label.layout.data.len),
        };
        if let Some(owner) = owner.filter(|owner| room(owner) < needs) {
            let (drive, has) = (owner.drive.name().to_owned(), room(owner));
            return Err(AssembleError::TooSmall {
                drive,
                member: MemberIndex::new(index),
                has,
                needs,
            });
        }
        let state = stored.state().map_err(|_| AssembleError::NoSuperblock)?;
        let own = owner.and_then(|owner| owner.superblock.as_ref());
        let own = own.map(sequence);
        let mut known = known_of(newest, index);
        let ahead = newest.rebuilt_ahead[index].stripes();
        let filled = Filled::stored(stored.rebuilt_stripes.get(), ahead);
        // What it lacks is known only if it was used nowhere else.
        let is_own = owner.is_none() || own.is_some_and(|own| known.judge(own) == Ordering::Equal);
        own.into_iter().for_each(|own| known.found(own));
        members.push(Member {
            drive_uuid: stored.drive,
            drive: owner.map(|owner| owner.drive.clone()),
            areas: owner.map_or(nowhere, |owner| owner.label.layout),
            state,
            filled_flushed: filled.clone(),
            filled,
            catches_up: stored.catches_up == 1 && (state != MemberState::Stale || is_own),
            behind: None,
            own: known,
            fences: 0,
        });
    }
    Ok(members)
}

/// Members that are to keep superblocks, and have none of this generation or a later one.
fn lacking(members: &[Member], candidates: &[Candidate], newest: u64) -> Vec<MemberIndex> {
    let has_it = |member: &Member| {
        let own = owner_of(member, candidates).and_then(|its| its.superblock.as_ref());
        own.is_some_and(|own| sequence(own) >= newest)
    };
    let keeps = |member: &Member| member.drive.is_some() && member.state != MemberState::Stale;
    those(members, |its| keeps(its) && !has_it(its))
}

fn those(members: &[Member], is_one: impl Fn(&Member) -> bool) -> Vec<MemberIndex> {
    let all = members.iter().enumerate().filter(|(_, member)| is_one(member));
    all.map(|(index, _)| MemberIndex::new(index)).collect()
}

/// Members that are to be read, but whose drives hold a copy of before, or were written over.
/// `newest`: the generation that says so.
fn outdated(members: &[Member], candidates: &[Candidate], newest: u64) -> Vec<MemberIndex> {
    those(members, |member| {
        let owner = owner_of(member, candidates);
        member.state != MemberState::Stale
            && owner
                .is_some_and(|its| its.is_written_over || member.own.is_outdated(its.slots, newest))
    })
}

/// Members that were relied on and whose superblocks were written over: nobody knows whether they
/// went on without the others. (Nor is that known of one whose superblocks cannot be read, as it
/// dies, say; nor of a copy of before, but what came after it is gone.)
fn silent(members: &[Member], candidates: &[Candidate]) -> Vec<MemberIndex> {
    those(members, |member| {
        member.state == MemberState::Trusted
            && owner_of(member, candidates)
                .is_some_and(|its| its.is_written_over && its.superblock.is_none())
    })
}

/// What such members lack nobody knows: they are filled anew. If the others cannot stand for them,
/// nothing is served from them but by force. Whether some are stale now.
fn distrust(
    layout: &Layout,
    members: &mut [Member],
    outdated: &[MemberIndex],
    candidates: &[Candidate],
    options: &AssembleOptions,
) -> Result<bool, AssembleError> {
    if outdated.is_empty() {
        return Ok(false);
    }
    if !options.force && !survives_without(layout, members, outdated) {
        return Err(needed(members, outdated, candidates));
    }
    let dispensable = dispensable(layout, members, outdated);
    for index in &dispensable {
        let member = &mut members[index.index()];
        member.become_stale();
        member.catches_up = false;
    }
    Ok(!dispensable.is_empty())
}

/// The others cannot stand for them.
fn needed(members: &[Member], outdated: &[MemberIndex], candidates: &[Candidate]) -> AssembleError {
    let owner = |index: &MemberIndex| owner_of(&members[index.index()], candidates);
    let owned = || outdated.iter().filter_map(|index| Some((*index, owner(index)?)));
    let name = |its: &Candidate| its.drive.name().to_owned();
    if let Some((member, its)) = owned().find(|(_, its)| its.is_written_over) {
        return AssembleError::WrittenOver { drive: name(its), member };
    }
    let (member, its) = owned().next().expect("they are here");
    AssembleError::CopyOfBefore { drive: name(its), member }
}

/// Those of them whose sets can do without all of them in it.
fn dispensable(layout: &Layout, members: &[Member], outdated: &[MemberIndex]) -> Vec<MemberIndex> {
    let stays_in = |set: usize| {
        move |index: MemberIndex, its: &Member| {
            layout.set_of(index) != set || its.is_relied_on() && !outdated.contains(&index)
        }
    };
    let can_go = |index: &MemberIndex| are_enough(layout, members, stays_in(layout.set_of(*index)));
    outdated.iter().copied().filter(can_go).collect()
}

/// Of an array, as its drives that are here say it.
struct Age {
    generation: u64,
    /// Of the newest lease before this start.
    epoch: u64,
}

/// Whether the array may start with these members. `silent`: those that were relied on, and have
/// no superblock any more.
fn judge(
    layout: &Layout,
    journaled: bool,
    members: &[Member],
    silent: &[MemberIndex],
    age: &Age,
    options: &AssembleOptions,
) -> Result<(), AssembleError> {
    let here: Vec<bool> = members.iter().map(Member::is_relied_on).collect();
    // Past its limit nothing can be journaled.
    if !layout.survives(&here) && (!options.force || journaled) {
        let (among, needed) = first_lacking(layout, &here);
        let present = here[among.clone()].iter().filter(|here| **here).count();
        let among = Some(among).filter(|its| its.len() < members.len());
        let others = members.iter().filter(|its| its.state != MemberState::Trusted);
        let old = others.filter_map(|its| Some(its.drive.as_ref()?.name().to_owned())).collect();
        return Err(AssembleError::TooFew { among, present, needed, old });
    }
    if options.force {
        return Ok(());
    }
    let mut is_ours = false;
    if let Some(known) = &options.known {
        // Of those that held everything when this host had the array last.
        let had = |its: &Member| its.is_relied_on() && options.had(its.drive_uuid);
        let has_current = members.iter().any(had);
        let is_left_behind = !has_current && known.epoch > 0 && age.epoch <= known.epoch;
        if is_left_behind || has_current && age.generation < known.generation {
            return Err(AssembleError::MaybeOld);
        }
        if has_current && age.epoch == known.epoch && known.epoch == known.last_epoch {
            if are_enough(layout, members, |_, its| had(its)) {
                return Ok(());
            }
            is_ours = true;
        }
    }
    // Members that could have served everything without us may have gone on without us, or, where
    // nobody has, not have heard of who was trusted since.
    let is_absent = |its: &Member| its.drive.is_none() && its.state == MemberState::Trusted;
    if are_enough(layout, members, |_, its| is_absent(its)) {
        return Err(if is_ours { AssembleError::Unheard } else { AssembleError::MaybeOld });
    }
    let is_either = |index, its: &Member| is_absent(its) || silent.contains(&index);
    match silent.first().filter(|_| are_enough(layout, members, is_either)) {
        Some(&member) => {
            let drive = members[member.index()].drive.as_ref().expect("it is here");
            Err(AssembleError::Silent { drive: drive.name().to_owned(), member })
        }
        None => Ok(()),
    }
}

/// The first members that stand for each other of whom not enough are here, and how many would be.
/// (At level 0, that is all of them.)
fn first_lacking(layout: &Layout, here: &[bool]) -> (Range<usize>, usize) {
    let set = usize::from(layout.set_members());
    let needed = set - usize::from(layout.tolerated());
    let is_lacking = |its: &[bool]| its.iter().filter(|here| **here).count() < needed;
    let first = here.chunks(set).position(is_lacking).unwrap_or(0) * set;
    (first..first + set, needed)
}

/// A map of regions as the newest pages on any member have it. All regions of a page that no member
/// has are inside: arrays of version 1 kept only the dirty map.
///
/// A page may be in doubt: what stands in the slot that no trusted member can read may be newer
/// than all that was found. Too many regions in the other maps cost time; here they cost data.
pub(crate) async fn read_map(
    kind: MapKind,
    reactor: &Reactor,
    found: &Found,
    options: &AssembleOptions,
) -> Result<StoredMap, AssembleError> {
    let identity = &found.identity;
    let mut map = StoredMap::empty(identity.layout().stripes, identity.region_stripes());
    for (number, sequence) in map.sequences.iter_mut().enumerate() {
        let first = number * to_usize(REGIONS_PER_PAGE);
        let count = map.inside.len().min(first + to_usize(REGIONS_PER_PAGE)) - first;
        let inside = &mut map.inside[first..first + count];
        let (mut newest, mut is_sure, mut is_blank) = (None::<RegionMapPage>, false, true);
        let of = |page: &Option<RegionMapPage>| {
            page.as_ref().map_or(0, |page| page.header.sequence.get())
        };
        let mut shown = Vec::new();
        for (index, member) in found.members.iter().enumerate() {
            let Some(keeper) = member.as_keeper(index) else { continue };
            let (page, is_whole) = newest_page(kind, reactor, found, &keeper, number).await;
            is_sure |= page.is_some() && is_whole && member.state == MemberState::Trusted;
            is_blank &= page.is_none() && is_whole;
            shown.push((keeper, of(&page)));
            newest = page.filter(|page| page.header.sequence.get() > of(&newest)).or(newest);
        }
        if kind == MapKind::Written && !is_sure && !is_blank && !options.force {
            return Err(AssembleError::Unreadable("the map of written regions"));
        }
        *sequence = of(&newest);
        let trust_page = is_sure || kind == MapKind::Written;
        match newest.filter(|_| trust_page) {
            Some(newest) => {
                let all = inside.iter_mut().enumerate();
                all.for_each(|(region, inside)| *inside = newest.contains(region));
                let lacking = shown.into_iter().filter(|(_, its)| its < sequence);
                map.lacking.extend(lacking.map(|(keeper, _)| (keeper, newest.clone())));
            }
            None => inside.fill(true),
        }
    }
    Ok(map)
}

/// The newest page that a member shows, and whether both slots could be read.
async fn newest_page(
    kind: MapKind,
    reactor: &Reactor,
    found: &Found,
    Keeper { drive, drive_uuid, areas, .. }: &Keeper,
    page: usize,
) -> (Option<RegionMapPage>, bool) {
    let number = u32::try_from(page).expect("few pages");
    let (mut newest, mut is_whole) = (None::<RegionMapPage>, true);
    for slot in 0..region_map::SLOTS {
        let area = label::map_area(areas, kind);
        let home = area.offset + RegionMapPage::slot_offset(number, slot);
        let read = label::read_bytes(reactor, drive, home, RegionMapPage::BYTES).await;
        let Ok(mut bytes) = read else {
            is_whole = false;
            continue;
        };
        record::upgrade::<RegionMapPage>(&mut bytes);
        let opened = record::open::<RegionMapPage>(&bytes, Some(*drive_uuid), home);
        let Ok(page) = opened else { continue };
        let best = newest.as_ref().map_or(0, |newest| newest.header.sequence.get());
        let same = page.page.get() == number && page.map.get() == kind as u32;
        let counts = page.is_for(found.identity.region_stripes());
        let ours = page.array == found.identity.uuid && same && counts;
        if ours && page.header.sequence.get() > best {
            newest = Some(page.clone());
        }
    }
    (newest, is_whole)
}
