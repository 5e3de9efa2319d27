//! Which mode the array is written in: it follows from the policy and from the members. Under
//! policy `bitmap` a degraded array with parity uses the journal too: in place, a crash would cost
//! the missing member's blocks of what was being written.

use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::Policy;
use ashlar_reactor::backend::Instant;

use crate::array::Array;
use crate::error::{ArrayError, ChangeError};
use crate::layout::Layout;
use crate::members::Members;
use crate::mode::{Mode, ModeGuard};

/// A journal that could not be ended, or begun without a write, is tried again after this time.
const TRIED_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// Whether an array goes through its journal, but for what is moved to new stripes. `degraded`:
/// members are missing, or do not hold everything.
pub(crate) fn is_journaled(
    policy: Policy,
    layout: &Layout,
    degraded: impl FnOnce() -> bool,
) -> bool {
    match policy {
        Policy::Journal => true,
        Policy::Bitmap => layout.parity > 0 && degraded(),
        Policy::None => false,
    }
}

impl Array {
    fn wanted_mode(&self) -> Mode {
        let degraded = || !self.members.all_trusted();
        let journaled = is_journaled(self.members.policy(), &self.layout(), degraded);
        // What is moved to new stripes goes through the journal.
        let journaled = journaled || self.is_restriping();
        // The journal's promise is about stripes that agree.
        if journaled && self.unsynced.count() == 0 { Mode::Journaled } else { Mode::Direct }
    }

    /// Before anything is written: the mode that it is to be written in.
    pub(crate) async fn enter_mode(self: &Rc<Self>) -> Result<ModeGuard, ArrayError> {
        let modes = &self.modes;
        loop {
            if modes.switching.get() {
                modes.changed.until(&self.reactor, || !modes.switching.get()).await;
                continue;
            }
            let wanted = self.wanted_mode();
            if wanted == modes.mode.get() || self.stays_journaled() {
                if wanted != modes.mode.get() {
                    self.end_later();
                }
                modes.users.set(modes.users.get() + 1);
                let mode = modes.mode.get();
                let guard = ModeGuard { reactor: self.reactor.clone(), modes: modes.clone(), mode };
                // A switch may have failed before, and have left another `journal_from` on some.
                self.members.settled().await?;
                return Ok(guard);
            }
            let switched = self.switch_to(wanted).await;
            if !self.stays_journaled() {
                switched?;
            }
        }
    }

    /// Without a write that waits for it: a degraded array is covered at once. Until it is, a crash
    /// takes what was written lately for stripes that wait for resync.
    pub(crate) fn begin_journal_if_due(self: &Rc<Self>) {
        let (modes, now) = (&self.modes, self.reactor.now());
        let is_direct = modes.mode.get() == Mode::Direct && !modes.switching.get();
        let is_due = is_direct && !self.dirty.is_clean() && self.wanted_mode() == Mode::Journaled;
        if !is_due || now < modes.not_before.get() || !self.members.serves_all() {
            return;
        }
        // If it fails: drives that take no writes are given up for too many errors.
        modes.not_before.set(now.after(TRIED_AGAIN_AFTER));
        let array = self.clone();
        self.reactor.spawn(async move {
            if let Ok(_request) = array.admit_step().await
                && array.enter_mode().await.is_ok()
            {
                array.modes.not_before.set(Instant::default());
            }
        });
    }

    /// Who else switches is waited for, and what is wanted looked at again.
    async fn switch_to(self: &Rc<Self>, wanted: Mode) -> Result<(), ArrayError> {
        let _pause = self.modes.pause(&self.reactor).await;
        if wanted != self.wanted_mode() || wanted == self.modes.mode.get() {
            return Ok(());
        }
        match wanted {
            Mode::Journaled => self.begin_journal().await,
            Mode::Direct => {
                let ended = self.end_journal().await;
                self.note_ended(ended);
                ended
            }
        }
    }

    /// Whether it could not be ended just now.
    fn is_not_ended(&self) -> bool {
        let waits = |(_, again_at)| self.reactor.now() < again_at;
        self.modes.not_ended.get().is_some_and(waits)
    }

    fn note_ended(&self, ended: Result<(), ArrayError>) {
        let again_at = self.reactor.now().after(TRIED_AGAIN_AFTER);
        self.modes.not_ended.set(ended.err().map(|error| (error, again_at)));
    }

    /// Whether writes go through a journal that is to be ended, as long as it covers them: nobody
    /// has to wait until most of what it holds is in place, or to hear that something cannot be.
    fn stays_journaled(&self) -> bool {
        let is_covered = self.modes.mode.get() == Mode::Journaled && self.unsynced.count() == 0;
        is_covered && (self.modes.not_ended.get().is_some() || self.journal_holds_much())
    }

    /// Ends the journal soon.
    fn end_later(self: &Rc<Self>) {
        if !self.is_not_ended() && !self.modes.ending.replace(true) {
            self.reactor.spawn(self.clone().end_beside());
        }
    }

    /// Ends the journal, while others write, but for the last of it.
    async fn end_beside(self: Rc<Self>) {
        if let Ok(_request) = self.admit_step().await {
            match self.drain_most().await {
                Ok(()) => drop(self.switch_to(Mode::Direct).await),
                drained => self.note_ended(drained),
            }
        }
        self.modes.ending.set(false);
        self.modes.changed.wake_all(&self.reactor);
    }

    /// Says in the superblock that the journal covers every write. Nothing is under way.
    pub(crate) async fn begin_journal(self: &Rc<Self>) -> Result<(), ArrayError> {
        // What was written in place must not be undone by a power cut any more: no batch would
        // cure it.
        // And what was forgotten must not be there again: its parity may not fit it.
        self.written.settle().await?;
        self.write_sums().await?;
        self.members.flush().await?;
        if self.wanted_mode() == Mode::Journaled {
            self.members.set_journal_from(self.journal.next_sequence());
            let settled = self.members.settled().await;
            if settled.is_err() {
                self.members.set_journal_from(0);
                return settled;
            }
            self.modes.set(Mode::Journaled);
        }
        Ok(())
    }

    /// Puts everything in place, and says in the superblock that the journal covers nothing: else
    /// a crash would store old batches over what comes now.
    async fn end_journal(self: &Rc<Self>) -> Result<(), ArrayError> {
        self.drain_journal().await?;
        self.members.set_journal_from(0);
        let settled = self.members.settled().await;
        if settled.is_err() {
            self.members.set_journal_from(self.journal.next_sequence());
            return settled;
        }
        self.modes.set(Mode::Direct);
        Ok(())
    }

    pub fn policy(&self) -> Policy {
        self.members.policy()
    }

    /// Why the array could not have this policy.
    pub fn check_policy(&self, policy: Policy) -> Result<(), ChangeError> {
        self.identity.check_policy(policy).map_err(ChangeError::Spec)
    }

    /// Changes what is durable before a write is acknowledged; durably, while the array serves.
    pub async fn set_policy(self: &Rc<Self>, policy: Policy) -> Result<(), ChangeError> {
        let _request = self.begin()?;
        self.check_policy(policy)?;
        let tell = |members: &Members| {
            members.set_policy(policy);
            Ok(())
        };
        self.members.tell_all(tell).await?;
        // So that the change is complete when this returns.
        self.modes.not_ended.set(None);
        let modes = &self.modes;
        drop(self.enter_mode().await?);
        let is_done = || !modes.ending.get() || modes.mode.get() == self.wanted_mode();
        modes.changed.until(&self.reactor, is_done).await;
        match modes.not_ended.get() {
            Some((error, _)) if modes.mode.get() != self.wanted_mode() => Err(error.into()),
            _ => Ok(()),
        }
    }
}
