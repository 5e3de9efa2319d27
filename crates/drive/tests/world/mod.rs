//! A backend with a clock of its own. Operations are answered as the test says, in the order in
//! which they are submitted: at once, after a time, or only when it says so.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_drive::health::HealthLimits;
use ashlar_reactor::backend::{Backend, Instant};
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::{Device, DeviceId, Done, Errno, Op, Ticket};

#[derive(Clone, Copy)]
pub enum Answer {
    After(Duration, Result<(), i32>),
    Never,
    /// At once, less than was asked for.
    Short,
}

struct Pending {
    ticket: Ticket,
    device: Option<DeviceId>,
    bytes: u64,
    /// `None`: not until the test says so.
    at: Option<Instant>,
    result: Result<(), i32>,
}

#[derive(Default)]
struct Inner {
    now: Instant,
    script: VecDeque<Answer>,
    pending: Vec<Pending>,
    let_go: usize,
    devices: u32,
    /// When each operation began that came in time.
    begun: Vec<Instant>,
}

/// The test's hold on the world.
#[derive(Clone, Default)]
pub struct World(Rc<RefCell<Inner>>);

/// Runs a test in a world of its own.
pub fn run(test: impl AsyncFnOnce(Reactor, World) + 'static) -> Reactor {
    let world = World::default();
    let reactor = Reactor::new(Box::new(world.clone()), Order::Fifo);
    let its = reactor.clone();
    reactor.block_on(async move { test(its, world).await }).expect("it does not hang");
    reactor
}

impl World {
    pub fn drive(&self, reactor: &Reactor, health_limits: HealthLimits) -> Rc<Drive> {
        let limits = Limits { bytes: 1 << 20, sector_bytes: 512, zeroes_cheaply: true };
        let device = Device::Simulated { drive: 0 };
        Drive::with_health_limits(reactor, device, limits, "d", health_limits)
    }

    /// How the next operation that has no answer yet is answered; without: well, after 1 us.
    pub fn answer(&self, answer: Answer) {
        self.0.borrow_mut().script.push_back(answer);
    }

    /// What was never to be answered, is, well.
    pub fn answer_all(&self) {
        self.answer_after(Duration::ZERO);
    }

    pub fn answer_after(&self, wait: Duration) {
        let mut inner = self.0.borrow_mut();
        let at = inner.now.after(wait);
        inner.pending.iter_mut().for_each(|pending| pending.at = pending.at.or(Some(at)));
    }

    /// The clock moves on while nobody can look.
    pub fn pause(&self, time: Duration) {
        let mut inner = self.0.borrow_mut();
        inner.now = inner.now.after(time);
    }

    /// Operations that came in time.
    pub fn begun(&self) -> usize {
        self.0.borrow().begun.len()
    }

    /// When those began that came after the first so many.
    pub fn begun_after(&self, count: usize) -> Vec<Instant> {
        self.0.borrow().begun[count..].to_vec()
    }

    /// Devices that the reactor has let go.
    pub fn let_go(&self) -> usize {
        self.0.borrow().let_go
    }
}

impl Backend for World {
    fn now(&self) -> Instant {
        self.0.borrow().now
    }

    fn register(&mut self, _: Device) -> DeviceId {
        let mut inner = self.0.borrow_mut();
        inner.devices += 1;
        DeviceId(inner.devices - 1)
    }

    fn unregister(&mut self, device: DeviceId) {
        let mut inner = self.0.borrow_mut();
        let is_its = |pending: &Pending| pending.device == Some(device);
        assert!(!inner.pending.iter().any(is_its), "let go with operations in flight");
        inner.let_go += 1;
    }

    fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        let mut inner = self.0.borrow_mut();
        let device = op.device();
        if inner.now > until {
            let (at, result) = (Some(inner.now), Err(libc::ECANCELED));
            inner.pending.push(Pending { ticket, device, bytes: 0, at, result });
            return;
        }
        let now = inner.now;
        inner.begun.push(now);
        let bytes = match op {
            Op::Read { into, .. } => into.len() as u64,
            Op::Write { from, .. } => from.len() as u64,
            Op::Flush { .. } | Op::WriteZeroes { .. } | Op::Descriptor { .. } => 0,
        };
        let answer = inner.script.pop_front();
        let (at, result) = match answer.unwrap_or(Answer::After(Duration::from_micros(1), Ok(()))) {
            Answer::After(wait, result) => (Some(inner.now.after(wait)), result),
            Answer::Never => (None, Ok(())),
            Answer::Short => (Some(inner.now), Ok(())),
        };
        let bytes = if matches!(answer, Some(Answer::Short)) { bytes / 2 } else { bytes };
        inner.pending.push(Pending { ticket, device, bytes, at, result });
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let mut inner = self.0.borrow_mut();
        let now = inner.now;
        inner.pending.retain(|pending| {
            let due = pending.at.is_some_and(|at| at <= now);
            if due {
                let outcome = pending.result.map(|()| pending.bytes).map_err(Errno);
                done.push(Done { ticket: pending.ticket, outcome });
            }
            !due
        });
    }

    fn idle(&mut self, until: Option<Instant>) -> bool {
        let mut inner = self.0.borrow_mut();
        let next = inner.pending.iter().filter_map(|pending| pending.at).chain(until).min();
        let Some(next) = next else { return false };
        inner.now = inner.now.max(next);
        true
    }
}
