//! Operations on a remote namespace: cut into commands, sent, looked after, answered.
//!
//! ```text
//! Away ─► Up ─► Closing ─► Away      Away too long, or for good ─► Gone
//! ```
//!
//! | what happens | what follows |
//! |---|---|
//! | the connection is lost | what was asked is asked again over the next one, in its order |
//! | a command takes too long, or it says what cannot be | the connection is ended: as above |
//! | the same, with completed writes in a volatile cache, perhaps | gone: they may be lost, too |
//! | the same, of one that tells its [`PowerCycle`] | gone if the next connection tells another |
//! | there is no connection for [`AWAY_MAX`], or several in a row achieve nothing | gone |
//! | another namespace is at its other end | gone |
//! | it is let go, and has no connection | gone |
//! | a digest of data is wrong | the operation ends with EAGAIN: who asked tries again |
//! | gone | ENODEV, now and for ever |
//!
//! Invariants:
//! - an operation is answered only when the kernel cannot reach its memory any more: what was
//!   received or sent has ended, or so has the connection;
//! - a write that may have been done is done again, with the same data and before anything that
//!   was asked later, or ends in an error; the next connection is there only when nothing of the
//!   one before can be done any more (`keeper`);
//! - a write that may not be begun any more is not begun again, nor is more of it sent: the
//!   connection ends before that;
//! - nothing is believed that does not fit what was asked: data to its byte.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use zerocopy::byteorder::little_endian::{U16, U32};

use super::association::Link;
use super::keeper::{Keeper, Offered};
use super::stream::{Inbox, Outbox, Pdu};
use super::{AWAY_MAX, Handle, Trouble};
use crate::backend::Instant;
use crate::buffer::Buffers;
use crate::nvme::command::{Command, Completion, Sgl, Status};
use crate::nvme::pdu::{CapsuleCmd, Data, Fault, Kind, LAST, SUCCESS};
use crate::nvme::power_cycle::PowerCycle;
use crate::op::{Done, Errno, LATE, Op, Outcome, Ticket};

/// How long a command may take before the connection is ended. With what follows, less than the
/// layers above wait.
const ANSWER_WITHIN: Duration = Duration::from_secs(4);
/// Zeroing may take longer: a drive may have to write it all.
const ZEROES_WITHIN: Duration = Duration::from_secs(20);
/// How often the drive is looked after while it has something to do.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The same while a connection is waited for.
const LOOK_AWAY_EVERY: Duration = Duration::from_millis(2);
/// Connections in a row over which no command succeeds.
const LOSSES_MAX: u32 = 5;
/// Of one command, PDUs with data that wait to be sent; what is asked for at a time has fewer.
const PDUS_MAX: u32 = 1024;

/// What the kernel does with a connection: one of each at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    In,
    Out,
}

/// An operation, under way.
struct Request {
    ticket: Ticket,
    op: Op,
    until: Instant,
    /// The order of asking.
    number: u64,
    /// Bytes that commands were sent for.
    sent: u64,
    total: u64,
    /// Commands that are out.
    out: u32,
    /// When it was first sent.
    begun: Option<Instant>,
    failed: Option<Errno>,
}

impl Request {
    fn changes(&self) -> bool {
        matches!(self.op, Op::Write { .. } | Op::WriteZeroes { .. })
    }

    /// How long a command of it may take.
    fn within(&self) -> Duration {
        match self.op {
            Op::WriteZeroes { .. } => ZEROES_WITHIN,
            Op::Read { .. } | Op::Write { .. } | Op::Flush { .. } | Op::Descriptor { .. } => {
                ANSWER_WITHIN
            }
        }
    }

    /// It was asked again for so long that whoever waits for it soon does no more.
    fn is_overdue(&self, now: Instant) -> bool {
        let most = self.within() + AWAY_MAX - ANSWER_WITHIN;
        self.begun.is_some_and(|begun| now.since(begun) > most)
    }
}

/// A command that is out.
struct Sent {
    request: usize,
    started: Instant,
    within: Duration,
    /// Which of the operation's data.
    from: usize,
    len: usize,
    in_capsule: bool,
    /// Bytes of it that came, or that were asked for.
    moved: usize,
    /// PDUs of it that the kernel has not taken yet.
    unsent: u32,
    /// Data came other than it was sent.
    is_corrupt: bool,
    /// Answered, but not all of it is sent.
    answer: Option<Status>,
    /// Of a flush: the writes that it covers.
    covers: u64,
}

struct Connection {
    stream: TcpStream,
    inbox: Inbox,
    outbox: Outbox,
    /// What the kernel was told of; in place until it has answered.
    in_pieces: Vec<libc::iovec>,
    out_pieces: Vec<libc::iovec>,
    is_receiving: bool,
    is_sending: bool,
    /// The command that data is coming for, and the flags of that.
    incoming: Option<(u16, u8)>,
    /// By command id.
    sent: Vec<Option<Sent>>,
    /// The one that was free longest is used next: an answer that comes twice finds nobody.
    free_ids: VecDeque<u16>,
    capsule_bytes: usize,
    h2c_data_bytes_max: usize,
    power: Option<PowerCycle>,
}

impl Connection {
    fn new(link: Link) -> Result<Connection, Trouble> {
        let (inbox, outbox) =
            (Inbox::new(link.io.digests), Outbox::new(link.io.digests, link.io.alignment));
        let h2c = usize::try_from(link.io.h2c_data_bytes_max).expect("32 bits");
        Ok(Connection {
            inbox,
            outbox,
            in_pieces: Vec::new(),
            out_pieces: Vec::new(),
            is_receiving: false,
            is_sending: false,
            incoming: None,
            sent: (0..link.depth).map(|_| None).collect(),
            free_ids: (0..link.depth).collect(),
            capsule_bytes: link.io.capsule_bytes,
            h2c_data_bytes_max: h2c,
            power: link.power,
            stream: link.io.into_stream()?,
        })
    }

    fn is_idle(&self) -> bool {
        !self.is_receiving && !self.is_sending
    }

    fn sent(&mut self, id: u16) -> Result<&mut Sent, Trouble> {
        let sent = self.sent.get_mut(usize::from(id)).and_then(Option::as_mut);
        let unanswered = sent.filter(|sent| sent.answer.is_none());
        unanswered.ok_or(Trouble::Absurd("an answer to a command that is not out"))
    }

    /// Sends what it asks for of a write.
    fn wanted(
        &mut self,
        (id, tag, offset, len): (u16, u16, u32, u32),
        op: &Op,
    ) -> Result<(), Trouble> {
        let most = self.h2c_data_bytes_max;
        let sent = self.sent(id)?;
        let Op::Write { from, .. } = op else { return Err(Fault::Sequence.into()) };
        let (at, end) = (to_usize(offset), to_usize(offset).saturating_add(to_usize(len)));
        if sent.in_capsule || len == 0 || at != sent.moved || end > sent.len {
            return Err(Fault::OutOfRange.into());
        }
        if sent.unsent > PDUS_MAX {
            return Err(Fault::LimitExceeded.into());
        }
        sent.moved = end;
        let data = from.slice(sent.from + at..sent.from + end);
        sent.unsent += u32::try_from(data.len().div_ceil(most)).expect("few");
        for start in (0..data.len()).step_by(most) {
            let part = data.slice(start..data.len().min(start + most));
            let flags = if start + part.len() == data.len() { LAST } else { 0 };
            let (offset, len) = (to_u32(at + start), to_u32(part.len()));
            self.outbox.push((Kind::H2cData, id, flags), part, |common| Data {
                common,
                command: U16::new(id),
                tag: U16::new(tag),
                offset: U32::new(offset),
                len: U32::new(len),
                reserved: [0; 4],
            });
        }
        Ok(())
    }

    /// Has data of a read go where it belongs.
    fn coming(
        &mut self,
        (id, offset, len): (u16, u32, u32),
        flags: u8,
        op: &Op,
    ) -> Result<(), Trouble> {
        let sent = self.sent(id)?;
        let Op::Read { into, .. } = op else { return Err(Fault::Sequence.into()) };
        let (at, end) = (to_usize(offset), to_usize(offset).saturating_add(to_usize(len)));
        if at != sent.moved || end > sent.len {
            return Err(Fault::OutOfRange.into());
        }
        if flags & SUCCESS != 0 && flags & LAST == 0 {
            return Err(Fault::Header(1).into());
        }
        sent.moved = end;
        let into = into.slice(sent.from + at..sent.from + end);
        self.inbox.take(into);
        self.incoming = Some((id, flags));
        Ok(())
    }
}

enum Path {
    /// Since when there is none (`None`: it was never looked at), and why.
    Away(Option<Instant>, Trouble),
    Up(Box<Connection>),
    /// The kernel has yet to say what it did last; since when it is of no use, and why.
    Closing(Box<Connection>, Instant, Trouble),
    Gone,
}

pub(crate) struct RemoteDevice {
    drive: Arc<Handle>,
    /// `None`: it is gone.
    keeper: Option<Keeper>,
    path: Path,
    requests: Vec<Option<Request>>,
    free_requests: Vec<usize>,
    asked: u64,
    /// Requests with commands to send, in their order.
    waiting: VecDeque<usize>,
    pub(crate) finished: Vec<Done>,
    next_look: Instant,
    /// Before that, no request that changes the drive is late.
    none_late_until: Instant,
    /// Connections in a row.
    losses: u32,
    /// Writes that have completed, and one for those of before; and how many a flush has covered.
    completed: u64,
    flushed: u64,
    /// While there is no connection: when what was not flushed was there. It is lost at any other.
    cached_at: Option<PowerCycle>,
    /// Let go: it ends with what the kernel has of it.
    is_leaving: bool,
}

impl RemoteDevice {
    pub(crate) fn new(drive: Arc<Handle>) -> RemoteDevice {
        let keeper = Keeper::start(&drive.station);
        RemoteDevice {
            drive,
            keeper: Some(keeper),
            path: Path::Away(None, Trouble::Silent("to connect")),
            requests: Vec::new(),
            free_requests: Vec::new(),
            asked: 0,
            waiting: VecDeque::new(),
            finished: Vec::new(),
            next_look: Instant::default(),
            none_late_until: Instant::MAX,
            losses: 0,
            completed: 1,
            flushed: 0,
            cached_at: None,
            is_leaving: false,
        }
    }

    pub(crate) fn drive(&self) -> &Arc<Handle> {
        &self.drive
    }

    fn is_idle(&self) -> bool {
        self.free_requests.len() == self.requests.len()
    }

    pub(crate) fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        let checked = match self.path {
            Path::Gone => Err(Errno(libc::ENODEV)),
            Path::Away(..) | Path::Up(_) | Path::Closing(..) => self.drive.bounds().check(op),
        };
        let total = match checked {
            Ok(Some(total)) => total,
            Ok(None) => return self.finished.push(Done { ticket, outcome: Ok(0) }),
            Err(errno) => return self.finished.push(Done { ticket, outcome: Err(errno) }),
        };
        self.asked += 1;
        let request = Request {
            ticket,
            op: op.clone(),
            until,
            number: self.asked,
            sent: 0,
            total,
            out: 0,
            begun: None,
            failed: None,
        };
        let index = self.free_requests.pop().unwrap_or_else(|| {
            self.requests.push(None);
            self.requests.len() - 1
        });
        if request.changes() {
            self.none_late_until = self.none_late_until.min(until);
        }
        self.requests[index] = Some(request);
        self.waiting.push_back(index);
    }

    /// Goes on with everything.
    pub(crate) fn advance(&mut self, now: Instant) {
        match &mut self.path {
            Path::Away(since, _) if !self.is_leaving => {
                let since = *since.get_or_insert(now);
                self.await_connection(since, now);
            }
            Path::Closing(connection, ..) if connection.is_idle() => self.closed(now),
            Path::Up(_) if now >= self.next_look => self.look(now),
            Path::Away(..) | Path::Up(_) | Path::Closing(..) | Path::Gone => {}
        }
        if now > self.none_late_until {
            self.look_for_late(now);
        }
        self.send(now);
    }

    /// The next thing that the kernel is to do, and with which memory: in place until `ended`.
    pub(crate) fn next_transfer(&mut self) -> Option<(Way, RawFd, &[libc::iovec])> {
        let Path::Up(its) = &mut self.path else { return None };
        let fd = its.stream.as_raw_fd();
        if !its.is_receiving {
            its.is_receiving = true;
            its.inbox.room(&mut its.in_pieces);
            return Some((Way::In, fd, &its.in_pieces));
        }
        if !its.is_sending && !its.outbox.is_empty() {
            its.is_sending = true;
            its.outbox.batch(&mut its.out_pieces);
            return Some((Way::Out, fd, &its.out_pieces));
        }
        None
    }

    /// The kernel has done it.
    pub(crate) fn ended(&mut self, way: Way, outcome: Outcome, now: Instant) {
        let (Path::Up(its) | Path::Closing(its, ..)) = &mut self.path else {
            unreachable!("nothing is under way without a connection");
        };
        match way {
            Way::In => its.is_receiving = false,
            Way::Out => its.is_sending = false,
        }
        if !matches!(self.path, Path::Up(_)) {
            return;
        }
        let bytes = match outcome {
            Ok(0) => return self.fail(now, Trouble::Lost("the other side has closed it".into())),
            Ok(bytes) => usize::try_from(bytes).expect("inside buffers"),
            Err(Errno(libc::EINTR | libc::EAGAIN)) => return,
            Err(Errno(libc::EFAULT)) if way == Way::In && self.connection().inbox.touch_data() => {
                return;
            }
            Err(errno) => return self.fail(now, Trouble::Lost(errno.to_string())),
        };
        match way {
            Way::In => {
                self.connection().inbox.came(bytes);
                if let Err(trouble) = self.hear() {
                    self.fail(now, trouble);
                }
            }
            Way::Out => self.took(bytes),
        }
    }

    /// No operation is under way, and none will be: the connection ends.
    pub(crate) fn close(&mut self) {
        self.is_leaving = true;
        if let Path::Up(its) = &self.path {
            // It fails where the other side was faster.
            let _ = its.stream.shutdown(Shutdown::Both);
        }
    }

    /// Closed, and nothing of it is with the kernel.
    pub(crate) fn is_over(&self) -> bool {
        let in_kernel = match &self.path {
            Path::Up(its) | Path::Closing(its, ..) => !its.is_idle(),
            Path::Away(..) | Path::Gone => false,
        };
        self.is_leaving && !in_kernel
    }

    /// How long it may go without a look; `None`: as long as the kernel has nothing to say.
    pub(crate) fn sleep_max(&self) -> Option<Duration> {
        if !self.finished.is_empty() {
            return Some(Duration::ZERO);
        }
        match self.path {
            _ if self.is_idle() => None,
            Path::Away(..) => Some(LOOK_AWAY_EVERY),
            Path::Up(_) | Path::Closing(..) | Path::Gone => Some(LOOK_EVERY),
        }
    }

    fn connection(&mut self) -> &mut Connection {
        match &mut self.path {
            Path::Up(connection) => connection,
            Path::Away(..) | Path::Closing(..) | Path::Gone => unreachable!("it is not up"),
        }
    }

    fn await_connection(&mut self, since: Instant, now: Instant) {
        if self.drive.station.is_let_go() {
            return self.give_up(false, Trouble::LetGo);
        }
        let keeper = self.keeper.as_ref().expect("it is not gone");
        match keeper.take() {
            Offered::Link(link) if self.cached_at.is_some() && link.power != self.cached_at => {
                self.give_up(false, Trouble::Forgetful);
            }
            Offered::Link(link) => match Connection::new(*link) {
                Ok(connection) => {
                    self.cached_at = None;
                    self.path = Path::Up(Box::new(connection));
                }
                Err(trouble) => {
                    keeper.renew(false);
                    self.path = Path::Away(Some(since), trouble);
                }
            },
            Offered::Over(trouble) => self.give_up(false, trouble),
            Offered::Nothing if now.since(since) > AWAY_MAX || self.is_overdue(now) => {
                let Path::Away(_, why) = &self.path else { unreachable!("it is away") };
                let why = Trouble::Away(Box::new(why.clone()));
                self.give_up(false, why);
            }
            Offered::Nothing => {}
        }
    }

    fn is_overdue(&self, now: Instant) -> bool {
        self.requests.iter().flatten().any(|request| request.is_overdue(now))
    }

    /// Takes what has come.
    fn hear(&mut self) -> Result<(), Trouble> {
        loop {
            let Path::Up(its) = &mut self.path else { return Ok(()) };
            let Some(pdu) = its.inbox.next()? else { return Ok(()) };
            match pdu {
                Pdu::Response(Completion { id, status, .. }) => {
                    its.sent(id)?;
                    self.answered(id, status)?;
                }
                Pdu::Data { command, offset, len, flags } => {
                    let request = its.sent(command)?.request;
                    let op = &self.requests[request].as_ref().expect("it has a command out").op;
                    its.coming((command, offset, len), flags, op)?;
                }
                Pdu::DataEnd { intact } => {
                    let (id, flags) = its.incoming.take().expect("data of a command has come");
                    its.sent(id)?.is_corrupt |= !intact;
                    if flags & SUCCESS != 0 {
                        self.answered(id, Status::SUCCESS)?;
                    }
                }
                Pdu::Wanted { command, tag, offset, len } => {
                    let request = its.sent(command)?.request;
                    let op = &self.requests[request].as_ref().expect("it has a command out").op;
                    its.wanted((command, tag, offset, len), op)?;
                }
                Pdu::Goodbye { reason, detail } => {
                    let text = format!("it has ended it for reason {reason:#x} ({detail:#x})");
                    return Err(Trouble::Lost(text));
                }
            }
        }
    }

    /// A command is done. Its data must have been moved, all of it.
    fn answered(&mut self, id: u16, status: Status) -> Result<(), Trouble> {
        let its = self.connection();
        let sent = its.sent(id)?;
        if status.is_success() && !sent.in_capsule && sent.moved != sent.len {
            return Err(Trouble::Absurd("a success without all of the data"));
        }
        sent.answer = Some(status);
        if sent.unsent == 0 {
            self.finish_command(id);
        }
        Ok(())
    }

    /// The kernel has taken so many bytes.
    fn took(&mut self, bytes: usize) {
        let its = self.connection();
        let (outbox, table) = (&mut its.outbox, &mut its.sent);
        let mut over = smallvec::SmallVec::<[u16; 32]>::new();
        outbox.took(bytes, |id| {
            let sent = table[usize::from(id)].as_mut().expect("it is out until all is sent");
            sent.unsent -= 1;
            if sent.unsent == 0 && sent.answer.is_some() {
                over.push(id);
            }
        });
        over.into_iter().for_each(|id| self.finish_command(id));
    }

    /// It is answered, and none of it is under way.
    fn finish_command(&mut self, id: u16) {
        let its = self.connection();
        let sent = its.sent[usize::from(id)].take().expect("it was answered");
        its.free_ids.push_back(id);
        let status = sent.answer.expect("it was answered");
        let request = self.requests[sent.request].as_mut().expect("it has a command out");
        request.out -= 1;
        match status.is_success() {
            true if sent.is_corrupt => {
                request.failed.get_or_insert(Errno(libc::EAGAIN));
            }
            true => {
                self.losses = 0;
                if let Op::Flush { .. } = request.op {
                    self.flushed = self.flushed.max(sent.covers);
                }
            }
            false => {
                request.failed.get_or_insert(errno(status));
            }
        }
        self.finish_if_over(sent.request);
    }

    /// Answers a request that has nothing out, and nothing to send.
    fn finish_if_over(&mut self, index: usize) {
        let request = self.requests[index].as_ref().expect("looked at by its index");
        let all_sent =
            request.failed.is_some() || (request.begun.is_some() && request.sent == request.total);
        if request.out > 0 || !all_sent {
            return;
        }
        let outcome = match request.failed {
            Some(errno) => Err(errno),
            None => Ok(request.total),
        };
        self.finish(index, outcome);
    }

    fn finish(&mut self, index: usize, outcome: Outcome) {
        let request = self.requests[index].take().expect("answered once");
        self.free_requests.push(index);
        // Also of one that failed: some of it may be in the cache.
        self.completed += u64::from(request.changes());
        self.finished.push(Done { ticket: request.ticket, outcome });
        if request.sent < request.total || request.begun.is_none() {
            self.waiting.retain(|waiting| *waiting != index);
        }
    }

    /// Sends what can be sent now.
    fn send(&mut self, now: Instant) {
        while let Path::Up(_) = self.path
            && let Some(index) = self.waiting.front().copied()
        {
            let request = self.requests[index].as_ref().expect("what waits is there");
            if now > request.until && request.sent == 0 {
                // Of what was begun over a lost connection nobody knows whether it was done.
                let begun = request.begun.is_some();
                self.finish(index, if begun { Err(Errno(libc::ETIMEDOUT)) } else { LATE });
                continue;
            }
            // The rest of a failed one is not sent; it ends with its last command.
            if request.failed.is_none() && !self.send_one(index, now) {
                break;
            }
            let request = self.requests[index].as_ref().expect("it was not answered here");
            if request.failed.is_some() || request.sent == request.total {
                self.waiting.pop_front();
            }
        }
    }

    /// Sends the next command of a request; false: it has to wait.
    fn send_one(&mut self, index: usize, now: Instant) -> bool {
        let covers = self.completed;
        let Path::Up(its) = &mut self.path else { return false };
        let Some(id) = its.free_ids.pop_front() else { return false };
        let request = self.requests[index].as_mut().expect("it waits");
        let identity = self.drive.identity();
        let (namespace, log2) = (identity.namespace, identity.its.block_log2);
        let left = request.total - request.sent;
        let len = left.min(identity.transfer_bytes as u64);
        let blocks = |len: u64| u32::try_from(len >> log2).expect("a megabyte at most");
        let from = usize::try_from(request.sent).expect("inside a buffer");
        let within = request.within();
        let (mut data, mut moves) = (Buffers::default(), 0);
        let (command, sgl) = match &request.op {
            Op::Read { offset, .. } => {
                moves = usize::try_from(len).expect("a megabyte at most");
                let command =
                    Command::read(namespace, (offset + request.sent) >> log2, blocks(len));
                (command, Sgl::Transport { bytes: to_u32(moves) })
            }
            Op::Write { offset, from: all, .. } => {
                moves = usize::try_from(len).expect("a megabyte at most");
                let command =
                    Command::write(namespace, (offset + request.sent) >> log2, blocks(len));
                let sgl = if moves <= its.capsule_bytes {
                    data = all.slice(from..from + moves);
                    Sgl::InCapsule { offset: 0, bytes: to_u32(moves) }
                } else {
                    Sgl::Transport { bytes: to_u32(moves) }
                };
                (command, sgl)
            }
            Op::Flush { .. } => (Command::flush(namespace), Sgl::Transport { bytes: 0 }),
            Op::WriteZeroes { offset, unmap, .. } => {
                let deallocate = *unmap && identity.its.may_deallocate();
                let lba = (offset + request.sent) >> log2;
                let command = Command::write_zeroes(namespace, lba, blocks(len), deallocate);
                (command, Sgl::Transport { bytes: 0 })
            }
            Op::Descriptor { .. } => unreachable!("refused when it was asked for"),
        };
        let command = command.with_id(id).with_sgl(sgl).to_bytes();
        let in_capsule = !data.is_empty();
        its.outbox.push((Kind::CapsuleCmd, id, 0), data, |common| CapsuleCmd { common, command });
        its.sent[usize::from(id)] = Some(Sent {
            request: index,
            started: now,
            within,
            from,
            len: moves,
            in_capsule,
            moved: 0,
            unsent: 1,
            is_corrupt: false,
            answer: None,
            covers,
        });
        request.begun.get_or_insert(now);
        request.sent += len;
        request.out += 1;
        true
    }

    /// Looks after the drive: does it answer?
    fn look(&mut self, now: Instant) {
        self.next_look = now.after(LOOK_EVERY);
        let mut sent = self.connection().sent.iter().flatten();
        if sent.any(|sent| now.since(sent.started) > sent.within) {
            self.fail(now, Trouble::Silent("a command"));
        }
    }

    /// What may not be begun any more is not gone on with, either: what the kernel has not taken of
    /// it never leaves, since the connection ends.
    fn look_for_late(&mut self, now: Instant) {
        let changes = self.requests.iter().flatten().filter(|its| its.changes());
        self.none_late_until = changes.map(|its| its.until).min().unwrap_or(Instant::MAX);
        let Path::Up(its) = &self.path else { return };
        let is_late = |request: &Request| request.changes() && now > request.until;
        let request = |index: usize| self.requests[index].as_ref().expect("it has a command out");
        let mut sent = its.sent.iter().flatten();
        let unsent = sent.any(|sent| sent.unsent > 0 && is_late(request(sent.request)));
        let is_cut = |its: &Request| its.sent > 0 && its.sent < its.total && its.failed.is_none();
        let cut = self.requests.iter().flatten().any(|its| is_late(its) && is_cut(its));
        if unsent || cut {
            self.fail(now, Trouble::Silent("to take a write in its time"));
        }
    }

    /// The connection is of no use any more.
    fn fail(&mut self, now: Instant, why: Trouble) {
        self.path = match std::mem::replace(&mut self.path, Path::Gone) {
            Path::Up(connection) => {
                // What the kernel has of it ends at once. It fails where the other side was faster.
                let _ = connection.stream.shutdown(Shutdown::Both);
                Path::Closing(connection, now, why)
            }
            other @ (Path::Away(..) | Path::Closing(..) | Path::Gone) => other,
        };
    }

    /// The kernel has nothing of a lost connection any more: another is wanted, and what was asked
    /// over this one is asked again.
    fn closed(&mut self, now: Instant) {
        let path = std::mem::replace(&mut self.path, Path::Away(None, Trouble::Another));
        let Path::Closing(connection, since, why) = path else { unreachable!("it was closing") };
        let out = connection.sent.iter().flatten();
        let dirty = out
            .map(|sent| sent.request)
            .any(|index| self.requests[index].as_ref().expect("it has a command out").changes());
        let power = connection.power;
        drop(connection);
        self.losses += 1;
        if self.drive.identity().controller.volatile_cache && self.completed != self.flushed {
            if power.is_none() {
                return self.give_up(dirty, Trouble::Forgetful);
            }
            self.cached_at = power;
        }
        if self.losses > LOSSES_MAX {
            return self.give_up(dirty, Trouble::Unsteady(Box::new(why)));
        }
        if self.is_overdue(now) {
            return self.give_up(dirty, Trouble::Away(Box::new(why)));
        }
        if self.drive.station.is_let_go() {
            return self.give_up(dirty, Trouble::LetGo);
        }
        self.ask_again();
        self.keeper.as_ref().expect("it is not gone").renew(dirty);
        self.path = Path::Away(Some(since), why);
    }

    fn ask_again(&mut self) {
        for index in 0..self.requests.len() {
            let Some(request) = self.requests[index].as_mut().filter(|its| its.begun.is_some())
            else {
                continue;
            };
            (request.sent, request.out) = (0, 0);
            if let Some(errno) = request.failed {
                self.finish(index, Err(errno));
            }
        }
        let numbered = self.requests.iter().enumerate();
        let mut order: Vec<(u64, usize)> =
            numbered.filter_map(|(index, its)| Some((its.as_ref()?.number, index))).collect();
        order.sort_unstable();
        self.waiting.clear();
        self.waiting.extend(order.into_iter().map(|(_, index)| index));
    }

    /// The drive is gone. There is no connection.
    fn give_up(&mut self, dirty: bool, why: Trouble) {
        self.path = Path::Gone;
        if let Some(keeper) = self.keeper.take() {
            keeper.leave(dirty);
        }
        self.drive.station.lost(why);
        for index in 0..self.requests.len() {
            if self.requests[index].is_some() {
                self.finish(index, Err(Errno(libc::ENODEV)));
            }
        }
    }
}

/// As of any drive; but what the way there has done wrong says nothing of the medium.
fn errno(status: Status) -> Errno {
    match Status(status.0 & 0x7ff) {
        Status::TRANSIENT_TRANSPORT => Errno(libc::EAGAIN),
        _ => status.errno(),
    }
}

fn to_usize(small: u32) -> usize {
    usize::try_from(small).expect("32 bits")
}

fn to_u32(len: usize) -> u32 {
    u32::try_from(len).expect("a megabyte at most")
}
