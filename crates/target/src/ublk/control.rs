//! The driver's control device: devices are made, started, recovered and removed by it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ashlar_reactor::driver;
use ashlar_reactor::op::{Errno, command_bytes};
use zerocopy::{FromBytes, IntoBytes};

use crate::ublk::wire::{
    ADD_DEVICE, ControlCommand, DELETE_DEVICE, DeviceInfo, END_RECOVERY, GET_DEVICE, GET_FEATURES,
    GET_PARAMETERS, NO_QUEUE, Parameters, SET_PARAMETERS, START_DEVICE, START_RECOVERY,
    STOP_DEVICE, UPDATE_SIZE,
};

const PATH: &str = "/dev/ublk-control";
/// The driver takes its time, half a minute at most, until it sees that a server is gone.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(60);

pub(super) struct Control(File);

/// Where a device's server speaks with the driver.
pub(super) fn character_device(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{id}"))
}

impl Control {
    pub(super) fn open() -> io::Result<Control> {
        OpenOptions::new().read(true).write(true).open(PATH).map(Control)
    }

    /// `None`: there is no driver, and so no device.
    pub(super) fn open_if_there() -> io::Result<Option<Control>> {
        match Control::open() {
            Ok(control) => Ok(Some(control)),
            Err(error) if is_absence(error.raw_os_error()) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What the driver has. Fails on one that is older than Linux 6.5.
    pub(super) fn features(&self) -> Result<u64, Errno> {
        self.fill(0, GET_FEATURES, 0)
    }

    /// `None`: there is no such device.
    pub(super) fn find(&self, id: u32) -> Result<Option<DeviceInfo>, Errno> {
        match self.fill(id, GET_DEVICE, DeviceInfo::default()) {
            Ok(info) => Ok(Some(info)),
            Err(Errno(errno)) if is_absence(Some(errno)) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// What has become of what was asked for: fewer queues, on a machine with few CPUs.
    pub(super) fn add(&self, info: DeviceInfo) -> Result<DeviceInfo, Errno> {
        self.fill(info.device, ADD_DEVICE, info)
    }

    pub(super) fn set_parameters(&self, id: u32, its: Parameters) -> Result<(), Errno> {
        self.fill(id, SET_PARAMETERS, its).map(drop)
    }

    pub(super) fn parameters(&self, id: u32) -> Result<Parameters, Errno> {
        let len = u32::try_from(size_of::<Parameters>()).expect("a few bytes");
        self.fill(id, GET_PARAMETERS, Parameters { len, ..Parameters::default() })
    }

    /// Lets the device be seen. It is read meanwhile: its queues are served already, for as long
    /// as `served` holds.
    pub(super) fn start(&self, id: u32, served: impl FnMut() -> bool) -> Result<(), Errno> {
        self.tell(id, START_DEVICE, own_process().into(), served)
    }

    /// After the process that served it has ended; before, `EBUSY`. `EINVAL`: it was begun with
    /// already.
    pub(super) fn start_recovery(&self, id: u32) -> Result<(), Errno> {
        self.tell(id, START_RECOVERY, 0, || true)
    }

    /// Its queues are served, for as long as `served` holds.
    pub(super) fn end_recovery(&self, id: u32, served: impl FnMut() -> bool) -> Result<(), Errno> {
        self.tell(id, END_RECOVERY, own_process().into(), served)
    }

    /// What its users have asked for is answered first; after that they get errors.
    pub(super) fn stop(&self, id: u32) -> Result<(), Errno> {
        self.tell(id, STOP_DEVICE, 0, || true)
    }

    /// Waits until nobody has its character device open.
    pub(super) fn delete(&self, id: u32) -> Result<(), Errno> {
        self.tell(id, DELETE_DEVICE, 0, || true)
    }

    pub(super) fn update_size(&self, id: u32, sectors: u64) -> Result<(), Errno> {
        self.tell(id, UPDATE_SIZE, sectors, || true)
    }

    /// A command with memory that the driver reads and fills.
    fn fill<T: FromBytes + IntoBytes>(&self, id: u32, number: u32, its: T) -> Result<T, Errno> {
        let len = u16::try_from(size_of::<T>()).expect("a few bytes");
        let memory = Box::into_raw(Box::new(its));
        let address = memory.expose_provenance() as u64;
        let command = ControlCommand { len, address, ..command(id) };
        // SAFETY: the memory is let go of only after the driver has answered.
        let outcome =
            unsafe { driver::command(self.0.as_fd(), number, command_bytes(&command), patience()) };
        if outcome == Err(Errno(libc::ETIMEDOUT)) {
            // Leaked: the driver may fill it still.
            return Err(Errno(libc::ETIMEDOUT));
        }
        // SAFETY: from the box above, once; the driver is done with it, and whatever bytes it has
        // put there are a `T`.
        let its = unsafe { Box::from_raw(memory) };
        outcome.map(|_| *its)
    }

    fn tell(
        &self,
        id: u32,
        number: u32,
        value: u64,
        mut sensible: impl FnMut() -> bool,
    ) -> Result<(), Errno> {
        let command = ControlCommand { value, ..command(id) };
        let mut patient = patience();
        let go_on = || patient() && sensible();
        // SAFETY: it names no memory.
        let outcome =
            unsafe { driver::command(self.0.as_fd(), number, command_bytes(&command), go_on) };
        outcome.map(drop)
    }
}

/// Whether an error says that there is nothing, which no other one does.
fn is_absence(errno: Option<i32>) -> bool {
    matches!(errno, Some(libc::ENOENT | libc::ENODEV | libc::ENXIO))
}

/// Holds for [`WAIT_MAX`]. The driver has one lock for each device, and whoever has it may wait
/// for a device that nobody serves: so has every command an end.
#[expect(clippy::disallowed_methods, reason = "who waits for the driver is no reactor's thread")]
fn patience() -> impl FnMut() -> bool {
    let until = Instant::now() + WAIT_MAX;
    move || Instant::now() < until
}

fn command(device: u32) -> ControlCommand {
    let (len, address, value, path_len, unused_a, unused_b) = Default::default();
    ControlCommand { device, queue: NO_QUEUE, len, address, value, path_len, unused_a, unused_b }
}

/// As the driver keeps it.
pub(super) fn own_process() -> u32 {
    std::process::id()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_not_there_is_absence() {
        for errno in [libc::ENOENT, libc::ENODEV, libc::ENXIO] {
            assert!(is_absence(Some(errno)), "{errno}");
        }
        for errno in [libc::EPERM, libc::EACCES, libc::EMFILE, libc::ETIMEDOUT, libc::EINVAL] {
            assert!(!is_absence(Some(errno)), "{errno}");
        }
        assert!(!is_absence(None));
    }
}
