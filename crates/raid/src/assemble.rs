//! Putting an array together from what is on its drives.
//!
//! The newest superblock decides who is a member and who can be trusted. The recovery table, for
//! one member named by it:
//!
//! | its state there | drive here | becomes |
//! |---|---|---|
//! | trusted | yes | trusted |
//! | trusted, rebuilding | yes, with a copy of before | stale, if the others can stand for it |
//! | any | yes, after it went on without those that are trusted | refused; by force stale |
//! | trusted | no | absent; the array starts if the others can stand for it |
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
use ashlar_format::array_superblock::{
    ArraySuperblock, ERA_BELIEVED_MAX, MemberState, Policy, SLOTS, StoredMember,
};
use ashlar_format::record::{self, Header, RecordError};
use ashlar_format::region_map::{self, MapKind, REGIONS_PER_PAGE, RegionMapPage};
use ashlar_format::units::{MemberIndex, to_usize};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use zerocopy::IntoBytes;

use crate::error::AssembleError;
use crate::filled::Filled;
use crate::label::{self, Label};
use crate::layout::Layout;
use crate::lease::{Claim, Host, Place};
use crate::member::{Keeper, Member};
use crate::members::{Identity, Restripe};
use crate::newer;
use crate::own_generation::{OwnGeneration, SEQUENCES_PER_START, Slot, in_slot_of};
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
    /// nobody took the array since: another host may have gone on without those that are here.
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
    fn had(&self, drive: [u8; 16]) -> bool {
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
    lacking: Vec<Keeper>,
}

impl Newest {
    /// Gives it to those that lack it: the next one takes the place of the one before it, which is
    /// the newest that they have, and a power cut may tear that. Who cannot take this one cannot
    /// take the next, either.
    pub(crate) async fn spread(self, reactor: &Reactor) {
        let Newest { superblock, lacking } = self;
        let generation = sequence(&superblock);
        let writes = lacking.iter();
        let writes = writes.map(|to| to.write_superblock(reactor, superblock.clone(), generation));
        join_all(writes).await;
    }
}

struct Candidate {
    drive: Rc<Drive>,
    label: Label,
    superblock: Option<ArraySuperblock>,
    slots: [Slot; 2],
    /// Of the newest lease on it; 0: there is none. `None`: it cannot be read.
    epoch: Option<u64>,
}

impl Candidate {
    fn new(
        drive: Rc<Drive>,
        label: Label,
        superblocks: Superblocks,
        epoch: Option<u64>,
    ) -> Candidate {
        let slots = superblocks.each_ref().map(|found| match found {
            Ok(superblock) => Slot::Has(sequence(superblock)),
            Err(slot) => *slot,
        });
        let superblock = newest_of(superblocks);
        let is_first = superblock.as_ref().is_some_and(|its| is_first(its, &label));
        // Of one that took superblocks before, its beginning is damaged.
        let slots = slots.map(|slot| match slot {
            Slot::Empty if !is_first => Slot::Unreadable,
            Slot::Has(_) | Slot::Empty | Slot::Unreadable => slot,
        });
        Candidate { drive, label, superblock, slots, epoch }
    }
}

/// Whether the newest superblock of a drive knows of none that it had before.
fn is_first(newest: &ArraySuperblock, label: &Label) -> bool {
    let mut members = newest.members().iter().zip(&newest.sure_generations);
    members.any(|(member, sure)| member.drive == label.drive_uuid && sure.get() == 0)
}

fn sequence(superblock: &ArraySuperblock) -> u64 {
    superblock.header.sequence.get()
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
    let candidates = choose(candidates, options);
    let superblocks = || candidates.iter().filter_map(|candidate| candidate.superblock.as_ref());
    let era = superblocks().map(|superblock| superblock.era.get()).max().unwrap_or(0);
    let newest = newest_among(&candidates).ok_or(AssembleError::NoSuperblock)?.clone();
    let generation = sequence(&newest);
    let highest = superblocks().map(sequence).max().unwrap_or(generation);
    let identity = identity_of(&newest).ok_or(AssembleError::NoSuperblock)?;
    let mut members = members_of(&newest, &candidates)?;
    let mut outdated = outdated(&members, &candidates, generation);
    outdated.extend(strayed(&newest, &identity.layout(), &members, &candidates, options.force)?);
    let fences = distrust(&identity.layout(), &mut members, &outdated, options)?;
    let is_trusted = |its: &&Member| its.drive.is_some() && its.state == MemberState::Trusted;
    let has_current = members.iter().filter(is_trusted).any(|its| options.had(its.drive_uuid));
    let policy = newest.policy().map_err(|_| AssembleError::NoSuperblock)?;
    let age = Age { generation, epoch, has_current };
    let journal =
        JournalMark { from: newest.journal_from.get(), newest: newest.journal_newest.get() };
    // What was moved to new stripes may be in the journal only.
    let journaled = journal.from != 0 || is_journaled(policy, &identity.layout(), || true);
    judge(&identity.layout(), journaled, &members, &age, options)?;
    let settings = Settings::from_stored(newest.settings);
    let scrub = ScrubMark { next: newest.scrub_next.get(), began_s: newest.scrub_began.get() };
    let identity = Rc::new(identity);
    let lacking = lacking(&members, &candidates, generation);
    let newest = Newest { superblock: newest, lacking };
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

/// What is on the drives. One that does not answer is one that is not here.
async fn candidates(
    reactor: &Reactor,
    drives: Vec<Rc<Drive>>,
) -> Result<Vec<Candidate>, AssembleError> {
    let mut candidates = Vec::new();
    for drive in drives {
        if let Ok(Some(label)) = label::read(reactor, &drive).await {
            let superblocks = superblocks(reactor, &drive, &label).await?;
            newer::refuse(reactor, &drive, &label).await?;
            let seen = Place::on(&drive, &label).read(reactor, label.array).await.ok();
            let seen = seen.filter(|seen| seen.is_whole);
            let epoch = seen.map(|seen| seen.newest.map_or(0, |lease| lease.epoch.get()));
            candidates.push(Candidate::new(drive, label, superblocks, epoch));
        }
    }
    Ok(candidates)
}

fn newest_among<'a>(
    candidates: impl IntoIterator<Item = &'a Candidate>,
) -> Option<&'a ArraySuperblock> {
    let superblocks = candidates.into_iter().filter_map(|its| its.superblock.as_ref());
    superblocks.max_by_key(|superblock| superblock.age())
}

/// What a start goes on from: beyond all that any member has, absent ones too as far as can be. The
/// first superblock that is written is not in the place of the one that is `newest`.
fn first_generation(newest: u64, highest: u64) -> u64 {
    in_slot_of(newest, highest + SEQUENCES_PER_START)
}

/// Or what stands there instead.
type Superblocks = [Result<ArraySuperblock, Slot>; 2];
const _: () = assert!(SLOTS == 2);

pub(crate) async fn newest_superblock(
    reactor: &Reactor,
    drive: &Rc<Drive>,
    label: &Label,
) -> Result<Option<ArraySuperblock>, AssembleError> {
    Ok(newest_of(superblocks(reactor, drive, label).await?))
}

fn newest_of(superblocks: Superblocks) -> Option<ArraySuperblock> {
    superblocks.into_iter().flatten().max_by_key(sequence)
}

/// What stands in the slots of a drive, as far as it can be read and is of this array.
async fn superblocks(
    reactor: &Reactor,
    drive: &Rc<Drive>,
    label: &Label,
) -> Result<Superblocks, AssembleError> {
    let mut superblocks: Superblocks = [Err(Slot::Unreadable), Err(Slot::Unreadable)];
    for (slot, found) in superblocks.iter_mut().enumerate() {
        let home = label.layout.superblocks.offset + slot as u64 * ArraySuperblock::BYTES;
        let read = label::read_bytes(reactor, drive, home, ArraySuperblock::BYTES).await;
        let Ok(mut bytes) = read else { continue };
        record::upgrade::<ArraySuperblock>(&mut bytes);
        match record::open::<ArraySuperblock>(&bytes, Some(label.drive_uuid), home) {
            Ok(superblock) if superblock.era.get() > ERA_BELIEVED_MAX => {}
            Ok(superblock) if superblock.array == label.array => *found = Ok(superblock.clone()),
            // Whatever an older one says is outdated.
            Err(RecordError::Version(version)) => {
                let drive = drive.name().to_owned();
                return Err(AssembleError::Newer { drive, what: "superblock", version });
            }
            Ok(_) | Err(RecordError::Blank | RecordError::Foreign) => *found = Err(Slot::Empty),
            Err(_) => {}
        }
    }
    Ok(superblocks)
}

fn layout_of(superblock: &ArraySuperblock) -> Option<Layout> {
    Some(Layout {
        level: superblock.level().ok()?,
        data: superblock.data_chunks,
        parity: superblock.parity_chunks,
        copies: superblock.copies,
        groups: superblock.groups,
        chunk_bytes: superblock.chunk_bytes.get(),
        stripes: superblock.stripes.get(),
    })
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
            trusted_from: 0,
        });
    }
    Ok(members)
}

/// Members that keep superblocks, and have none of this generation or a later one.
fn lacking(members: &[Member], candidates: &[Candidate], newest: u64) -> Vec<Keeper> {
    let has_it = |drive_uuid: [u8; 16]| {
        let mut own = candidates.iter().filter(|its| its.label.drive_uuid == drive_uuid);
        own.any(|its| its.superblock.as_ref().is_some_and(|own| sequence(own) >= newest))
    };
    let all = members.iter().enumerate().filter_map(|(index, member)| member.as_keeper(index));
    all.filter(|keeper| !has_it(keeper.drive_uuid)).collect()
}

/// Members that are to be read, but whose drives hold a copy of before. `newest`: the generation
/// that says so.
fn outdated(members: &[Member], candidates: &[Candidate], newest: u64) -> Vec<MemberIndex> {
    let is_outdated = |member: &Member| {
        let mut owner = candidates.iter().filter(|its| its.label.drive_uuid == member.drive_uuid);
        let slots = owner.next().map(|owner| owner.slots);
        member.state != MemberState::Stale
            && slots.is_some_and(|its| member.own.is_outdated(its, newest))
    };
    let all = members.iter().enumerate().filter(|(_, member)| is_outdated(member));
    all.map(|(index, _)| MemberIndex::new(index)).collect()
}

/// Of the drive of a member, as this superblock knows it.
fn known_of(superblock: &ArraySuperblock, index: usize) -> OwnGeneration {
    let asked = superblock.members()[index].asked_generation.get();
    OwnGeneration::stored(superblock.sure_generations[index].get(), asked)
}

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

fn trusts(superblock: &ArraySuperblock, drive: [u8; 16]) -> bool {
    let mut members = superblock.members().iter();
    members.any(|its| its.drive == drive && its.state() == Ok(MemberState::Trusted))
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
fn choose(candidates: Vec<Candidate>, options: &AssembleOptions) -> Vec<Candidate> {
    let is_ours = |its: &&Candidate| options.had(its.label.drive_uuid);
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
    let last = options.known.as_ref().map_or(0, |known| known.epoch);
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
fn strayed(
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
fn survives_without(layout: &Layout, members: &[Member], without: &[MemberIndex]) -> bool {
    let here = |(index, member): (usize, &Member)| {
        let is_here = member.drive.is_some() && member.state == MemberState::Trusted;
        is_here && !without.contains(&MemberIndex::new(index))
    };
    layout.survives(&members.iter().enumerate().map(here).collect::<Vec<_>>())
}

/// What such members lack nobody knows: they are filled anew. If the others cannot stand for them,
/// nothing is served from them but by force. Whether some are stale now.
fn distrust(
    layout: &Layout,
    members: &mut [Member],
    outdated: &[MemberIndex],
    options: &AssembleOptions,
) -> Result<bool, AssembleError> {
    let Some(first) = outdated.first() else { return Ok(false) };
    if survives_without(layout, members, outdated) {
        for index in outdated {
            let member = &mut members[index.index()];
            member.become_stale();
            member.catches_up = false;
        }
        return Ok(true);
    }
    if options.force {
        return Ok(false);
    }
    let drive = members[first.index()].drive.as_ref().map(|drive| drive.name().to_owned());
    Err(AssembleError::CopyOfBefore { drive: drive.unwrap_or_default(), member: *first })
}

/// Of an array, as its drives that are here say it.
struct Age {
    generation: u64,
    /// Of the newest lease before this start.
    epoch: u64,
    /// Whether one is here that held everything when this host had the array last.
    has_current: bool,
}

/// Whether the array may start with these members.
fn judge(
    layout: &Layout,
    journaled: bool,
    members: &[Member],
    age: &Age,
    options: &AssembleOptions,
) -> Result<(), AssembleError> {
    let here: Vec<bool> = members
        .iter()
        .map(|member| member.drive.is_some() && member.state == MemberState::Trusted)
        .collect();
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
    if let Some(known) = &options.known {
        let is_left_behind = !age.has_current && known.epoch > 0 && age.epoch <= known.epoch;
        if is_left_behind || age.has_current && age.generation < known.generation {
            return Err(AssembleError::MaybeOld);
        }
        if age.has_current && age.epoch == known.epoch && known.epoch == known.last_epoch {
            return Ok(());
        }
    }
    // Members that could have served everything without us may have gone on without us.
    let absent: Vec<bool> = members
        .iter()
        .map(|member| member.drive.is_none() && member.state == MemberState::Trusted)
        .collect();
    if layout.survives(&absent) { Err(AssembleError::MaybeOld) } else { Ok(()) }
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
