//! The kernel, but for sectors that cannot be read.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "for tests")]

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ashlar_drive::drive::Drive;
use ashlar_format::units::StripeIndex;
use ashlar_raid::label;
use ashlar_reactor::backend::{Backend, Instant};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::{Device, DeviceId, Done, Errno, Op, Ticket};
use ashlar_reactor::uring::UringBackend;

use crate::pair::{DRIVE_BYTES, Pair, run_on};

/// Sectors that cannot be read until they are written.
#[derive(Clone, Default)]
pub struct Unreadable {
    /// By file.
    sectors: Rc<RefCell<BTreeMap<usize, BTreeSet<u64>>>>,
    /// Also afterwards.
    pub stay: Rc<Cell<bool>>,
}

impl Unreadable {
    pub fn count(&self) -> usize {
        self.sectors.borrow().values().map(BTreeSet::len).sum()
    }

    pub fn clear(&self) {
        self.sectors.borrow_mut().clear();
    }
}

/// The kernel, but for these sectors.
struct Faulty {
    kernel: UringBackend,
    files: BTreeMap<DeviceId, usize>,
    unreadable: Unreadable,
    failed: Vec<Ticket>,
}

impl Backend for Faulty {
    fn now(&self) -> Instant {
        self.kernel.now()
    }

    fn register(&mut self, device: Device) -> DeviceId {
        let file = match &device {
            Device::File { file } | Device::Namespace { file, .. } => Arc::as_ptr(file) as usize,
            Device::Nvme { .. }
            | Device::Remote { .. }
            | Device::Ram { .. }
            | Device::RamTwin { .. } => 0,
            Device::Null { .. } | Device::Model { .. } => 0,
            Device::Lossy { .. } | Device::Simulated { .. } => 0,
        };
        let id = self.kernel.register(device);
        self.files.insert(id, file);
        id
    }

    fn unregister(&mut self, device: DeviceId) {
        self.kernel.unregister(device);
    }

    fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        let file = op.device().map(|device| self.files[&device]);
        let mut unreadable = self.unreadable.sectors.borrow_mut();
        let sectors = file.and_then(|file| unreadable.get_mut(&file));
        match (op, sectors) {
            (Op::Read { offset, into, .. }, Some(sectors))
                if sectors.range(range(*offset, into.len() as u64)).next().is_some() =>
            {
                self.failed.push(ticket);
            }
            (Op::Write { offset, from, .. }, Some(sectors)) if !self.unreadable.stay.get() => {
                let written = range(*offset, from.len() as u64);
                sectors.retain(|sector| !written.contains(sector));
                self.kernel.submit(ticket, op, until);
            }
            _ => self.kernel.submit(ticket, op, until),
        }
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let failed = |ticket| Done { ticket, outcome: Err(Errno(libc::EIO)) };
        done.extend(self.failed.drain(..).map(failed));
        self.kernel.reap(done);
    }

    fn idle(&mut self, until: Option<Instant>) -> bool {
        !self.failed.is_empty() || self.kernel.idle(until)
    }
}

fn range(offset: u64, len: u64) -> Range<u64> {
    offset / 512..(offset + len).div_ceil(512)
}

pub fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Unreadable) -> F) {
    let unreadable = Unreadable::default();
    let backend = Faulty {
        kernel: UringBackend::new().unwrap(),
        files: BTreeMap::new(),
        unreadable: unreadable.clone(),
        failed: Vec::new(),
    };
    run_on(Box::new(backend), |reactor| test(reactor, unreadable));
}

pub fn drive_of(pair: &Pair, member: usize) -> Rc<Drive> {
    pair.array.status().members[member].drive.clone().unwrap()
}

/// Rows of a stripe become unreadable on a member.
pub fn spoil(pair: &Pair, unreadable: &Unreadable, member: usize, stripe: StripeIndex, row: u32) {
    let layout = pair.array.layout();
    let integrity = pair.array.status().integrity;
    let data = label::plan_for(DRIVE_BYTES, layout.parity, integrity).unwrap().data.offset;
    let sector = (data + layout.member_offset(stripe, row)) / 512;
    let file = Arc::as_ptr(pair.file(&drive_of(pair, member))) as usize;
    unreadable.sectors.borrow_mut().entry(file).or_default().insert(sector);
}
