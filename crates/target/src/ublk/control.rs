//! The driver's control device: devices are made, started, recovered and removed by it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

use ashlar_reactor::driver;
use ashlar_reactor::op::{Errno, Outcome};
use zerocopy::IntoBytes;

use crate::ublk::wire::{
    ADD_DEVICE, ControlCommand, DELETE_DEVICE, DeviceInfo, END_RECOVERY, FEATURES_BYTES,
    GET_DEVICE, GET_FEATURES, GET_PARAMETERS, NO_QUEUE, Parameters, SET_PARAMETERS, START_DEVICE,
    START_RECOVERY, STOP_DEVICE, UPDATE_SIZE, padded,
};

const PATH: &str = "/dev/ublk-control";

pub(super) struct Control(File);

/// Where a device's server speaks with the driver.
pub(super) fn character_device(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{id}"))
}

impl Control {
    pub(super) fn open() -> io::Result<Control> {
        OpenOptions::new().read(true).write(true).open(PATH).map(Control)
    }

    /// What the driver has. Fails on one that is older than Linux 6.5.
    pub(super) fn features(&self) -> Result<u64, Errno> {
        let mut features = [0; FEATURES_BYTES];
        self.fill(0, GET_FEATURES, &mut features)?;
        Ok(u64::from_ne_bytes(features))
    }

    /// `None`: there is no such device.
    pub(super) fn find(&self, id: u32) -> Result<Option<DeviceInfo>, Errno> {
        let mut info = DeviceInfo::default();
        match self.fill(id, GET_DEVICE, info.as_mut_bytes()) {
            Ok(_) => Ok(Some(info)),
            Err(Errno(libc::ENODEV)) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// What has become of what was asked for: fewer queues, on a machine with few CPUs.
    pub(super) fn add(&self, mut info: DeviceInfo) -> Result<DeviceInfo, Errno> {
        self.fill(info.device, ADD_DEVICE, info.as_mut_bytes())?;
        Ok(info)
    }

    pub(super) fn set_parameters(&self, id: u32, mut its: Parameters) -> Result<(), Errno> {
        self.fill(id, SET_PARAMETERS, its.as_mut_bytes()).map(drop)
    }

    pub(super) fn parameters(&self, id: u32) -> Result<Parameters, Errno> {
        let len = u32::try_from(size_of::<Parameters>()).expect("a few bytes");
        let mut its = Parameters { len, ..Parameters::default() };
        self.fill(id, GET_PARAMETERS, its.as_mut_bytes())?;
        Ok(its)
    }

    /// Lets the device be seen. It is read meanwhile: its queues are served already.
    pub(super) fn start(&self, id: u32, patient: impl FnMut() -> bool) -> Result<(), Errno> {
        self.tell(id, START_DEVICE, own_process(), patient).map(drop)
    }

    /// After the process that served it has ended; before, `EBUSY`.
    pub(super) fn start_recovery(&self, id: u32) -> Result<(), Errno> {
        self.tell(id, START_RECOVERY, 0, || true).map(drop)
    }

    /// Its queues are served.
    pub(super) fn end_recovery(&self, id: u32, patient: impl FnMut() -> bool) -> Result<(), Errno> {
        self.tell(id, END_RECOVERY, own_process(), patient).map(drop)
    }

    /// What its users have asked for is answered first; after that they get errors.
    pub(super) fn stop(&self, id: u32, patient: impl FnMut() -> bool) -> Result<(), Errno> {
        self.tell(id, STOP_DEVICE, 0, patient).map(drop)
    }

    /// Waits until nobody has its character device open.
    pub(super) fn delete(&self, id: u32, patient: impl FnMut() -> bool) -> Result<(), Errno> {
        self.tell(id, DELETE_DEVICE, 0, patient).map(drop)
    }

    pub(super) fn update_size(&self, id: u32, sectors: u64) -> Result<(), Errno> {
        self.tell(id, UPDATE_SIZE, sectors, || true).map(drop)
    }

    /// A command with memory that the driver reads and fills.
    fn fill(&self, id: u32, number: u32, memory: &mut [u8]) -> Outcome {
        let len = u16::try_from(memory.len()).expect("a few bytes");
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        let command = ControlCommand { len, address, ..command(id) };
        // SAFETY: the memory is borrowed, and the command not given up.
        unsafe { driver::command(self.0.as_fd(), number, padded(&command), || true) }
    }

    fn tell(&self, id: u32, number: u32, value: u64, patient: impl FnMut() -> bool) -> Outcome {
        let command = ControlCommand { value, ..command(id) };
        // SAFETY: it names no memory.
        unsafe { driver::command(self.0.as_fd(), number, padded(&command), patient) }
    }
}

fn command(device: u32) -> ControlCommand {
    let (len, address, value, path_len, unused_a, unused_b) = Default::default();
    ControlCommand { device, queue: NO_QUEUE, len, address, value, path_len, unused_a, unused_b }
}

fn own_process() -> u64 {
    std::process::id().into()
}
