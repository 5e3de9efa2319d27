//! THE seam: everything the engine cannot do by itself goes through [`Backend`].
//!
//! Production has one on io_uring (`uring.rs`), the simulator has one with virtual time and
//! faults. All code above this trait is the same in both worlds.

use std::time::Duration;

use crate::buffer::{Buffer, Buffers};
use crate::op::{Device, DeviceId, Done, Op, Outcome, Ticket};

/// A moment, in nanoseconds since the reactor's world began. Virtual in the simulator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    pub const MAX: Instant = Instant(u64::MAX);

    pub const fn from_ns(ns: u64) -> Instant {
        Instant(ns)
    }

    pub const fn as_ns(self) -> u64 {
        self.0
    }

    /// Time passed since `earlier`; zero if that is in the future.
    pub const fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    #[must_use]
    pub fn after(self, wait: Duration) -> Instant {
        Instant(self.0.saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// The world under the engine: clock, drives and sleep.
pub trait Backend {
    fn now(&self) -> Instant;

    /// Seconds since 1970, by a clock that somebody may set at any time: for what must be told
    /// again after a restart, and for nothing else. A virtual world begins in 1970.
    fn unix_s(&self) -> u64 {
        self.now().as_ns() / 1_000_000_000
    }

    /// Takes a device over; its id is valid until `unregister`.
    fn register(&mut self, device: Device) -> DeviceId;

    /// The same device, to be registered with another backend, too; `None`: one has it alone.
    fn twin(&self, _device: DeviceId) -> Option<Device> {
        None
    }

    /// Lets a device go. No operation on it is in flight; the executor sees to that.
    fn unregister(&mut self, device: DeviceId);

    /// Starts `op`, but on nothing that others reach after `until`: what was not begun by then
    /// ends with [`LATE`](crate::op::LATE). The caller keeps `op` and its buffers alive and in
    /// place until the [`Done`] with this ticket was reaped. Must not complete it before returning.
    fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant);

    /// Runs `op` here and now, if its device is memory of ours, which nobody has to wait for and
    /// nobody else reaches. `None`: nothing was done, submit it.
    fn run_now(&mut self, _op: &Op) -> Option<Outcome> {
        None
    }

    /// The same of a read, whose memory remains the caller's.
    fn read_now(&mut self, _device: DeviceId, _offset: u64, _into: &Buffers) -> Option<Outcome> {
        None
    }

    /// A view of a range of a device that is memory of ours: nothing has to be copied. It shows
    /// what is written there later, so it is not to be kept over a wait, but by who keeps others
    /// from writing there.
    fn lend(&mut self, _device: DeviceId, _offset: u64, _len: usize) -> Option<Buffer> {
        None
    }

    /// Appends what has completed since the last call.
    fn reap(&mut self, done: &mut Vec<Done>);

    /// How often it has called the kernel, to give it operations or to sleep; where there is one.
    fn kernel_calls(&self) -> u64 {
        0
    }

    /// Nothing can run: sleep (or jump the clock) until something completes or `until` is
    /// reached. Returns false if nothing is in flight and there is no `until`: nothing will
    /// ever happen again.
    fn idle(&mut self, until: Option<Instant>) -> bool;
}
