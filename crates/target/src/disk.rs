//! What all queues or connections of one export share on one reactor: the volume, and how requests
//! are done on it.
//!
//! No copies of our own: guest memory goes to the volume as it is. Only a read into pieces that
//! direct I/O cannot fill, by address or length, passes through engine memory.

use std::cell::{Cell, RefCell};
use std::iter::Sum;
use std::ops::Add;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ashlar_format::units::to_usize;
use ashlar_pool::volume::Volume;
use ashlar_raid::block_status::BlockStatus;
use ashlar_raid::error::ArrayError;
use ashlar_raid::zero_step::Zeroing;
use ashlar_reactor::backend::Instant;
use ashlar_reactor::buffer::{BUFFER_BYTES_MAX, Buffers, DIRECT_ALIGN};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::traffic::{self, Kind, Passage, Traffic};

use crate::budget::Budget;
use crate::limits::{RateLimits, Throttle, Toll, Wanted};
use crate::neighbours::Asking;
use crate::quantum::Quantum;
use crate::request::{Answer, Operation, Request, Status};

/// Most reactors that serve one export.
pub const PARTS_MAX: u16 = 16;
/// Bytes of a device's name (virtio 1.2, 5.2.6.1: VIRTIO_BLK_ID_BYTES; NVMe Base 2.0, figure 275:
/// SN).
pub(crate) const SERIAL_BYTES: usize = 20;
/// Larger requests are done in pieces of this size, one after the other.
const PIECE_BYTES: u64 = 4 << 20;
/// Data of one export that is under way at a time.
const BYTES_IN_FLIGHT_MAX: u64 = 64 << 20;
/// Each reactor that serves queues of an export has its share of that.
const _: () = assert!(BYTES_IN_FLIGHT_MAX / PARTS_MAX as u64 >= PIECE_BYTES);
/// Of a zeroing that shall be fast. Each may be asked of another reactor.
const STEPS_LOOKED_AT: usize = 16;
/// A read into more pieces than this is copied: the kernel takes 1024 for one operation.
const PIECES_DIRECT_MAX: usize = 512;
/// Requests that may be done before the guest is told of them: room is made at the start.
pub(crate) const UNTOLD_MAX: usize = 10_240;

/// Requests answered since the export was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    /// Asked for, and those after each write of a guest that chose write through.
    pub flushes: u64,
    /// Discards and write-zeroes.
    pub discards: u64,
    /// Answered with an error.
    pub errors: u64,
    /// Had to wait because of a limit.
    pub limited: u64,
}

impl Sum for Counters {
    fn sum<I: Iterator<Item = Counters>>(all: I) -> Counters {
        all.fold(Counters::default(), Add::add)
    }
}

impl Add for Counters {
    type Output = Counters;

    fn add(self, other: Counters) -> Counters {
        Counters {
            reads: self.reads + other.reads,
            read_bytes: self.read_bytes + other.read_bytes,
            writes: self.writes + other.writes,
            write_bytes: self.write_bytes + other.write_bytes,
            flushes: self.flushes + other.flushes,
            discards: self.discards + other.discards,
            errors: self.errors + other.errors,
            limited: self.limited + other.limited,
        }
    }
}

/// The last thing that went wrong.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Trouble {
    #[error("{0}")]
    Array(#[from] ArrayError),
    /// What an initiator did, and what came of it.
    #[error("{0}")]
    Initiator(String),
}

pub(crate) struct Disk {
    reactor: Reactor,
    name: String,
    volume: Rc<Volume>,
    serial: [u8; SERIAL_BYTES],
    write_through: Cell<bool>,
    throttle: Throttle,
    quantum: Rc<Quantum>,
    budget: Budget,
    counters: Cell<Counters>,
    traffic: Traffic,
    /// Done, and the guest was not told of it yet: kind, bytes, when it was taken up.
    untold: RefCell<Vec<(Kind, u64, Instant)>>,
    asking: Cell<Asking>,
    trouble: RefCell<Option<Trouble>>,
}

/// A request that may begin.
pub(crate) struct Turn<'a> {
    began: Instant,
    wanted: Wanted<'a>,
    _passages: [Passage<'a>; 2],
}

impl Turn<'_> {
    /// For so long nothing could be done for it, since its initiator was waited for: that is none
    /// of the time that it takes here.
    pub(crate) fn was_idle(&mut self, time: Duration) {
        self.began = self.began.after(time);
    }
}

/// Why a request was not done.
enum Undone {
    Array(ArrayError),
    /// Nobody is there who would hear of it.
    Unwanted,
}

impl From<ArrayError> for Undone {
    fn from(error: ArrayError) -> Undone {
        Undone::Array(error)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.quantum.close();
    }
}

impl Disk {
    /// `parts`: how many reactors have one for this export.
    pub(crate) fn new(
        reactor: &Reactor,
        name: String,
        volume: Rc<Volume>,
        serial: [u8; SERIAL_BYTES],
        parts: u16,
        limits: Arc<RateLimits>,
    ) -> Disk {
        Disk {
            reactor: reactor.clone(),
            name,
            volume,
            serial,
            write_through: Cell::new(false),
            throttle: Throttle::new(reactor, limits),
            quantum: Quantum::new(reactor),
            budget: Budget::new(reactor, BYTES_IN_FLIGHT_MAX / u64::from(parts)),
            counters: Cell::default(),
            traffic: Traffic::default(),
            untold: RefCell::new(Vec::with_capacity(UNTOLD_MAX)),
            asking: Cell::default(),
            trouble: RefCell::default(),
        }
    }

    pub(crate) fn reactor(&self) -> &Reactor {
        &self.reactor
    }

    /// The export's name, for the log.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn volume(&self) -> &Volume {
        &self.volume
    }

    pub(crate) fn counters(&self) -> Counters {
        Counters { limited: self.throttle.waited(), ..self.counters.get() }
    }

    pub(crate) fn throttle(&self) -> &Throttle {
        &self.throttle
    }

    pub(crate) fn traffic(&self) -> traffic::Report {
        self.traffic.report(self.reactor.now())
    }

    /// The guest sees what was answered up to now, and was called if it wanted that.
    pub(crate) fn told(&self) {
        let now = self.reactor.turn_time();
        for (kind, bytes, began) in self.untold.borrow_mut().drain(..) {
            let took = now.since(began);
            self.traffic.took(kind, bytes, took, now);
            self.reactor.traffic().took(kind, bytes, took, now);
        }
    }

    /// From now on writes are durable before they are answered, or not.
    pub(crate) fn set_write_through(&self, write_through: bool) {
        self.write_through.set(write_through);
    }

    pub(crate) fn note(&self, trouble: Trouble) {
        *self.trouble.borrow_mut() = Some(trouble);
    }

    pub(crate) fn trouble(&self) -> Option<Trouble> {
        self.trouble.borrow().clone()
    }

    fn count(&self, change: impl FnOnce(&mut Counters)) {
        let mut counters = self.counters.get();
        change(&mut counters);
        self.counters.set(counters);
    }

    /// Does one request from beginning to end, as soon as limits let it: for a ring, of which few
    /// are popped in a turn. As [`Disk::serve_in`], it is to be pinned.
    pub(crate) async fn serve(&self, request: Request) -> Answer {
        let turn = self.arrive(&|| true);
        self.throttle.admit(Toll::of(&request.operation), turn.wanted).await;
        pin!(self.carry_out(turn, request)).await
    }

    /// Waits until limits let a request begin, which is taken up now.
    #[inline]
    pub(crate) async fn turn(&self, toll: Toll) -> Turn<'_> {
        self.turn_while(&|| true, toll).await.expect("it is wanted")
    }

    /// The same. `None`: it is not wanted any more. One that is wanted no more later on, and could
    /// be left half done, may be.
    #[inline]
    pub(crate) async fn turn_while<'a>(
        &'a self,
        wanted: Wanted<'a>,
        toll: Toll,
    ) -> Option<Turn<'a>> {
        let turn = self.arrive(wanted);
        self.throttle.admit(toll, wanted).await.then_some(turn)
    }

    /// A request is there: its time begins.
    fn arrive<'a>(&'a self, wanted: Wanted<'a>) -> Turn<'a> {
        let began = self.reactor.turn_time();
        self.quantum.note(began);
        let _passages = [self.traffic.enter(), self.reactor.traffic().enter()];
        Turn { began, wanted, _passages }
    }

    /// How many queues of this export have something to do in a turn, at least one. Each says so
    /// once in each turn.
    pub(crate) fn queues_asking(&self, this_one: bool) -> u16 {
        let asking = self.asking.get().at(self.reactor.turn_time(), this_one);
        self.asking.set(asking);
        asking.count()
    }

    /// Whether the reactor was lately asked for something by other exports, too.
    pub(crate) fn has_neighbours(&self) -> bool {
        self.quantum.has_neighbours()
    }

    /// Does a request that has waited for its turn, in the quantum of its export. What does it is
    /// large, and `await` would move it first: callers pin it where it is made.
    #[inline]
    pub(crate) async fn serve_in(&self, turn: Turn<'_>, request: Request) -> Answer {
        match self.quantum.begin(Toll::of(&request.operation), turn.wanted).await {
            true => pin!(self.carry_out(turn, request)).await,
            false => request.permit.complete(Status::Failed, 0),
        }
    }

    #[inline]
    async fn carry_out(&self, turn: Turn<'_>, request: Request) -> Answer {
        let Request { operation, permit } = request;
        let (began, asked) = (turn.began, asked(&operation));
        let (status, bytes) = match self.perform(operation, turn.wanted).await {
            Ok((status, bytes)) => (status, bytes),
            Err(Undone::Array(error)) => {
                self.note(error.into());
                let is_full = error == ArrayError::NoSpace;
                (if is_full { Status::NoSpace } else { Status::Failed }, 0)
            }
            Err(Undone::Unwanted) => return permit.complete(Status::Failed, 0),
        };
        if status != Status::Done {
            self.count(|counters| counters.errors += 1);
        } else if let Some((kind, bytes)) = asked {
            self.untold.borrow_mut().push((kind, bytes, began));
        }
        permit.complete(status, bytes)
    }

    /// Returns the status, and how many bytes were put into guest memory.
    async fn perform(
        &self,
        operation: Operation,
        wanted: Wanted<'_>,
    ) -> Result<(Status, u32), Undone> {
        let done = |bytes: u64| (Status::Done, u32::try_from(bytes).unwrap_or(u32::MAX));
        match operation {
            Operation::Read { offset, into } => {
                let len = into.len() as u64;
                self.read(offset, into).await?;
                self.count(|counters| {
                    counters.reads += 1;
                    counters.read_bytes += len;
                });
                Ok(done(len))
            }
            Operation::Write { offset, from } => {
                let len = from.len() as u64;
                self.write(offset, from).await?;
                self.count(|counters| {
                    counters.writes += 1;
                    counters.write_bytes += len;
                });
                self.settle().await?;
                Ok(done(0))
            }
            Operation::Flush => {
                self.flush().await?;
                Ok(done(0))
            }
            Operation::Discard { offset, len } => {
                self.zero(Zeroing::Discard, (offset, len), wanted).await?;
                self.count(|counters| counters.discards += 1);
                Ok(done(0))
            }
            Operation::WriteZeroes { offset, len } => {
                self.zero(Zeroing::WriteZeroes, (offset, len), wanted).await?;
                self.count(|counters| counters.discards += 1);
                self.settle().await?;
                Ok(done(0))
            }
            Operation::Identify { into } => Ok(done(self.identify(&into))),
            Operation::Refuse(status) => Ok((status, 0)),
        }
    }

    /// Makes a write durable if the driver relies on that.
    async fn settle(&self) -> Result<(), ArrayError> {
        if self.write_through.get() { self.flush().await } else { Ok(()) }
    }

    async fn flush(&self) -> Result<(), ArrayError> {
        self.volume.flush().await?;
        self.count(|counters| counters.flushes += 1);
        Ok(())
    }

    /// While bytes that are written are limited, in steps: each waits behind whatever came before
    /// it, so that a long one neither goes for nothing nor holds up what comes after.
    async fn zero(
        &self,
        zeroing: Zeroing,
        (offset, len): (u64, u64),
        wanted: Wanted<'_>,
    ) -> Result<(), Undone> {
        let mut done = 0;
        loop {
            let (at, mut step) = (offset + done, len - done);
            if self.throttle.paces_written_bytes() && step > 0 {
                let next = self.volume.zero_step(zeroing, at, step).await?;
                let toll = Toll::MoreWritten(next.written);
                if next.written > 0 && !self.throttle.admit(toll, wanted).await {
                    return Err(Undone::Unwanted);
                }
                step = next.len;
            }
            match zeroing {
                Zeroing::Discard => self.volume.discard(at, step).await?,
                Zeroing::WriteZeroes => self.volume.write_zeroes(at, step).await?,
            }
            done += step;
            if done == len {
                return Ok(());
            }
        }
    }

    /// Whether a range can be zeroed faster than by writing it: most of it need not be written, as
    /// far as it is looked at, and as of now.
    pub(crate) async fn zeroes_fast(&self, offset: u64, len: u64) -> bool {
        let (mut done, mut written) = (0, 0);
        for _ in 0..STEPS_LOOKED_AT {
            if done == len {
                break;
            }
            let at = offset + done;
            let next = self.volume.zero_step(Zeroing::WriteZeroes, at, len - done).await;
            // Why it cannot be done is said where it is.
            let Ok(step) = next else { return true };
            done += step.len;
            written += step.written;
        }
        written <= done / 2
    }

    /// The beginning of a range that is not empty, as far as it is alike.
    pub(crate) async fn block_status(
        &self,
        offset: u64,
        len: u64,
    ) -> Result<BlockStatus, ArrayError> {
        let found = self.volume.block_status(offset, len).await;
        match found {
            Ok(status) => assert!((1..=len).contains(&status.len), "{status:?} of {len}"),
            Err(error) => {
                self.note(error.into());
                self.count(|counters| counters.errors += 1);
            }
        }
        found
    }

    async fn read(&self, offset: u64, into: Buffers) -> Result<(), ArrayError> {
        let len = into.len() as u64;
        let direct = is_direct(&into);
        if direct && len <= PIECE_BYTES {
            let _claim = self.budget.claim(len).await;
            return self.volume.read(offset, into).await;
        }
        let mut done = 0;
        while done < len {
            let piece = if direct { PIECE_BYTES } else { BUFFER_BYTES_MAX as u64 }.min(len - done);
            let guest = part(&into, done, piece);
            let _claim = self.budget.claim(piece).await;
            if direct {
                self.volume.read(offset + done, guest).await?;
            } else {
                let own = Buffers::from(self.reactor.buffer(to_usize(piece)));
                self.volume.read(offset + done, own.clone()).await?;
                guest.copy_from(&own);
            }
            done += piece;
        }
        Ok(())
    }

    /// The volume copies what it writes, so any memory will do.
    async fn write(&self, offset: u64, from: Buffers) -> Result<(), ArrayError> {
        let len = from.len() as u64;
        if len <= PIECE_BYTES {
            let _claim = self.budget.claim(len).await;
            return self.volume.write(offset, from).await;
        }
        let mut done = 0;
        while done < len {
            let piece = PIECE_BYTES.min(len - done);
            let _claim = self.budget.claim(piece).await;
            self.volume.write(offset + done, part(&from, done, piece)).await?;
            done += piece;
        }
        Ok(())
    }

    /// Virtio 1.2, 5.2.6.1: the name, without a terminating zero where it fills all bytes.
    fn identify(&self, into: &Buffers) -> u64 {
        let len = into.len().min(SERIAL_BYTES);
        into.slice(0..len).copy_from_slice(self.serial.get(..len).unwrap_or_default());
        len as u64
    }
}

/// What times are taken of.
fn asked(operation: &Operation) -> Option<(Kind, u64)> {
    match operation {
        Operation::Read { into, .. } => Some((Kind::Read, into.len() as u64)),
        Operation::Write { from, .. } => Some((Kind::Write, from.len() as u64)),
        Operation::Flush => Some((Kind::Flush, 0)),
        Operation::Discard { .. }
        | Operation::WriteZeroes { .. }
        | Operation::Identify { .. }
        | Operation::Refuse(_) => None,
    }
}

/// A view of a part of an initiator's memory that is to be filled or emptied in steps.
pub(crate) fn part(buffers: &Buffers, start: u64, len: u64) -> Buffers {
    buffers.slice(to_usize(start)..to_usize(start + len))
}

fn is_direct(data: &Buffers) -> bool {
    data.pieces().len() <= PIECES_DIRECT_MAX && data.is_aligned(DIRECT_ALIGN)
}

#[cfg(test)]
mod tests;
