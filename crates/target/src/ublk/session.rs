//! The queues of a device that one reactor serves.
//!
//! Each request the kernel may have under way is a task here: it fetches one, carries it out, tells
//! the outcome and fetches the next one with the same command. Data goes between the kernel's pages
//! and buffers of the engine by pread(2) and pwrite(2), which wait for nothing.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::pin::pin;
use std::rc::Rc;

use ashlar_format::units::{SECTOR_BYTES, to_usize};
use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::{Act, Command, Errno, Op, Outcome};
use ashlar_reactor::wait_list::WaitList;

use crate::budget::Budget;
use crate::disk::{Disk, Trouble, Turn};
use crate::limits::Toll;
use crate::request::{Operation, Permit, Request, Status};
use crate::ublk::descriptors::Descriptors;
use crate::ublk::parameters::DATA_BYTES_MAX;
use crate::ublk::wire::{
    COMMIT_AND_FETCH, Descriptor, FETCH, FLAG_FUA, OPERATION_DISCARD, OPERATION_FLUSH,
    OPERATION_MASK, OPERATION_READ, OPERATION_WRITE, OPERATION_WRITE_ZEROES, QueueCommand,
    data_offset,
};

/// Data of all requests of a device that are in buffers of the engine.
const BYTES_MAX: u64 = 64 << 20;
const _: () = assert!(BYTES_MAX / crate::disk::PARTS_MAX as u64 >= DATA_BYTES_MAX as u64);

/// Which of a device's queues one reactor serves: of every `parts` queues that at `part`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    pub(super) part: u16,
    pub(super) parts: u16,
    /// Of the whole device.
    pub(super) queues: u16,
    pub(super) depth: u16,
}

impl Share {
    fn own(self) -> impl Iterator<Item = u16> {
        (self.part..self.queues).step_by(self.parts.into())
    }
}

/// What a request that was fetched asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Read {
        offset: u64,
        len: u64,
    },
    Write {
        offset: u64,
        len: u64,
        durable: bool,
    },
    Flush,
    Discard {
        offset: u64,
        len: u64,
    },
    WriteZeroes {
        offset: u64,
        len: u64,
        durable: bool,
    },
    /// With an error number.
    Refuse(i32),
}

impl Asked {
    fn read(its: &Descriptor) -> Asked {
        let len = u64::from(its.sectors) * SECTOR_BYTES;
        let durable = its.operation & FLAG_FUA != 0;
        let operation = its.operation & OPERATION_MASK;
        let Some(offset) = its.first_sector.checked_mul(SECTOR_BYTES) else {
            // Of a flush this says nothing, and is the largest number there is.
            let is_flush = operation == OPERATION_FLUSH;
            return if is_flush { Asked::Flush } else { Asked::Refuse(libc::EINVAL) };
        };
        let has_data = (1..=u64::from(DATA_BYTES_MAX)).contains(&len);
        match operation {
            OPERATION_READ if has_data => Asked::Read { offset, len },
            OPERATION_WRITE if has_data => Asked::Write { offset, len, durable },
            OPERATION_READ | OPERATION_WRITE => Asked::Refuse(libc::EINVAL),
            OPERATION_FLUSH => Asked::Flush,
            OPERATION_DISCARD => Asked::Discard { offset, len },
            OPERATION_WRITE_ZEROES => Asked::WriteZeroes { offset, len, durable },
            _ => Asked::Refuse(libc::EOPNOTSUPP),
        }
    }
}

struct Queue {
    number: u16,
    descriptors: Descriptors,
}

pub(super) struct Session {
    disk: Disk,
    budget: Budget,
    device: Rc<OwnedFd>,
    queues: Vec<Rc<Queue>>,
    depth: u16,
    /// Tasks that have not ended: as many as requests can be fetched.
    tasks: Cell<usize>,
    /// Those of them that carry one out.
    serving: Cell<usize>,
    rested: WaitList,
    /// Another process will serve the device: what is fetched from now on is for that one.
    leaving: Cell<bool>,
    ending: Cell<bool>,
    /// Of the first FETCH, or of telling an outcome.
    refused: Cell<Option<Errno>>,
}

impl Session {
    /// Maps what its queues have, and takes nothing of it yet.
    pub(super) fn new(disk: Disk, device: OwnedFd, share: Share) -> io::Result<Rc<Session>> {
        let map = |number| {
            let descriptors = Descriptors::map(&device, number, share.depth)?;
            Ok(Rc::new(Queue { number, descriptors }))
        };
        let queues = share.own().map(map).collect::<io::Result<Vec<_>>>()?;
        Ok(Rc::new(Session {
            budget: Budget::new(disk.reactor(), BYTES_MAX / u64::from(share.parts)),
            disk,
            device: Rc::new(device),
            queues,
            depth: share.depth,
            tasks: Cell::new(0),
            serving: Cell::new(0),
            rested: WaitList::default(),
            leaving: Cell::new(false),
            ending: Cell::new(false),
            refused: Cell::new(None),
        }))
    }

    /// Gives the driver all that it needs to hand out requests.
    pub(super) fn fetch(self: &Rc<Self>) {
        for queue in &self.queues {
            for tag in 0..self.depth {
                self.tasks.set(self.tasks.get() + 1);
                self.reactor().spawn(self.clone().run(queue.clone(), tag));
            }
        }
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// How many queues are served here.
    pub(super) fn queues(&self) -> usize {
        if self.tasks.get() > 0 { self.queues.len() } else { 0 }
    }

    /// Why the driver did not take a command, if it did not.
    pub(super) fn refused(&self) -> Option<Errno> {
        self.refused.get()
    }

    /// The device is about to be stopped, by us.
    pub(super) fn expect_end(&self) {
        self.ending.set(true);
        self.disk.throttle().hurry();
    }

    /// Waits until the driver has given back all commands: the device was stopped.
    pub(super) async fn close(&self) {
        self.rested.until(self.reactor(), || self.tasks.get() == 0).await;
    }

    /// Finishes what is under way, but does not tell: the driver asks the next process for it once
    /// more, with all that was not fetched. Nothing is carried out here after this.
    pub(super) async fn leave(&self) {
        self.leaving.set(true);
        self.disk.throttle().hurry();
        self.rested.until(self.reactor(), || self.serving.get() == 0).await;
    }

    fn reactor(&self) -> &Reactor {
        self.disk.reactor()
    }

    async fn run(self: Rc<Self>, queue: Rc<Queue>, tag: u16) {
        self.fetch_and_serve(&queue, tag).await;
        self.tasks.set(self.tasks.get() - 1);
        self.rested.wake_all(self.reactor());
    }

    /// Until the driver gives no more.
    async fn fetch_and_serve(&self, queue: &Queue, tag: u16) {
        let bytes = QueueCommand::bytes(queue.number, tag, 0);
        let mut command = Rc::new(Command { number: FETCH, bytes, memory: Buffers::default() });
        loop {
            if let Err(errno) = self.give(command.clone()).await {
                return self.ended(errno);
            }
            if self.leaving.get() {
                return;
            }
            self.serving.set(self.serving.get() + 1);
            let asked = Asked::read(&queue.descriptors.get(tag));
            let outcome = self.serve(asked, data_offset(queue.number, tag)).await;
            self.disk.told();
            self.serving.set(self.serving.get() - 1);
            if self.leaving.get() {
                return self.rested.wake_all(self.reactor());
            }
            let result = match outcome {
                Ok(len) => i32::try_from(len).expect("no more than a request can have"),
                Err(Errno(errno)) => -errno,
            };
            let next = Rc::get_mut(&mut command).expect("whoever had it has let it go");
            next.number = COMMIT_AND_FETCH;
            next.bytes = QueueCommand::bytes(queue.number, tag, result);
        }
    }

    async fn give(&self, command: Rc<Command>) -> Outcome {
        let (fd, open) = (self.device.as_raw_fd(), Some(self.device.clone()));
        self.reactor().submit(Op::Descriptor { fd, act: Act::Command(command), open }).await
    }

    fn ended(&self, errno: Errno) {
        let why = match errno {
            // What the driver says when a device was stopped.
            Errno(libc::ENODEV) if self.ending.get() || self.leaving.get() => return,
            Errno(libc::ENODEV) => {
                "another program has stopped the device; delete the export, and create it anew"
                    .to_owned()
            }
            errno => format!("the driver takes no command: {errno}"),
        };
        if self.refused.replace(Some(errno)).is_none() {
            tracing::warn!(export = self.disk.name(), "{why}");
            self.disk.note(Trouble::Initiator(why));
        }
    }

    /// Bytes of data that were read or written. `place`: where the driver has the request's data.
    async fn serve(&self, asked: Asked, place: u64) -> Result<u64, Errno> {
        match asked {
            Asked::Read { offset, len } => {
                // What waits for its turn holds no memory that others could go on with.
                let turn = self.disk.turn(Toll::Read(len)).await;
                let _claim = self.budget.claim(len).await;
                let data = self.reactor().buffer(to_usize(len));
                let read = Operation::Read { offset, into: data.clone().into() };
                self.perform_in(turn, read).await?;
                self.put(&data, place)?;
                Ok(len)
            }
            Asked::Write { offset, len, durable } => {
                let turn = self.disk.turn(Toll::Write(len)).await;
                let _claim = self.budget.claim(len).await;
                let mut data = self.reactor().buffer(to_usize(len));
                self.get(&mut data, place)?;
                self.perform_in(turn, Operation::Write { offset, from: data.into() }).await?;
                self.settle(durable).await?;
                Ok(len)
            }
            Asked::Flush => self.perform(Operation::Flush).await.map(|()| 0),
            Asked::Discard { offset, len } => {
                self.perform(Operation::Discard { offset, len }).await.map(|()| 0)
            }
            Asked::WriteZeroes { offset, len, durable } => {
                self.perform(Operation::WriteZeroes { offset, len }).await?;
                self.settle(durable).await.map(|()| 0)
            }
            Asked::Refuse(errno) => {
                let refused = Operation::Refuse(Status::Unsupported);
                let _ = self.perform(refused).await;
                Err(Errno(errno))
            }
        }
    }

    async fn settle(&self, durable: bool) -> Result<(), Errno> {
        if durable { self.perform(Operation::Flush).await } else { Ok(()) }
    }

    async fn perform(&self, operation: Operation) -> Result<(), Errno> {
        let turn = self.disk.turn(Toll::of(&operation)).await;
        self.perform_in(turn, operation).await
    }

    async fn perform_in(&self, turn: Turn<'_>, operation: Operation) -> Result<(), Errno> {
        let permit = Permit::new(0);
        outcome(pin!(self.disk.serve_in(turn, Request { operation, permit })).await.status)
    }

    /// To the kernel's pages.
    fn put(&self, data: &Buffer, place: u64) -> Result<(), Errno> {
        whole(rustix::io::pwrite(self.device.as_fd(), data.bytes(), place), data.len())
    }

    /// From there.
    fn get(&self, data: &mut Buffer, place: u64) -> Result<(), Errno> {
        let len = data.len();
        whole(rustix::io::pread(self.device.as_fd(), data.bytes_mut(), place), len)
    }
}

/// What the kernel is told.
fn outcome(status: Status) -> Result<(), Errno> {
    match status {
        Status::Done => Ok(()),
        Status::NoSpace => Err(Errno(libc::ENOSPC)),
        Status::Failed => Err(Errno(libc::EIO)),
        Status::Unsupported => Err(Errno(libc::EOPNOTSUPP)),
    }
}

/// A copy that ends early has met pages that are not there any more.
fn whole(copied: rustix::io::Result<usize>, len: usize) -> Result<(), Errno> {
    match copied {
        Ok(copied) if copied == len => Ok(()),
        Ok(_) => Err(Errno(libc::EIO)),
        Err(error) => Err(Errno(error.raw_os_error())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(operation: u32, first_sector: u64, sectors: u32) -> Asked {
        Asked::read(&Descriptor { operation, sectors, first_sector, address: 0 })
    }

    #[test]
    fn what_the_kernel_is_told() {
        assert_eq!(outcome(Status::Done), Ok(()));
        for (status, errno) in [
            (Status::NoSpace, libc::ENOSPC),
            (Status::Failed, libc::EIO),
            (Status::Unsupported, libc::EOPNOTSUPP),
        ] {
            assert_eq!(outcome(status), Err(Errno(errno)), "{status:?}");
        }
    }

    #[test]
    fn what_is_asked_for() {
        assert_eq!(asked(0, 8, 1), Asked::Read { offset: 4096, len: 512 });
        let write = |durable| Asked::Write { offset: 512, len: 1 << 20, durable };
        assert_eq!(asked(1, 1, 2048), write(false));
        // Flags of which nothing is to be made stand beside the one that counts.
        assert_eq!(asked(1 | 1 << 8 | FLAG_FUA, 1, 2048), write(true));
        assert_eq!(asked(2, 0, 0), Asked::Flush);
        assert_eq!(asked(2, u64::MAX, 0), Asked::Flush);
        assert_eq!(asked(3, 2, 131_072), Asked::Discard { offset: 1024, len: 64 << 20 });
        let zeroes = Asked::WriteZeroes { offset: 0, len: 4096, durable: true };
        assert_eq!(asked(5 | 1 << 15 | FLAG_FUA, 0, 8), zeroes);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let invalid = Asked::Refuse(libc::EINVAL);
        for operation in [OPERATION_READ, OPERATION_WRITE] {
            assert_eq!(asked(operation, 0, 0), invalid);
            assert_eq!(asked(operation, 0, 2049), invalid);
        }
        assert_eq!(asked(0, u64::MAX, 8), invalid);
        for operation in [4, 10, 255] {
            assert_eq!(asked(operation, 0, 8), Asked::Refuse(libc::EOPNOTSUPP));
        }
    }

    #[test]
    fn every_queue_has_one_reactor() {
        for queues in 1..=20 {
            for parts in 1..=16 {
                let share = |part| Share { part, parts, queues, depth: 1 };
                let mut all: Vec<u16> = (0..parts).flat_map(|part| share(part).own()).collect();
                all.sort_unstable();
                assert_eq!(all, (0..queues).collect::<Vec<_>>(), "{parts} reactors");
            }
        }
    }
}
