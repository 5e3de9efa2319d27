//! The end of a rebuild: a member is trusted once the others know.
//!
//! Who has not heard could be left behind by those that have, and started by itself: it would
//! believe that nobody went on without it. So the superblock that says so comes first, and nothing
//! rests on the member before those that were trusted already, and are enough without it, have it.

use ashlar_format::array_superblock::MemberState;
use ashlar_format::units::MemberIndex;

use super::Members;
use crate::error::ArrayError;
use crate::member::{Member, are_enough};

/// What became of a superblock that trusts a member.
struct Told {
    generation: u64,
    /// Who has it.
    members: Vec<MemberIndex>,
    /// All that keep metadata do.
    is_all: bool,
    /// There was no space for it somewhere.
    is_full: bool,
}

impl Members {
    /// Trusts a member that was rebuilt, if it `is_still` that one. An error: the others are not
    /// enough, or could not be told.
    pub(crate) async fn trust(
        &self,
        index: MemberIndex,
        is_still: impl Fn(&Member) -> bool,
    ) -> Result<(), ArrayError> {
        // No other change goes with it, and no other superblock is being written.
        self.settled().await?;
        assert!(!self.writing.get(), "a superblock is written to an array that is settled");
        if !is_still(&self.list()[index.index()]) {
            return Ok(());
        }
        if !self.survives_without(&[index]) {
            return Err(ArrayError::Lost);
        }
        self.writing.set(true);
        let Told { generation, members, is_all, is_full } = self.tell_of(index).await;
        self.writing.set(false);
        self.waiting.wake_all(&self.reactor);
        let knows =
            |index, its: &Member| its.state == MemberState::Trusted && members.contains(&index);
        let layout = self.identity.layout();
        let is_enough = members.contains(&index) && are_enough(&layout, &self.list(), knows);
        let is_kept = is_enough && is_still(&self.list()[index.index()]);
        if !is_kept || !is_all {
            self.generation.set(self.generation.get() + 1);
        }
        if is_enough || is_all {
            // What rests on it is not where the next one is written, which a power cut may tear.
            self.durable_generation.set(generation);
        }
        if is_kept {
            self.hide();
            self.list.borrow_mut()[index.index()].become_trusted();
            self.trust_changed();
            // Others may have changed something, or not have been told.
            let _ = self.settled().await;
            return Ok(());
        }
        // Some may have it: whoever says otherwise now fences.
        self.fencing.set(true);
        match is_full {
            _ if is_enough => Ok(()),
            true => Err(ArrayError::NoSpace),
            false => Err(ArrayError::Lost),
        }
    }

    /// Writes the superblock that trusts it.
    async fn tell_of(&self, index: MemberIndex) -> Told {
        assert!(self.writing.get(), "another superblock may be written beside this one");
        self.trust_changed();
        self.generation.set(self.generation.get() + 1);
        let generation = self.next_generation();
        let targets = self.keepers();
        let superblock = || {
            let mut list = self.list().clone();
            list[index.index()].become_trusted();
            self.superblock_of(&list)
        };
        let (still, results) = self.give(&targets, generation, superblock).await;
        let is_full = self.lacks_space(still.iter().copied(), &results);
        let took = still.into_iter().zip(results).filter(|(_, result)| result.is_ok());
        let members: Vec<MemberIndex> = took.map(|(index, _)| index).collect();
        let is_all = members.len() == targets.len() && !targets.is_empty();
        Told { generation, members, is_all, is_full }
    }
}
