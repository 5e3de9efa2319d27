//! A second ring, for devices that are looked at instead of waited for (io_uring_setup(2),
//! `IORING_SETUP_IOPOLL`).
//!
//! A drive answers sooner when nobody has to be interrupted. But such a ring can be built where no
//! device can be polled, so each block device is asked by a real read, and is served by it once
//! that was answered.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use io_uring::IoUring;

use crate::arena::Arena;
use crate::backend::Instant;
use crate::buffer::{BufferPool, Buffers};
use crate::op::{DeviceId, Errno, Op, Outcome};
use crate::uring::device::FileDevice;
use crate::uring::entry::entry;
use crate::uring::gauges::{Use, Why};
use crate::uring::probe::{Kind, build};
use crate::uring::ring::Ring;
use crate::uring::tag::Tag;
use crate::uring::trial::Trial;

/// Bytes of the read that tries a device: any drive's sector fits.
const PROBE_BYTES: usize = 4096;
/// A drive that has not answered for this long is looked at less often: it may be dead. So is one
/// that is only tried: nobody waits for that.
const PATIENCE: Duration = Duration::from_millis(2);
/// Then a look comes after this part of the time that it has kept silent, within these.
const NAP_SHARE: u32 = 8;
const NAP_MIN: Duration = Duration::from_micros(250);
const NAP_MAX: Duration = Duration::from_millis(50);

pub(super) type Polling = Trial<Polled>;

pub(super) struct Polled {
    pub(super) ring: Ring,
    /// By device: what its trial reads into.
    probes: BTreeMap<usize, Buffers>,
    /// When something was last begun or heard of.
    last_news: Instant,
    last_look: Instant,
}

impl Polled {
    pub(super) fn build(arena: Option<&Rc<Arena>>) -> std::io::Result<Polled> {
        build(Kind::Polled).map(|(io, _)| Polled::new(io, arena.cloned()))
    }

    pub(super) fn new(io: IoUring, arena: Option<Rc<Arena>>) -> Polled {
        let ring = Ring::new(io, Kind::Polled, arena);
        let never = Instant::default();
        Polled { ring, probes: BTreeMap::new(), last_news: never, last_look: never }
    }

    /// Begins to find out whether a device can be polled.
    pub(super) fn probe(&mut self, index: usize, device: &mut FileDevice) {
        device.in_polled_table = self.ring.set_file(index, device.fd()) == Use::Yes;
        let into = Buffers::from(BufferPool::new().take(PROBE_BYTES));
        let id = DeviceId(u32::try_from(index).expect("few devices"));
        let read = Op::Read { device: id, offset: 0, into: into.clone() };
        // In one piece: there is no list to keep.
        let entry = entry(device.polled_target(), &read, None, &mut Vec::new());
        self.ring.push(entry.user_data(Tag::Probe { device: index }.bits()), Instant::MAX);
        self.probes.insert(index, into);
    }

    /// What the answer to a trial says.
    pub(super) fn probed(&mut self, index: usize, outcome: Outcome) -> Use {
        self.probes.remove(&index).expect("it was tried");
        match outcome {
            Ok(bytes) if bytes == PROBE_BYTES as u64 => Use::Yes,
            Ok(_) => Use::No(Why::Refused(Errno(libc::ENODATA))),
            Err(errno) => Use::No(Why::Refused(errno)),
        }
    }

    pub(super) fn is_probing(&self, index: usize) -> bool {
        self.probes.contains_key(&index)
    }

    pub(super) fn news(&mut self, now: Instant) {
        self.last_news = now;
    }

    /// When to look at the devices again; `None`: nothing is under way on them.
    pub(super) fn look_in(&mut self, now: Instant) -> Option<Duration> {
        if !self.ring.is_used() {
            return None;
        }
        let silent = now.since(self.last_news);
        let is_waited_for = self.ring.in_kernel() > self.probes.len();
        if self.ring.has_unsubmitted() || (is_waited_for && silent < PATIENCE) {
            return Some(Duration::ZERO);
        }
        let nap = (silent / NAP_SHARE).clamp(NAP_MIN, NAP_MAX);
        Some(nap.saturating_sub(now.since(self.last_look)))
    }

    /// Submits, and asks the devices, if it is time for that.
    pub(super) fn look(&mut self, now: impl FnOnce() -> Instant) {
        if !self.ring.is_used() {
            return;
        }
        let now = now();
        if self.look_in(now) == Some(Duration::ZERO) {
            self.last_look = now;
            self.ring.enter();
        }
    }
}

impl Drop for Polled {
    /// The kernel may still be writing what is read for a trial.
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.probes));
    }
}
