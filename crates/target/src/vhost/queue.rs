//! One queue at work: who looks at the ring, who serves what is in it, and how it comes to rest.
//!
//! ```text
//! poller   sees that there are chains, wakes a worker; shows the used entries that are left and
//!          calls the guest, once per turn of the reactor
//! workers  each pops a chain, serves it to the end, puts it on the used ring, pops the next; one
//!          that has to wait wakes another if there are more. What is used is shown a few at a
//!          time, so that a guest that looks works on them meanwhile
//! listener waits for the guest's kick while the ring is not polled
//! ```
//!
//! Invariants:
//! - a chain leaves the ring in [`Queue::take`] and comes back in [`Queue::put`], nowhere else, so
//!   `in_flight` counts exactly what the guest waits for. The ring's log of that begins and ends in
//!   the same places: in `Ring::pop`, and in the ring's showing what was put;
//! - a queue that is not running pops nothing;
//! - a worker knows where its request writes to guest memory. While there is a log of that, data
//!   and status are marked in it after they were written and before the chain is put, also of a
//!   request that was popped before the log came: nobody has to wait for it, however long a drive
//!   is silent;
//! - [`Queue::stop`] returns when everything that was popped is answered and shown;
//! - once memory of the guest is lost (`sigbus.rs`), nothing more is put: what was popped may have
//!   been read there, or written to nowhere. In the log it stays in flight.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;
use ashlar_reactor::poller::{Poller, PollerId};
use ashlar_reactor::task::TaskId;
use ashlar_reactor::wait_list::WaitList;

use crate::disk::{Disk, Trouble, UNTOLD_MAX};
use crate::limits::Toll;
use crate::quantum::{REQUEST_BYTES_MIN, cost_bytes};
use crate::request::{Answer, Operation, Status};
use crate::vhost::QUEUES_MAX;
use crate::vhost::bell::Bell;
use crate::vhost::block::{BlockRequest, parse, status_byte, written};
use crate::vhost::dirty::{DirtyLog, RingLog};
use crate::vhost::fault::Fault;
use crate::vhost::graveyard::Kept;
use crate::vhost::inflight::Section;
use crate::vhost::memory::{GuestMemory, Window};
use crate::vhost::sigbus::Alarm;
use crate::vhost::vring::{Chain, Popped, Ring, RingSetup, Segment};

/// Most workers, and so most requests under way, of one queue.
pub(crate) const WORKERS_MAX: u16 = 128;
/// Pieces that a worker has room for from the start: data and status of the usual request. One with
/// more has it make room, which it keeps.
const WRITTEN_USUAL: usize = 4;
/// One bit per worker in `Queue::parked`.
const _: () = assert!(WORKERS_MAX as u32 <= u128::BITS);
/// Most chains that one queue pops in one turn of the reactor.
const POPS_PER_TURN_MAX: u16 = 32;
/// What one queue may take in one turn. A larger request is taken whole, and the queue then sits
/// out the turns that it has had in advance (deficit round robin: Shreedhar and Varghese, SIGCOMM
/// 1995).
const TURN_BYTES: u64 = POPS_PER_TURN_MAX as u64 * REQUEST_BYTES_MIN;
/// The same while other exports are asked, of all queues of an export together that have something
/// to do: what others' requests wait for, however deep these are, and however many. A reactor does
/// a tenth less in turns that are so short.
const TURN_BYTES_BESIDE_OTHERS: u64 = 4 * REQUEST_BYTES_MIN;
/// All queues together answer no more in a turn than there is room for.
const _: () = {
    let of_one = (WORKERS_MAX + POPS_PER_TURN_MAX) as usize;
    assert!(of_one * QUEUES_MAX as usize <= UNTOLD_MAX);
};
/// Used entries that are shown together, before the turn's end shows the rest. Each time costs both
/// sides a line of cache that has to change hands.
const SHOWN_TOGETHER: u16 = 8;
/// Wait before a kick file that could not be waited for is tried again.
const LISTEN_AGAIN: Duration = Duration::from_millis(10);

/// What an operator is told of a queue that `fault` has ended.
pub(crate) fn stopped(queue: u16, fault: Fault) -> Trouble {
    Trouble::Initiator(format!("queue {queue} was stopped: {fault}"))
}

/// Running → Broken (the guest did something that cannot be answered) → Stopped, or straight to
/// Stopped. A stopped queue never runs again; its successor is a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    Broken,
    Stopped,
}

impl State {
    fn may_become(self, next: State) -> bool {
        match (self, next) {
            (State::Running, State::Broken | State::Stopped) => true,
            (State::Broken | State::Stopped, State::Stopped) => true,
            (State::Running | State::Broken | State::Stopped, _) => false,
        }
    }
}

/// To unmap its ring is not a reactor's work.
pub(crate) type HungBell = Rc<Kept<Bell>>;

/// The files by which guest and device wake each other. Without a kick file the ring is polled all
/// the time, without a call file the guest polls.
#[derive(Clone, Default)]
pub(crate) struct Bells {
    pub(crate) kick: Option<HungBell>,
    pub(crate) call: Option<HungBell>,
    pub(crate) error: Option<HungBell>,
    /// For the front end, when pages were marked.
    pub(crate) marked: Option<HungBell>,
}

/// False: it has to be done again.
fn ring(bell: &Option<HungBell>) -> bool {
    bell.as_ref().is_none_or(|bell| bell.ring())
}

struct Worker {
    /// Once it has begun.
    task: Cell<Option<TaskId>>,
    /// Where its request writes to guest memory.
    written: RefCell<Vec<Segment>>,
}

impl Worker {
    fn new() -> Worker {
        Worker { task: Cell::new(None), written: RefCell::new(Vec::with_capacity(WRITTEN_USUAL)) }
    }
}

pub(crate) struct Queue {
    index: u16,
    disk: Rc<Disk>,
    state: Cell<State>,
    ring: RefCell<Ring>,
    /// Used anew for every chain: it is read into a request at once.
    chain: RefCell<Chain>,
    memory: RefCell<Rc<GuestMemory>>,
    /// Rings when some of it is lost, the ring and its log included.
    alarm: Arc<Alarm>,
    bells: RefCell<Bells>,
    workers: Vec<Worker>,
    /// Bit by bit, the workers that wait for a chain.
    parked: Cell<u128>,
    /// Bytes that may still be taken in this turn; below zero, what was taken of later turns.
    credit: Cell<i64>,
    in_flight: Cell<u16>,
    dirty: RefCell<Option<DirtyLog>>,
    poller: Cell<Option<PollerId>>,
    /// The reactor leaves the ring alone, until it is roused.
    armed: Cell<bool>,
    /// Workers and listener that have not ended.
    tasks: Cell<u16>,
    ended: WaitList,
    /// All that the process before had in flight was popped, or never will be.
    caught_up: WaitList,
}

impl Queue {
    /// Starts to serve a ring.
    pub(crate) fn start(
        disk: &Rc<Disk>,
        index: u16,
        memory: &Rc<GuestMemory>,
        setup: &RingSetup,
        log: Option<Section>,
        bells: Bells,
    ) -> Result<Rc<Queue>, Fault> {
        let ring = Ring::new(memory, setup, log)?;
        let alarm = memory.alarm().ok_or(Fault::RingUnmapped)?.clone();
        let workers = ring.size().min(WORKERS_MAX);
        let queue = Rc::new(Queue {
            index,
            disk: disk.clone(),
            state: Cell::new(State::Running),
            ring: RefCell::new(ring),
            chain: RefCell::new(Chain::new()),
            memory: RefCell::new(memory.clone()),
            alarm,
            bells: RefCell::new(bells),
            workers: (0..workers).map(|_| Worker::new()).collect(),
            parked: Cell::new(0),
            credit: Cell::new(0),
            in_flight: Cell::new(0),
            dirty: RefCell::default(),
            poller: Cell::new(None),
            armed: Cell::new(false),
            tasks: Cell::new(workers),
            ended: WaitList::default(),
            caught_up: WaitList::default(),
        });
        let reactor = disk.reactor();
        for worker in 0..workers {
            reactor.spawn(queue.clone().work(worker));
        }
        if let Some(kick) = queue.bells.borrow().kick.clone() {
            queue.tasks.set(workers + 1);
            reactor.spawn(queue.clone().listen(kick));
        }
        queue.poller.set(Some(reactor.add_poller(queue.clone())));
        Ok(queue)
    }

    pub(crate) fn state(&self) -> State {
        self.state.get()
    }

    /// See [`Ring::base`].
    pub(crate) fn base(&self) -> u32 {
        self.ring.borrow().base()
    }

    /// See [`Ring::leave`].
    pub(crate) fn leave(&self, front_end_knows: bool) {
        assert!(self.state.get() == State::Stopped && self.tasks.get() == 0);
        self.ring.borrow().leave(front_end_knows);
    }

    /// The guest's memory has changed. Requests under way keep what they have.
    pub(crate) fn set_memory(&self, memory: &Rc<GuestMemory>) {
        self.ring.borrow_mut().find_again(memory);
        *self.memory.borrow_mut() = memory.clone();
    }

    /// Another file to call the guest by. It is called once: a call may just have gone to the old.
    pub(crate) fn set_call(&self, call: Option<HungBell>) {
        self.bells.borrow_mut().call = call;
        self.ring.borrow_mut().owe_call();
        self.rouse();
    }

    pub(crate) fn set_error(&self, error: Option<HungBell>) {
        self.bells.borrow_mut().error = error;
    }

    pub(crate) fn set_marked(&self, marked: Option<HungBell>) {
        self.bells.borrow_mut().marked = marked;
    }

    /// Where to mark what is written to guest memory from now on, by requests under way too;
    /// `ring`: to the ring itself.
    pub(crate) fn log_to(&self, dirty: Option<DirtyLog>, ring: Option<RingLog>) {
        self.ring.borrow_mut().log_to(&self.memory.borrow(), ring);
        *self.dirty.borrow_mut() = dirty;
    }

    /// Stops popping, waits for what is under way, shows it to the guest. Nothing but the caller
    /// holds the queue afterwards, and with it the guest's memory. May be called again.
    pub(crate) async fn stop(self: &Rc<Self>) {
        let reactor = self.reactor();
        self.disk.throttle().hurry();
        // What the process before had in flight no front end could tell the next one.
        let caught_up = || self.state.get() != State::Running || !self.ring.borrow().is_behind();
        self.caught_up.until(reactor, caught_up).await;
        self.become_state(State::Stopped);
        self.wake_workers(u16::MAX);
        // Lets the listener's wait end. Whoever has the other end may take a kick away before the
        // kernel has looked for it.
        while self.tasks.get() > 0 {
            let _ = ring(&self.bells.borrow().kick);
            let again = reactor.now().after(LISTEN_AGAIN);
            self.ended.until_or(reactor, again, || self.tasks.get() == 0).await;
        }
        self.disk.throttle().calm();
        assert!(self.in_flight.get() == 0, "a worker ends when its request is answered");
        self.tell_used();
        if let Some(poller) = self.poller.take() {
            reactor.remove_poller(poller);
        }
    }

    fn reactor(&self) -> &Reactor {
        self.disk.reactor()
    }

    /// There is something to look at: the ring is polled again, if it was not.
    fn rouse(&self) {
        if self.armed.get()
            && let Some(poller) = self.poller.get()
        {
            self.reactor().rouse(poller);
        }
    }

    fn become_state(&self, next: State) {
        let state = self.state.get();
        assert!(state.may_become(next), "{state:?} to {next:?}");
        self.state.set(next);
    }

    /// The guest broke the rules, or has lost its memory: its queue ends here, and nobody else
    /// notices.
    fn fail(&self, fault: Fault) {
        if self.state.get() != State::Running {
            return;
        }
        // What was read of memory that is lost may look like any other fault.
        let fault = if self.alarm.has_rung() { Fault::MemoryLost } else { fault };
        self.become_state(State::Broken);
        let (export, queue) = (self.disk.name(), self.index);
        tracing::warn!(export, queue, %fault, "the guest's queue was stopped");
        self.disk.note(stopped(queue, fault));
        // Whoever does not hear it finds that nothing is answered.
        let _ = ring(&self.bells.borrow().error);
        self.wake_workers(u16::MAX);
        self.caught_up.wake_all(self.reactor());
    }

    /// Wakes up to `count` parked workers.
    fn wake_workers(&self, count: u16) {
        let mut parked = self.parked.get();
        for _ in 0..count {
            if parked == 0 {
                break;
            }
            let worker = parked.trailing_zeros() as usize;
            parked &= parked - 1;
            if let Some(task) = self.workers.get(worker).and_then(|its| its.task.get()) {
                self.reactor().wake(task);
            }
        }
        self.parked.set(parked);
    }

    /// One worker: serves chain after chain until the queue ends.
    async fn work(self: Rc<Self>, worker: u16) {
        let task = self.reactor().current_task();
        self.worker(worker).task.set(Some(task));
        while let Some(BlockRequest { request, status, popped }) = self.next(worker).await {
            let served = std::pin::pin!(self.disk.serve(request));
            let answer = self.or_another(served).await;
            self.put(worker, answer, popped, &status);
        }
        self.end_task();
    }

    fn end_task(&self) {
        let left = self.tasks.get() - 1;
        self.tasks.set(left);
        if left == 0 {
            self.ended.wake_all(self.reactor());
        }
    }

    /// The next request; `None` once the queue does not run any more.
    async fn next(&self, worker: u16) -> Option<BlockRequest> {
        let bit = 1u128 << worker;
        std::future::poll_fn(|_| {
            // Set again below if there is nothing: a wake-up may be for something else.
            self.parked.set(self.parked.get() & !bit);
            match self.take(worker) {
                Ok(Some(request)) => Poll::Ready(Some(request)),
                Ok(None) if self.state.get() == State::Running => {
                    self.parked.set(self.parked.get() | bit);
                    Poll::Pending
                }
                Ok(None) => Poll::Ready(None),
                Err(fault) => {
                    self.fail(fault);
                    Poll::Ready(None)
                }
            }
        })
        .await
    }

    /// Waits for `served`, which is too large to be moved; while it does, another worker takes the
    /// next chain.
    async fn or_another<T>(&self, mut served: Pin<&mut impl Future<Output = T>>) -> T {
        let mut waits = false;
        std::future::poll_fn(|context| {
            let poll = served.as_mut().poll(context);
            if poll.is_pending() && !std::mem::replace(&mut waits, true) && self.has_more() {
                self.wake_workers(1);
            }
            poll
        })
        .await
    }

    fn has_more(&self) -> bool {
        self.credit.get() > 0 && self.ring.borrow().has_more()
    }

    /// Pops a chain and reads it; not too much in a turn, so that queues that share a reactor take
    /// turns.
    fn take(&self, worker: u16) -> Result<Option<BlockRequest>, Fault> {
        let credit = self.credit.get();
        if self.state.get() != State::Running || credit <= 0 {
            return Ok(None);
        }
        let memory = self.memory.borrow();
        let mut chain = self.chain.borrow_mut();
        let mut ring = self.ring.borrow_mut();
        let was_behind = ring.is_behind();
        if !ring.pop(&memory, &mut chain)? {
            return Ok(None);
        }
        if was_behind && !ring.is_behind() {
            self.caught_up.wake_all(self.reactor());
        }
        let mut request = parse(&memory, &chain)?;
        if let Operation::Write { from, .. } = &request.request.operation {
            // Zeroes that take the place of what is lost are never written to the volume.
            from.touch();
        }
        if self.alarm.has_rung() {
            request.request.operation = Operation::Refuse(Status::Failed);
        }
        let toll = Toll::of(&request.request.operation);
        self.credit.set(credit.saturating_sub_unsigned(cost_bytes(toll)));
        self.in_flight.set(self.in_flight.get() + 1);
        self.note_written(worker, &chain, &request.request.operation);
        Ok(Some(request))
    }

    fn note_written(&self, worker: u16, chain: &Chain, operation: &Operation) {
        let (status, data) = written(chain, operation);
        let mut written = self.worker(worker).written.borrow_mut();
        written.clear();
        written.push(status);
        written.extend_from_slice(data);
    }

    fn worker(&self, index: u16) -> &Worker {
        self.workers.get(usize::from(index)).expect("only workers of this queue ask")
    }

    /// Gives a chain back; the guest sees it at the end of this turn, or before.
    fn put(&self, worker: u16, answer: Answer, popped: Popped, status: &Window) {
        assert!(answer.tag == popped.id, "the answer to another request");
        status.store_u8(0, status_byte(answer.status));
        self.mark(worker);
        self.in_flight.set(self.in_flight.get() - 1);
        if self.alarm.has_rung() {
            return self.fail(Fault::MemoryLost);
        }
        // The status byte is written too.
        let bytes = answer.bytes.saturating_add(1);
        let mut ring = self.ring.borrow_mut();
        ring.push_used(popped, bytes);
        if ring.unshown() >= SHOWN_TOGETHER {
            ring.show_used();
        }
        drop(ring);
        self.rouse();
    }

    /// Marks what a worker's request has written.
    fn mark(&self, worker: u16) {
        let dirty = self.dirty.borrow();
        let Some(dirty) = &*dirty else { return };
        let written = self.worker(worker).written.borrow();
        assert!(!written.is_empty(), "each request has a status");
        for Segment { address, len } in &*written {
            dirty.mark(*address, u64::from(*len));
        }
    }

    /// Shows what is left of what was put since the last turn; calls the guest if it wants that.
    fn tell_used(&self) -> bool {
        if self.alarm.has_rung() {
            // What is left was read or written where there may be nothing.
            self.disk.told();
            return false;
        }
        let mut used = self.ring.borrow_mut();
        if !used.is_untold() {
            return false;
        }
        if used.tell_used() && !ring(&self.bells.borrow().call) {
            used.owe_call();
        }
        if self.dirty.borrow().is_some() {
            // Front ends look at the log again and again, rung or not.
            let _ = ring(&self.bells.borrow().marked);
        }
        self.disk.told();
        true
    }

    /// Waits for kicks. They need no answer while the ring is polled.
    async fn listen(self: Rc<Self>, kick: HungBell) {
        while self.state.get() != State::Stopped {
            let wait = self.reactor().submit(Op::readable(kick.descriptor()));
            if wait.await.is_err() {
                self.reactor().sleep(LISTEN_AGAIN).await;
            }
            kick.hush();
            self.rouse();
        }
        self.end_task();
    }
}

impl Poller for Queue {
    fn poll(&self) -> bool {
        let shown = self.tell_used();
        if self.state.get() != State::Running {
            return shown;
        }
        let looked = self.ring.borrow_mut().look();
        let asking = self.disk.queues_asking(looked == Ok(true));
        let turn_bytes = match self.disk.has_neighbours() {
            true => (TURN_BYTES_BESIDE_OTHERS / u64::from(asking)).max(1),
            false => TURN_BYTES,
        };
        // What is not used is not saved up.
        let credit = self.credit.get().saturating_add_unsigned(turn_bytes);
        self.credit.set(credit.min(turn_bytes.cast_signed()));
        match looked {
            // What was seen there may be zeroes.
            _ if self.alarm.has_rung() => {
                self.fail(Fault::MemoryLost);
                true
            }
            // Another turn pays for what was taken before.
            Ok(there) if there && self.credit.get() <= 0 => true,
            // While all workers are at work, the next that is done takes the next chain.
            Ok(there) if there && self.parked.get() != 0 => {
                self.ring.borrow().warm(&self.memory.borrow());
                self.wake_workers(1);
                true
            }
            Ok(_) => shown,
            Err(fault) => {
                self.fail(fault);
                true
            }
        }
    }

    fn arm(&self) -> bool {
        self.armed.set(true);
        // Of a ring that does not run, only what is put is of interest, and that rouses it.
        if self.state.get() != State::Running {
            return false;
        }
        let more = self.ring.borrow().enable_kicks();
        // Who is at work looks for more when done; who was woken and has not run yet does not.
        let is_missed = more && (self.parked.get() != 0 || self.in_flight.get() == 0);
        // Without a kick file nobody would wake the reactor, so it may not sleep.
        is_missed || self.bells.borrow().kick.is_none()
    }

    fn disarm(&self) {
        self.armed.set(false);
        if self.state.get() == State::Running {
            self.ring.borrow().disable_kicks();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
