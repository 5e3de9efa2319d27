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
    /// Someone waits for its events.
    awaited: bool,
}

impl Lent {
    pub(crate) fn new(drive: Arc<Handle>) -> Lent {
        let device = drive.lend();
        Lent { drive, device, finished: Vec::new(), awaited: false }
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

    /// What to wait for besides everything else before sleeping, if nobody does yet.
    pub(crate) fn await_events(&mut self) -> Option<RawFd> {
        let events = self.device.as_ref()?.events()?;
        (!std::mem::replace(&mut self.awaited, true)).then_some(events)
    }

    /// They have come.
    pub(crate) fn woken(&mut self) {
        self.awaited = false;
        if let Some(device) = &mut self.device {
            device.take_events();
        }
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.awaited
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
