//! A drive with a label of the array, and what its superblock says.

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{ArraySuperblock, ERA_BELIEVED_MAX, MemberState, SLOTS};
use ashlar_format::record::{self, RecordError};
use ashlar_reactor::executor::Reactor;

use crate::error::AssembleError;
use crate::label::{self, Front, Label};
use crate::layout::Layout;
use crate::lease::Place;
use crate::member::Member;
use crate::newer;
use crate::own_generation::{OwnGeneration, Slot};

/// A drive with a label of the array.
pub(crate) struct Candidate {
    pub(crate) drive: Rc<Drive>,
    pub(crate) label: Label,
    pub(crate) superblock: Option<ArraySuperblock>,
    pub(crate) slots: [Slot; 2],
    /// Somebody has written over where it begins, and nobody knows how far.
    pub(crate) is_written_over: bool,
    /// Of the newest lease on it; 0: there is none. `None`: it cannot be read.
    pub(crate) epoch: Option<u64>,
}

impl Candidate {
    fn new(
        drive: Rc<Drive>,
        label: Label,
        front: &Front,
        superblocks: Superblocks,
        epoch: Option<u64>,
    ) -> Candidate {
        let is_written_over = is_written_over(front, &superblocks);
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
        Candidate { drive, label, superblock, slots, is_written_over, epoch }
    }
}

/// Where labels are in a place that cannot be read, superblocks tell.
fn is_written_over(front: &Front, superblocks: &Superblocks) -> bool {
    match front {
        Front::Label => false,
        Front::Foreign => true,
        Front::Unreadable => {
            let is_blank = |its: &_| matches!(its, Err(Slot::Empty));
            superblocks.iter().all(Result::is_err) && superblocks.iter().any(is_blank)
        }
    }
}

/// Whether the newest superblock of a drive knows of none that it had before.
fn is_first(newest: &ArraySuperblock, label: &Label) -> bool {
    let mut members = newest.members().iter().zip(&newest.sure_generations);
    members.any(|(member, sure)| member.drive == label.drive_uuid && sure.get() == 0)
}

pub(crate) fn sequence(superblock: &ArraySuperblock) -> u64 {
    superblock.header.sequence.get()
}

/// What is on the drives. One that does not answer is one that is not here.
pub(crate) async fn candidates(
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
            let front = label::front(reactor, &drive).await;
            candidates.push(Candidate::new(drive, label, &front, superblocks, epoch));
        }
    }
    Ok(candidates)
}

pub(crate) fn owner_of<'a>(member: &Member, candidates: &'a [Candidate]) -> Option<&'a Candidate> {
    candidates.iter().find(|its| its.label.drive_uuid == member.drive_uuid)
}

pub(crate) fn newest_among<'a>(
    candidates: impl IntoIterator<Item = &'a Candidate>,
) -> Option<&'a ArraySuperblock> {
    let superblocks = candidates.into_iter().filter_map(|its| its.superblock.as_ref());
    superblocks.max_by_key(|superblock| superblock.age())
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

pub(crate) fn layout_of(superblock: &ArraySuperblock) -> Option<Layout> {
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

/// Of the drive of a member, as this superblock knows it.
pub(crate) fn known_of(superblock: &ArraySuperblock, index: usize) -> OwnGeneration {
    let asked = superblock.members()[index].asked_generation.get();
    OwnGeneration::stored(superblock.sure_generations[index].get(), asked)
}

pub(crate) fn trusts(superblock: &ArraySuperblock, drive: [u8; 16]) -> bool {
    let mut members = superblock.members().iter();
    members.any(|its| its.drive == drive && its.state() == Ok(MemberState::Trusted))
}
