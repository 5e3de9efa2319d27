//! A drive that does not answer: it is looked after while it has operations under way.

use std::rc::{Rc, Weak};
use std::time::Duration;

use ashlar_reactor::backend::Instant;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;

use crate::drive::{Drive, Late, Siblings, Watch};
use crate::health::{ANSWER_WITHIN, Health};

/// Zeroing may take so many times longer than other operations: a drive may have to write it all.
const ZEROING_PATIENCE: u32 = 3;
/// And operations so many times longer of a drive that its array cannot do without, or whose
/// siblings do not answer either: as long as the kernel may take to reset a drive, or a controller.
const PATIENCE_WITH_ALL: u32 = 6;
/// The last so many looks of an operation's time are waited for one by one.
const GRACES: u32 = 2;
/// How much of that time there is between two of them: one part of so many.
const GRACE_SHARE: u32 = 8;
/// An array whose drives have the usual time to answer has to write to each of them more often than
/// that: those that do not write say nothing about one that is silent.
pub const WRITES_WITHIN: Duration =
    ANSWER_WITHIN.checked_div(GRACE_SHARE).expect("not zero").saturating_mul(GRACE_SHARE - GRACES);

impl Drive {
    pub(crate) fn be_watched(self: &Rc<Self>) {
        if matches!(self.watch.get(), Watch::Off) {
            self.watch.set(Watch::On);
            self.reactor.spawn(watch(Rc::downgrade(self), self.reactor.clone()));
        }
    }

    /// Looks for an operation that is not answered. When to look again; `None`: there is nothing to
    /// watch.
    fn look_after(&self) -> Option<Duration> {
        if !self.is_alive() {
            return None;
        }
        let Some(deadline) = self.reactor.deadline(self.device, |op| self.allowed(op)) else {
            self.watch.set(Watch::Off);
            return None;
        };
        // The last part of the time is waited for as such, whatever the clock says: if this process
        // was stopped meanwhile, its drives may have had no time to answer.
        let grace = self.grace();
        let left = deadline.since(self.reactor.now());
        if left > GRACES * grace {
            self.watch.set(Watch::On);
            return Some(left - GRACES * grace);
        }
        self.look_at_late(deadline).then_some(grace)
    }

    /// How long an attempt may take.
    fn allowed(&self, op: &Op) -> Duration {
        let within = self.health_limits.answer_within;
        match op {
            Op::WriteZeroes { .. } => within * ZEROING_PATIENCE,
            Op::Read { .. } | Op::Write { .. } | Op::Flush { .. } | Op::Descriptor { .. } => within,
        }
    }

    /// Between two looks at a drive whose time is almost over.
    fn grace(&self) -> Duration {
        self.health_limits.answer_within / GRACE_SHARE
    }

    /// An operation's time ends then, or has ended. False: the drive is given up for that.
    ///
    /// What keeps its siblings from answering too is not its own fault (the machine, a controller),
    /// and to give it up would gain nothing. They must have answered by the look before: this drive
    /// may be about to, if they have just begun to. That they read says nothing about a drive that
    /// does not write: a file system that is frozen answers reads. (The lease of an array is
    /// written to all that are not stale, again and again: [`WRITES_WITHIN`].)
    fn look_at_late(&self, deadline: Instant) -> bool {
        let now = self.reactor.now();
        let within = self.health_limits.answer_within;
        let siblings = self.siblings();
        let late = match self.watch.get() {
            Watch::Late(late) if late.deadline == deadline => {
                let is_over = now >= deadline;
                if is_over && !late.counted {
                    self.judge(Health::timeout);
                }
                let (reads, written_since) = (self.are_reads_late(), self.silent_since());
                let fit = |its: &Drive| {
                    its.has_answered(late.since) && (reads || its.has_written(written_since))
                };
                let stand = |its: &Rc<dyn Siblings>| its.stand_for(self, &fit);
                let replaceable = siblings.as_ref().is_none_or(stand);
                let has_waited = now >= deadline.after(within * (PATIENCE_WITH_ALL - 1));
                if is_over && late.replaceable && replaceable || has_waited {
                    self.judge(Health::fail);
                    return false;
                }
                // What was answered long ago says nothing about now.
                let is_old = now.since(late.since) > within;
                let since = if is_old { now } else { late.since };
                Late { replaceable: replaceable && !is_old, counted: is_over, since, ..late }
            }
            Watch::Late(_) | Watch::On | Watch::Off => {
                Late { deadline, since: now, replaceable: false, counted: false }
            }
        };
        self.watch.set(Watch::Late(late));
        siblings.iter().for_each(|its| its.ask_whether_they_answer(self, late.since));
        true
    }

    fn are_reads_late(&self) -> bool {
        let allowed = |op: &Op| match op {
            Op::Read { .. } => self.allowed(op) - GRACES * self.grace(),
            Op::Write { .. }
            | Op::WriteZeroes { .. }
            | Op::Flush { .. }
            | Op::Descriptor { .. } => Duration::MAX,
        };
        let late = self.reactor.deadline(self.device, allowed);
        late.is_some_and(|late| late <= self.reactor.now())
    }

    /// What others have begun since then, they have done while it was silent. Not long ago.
    fn silent_since(&self) -> Instant {
        let last = self.health_limits.answer_within - self.grace();
        let since = self.reactor.deadline(self.device, |op| self.allowed(op) - last);
        since.unwrap_or(Instant::MAX)
    }
}

/// Looks after a drive while it has operations under way.
async fn watch(drive: Weak<Drive>, reactor: Reactor) {
    while let Some(wait) = drive.upgrade().and_then(|drive| drive.look_after()) {
        reactor.sleep(wait).await;
    }
}
