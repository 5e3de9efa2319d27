//! One queue of a controller: a connection, as its reactor serves it.
//!
//! ```text
//! socket ─► receiver ── commands ─► workers ── disk
//!              │  └ data of commands ──┘ │
//! socket ◄─ sender ◄───────── outbox ◄───┘
//! ```
//!
//! The receiver reads all that has come at a time; each worker takes a command, does it and takes
//! the next, and one that has to wait wakes another; the sender sends all that is there at a time.
//!
//! ```text
//! Serving ──► Closing (the host has left, or has to) ──► at rest: all tasks but one have ended
//! ```
//!
//! Invariants:
//! - a host has no more commands under way than its queue has entries, and no more than
//!   [`DATA_BYTES_MAX`] of their data; answers that it does not fetch included. So it keeps only
//!   itself from going on. Nothing more is taken up from one that fetches none;
//! - what was begun on a volume has ended before the connection is at rest.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::net::TcpStream;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use ashlar_reactor::backend::Instant;
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::nvme::command::{
    Command, Completion, DATASET_RANGE_BYTES, DATASET_RANGES_MAX, Status,
};
use ashlar_reactor::nvme::pdu::{DIGEST_BYTES, DataDigest, Digests, Fault, LAST, SUCCESS};
use ashlar_reactor::nvme::remote::QUIESCE_BORNE;
use ashlar_reactor::op::Errno;
use ashlar_reactor::socket::{CUT_OFF, Socket};
use ashlar_reactor::task::TaskId;
use ashlar_reactor::wait_list::WaitList;
use smallvec::SmallVec;

use crate::budget::Budget;
use crate::disk::Trouble;
use crate::nvme_tcp::admin::Admin;
use crate::nvme_tcp::branch::{Branch, WATCH_EVERY};
use crate::nvme_tcp::controller::Controller;
use crate::nvme_tcp::identify::{QUEUE_ENTRIES_MAX, TRANSFER_BYTES_MAX};
use crate::nvme_tcp::inbox::{CAPSULE_DATA_BYTES_MAX, CapsuleData, DataOf, Found, look};
use crate::nvme_tcp::namespace::Namespace;
use crate::nvme_tcp::outbox::Outbox;
use crate::nvme_tcp::port::Seat;
use crate::nvme_tcp::received::{self, Received};
use crate::nvme_tcp::transfers::{Closed, Transfers};
use crate::nvme_tcp::{admin, io};

/// Data of commands that is held for one connection, beside what comes in capsules.
const DATA_BYTES_MAX: usize = 4 << 20;
/// Of one Deallocate.
const RANGES_BYTES_MAX: usize = DATASET_RANGE_BYTES * DATASET_RANGES_MAX;
/// All that may be held for one connection: data, that of capsules, what was not taken up.
pub(crate) const HELD_BYTES_MAX: u64 =
    (DATA_BYTES_MAX + QUEUE_ENTRIES_MAX as usize * CAPSULE_DATA_BYTES_MAX + received::BYTES) as u64;
/// Compare has what is given and what is there at a time; what Deallocate holds while it waits for
/// its turn, which may take long, keeps nobody from that.
const _: () = assert!(
    2 * TRANSFER_BYTES_MAX as usize + QUEUE_ENTRIES_MAX as usize * RANGES_BYTES_MAX
        <= DATA_BYTES_MAX
);
/// One bit per worker in `Connection::parked`.
const _: () = assert!(QUEUE_ENTRIES_MAX as u32 <= u128::BITS);
/// Who has begun a PDU, was asked for data or does not fetch answers has to go on by then.
pub(crate) const GO_ON_WITHIN: Duration = Duration::from_secs(30);
/// So late a host may be with its sign of life, beyond what was agreed.
const KEEP_ALIVE_GRACE: Duration = Duration::from_millis(500);
/// After its keep-alive time a host that is silent has been given up by then: it was looked at, not
/// quite by the half second. A new controller of it waits for what is under way.
pub(crate) const QUIET_WITHIN: Duration = Duration::from_millis(1500);
const _: () = assert!(
    QUIET_WITHIN.as_millis() >= 500 + KEEP_ALIVE_GRACE.as_millis() + WATCH_EVERY.as_millis()
);
const _: () = assert!(QUIET_WITHIN.as_millis() <= QUIESCE_BORNE.as_millis());
/// So long a host that has to go may take to fetch its last answers.
const FAREWELL_WITHIN: Duration = Duration::from_secs(5);

/// Why a connection ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Cut {
    #[error("the host has closed the connection")]
    Left,
    #[error("{0}")]
    Socket(Errno),
    #[error("the host has sent what it must not: {0}")]
    Fault(#[from] Fault),
    #[error("the host ends it, for reason {0}")]
    Term(u16),
    #[error("the host has stopped in the middle of what it sends")]
    Slow,
    #[error("the host does not fetch its answers")]
    Deaf,
    #[error("the host gave no sign of life for {} ms", .0.as_millis())]
    Silent(Duration),
    #[error("it was closed here")]
    Closed,
}

impl Cut {
    /// Whether somebody should know. Hosts may come and leave as they like.
    fn is_news(&self) -> bool {
        match self {
            Cut::Left | Cut::Closed | Cut::Socket(_) => false,
            Cut::Fault(_) | Cut::Term(_) | Cut::Slow | Cut::Deaf | Cut::Silent(_) => true,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Serving,
    Closing,
}

/// What a connection is, once its host has connected a queue on it.
pub(crate) struct Setup {
    pub(crate) stream: TcpStream,
    /// 0: the admin queue.
    pub(crate) queue: u16,
    pub(crate) entries: u16,
    /// How far the host's queue was read.
    pub(crate) head: u16,
    pub(crate) digests: Digests,
    /// Of data to the host (HPDA).
    pub(crate) alignment: u8,
    /// The host wants to know how far its queue was read.
    pub(crate) flow_control: bool,
    pub(crate) controller: Arc<Controller>,
    /// Kept as long as the connection.
    pub(crate) seat: Seat,
}

pub(crate) enum Role {
    Admin(Admin),
    Io,
}

/// A command that waits for a worker.
struct Work {
    command: Command,
    data: Capsule,
}

/// What came with a command.
pub(crate) enum Capsule {
    None,
    Data(Buffers),
    Damaged,
}

/// Data that a worker waits for.
struct Awaited {
    into: Buffers,
    since: Instant,
    worker: TaskId,
}

/// What a command has come to.
pub(crate) struct Reply {
    pub(crate) status: Status,
    pub(crate) result: u64,
    /// For the host, with what is held for it.
    pub(crate) data: Option<(Buffers, Claim)>,
}

impl From<Status> for Reply {
    fn from(status: Status) -> Reply {
        Reply { status, result: 0, data: None }
    }
}

impl Reply {
    pub(crate) fn result(result: impl Into<u64>) -> Reply {
        Reply { status: Status::SUCCESS, result: result.into(), data: None }
    }
}

/// Bytes of [`DATA_BYTES_MAX`].
pub(crate) struct Claim {
    connection: Rc<Connection>,
    bytes: usize,
}

impl Claim {
    /// They are given back when what was put into the outbox was sent.
    fn until_sent(mut self) {
        self.bytes = 0;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.connection.release(self.bytes);
    }
}

pub(crate) struct Connection {
    reactor: Reactor,
    socket: Socket,
    branch: Rc<Branch>,
    controller: Arc<Controller>,
    role: Role,
    queue: u16,
    entries: u16,
    digests: Digests,
    flow_control: bool,
    state: Cell<State>,
    /// Why it ends, if that was decided before the receiver has noticed.
    cut: RefCell<Option<Cut>>,
    /// Commands that were taken up and not answered.
    under_way: Cell<u16>,
    /// How far the host's queue was read.
    head: Cell<u16>,
    waiting: RefCell<VecDeque<Work>>,
    workers: RefCell<Vec<TaskId>>,
    /// Bit by bit, the workers that wait for a command.
    parked: Cell<u128>,
    transfers: RefCell<Transfers<Awaited>>,
    outbox: RefCell<Outbox>,
    sender: Cell<Option<TaskId>>,
    /// Nothing more is put into the outbox.
    outbox_ended: Cell<bool>,
    /// What was in the outbox is being sent.
    outbox_taken: WaitList,
    /// Of [`DATA_BYTES_MAX`]; workers claim it.
    data: Budget,
    /// Namespaces with requests that their hosts were not told of; perhaps all of them.
    untold: RefCell<SmallVec<[u32; 2]>>,
    /// Since when the rest of a PDU is waited for, and since when something is being sent: each
    /// time that a part of it has come or gone, anew.
    part_since: Cell<Option<Instant>>,
    sends_since: Cell<Option<Instant>>,
    /// When data that was asked for came last, or could not come.
    data_came: Cell<Instant>,
    /// Workers and sender that have not ended.
    tasks: Cell<u16>,
    task_ended: WaitList,
    _seat: Seat,
}

impl Connection {
    /// Begins to serve. An error: the socket cannot be used.
    pub(crate) fn start(branch: &Rc<Branch>, setup: Setup) -> std::io::Result<()> {
        let reactor = branch.reactor();
        let Setup { stream, queue, entries, head, digests, alignment, .. } = setup;
        let Setup { flow_control, controller, seat, .. } = setup;
        let role = if queue == 0 { Role::Admin(Admin::new(reactor.now())) } else { Role::Io };
        let connection = Rc::new(Connection {
            reactor: reactor.clone(),
            socket: Socket::new(reactor, stream)?,
            branch: branch.clone(),
            controller,
            role,
            queue,
            entries,
            digests,
            flow_control,
            state: Cell::new(State::Serving),
            cut: RefCell::default(),
            under_way: Cell::new(0),
            head: Cell::new(head),
            waiting: RefCell::new(VecDeque::with_capacity(entries.into())),
            workers: RefCell::default(),
            parked: Cell::new(0),
            transfers: RefCell::new(Transfers::new(entries)),
            outbox: RefCell::new(Outbox::new(reactor, digests, alignment, entries)),
            sender: Cell::new(None),
            outbox_ended: Cell::new(false),
            outbox_taken: WaitList::default(),
            data: Budget::new(reactor, DATA_BYTES_MAX as u64),
            untold: RefCell::default(),
            part_since: Cell::new(None),
            sends_since: Cell::new(None),
            data_came: Cell::new(reactor.now()),
            tasks: Cell::new(1),
            task_ended: WaitList::default(),
            _seat: seat,
        });
        if !branch.join(connection.clone()) {
            return Err(std::io::Error::from(std::io::ErrorKind::ConnectionAborted));
        }
        reactor.spawn(connection.clone().send());
        reactor.spawn(connection.run());
        Ok(())
    }

    pub(crate) fn reactor(&self) -> &Reactor {
        &self.reactor
    }

    pub(crate) fn branch(&self) -> &Branch {
        &self.branch
    }

    pub(crate) fn controller(&self) -> &Arc<Controller> {
        &self.controller
    }

    /// The host's name.
    pub(crate) fn host(&self) -> &str {
        &self.controller.its.host.nqn
    }

    /// Whether commands of its queue are taken up.
    pub(crate) fn is_open(&self) -> bool {
        self.controller.is_open(self.queue)
    }

    /// Whether anybody is there for whom something could be done. Its workers are woken when that
    /// ends.
    pub(crate) fn is_served(&self) -> bool {
        self.is_open() && !self.is_closing()
    }

    pub(crate) fn namespace(&self, id: u32) -> Option<Rc<Namespace>> {
        self.branch.namespace(id, self.host())
    }

    /// Ends it, from here.
    pub(crate) fn cut(&self) {
        self.cut_for(Cut::Closed);
    }

    fn cut_for(&self, why: Cut) {
        self.cut.borrow_mut().get_or_insert(why);
        self.socket.shutdown();
    }

    fn is_closing(&self) -> bool {
        self.state.get() == State::Closing
    }

    /// A namespace came, went or has changed.
    pub(crate) fn namespace_changed(&self, namespace: u32) {
        if let Role::Admin(admin) = &self.role
            && let Some((id, result)) = admin.events.borrow_mut().namespace_changed(namespace)
        {
            self.answer(id, Reply::result(result));
        }
    }

    /// From the first command to rest.
    async fn run(self: Rc<Self>) {
        let received = self.receive().await;
        let why = self.cut.take().unwrap_or(received);
        self.state.set(State::Closing);
        self.note(&why);
        if let Cut::Fault(_) = why {
            // The host is told, and given a while to hear it.
        } else {
            self.socket.shutdown();
        }
        // Whoever waits for data, for room or for a command ends.
        self.waiting.borrow_mut().clear();
        let workers = self.workers.borrow().clone();
        workers.into_iter().for_each(|worker| self.reactor.wake(worker));
        self.task_ended.until(&self.reactor, || self.tasks.get() <= 1).await;
        self.outbox_ended.set(true);
        self.wake_sender();
        let farewell = self.reactor.now().after(FAREWELL_WITHIN);
        let is_sent = || self.tasks.get() == 0;
        self.task_ended.until_or(&self.reactor, farewell, is_sent).await;
        self.socket.shutdown();
        self.task_ended.until(&self.reactor, is_sent).await;
        self.branch.leave(&self);
        self.controller.remove_queue(self.queue);
    }

    fn note(&self, why: &Cut) {
        let (subsystem, host) = (&self.controller.its.subsystem, self.host());
        if !why.is_news() {
            tracing::debug!(subsystem, host, queue = self.queue, %why, "a connection has ended");
            return;
        }
        tracing::warn!(subsystem, host, queue = self.queue, %why, "a connection was ended");
        for namespace in self.branch.visible_to(host) {
            // Hosts name themselves: what a terminal would obey is told by its number.
            let text = format!("the connection of {host:?} was ended: {why}");
            namespace.disk.note(Trouble::Initiator(text));
        }
    }

    /// Takes up what comes, until nothing does.
    async fn receive(self: &Rc<Self>) -> Cut {
        let mut inbox = Received::new(&self.reactor);
        loop {
            match self.take_up(&mut inbox).await {
                Ok(()) => {}
                Err(why) => {
                    if let Cut::Fault(fault) = why {
                        self.outbox.borrow_mut().put_fault(fault, inbox.bytes());
                    }
                    return why;
                }
            }
            if let Err(why) = self.receive_more(&mut inbox).await {
                return why;
            }
        }
    }

    /// Takes up all that is there.
    async fn take_up(self: &Rc<Self>, inbox: &mut Received) -> Result<(), Cut> {
        let mut any = false;
        loop {
            match look(inbox.bytes(), self.digests)? {
                Found::Part => break,
                Found::Command { command, data, bytes } => {
                    let data = match data {
                        CapsuleData::None => Capsule::None,
                        CapsuleData::Damaged => Capsule::Damaged,
                        CapsuleData::At(range) => {
                            let own = self.reactor.buffer(range.len());
                            own.copy_from(&inbox.view(range));
                            Capsule::Data(own.into())
                        }
                    };
                    inbox.take(bytes);
                    self.accept(Work { command, data })?;
                    any = true;
                }
                Found::Data { of, at, digest } => {
                    if std::mem::take(&mut any) {
                        self.wake_worker();
                    }
                    let into = self.place_of(&of)?;
                    inbox.take(at);
                    self.receive_data(inbox, &of, into, digest).await?;
                }
                Found::End { reason } => return Err(Cut::Term(reason)),
            }
        }
        if any {
            self.wake_worker();
        }
        Ok(())
    }

    fn accept(&self, work: Work) -> Result<(), Fault> {
        // By when it came, not when its turn comes: this reactor may have stood still.
        if let Role::Admin(admin) = &self.role {
            admin.heard.set(self.reactor.turn_time());
        }
        // Who keeps to the size of its queue never has so many under way.
        if self.under_way.get() == self.entries {
            return Err(Fault::LimitExceeded);
        }
        self.under_way.set(self.under_way.get() + 1);
        let head = self.head.get() + 1;
        self.head.set(if head == self.entries { 0 } else { head });
        self.waiting.borrow_mut().push_back(work);
        Ok(())
    }

    /// Where data that has been announced belongs.
    fn place_of(&self, of: &DataOf) -> Result<Buffers, Fault> {
        let transfers = self.transfers.borrow();
        let (range, awaited) = transfers.accept(of)?;
        Ok(awaited.into.slice(range.start as usize..range.end as usize))
    }

    /// Waits for more to be there.
    async fn receive_more(&self, inbox: &mut Received) -> Result<(), Cut> {
        if self.outbox.borrow().is_full() {
            let has_room = || !self.outbox.borrow().is_full();
            self.outbox_taken.until(&self.reactor, has_room).await;
            self.data_came.set(self.reactor.turn_time());
        }
        let is_part = !inbox.bytes().is_empty();
        let more = self.receive_into(inbox.room(), is_part).await?;
        inbox.came(more);
        Ok(())
    }

    /// Waits for bytes, at least one; the rest of a PDU does not take long.
    async fn receive_into(&self, room: Buffers, is_part: bool) -> Result<usize, Cut> {
        self.part_since.set(is_part.then(|| self.reactor.turn_time()));
        let more = self.socket.receive(room).await;
        self.part_since.set(None);
        // What is left in a socket that was shut can still be read.
        if !self.is_open() || self.cut.borrow().is_some() {
            return Err(Cut::Closed);
        }
        match more.map_err(Cut::Socket)? {
            0 if is_part => Err(Cut::Socket(CUT_OFF)),
            0 => Err(Cut::Left),
            more => Ok(usize::try_from(more).unwrap_or(usize::MAX)),
        }
    }

    /// Puts data where it belongs: what is there by a copy, the rest straight from the socket.
    async fn receive_data(
        &self,
        inbox: &mut Received,
        of: &DataOf,
        into: Buffers,
        digest: bool,
    ) -> Result<(), Cut> {
        let len = into.len();
        let there = inbox.bytes().len().min(len);
        if there > 0 {
            into.slice(0..there).copy_from(&inbox.view(0..there).into());
            inbox.take(there);
        }
        let mut done = there;
        while done < len {
            let mut room = into.slice(done..len);
            room.append(&inbox.room());
            let more = self.receive_into(room, true).await?;
            self.data_came.set(self.reactor.turn_time());
            let beyond = more.saturating_sub(len - done);
            done += more - beyond;
            inbox.came(beyond);
        }
        let intact = !digest || self.is_intact(inbox, &into).await?;
        let complete = self.transfers.borrow_mut().came(of, intact);
        if complete && let Some(awaited) = self.transfers.borrow().of(of.tag) {
            self.reactor.wake(awaited.worker);
        }
        Ok(())
    }

    /// Whether data fits the digest that follows it.
    async fn is_intact(&self, inbox: &mut Received, data: &Buffers) -> Result<bool, Cut> {
        while inbox.bytes().len() < DIGEST_BYTES {
            self.receive_more(inbox).await?;
        }
        let mut digest = DataDigest::default();
        digest.update_with(data);
        let is_intact = inbox.bytes().starts_with(&digest.finish().to_le_bytes());
        inbox.take(DIGEST_BYTES);
        Ok(is_intact)
    }

    /// Has a worker look at what waits.
    fn wake_worker(self: &Rc<Self>) {
        let parked = self.parked.get();
        if parked != 0 {
            let worker = self.workers.borrow().get(parked.trailing_zeros() as usize).copied();
            self.parked.set(parked & (parked - 1));
            worker.into_iter().for_each(|task| self.reactor.wake(task));
        } else if self.workers.borrow().len() < usize::from(self.entries)
            && self.workers.borrow().len() + 1 == usize::from(self.tasks.get())
        {
            self.tasks.set(self.tasks.get() + 1);
            self.reactor.spawn(self.clone().work());
        }
    }

    /// One worker: does command after command until the connection ends.
    async fn work(self: Rc<Self>) {
        let worker = self.workers.borrow().len();
        self.workers.borrow_mut().push(self.reactor.current_task());
        while let Some(work) = self.next(worker).await {
            let served = std::pin::pin!(self.serve(work));
            self.or_another(served).await;
        }
        self.end_task();
    }

    fn end_task(&self) {
        self.tasks.set(self.tasks.get() - 1);
        self.task_ended.wake_all(&self.reactor);
    }

    /// The next command; `None` once the connection ends.
    async fn next(&self, worker: usize) -> Option<Work> {
        let bit = 1u128 << worker;
        poll_fn(|_| {
            // Set again below if there is nothing: a wake-up may be for something else.
            self.parked.set(self.parked.get() & !bit);
            match self.waiting.borrow_mut().pop_front() {
                Some(work) => Poll::Ready(Some(work)),
                None if self.is_closing() => Poll::Ready(None),
                None => {
                    self.parked.set(self.parked.get() | bit);
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Waits for `served`; while it does, another worker takes the next command.
    async fn or_another(self: &Rc<Self>, mut served: Pin<&mut impl Future<Output = ()>>) {
        let mut waits = false;
        poll_fn(|context| {
            let poll = served.as_mut().poll(context);
            if poll.is_pending()
                && !std::mem::replace(&mut waits, true)
                && !self.waiting.borrow().is_empty()
            {
                self.wake_worker();
            }
            poll
        })
        .await;
    }

    async fn serve(self: &Rc<Self>, Work { command, data }: Work) {
        let id = command.id();
        match &self.role {
            Role::Io => {
                let reply = io::execute(self, &command, data).await;
                let mut untold = self.untold.borrow_mut();
                if !untold.contains(&command.namespace()) {
                    untold.push(command.namespace());
                }
                drop(untold);
                self.answer(id, reply);
            }
            Role::Admin(admin) => {
                if let Some(reply) = admin::execute(self, admin, &command, data).await {
                    self.answer(id, reply);
                }
            }
        }
    }

    /// Waits until so many bytes may be held for this connection. `None`: it ends.
    pub(crate) async fn claim(self: &Rc<Self>, bytes: usize) -> Option<Claim> {
        let is_held = self.data.take_while(bytes as u64, || !self.is_closing()).await;
        is_held.then(|| Claim { connection: self.clone(), bytes })
    }

    fn release(&self, bytes: usize) {
        if bytes > 0 {
            self.data.give_back(bytes as u64);
        }
    }

    /// Asks the host for data of a command, for which there is room, and waits for it.
    pub(crate) async fn fetch(&self, id: u16, bytes: u32) -> Result<Buffers, Status> {
        let into = Buffers::from(self.reactor.buffer(bytes as usize));
        let (since, worker) = (self.reactor.turn_time(), self.reactor.current_task());
        let awaited = Awaited { into: into.clone(), since, worker };
        let tag = self.transfers.borrow_mut().open(id, bytes, awaited).ok_or(Status::INTERNAL)?;
        self.outbox.borrow_mut().put_request(id, tag, bytes);
        self.wake_sender();
        poll_fn(|_| match self.transfers.borrow().is_complete(tag) || self.is_closing() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
        let closed = self.transfers.borrow_mut().close(tag);
        match closed {
            Closed::Whole => Ok(into),
            Closed::Damaged => Err(Status::TRANSIENT_TRANSPORT),
            Closed::Short => Err(Status::DATA_TRANSFER),
        }
    }

    /// So many commands are never answered.
    pub(crate) fn forget(&self, commands: u16) {
        self.under_way.set(self.under_way.get() - commands);
    }

    /// Puts the answer to a command into the outbox.
    pub(crate) fn answer(&self, id: u16, reply: Reply) {
        self.under_way.set(self.under_way.get() - 1);
        let Reply { status, result, data } = reply;
        let mut outbox = self.outbox.borrow_mut();
        let mut told = false;
        if let Some((data, claim)) = data
            && status.is_success()
        {
            // The last data may stand for the completion, where it has nothing more to say.
            told = !self.flow_control && result == 0;
            outbox.put_data(id, &data, if told { LAST | SUCCESS } else { LAST });
            claim.until_sent();
        }
        if !told {
            outbox.put_completion(self.completion(id, status, result));
        }
        drop(outbox);
        self.wake_sender();
    }

    fn completion(&self, id: u16, status: Status, result: u64) -> Completion {
        let low = |word: u64| u32::try_from(word & 0xffff_ffff).unwrap_or_default();
        Completion {
            result: low(result),
            result_high: low(result >> 32),
            submission_head: if self.flow_control { self.head.get() } else { 0 },
            queue: self.queue,
            id,
            phase: false,
            status,
        }
    }

    fn wake_sender(&self) {
        if let Some(sender) = self.sender.get() {
            self.reactor.wake(sender);
        }
    }

    /// Sends what is in the outbox, all at a time, until no more comes or nobody listens.
    async fn send(self: Rc<Self>) {
        self.sender.set(Some(self.reactor.current_task()));
        while self.has_something_to_send().await {
            let batch = self.outbox.borrow_mut().take();
            self.outbox_taken.wake_all(&self.reactor);
            let data_bytes = batch.data_bytes;
            for part in batch.parts() {
                self.sends_since.set(Some(self.reactor.turn_time()));
                if self.socket.send(&part).await.is_err() {
                    self.socket.shutdown();
                    break;
                }
            }
            self.sends_since.set(None);
            self.release(data_bytes);
            self.tell_disks();
        }
        self.end_task();
    }

    /// The host was told of all that was done.
    fn tell_disks(&self) {
        for id in self.untold.borrow_mut().drain(..) {
            if id == io::ALL_NAMESPACES {
                let all = self.branch.visible_to(self.host());
                all.iter().for_each(|its| its.disk.told());
            } else {
                // Also if the host may not see it any more.
                self.branch.told(id);
            }
        }
    }

    async fn has_something_to_send(&self) -> bool {
        poll_fn(|_| match (self.outbox.borrow().is_empty(), self.outbox_ended.get()) {
            (false, _) => Poll::Ready(true),
            (true, true) => Poll::Ready(false),
            (true, false) => Poll::Pending,
        })
        .await
    }

    /// Ends it if its host is late.
    pub(crate) fn cut_if_late(&self, now: Instant) {
        if let Some(why) = self.is_late(now) {
            self.cut_for(why);
        }
    }

    /// Whether the host does what it has to, in time.
    fn is_late(&self, now: Instant) -> Option<Cut> {
        let is_over = |since: Instant| now.since(since) > GO_ON_WITHIN;
        let transfers = self.transfers.borrow();
        // Nothing can come while nothing is received.
        let waiting = transfers.waiting().filter(|_| !self.outbox.borrow().is_full());
        let data = waiting.map(|its| its.since.max(self.data_came.get()));
        if self.part_since.get().into_iter().chain(data).any(is_over) {
            return Some(Cut::Slow);
        }
        if self.sends_since.get().is_some_and(is_over) {
            return Some(Cut::Deaf);
        }
        let silence = match (&self.role, self.controller.its.keep_alive) {
            (Role::Admin(admin), Some(most)) => Some((now.since(admin.heard.get()), most)),
            (Role::Admin(_), None) | (Role::Io, _) => None,
        };
        let (silent, most) = silence?;
        (silent > most + KEEP_ALIVE_GRACE).then_some(Cut::Silent(silent))
    }
}
