//! The production [`Backend`]: one io_uring for all files and block devices of a core.
//!
//! The kernel reads and writes memory that slots own (`slots.rs`): an operation's buffers stay in
//! place until its completion was reaped here.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use crate::backend::{Backend, Instant};
use crate::buffer::Buffers;
use crate::op::{Device, DeviceId, Done, Errno, Op, Outcome, Ticket};
use crate::ram::Ram;

/// Entries of the submission ring; more operations wait in `backlog`.
const RING_ENTRIES: u32 = 1024;

enum Registered {
    File(OwnedFd),
    Ram(Ram),
    Gone,
}

/// io_uring, the machine's monotonic clock, and RAM drives.
pub struct UringBackend {
    ring: IoUring,
    started: std::time::Instant,
    devices: Vec<Registered>,
    /// By ticket: the pieces of a vectored operation, in place until it has completed.
    pieces: Vec<Vec<libc::iovec>>,
    backlog: VecDeque<squeue::Entry>,
    finished: Vec<Done>,
    in_kernel: usize,
    unsubmitted: usize,
}

impl UringBackend {
    /// Fails where io_uring is missing or forbidden.
    pub fn new() -> std::io::Result<UringBackend> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_cqsize(4 * RING_ENTRIES)
            .build(RING_ENTRIES)
            .or_else(|_| IoUring::builder().setup_cqsize(4 * RING_ENTRIES).build(RING_ENTRIES))?;
        #[expect(clippy::disallowed_methods, reason = "this is the reactor's clock")]
        let started = std::time::Instant::now();
        Ok(UringBackend {
            ring,
            started,
            devices: Vec::new(),
            pieces: Vec::new(),
            backlog: VecDeque::new(),
            finished: Vec::new(),
            in_kernel: 0,
            unsubmitted: 0,
        })
    }

    /// The address and count of an iovec array for `buffers` that lives until `ticket` is done.
    fn pieces_of(&mut self, ticket: Ticket, buffers: &Buffers) -> (*const libc::iovec, u32) {
        let index = ticket.0 as usize;
        if self.pieces.len() <= index {
            self.pieces.resize_with(index + 1, Vec::new);
        }
        let list = &mut self.pieces[index];
        list.clear();
        list.extend(
            buffers
                .pieces()
                .iter()
                .map(|piece| libc::iovec { iov_base: piece.as_ptr().cast(), iov_len: piece.len() }),
        );
        (list.as_ptr(), u32::try_from(list.len()).expect("few pieces"))
    }

    fn entry(&mut self, ticket: Ticket, fd: RawFd, op: &Op) -> squeue::Entry {
        match op {
            Op::Read { offset, into, .. } => {
                let (pieces, count) = self.pieces_of(ticket, into);
                opcode::Readv::new(Fd(fd), pieces, count).offset(*offset).build()
            }
            Op::Write { offset, from, .. } => {
                let (pieces, count) = self.pieces_of(ticket, from);
                opcode::Writev::new(Fd(fd), pieces, count).offset(*offset).build()
            }
            Op::Flush { .. } => opcode::Fsync::new(Fd(fd)).flags(FsyncFlags::DATASYNC).build(),
            Op::WriteZeroes { offset, len, unmap, .. } => opcode::Fallocate::new(Fd(fd), *len)
                .offset(*offset)
                .mode(zeroes_mode(*unmap))
                .build(),
            Op::Readable { fd } => {
                opcode::PollAdd::new(Fd(*fd), u32::from(libc::POLLIN.cast_unsigned())).build()
            }
        }
    }

    /// Moves what fits from the backlog to the submission ring.
    fn fill_ring(&mut self) {
        let mut submission = self.ring.submission();
        while !submission.is_full()
            && let Some(entry) = self.backlog.pop_front()
        {
            // SAFETY: buffers and iovec arrays stay in place until the completion is reaped: the
            // slots and `pieces` keep them.
            unsafe { submission.push(&entry) }.expect("checked not to be full");
            self.in_kernel += 1;
            self.unsubmitted += 1;
        }
    }

    fn collect(&mut self, done: &mut Vec<Done>) {
        for completion in self.ring.completion() {
            let ticket = Ticket(u32::try_from(completion.user_data()).expect("set from a ticket"));
            let result = completion.result();
            let outcome = u64::try_from(result).map_err(|_| Errno(-result));
            self.in_kernel -= 1;
            done.push(Done { ticket, outcome });
        }
    }
}

/// Giving space back is a hole, in a file and on a block device; the latter says if it cannot.
fn zeroes_mode(unmap: bool) -> i32 {
    let how = if unmap { libc::FALLOC_FL_PUNCH_HOLE } else { libc::FALLOC_FL_ZERO_RANGE };
    how | libc::FALLOC_FL_KEEP_SIZE
}

fn on_ram(ram: &mut Ram, op: &Op) -> Outcome {
    match op {
        Op::Read { offset, into, .. } => ram.read(*offset, into),
        Op::Write { offset, from, .. } => ram.write(*offset, from),
        Op::WriteZeroes { offset, len, .. } => ram.write_zeroes(*offset, *len),
        Op::Flush { .. } | Op::Readable { .. } => Ok(0),
    }
}

fn device_of(op: &Op) -> Option<DeviceId> {
    match op {
        Op::Read { device, .. }
        | Op::Write { device, .. }
        | Op::Flush { device }
        | Op::WriteZeroes { device, .. } => Some(*device),
        Op::Readable { .. } => None,
    }
}

impl Backend for UringBackend {
    fn now(&self) -> Instant {
        let ns = self.started.elapsed().as_nanos();
        Instant::from_ns(u64::try_from(ns).expect("less than 500 years"))
    }

    fn register(&mut self, device: Device) -> DeviceId {
        let registered = match device {
            Device::File { fd } => Registered::File(fd),
            Device::Ram { bytes } => Registered::Ram(Ram::new(bytes)),
            Device::Simulated { .. } => panic!("a simulated drive belongs to the simulator"),
        };
        let free = self.devices.iter().position(|d| matches!(d, Registered::Gone));
        let index = free.unwrap_or_else(|| {
            self.devices.push(Registered::Gone);
            self.devices.len() - 1
        });
        self.devices[index] = registered;
        DeviceId(u32::try_from(index).expect("few devices"))
    }

    fn unregister(&mut self, device: DeviceId) {
        self.devices[device.0 as usize] = Registered::Gone;
    }

    fn submit(&mut self, ticket: Ticket, op: &Op) {
        let fd = match device_of(op).map(|id| &mut self.devices[id.0 as usize]) {
            None => -1,
            Some(Registered::File(fd)) => fd.as_raw_fd(),
            Some(Registered::Ram(ram)) => {
                let outcome = on_ram(ram, op);
                self.finished.push(Done { ticket, outcome });
                return;
            }
            Some(Registered::Gone) => {
                self.finished.push(Done { ticket, outcome: Err(Errno(libc::ENODEV)) });
                return;
            }
        };
        let entry = self.entry(ticket, fd, op).user_data(u64::from(ticket.0));
        self.backlog.push_back(entry);
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.finished);
        self.fill_ring();
        if self.in_kernel == 0 {
            return;
        }
        // One call submits what is new and lets deferred completions in; none is made when the
        // kernel has no news. A busy completion ring is no error: it is emptied right below.
        if self.unsubmitted > 0 || self.ring.submission().taskrun() {
            let submitted = self.ring.submitter().submit_with_args(0, &SubmitArgs::new());
            if submitted.is_ok() || self.ring.submission().is_empty() {
                self.unsubmitted = 0;
            }
        }
        self.collect(done);
    }

    fn idle(&mut self, until: Option<Instant>) -> bool {
        if !self.finished.is_empty() {
            return true;
        }
        self.fill_ring();
        if self.in_kernel == 0 && until.is_none() {
            return false;
        }
        let wait = until.map(|until| until.since(self.now()));
        self.wait(wait);
        true
    }
}

impl UringBackend {
    /// Sleeps in the kernel until one completion or `wait` is over. Signals and time-outs are
    /// ordinary ends.
    fn wait(&mut self, wait: Option<Duration>) {
        let result = match wait {
            None => self.ring.submit_and_wait(1),
            Some(wait) => {
                let time = Timespec::from(wait);
                let args = SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(1, &args)
            }
        };
        if result.is_ok() || self.ring.submission().is_empty() {
            self.unsubmitted = 0;
        }
    }
}
