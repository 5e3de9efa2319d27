//! Members that are asked for something at the same time, and whose answers count.
//!
//! A drive that is given up fails what it was asked. Plugged in again it has another handle, maybe
//! before a sibling has answered: then the old handle's error says nothing of the member, and
//! whoever asked asks again. If the member missed nothing else, it has missed nothing then. If it
//! is being caught up with, the regions that are asked about are among those that it lacks, and it
//! counts as one that does not hold them. (What the old handle has taken counts: had it been in a
//! cache, the member would not have been taken back as one that missed nothing.)
//!
//! Each further round needs a drive that was plugged in during the one before.

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_format::array_superblock::MemberState;
use ashlar_format::units::MemberIndex;
use ashlar_reactor::join::join_all;

use crate::members::Members;

impl Members {
    /// What each member answers to `ask`, which is given its index.
    pub(crate) async fn ask_all(
        &self,
        ask: impl AsyncFn(usize) -> Result<(), DriveError>,
    ) -> Vec<Result<(), DriveError>> {
        let mut answers = vec![Err(DriveError::Gone); self.list().len()];
        let mut left: Vec<usize> = (0..answers.len()).collect();
        while !left.is_empty() {
            let asked: Vec<_> = self.list().iter().map(|member| member.drive.clone()).collect();
            for (index, answer) in left.iter().zip(join_all(left.iter().map(|i| ask(*i))).await) {
                answers[*index] = answer;
            }
            let is_other = |index| self.is_other(MemberIndex::new(index), asked[index].as_ref());
            left.retain(|index| answers[*index].is_err() && is_other(*index));
        }
        answers
    }

    /// Whether the member has another drive, or handle, than the one that was `asked`.
    pub(crate) fn is_other(&self, index: MemberIndex, asked: Option<&Rc<Drive>>) -> bool {
        let list = self.list();
        list[index.index()].drive.as_ref().map(Rc::as_ptr) != asked.map(Rc::as_ptr)
    }

    /// Whether somebody who cannot be fenced for it had no space: who is trusted. One that is being
    /// rebuilt is given up like one that fails, and nobody waits until there is space again.
    pub(crate) fn lacks_space(
        &self,
        asked: impl IntoIterator<Item = MemberIndex>,
        answers: &[Result<(), DriveError>],
    ) -> bool {
        let is_full = |answer: &Result<(), DriveError>| *answer == Err(DriveError::NoSpace);
        let mut full = asked.into_iter().zip(answers).filter(|(_, answer)| is_full(answer));
        full.any(|(index, _)| self.list()[index.index()].state == MemberState::Trusted)
    }

    /// Whether one of these failed by a handle that is no more its own.
    pub(crate) fn is_any_other<'a>(
        &self,
        asked: impl Iterator<Item = (MemberIndex, &'a Rc<Drive>)>,
        answers: &[Result<(), DriveError>],
    ) -> bool {
        let mut failed = asked.zip(answers).filter(|(_, answer)| answer.is_err());
        failed.any(|((index, drive), _)| self.is_other(index, Some(drive)))
    }
}
