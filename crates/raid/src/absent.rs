//! Members that are believed and do not answer: whatever rests on their having missed nothing, or
//! on their being known to have missed something.
//!
//! One that comes back is told what the others know while it is *joining*: it counts as here by
//! then. So who makes sure that nobody is believed without a change holds the joins for as long as
//! the change takes: nobody begins to join meanwhile, and who had begun is through.

use ashlar_format::array_superblock::MemberState;
use ashlar_format::units::MemberIndex;
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::{Mode, RangeGuard};

use crate::error::{ArrayError, ChangeError};
use crate::label;
use crate::member::{Keeper, Member};
use crate::members::Members;

impl Members {
    /// Nobody joins as long as the guard lives. Taken before the lock of the volume table, and by
    /// nobody who has it already.
    pub(crate) async fn hold_joins(&self) -> RangeGuard {
        self.joins.lock(0..1, Mode::Shared).await
    }

    /// Nobody else joins, and nobody changes what the others have to know, as long as the guard
    /// lives.
    pub(crate) async fn begin_join(&self) -> RangeGuard {
        self.joins.lock(0..1, Mode::Exclusive).await
    }

    /// Makes a change that all who are believed know of when this returns: who is away would say
    /// otherwise, were it started without the others. So none of an array that has failed as a
    /// whole.
    pub(crate) async fn tell_all(
        &self,
        change: impl FnOnce(&Members) -> Result<(), ChangeError>,
    ) -> Result<(), ChangeError> {
        let _joins = self.hold_joins().await;
        if !self.serves_all() {
            return Err(ArrayError::Lost.into());
        }
        change(self)?;
        Ok(self.fence_absent().await?)
    }

    /// Members that are believed and do not answer.
    pub(crate) fn absent(&self) -> Vec<MemberIndex> {
        self.members_that(|member| member.state == MemberState::Trusted && member.alive().is_none())
    }

    /// Whoever of a set is still relied on knows who of it is fenced, so that one that never heard
    /// of it tells of what came after (see `assemble`). Of copies nobody misses a write who is not
    /// fenced for it; beside parity some miss it who have no part in it: if they are away, they are
    /// fenced with the first, as far as the others can stand for them. In memory only. True if any
    /// are.
    pub(crate) fn fence_those_beside(&self) -> bool {
        let absent = self.absent();
        let may = !self.identity.layout().is_mirrored() && self.survives_without(&absent);
        may && self.mark_stale(absent.into_iter())
    }

    /// Fences members that went with something in their drive's cache, as far as the others can
    /// stand for them: a drive may lose it while it is away, and a start would believe it.
    pub(crate) async fn fence_lost_caches(&self) -> Result<(), ArrayError> {
        let has_lost = |member: &Member| {
            let unflushed = member.drive.as_ref().is_some_and(|drive| drive.is_unflushed());
            member.state != MemberState::Stale && member.alive().is_none() && unflushed
        };
        let lost = self.members_that(has_lost);
        // Those that failed a flush and are used on have no word for others.
        let has_failed = |member: &Member| {
            has_lost(member) || member.alive().is_some_and(|drive| drive.has_failed_flush())
        };
        if !self.survives_without(&self.members_that(has_failed)) {
            return Ok(());
        }
        // Of none: what could not be said a moment ago.
        self.fence(lost.into_iter()).await
    }

    /// Before a superblock says that somebody is fenced, those that it goes to are asked whether
    /// they answer. One may have died, unheard of: then it would be on the others alone, and bar
    /// members from a start that they cannot do without.
    pub(crate) async fn others_answer(&self) -> Result<(), ArrayError> {
        loop {
            let keepers = self.keepers();
            let asked = keepers.iter().map(|keeper| label::answers(&self.reactor, &keeper.drive));
            let answers = join_all(asked).await;
            let silent = keepers.iter().zip(answers).filter(|(_, answers)| !answers);
            let silent: Vec<&Keeper> = silent.map(|(keeper, _)| keeper).collect();
            let indexes: Vec<MemberIndex> = silent.iter().map(|keeper| keeper.index).collect();
            if self.survives_without(&indexes) {
                return Ok(());
            }
            // Of one whose drive came back meanwhile the old handle's silence says nothing.
            if !silent.iter().any(|its| self.is_other(its.index, Some(&its.drive))) {
                return Err(ArrayError::Lost);
            }
        }
    }

    /// Whether somebody is fenced of whom no durable superblock says so.
    pub(crate) fn is_fencing(&self) -> bool {
        self.fencing.get()
    }

    fn members_that(&self, are: impl Fn(&Member) -> bool) -> Vec<MemberIndex> {
        let list = self.list();
        let they = list.iter().enumerate().filter(|(_, member)| are(member));
        they.map(|(index, _)| MemberIndex::new(index)).collect()
    }

    /// Fences them: what is acknowledged from here on is not on them, and they could come back
    /// alone. There are none when this returns. An error: the others cannot stand for them.
    pub async fn fence_absent(&self) -> Result<(), ArrayError> {
        loop {
            if !self.all_trusted() {
                let absent = self.absent();
                if !self.survives_without(&absent) {
                    return Err(ArrayError::Lost);
                }
                self.fence(absent.into_iter()).await?;
            }
            self.settled().await?;
            // Others may have gone meanwhile.
            if self.all_trusted() || self.absent().is_empty() {
                return Ok(());
            }
        }
    }
}
