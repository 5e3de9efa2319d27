//! The newest batch, as superblocks name it. A start that finds neither that one nor a later one
//! has journals that somebody has written over: what they held is not there, and nobody would know.
//!
//! A batch is named once it is durable: by the release of others (whose superblock is written in
//! any case), and by the first flush after a start, or after a member is trusted or fenced. Until
//! that, the superblock names none. The place of a named batch is not used again before another
//! superblock is durable, also once it has left the ring.

use std::ops::Range;

use super::{Journal, Void};
use crate::error::ArrayError;

/// A batch that may be named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    pub(super) sequence: u64,
    /// So often had members changed by then (`Members::trust_changes`): later ones may not have it.
    pub(super) changes: u64,
}

/// A batch that a superblock names, or may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) sequence: u64,
    pub(super) place: Range<u64>,
}

impl Journal {
    /// The next superblock names the newest batch that is durable, if there is one.
    pub(super) fn name_newest(&self) {
        let Some(Candidate { sequence, changes }) = self.newest_durable.get() else { return };
        let is_newer = sequence > self.members.journal_newest();
        if !is_newer || changes != self.members.trust_changes() {
            return;
        }
        let ring = self.ring.borrow();
        let batch = ring.iter().rfind(|batch| batch.sequence == sequence);
        // One whose caller's flush failed is void, though it was written, and another's did not.
        let Some(batch) = batch.filter(|batch| batch.void == Void::No) else { return };
        self.drop_unnamed();
        let place = batch.at..batch.at + batch.len;
        self.named.borrow_mut().push_back(Named { sequence, place });
        self.members.set_journal_newest(sequence);
    }

    /// After a flush that a guest asked for: what it was told to be durable can be missed from now
    /// on. What cannot be said now is said with a later superblock.
    pub(crate) async fn name_first(&self) {
        if self.members.journal_from() == 0 || self.members.journal_newest() != 0 {
            return;
        }
        self.name_newest();
        let _ = self.members.settled().await;
    }

    /// Gives the place of a named batch back that others would have room without.
    pub(super) async fn make_way(&self) -> Result<(), ArrayError> {
        if self.named_takes_room.replace(false) {
            self.members.set_journal_newest(0);
            self.members.settled().await?;
            self.note_change();
        }
        Ok(())
    }

    /// The oldest and the newest that superblocks may name. Forgets others.
    pub(super) fn named_places(&self) -> Option<(Named, Named)> {
        self.drop_unnamed();
        let named = self.named.borrow();
        Some((named.front()?.clone(), named.back()?.clone()))
    }

    pub(super) fn is_named(&self, sequence: u64) -> bool {
        self.drop_unnamed();
        self.named.borrow().iter().any(|named| named.sequence == sequence)
    }

    /// Forgets those that no superblock names any more.
    fn drop_unnamed(&self) {
        if self.members.is_newest_durable() {
            let newest = self.members.journal_newest();
            self.named.borrow_mut().retain(|named| named.sequence == newest);
        }
    }
}
