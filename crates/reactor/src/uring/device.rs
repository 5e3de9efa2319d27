//! Devices of every kind, and how each is served.
//!
//! | device | is given its operations | answers |
//! |---|---|---|
//! | file, block device | by a ring: the polled one, if it can be polled | by the kernel |
//! | NVMe namespace | the same, or as commands by a ring for these, if so chosen | the same |
//! | memory | at once: a copy | at once, or at the next look |
//! | the drive that does nothing | at once | the same |
//! | modelled drive | at once: a copy | when its numbers say so |
//! | NVMe drive of ours | at once: a queue in its memory | when its queues are looked at |
//! | remote drive | at once: what its connection has to do, by the ring | by the other side |
//! | lossy drive | at once: a cache; by the ring what that asks of its file | by the cache |
//!
//! Another kind gets a line here, a variant, an arm in `UringBackend::submit`, and a look in
//! `UringBackend::reap` if it has completions of its own.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::rc::Rc;
use std::sync::Arc;

use crate::lossy::Lossy;
use crate::model::Model;
use crate::null::Null;
use crate::nvme::generic::Generic;
use crate::nvme::lent::Lent;
use crate::nvme::remote::device::RemoteDevice;
use crate::op::{Errno, Op, Outcome};
use crate::ram::{Lender, Ram};
use crate::uring::entry::Target;
use crate::uring::gauges::{DeviceGauge, Use};

pub(super) enum Registered {
    File(FileDevice),
    Ram(Lender),
    /// That of another reactor.
    RamTwin(Arc<Ram>),
    Null(Null),
    Model(Model),
    Lossy(Box<Lossy>),
    Nvme(Box<Lent>),
    Remote(Box<RemoteDevice>),
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
    pub(super) in_passthrough_table: bool,
    /// Of a namespace: its way past the block layer.
    pub(super) generic: Option<Arc<Generic>>,
    /// Let go, but the kernel still tries whether it can be polled, or takes commands.
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
            in_passthrough_table: false,
            generic: None,
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

    /// Its way past the block layer, if that was seen to work.
    pub(super) fn passes(&self) -> Option<&Arc<Generic>> {
        self.generic.as_ref().filter(|_| self.gauge.passthrough.get() == Use::Yes)
    }

    /// Where the ring for commands has it.
    pub(super) fn passthrough_place(&self) -> Option<i32> {
        i32::try_from(self.place).ok().filter(|_| self.in_passthrough_table)
    }

    /// The kernel says of a write to a block device that was taken out that there is no space. One
    /// that is thin, and full, still has its size.
    pub(super) fn meant_by(&self, outcome: Outcome) -> Outcome {
        match outcome {
            Err(Errno(libc::ENOSPC)) if self.is_taken_out() => Err(Errno(libc::ENODEV)),
            told => told,
        }
    }

    fn is_taken_out(&self) -> bool {
        let is_device = self.file.metadata().is_ok_and(|its| its.file_type().is_block_device());
        is_device && (&*self.file).seek(SeekFrom::End(0)).is_ok_and(|bytes| bytes == 0)
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
