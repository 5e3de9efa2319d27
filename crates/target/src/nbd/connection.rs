//! One client's connection, from the greeting to the goodbye.
//!
//! ```text
//! socket ─► inbox ─► haggle, then request ─► worker ─► disk
//! socket ◄─ sender ◄─────────── outbox ◄──── reply ◄──┘
//! ```
//!
//! Invariants:
//! - what was taken up is answered before the connection ends, unless the client does not listen.
//!   What still waits for its turn when the client is gone without a goodbye is never done;
//! - a client has no more under way than its two [`lane`](crate::nbd::lane)s have room for, answers
//!   that it does not fetch included: so it can keep only itself from going on.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use ashlar_format::units::to_usize;
use ashlar_raid::block_status::BlockStatus;
use ashlar_reactor::backend::Instant;
use ashlar_reactor::buffer::{BUFFER_BYTES_MAX, Buffers};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Errno;
use ashlar_reactor::socket::{CUT_OFF, Socket};
use ashlar_reactor::wait_list::WaitList;
use zerocopy::{FromBytes, IntoBytes};

use crate::disk::{Disk, Trouble};
use crate::limits::{Toll, Wanted};
use crate::nbd::haggle::{ALLOCATION_ID, End, Facts, Haggle};
use crate::nbd::inbox::Inbox;
use crate::nbd::lane::{Lane, Traffic};
use crate::nbd::reply::{Outbox, Reply, head};
use crate::nbd::request::{Agreed, Asked, Breach, Command, read_request};
use crate::nbd::wire::{
    ChunkStatus, FIXED_NEWSTYLE, Greeting, NO_ZEROES, OPTION_HEADER_BYTES, OPTION_MAGIC,
    OptionHeader, REQUEST_HEADER_BYTES, Refusal, RequestHeader, SERVER_MAGIC, state,
};
use crate::nbd::workers::Task;
use crate::request::{Operation, Permit, Request, Status};

/// Names are of 4096 bytes at most; with a few queries.
const OPTION_BYTES_MAX: u32 = 16 << 10;
const OPTIONS_MAX: usize = 64;
/// Who has not agreed on anything by then has to go.
const HAGGLE_WITHIN: Duration = Duration::from_secs(10);
/// How often a client that is not listened to, since it has no room, is looked at for its end.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// So long a client that is to go may take to fetch its last answers.
const FAREWELL_WITHIN: Duration = Duration::from_secs(5);

/// Why a connection ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Cut {
    #[error("{0}")]
    Socket(Errno),
    #[error("{0}")]
    Breach(#[from] Breach),
    #[error("{0}")]
    Haggle(#[from] End),
    #[error("it has unknown client flags {0:#x}")]
    Flags(u32),
    #[error("an option begins with {0:#018x}")]
    OptionMagic(u64),
    #[error("an option of {0} bytes; {OPTION_BYTES_MAX} are possible")]
    OptionBytes(u32),
    #[error("it sends options, and nothing else")]
    Options,
    #[error("it did not say what it wants for {} s", HAGGLE_WITHIN.as_secs())]
    Silent,
}

impl Cut {
    /// Whether somebody should know. Clients may come, look and leave as they like.
    fn is_news(&self) -> bool {
        match self {
            Cut::Socket(_) | Cut::Haggle(End::Aborted) => false,
            Cut::Breach(_)
            | Cut::Haggle(End::NoSuchExport(_))
            | Cut::Flags(_)
            | Cut::OptionMagic(_)
            | Cut::OptionBytes(_)
            | Cut::Options
            | Cut::Silent => true,
        }
    }
}

impl From<Errno> for Cut {
    fn from(errno: Errno) -> Cut {
        Cut::Socket(errno)
    }
}

/// Haggling → Serving → Leaving; whoever does not agree leaves at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Haggling,
    Serving,
    Leaving,
}

impl State {
    fn may_become(self, next: State) -> bool {
        match (self, next) {
            (State::Haggling, State::Serving) => true,
            (State::Haggling | State::Serving | State::Leaving, State::Leaving) => true,
            (State::Haggling | State::Serving | State::Leaving, _) => false,
        }
    }
}

pub(super) struct Connection {
    disk: Rc<Disk>,
    socket: Socket,
    state: Cell<State>,
    state_changed: WaitList,
    agreed: Cell<Agreed>,
    /// The client was lost, or cut off: what it waits for is of no use to anybody.
    is_lost: Cell<bool>,
    lanes: [Traffic; Lane::COUNT],
    outbox: Outbox,
    to_send: WaitList,
    /// The sender is at work.
    sends: Cell<bool>,
    /// Something has been sent, or will not be.
    sent: WaitList,
}

impl Connection {
    pub(super) fn new(disk: &Rc<Disk>, socket: Socket) -> Rc<Connection> {
        Rc::new(Connection {
            disk: disk.clone(),
            socket,
            state: Cell::new(State::Haggling),
            state_changed: WaitList::default(),
            agreed: Cell::default(),
            is_lost: Cell::new(false),
            lanes: Default::default(),
            outbox: Outbox::default(),
            to_send: WaitList::default(),
            sends: Cell::new(false),
            sent: WaitList::default(),
        })
    }

    /// It has agreed on something, or leaves.
    pub(super) fn is_serving(&self) -> bool {
        self.state.get() != State::Haggling
    }

    /// Takes no more requests: the connection ends once those under way are answered.
    pub(super) fn leave(&self) {
        self.become_state(State::Leaving);
    }

    fn become_state(&self, next: State) {
        let state = self.state.get();
        assert!(state.may_become(next), "{state:?} to {next:?}");
        self.state.set(next);
        self.state_changed.wake_all(self.reactor());
    }

    fn reactor(&self) -> &Reactor {
        self.disk.reactor()
    }

    /// The whole life of it.
    pub(super) async fn live(self: Rc<Self>) {
        let mut inbox = Inbox::new(self.reactor());
        let until = self.reactor().now().after(HAGGLE_WITHIN);
        let agreed = self.while_staying(until, self.haggle(&mut inbox)).await;
        match agreed.unwrap_or(Err(Cut::Silent)) {
            Ok(agreed) if self.state.get() == State::Haggling => {
                self.agreed.set(agreed);
                self.become_state(State::Serving);
                self.sends.set(true);
                self.reactor().spawn(self.clone().send());
                let end = self.while_staying(Instant::MAX, self.take_requests(&mut inbox)).await;
                if let Some(Err(cut)) = end {
                    self.note(&cut);
                    self.is_lost.set(true);
                    self.lanes.iter().for_each(|lane| lane.workers.wake_all(self.reactor()));
                }
            }
            // It was asked to leave meanwhile.
            Ok(_) => {}
            Err(_) if self.state.get() == State::Leaving => {}
            Err(cut) => self.note(&cut),
        }
        self.finish().await;
    }

    fn note(&self, cut: &Cut) {
        if cut.is_news() {
            let export = self.disk.name();
            tracing::warn!(export, %cut, "a client was disconnected");
            let trouble = format!("a client was disconnected: {cut}");
            self.disk.note(Trouble::Initiator(trouble));
        }
    }

    /// Runs `work`, unless the connection is to end or `until` has come before.
    async fn while_staying<T>(&self, until: Instant, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        let mut late = std::pin::pin!(self.reactor().sleep_until(until));
        std::future::poll_fn(|context| {
            if self.state.get() == State::Leaving {
                return Poll::Ready(None);
            }
            if let Poll::Ready(output) = work.as_mut().poll(context) {
                return Poll::Ready(Some(output));
            }
            self.state_changed.add(self.reactor());
            match until {
                Instant::MAX => Poll::Pending,
                _ => late.as_mut().poll(context).map(|()| None),
            }
        })
        .await
    }

    /// Answers what is under way, and ends all tasks but this one.
    async fn finish(&self) {
        self.leave();
        let reactor = self.reactor();
        let until = reactor.now().after(FAREWELL_WITHIN);
        self.sent.until_or(reactor, until, || self.is_idle()).await;
        // Whoever has not fetched its answers by now will not get them.
        self.socket.shutdown();
        self.sent.until(reactor, || self.is_idle()).await;
        for lane in &self.lanes {
            lane.workers.dismiss(reactor).await;
        }
        self.to_send.wake_all(reactor);
        self.sent.until(reactor, || !self.sends.get()).await;
    }

    async fn haggle(&self, inbox: &mut Inbox) -> Result<Agreed, Cut> {
        let greeting = Greeting {
            magic: SERVER_MAGIC.into(),
            option_magic: OPTION_MAGIC.into(),
            flags: (FIXED_NEWSTYLE | NO_ZEROES).into(),
        };
        self.say(greeting.as_bytes()).await?;
        let flags = u32::from_be_bytes(inbox.take(&self.socket).await?);
        let known = |flags: &u16| flags & !(FIXED_NEWSTYLE | NO_ZEROES) == 0;
        let flags = u16::try_from(flags).ok().filter(known).ok_or(Cut::Flags(flags))?;
        // It may have grown since the last one came.
        self.disk.volume().look().await;
        let facts =
            Facts { name: self.disk.name().to_owned(), volume_bytes: self.disk.volume().bytes() };
        let mut haggle = Haggle::new(facts, flags);
        for _ in 0..OPTIONS_MAX {
            let header: [u8; OPTION_HEADER_BYTES] = inbox.take(&self.socket).await?;
            let header: OptionHeader = zerocopy::transmute!(header);
            if header.magic != OPTION_MAGIC {
                return Err(Cut::OptionMagic(header.magic.get()));
            }
            let len = header.len.get();
            if len > OPTION_BYTES_MAX {
                return Err(Cut::OptionBytes(len));
            }
            let mut data = vec![0; to_usize(len.into())];
            let came = self.memory(len);
            inbox.fill(&self.socket, &came).await?;
            came.copy_to_slice(&mut data);
            let mut out = Vec::new();
            let flow = haggle.answer(header.option.get(), &data, &mut out);
            self.say(&out).await?;
            if let ControlFlow::Break(end) = flow {
                return Ok(end?);
            }
        }
        Err(Cut::Options)
    }

    /// Sends a few bytes.
    async fn say(&self, bytes: &[u8]) -> Result<(), Errno> {
        for part in bytes.chunks(BUFFER_BYTES_MAX) {
            let buffer = self.reactor().buffer(part.len());
            buffer.copy_from_slice(part);
            self.socket.send(&buffer.into()).await?;
        }
        Ok(())
    }

    /// Takes requests up until the client says goodbye.
    async fn take_requests(self: &Rc<Self>, inbox: &mut Inbox) -> Result<(), Cut> {
        let (reactor, agreed) = (self.reactor(), self.agreed.get());
        loop {
            let header: [u8; REQUEST_HEADER_BYTES] = inbox.take(&self.socket).await?;
            let header = RequestHeader::read_from_bytes(&header).expect("as many bytes");
            let volume_bytes = self.disk.volume().bytes();
            let Some(asked) = read_request(&header, agreed, volume_bytes)? else { return Ok(()) };
            let (lane, bytes) = (Lane::of(&asked), held_bytes(&asked));
            self.room(lane, bytes).await?;
            let data = self.memory(asked.payload);
            inbox.fill(&self.socket, &data).await?;
            let traffic = self.traffic(lane);
            traffic.take(bytes);
            let begin = |worker| reactor.spawn(self.clone().work(lane, worker));
            traffic.workers.give(reactor, Task { asked, data }, begin);
        }
    }

    fn traffic(&self, lane: Lane) -> &Traffic {
        &self.lanes[lane as usize]
    }

    /// No answer is owed.
    fn is_idle(&self) -> bool {
        self.lanes.iter().all(Traffic::is_empty)
    }

    /// Waits until there is room in a lane; or the client is gone, which nobody else would notice:
    /// what it has sent is not read meanwhile.
    async fn room(&self, lane: Lane, bytes: u64) -> Result<(), Cut> {
        let has_room = || self.traffic(lane).has_room(bytes);
        while !has_room() {
            let look = self.reactor().now().after(LOOK_EVERY);
            self.sent.until_or(self.reactor(), look, has_room).await;
            if !has_room() && self.socket.has_hung_up() {
                return Err(Cut::Socket(CUT_OFF));
            }
        }
        Ok(())
    }

    /// A place is free again, and what was held there.
    fn give_back(&self, lane: Lane, held: (usize, u64)) {
        self.traffic(lane).give_back(held);
        self.sent.wake_all(self.reactor());
    }

    /// Engine memory, in pieces as large as there are.
    fn memory(&self, len: u32) -> Buffers {
        let (mut memory, mut left) = (Buffers::default(), to_usize(len.into()));
        while left > 0 {
            let piece = left.min(BUFFER_BYTES_MAX);
            memory.push(self.reactor().buffer(piece));
            left -= piece;
        }
        memory
    }

    async fn work(self: Rc<Self>, lane: Lane, worker: usize) {
        let workers = &self.traffic(lane).workers;
        while let Some(Task { asked, data }) = workers.next(self.reactor(), worker).await {
            let held_bytes = held_bytes(&asked);
            let served = self.serve(worker, &asked, data).await;
            let Some((outcome, data)) = served else {
                self.give_back(lane, (1, held_bytes));
                continue;
            };
            let head = head(self.agreed.get(), &asked, outcome);
            self.outbox.push(Reply { head, data, lane, held_bytes });
            self.to_send.wake_all(self.reactor());
        }
        workers.leave(self.reactor());
    }

    /// Carries a request out: what became of it, and the data that the client gets. `None`: the
    /// client is gone, and nothing was done.
    async fn serve(
        &self,
        worker: usize,
        asked: &Asked,
        data: Buffers,
    ) -> Option<(Result<(), Refusal>, Buffers)> {
        let none = Buffers::default();
        let wanted = || !self.is_lost.get();
        let (operation, read) = match asked.command {
            Command::Read { offset, len } => {
                let into = self.memory(len);
                (Operation::Read { offset, into: into.clone() }, into)
            }
            Command::Write { offset, .. } => (Operation::Write { offset, from: data }, none),
            Command::Flush => (Operation::Flush, none),
            Command::Trim { offset, len } => (Operation::Discard { offset, len: len.into() }, none),
            Command::WriteZeroes { offset, len, fast } => {
                if fast && !self.disk.zeroes_fast(offset, len.into()).await {
                    return Some((Err(Refusal::Unsupported), none));
                }
                (Operation::WriteZeroes { offset, len: len.into() }, none)
            }
            Command::Cache => return Some((Ok(()), none)),
            Command::BlockStatus { offset, len } => {
                // As much as a read of nothing.
                let _turn = self.disk.turn_while(&wanted, Toll::Read(0)).await?;
                return Some(match self.disk.block_status(offset, len.into()).await {
                    Ok(status) => (Ok(()), self.told(status)),
                    Err(_) => (Err(Refusal::Io), none),
                });
            }
            Command::Refuse(_) => (Operation::Refuse(Status::Failed), none),
        };
        let mut status = self.perform(worker, operation, &wanted).await?;
        if asked.fua && changes(asked.command) && status == Status::Done {
            status = self.perform(worker, Operation::Flush, &wanted).await?;
        }
        Some(match (status, asked.command) {
            (Status::Done, _) => (Ok(()), read),
            (_, Command::Refuse(why)) => (Err(why), Buffers::default()),
            (Status::NoSpace, _) => (Err(Refusal::NoSpace), Buffers::default()),
            (Status::Failed | Status::Unsupported, _) => (Err(Refusal::Io), Buffers::default()),
        })
    }

    /// What a client is told.
    fn told(&self, status: BlockStatus) -> Buffers {
        let len = u32::try_from(status.len).expect("not more than was asked for");
        let flags = if status.is_zero { state::HOLE | state::ZERO } else { 0 };
        let status =
            ChunkStatus { context: ALLOCATION_ID.into(), len: len.into(), flags: flags.into() };
        let told = self.reactor().buffer(size_of::<ChunkStatus>());
        told.copy_from_slice(status.as_bytes());
        told.into()
    }

    async fn perform(
        &self,
        worker: usize,
        operation: Operation,
        wanted: Wanted<'_>,
    ) -> Option<Status> {
        let turn = self.disk.turn_while(wanted, Toll::of(&operation)).await?;
        let permit = Permit::new(u16::try_from(worker).expect("below REQUESTS_MAX"));
        Some(pin!(self.disk.serve_in(turn, Request { operation, permit })).await.status)
    }

    /// Sends replies, all that are there at a time. After an error they are let go unsent.
    async fn send(self: Rc<Self>) {
        let reactor = self.reactor();
        let mut listens = true;
        loop {
            let over = || self.state.get() == State::Leaving && self.is_idle();
            self.to_send.until(reactor, || !self.outbox.is_empty() || over()).await;
            if self.outbox.is_empty() {
                break;
            }
            let batch = self.outbox.take(reactor);
            if listens && self.socket.send(&batch.bytes).await.is_err() {
                listens = false;
                self.socket.shutdown();
            }
            self.disk.told();
            for (traffic, held) in self.lanes.iter().zip(batch.held) {
                traffic.give_back(held);
            }
            self.sent.wake_all(reactor);
        }
        self.sends.set(false);
        self.sent.wake_all(reactor);
    }
}

/// Whether there is anything to be made durable.
fn changes(command: Command) -> bool {
    match command {
        Command::Write { .. } | Command::Trim { .. } | Command::WriteZeroes { .. } => true,
        Command::Read { .. }
        | Command::Flush
        | Command::Cache
        | Command::BlockStatus { .. }
        | Command::Refuse(_) => false,
    }
}

/// Data that a request needs memory for.
fn held_bytes(asked: &Asked) -> u64 {
    match asked.command {
        Command::Read { len, .. } => len.into(),
        Command::Write { .. }
        | Command::Flush
        | Command::Trim { .. }
        | Command::WriteZeroes { .. }
        | Command::Cache
        | Command::BlockStatus { .. }
        | Command::Refuse(_) => asked.payload.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_never_comes_back() {
        use State::{Haggling, Leaving, Serving};
        let allowed =
            [(Haggling, Serving), (Haggling, Leaving), (Serving, Leaving), (Leaving, Leaving)];
        for from in [Haggling, Serving, Leaving] {
            for to in [Haggling, Serving, Leaving] {
                assert_eq!(from.may_become(to), allowed.contains(&(from, to)), "{from:?} {to:?}");
            }
        }
    }
}
