//! One member of an array: its drive, and what its data is worth.

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_format::array_superblock::{ArraySuperblock, MemberState, SLOTS};
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::record::Record;
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_reactor::executor::Reactor;

use crate::filled::Filled;
use crate::label;
use crate::layout::Layout;
use crate::missed::Behind;
use crate::own_generation::OwnGeneration;

#[derive(Clone)]
pub struct Member {
    pub drive_uuid: [u8; 16],
    /// `None`: absent since the array was started.
    pub drive: Option<Rc<Drive>>,
    /// Where things are on the drive. Of an absent member: unknown, and unused.
    pub areas: MemberLayout,
    pub state: MemberState,
    /// What was filled of a rebuilding member.
    pub(crate) filled: Filled,
    /// Of that, what was flushed since, and a superblock may name.
    pub(crate) filled_flushed: Filled,
    /// Of a stale or rebuilding member: what it lacks is known (see `dirty`).
    pub catches_up: bool,
    /// What a rebuilding member that catches up lacked when that began, at most.
    pub behind: Option<Rc<Behind>>,
    /// What the superblock on its own drive can be.
    pub own: OwnGeneration,
    /// Times it became stale since the array was started: what was done for it before counts no
    /// longer, though it may have the same drive again.
    pub fences: u64,
}

impl Member {
    pub fn new(
        drive_uuid: [u8; 16],
        drive: Option<Rc<Drive>>,
        areas: MemberLayout,
        state: MemberState,
    ) -> Member {
        Member {
            drive_uuid,
            drive,
            areas,
            state,
            filled: Filled::default(),
            filled_flushed: Filled::default(),
            catches_up: false,
            behind: None,
            own: OwnGeneration::default(),
            fences: 0,
        }
    }

    /// The drive, if it answers.
    pub fn alive(&self) -> Option<&Rc<Drive>> {
        self.drive.as_ref().filter(|drive| drive.is_alive())
    }

    /// Whether its drive has all acknowledged data of `stripe`.
    pub(crate) fn is_current(&self, stripe: StripeIndex) -> bool {
        match self.state {
            MemberState::Trusted => true,
            MemberState::Rebuilding => self.filled.contains(stripe) || !self.lacked(stripe),
            MemberState::Stale => false,
        }
    }

    /// Whether a rebuilding member has to be given `stripe`.
    pub fn lacked(&self, stripe: StripeIndex) -> bool {
        self.behind.as_ref().is_none_or(|behind| behind.contains(stripe))
    }

    /// It is not to be read any more.
    pub fn become_stale(&mut self) {
        self.state = MemberState::Stale;
        self.fences += 1;
        self.filled = Filled::default();
        self.filled_flushed = Filled::default();
        self.behind = None;
    }

    /// It was rebuilt.
    pub(crate) fn become_trusted(&mut self) {
        self.state = MemberState::Trusted;
        self.filled = Filled::default();
        self.filled_flushed = Filled::default();
        self.catches_up = false;
        self.behind = None;
    }

    /// The drive, if it holds all acknowledged data of `stripe`.
    pub fn holds(&self, stripe: StripeIndex) -> Option<&Rc<Drive>> {
        self.alive().filter(|_| self.is_current(stripe))
    }

    /// Whether it is here and lacks nothing.
    pub fn is_whole(&self) -> bool {
        self.state == MemberState::Trusted && self.alive().is_some()
    }

    /// At a start: whether it is here, and holds everything as the newest superblock says.
    pub(crate) fn is_relied_on(&self) -> bool {
        self.drive.is_some() && self.state == MemberState::Trusted
    }

    /// The drive, if superblocks and dirty maps are kept on it.
    pub fn keeps_metadata(&self) -> Option<&Rc<Drive>> {
        self.alive().filter(|_| self.state != MemberState::Stale)
    }

    /// As the member of this number, if it keeps metadata.
    pub(crate) fn as_keeper(&self, index: usize) -> Option<Keeper> {
        Some(self.keeper(MemberIndex::new(index), self.keeps_metadata()?.clone()))
    }

    /// As the member of this number, with this drive.
    pub(crate) fn keeper(&self, index: MemberIndex, drive: Rc<Drive>) -> Keeper {
        Keeper { index, drive, drive_uuid: self.drive_uuid, areas: self.areas }
    }
}

/// Whether the members that it `is_one` of hold every block.
pub(crate) fn are_enough(
    layout: &Layout,
    members: &[Member],
    is_one: impl Fn(MemberIndex, &Member) -> bool,
) -> bool {
    let all = members.iter().enumerate();
    let those = all.map(|(index, member)| is_one(MemberIndex::new(index), member));
    layout.survives(&those.collect::<Vec<_>>())
}

/// A member that keeps metadata, and where.
pub(crate) struct Keeper {
    pub(crate) index: MemberIndex,
    pub(crate) drive: Rc<Drive>,
    pub(crate) drive_uuid: [u8; 16],
    pub(crate) areas: MemberLayout,
}

impl Keeper {
    /// Makes a record durable at its `home`, sealed for this drive.
    pub(crate) async fn write<T: Record>(
        &self,
        reactor: &Reactor,
        record: &T,
        home: u64,
        sequence: u64,
    ) -> Result<(), DriveError> {
        // Some are large: not on the stack.
        let mut copy = T::new_box_zeroed().expect("memory for a record");
        copy.as_mut_bytes().copy_from_slice(record.as_bytes());
        let Keeper { drive, drive_uuid, .. } = self;
        label::write_record(reactor, drive, &mut *copy, *drive_uuid, home, sequence).await?;
        drive.flush().await
    }

    /// Durably, and sealed for this drive.
    pub(crate) async fn write_superblock(
        &self,
        reactor: &Reactor,
        mut superblock: ArraySuperblock,
        generation: u64,
    ) -> Result<(), DriveError> {
        superblock.member = u16::from(self.index.0).into();
        let slot = generation % SLOTS * ArraySuperblock::BYTES;
        let home = self.areas.superblocks.offset + slot;
        self.write(reactor, &superblock, home, generation).await
    }
}

/// Largest sector of any member: what reads and writes of members are multiples of.
pub(crate) fn sector_bytes(members: &[Member]) -> u32 {
    let sectors = members.iter().flat_map(|m| &m.drive).map(|drive| drive.limits().sector_bytes);
    sectors.max().unwrap_or(512)
}
