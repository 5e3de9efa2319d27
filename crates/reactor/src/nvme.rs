//! A user-space driver for NVMe drives: no system call and no copy between the engine and the
//! drive's queues.
//!
//! One controller has one user at a time: whoever opened it (a [`Handle`]: it looks at labels), or
//! the reactor that it was lent to (a [`NvmeDevice`] of `uring.rs`). On the drive everything is as
//! it is by way of the kernel's block device: its first active namespace is the drive.
//!
//! From the bottom: `command` is the wire; `bus` is how registers and memory are reached (`vfio`
//! is the real one); `memory` is what is shared; `queue` a pair of queues; `controller` brings one
//! up; `prp` tells it where data is; `device` serves operations. `fabrics` and `pdu` are the wire
//! of NVMe/TCP, for both of its ends, and `chap` is how these prove who they are; `remote` is the
//! host's, for a drive of another machine.

mod bounds;
pub mod bus;
pub mod chap;
pub mod command;
pub mod controller;
pub mod device;
pub mod fabrics;
pub mod generic;
pub(crate) mod lent;
mod memory;
#[cfg(test)]
pub(crate) mod model;
pub mod pdu;
pub mod power_cycle;
mod prp;
mod queue;
pub mod remote;
pub mod vfio;

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::Instant;
use crate::buffer::{BUFFER_BYTES_MAX, BufferPool, Buffers};
use crate::nvme::bus::Bus;
use crate::nvme::controller::{Controller, Identity, Trouble};
use crate::nvme::device::NvmeDevice;
use crate::op::{DeviceId, Op, Ticket};

pub use vfio_ioctls::VfioError;

/// How often a controller that is being brought up is looked at.
const STEP_EVERY: Duration = Duration::from_millis(1);

enum Home {
    Here(Box<Controller>),
    /// A reactor has it.
    Lent,
    Gone(Trouble),
}

impl Home {
    /// What is left when `device` is not used any more.
    fn after(device: NvmeDevice) -> Home {
        match device.into_controller() {
            Ok(controller) => Home::Here(Box::new(controller)),
            Err(trouble) => Home::Gone(trouble),
        }
    }
}

/// A drive that this process drives itself, for who opened it. Reads and writes of it wait; they
/// end, whatever the drive does.
pub struct Handle {
    /// Locked for looks only, never while the drive is waited for: reactors may wait for it.
    home: Mutex<Home>,
    /// One at a time reads and writes here.
    using: Mutex<()>,
    identity: Identity,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.identity.fmt(f)
    }
}

impl Handle {
    /// Takes over the controller on `bus`: whatever it was doing is over.
    pub fn open(bus: Box<dyn Bus>) -> Result<Handle, Trouble> {
        let mut controller = Controller::new(bus)?;
        while !controller.is_running() {
            if let Some(trouble) = controller.trouble() {
                return Err(trouble.clone());
            }
            let now = controller.bus().now();
            controller.step(now);
            if !controller.is_running() {
                controller.bus().wait(STEP_EVERY);
            }
        }
        let identity = controller.identity().clone();
        let home = Mutex::new(Home::Here(Box::new(controller)));
        Ok(Handle { home, using: Mutex::default(), identity })
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Fills `bytes`; they and `offset` are whole blocks.
    pub fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let pool = BufferPool::new();
        let mut at = offset;
        for part in bytes.chunks_mut(BUFFER_BYTES_MAX) {
            let into = Buffers::from(pool.take(part.len()));
            self.run(&Op::Read { device: DeviceId(0), offset: at, into: into.clone() })?;
            into.copy_to_slice(part);
            at += part.len() as u64;
        }
        Ok(())
    }

    /// The other way.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let pool = BufferPool::new();
        let mut at = offset;
        for part in bytes.chunks(BUFFER_BYTES_MAX) {
            let from = Buffers::from(pool.take(part.len()));
            from.copy_from_slice(part);
            self.run(&Op::Write { device: DeviceId(0), offset: at, from })?;
            at += part.len() as u64;
        }
        Ok(())
    }

    pub fn flush(&self) -> io::Result<()> {
        self.run(&Op::Flush { device: DeviceId(0) })
    }

    /// Lets the drive go if the system wants it back, or if it is not there any more. True: this
    /// was so. One that a reactor has is looked after there.
    pub fn let_go_if_wanted(&self) -> bool {
        let mut home = self.home();
        let leaves = match &mut *home {
            Home::Here(controller) => controller.bus().take_events() || controller.look().is_err(),
            Home::Lent | Home::Gone(_) => false,
        };
        if !leaves {
            return false;
        }
        let left = std::mem::replace(&mut *home, Home::Gone(Trouble::Removed));
        drop(home);
        if let Home::Here(controller) = left {
            device::bury(*controller);
        }
        true
    }

    /// Why the drive is gone; `None`: it is not.
    pub fn trouble(&self) -> Option<Trouble> {
        match &*self.home() {
            Home::Here(_) | Home::Lent => None,
            Home::Gone(trouble) => Some(trouble.clone()),
        }
    }

    fn run(&self, op: &Op) -> io::Result<()> {
        let _turn = self.using.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut device) = self.lend() else {
            let gone = self.trouble().is_some();
            let errno = if gone { libc::ENODEV } else { libc::EBUSY };
            return Err(io::Error::from_raw_os_error(errno));
        };
        device.submit(Ticket(0), op, Instant::MAX);
        let mut done = Vec::new();
        while done.is_empty() {
            device.reap_waiting(&mut done);
        }
        self.give_back(device);
        match done[0].outcome {
            Ok(_) => Ok(()),
            Err(errno) => Err(io::Error::from_raw_os_error(errno.0)),
        }
    }

    fn home(&self) -> MutexGuard<'_, Home> {
        self.home.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For a reactor. `None`: it is not here. Waits for no drive, but for who just looks at it.
    pub(crate) fn lend(&self) -> Option<NvmeDevice> {
        let mut home = self.home();
        match std::mem::replace(&mut *home, Home::Lent) {
            Home::Here(controller) => Some(NvmeDevice::new(*controller)),
            other @ (Home::Lent | Home::Gone(_)) => {
                *home = other;
                None
            }
        }
    }

    /// A reactor has nothing under way on it any more.
    pub(crate) fn give_back(&self, device: NvmeDevice) {
        let home = Home::after(device);
        *self.home() = home;
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Home::Here(controller) = &mut *self.home() {
            controller.shut_down();
        }
    }
}

#[cfg(test)]
mod tests;
