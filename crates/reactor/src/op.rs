//! What a reactor can ask of its backend, and what comes back.

use std::fs::File;
use std::os::fd::{OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use zerocopy::{Immutable, IntoBytes};

use crate::buffer::Buffers;

/// A device as one backend knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

/// What a backend can be given to work on.
pub enum Device {
    /// A file or block device, opened for direct I/O. Counted, so that whoever opened it can tell
    /// when the backend has let go of it: no operation can reach it any more.
    File { file: Arc<File> },
    /// The same, of a block device that is an NVMe namespace: `generic` is its way past the block
    /// layer, or why there is none.
    Namespace { file: Arc<File>, generic: Result<Arc<crate::nvme::generic::Generic>, Errno> },
    /// An NVMe drive that this process drives itself. Counted, as above.
    Nvme { drive: Arc<crate::nvme::Handle> },
    /// A namespace of another host. Counted, too; each backend that has it reaches it by itself.
    Remote { drive: Arc<crate::nvme::remote::Handle> },
    /// Memory of this many bytes, zero at first.
    Ram { bytes: u64 },
    /// Memory that another reactor has as a drive, and may change at any time.
    RamTwin { ram: Arc<crate::ram::Ram> },
    /// For measuring what is above: it has this many bytes and completes everything at once, but
    /// moves nothing. What was written is forgotten, and a read leaves its memory as it was.
    Null { bytes: u64 },
    /// For tests: memory that is as fast as a drive of these numbers. Reads and writes share them;
    /// an operation occupies the drive for one `iops`-th of a second, or for its length at
    /// `bytes_per_second` if that is longer, and is answered `latency` later.
    Model { bytes: u64, iops: u64, bytes_per_second: u64, latency: Duration },
    /// For tests: a file under a volatile cache. What was written reaches it with a flush; before,
    /// any sectors of it may, by chance from `seed`. So the end of the process is a power cut.
    Lossy { file: Arc<File>, sector_bytes: u32, seed: u64 },
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
    /// What is done on an eventfd or a socket: until it has ended, `open` keeps that open, or else
    /// whoever asks for it.
    Descriptor {
        fd: RawFd,
        act: Act,
        open: Option<Rc<OwnedFd>>,
    },
}

/// See [`Op::Descriptor`].
#[derive(Clone, Debug)]
pub enum Act {
    /// Completes once it can be read.
    Await,
    /// Completes with the bytes that came, as many as were there; 0: no more will come.
    Receive { into: Buffers },
    /// Completes with the bytes that were taken for sending, at least one.
    Send { from: Buffers },
    /// Gives a command to the driver behind the descriptor. Completes with what that says.
    Command(Rc<Command>),
}

/// Bytes of a command, as the driver defines them.
pub const COMMAND_BYTES: usize = 80;

/// The bytes of a driver's own command, which may be shorter.
pub fn command_bytes(command: &(impl IntoBytes + Immutable)) -> [u8; COMMAND_BYTES] {
    let (mut bytes, its) = ([0; COMMAND_BYTES], command.as_bytes());
    bytes[..its.len()].copy_from_slice(its);
    bytes
}

/// A command of a driver (`IORING_OP_URING_CMD`, entries of 128 bytes, Linux 5.19).
#[derive(Debug)]
pub struct Command {
    pub number: u32,
    pub bytes: [u8; COMMAND_BYTES],
    /// What the driver may fill and read until it answers: it is told of it as a list of pieces.
    pub memory: Buffers,
}

impl Op {
    /// Completes once `fd` can be read.
    pub fn readable(fd: RawFd) -> Op {
        Op::Descriptor { fd, act: Act::Await, open: None }
    }

    /// What it fills.
    pub(crate) fn fills(&self) -> Option<&Buffers> {
        match self {
            Op::Read { into, .. } | Op::Descriptor { act: Act::Receive { into }, .. } => Some(into),
            Op::Descriptor { act: Act::Command(command), .. } => Some(&command.memory),
            Op::Write { .. }
            | Op::Flush { .. }
            | Op::WriteZeroes { .. }
            | Op::Descriptor { act: Act::Await | Act::Send { .. }, .. } => None,
        }
    }

    /// What it works on; `None`: no device.
    pub fn device(&self) -> Option<DeviceId> {
        match self {
            Op::Read { device, .. }
            | Op::Write { device, .. }
            | Op::Flush { device }
            | Op::WriteZeroes { device, .. } => Some(*device),
            Op::Descriptor { .. } => None,
        }
    }
}

/// An operating system error number, as the kernel or the simulator reports it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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

/// Of an operation that was not begun because it was too late.
pub const LATE: Outcome = Err(Errno(libc::ECANCELED));

/// A completed operation.
#[derive(Debug)]
pub struct Done {
    pub ticket: Ticket,
    pub outcome: Outcome,
}
