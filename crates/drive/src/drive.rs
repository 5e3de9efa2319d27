//! One drive of one reactor.
//!
//! Invariants:
//! - an operation is started when it is asked for and only waited for later, so that several run
//!   at the same time;
//! - a failed operation is retried a bounded number of times before the caller hears of it;
//! - a drive that was pulled or has failed starts no further operation;
//! - `flush` covers every write that had completed when it was called.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::executor::{Io, Reactor, Sleep};
use ashlar_reactor::op::{Device, DeviceId, Op, Outcome};
use ashlar_reactor::wait_list::WaitList;

use crate::error::DriveError;
use crate::health::{Health, HealthState};

/// Times an operation is tried, in all.
pub const ATTEMPTS_MAX: u32 = 4;
/// Wait before the second attempt; doubled for each further one.
const BACKOFF_FIRST: Duration = Duration::from_millis(1);

/// What a drive can do. Found out when it is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub bytes: u64,
    /// Smallest unit it reads and writes, in bytes: 512 or 4096.
    pub sector_bytes: u32,
    /// Zeroing all of it takes no longer than a few requests (a file, memory).
    pub zeroes_cheaply: bool,
}

/// Work done since the drive was opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub flushes: u64,
}

pub struct Drive {
    reactor: Reactor,
    device: DeviceId,
    limits: Limits,
    name: String,
    health: Cell<Health>,
    counters: Cell<Counters>,
    flush: FlushState,
}

/// One flush runs at a time; whoever asks meanwhile shares the next one.
struct FlushState {
    /// Writes completed since the drive was opened, and one for what was written before: an engine
    /// that was killed may have left acknowledged writes in the drive's cache.
    writes_completed: Cell<u64>,
    /// Of those, how many the last good flush covered.
    writes_flushed: Cell<u64>,
    running: Cell<bool>,
    error: RefCell<Option<DriveError>>,
    waiting: WaitList,
}

impl Default for FlushState {
    fn default() -> FlushState {
        FlushState {
            writes_completed: Cell::new(1),
            writes_flushed: Cell::new(0),
            running: Cell::new(false),
            error: RefCell::new(None),
            waiting: WaitList::default(),
        }
    }
}

impl Drive {
    pub fn new(reactor: &Reactor, device: Device, limits: Limits, name: &str) -> Rc<Drive> {
        assert!(matches!(limits.sector_bytes, 512 | 4096), "sectors of {}", limits.sector_bytes);
        Rc::new(Drive {
            reactor: reactor.clone(),
            device: reactor.register(device),
            limits,
            name: name.to_owned(),
            health: Cell::default(),
            counters: Cell::default(),
            flush: FlushState::default(),
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    pub fn health(&self) -> Health {
        self.health.get()
    }

    pub fn counters(&self) -> Counters {
        self.counters.get()
    }

    /// Whether it is worth asking.
    pub fn is_alive(&self) -> bool {
        self.health.get().state != HealthState::Failed
    }

    /// The drive was pulled: nothing more is started on it.
    pub fn pull(&self) {
        let mut health = self.health.get();
        health.state = HealthState::Failed;
        self.health.set(health);
    }

    /// Fills `into` from `offset`. Both are multiples of the sector, in address too.
    pub fn read(self: &Rc<Self>, offset: u64, into: Buffers) -> DriveIo {
        self.start(Op::Read { device: self.device, offset, into })
    }

    /// Writes `from` at `offset`; in the drive's cache, perhaps, until `flush`.
    pub fn write(self: &Rc<Self>, offset: u64, from: Buffers) -> DriveIo {
        self.start(Op::Write { device: self.device, offset, from })
    }

    /// Makes a range read as zeroes, and may give its space back.
    pub fn write_zeroes(self: &Rc<Self>, offset: u64, len: u64) -> DriveIo {
        self.start(Op::WriteZeroes { device: self.device, offset, len, unmap: true })
    }

    /// Whether a flush would have anything to do, or an earlier one failed.
    pub fn is_unflushed(&self) -> bool {
        let flushed = self.flush.writes_flushed.get() == self.flush.writes_completed.get();
        !flushed || self.flush.error.borrow().is_some()
    }

    /// Makes every write that has completed before this call durable.
    pub async fn flush(self: &Rc<Self>) -> Result<(), DriveError> {
        let wanted = self.flush.writes_completed.get();
        loop {
            if !self.is_alive() {
                return Err(DriveError::Gone);
            }
            // What a failed flush should have kept may be gone, and no later flush brings it back.
            if let Some(error) = *self.flush.error.borrow() {
                return Err(error);
            }
            if self.flush.writes_flushed.get() >= wanted {
                return Ok(());
            }
            if self.flush.running.get() {
                self.flush.waiting.until(&self.reactor, || !self.flush.running.get()).await;
                // The one that ran may have begun before our writes: look again.
                continue;
            }
            self.run_flush().await?;
        }
    }

    async fn run_flush(self: &Rc<Self>) -> Result<(), DriveError> {
        self.flush.running.set(true);
        let covers = self.flush.writes_completed.get();
        let result = self.start(Op::Flush { device: self.device }).await;
        match result {
            Ok(()) => self.flush.writes_flushed.set(covers),
            Err(error) => *self.flush.error.borrow_mut() = Some(error),
        }
        self.flush.running.set(false);
        self.flush.waiting.wake_all(&self.reactor);
        result
    }

    fn start(self: &Rc<Self>, op: Op) -> DriveIo {
        let state = if self.is_alive() {
            State::Waiting(self.reactor.submit(op.clone()))
        } else {
            State::Refused
        };
        DriveIo { drive: self.clone(), op, attempt: 1, state }
    }

    fn count(&self, op: &Op) {
        let mut counters = self.counters.get();
        match op {
            Op::Read { into, .. } => {
                counters.reads += 1;
                counters.read_bytes += into.len() as u64;
            }
            Op::Write { from, .. } => {
                counters.writes += 1;
                counters.write_bytes += from.len() as u64;
            }
            Op::Flush { .. } => counters.flushes += 1,
            Op::WriteZeroes { len, .. } => {
                counters.writes += 1;
                counters.write_bytes += len;
            }
            Op::Readable { .. } => {}
        }
        self.counters.set(counters);
    }

    fn good_answer(&self, op: &Op) {
        let mut health = self.health.get();
        health.good_answer();
        self.health.set(health);
        self.count(op);
        if matches!(op, Op::Write { .. } | Op::WriteZeroes { .. }) {
            self.flush.writes_completed.set(self.flush.writes_completed.get() + 1);
        }
    }

    fn bad_answer(&self, op: &Op, error: DriveError) {
        let mut health = self.health.get();
        health.error(error, matches!(op, Op::Read { .. }));
        self.health.set(health);
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        // Every operation holds the drive, so none is in flight now.
        self.reactor.unregister(self.device);
    }
}

enum State {
    Waiting(Io),
    BackingOff(Sleep),
    /// Never started: the drive had failed before.
    Refused,
}

/// An operation on a drive, under way. Await it for its result.
#[must_use = "an operation that nobody waits for may fail unseen"]
pub struct DriveIo {
    drive: Rc<Drive>,
    op: Op,
    attempt: u32,
    state: State,
}

impl Future for DriveIo {
    type Output = Result<(), DriveError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        loop {
            match &mut this.state {
                State::Refused => return Poll::Ready(Err(DriveError::Gone)),
                State::BackingOff(sleep) => {
                    if Pin::new(sleep).poll(context).is_pending() {
                        return Poll::Pending;
                    }
                    if !this.drive.is_alive() {
                        return Poll::Ready(Err(DriveError::Gone));
                    }
                    this.state = State::Waiting(this.drive.reactor.submit(this.op.clone()));
                }
                State::Waiting(io) => match Pin::new(io).poll(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(outcome) => match this.judge(outcome) {
                        Some(result) => return Poll::Ready(result),
                        None => this.back_off(),
                    },
                },
            }
        }
    }
}

impl DriveIo {
    /// What the caller hears of an outcome; `None`: try again.
    fn judge(&self, outcome: Outcome) -> Option<Result<(), DriveError>> {
        let expected = match &self.op {
            Op::Read { into, .. } => into.len() as u64,
            Op::Write { from, .. } => from.len() as u64,
            Op::Flush { .. } | Op::WriteZeroes { .. } | Op::Readable { .. } => 0,
        };
        let error = match outcome {
            Ok(moved) if moved >= expected => {
                self.drive.good_answer(&self.op);
                return Some(Ok(()));
            }
            // The device ended early: a file that was cut short, or has no room to grow.
            Ok(_) if matches!(self.op, Op::Write { .. }) => DriveError::NoSpace,
            Ok(_) => DriveError::Media,
            Err(errno) => DriveError::from(errno),
        };
        // A flush that failed may have dropped what it should have kept, and the next one would
        // not know: it is never tried again.
        let hopeless =
            error == DriveError::Gone || error.is_innocent() || matches!(self.op, Op::Flush { .. });
        if !hopeless && self.attempt < ATTEMPTS_MAX {
            return None;
        }
        self.drive.bad_answer(&self.op, error);
        Some(Err(error))
    }

    fn back_off(&mut self) {
        let wait = BACKOFF_FIRST * 2u32.pow(self.attempt - 1);
        self.attempt += 1;
        self.state = State::BackingOff(self.drive.reactor.sleep(wait));
    }
}
