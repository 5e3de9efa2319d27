//! A drive while a reactor has it; it goes back to who opened it.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use super::Handle;
use super::device::{LOOK_EVERY, NvmeDevice};
use crate::backend::Instant;
use crate::op::{Done, Errno, Op, Ticket};

/// How long to sleep where nothing says when to wake up.
const NAP: Duration = Duration::from_millis(1);

pub(crate) struct Lent {
    drive: Arc<Handle>,
    /// `None`: it was gone already.
    device: Option<NvmeDevice>,
    finished: Vec<Done>,
    /// The wait for its events that is under way.
    awaited: Option<u32>,
}

impl Lent {
    pub(crate) fn new(drive: Arc<Handle>) -> Lent {
        let device = drive.lend();
        Lent { drive, device, finished: Vec::new(), awaited: None }
    }

    pub(crate) fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        match &mut self.device {
            Some(device) => device.submit(ticket, op, until),
            None => self.finished.push(Done { ticket, outcome: Err(Errno(libc::ENODEV)) }),
        }
    }

    pub(crate) fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        done.append(&mut self.finished);
        if let Some(device) = &mut self.device {
            device.reap(now, done);
        }
    }

    /// What to wait for besides everything else before sleeping, if nobody does yet, and the number
    /// of that wait. `waits`: those of all drives so far.
    pub(crate) fn await_events(&mut self, waits: &mut u32) -> Option<(RawFd, u32)> {
        let events = self.device.as_ref()?.events().filter(|_| self.awaited.is_none())?;
        *waits = waits.wrapping_add(1);
        self.awaited = Some(*waits);
        Some((events, *waits))
    }

    /// They have come; or this was the wait for another drive's.
    pub(crate) fn woken(&mut self, wait: u32) {
        if self.awaited != Some(wait) {
            return;
        }
        self.awaited = None;
        if let Some(device) = &mut self.device {
            device.take_events();
        }
    }

    pub(crate) fn awaited(&self) -> Option<u32> {
        self.awaited
    }

    /// Before a sleep that nothing may end for long: memory that is gone is let go.
    pub(crate) fn forget_the_dead(&mut self) {
        if let Some(device) = &mut self.device {
            device.forget_the_dead();
        }
    }

    /// How long it may go without a look; `None`: as long as its events do not come.
    pub(crate) fn sleep_max(&self) -> Option<Duration> {
        if !self.finished.is_empty() {
            return Some(Duration::ZERO);
        }
        let device = self.device.as_ref().filter(|device| device.wants_a_look())?;
        Some(device.events().map_or(NAP, |_| LOOK_EVERY))
    }
}

impl Drop for Lent {
    /// Nothing is under way, or the backend ends: then the drive goes with it.
    fn drop(&mut self) {
        if let Some(device) = self.device.take().filter(NvmeDevice::is_idle) {
            self.drive.give_back(device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::Model;
    use super::*;

    #[test]
    fn a_wait_for_the_drive_before_wakes_nobody() {
        let drive = Arc::new(Handle::open(Model::default().bus()).unwrap());
        let mut lent = Lent::new(drive);
        lent.awaited = Some(2);
        lent.woken(1);
        assert_eq!(lent.awaited(), Some(2), "its own wait is still under way");
        lent.woken(2);
        assert_eq!(lent.awaited(), None);
    }
}
