//! A drive as the control plane reads and writes it: now and then, before a reactor has it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ashlar_reactor::nvme::{self, remote};

#[derive(Clone, Debug)]
pub enum Disk {
    /// A file or block device.
    File(Arc<File>),
    /// An NVMe drive that this process drives itself.
    Nvme(Arc<nvme::Handle>),
    /// A namespace of another host.
    Remote(Arc<remote::Handle>),
}

impl Disk {
    /// Fills `bytes`; an end of the drive before is an error.
    pub fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Disk::File(file) => file.read_exact_at(bytes, offset),
            Disk::Nvme(drive) => drive.read_at(bytes, offset),
            Disk::Remote(drive) => drive.read_at(bytes, offset),
        }
    }

    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        match self {
            Disk::File(file) => file.write_all_at(bytes, offset),
            Disk::Nvme(drive) => drive.write_at(bytes, offset),
            Disk::Remote(drive) => drive.write_at(bytes, offset),
        }
    }

    pub fn sync_data(&self) -> io::Result<()> {
        match self {
            Disk::File(file) => file.sync_data(),
            Disk::Nvme(drive) => drive.flush(),
            Disk::Remote(drive) => drive.flush(),
        }
    }

    /// Whether someone besides this has it.
    pub fn is_shared(&self) -> bool {
        match self {
            Disk::File(file) => Arc::strong_count(file) > 1,
            Disk::Nvme(drive) => Arc::strong_count(drive) > 1,
            Disk::Remote(drive) => Arc::strong_count(drive) > 1,
        }
    }
}
