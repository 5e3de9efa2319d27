//! Devices of every kind, and how each is served.
//!
//! | device | is given its operations | answers |
//! |---|---|---|
//! | file, block device | by a ring: the polled one, if it can be polled | by the kernel |
//! | memory | at once: a copy | at the next look |
//! | the drive that does nothing | at once | at the next look |
//! | modelled drive | at once: a copy | when its numbers say so |
//! | NVMe drive of ours | at once: a queue in its memory | when its queues are looked at |
//! | lossy drive | at once: a cache; by the ring what that asks of its file | by the cache |
//!
//! Another kind gets a line here, a variant, an arm in `UringBackend::submit`, and a look in
//! `UringBackend::reap` if it has completions of its own.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use crate::lossy::Lossy;
use crate::model::Model;
use crate::null::Null;
use crate::nvme::lent::Lent;
use crate::op::Op;
use crate::ram::Ram;
use crate::uring::entry::Target;
use crate::uring::gauges::{DeviceGauge, Use};

pub(super) enum Registered {
    File(FileDevice),
    Ram(Arc<Ram>),
    /// That of another reactor.
    RamTwin(Arc<Ram>),
    Null(Null),
    Model(Model),
    Lossy(Box<Lossy>),
    Nvme(Box<Lent>),
    Gone,
}

/// A file or block device.
pub(super) struct FileDevice {
    file: Arc<File>,
    /// Its place in the tables of files.
    place: usize,
    /// What it has in which ring.
    pub(super) in_table: bool,
    pub(super) in_polled_table: bool,
    /// Let go, but the kernel still tries whether it can be polled.
    pub(super) is_leaving: bool,
    pub(super) gauge: Rc<DeviceGauge>,
}

impl FileDevice {
    pub(super) fn new(file: Arc<File>, place: usize) -> FileDevice {
        FileDevice {
            file,
            place,
            in_table: false,
            in_polled_table: false,
            is_leaving: false,
            gauge: Rc::new(DeviceGauge::new()),
        }
    }

    pub(super) fn file(&self) -> &Arc<File> {
        &self.file
    }

    pub(super) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Rings for polling take nothing but reads and writes.
    pub(super) fn is_polled_for(&self, op: &Op) -> bool {
        self.gauge.polling.get() == Use::Yes && matches!(op, Op::Read { .. } | Op::Write { .. })
    }

    pub(super) fn target(&self) -> Target {
        self.target_in(self.in_table)
    }

    pub(super) fn polled_target(&self) -> Target {
        self.target_in(self.in_polled_table)
    }

    fn target_in(&self, in_table: bool) -> Target {
        match i32::try_from(self.place) {
            Ok(place) if in_table => Target::Registered(place),
            Ok(_) | Err(_) => Target::Descriptor(self.fd()),
        }
    }
}
