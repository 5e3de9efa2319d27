//! The kernel, but for operations that a test has something else in mind for.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub, reason = "each test uses a part of it")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ashlar_raid::label;
use ashlar_reactor::backend::{Backend, Instant};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::{Device, DeviceId, Done, Errno, Op, Ticket};
use ashlar_reactor::uring::UringBackend;

use crate::pair::DRIVE_BYTES;

/// What becomes of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Passes,
    Fails,
    /// There is no space left.
    Full,
    /// Until another rule holds.
    Waits,
}

/// Says so of each operation on a file, which is known by its address.
type Rule = Box<dyn Fn(usize, &Op) -> Fate>;

#[derive(Clone)]
pub struct Steer(Rc<RefCell<Steered>>);

struct Steered {
    rule: Rule,
    waiting: Vec<(Ticket, Op, Instant)>,
    /// So many of those fail, whatever the rule says.
    dropped: usize,
}

impl Steer {
    pub fn new() -> Steer {
        let rule = Box::new(|_, _: &Op| Fate::Passes);
        Steer(Rc::new(RefCell::new(Steered { rule, waiting: Vec::new(), dropped: 0 })))
    }

    /// From now on, also for what waits.
    pub fn set(&self, rule: impl Fn(usize, &Op) -> Fate + 'static) {
        self.0.borrow_mut().rule = Box::new(rule);
    }

    /// Nothing of what waits is ever done: as after a crash of the host. All else passes.
    pub async fn drop_waiting(&self, reactor: &Reactor) {
        self.set(|_, _| Fate::Passes);
        let waiting = self.waiting();
        self.0.borrow_mut().dropped = waiting;
        while self.0.borrow().dropped > 0 {
            reactor.sleep(Duration::from_millis(1)).await;
        }
    }

    /// Until so many operations wait.
    pub async fn caught(&self, reactor: &Reactor, count: usize) {
        while self.waiting() < count {
            reactor.sleep(Duration::from_millis(1)).await;
        }
    }

    pub fn waiting(&self) -> usize {
        self.0.borrow().waiting.len()
    }

    pub fn backend(&self) -> Box<dyn Backend> {
        let kernel = UringBackend::new().expect("io_uring");
        let (files, failed) = (BTreeMap::new(), Vec::new());
        Box::new(Wheel { kernel, files, failed, steer: self.clone() })
    }
}

pub fn address(file: &Arc<File>) -> usize {
    Arc::as_ptr(file) as usize
}

/// First byte of a read, write or zeroing.
pub fn offset(op: &Op) -> Option<u64> {
    match op {
        Op::Read { offset, .. } | Op::Write { offset, .. } | Op::WriteZeroes { offset, .. } => {
            Some(*offset)
        }
        Op::Flush { .. } | Op::Descriptor { .. } => None,
    }
}

/// Where a superblock is written, if that is what the operation does.
pub fn superblock(op: &Op) -> Option<u64> {
    // On drives of one size they are in one place, whatever the level.
    let area = label::plan(DRIVE_BYTES, 1).unwrap().superblocks;
    offset(op).filter(|at| is_write(op) && area.range().contains(at))
}

pub fn is_write(op: &Op) -> bool {
    matches!(op, Op::Write { .. } | Op::WriteZeroes { .. })
}

struct Wheel {
    kernel: UringBackend,
    files: BTreeMap<DeviceId, usize>,
    failed: Vec<Done>,
    steer: Steer,
}

impl Wheel {
    fn decide(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        let file = op.device().map_or(0, |device| self.files[&device]);
        let fate = (self.steer.0.borrow().rule)(file, op);
        match fate {
            Fate::Passes => self.kernel.submit(ticket, op, until),
            Fate::Fails => self.failed.push(Done { ticket, outcome: Err(Errno(libc::EIO)) }),
            Fate::Full => self.failed.push(Done { ticket, outcome: Err(Errno(libc::ENOSPC)) }),
            Fate::Waits => self.steer.0.borrow_mut().waiting.push((ticket, op.clone(), until)),
        }
    }
}

impl Backend for Wheel {
    fn now(&self) -> Instant {
        self.kernel.now()
    }

    fn register(&mut self, device: Device) -> DeviceId {
        let file = match &device {
            Device::File { file } | Device::Namespace { file, .. } => address(file),
            Device::Nvme { .. }
            | Device::Ram { .. }
            | Device::RamTwin { .. }
            | Device::Null { .. }
            | Device::Model { .. }
            | Device::Lossy { .. }
            | Device::Remote { .. }
            | Device::Simulated { .. } => 0,
        };
        let id = self.kernel.register(device);
        self.files.insert(id, file);
        id
    }

    fn unregister(&mut self, device: DeviceId) {
        self.kernel.unregister(device);
    }

    fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        self.decide(ticket, op, until);
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let mut waiting = std::mem::take(&mut self.steer.0.borrow_mut().waiting);
        let dropped = std::mem::take(&mut self.steer.0.borrow_mut().dropped);
        let failed =
            |(ticket, ..): (Ticket, Op, Instant)| Done { ticket, outcome: Err(Errno(libc::EIO)) };
        self.failed.extend(waiting.drain(..dropped).map(failed));
        waiting.iter().for_each(|(ticket, op, until)| self.decide(*ticket, op, *until));
        done.append(&mut self.failed);
        self.kernel.reap(done);
    }

    fn idle(&mut self, until: Option<Instant>) -> bool {
        !self.failed.is_empty() || self.kernel.idle(until)
    }
}
