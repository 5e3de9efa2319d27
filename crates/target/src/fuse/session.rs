//! One mount, as it lives on its reactor: how requests come in and answers go out.
//!
//! ```text
//! kernel ── ring of each CPU ── entries, each a task: fetch, serve, commit and fetch ──┐
//! kernel ── /dev/fuse ── reader ── a task for each request ────────────────────────────┴ file
//! ```
//!
//! The reader is there always: it makes the beginning, and hears what the kernel never sends by a
//! ring. Where the kernel has no rings for FUSE, everything comes that way.

use std::cell::Cell;
use std::fs::File as Device;
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;

use ashlar_reactor::buffer::{BUFFER_BYTES_MAX, Buffer, Buffers};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::{Act, COMMAND_BYTES, Command, Errno, Op, Outcome, command_bytes};
use ashlar_reactor::wait_list::WaitList;
use zerocopy::{FromBytes, IntoBytes};

use crate::fuse::file::{Asked, File};
use crate::fuse::wire::{
    COMMAND_COMMIT_AND_FETCH, COMMAND_REGISTER, IN_HEADER_BYTES, InHeader, InitIn, InitOut,
    OPERATION_BYTES, OUT_HEADER_BYTES, OutHeader, RANGE_IN_BYTES, RING_ENTRY_OFFSET,
    RING_HEADERS_BYTES, RingCommand, RingEntry, RingHeaders, VERSION_MAJOR, VERSION_MINOR,
    VERSION_MINOR_MIN, init, opcode,
};

/// Memory of all entries of all rings.
const ENTRIES_BYTES_MAX: usize = 64 << 20;
/// Of one CPU's ring.
const ENTRIES_MAX: usize = 32;
const ENTRIES_MIN: usize = 4;
/// On machines with so many CPUs that entries of the largest size would need more memory.
const DATA_BYTES_SMALL: usize = 128 << 10;
const PAGE_BYTES: usize = 4096;
/// Requests that came through `/dev/fuse` and are under way; more wait in the kernel.
const READ_REQUESTS_MAX: usize = 32;
/// Requests that nobody waits for, such as those of asynchronous I/O: the kernel lets no more than
/// this many be under way.
const BACKGROUND_MAX: u16 = 1024;

/// How requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The kernel has not said hello yet.
    Unknown,
    /// By reading and writing `/dev/fuse`.
    Device,
    /// By io_uring: so many queues, of so many entries.
    Rings { queues: u16, entries: u16 },
}

/// How entries are laid out on a machine of so many CPUs: entries a queue, bytes of data.
fn lay_out(cpus: usize) -> (usize, usize) {
    let most = |data_bytes: usize| ENTRIES_BYTES_MAX / (cpus.max(1) * data_bytes);
    if most(BUFFER_BYTES_MAX) >= ENTRIES_MIN {
        return (most(BUFFER_BYTES_MAX).min(ENTRIES_MAX), BUFFER_BYTES_MAX);
    }
    (most(DATA_BYTES_SMALL).clamp(ENTRIES_MIN, ENTRIES_MAX), DATA_BYTES_SMALL)
}

pub(super) struct Session {
    file: File,
    /// `/dev/fuse`, which does not block.
    device: Rc<Device>,
    descriptor: Rc<OwnedFd>,
    cpus: usize,
    /// Rings may be used, where the kernel has them.
    may_ring: bool,
    way: Cell<Way>,
    /// Tasks of it that have not ended.
    tasks: Cell<usize>,
    /// Those of them that serve a request of the reader's.
    reads: Cell<usize>,
    ended: WaitList,
    /// Whoever may still ask, nothing is served any more.
    closing: Cell<bool>,
    /// Of registering an entry.
    refused: Cell<Option<Errno>>,
}

impl Session {
    /// `cpus`: how many the machine may have.
    pub(super) fn start(
        file: File,
        device: OwnedFd,
        cpus: usize,
        may_ring: bool,
    ) -> std::io::Result<Rc<Session>> {
        let reading = device.try_clone()?;
        let session = Rc::new(Session {
            file,
            device: Rc::new(Device::from(reading)),
            descriptor: Rc::new(device),
            cpus,
            may_ring,
            way: Cell::new(Way::Unknown),
            tasks: Cell::new(0),
            reads: Cell::new(0),
            ended: WaitList::default(),
            closing: Cell::new(false),
            refused: Cell::new(None),
        });
        session.spawn(session.clone().read());
        Ok(session)
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn way(&self) -> Way {
        self.way.get()
    }

    /// Why the kernel did not take an entry, if it did not.
    pub(super) fn refused(&self) -> Option<Errno> {
        self.refused.get()
    }

    /// Serves no more, and waits until the kernel has let go: the mount is gone, or was aborted.
    pub(super) async fn close(&self) {
        self.closing.set(true);
        self.file.disk().throttle().hurry();
        self.ended.until(self.reactor(), || self.tasks.get() == 0).await;
    }

    fn reactor(&self) -> &Reactor {
        self.file.reactor()
    }

    fn spawn(self: &Rc<Self>, work: impl Future<Output = ()> + 'static) {
        self.tasks.set(self.tasks.get() + 1);
        let session = self.clone();
        self.reactor().spawn(async move {
            work.await;
            session.end_task();
        });
    }

    fn end_task(&self) {
        self.tasks.set(self.tasks.get() - 1);
        self.ended.wake_all(self.reactor());
    }

    /// Reads requests until the kernel sends no more.
    async fn read(self: Rc<Self>) {
        let (_, data_bytes) = lay_out(self.cpus);
        let mut request = vec![0; IN_HEADER_BYTES + OPERATION_BYTES + data_bytes];
        loop {
            let has_room = || self.reads.get() < READ_REQUESTS_MAX;
            self.ended.until(self.reactor(), has_room).await;
            match (&*self.device).read(&mut request) {
                Ok(len) => self.take(request[..len].to_vec()),
                // What was to be read was taken back.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if self.act(Act::Await).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let export = self.file.disk().name();
                    tracing::debug!(export, %error, "the file is not served any more");
                    return;
                }
            }
        }
    }

    async fn serve(&self, asked: &Asked, data: &Buffer) -> Result<usize, Errno> {
        match self.closing.get() {
            true => Err(Errno(libc::ENOTCONN)),
            false => self.file.serve(asked, data).await,
        }
    }

    async fn act(&self, act: Act) -> Outcome {
        let (fd, open) = (self.descriptor.as_raw_fd(), Some(self.descriptor.clone()));
        self.reactor().submit(Op::Descriptor { fd, act, open }).await
    }

    /// Takes up a request that was read.
    fn take(self: &Rc<Self>, request: Vec<u8>) {
        let Ok((header, rest)) = InHeader::read_from_prefix(&request) else { return };
        match header.opcode {
            opcode::INIT => self.greet(&header, rest),
            // These have no answer.
            opcode::FORGET | opcode::BATCH_FORGET => {}
            // What is under way ends soon, interrupted or not.
            opcode::INTERRUPT => self.answer(&header, Err(Errno(libc::ENOSYS)), &[]),
            _ => {
                self.reads.set(self.reads.get() + 1);
                self.tasks.set(self.tasks.get() + 1);
                // Not by `spawn`: it is large, and would be moved from one task into another.
                self.reactor().spawn(self.clone().serve_read(header, request));
            }
        }
    }

    async fn serve_read(self: Rc<Self>, header: InHeader, request: Vec<u8>) {
        let (_, data_bytes) = lay_out(self.cpus);
        let data = self.reactor().buffer(data_bytes);
        let rest = &request[IN_HEADER_BYTES..];
        // Only writes have data, and what is before it has one length.
        let (before, sent) = match header.opcode {
            opcode::WRITE if rest.len() >= RANGE_IN_BYTES => rest.split_at(RANGE_IN_BYTES),
            _ => (rest, &[][..]),
        };
        let mut operation = [0; OPERATION_BYTES];
        let known = before.len().min(OPERATION_BYTES);
        operation[..known].copy_from_slice(&before[..known]);
        data.slice(0..sent.len()).copy_from_slice(sent);
        let asked =
            Asked { opcode: header.opcode, node: header.node, operation, data_len: sent.len() };
        drop(request);
        match self.serve(&asked, &data).await {
            Ok(len) => self.answer(&header, Ok(()), data.slice(0..len).bytes()),
            Err(errno) => self.answer(&header, Err(errno), &[]),
        }
        self.file.disk().told();
        self.reads.set(self.reads.get() - 1);
        self.end_task();
    }

    /// Answers through `/dev/fuse`.
    fn answer(&self, header: &InHeader, outcome: Result<(), Errno>, data: &[u8]) {
        let len = u32::try_from(OUT_HEADER_BYTES + data.len()).expect("far less than 4 GiB");
        let error = outcome.err().map_or(0, |Errno(errno)| -errno);
        let head = OutHeader { len, error, unique: header.unique };
        let parts = [IoSlice::new(head.as_bytes()), IoSlice::new(data)];
        // It fails if nobody waits for the answer any more.
        let _ = (&*self.device).write_vectored(&parts);
    }

    /// The kernel's hello: tells what it has; answered by what of that is used.
    fn greet(self: &Rc<Self>, header: &InHeader, said: &[u8]) {
        // Older kernels say less.
        let mut bytes = [0; size_of::<InitIn>()];
        let known = said.len().min(bytes.len());
        bytes[..known].copy_from_slice(&said[..known]);
        let said = InitIn::read_from_bytes(&bytes).expect("as many bytes");
        let mut answer =
            InitOut { major: VERSION_MAJOR, minor: VERSION_MINOR, ..Default::default() };
        if said.major > VERSION_MAJOR {
            // It will ask again, by our version.
            return self.answer(header, Ok(()), answer.as_bytes());
        }
        if said.major < VERSION_MAJOR || said.minor < VERSION_MINOR_MIN {
            return self.answer(header, Err(Errno(libc::EPROTO)), &[]);
        }
        let (entries, data_bytes) = lay_out(self.cpus);
        let has = u64::from(said.flags) | u64::from(said.flags2) << 32;
        let rings = if self.may_ring { init::OVER_IO_URING } else { 0 };
        let wanted = init::ASYNC_READ
            | init::BIG_WRITES
            | init::ASYNC_DIO
            | init::MAX_PAGES
            | init::EXT
            | init::DIRECT_IO_ALLOW_MMAP
            | rings;
        let flags = has & wanted;
        answer.flags = u32::try_from(flags & u64::from(u32::MAX)).expect("32 bits");
        answer.flags2 = u32::try_from(flags >> 32).expect("32 bits");
        answer.readahead_max = said.readahead_max;
        answer.background_max = BACKGROUND_MAX;
        answer.congestion_threshold = BACKGROUND_MAX / 4 * 3;
        answer.write_max = u32::try_from(data_bytes).expect("at most 1 MiB");
        answer.pages_max = u16::try_from(data_bytes / PAGE_BYTES).expect("at most 256");
        answer.time_granularity = 1;
        self.answer(header, Ok(()), answer.as_bytes());
        self.way.set(Way::Device);
        if flags & init::OVER_IO_URING != 0 {
            self.begin_rings(entries, data_bytes);
        }
    }

    /// A ring for each CPU that the machine may have: the kernel uses none before all are there.
    fn begin_rings(self: &Rc<Self>, entries: usize, data_bytes: usize) {
        let count = |number: usize| u16::try_from(number).unwrap_or(u16::MAX);
        for queue in 0..count(self.cpus) {
            for _ in 0..entries {
                self.spawn(self.clone().serve_ring(queue, data_bytes));
            }
        }
        self.way.set(Way::Rings { queues: count(self.cpus), entries: count(entries) });
    }

    /// One entry of a ring.
    async fn serve_ring(self: Rc<Self>, queue: u16, data_bytes: usize) {
        let headers = self.reactor().buffer(RING_HEADERS_BYTES);
        let data = self.reactor().buffer(data_bytes);
        let mut memory = Buffers::from(headers.clone());
        memory.push(data.clone());
        let bytes = ring_command(queue, 0);
        let mut command = Rc::new(Command { number: COMMAND_REGISTER, bytes, memory });
        loop {
            if let Err(errno) = self.act(Act::Command(command.clone())).await {
                if command.number == COMMAND_REGISTER {
                    self.refused.set(Some(errno));
                }
                return;
            }
            let commit = self.serve_fetched(&headers, &data).await;
            let next = Rc::get_mut(&mut command).expect("whoever had it has let it go");
            next.number = COMMAND_COMMIT_AND_FETCH;
            next.bytes = ring_command(queue, commit);
        }
    }

    /// Serves the request that an entry has got, and puts the answer there; what it is named by.
    async fn serve_fetched(&self, headers: &Buffer, data: &Buffer) -> u64 {
        let mut bytes = [0; RING_HEADERS_BYTES];
        headers.copy_to_slice(&mut bytes);
        let fetched = RingHeaders::read_from_bytes(&bytes).expect("as many bytes");
        let RingHeaders { request, operation, entry, .. } = fetched;
        let asked = Asked {
            opcode: request.opcode,
            node: request.node,
            operation,
            data_len: usize::try_from(entry.payload_len).unwrap_or(usize::MAX),
        };
        let outcome = self.serve(&asked, data).await;
        let (len, error) = match outcome {
            Ok(len) => (u32::try_from(len).expect("no longer than the data"), 0),
            Err(Errno(errno)) => (0, -errno),
        };
        let answer = OutHeader {
            len: u32::try_from(OUT_HEADER_BYTES).expect("a few bytes") + len,
            error,
            unique: request.unique,
        };
        headers.slice(0..OUT_HEADER_BYTES).copy_from_slice(answer.as_bytes());
        let entry = RingEntry { payload_len: len, ..entry };
        headers.slice(RING_ENTRY_OFFSET..RING_HEADERS_BYTES).copy_from_slice(entry.as_bytes());
        self.file.disk().told();
        entry.commit
    }
}

fn ring_command(queue: u16, commit: u64) -> [u8; COMMAND_BYTES] {
    command_bytes(&RingCommand { flags: 0, commit, queue, unused: [0; 6] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_need_no_more_memory_than_there_is_for_them() {
        assert_eq!(lay_out(1), (32, 1 << 20));
        assert_eq!(lay_out(2), (32, 1 << 20));
        assert_eq!(lay_out(16), (4, 1 << 20));
        assert_eq!(lay_out(17), (30, 128 << 10));
        assert_eq!(lay_out(128), (4, 128 << 10));
        for cpus in 1..=128 {
            let (entries, bytes) = lay_out(cpus);
            assert!(cpus * entries * bytes <= ENTRIES_BYTES_MAX, "{cpus}");
            assert!((ENTRIES_MIN..=ENTRIES_MAX).contains(&entries), "{cpus}");
        }
    }
}
