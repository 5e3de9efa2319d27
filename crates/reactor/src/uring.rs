//! The production [`Backend`]: one io_uring for all files and block devices of a core.
//!
//! The kernel reads and writes memory that slots own (`slots.rs`): an operation's buffers stay in
//! place until its completion was reaped here.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use crate::backend::{Backend, Instant};
use crate::buffer::Buffers;
use crate::clock::machine_time;
use crate::lossy::Lossy;
use crate::model::Model;
use crate::nvme::lent::Lent;
use crate::op::{Device, DeviceId, Done, Errno, LATE, Op, Outcome, Ticket};
use crate::ram::Ram;

/// Entries of the submission ring; more operations wait in `backlog`.
const RING_ENTRIES: u32 = 1024;
/// The kernel is not asked to sleep for less than this before a modelled drive is to answer: it
/// would be late by a good part of it.
const SLEEP_MIN: Duration = Duration::from_micros(100);
/// Marks completions of operations that a [`Lossy`] drive has asked for: this bit, the device, and
/// the drive's token. All others carry a [`Ticket`].
const LOSSY: u64 = 1 << 63;
/// Marks completions of waits for the events of an NVMe drive: this bit, and the device.
const NVME: u64 = 1 << 62;
/// Marks completions of the ends of such waits.
const NVME_END: u64 = 1 << 61;

enum Registered {
    File(Arc<File>),
    Ram(Ram),
    Model(Model),
    Lossy(Box<Lossy>),
    Nvme(Box<Lent>),
    Gone,
}

/// io_uring, the machine's clock, and drives that are made of memory.
pub struct UringBackend {
    ring: IoUring,
    /// By the machine's clock.
    started: Duration,
    devices: Vec<Registered>,
    /// By ticket: the pieces of a vectored operation, in place until it has completed.
    pieces: Vec<Vec<libc::iovec>>,
    /// Each with the last moment at which the kernel may be given it.
    backlog: VecDeque<(squeue::Entry, Instant)>,
    finished: Vec<Done>,
    /// Of modelled drives: when to tell, in the order of asking.
    due: BinaryHeap<Reverse<(Instant, u64, Ticket, Outcome)>>,
    due_sequence: u64,
    in_kernel: usize,
    /// Of those: operations of lossy drives.
    lossy_in_kernel: usize,
    /// What lossy drives have to hear: user data and outcome.
    lossy_done: Vec<(u64, Outcome)>,
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
        Ok(UringBackend {
            ring,
            started: machine_time(),
            devices: Vec::new(),
            pieces: Vec::new(),
            backlog: VecDeque::new(),
            finished: Vec::new(),
            due: BinaryHeap::new(),
            due_sequence: 0,
            in_kernel: 0,
            lossy_in_kernel: 0,
            lossy_done: Vec::new(),
            unsubmitted: 0,
        })
    }

    /// Moves what fits from the backlog to the submission ring. The kernel is told right after:
    /// this process may have been stopped at any time before.
    fn fill_ring(&mut self) {
        if self.backlog.is_empty() {
            return;
        }
        let now = self.now();
        let mut submission = self.ring.submission();
        while !submission.is_full()
            && let Some((entry, until)) = self.backlog.pop_front()
        {
            if now > until {
                let ticket = ticket_of(entry.get_user_data());
                self.finished.push(Done { ticket, outcome: LATE });
                continue;
            }
            // SAFETY: buffers and iovec arrays stay in place until the completion is reaped: the
            // slots and `pieces` keep them, and `Lossy` keeps its own.
            unsafe { submission.push(&entry) }.expect("checked not to be full");
            self.in_kernel += 1;
            self.lossy_in_kernel += usize::from(entry.get_user_data() & LOSSY != 0);
            self.unsubmitted += 1;
        }
    }

    fn collect(&mut self, done: &mut Vec<Done>) {
        for completion in self.ring.completion() {
            let (data, result) = (completion.user_data(), completion.result());
            let outcome = u64::try_from(result).map_err(|_| Errno(-result));
            self.in_kernel -= 1;
            if data & (NVME | NVME_END) != 0 {
                let device = usize::try_from(data & !NVME).expect("set from an index");
                if let Some(Registered::Nvme(lent)) = self.devices.get_mut(device) {
                    lent.woken();
                }
                continue;
            }
            if data & LOSSY != 0 {
                self.lossy_in_kernel -= 1;
                self.lossy_done.push((data, outcome));
                continue;
            }
            done.push(Done { ticket: ticket_of(data), outcome });
        }
        while let Some((data, outcome)) = self.lossy_done.pop() {
            let (device, token) = ((data & !LOSSY) >> 32, data & u64::from(u32::MAX));
            let device = usize::try_from(device).expect("set from an index");
            if let Registered::Lossy(lossy) = &mut self.devices[device] {
                lossy.complete(u32::try_from(token).expect("32 bits"), outcome);
            }
            self.attend(device);
        }
    }

    /// Does what a lossy drive asks for.
    fn attend(&mut self, device: usize) {
        let UringBackend { devices, backlog, finished, .. } = self;
        let Registered::Lossy(lossy) = &mut devices[device] else { return };
        finished.append(&mut lossy.finished);
        while let Some((token, fd, op, pieces)) = lossy.next_request() {
            let data = LOSSY | (device as u64) << 32 | u64::from(token);
            backlog.push_back((entry(fd, op, pieces).user_data(data), Instant::MAX));
        }
        if lossy.is_gone() {
            devices[device] = Registered::Gone;
        }
    }

    /// Looks at the queues of NVMe drives.
    fn reap_nvme(&mut self, done: &mut Vec<Done>) {
        if !self.devices.iter().any(|device| matches!(device, Registered::Nvme(_))) {
            return;
        }
        let now = self.now();
        for device in &mut self.devices {
            if let Registered::Nvme(lent) = device {
                lent.reap(now, done);
            }
        }
    }

    /// Has NVMe drives wake us. How long to sleep at most, until one wants a look.
    fn await_nvme(&mut self) -> Option<Duration> {
        let UringBackend { devices, backlog, .. } = self;
        let mut sleep_max = None;
        for (index, device) in devices.iter_mut().enumerate() {
            let Registered::Nvme(lent) = device else { continue };
            sleep_max = sleep_max.into_iter().chain(lent.sleep_max()).min();
            if let Some(fd) = lent.await_events() {
                let poll = opcode::PollAdd::new(Fd(fd), u32::from(libc::POLLIN.cast_unsigned()));
                let entry = poll.build().user_data(NVME | index as u64);
                backlog.push_back((entry, Instant::MAX));
            }
        }
        sleep_max
    }

    /// Nobody waits for the events of a drive any more that is let go.
    fn forget_nvme(&mut self, index: usize) {
        let cancel = opcode::AsyncCancel::new(NVME | index as u64);
        self.backlog.push_back((cancel.build().user_data(NVME_END), Instant::MAX));
    }

    /// Moves what modelled drives have to say by now.
    fn tell_due(&mut self, done: &mut Vec<Done>) {
        if self.due.is_empty() {
            return;
        }
        let now = self.now();
        while let Some(Reverse((at, _, ticket, outcome))) = self.due.peek().copied()
            && at <= now
        {
            self.due.pop();
            done.push(Done { ticket, outcome });
        }
    }
}

fn ticket_of(user_data: u64) -> Ticket {
    Ticket(u32::try_from(user_data).expect("set from a ticket"))
}

fn now(started: Duration) -> Instant {
    Instant::default().after(machine_time() - started)
}

/// The kernel's view of `op`; `pieces` must stay in place until it has completed.
fn entry(fd: RawFd, op: &Op, pieces: &mut Vec<libc::iovec>) -> squeue::Entry {
    let mut list =
        |buffers: &Buffers| {
            pieces.clear();
            pieces.extend(buffers.pieces().iter().map(|piece| libc::iovec {
                iov_base: piece.as_ptr().cast(),
                iov_len: piece.len(),
            }));
            (pieces.as_ptr(), u32::try_from(pieces.len()).expect("few pieces"))
        };
    match op {
        Op::Read { offset, into, .. } => {
            let (pieces, count) = list(into);
            opcode::Readv::new(Fd(fd), pieces, count).offset(*offset).build()
        }
        Op::Write { offset, from, .. } => {
            let (pieces, count) = list(from);
            opcode::Writev::new(Fd(fd), pieces, count).offset(*offset).build()
        }
        Op::Flush { .. } => opcode::Fsync::new(Fd(fd)).flags(FsyncFlags::DATASYNC).build(),
        Op::WriteZeroes { offset, len, unmap, .. } => {
            opcode::Fallocate::new(Fd(fd), *len).offset(*offset).mode(zeroes_mode(*unmap)).build()
        }
        Op::Readable { fd } => {
            opcode::PollAdd::new(Fd(*fd), u32::from(libc::POLLIN.cast_unsigned())).build()
        }
    }
}

/// Giving space back is a hole, in a file and on a block device; the latter says if it cannot.
fn zeroes_mode(unmap: bool) -> i32 {
    let how = if unmap { libc::FALLOC_FL_PUNCH_HOLE } else { libc::FALLOC_FL_ZERO_RANGE };
    how | libc::FALLOC_FL_KEEP_SIZE
}

impl Backend for UringBackend {
    fn now(&self) -> Instant {
        now(self.started)
    }

    #[expect(clippy::disallowed_methods, reason = "the reactor's calendar")]
    fn unix_s(&self) -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(0, |since| since.as_secs())
    }

    fn register(&mut self, device: Device) -> DeviceId {
        let free = self.devices.iter().position(|d| matches!(d, Registered::Gone));
        let index = free.unwrap_or_else(|| {
            self.devices.push(Registered::Gone);
            self.devices.len() - 1
        });
        let id = DeviceId(u32::try_from(index).expect("few devices"));
        self.devices[index] = match device {
            Device::File { file } => Registered::File(file),
            Device::Nvme { drive } => Registered::Nvme(Box::new(Lent::new(drive))),
            Device::Ram { bytes } => Registered::Ram(Ram::new(bytes)),
            Device::Model { bytes, iops, bytes_per_second, latency } => {
                Registered::Model(Model::new(bytes, iops, bytes_per_second, latency))
            }
            Device::Lossy { file, sector_bytes, seed } => {
                Registered::Lossy(Box::new(Lossy::new(file, id, sector_bytes, seed)))
            }
            Device::Simulated { .. } => panic!("a simulated drive belongs to the simulator"),
        };
        id
    }

    fn unregister(&mut self, device: DeviceId) {
        let index = device.0 as usize;
        match &mut self.devices[index] {
            Registered::Lossy(lossy) => {
                lossy.close();
                self.attend(index);
            }
            Registered::File(_) | Registered::Ram(_) | Registered::Model(_) => {
                self.devices[index] = Registered::Gone;
            }
            Registered::Nvme(lent) => {
                let awaited = lent.is_awaited();
                self.devices[index] = Registered::Gone;
                if awaited {
                    self.forget_nvme(index);
                }
            }
            Registered::Gone => unreachable!("let go twice"),
        }
    }

    fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        let device = op.device().map(|device| device.0 as usize);
        let fd = match device.map(|index| &mut self.devices[index]) {
            None => -1,
            Some(Registered::File(file)) => file.as_raw_fd(),
            Some(Registered::Nvme(lent)) => {
                lent.submit(ticket, op, until);
                return;
            }
            // Nobody else reaches memory of ours: it is never too late for it.
            Some(Registered::Ram(ram)) => {
                let outcome = ram.run(op);
                self.finished.push(Done { ticket, outcome });
                return;
            }
            Some(Registered::Model(model)) => {
                let (at, outcome) = model.run(op, now(self.started));
                self.due_sequence += 1;
                self.due.push(Reverse((at, self.due_sequence, ticket, outcome)));
                return;
            }
            Some(Registered::Lossy(_)) if now(self.started) > until => {
                self.finished.push(Done { ticket, outcome: LATE });
                return;
            }
            Some(Registered::Lossy(lossy)) => {
                lossy.submit(ticket, op);
                self.attend(device.expect("found above"));
                return;
            }
            Some(Registered::Gone) => {
                self.finished.push(Done { ticket, outcome: Err(Errno(libc::ENODEV)) });
                return;
            }
        };
        let index = ticket.0 as usize;
        if self.pieces.len() <= index {
            self.pieces.resize_with(index + 1, Vec::new);
        }
        let entry = entry(fd, op, &mut self.pieces[index]).user_data(u64::from(ticket.0));
        self.backlog.push_back((entry, until));
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        self.fill_ring();
        done.append(&mut self.finished);
        self.tell_due(done);
        if self.in_kernel > 0 {
            self.look_into_ring(done);
        }
        self.reap_nvme(done);
        done.append(&mut self.finished);
    }

    fn idle(&mut self, until: Option<Instant>) -> bool {
        let nvme = self.await_nvme();
        self.fill_ring();
        if !self.finished.is_empty() {
            return true;
        }
        let wait = until.map(|until| until.since(self.now())).into_iter().chain(nvme).min();
        let due = self.due.peek().map(|Reverse((at, ..))| at.since(self.now()));
        if self.in_kernel == 0 && wait.is_none() && due.is_none() {
            return false;
        }
        match due.map(|due| due.saturating_sub(SLEEP_MIN)) {
            // It is looked for until it is there.
            Some(Duration::ZERO) => {}
            due => self.wait(wait.into_iter().chain(due).min()),
        }
        true
    }
}

impl Drop for UringBackend {
    /// The kernel may still be writing what lossy drives hold.
    fn drop(&mut self) {
        while self.lossy_in_kernel > 0 && self.ring.submit_and_wait(1).is_ok() {
            for completion in self.ring.completion() {
                self.lossy_in_kernel -= usize::from(completion.user_data() & LOSSY != 0);
            }
        }
    }
}

impl UringBackend {
    /// Takes completions.
    fn look_into_ring(&mut self, done: &mut Vec<Done>) {
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
