//! What a reactor's backend has done and how it serves its devices, for whoever looks at it from
//! the reactor's own thread.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::time::Duration;

use crate::arena::Arena;
use crate::backend::Instant;
use crate::mapping::PageBytes;
use crate::op::Errno;
use crate::uring::probe::Kernel;

/// The share of time is that of one to two of these.
const HALF_WINDOW_NS: u64 = 5_000_000_000;

/// Whether something is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    Yes,
    No(Why),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It was not asked for.
    Off,
    /// It is being tried out.
    Trying,
    /// By the kernel, or by the device.
    Refused(Errno),
    /// All places for it are taken.
    Full,
    /// A file system stands between it and its drive.
    NotBlockDevice,
    NotNamespace,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Why::Off => f.write_str("switched off"),
            Why::Trying => f.write_str("being tried"),
            Why::Refused(errno) => errno.fmt(f),
            Why::Full => f.write_str("no room for more"),
            Why::NotBlockDevice => f.write_str("not a block device"),
            Why::NotNamespace => f.write_str("not a whole NVMe namespace"),
        }
    }
}

/// Since the reactor was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Looks at everything that may bring work.
    pub turns: u64,
    /// Calls of io_uring_enter.
    pub enters: u64,
    /// Operations given to the kernel, and heard of from it.
    pub submissions: u64,
    pub completions: u64,
    /// Time in turns that began or completed an operation, or ran right after one was completed.
    pub busy_ns: u64,
    pub slept_ns: u64,
}

/// How a file or block device is served.
pub(super) struct DeviceGauge {
    pub(super) file: Cell<Use>,
    pub(super) buffers: Cell<Use>,
    pub(super) polling: Cell<Use>,
    pub(super) passthrough: Cell<Use>,
    in_flight: Cell<u32>,
    in_flight_max: Cell<u32>,
}

impl DeviceGauge {
    pub(super) fn new() -> DeviceGauge {
        DeviceGauge {
            file: Cell::new(Use::No(Why::Off)),
            buffers: Cell::new(Use::No(Why::Off)),
            polling: Cell::new(Use::No(Why::Off)),
            passthrough: Cell::new(Use::No(Why::Off)),
            in_flight: Cell::new(0),
            in_flight_max: Cell::new(0),
        }
    }

    pub(super) fn begun(&self) {
        self.in_flight.set(self.in_flight.get() + 1);
        self.in_flight_max.set(self.in_flight_max.get().max(self.in_flight.get()));
    }

    pub(super) fn ended(&self) {
        self.in_flight.set(self.in_flight.get() - 1);
    }
}

/// A file or block device at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceReport {
    /// Its descriptor in this process.
    pub fd: RawFd,
    /// The kernel knows it by its place in a table.
    pub file: Use,
    /// The kernel knows the memory of the reactor's buffers.
    pub buffers: Use,
    /// Completions are looked for on the device itself, not announced by interrupts.
    pub polling: Use,
    /// NVMe commands go to it past the block layer.
    pub passthrough: Use,
    /// Operations under way, now and at most.
    pub in_flight: u32,
    pub in_flight_max: u32,
}

/// Everything at one moment, in plain values.
#[derive(Clone, Debug)]
pub struct Report {
    pub counters: Counters,
    /// Busy millionths of the last seconds.
    pub busy_ppm: u32,
    pub kernel: Kernel,
    /// Memory of buffers.
    pub buffers: PageBytes,
    /// Memory that serves as drives.
    pub drives: PageBytes,
    pub devices: Vec<DeviceReport>,
}

/// Busy time up to two moments.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    older: (Instant, u64),
    newer: (Instant, u64),
}

impl Share {
    /// `busy_ns` was reached at `now`, or before without any more since.
    fn roll(&mut self, now: Instant, busy_ns: u64) {
        let age = ns(now.since(self.newer.0));
        if age < HALF_WINDOW_NS {
            return;
        }
        // Nothing was busy for long: it had done all of it half a window ago.
        let half_ago = now.as_ns().saturating_sub(HALF_WINDOW_NS);
        let long_ago = (Instant::from_ns(half_ago), busy_ns);
        self.older = if age < 2 * HALF_WINDOW_NS { self.newer } else { long_ago };
        self.newer = (now, busy_ns);
    }

    fn ppm(&self, now: Instant, busy_ns: u64) -> u32 {
        let (from, before) = self.older;
        let passed = now.since(from).as_nanos().max(1);
        let ppm = u128::from(busy_ns - before) * 1_000_000 / passed;
        u32::try_from(ppm.min(1_000_000)).expect("a million at most")
    }
}

pub struct Gauges {
    counters: Cell<Counters>,
    share: Cell<Share>,
    kernel: Kernel,
    arena: Option<Rc<Arena>>,
    drives: Cell<PageBytes>,
    devices: RefCell<BTreeMap<RawFd, Rc<DeviceGauge>>>,
}

impl Gauges {
    pub(super) fn new(kernel: Kernel, arena: Option<Rc<Arena>>) -> Rc<Gauges> {
        Rc::new(Gauges {
            counters: Cell::default(),
            share: Cell::default(),
            kernel,
            arena,
            drives: Cell::default(),
            devices: RefCell::default(),
        })
    }

    pub fn counters(&self) -> Counters {
        self.counters.get()
    }

    /// `now`: by the reactor's clock.
    pub fn report(&self, now: Instant) -> Report {
        let counters = self.counters.get();
        let mut share = self.share.get();
        share.roll(now, counters.busy_ns);
        self.share.set(share);
        let devices = self.devices.borrow();
        let device = |(fd, its): (&RawFd, &Rc<DeviceGauge>)| DeviceReport {
            fd: *fd,
            file: its.file.get(),
            buffers: its.buffers.get(),
            polling: its.polling.get(),
            passthrough: its.passthrough.get(),
            in_flight: its.in_flight.get(),
            in_flight_max: its.in_flight_max.get(),
        };
        Report {
            counters,
            busy_ppm: share.ppm(now, counters.busy_ns),
            kernel: self.kernel.clone(),
            buffers: self.arena.as_ref().map(|its| its.page_bytes()).unwrap_or_default(),
            drives: self.drives.get(),
            devices: devices.iter().map(device).collect(),
        }
    }

    pub(super) fn count(&self, change: impl FnOnce(&mut Counters)) {
        let mut counters = self.counters.get();
        change(&mut counters);
        self.counters.set(counters);
    }

    /// A turn that ends `now` was busy since `began`.
    pub(super) fn busy(&self, began: Instant, now: Instant) {
        let before = self.counters.get().busy_ns;
        let mut share = self.share.get();
        share.roll(began, before);
        self.share.set(share);
        self.count(|counters| counters.busy_ns = before + ns(now.since(began)));
    }

    pub(super) fn slept(&self, time: Duration) {
        self.count(|counters| counters.slept_ns += ns(time));
    }

    pub(super) fn device_came(&self, fd: RawFd, gauge: &Rc<DeviceGauge>) {
        self.devices.borrow_mut().insert(fd, gauge.clone());
    }

    pub(super) fn device_went(&self, fd: RawFd) {
        self.devices.borrow_mut().remove(&fd);
    }

    pub(super) fn memory_came(&self, bytes: PageBytes) {
        self.drives.set(self.drives.get().plus(bytes));
    }

    pub(super) fn memory_went(&self, bytes: PageBytes) {
        self.drives.set(self.drives.get().less(bytes));
    }
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    //! Goal: the busy share is that of the last seconds, whoever looks, and how often.
    //! Method: made-up turns at made-up moments.

    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_ns(ms * 1_000_000)
    }

    fn gauges() -> Rc<Gauges> {
        Gauges::new(Kernel::default(), None)
    }

    #[test]
    fn half_of_the_time_is_half() {
        for looks_at in [3, 7, 1_000_000] {
            let gauges = gauges();
            for ms in 0..60_000 {
                if ms % 2 == 0 {
                    gauges.busy(at(ms), at(ms + 1));
                }
                if ms > 0 && ms % looks_at == 0 {
                    gauges.report(at(ms));
                }
            }
            let ppm = gauges.report(at(60_000)).busy_ppm;
            assert!((499_000..=501_000).contains(&ppm), "{ppm}");
            assert_eq!(gauges.counters().busy_ns, 30_000_000_000);
        }
    }

    #[test]
    fn what_is_long_ago_does_not_count() {
        let gauges = gauges();
        (0..20_000).for_each(|ms| gauges.busy(at(ms), at(ms + 1)));
        assert_eq!(gauges.report(at(20_000)).busy_ppm, 1_000_000);
        assert_eq!(gauges.report(at(80_000)).busy_ppm, 0);
        // One second of work after a minute without any: a sixth of the last six.
        gauges.busy(at(140_000), at(141_000));
        assert_eq!(gauges.report(at(141_000)).busy_ppm, 166_666);
    }
}
