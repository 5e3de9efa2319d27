//! What a reactor can ask of its backend, and what comes back.

use std::os::fd::{OwnedFd, RawFd};

use crate::buffer::Buffers;

/// A device as one backend knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

/// What a backend can be given to work on.
pub enum Device {
    /// A file or block device, opened for direct I/O.
    File { fd: OwnedFd },
    /// Memory of this many bytes, zero at first.
    Ram { bytes: u64 },
    /// A drive of the simulator's world.
    Simulated { drive: u32 },
}

/// Names one operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u32);

/// One operation. Offsets and lengths in bytes.
#[derive(Clone, Debug)]
pub enum Op {
    Read {
        device: DeviceId,
        offset: u64,
        into: Buffers,
    },
    Write {
        device: DeviceId,
        offset: u64,
        from: Buffers,
    },
    /// Everything that completed before is on media when this completes.
    Flush {
        device: DeviceId,
    },
    /// The range reads as zeroes afterwards. `unmap`: its space may be given back.
    WriteZeroes {
        device: DeviceId,
        offset: u64,
        len: u64,
        unmap: bool,
    },
    /// Completes once `fd` can be read (an eventfd, a socket).
    Readable {
        fd: RawFd,
    },
}

/// An operating system error number, as the kernel or the simulator reports it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

impl std::fmt::Debug for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

/// Bytes moved, or why not. Fewer bytes than asked means that the device ended there.
pub type Outcome = Result<u64, Errno>;

/// A completed operation.
#[derive(Debug)]
pub struct Done {
    pub ticket: Ticket,
    pub outcome: Outcome,
}
