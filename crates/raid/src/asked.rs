//! Members that are asked for something at the same time, and what counts of their answers.
//!
//! A drive that is given up fails what it was asked. Plugged in again, as one that missed nothing,
//! it has another handle, while a sibling may not have answered yet: then the old handle's error
//! says nothing of the member, which is asked again. (What the old handle has taken counts: had it
//! been in a cache, the member would not have been taken back like that.)

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_format::units::MemberIndex;
use ashlar_reactor::join::join_all;

use crate::members::Members;

type Answer = Result<(), DriveError>;

/// The drives that members had when they were asked, by member.
pub(crate) struct Asked(Vec<Option<Rc<Drive>>>);

impl Members {
    /// The drives of this moment.
    pub(crate) fn asked(&self) -> Asked {
        Asked(self.list().iter().map(|member| member.drive.clone()).collect())
    }

    /// Whether a member has another drive, or handle, than when it was asked.
    pub(crate) fn has_changed(&self, index: MemberIndex, asked: &Asked) -> bool {
        let asked = &asked.0[index.index()];
        let list = self.list();
        match (&list[index.index()].drive, asked) {
            (Some(now), Some(asked)) => !Rc::ptr_eq(now, asked),
            (now, asked) => now.is_some() != asked.is_some(),
        }
    }

    /// Whether the member has this drive, by this handle.
    pub(crate) fn has(&self, index: MemberIndex, drive: &Rc<Drive>) -> bool {
        self.list()[index.index()].drive.as_ref().is_some_and(|its| Rc::ptr_eq(its, drive))
    }

    /// Of members and what they answered, those that still have the drive that was asked.
    pub(crate) fn still<'a>(
        &self,
        asked: impl Iterator<Item = (MemberIndex, &'a Rc<Drive>)>,
        answers: Vec<Answer>,
    ) -> (Vec<MemberIndex>, Vec<Answer>) {
        let answers = asked.zip(answers).filter(|((index, drive), _)| self.has(*index, drive));
        answers.map(|((index, _), answer)| (index, answer)).unzip()
    }

    /// What each member answers; `ask`: which gets its number.
    pub(crate) async fn ask_all(&self, ask: impl AsyncFn(usize) -> Answer) -> Vec<Answer> {
        let mut answers = vec![Err(DriveError::Gone); self.list().len()];
        let mut left: Vec<usize> = (0..answers.len()).collect();
        while !left.is_empty() {
            let asked = self.asked();
            for (index, answer) in left.iter().zip(join_all(left.iter().map(|i| ask(*i))).await) {
                answers[*index] = answer;
            }
            let is_back = |index| self.has_changed(MemberIndex::new(index), &asked);
            left.retain(|index| answers[*index].is_err() && is_back(*index));
        }
        answers
    }
}
