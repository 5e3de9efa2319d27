//! Batches whose callers heard of an error: what they say must not come true after a crash.
//!
//! Such a batch is emptied where it stands, on every member. While it is the last of the ring its
//! place is used again then, by one of a later sequence, before which the start passes it over:
//! else what cannot be written for want of space would fill the ring with nothing, and what is to
//! be put in place first would never have room again.

use std::time::Duration;

use ashlar_drive::error::DriveError;
use ashlar_format::array_superblock::{ERA_SEQUENCES_LOG2, MemberState};
use ashlar_format::journal_batch::JournalBatch;
use ashlar_format::record;
use ashlar_format::units::MemberIndex;
use ashlar_reactor::join::join_all;

use super::{Batch, Class, Journal, Target};
use crate::error::ArrayError;
use crate::member::Member;

/// For so long after a batch has met no space others enter one by one.
const ONE_BY_ONE: Duration = Duration::from_secs(10);

/// Whether a batch counts.
///
/// | is | becomes | when |
/// |---|---|---|
/// | `No` | any other | its callers hear of an error |
/// | `Half` | | it leaves the ring as it is |
/// | `Cramped` | `Half`, `Everywhere` | it is told again, and there is space |
/// | `Everywhere` | | its place is used again once it is the last |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Void {
    No,
    /// Members that are away may show it.
    Half,
    /// Members may show it that had no space for saying that it is void.
    Cramped,
    /// No member shows it.
    Everywhere,
}

impl Void {
    fn after(told: &[Result<(), DriveError>], lacks_space: bool) -> Void {
        match told {
            _ if lacks_space => Void::Cramped,
            all if all.iter().all(Result::is_ok) => Void::Everywhere,
            _ => Void::Half,
        }
    }
}

impl Journal {
    /// Empties a batch. Members that cannot be written do not keep the caller from hearing; those
    /// that come back are given it then (`void_on`).
    pub(crate) async fn void(&self, sequence: u64) {
        if self.is_named(sequence) {
            // It was durable by another flush than its caller's. What a power cut tears of it is
            // missed by no start then.
            self.members.set_journal_newest(0);
            let _ = self.members.settled().await;
        }
        // Nobody knows any more which members it went to.
        let list = self.members.list().clone();
        let told = (0..list.len()).map(|index| self.void_at(sequence, &list, index));
        // Also for who comes back meanwhile.
        if !self.half_void.borrow().contains(&sequence) {
            self.half_void.borrow_mut().push(sequence);
        }
        self.voids_under_way.borrow_mut().push(sequence);
        let told = join_all(told).await;
        let all = || (0..told.len()).map(MemberIndex::new);
        // Nobody waits for room of one that is being rebuilt.
        let is_full = |its: &MemberIndex| told[its.index()] == Err(DriveError::NoSpace);
        let is_filled = |its: &MemberIndex| list[its.index()].state == MemberState::Rebuilding;
        let mut full = all().filter(|its| is_full(its) && is_filled(its)).peekable();
        if full.peek().is_some() {
            let _ = self.members.fence(full).await;
        }
        let void = Void::after(&told, self.members.lacks_space(all(), &told));
        if void == Void::Everywhere {
            self.half_void.borrow_mut().retain(|half| *half != sequence);
        }
        self.is_now(sequence, void);
        self.voids_end(&[sequence]);
    }

    /// Empties batches that a start does without. It may be given up, so nothing from `tail` on is
    /// in place for that.
    pub(crate) async fn void_left_out(
        &self,
        sequences: impl Iterator<Item = u64>,
        tail: u64,
    ) -> Result<(), ArrayError> {
        self.found_tail.set(Some(tail));
        for sequence in sequences {
            self.void(sequence).await;
        }
        let told = self.void_cramped().await;
        self.found_tail.set(None);
        told
    }

    fn is_now(&self, sequence: u64, void: Void) {
        let mut ring = self.ring.borrow_mut();
        let Some(batch) = ring.iter_mut().rfind(|batch| batch.sequence == sequence) else { return };
        // Of two who told the members at once, the other was done before.
        if batch.void == Void::Everywhere {
            return;
        }
        let was = std::mem::replace(&mut batch.void, void);
        drop(ring);
        if was == Void::Cramped && void != Void::Cramped {
            self.has_hope();
        }
    }

    /// Members have been told of these. Gives places at the end of the ring back.
    fn voids_end(&self, sequences: &[u64]) {
        let mut under_way = self.voids_under_way.borrow_mut();
        for sequence in sequences {
            let at = under_way.iter().position(|its| its == sequence);
            under_way.swap_remove(at.expect("it was begun"));
        }
        // Without a release, so many sequences are used as the superblock says.
        let is_in_era = self.next_sequence() >> ERA_SEQUENCES_LOG2 <= self.members.era();
        let is_free = |batch: &Batch| {
            // Of one that is named still the superblock could not be written.
            let is_void = batch.void == Void::Everywhere && !self.is_named(batch.sequence);
            is_void && !under_way.contains(&batch.sequence) && is_in_era
        };
        let mut ring = self.ring.borrow_mut();
        while ring.back().is_some_and(is_free) {
            ring.pop_back();
        }
        drop((ring, under_way));
        self.note_change();
    }

    /// Whether members are being told of a batch up to this one, and write where it stands.
    pub(super) fn is_any_void_under_way(&self, newest: u64) -> bool {
        self.voids_under_way.borrow().iter().any(|sequence| *sequence <= newest)
    }

    /// Whether another batch may enter the ring, at once: not while one lacks the space to be void.
    /// What is written next would be put in place as if that one counted. And after one has met no
    /// space, each waits for those before it: what fails then is the last, and its place is free.
    /// One that may use all the room there is does so in any case, and so do those behind it.
    pub(super) async fn may_enter(&self, class: Class) -> Result<(), ArrayError> {
        loop {
            self.void_cramped().await?;
            let may = || {
                let is_alone = self.completed.get() == self.next_sequence.get();
                let one_by_one = class == Class::Oldest
                    || self.last_alone.get() >= Some(self.completed.get())
                    || self.one_by_one_until.get() > self.reactor.now();
                is_alone || !one_by_one
            };
            if may() {
                return Ok(());
            }
            self.changed.until(&self.reactor, may).await;
        }
    }

    /// A batch has met no space.
    pub(super) fn met_no_space(&self) {
        self.one_by_one_until.set(self.reactor.now().after(ONE_BY_ONE));
    }

    /// Tells members again of batches that lacked the space to be void.
    pub(crate) async fn void_cramped(&self) -> Result<(), ArrayError> {
        while let Some(sequence) = self.cramped() {
            self.void(sequence).await;
            if self.cramped() == Some(sequence) {
                return Err(ArrayError::NoSpace);
            }
        }
        Ok(())
    }

    /// Whether a batch lacks it still.
    pub(crate) fn is_cramped(&self) -> bool {
        self.cramped().is_some()
    }

    /// The last one of those.
    fn cramped(&self) -> Option<u64> {
        // Asked for every batch, and the ring may be long.
        if !self.is_half_void() {
            return None;
        }
        let ring = self.ring.borrow();
        ring.iter().rfind(|batch| batch.void == Void::Cramped).map(|batch| batch.sequence)
    }

    /// Whether something void may come true, if members that are away come back alone.
    pub(crate) fn is_half_void(&self) -> bool {
        !self.half_void.borrow().is_empty()
    }

    /// Before a member serves that comes back: what was voided without it is void there, durably.
    /// `list`: with it.
    pub(crate) async fn void_on(&self, list: &[Member], index: usize) -> Result<(), DriveError> {
        self.forget_half_void();
        let half_void = self.half_void.borrow().clone();
        self.voids_under_way.borrow_mut().extend(&half_void);
        let voided = self.void_all_on(&half_void, list, index).await;
        self.voids_end(&half_void);
        voided
    }

    /// Of batches that left the ring members know that are here: what came later says so.
    pub(super) fn forget_half_void(&self) {
        if self.members.absent().is_empty() {
            self.half_void.borrow_mut().retain(|sequence| self.place_of(*sequence).is_some());
        }
    }

    async fn void_all_on(
        &self,
        half_void: &[u64],
        list: &[Member],
        index: usize,
    ) -> Result<(), DriveError> {
        for sequence in half_void {
            self.void_at(*sequence, list, index).await?;
        }
        match list[index].keeps_metadata().filter(|_| !half_void.is_empty()) {
            Some(drive) => drive.flush().await,
            None => Ok(()),
        }
    }

    async fn void_at(
        &self,
        sequence: u64,
        list: &[Member],
        index: usize,
    ) -> Result<(), DriveError> {
        let Some((at, _)) = self.place_of(sequence) else { return Ok(()) };
        let parts = self.compose(&[], sequence, None);
        match Target::of(list, index, list.len(), at + parts.ring_bytes()) {
            Some(target) => match parts.write(&target, at, sequence).await {
                // Where the batch had no space either, nothing of it stands.
                Err(DriveError::NoSpace) if !self.stands(&target, at, sequence).await => Ok(()),
                written => written,
            },
            None if list[index].state == MemberState::Trusted => Err(DriveError::Gone),
            None => Ok(()),
        }
    }

    /// Whether the member may have the batch there.
    async fn stands(&self, target: &Target, at: u64, sequence: u64) -> bool {
        let home = target.ring + at;
        let block = self.reactor.buffer(size_of::<JournalBatch>());
        if target.drive.read(home, block.clone().into()).await.is_err() {
            return true;
        }
        let opened = record::open::<JournalBatch>(block.bytes(), Some(target.drive_uuid), home);
        opened.is_ok_and(|batch| {
            batch.header.sequence.get() == sequence && !batch.entries().is_empty()
        })
    }
}
