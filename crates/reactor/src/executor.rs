//! The reactor: a run-to-completion executor for one core.
//!
//! Tasks are woken by id, not by `Waker`: a wait list, a timer or a slot remembers the id of the
//! task that polls it. So a wake-up is a push to a queue, with no atomics. A wake-up may be
//! spurious; whoever waits looks again.
//!
//! Rules: futures are polled only by their reactor, and are never cancelled by dropping while an
//! operation's buffers matter (the slot owns those). The executor's only freedom is which ready
//! task runs next: first come first served, or drawn by seed in the simulator.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::backend::{Backend, Instant};
use crate::buffer::{Buffer, BufferPool, Buffers};
use crate::op::{Device, DeviceId, Done, Op, Outcome, Ticket};
use crate::poller::{Poller, PollerId, Pollers};
use crate::polling::Watch;
use crate::prng::Prng;
use crate::registry::{Key, Registry};
use crate::slots::Slots;
use crate::task::TaskId;
use crate::timer::Timers;
use crate::traffic::Traffic;

/// Polls in a row without any completion, timer or poller finding work: a spin, and so a bug.
const POLLS_WITHOUT_PROGRESS_MAX: u32 = 1_000_000;
/// Tasks run between two looks at the backend, so that completions are not starved.
const TASKS_PER_TURN_MAX: usize = 256;

/// Operations that a task does without waiting before it is made to wait for one: a task over
/// drives of memory would keep all others from running.
const AT_ONCE_MAX: u32 = 16;

/// Which ready task runs next.
pub enum Order {
    Fifo,
    Seeded(Prng),
}

type TaskFuture = Pin<Box<dyn Future<Output = ()>>>;

struct Task {
    /// Out while it is being polled, and after it has ended.
    future: Option<TaskFuture>,
    queued: bool,
    ended: bool,
}

#[derive(Default)]
struct Tasks {
    tasks: Vec<Task>,
    free: Vec<TaskId>,
    ready: VecDeque<TaskId>,
}

struct Inner {
    tasks: RefCell<Tasks>,
    order: RefCell<Order>,
    current: Cell<TaskId>,
    slots: RefCell<Slots>,
    timers: RefCell<Timers>,
    pollers: RefCell<Pollers>,
    registry: Registry,
    pool: Rc<BufferPool>,
    done: RefCell<Vec<Done>>,
    poll_window: Cell<Duration>,
    polls_without_progress: Cell<u32>,
    /// How many more operations the current task may do without waiting.
    at_once_left: Cell<u32>,
    stopping: Cell<bool>,
    turn_time: Cell<Instant>,
    traffic: Traffic,
    /// Tasks that wait for memory of operations that nobody waits for.
    reclaiming: RefCell<Vec<TaskId>>,
    // Last, so that everything that may still point into the backend is dropped before it.
    backend: RefCell<Box<dyn Backend>>,
}

/// A handle to the reactor of this core. Cloning is cheap; all clones are one reactor.
#[derive(Clone)]
pub struct Reactor {
    inner: Rc<Inner>,
}

impl Reactor {
    pub fn new(backend: Box<dyn Backend>, order: Order) -> Reactor {
        Reactor::with_pool(backend, order, BufferPool::new())
    }

    /// A reactor with the buffers of one that has ended.
    pub fn with_pool(backend: Box<dyn Backend>, order: Order, pool: Rc<BufferPool>) -> Reactor {
        let inner = Inner {
            tasks: RefCell::default(),
            order: RefCell::new(order),
            current: Cell::new(TaskId(u32::MAX)),
            slots: RefCell::default(),
            timers: RefCell::default(),
            pollers: RefCell::default(),
            registry: Registry::default(),
            pool,
            done: RefCell::default(),
            poll_window: Cell::new(Duration::ZERO),
            polls_without_progress: Cell::new(0),
            at_once_left: Cell::new(0),
            stopping: Cell::new(false),
            turn_time: Cell::new(backend.now()),
            traffic: Traffic::default(),
            reclaiming: RefCell::default(),
            backend: RefCell::new(backend),
        };
        Reactor { inner: Rc::new(inner) }
    }

    /// How long to keep looking for work, at most, before sleeping. It is less where looking does
    /// not pay: see `polling.rs`.
    pub fn set_poll_window(&self, window: Duration) {
        self.inner.poll_window.set(window);
    }

    pub fn now(&self) -> Instant {
        self.inner.backend.borrow().now()
    }

    /// What is asked of this core from outside: whoever serves that counts it there.
    pub fn traffic(&self) -> &Traffic {
        &self.inner.traffic
    }

    /// See [`Backend::unix_s`].
    pub fn unix_s(&self) -> u64 {
        self.inner.backend.borrow().unix_s()
    }

    /// See [`Backend::kernel_calls`].
    pub fn kernel_calls(&self) -> u64 {
        self.inner.backend.borrow().kernel_calls()
    }

    /// When the backend was last looked at: `now`, less a turn of the reactor at most, for free.
    pub fn turn_time(&self) -> Instant {
        self.inner.turn_time.get()
    }

    /// An aligned buffer of engine memory with arbitrary content.
    pub fn buffer(&self, len: usize) -> Buffer {
        self.inner.pool.take(len)
    }

    /// Keeps `thing` on this reactor under a key that other threads may hold.
    pub fn publish<T: 'static>(&self, thing: Rc<T>) -> Key<T> {
        self.inner.registry.publish(thing)
    }

    /// What `key` names; `None` once it was withdrawn.
    pub fn get<T: 'static>(&self, key: Key<T>) -> Option<Rc<T>> {
        self.inner.registry.get(key)
    }

    /// Forgets `key`.
    pub fn withdraw<T: 'static>(&self, key: Key<T>) -> Option<Rc<T>> {
        self.inner.registry.withdraw(key)
    }

    pub fn register(&self, device: Device) -> DeviceId {
        self.inner.backend.borrow_mut().register(device)
    }

    /// See [`Backend::twin`].
    pub fn twin(&self, device: DeviceId) -> Option<Device> {
        self.inner.backend.borrow().twin(device)
    }

    /// Lets a device go. Who waits for an operation on it hears ENODEV now; the backend keeps the
    /// operation's memory, and the device, until it is done with them.
    pub fn unregister(&self, device: DeviceId) {
        let (wake, idle) = self.inner.slots.borrow_mut().revoke(device);
        wake.into_iter().for_each(|task| self.wake(task));
        if idle {
            self.inner.backend.borrow_mut().unregister(device);
        }
    }

    /// The first moment at which an operation that the backend has on `device` will have taken
    /// longer than `allowed`; `None`: it has none. Slow: not for every operation.
    pub fn deadline(&self, device: DeviceId, allowed: impl Fn(&Op) -> Duration) -> Option<Instant> {
        self.inner.slots.borrow().deadline(device, allowed)
    }

    /// Waits until this memory is the caller's alone: an operation that nobody waits for any more,
    /// because its device was let go, may still fill it, for as long as the kernel likes.
    pub async fn reclaim(&self, memory: &Buffers) {
        std::future::poll_fn(|_| {
            if !self.inner.slots.borrow().fills_unheard(memory) {
                return Poll::Ready(());
            }
            self.inner.reclaiming.borrow_mut().push(self.current_task());
            Poll::Pending
        })
        .await;
    }

    /// Runs `op` without a wait, if its device is memory of ours and the current task has not done
    /// so too often since it last waited. `None`: nothing was done, submit it.
    #[inline]
    pub fn run_now(&self, op: &Op) -> Option<Outcome> {
        self.at_once(|backend| backend.run_now(op))
    }

    /// The same of a read, whose memory remains the caller's.
    #[inline]
    pub fn read_now(&self, device: DeviceId, offset: u64, into: &Buffers) -> Option<Outcome> {
        self.at_once(|backend| backend.read_now(device, offset, into))
    }

    /// See [`Backend::lend`]; the same holds for the current task.
    #[inline]
    pub fn lend(&self, device: DeviceId, offset: u64, len: usize) -> Option<Buffer> {
        self.at_once(|backend| backend.lend(device, offset, len))
    }

    #[inline]
    fn at_once<T>(&self, run: impl FnOnce(&mut dyn Backend) -> Option<T>) -> Option<T> {
        let left = self.inner.at_once_left.get().checked_sub(1)?;
        let outcome = run(&mut **self.inner.backend.borrow_mut())?;
        self.inner.at_once_left.set(left);
        self.inner.polls_without_progress.set(0);
        Some(outcome)
    }

    /// Starts `op` now; the returned future only waits for it. Several may be started before the
    /// first is awaited, and then run at the same time.
    pub fn submit(&self, op: Op) -> Io {
        self.submit_until(op, Instant::MAX)
    }

    /// The same, unless the backend comes to it after `until`: then it ends with
    /// [`LATE`](crate::op::LATE).
    pub fn submit_until(&self, op: Op, until: Instant) -> Io {
        let mut slots = self.inner.slots.borrow_mut();
        let started = self.turn_time();
        let (ticket, op) = slots.start(op, started);
        self.inner.backend.borrow_mut().submit(ticket, op, until);
        Io { reactor: self.clone(), ticket: Some(ticket), started, ended: started }
    }

    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let mut tasks = self.inner.tasks.borrow_mut();
        let task = Task { future: Some(Box::pin(future)), queued: true, ended: false };
        let id = match tasks.free.pop() {
            Some(id) => {
                tasks.tasks[id.0 as usize] = task;
                id
            }
            None => {
                tasks.tasks.push(task);
                TaskId(u32::try_from(tasks.tasks.len() - 1).expect("fewer than 2^32 tasks"))
            }
        };
        tasks.ready.push_back(id);
    }

    /// The task that is being polled. Panics outside a task.
    pub fn current_task(&self) -> TaskId {
        let id = self.inner.current.get();
        assert!(id.0 != u32::MAX, "not inside a task of this reactor");
        id
    }

    /// Lets a task look again at what it waits for.
    pub fn wake(&self, id: TaskId) {
        let mut tasks = self.inner.tasks.borrow_mut();
        let task = &mut tasks.tasks[id.0 as usize];
        if !task.queued && !task.ended {
            task.queued = true;
            tasks.ready.push_back(id);
        }
    }

    /// Lets every other ready task run first.
    pub async fn yield_now(&self) {
        let mut yielded = false;
        std::future::poll_fn(|_| {
            if std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            self.wake(self.current_task());
            Poll::Pending
        })
        .await;
    }

    /// Lets others run, if the current task has done so much without waiting that it may not do so
    /// many operations more; at most [`AT_ONCE_MAX`] can be asked for. Whether it has come to that.
    pub async fn breathe(&self, operations: u32) -> bool {
        let spent = self.inner.at_once_left.get() < operations.min(AT_ONCE_MAX);
        if spent {
            self.yield_now().await;
        }
        spent
    }

    /// Ends at `deadline`.
    pub fn sleep_until(&self, deadline: Instant) -> Sleep {
        Sleep { reactor: self.clone(), deadline, entry: None }
    }

    pub fn sleep(&self, wait: Duration) -> Sleep {
        self.sleep_until(self.now().after(wait))
    }

    pub fn add_poller(&self, poller: Rc<dyn Poller>) -> PollerId {
        self.inner.pollers.borrow_mut().add(poller)
    }

    pub fn remove_poller(&self, id: PollerId) {
        // Dropped when they are borrowed no more.
        let removed = self.inner.pollers.borrow_mut().remove(id);
        drop(removed);
    }

    /// Lets a poller be polled again, if it was armed.
    pub fn rouse(&self, id: PollerId) {
        self.inner.pollers.borrow_mut().rouse(id);
    }

    /// Makes `run` return after the current turn.
    pub fn stop(&self) {
        self.inner.stopping.set(true);
    }

    /// Drops every task and operation unfinished: the end of a simulated life. The backend has
    /// ended before, so nothing that is dropped can reach a drive any more.
    pub fn abandon(&self) {
        let count = self.inner.tasks.borrow().tasks.len();
        for index in 0..count {
            // Taken out first: what is dropped may wake other tasks.
            let future = self.inner.tasks.borrow_mut().tasks[index].future.take();
            drop(future);
        }
        let pollers = self.inner.pollers.take();
        drop(pollers);
        self.inner.slots.take().end();
        self.inner.tasks.borrow_mut().ready.clear();
    }

    /// Runs tasks until `stop`, or until nothing can ever happen again.
    pub fn run(&self) {
        self.inner.stopping.set(false);
        self.inner.turn_time.set(self.now());
        let mut watch = Watch::default();
        while !self.inner.stopping.get() {
            if self.turn() {
                watch.work(self.turn_time(), self.inner.poll_window.get());
                continue;
            }
            // A task may have asked to stop in this very turn.
            if self.inner.stopping.get() {
                return;
            }
            if self.has_ready() || !watch.nothing(self.turn_time()) {
                std::hint::spin_loop();
                continue;
            }
            if !self.sleep_for_work() {
                return;
            }
        }
    }

    /// Runs until `future` has ended and returns its output; `None` if it never will.
    pub fn block_on<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Option<T> {
        let output = Rc::new(RefCell::new(None));
        let (slot, reactor) = (output.clone(), self.clone());
        self.spawn(async move {
            let value = future.await;
            *slot.borrow_mut() = Some(value);
            reactor.stop();
        });
        self.run();
        output.borrow_mut().take()
    }

    /// One look at everything. True if any completion, timer or poller brought work.
    fn turn(&self) -> bool {
        self.run_ready();
        let progress = self.reap() | self.fire_timers() | self.poll_pollers();
        if progress {
            self.inner.polls_without_progress.set(0);
        }
        progress
    }

    fn has_ready(&self) -> bool {
        !self.inner.tasks.borrow().ready.is_empty()
    }

    fn run_ready(&self) {
        for _ in 0..TASKS_PER_TURN_MAX {
            let Some((id, mut future)) = self.next_ready() else { return };
            let polls = self.inner.polls_without_progress.get() + 1;
            assert!(polls < POLLS_WITHOUT_PROGRESS_MAX, "task {id:?} spins");
            self.inner.polls_without_progress.set(polls);
            let outer = self.inner.current.replace(id);
            self.inner.at_once_left.set(AT_ONCE_MAX);
            let poll = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            self.inner.current.set(outer);
            match poll {
                Poll::Pending => {
                    self.inner.tasks.borrow_mut().tasks[id.0 as usize].future = Some(future);
                }
                Poll::Ready(()) => {
                    // Dropped before the id is free: its drops may still wake it.
                    drop(future);
                    let mut tasks = self.inner.tasks.borrow_mut();
                    tasks.tasks[id.0 as usize].ended = true;
                    if !tasks.tasks[id.0 as usize].queued {
                        tasks.free.push(id);
                    }
                }
            }
        }
    }

    fn next_ready(&self) -> Option<(TaskId, TaskFuture)> {
        let mut tasks = self.inner.tasks.borrow_mut();
        loop {
            let id = match &mut *self.inner.order.borrow_mut() {
                Order::Fifo => tasks.ready.pop_front()?,
                Order::Seeded(prng) => {
                    let count = tasks.ready.len();
                    if count == 0 {
                        return None;
                    }
                    tasks.ready.swap_remove_back(prng.index(count)).expect("an index below count")
                }
            };
            let task = &mut tasks.tasks[id.0 as usize];
            task.queued = false;
            match task.future.take() {
                Some(future) => return Some((id, future)),
                // It ended while a wake-up for it was queued; now nothing refers to it.
                None => tasks.free.push(id),
            }
        }
    }

    fn reap(&self) -> bool {
        let mut done = self.inner.done.take();
        let now = {
            let mut backend = self.inner.backend.borrow_mut();
            backend.reap(&mut done);
            backend.now()
        };
        self.inner.turn_time.set(now);
        let any = !done.is_empty();
        for done in done.drain(..) {
            let completion = self.inner.slots.borrow_mut().complete(done, now);
            if let Some(task) = completion.wake {
                self.wake(task);
            }
            if let Some(device) = completion.idle_device {
                self.inner.backend.borrow_mut().unregister(device);
            }
            if completion.unheard {
                self.inner.reclaiming.take().into_iter().for_each(|task| self.wake(task));
            }
        }
        *self.inner.done.borrow_mut() = done;
        any
    }

    fn fire_timers(&self) -> bool {
        if self.inner.timers.borrow().is_empty() {
            return false;
        }
        let now = self.turn_time();
        let mut any = false;
        loop {
            let Some(task) = self.inner.timers.borrow_mut().pop_due(now) else { return any };
            self.wake(task);
            any = true;
        }
    }

    fn poll_pollers(&self) -> bool {
        let window_max = self.inner.poll_window.get();
        self.inner.pollers.borrow_mut().poll(self.turn_time(), window_max)
    }

    /// Sleeps in the backend. False if nothing can ever wake it.
    fn sleep_for_work(&self) -> bool {
        let awake = self.inner.pollers.borrow_mut().arm_all();
        awake || {
            let until = self.inner.timers.borrow().next_deadline();
            self.inner.backend.borrow_mut().idle(until)
        }
    }
}

/// Waits for one operation that is already under way.
#[must_use = "an operation that nobody waits for may fail unseen"]
pub struct Io {
    reactor: Reactor,
    ticket: Option<Ticket>,
    started: Instant,
    ended: Instant,
}

impl Io {
    /// Its outcome, and the operation itself to be tried again; not if its device was let go, since
    /// the backend may still be at it.
    pub fn poll_with_op(&mut self) -> Poll<(Outcome, Option<Op>)> {
        let ticket = self.ticket.expect("not polled after completion");
        let task = self.reactor.current_task();
        let heard = self.reactor.inner.slots.borrow_mut().take(ticket, task);
        let Some(heard) = heard else { return Poll::Pending };
        (self.ticket, self.ended) = (None, heard.ended);
        Poll::Ready((heard.outcome, heard.op))
    }

    /// How long it took, once it was awaited: from the turn that started it to the turn that saw
    /// it completed. Its task may have looked later.
    pub fn latency(&self) -> Duration {
        self.ended().since(self.started)
    }

    pub fn started(&self) -> Instant {
        self.started
    }

    /// The turn that saw it completed, once it was awaited.
    pub fn ended(&self) -> Instant {
        assert!(self.ticket.is_none(), "it is still under way");
        self.ended
    }
}

impl Future for Io {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Outcome> {
        self.poll_with_op().map(|(outcome, _)| outcome)
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.reactor.inner.slots.borrow_mut().abandon(ticket);
        }
    }
}

/// Waits for a moment.
pub struct Sleep {
    reactor: Reactor,
    deadline: Instant,
    /// Of the timers, and the task that it wakes.
    entry: Option<(u64, TaskId)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        if self.reactor.now() >= self.deadline {
            return Poll::Ready(());
        }
        let task = self.reactor.current_task();
        // It may have been handed to another task since.
        if self.entry.is_none_or(|(_, woken)| woken != task) {
            let mut timers = self.reactor.inner.timers.borrow_mut();
            if let Some((old, _)) = self.entry {
                timers.remove(self.deadline, old);
            }
            let entry = timers.add(self.deadline, task);
            drop(timers);
            self.entry = Some((entry, task));
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some((entry, _)) = self.entry {
            self.reactor.inner.timers.borrow_mut().remove(self.deadline, entry);
        }
    }
}
