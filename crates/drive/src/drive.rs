//! One drive of one reactor.
//!
//! Invariants:
//! - an operation is started when it is asked for and only waited for later, so that several run
//!   at the same time;
//! - a failed operation is retried a bounded number of times before the caller hears of it;
//! - a drive that was pulled or has failed starts no further operation, and whoever waits for one
//!   hears at once that the drive is gone. The kernel may still work on it: only when it is done is
//!   the device let go (`Reactor::unregister`), and may it be used anew;
//! - an operation that nobody answers fails the drive after `HealthLimits::answer_within`, if it is
//!   by itself or siblings that answer can stand for it; else after a multiple of that;
//! - nothing is written after its gate's time, each attempt looked at by itself;
//! - `flush` covers every write that had completed when it was called, or failed: some of that may
//!   be in the drive's cache, and is read until it is lost;
//! - a drive whose flush failed fails with it, if siblings stand for it: it may show old data.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use ashlar_reactor::backend::Instant;
use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::executor::{Io, Reactor, Sleep};
use ashlar_reactor::op::{Device, DeviceId, LATE, Op, Outcome};
use ashlar_reactor::traffic::{self, Kind, Traffic};
use ashlar_reactor::wait_list::WaitList;
use ashlar_reactor::window::Window;

use crate::asked::{Asked, Shown, Span};
use crate::error::DriveError;
use crate::gate::Gate;
use crate::health::{During, Health, HealthLimits, HealthState};
use crate::latency::{Latency, summary};
use crate::slow::{Evidence, Opinion, Verdict};
use crate::unreadable::Unreadable;

/// Times an operation is tried, in all.
pub const ATTEMPTS_MAX: u32 = 4;
/// Wait before the second attempt; doubled for each further one.
const BACKOFF_FIRST: Duration = Duration::from_millis(1);
/// What a drive is asked for to know whether it answers: whole sectors of any drive, in bytes.
const BLOCK_ASKED_FOR: usize = 4096;

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
    /// Attempts after the first.
    pub retries: u64,
}

pub struct Drive {
    pub(crate) reactor: Reactor,
    pub(crate) device: DeviceId,
    limits: Cell<Limits>,
    pub(crate) health_limits: HealthLimits,
    name: String,
    health: Cell<Health>,
    unreadable: Unreadable,
    counters: Cell<Counters>,
    opinion: Cell<Opinion>,
    /// Each attempt that succeeded by itself. How much is under way, the backend knows.
    traffic: Traffic,
    /// Some of what other reactors read, for its times only.
    elsewhere: RefCell<Window>,
    flush: FlushState,
    gate: RefCell<Option<Rc<Gate>>>,
    /// Operations that wait to be tried again, or at the gate.
    held_back: WaitList,
    pub(crate) watch: Cell<Watch>,
    siblings: RefCell<Option<Weak<dyn Siblings>>>,
    /// When it last did something well.
    answered: Cell<Instant>,
    /// When the youngest of its writes that went well began.
    wrote: Cell<Instant>,
    is_asked: Cell<bool>,
}

/// Whether someone looks after operations that are not answered.
#[derive(Clone, Copy)]
pub(crate) enum Watch {
    Off,
    On,
    Late(Late),
}

/// What was seen at the last look, when the time of an operation was almost over or more than that.
#[derive(Clone, Copy)]
pub(crate) struct Late {
    /// When its time ends.
    pub(crate) deadline: Instant,
    /// Of the first such look, or of a later one if that is long ago.
    pub(crate) since: Instant,
    /// Those siblings that had answered something since then could stand for this drive.
    pub(crate) replaceable: bool,
    /// The silence was counted.
    pub(crate) counted: bool,
}

/// The array that a drive is a member of. It is asked, not told (but of a lost cache): who could
/// stand for a drive is so for a moment only.
pub trait Siblings {
    /// Whether those other members that are `fit` hold all that `drive` does.
    fn stand_for(&self, drive: &Drive, fit: &dyn Fn(&Drive) -> bool) -> bool;
    /// A flush failed: what that drive shows may be old from now on, and nobody may read it past
    /// the array. The other members that flush just now.
    fn flushing_beside(&self, drive: &Drive) -> Vec<Rc<Drive>>;
    /// Asks those others for a block that have not.
    fn ask_whether_they_answer(&self, drive: &Drive, since: Instant);
}

/// One flush runs at a time; whoever asks meanwhile shares the next one.
struct FlushState {
    /// Writes completed or failed since the drive was opened, and one for what was written before:
    /// an engine that was killed may have left acknowledged writes in the drive's cache.
    writes_completed: Cell<u64>,
    /// How many those were when the last of them completed.
    last_completed: Cell<u64>,
    /// Of those, how many the last good flush covered.
    writes_flushed: Cell<u64>,
    running: Cell<bool>,
    /// How many have ended.
    ended: Cell<u64>,
    error: RefCell<Option<DriveError>>,
    /// It has failed, and it is not decided yet whether the drive is given up for that.
    undecided: Cell<bool>,
    waiting: WaitList,
}

impl Default for FlushState {
    fn default() -> FlushState {
        FlushState {
            writes_completed: Cell::new(1),
            last_completed: Cell::new(1),
            writes_flushed: Cell::new(0),
            running: Cell::new(false),
            ended: Cell::new(0),
            error: RefCell::new(None),
            undecided: Cell::new(false),
            waiting: WaitList::default(),
        }
    }
}

impl Drive {
    pub fn new(reactor: &Reactor, device: Device, limits: Limits, name: &str) -> Rc<Drive> {
        Drive::with_health_limits(reactor, device, limits, name, HealthLimits::default())
    }

    pub fn with_health_limits(
        reactor: &Reactor,
        device: Device,
        limits: Limits,
        name: &str,
        health_limits: HealthLimits,
    ) -> Rc<Drive> {
        assert!(matches!(limits.sector_bytes, 512 | 4096), "sectors of {}", limits.sector_bytes);
        Rc::new(Drive {
            reactor: reactor.clone(),
            device: reactor.register(device),
            limits: Cell::new(limits),
            health_limits,
            name: name.to_owned(),
            health: Cell::default(),
            unreadable: Unreadable::default(),
            counters: Cell::default(),
            opinion: Cell::default(),
            traffic: Traffic::default(),
            elsewhere: RefCell::default(),
            flush: FlushState::default(),
            gate: RefCell::default(),
            held_back: WaitList::default(),
            watch: Cell::new(Watch::Off),
            siblings: RefCell::default(),
            answered: Cell::default(),
            wrote: Cell::default(),
            is_asked: Cell::new(false),
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it had no room lately.
    pub fn is_full(&self) -> bool {
        self.health().is_full(&self.health_limits)
    }

    pub fn limits(&self) -> Limits {
        self.limits.get()
    }

    /// The device has more bytes than when it was attached.
    pub fn grow(&self, bytes: u64) {
        let limits = self.limits.get();
        self.limits.set(Limits { bytes: bytes.max(limits.bytes), ..limits });
    }

    pub fn health(&self) -> Health {
        self.health.get()
    }

    pub fn counters(&self) -> Counters {
        self.counters.get()
    }

    /// How long it took lately, here and elsewhere.
    pub fn latency(&self) -> Latency {
        let now = self.reactor.now();
        let reads = self.traffic.reads_with(&mut self.elsewhere.borrow_mut(), now);
        let writes = self.traffic.report(now).writes.lately;
        Latency { reads: summary(reads), writes: summary(writes) }
    }

    /// Another reactor has read from its [twin](Drive::twin), and this is how long it took: one of
    /// many reads, perhaps, so it counts for [`latency`](Drive::latency), and not as work done.
    pub fn was_read_elsewhere(&self, took: Duration) {
        self.elsewhere.borrow_mut().add(self.reactor.turn_time(), took, 0);
    }

    /// What was asked of it here, but for how much is under way.
    pub fn traffic(&self) -> traffic::Report {
        self.traffic.report(self.reactor.now())
    }

    /// Notes what its siblings say of its pace, now (see [`crate::slow`]).
    pub fn compared(&self, reads: Verdict, writes: Verdict) {
        self.opinion.set(self.opinion.get().after(reads, writes));
    }

    /// Why it is slow; `None`: it is not, by what it was compared with.
    pub fn slow(&self) -> Option<Evidence> {
        self.opinion.get().evidence()
    }

    /// Whoever keeps checksums says that it returned a block other than it was written.
    pub fn note_wrong_block(&self) {
        self.judge(|health| {
            health.wrong_blocks += 1;
            health.lied();
        });
    }

    /// The same of a checksum that the drive keeps.
    pub fn note_wrong_checksum(&self) {
        self.judge(|health| {
            health.wrong_checksums += 1;
            health.lied();
        });
    }

    /// Whom it is asked about from now on, before it is given up.
    pub fn introduce(&self, siblings: Weak<dyn Siblings>) {
        *self.siblings.borrow_mut() = Some(siblings);
    }

    /// From now on it is by itself.
    pub fn part(&self) {
        *self.siblings.borrow_mut() = None;
    }

    /// `None`: it is by itself.
    pub(crate) fn siblings(&self) -> Option<Rc<dyn Siblings>> {
        self.siblings.borrow().as_ref()?.upgrade()
    }

    /// Whether its array cannot do without it.
    fn is_needed(&self) -> bool {
        self.siblings().is_some_and(|its| !its.stand_for(self, &|_| true))
    }

    /// Whether it has answered something well since then.
    pub fn has_answered(&self, since: Instant) -> bool {
        self.answered.get() >= since
    }

    pub(crate) fn has_written(&self, since: Instant) -> bool {
        self.wrote.get() >= since
    }

    /// Reads a block of it, so that it shows whether it answers; one at a time.
    pub fn ask_whether_it_answers(self: &Rc<Self>) {
        if !self.is_asked.replace(true) {
            let (drive, into) = (self.clone(), self.reactor.buffer(BLOCK_ASKED_FOR));
            self.reactor.spawn(async move {
                // Its answer was noted, if there was one.
                let _ = drive.probe(0, into.into()).await;
                drive.is_asked.set(false);
            });
        }
    }

    /// What is written from now on has to pass `gate`.
    pub fn put_behind(&self, gate: Rc<Gate>) {
        *self.gate.borrow_mut() = Some(gate);
    }

    /// The same device, for another reactor to read from beside this one; `None`: one reactor has
    /// it alone. What is read there says nothing of the drive's health here, and of its pace what
    /// [`was_read_elsewhere`](Drive::was_read_elsewhere) is told.
    pub fn twin(&self) -> Option<Device> {
        self.reactor.twin(self.device).filter(|_| self.shows_what_it_took())
    }

    /// Whether it is worth asking.
    pub fn is_alive(&self) -> bool {
        self.health.get().state != HealthState::Failed
    }

    /// Alive, and no flush has failed of which it is not decided what that means.
    fn shows_what_it_took(&self) -> bool {
        self.is_alive() && !self.flush.undecided.get()
    }

    /// The drive was pulled: nothing more is started on it, and nobody waits for it any more.
    pub fn pull(&self) {
        self.judge(Health::fail);
    }

    /// Changes the drive's health, and draws the consequence.
    pub(crate) fn judge(&self, change: impl FnOnce(&mut Health)) {
        let was_alive = self.is_alive();
        let mut health = self.health.get();
        change(&mut health);
        self.health.set(health);
        if was_alive && !self.is_alive() {
            self.reactor.unregister(self.device);
            self.held_back.wake_all(&self.reactor);
        }
    }

    /// Fills `into` from `offset`. Both are multiples of the sector, in address too.
    pub fn read(self: &Rc<Self>, offset: u64, into: Buffers) -> DriveIo {
        self.start(Op::Read { device: self.device, offset, into }, None)
    }

    /// The same, if the drive is memory and has done it when this returns; else nothing was done.
    #[inline]
    pub fn read_now(&self, offset: u64, into: &Buffers) -> bool {
        let asked = Asked::Read { bytes: into.len() as u64 };
        self.does_now(asked, |reactor| reactor.read_now(self.device, offset, into))
    }

    /// What a drive of memory has there, without a copy; it shows what is written later, so it is
    /// not to be kept over a wait, but by who keeps others from writing there. `None`: read it.
    pub fn lend(&self, offset: u64, len: usize) -> Option<Buffer> {
        let lend = || self.reactor.lend(self.device, offset, len);
        let bytes = self.shows_what_it_took().then(lend).flatten()?;
        self.good_answer(Asked::Read { bytes: len as u64 }, Span::of_now(&self.reactor));
        Some(bytes)
    }

    /// As `read`, where some blocks are known to be unreadable, to find out which: those say
    /// nothing more about the drive.
    pub fn probe(self: &Rc<Self>, offset: u64, into: Buffers) -> DriveIo {
        let mut io = self.read(offset, into);
        if let Some(under_way) = &mut io.under_way {
            under_way.is_probe = true;
        }
        io
    }

    /// Writes `from` at `offset`; in the drive's cache, perhaps, until `flush`.
    pub fn write(self: &Rc<Self>, offset: u64, from: Buffers) -> DriveIo {
        self.start(Op::Write { device: self.device, offset, from }, self.gate.borrow().clone())
    }

    /// The same, whatever its gate says: for what the gate depends on.
    pub fn write_past_gate(self: &Rc<Self>, offset: u64, from: Buffers) -> DriveIo {
        self.start(Op::Write { device: self.device, offset, from }, None)
    }

    /// Makes a range read as zeroes, and may give its space back.
    pub fn write_zeroes(self: &Rc<Self>, offset: u64, len: u64) -> DriveIo {
        let op = Op::WriteZeroes { device: self.device, offset, len, unmap: true };
        self.start(op, self.gate.borrow().clone())
    }

    /// Whether a flush would have anything to do, or an earlier one failed.
    pub fn is_unflushed(&self) -> bool {
        let flushed = self.flush.writes_flushed.get() == self.flush.writes_completed.get();
        !flushed || self.has_failed_flush()
    }

    /// What was in its cache may be lost: what it shows may be old.
    pub fn has_failed_flush(&self) -> bool {
        self.flush.error.borrow().is_some()
    }

    /// A flush is under way, and may still fail.
    pub fn is_flushing(&self) -> bool {
        self.flush.running.get() && !self.has_failed_flush()
    }

    /// Makes every write that has completed before this call durable, and what has landed of those
    /// that failed.
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
        let result = self.start(Op::Flush { device: self.device }, None).await;
        match result {
            Ok(()) => self.flush.writes_flushed.set(covers),
            Err(error) if self.flush.last_completed.get() > self.flush.writes_flushed.get() => {
                *self.flush.error.borrow_mut() = Some(error);
                self.distrust().await;
            }
            // Nobody was told that anything of it is there: it can be tried again.
            Err(_) => {}
        }
        self.flush.running.set(false);
        self.flush.ended.set(self.flush.ended.get() + 1);
        self.flush.waiting.wake_all(&self.reactor);
        result
    }

    /// Gives the drive up before anyone reads it again, if its siblings stand for it. They may be
    /// losing their caches, too, just now: two that were given up on each other's word would leave
    /// less than two that are read on.
    async fn distrust(&self) {
        let Some(siblings) = self.siblings() else { return };
        self.flush.undecided.set(true);
        // Who waits for this one knows enough.
        self.flush.waiting.wake_all(&self.reactor);
        let flushing = siblings.flushing_beside(self).into_iter();
        let flushing: Vec<_> = flushing.map(|its| (its.flush.ended.get(), its)).collect();
        for (ended, other) in flushing {
            let is_known = || other.flush.ended.get() > ended || other.has_failed_flush();
            other.flush.waiting.until(&self.reactor, is_known).await;
        }
        if siblings.stand_for(self, &|its| !its.has_failed_flush()) {
            self.judge(Health::fail);
        }
        self.flush.undecided.set(false);
        self.held_back.wake_all(&self.reactor);
    }

    fn start(self: &Rc<Self>, op: Op, gate: Option<Rc<Gate>>) -> DriveIo {
        let asked = Asked::of(&op);
        // Nobody else has a drive of memory, so it is never too late; but its gate may be shut.
        let may_pass = gate.as_ref().is_none_or(|gate| gate.until().is_some());
        if may_pass && self.does_now(asked, |reactor| reactor.run_now(&op)) {
            return DriveIo { under_way: None };
        }
        let state = self.attempt(op, gate.as_deref());
        let drive = self.clone();
        let under_way = UnderWay { drive, gate, asked, attempt: 1, is_probe: false, state };
        DriveIo { under_way: Some(under_way) }
    }

    /// Whether the drive is memory and has done it already. It does the same again if that went
    /// wrong.
    #[inline]
    fn does_now(&self, asked: Asked, run: impl FnOnce(&Reactor) -> Option<Outcome>) -> bool {
        let done = self.shows_what_it_took()
            && run(&self.reactor).is_some_and(|outcome| asked.is_answered_by(outcome));
        if done {
            self.good_answer(asked, Span::of_now(&self.reactor));
        }
        done
    }

    fn attempt(self: &Rc<Self>, op: Op, gate: Option<&Gate>) -> State {
        match gate.map_or(Some(Instant::MAX), Gate::until) {
            Some(_) if self.is_alive() && self.flush.undecided.get() => State::Held(Box::new(op)),
            Some(until) if self.is_alive() => State::Waiting(self.submit(op, until)),
            Some(_) | None => State::Refused,
        }
    }

    /// If so, the current task is woken when that may have changed.
    fn has_to_wait(&self, gate: &Gate) -> bool {
        let closed = gate.until().is_some_and(|until| self.reactor.now() > until);
        let waits = closed && self.is_alive();
        if waits {
            gate.wait(&self.reactor);
            self.held_back.add(&self.reactor);
        }
        waits
    }

    fn submit(self: &Rc<Self>, op: Op, until: Instant) -> Io {
        self.be_watched();
        self.reactor.submit_until(op, until)
    }

    fn count(&self, asked: Asked) {
        let mut counters = self.counters.get();
        match asked {
            Asked::Read { bytes } => {
                counters.reads += 1;
                counters.read_bytes += bytes;
            }
            Asked::Write { bytes } | Asked::WriteZeroes { bytes } => {
                counters.writes += 1;
                counters.write_bytes += bytes;
            }
            Asked::Flush => counters.flushes += 1,
        }
        self.counters.set(counters);
    }

    fn good_answer(&self, asked: Asked, Span { began, ended }: Span) {
        let mut health = self.health.get();
        health.good_answer(&self.health_limits);
        self.health.set(health);
        self.has_been_heard(ended);
        self.count(asked);
        let kind = match asked {
            Asked::Read { bytes } => Some((Kind::Read, bytes)),
            Asked::Write { bytes } => Some((Kind::Write, bytes)),
            Asked::Flush => Some((Kind::Flush, 0)),
            Asked::WriteZeroes { .. } => None,
        };
        if let Some((kind, bytes)) = kind {
            self.traffic.took(kind, bytes, ended.since(began), self.reactor.turn_time());
        }
        if asked.changes_drive() {
            self.note_unflushed();
            self.flush.last_completed.set(self.flush.writes_completed.get());
            self.wrote.set(self.wrote.get().max(began));
        }
    }

    fn has_been_heard(&self, ended: Instant) {
        self.answered.set(self.answered.get().max(ended));
    }

    fn bad_answer(&self, asked: Asked, error: DriveError) {
        let during = match asked {
            Asked::Read { .. } => During::Read,
            Asked::Write { .. } | Asked::Flush | Asked::WriteZeroes { .. } => During::Write,
        };
        if asked.changes_drive() && error.leaves_a_part() {
            self.note_unflushed();
        }
        self.judge(|health| health.error(&self.health_limits, error, during, || self.is_needed()));
    }

    /// What a person needs who looks for the reason: what was asked, and what the system said.
    fn tell(&self, op: &Op, outcome: Outcome, attempts: u32) {
        let (drive, asked) = (&self.name, Shown(op));
        match outcome {
            Ok(moved) => tracing::warn!(drive, attempts, "{asked} ended after {moved} bytes"),
            Err(errno) => tracing::warn!(drive, attempts, "{asked} failed: {errno}"),
        }
    }

    /// There may be more in the drive's cache: also what was written before there was this handle.
    pub fn note_unflushed(&self) {
        self.flush.writes_completed.set(self.flush.writes_completed.get() + 1);
    }

    fn count_retry(&self) {
        let mut counters = self.counters.get();
        counters.retries += 1;
        self.counters.set(counters);
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        // A failed one was let go when it failed.
        if self.is_alive() {
            self.reactor.unregister(self.device);
        }
    }
}

/// What is rare is boxed: this is moved with every operation.
enum State {
    Waiting(Io),
    BackingOff(Box<(Sleep, Op)>),
    /// What the drive shows may be old: it waits until it is decided whether the drive is given up.
    Held(Box<Op>),
    /// It came too late, and waits for the gate to move on. How often others were turned away.
    AtGate(Box<(u64, Op)>),
    /// Not started: the drive has failed, its gate was shut, or it was turned away there.
    Refused,
}

/// An operation on a drive. Await it for its result.
#[must_use = "an operation that nobody waits for may fail unseen"]
pub struct DriveIo {
    /// `None`: it was done at once.
    under_way: Option<UnderWay>,
}

struct UnderWay {
    drive: Rc<Drive>,
    /// What it has to pass.
    gate: Option<Rc<Gate>>,
    asked: Asked,
    attempt: u32,
    is_probe: bool,
    state: State,
}

impl Future for DriveIo {
    type Output = Result<(), DriveError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.get_mut().under_way {
            None => Poll::Ready(Ok(())),
            Some(under_way) => under_way.poll(context),
        }
    }
}

impl UnderWay {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), DriveError>> {
        loop {
            match &mut self.state {
                State::Refused => return Poll::Ready(Err(DriveError::Gone)),
                State::BackingOff(waiting) => {
                    if !self.drive.is_alive() {
                        return Poll::Ready(Err(DriveError::Gone));
                    }
                    if Pin::new(&mut waiting.0).poll(context).is_pending() {
                        self.drive.held_back.add(&self.drive.reactor);
                        return Poll::Pending;
                    }
                    self.drive.count_retry();
                    self.try_again();
                }
                State::Held(_) => {
                    if self.drive.is_alive() && self.drive.flush.undecided.get() {
                        self.drive.held_back.add(&self.drive.reactor);
                        return Poll::Pending;
                    }
                    self.try_again();
                }
                State::AtGate(waiting) => {
                    let gate = self.gate.as_ref().expect("it came too late for one");
                    if gate.turned_away() != waiting.0 {
                        self.state = State::Refused;
                    } else if self.drive.has_to_wait(gate) {
                        return Poll::Pending;
                    } else {
                        self.try_again();
                    }
                }
                State::Waiting(io) => {
                    let Poll::Ready((outcome, op)) = io.poll_with_op() else {
                        return Poll::Pending;
                    };
                    let span = Span::of(io);
                    if let Some(result) = self.hear(outcome, op, span) {
                        return Poll::Ready(result);
                    }
                }
            }
        }
    }

    /// What the caller hears of an outcome; `None`: it goes on.
    fn hear(
        &mut self,
        outcome: Outcome,
        op: Option<Op>,
        span: Span,
    ) -> Option<Result<(), DriveError>> {
        // Its device was let go; or who asked what its cache may have lost was not told of this.
        let Some(op) = op.filter(|_| self.drive.is_alive()) else {
            return Some(Err(DriveError::Gone));
        };
        if let Some(gate) = self.gate.as_ref().filter(|_| outcome == LATE) {
            self.state = State::AtGate(Box::new((gate.turned_away(), op)));
            return None;
        }
        if matches!(self.asked, Asked::Read { .. }) && self.drive.flush.undecided.get() {
            // It may be what a flush has lost that failed: it is read again, here or from others.
            self.drive.has_been_heard(span.ended);
            self.state = State::Held(Box::new(op));
            return None;
        }
        let result = self.judge(&op, outcome, span);
        if result.is_none() {
            self.back_off(op);
        }
        result
    }

    /// What the caller hears of an outcome; `None`: try again.
    fn judge(&self, op: &Op, outcome: Outcome, span: Span) -> Option<Result<(), DriveError>> {
        let error = match outcome {
            _ if self.asked.is_answered_by(outcome) => {
                self.drive.unreadable.answered(op);
                self.drive.good_answer(self.asked, span);
                return Some(Ok(()));
            }
            // The device ended early: a file that was cut short, or has no room to grow.
            Ok(_) if matches!(self.asked, Asked::Write { .. }) => DriveError::NoSpace,
            Ok(_) => DriveError::Media,
            // That would say that the drive is well. But what it was to keep may be gone.
            Err(errno) if self.asked == Asked::Flush && DriveError::from(errno).is_innocent() => {
                DriveError::Io(errno)
            }
            Err(errno) => DriveError::from(errno),
        };
        // A flush that failed may have dropped what it should have kept, and the next one would
        // not know: it is never tried again.
        let hopeless =
            error == DriveError::Gone || error.is_innocent() || self.asked == Asked::Flush;
        if !hopeless && self.attempt < ATTEMPTS_MAX {
            return None;
        }
        let says_more = || !self.is_probe && self.drive.unreadable.is_new(op);
        if error != DriveError::Media || says_more() {
            self.drive.bad_answer(self.asked, error);
            if !error.is_innocent() {
                self.drive.tell(op, outcome, self.attempt);
            }
        }
        Some(Err(error))
    }

    fn back_off(&mut self, op: Op) {
        // A guest's memory that is lost in part looks to the kernel like a drive that reads or
        // writes less, or fails. Touched by this process it becomes memory again (whoever mapped
        // it sees to that, and to its guest), so that no drive is blamed. By a write: a read of a
        // hole in a file finds zeroes, and leaves it a hole.
        match &op {
            Op::Read { into, .. } => into.fill_zero(),
            Op::Write { from, .. } => from.touch(),
            Op::Flush { .. } | Op::WriteZeroes { .. } | Op::Descriptor { .. } => {}
        }
        let wait = BACKOFF_FIRST * 2u32.pow(self.attempt - 1);
        self.attempt += 1;
        self.state = State::BackingOff(Box::new((self.drive.reactor.sleep(wait), op)));
    }

    /// What waited does so no more.
    fn try_again(&mut self) {
        let op = match std::mem::replace(&mut self.state, State::Refused) {
            State::BackingOff(waited) => waited.1,
            State::AtGate(waited) => waited.1,
            State::Held(op) => *op,
            State::Waiting(_) | State::Refused => unreachable!("it waited for something"),
        };
        self.state = self.drive.attempt(op, self.gate.as_deref());
    }
}
