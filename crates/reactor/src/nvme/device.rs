//! Operations on one drive: cut into commands, sent, looked after, answered.
//!
//! | what happens | what follows |
//! |---|---|
//! | a command takes too long | the drive is asked to give it up |
//! | it does not | memory is taken from it, everything begun ends with ETIMEDOUT, reset |
//! | the drive reports a fatal error | the same |
//! | resets that help for nothing, or a reset fails | the drive is gone: ENODEV, now and for ever |
//! | it was taken out, or will be | the same |
//! | it says what cannot be | the same |
//!
//! Invariants:
//! - an operation is answered only when the drive cannot reach its memory any more: its commands
//!   have completed, or the memory was taken away;
//! - after a reset no command of before is carried out any more: until then none is sent;
//! - no completion is believed that names no command that is out.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::time::Duration;

use super::command::{BLOCKS_MAX, Command, Completion, PAGE};
use super::controller::{BOUNCE_BYTES, BOUNCES, Controller, Identity, Trouble};
use super::prp::{self, Windows};
use crate::backend::Instant;
use crate::buffer::Buffers;
use crate::op::{Done, Errno, LATE, Op, Outcome, Ticket};

/// How long a command may take before the drive is asked to give it up. With what follows, less
/// than the layers above wait.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Zeroing may take longer: a drive may have to write it all.
const ZEROES_WITHIN: Duration = Duration::from_secs(20);
/// How long the drive may take to give a command up.
const ABORT_WITHIN: Duration = Duration::from_secs(1);
/// How often the drive is looked after while it has something to do.
pub const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Resets in a row between which no command succeeds.
const RESETS_MAX: u32 = 3;

/// An operation, under way.
struct Request {
    ticket: Ticket,
    op: Op,
    until: Instant,
    /// Bytes that commands were sent for.
    sent: u64,
    total: u64,
    /// Commands that are out.
    out: u32,
    begun: bool,
    failed: Option<Errno>,
}

/// A command that is out.
struct Sent {
    request: usize,
    started: Instant,
    within: Duration,
    /// Since when the drive is to give it up.
    aborted: Option<Instant>,
    bounced: Option<Bounced>,
}

/// Where the data of a command is instead, and which of the operation's it is.
struct Bounced {
    index: usize,
    from: usize,
    len: usize,
}

/// Data of a command, ready to be told.
enum Told {
    At {
        first: u64,
        second: u64,
        bounced: Option<Bounced>,
    },
    /// There is no free place to bounce it through now.
    Wait,
}

pub struct NvmeDevice {
    /// `None`: the drive is gone.
    controller: Option<Controller>,
    /// Why it is gone.
    trouble: Option<Trouble>,
    windows: Windows,
    requests: Vec<Option<Request>>,
    free_requests: Vec<usize>,
    /// By command id.
    sent: Vec<Option<Sent>>,
    /// The one that was free longest is used next: an answer that comes twice finds nobody.
    free_ids: VecDeque<u16>,
    free_bounces: Vec<usize>,
    /// Requests with commands to send, in their order.
    waiting: VecDeque<usize>,
    finished: Vec<Done>,
    next_look: Instant,
    resets: u32,
}

impl NvmeDevice {
    /// `controller` has run.
    pub fn new(controller: Controller) -> NvmeDevice {
        let depth = controller.identity().depth;
        NvmeDevice {
            controller: Some(controller),
            trouble: None,
            windows: Windows::default(),
            requests: Vec::new(),
            free_requests: Vec::new(),
            sent: (0..depth).map(|_| None).collect(),
            free_ids: (0..depth).collect(),
            free_bounces: (0..BOUNCES).collect(),
            waiting: VecDeque::new(),
            finished: Vec::new(),
            next_look: Instant::default(),
            resets: 0,
        }
    }

    /// The controller for another user, or why there is none. Nothing is under way.
    pub fn into_controller(mut self) -> Result<Controller, Trouble> {
        assert!(self.is_idle(), "a drive with operations under way");
        let Some(mut controller) = self.controller.take() else {
            return Err(self.trouble.expect("it is gone for a reason"));
        };
        // Who comes next shall have one that works.
        if !self.windows.close(controller.bus()) || !controller.is_running() {
            bury(controller);
            return Err(Trouble::Silent("it was being reset"));
        }
        Ok(controller)
    }

    pub fn is_idle(&self) -> bool {
        self.free_requests.len() == self.requests.len()
    }

    /// Whether `reap` has something to do, or soon will.
    pub fn wants_a_look(&self) -> bool {
        let comes_up = self.controller.as_ref().is_some_and(|its| !its.is_running());
        comes_up || !self.is_idle() || !self.finished.is_empty()
    }

    /// Takes memory from the drive that is gone, so that it is pinned no longer. Cheap if none is.
    pub fn forget_the_dead(&mut self) {
        if let Some(controller) = &mut self.controller
            && self.windows.has_dead()
        {
            self.windows.purge(controller.bus());
        }
    }

    /// Can be read when there is something to `reap`, for who wants to sleep.
    pub fn events(&self) -> Option<RawFd> {
        self.controller.as_ref()?.events()
    }

    /// To be called when `events` could be read, before `reap`.
    pub fn take_events(&mut self) {
        if let Some(controller) = &mut self.controller
            && controller.bus().take_events()
        {
            controller.fail(Trouble::Removed);
        }
        self.next_look = Instant::default();
    }

    /// `reap` for who has no reactor: looks once, and sleeps a little if nothing has ended.
    pub fn reap_waiting(&mut self, done: &mut Vec<Done>) {
        let now = self.controller.as_mut().map_or(Instant::MAX, |its| its.bus().now());
        self.reap(now, done);
        if let Some(controller) = self.controller.as_mut().filter(|_| done.is_empty()) {
            controller.bus().wait(Duration::from_millis(1));
            if controller.bus().take_events() {
                controller.fail(Trouble::Removed);
            }
        }
    }

    pub fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        let Some(identity) = self.controller.as_ref().map(Controller::identity) else {
            self.finished.push(Done { ticket, outcome: Err(Errno(libc::ENODEV)) });
            return;
        };
        let total = match identity.bounds().check(op) {
            Ok(Some(total)) => total,
            Ok(None) => {
                self.finished.push(Done { ticket, outcome: Ok(0) });
                return;
            }
            Err(errno) => {
                self.finished.push(Done { ticket, outcome: Err(errno) });
                return;
            }
        };
        let request = Request {
            ticket,
            op: op.clone(),
            until,
            sent: 0,
            total,
            out: 0,
            begun: false,
            failed: None,
        };
        let index = self.free_requests.pop().unwrap_or_else(|| {
            self.requests.push(None);
            self.requests.len() - 1
        });
        self.requests[index] = Some(request);
        self.waiting.push_back(index);
    }

    /// Goes on with everything, and appends what has ended.
    pub fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        if self.wants_a_look() || now >= self.next_look {
            self.advance(now);
        }
        done.append(&mut self.finished);
    }

    fn advance(&mut self, now: Instant) {
        self.hear();
        if now >= self.next_look {
            self.next_look = now.after(LOOK_EVERY);
            self.look(now);
        }
        self.send(now);
        let Some(controller) = &mut self.controller else { return };
        controller.step(now);
        if let Some(trouble) = controller.trouble().cloned() {
            self.give_up(trouble);
        }
    }

    /// Takes completions.
    fn hear(&mut self) {
        loop {
            let Some(controller) = &mut self.controller else { return };
            if !controller.is_running() {
                return;
            }
            match controller.pop() {
                Ok(Some(completion)) => self.completed(completion),
                Ok(None) => break,
                Err(trouble) => controller.fail(trouble),
            }
        }
        if let Some(controller) = &mut self.controller {
            controller.ring();
        }
    }

    fn completed(&mut self, completion: Completion) {
        let sent = self.sent.get_mut(usize::from(completion.id)).and_then(Option::take);
        let Some(sent) = sent else {
            let controller = self.controller.as_mut().expect("it has just spoken");
            controller.fail(Trouble::Absurd("an answer to a command that is not out"));
            return;
        };
        self.free_ids.push_back(completion.id);
        let request = self.requests[sent.request].as_mut().expect("it has a command out");
        request.out -= 1;
        if completion.status.is_success() {
            self.resets = 0;
        } else if request.failed.is_none() {
            request.failed = Some(completion.status.errno());
        }
        if let Some(bounced) = sent.bounced {
            let data = bounced.from..bounced.from + bounced.len;
            if let Op::Read { into, .. } = &request.op
                && completion.status.is_success()
            {
                let controller = self.controller.as_ref().expect("it has just spoken");
                let mut at = controller.bounce(bounced.index).0;
                for piece in into.slice(data).pieces() {
                    controller.memory().scatter(at, piece);
                    at += piece.len();
                }
            }
            self.free_bounces.push(bounced.index);
        }
        self.finish_if_over(sent.request);
    }

    /// Answers a request that has nothing out, and nothing to send.
    fn finish_if_over(&mut self, index: usize) {
        let request = self.requests[index].as_ref().expect("looked at by its index");
        let all_sent = request.failed.is_some() || (request.begun && request.sent == request.total);
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
        self.finished.push(Done { ticket: request.ticket, outcome });
        // A failed one may have had more to send.
        if request.sent < request.total || !request.begun {
            self.waiting.retain(|waiting| *waiting != index);
        }
    }

    /// Sends what can be sent now.
    fn send(&mut self, now: Instant) {
        if !self.controller.as_ref().is_some_and(Controller::is_running) {
            return;
        }
        while let Some(index) = self.waiting.front().copied() {
            let request = self.requests[index].as_mut().expect("what waits is there");
            if now > request.until {
                if request.begun {
                    // No more of it: the drive may be another host's by now.
                    request.failed.get_or_insert(Errno(libc::ETIMEDOUT));
                    self.waiting.pop_front();
                    self.finish_if_over(index);
                } else {
                    self.finish(index, LATE);
                }
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
        if let Some(controller) = &mut self.controller {
            controller.ring();
        }
    }

    /// Sends the next command of a request; false: it has to wait.
    fn send_one(&mut self, index: usize, now: Instant) -> bool {
        let Some(id) = self.free_ids.front().copied() else { return false };
        let request = self.requests[index].as_ref().expect("it waits");
        let controller = self.controller.as_mut().expect("it runs");
        let identity = controller.identity();
        let (namespace, log2) = (identity.namespace, identity.its.block_log2);
        let left = request.total - request.sent;
        let mut len = left.min(identity.transfer_bytes as u64);
        let mut within = ANSWER_WITHIN;
        let mut bounced = None;
        let blocks = |len: u64| u32::try_from(len >> log2).expect("a megabyte at most");
        let command = match &request.op {
            Op::Read { offset, into: data, .. } | Op::Write { offset, from: data, .. } => {
                let is_write = matches!(request.op, Op::Write { .. });
                let from = to_usize(request.sent);
                let told = tell(
                    (controller, &mut self.windows, &mut self.free_bounces),
                    (id, data, from, to_usize(len), is_write),
                );
                let Told::At { first, second, bounced: through } = told else { return false };
                len = through.as_ref().map_or(len, |through| through.len as u64);
                bounced = through;
                let lba = (offset + request.sent) >> log2;
                let command = match is_write {
                    true => Command::write(namespace, lba, blocks(len)),
                    false => Command::read(namespace, lba, blocks(len)),
                };
                command.with_data(first, second)
            }
            Op::Flush { .. } => Command::flush(namespace),
            Op::WriteZeroes { offset, unmap, .. } => {
                within = ZEROES_WITHIN;
                let lba = (offset + request.sent) >> log2;
                zeroes(controller, lba, blocks(len), *unmap)
            }
            Op::Descriptor { .. } => unreachable!("refused when it was asked for"),
        };
        controller.push(command.with_id(id));
        self.free_ids.pop_front();
        let sent = Sent { request: index, started: now, within, aborted: None, bounced };
        self.sent[usize::from(id)] = Some(sent);
        let request = self.requests[index].as_mut().expect("it waits");
        request.begun = true;
        request.sent += len;
        request.out += 1;
        true
    }

    /// Looks after the drive: is it there, and does it answer?
    fn look(&mut self, now: Instant) {
        self.forget_the_dead();
        let Some(controller) = &mut self.controller else { return };
        if !controller.is_running() {
            return;
        }
        match controller.look().and_then(|()| controller.hear_abort()) {
            Ok(()) => {}
            Err(Trouble::Fatal) => return self.reset(now),
            Err(trouble) => return controller.fail(trouble),
        }
        let mut stuck = false;
        for (id, sent) in self.sent.iter_mut().enumerate() {
            let Some(sent) = sent else { continue };
            match sent.aborted {
                None if now.since(sent.started) > sent.within => {
                    sent.aborted = Some(now);
                    controller.abort(u16::try_from(id).expect("an id"));
                }
                Some(since) => stuck |= now.since(since) > ABORT_WITHIN,
                None => {}
            }
        }
        if stuck {
            self.reset(now);
        }
    }

    /// Ends everything that was begun, and brings the controller up anew for the rest.
    fn reset(&mut self, now: Instant) {
        self.resets += 1;
        let Some(controller) = &mut self.controller else { return };
        if self.resets > RESETS_MAX {
            return controller.fail(Trouble::Silent("after resets"));
        }
        controller.restart(now);
        if self.take_memory() {
            self.end_begun(Errno(libc::ETIMEDOUT));
        }
    }

    /// Takes all memory of operations from the drive. If that cannot be, the drive is let go here
    /// and now: then it has none.
    fn take_memory(&mut self) -> bool {
        let Some(controller) = &mut self.controller else { return true };
        let taken = self.windows.close(controller.bus());
        if !taken {
            self.trouble.get_or_insert(Trouble::Mapping("it cannot be taken away".to_owned()));
            drop(self.controller.take());
            self.end_all();
        }
        taken
    }

    /// The drive is gone.
    fn give_up(&mut self, trouble: Trouble) {
        self.trouble = Some(trouble);
        if self.take_memory() {
            if let Some(controller) = self.controller.take() {
                bury(controller);
            }
            self.end_all();
        }
    }

    fn end_all(&mut self) {
        self.windows = Windows::default();
        self.end_begun(Errno(libc::ENODEV));
        while let Some(index) = self.waiting.pop_front() {
            self.finish(index, Err(Errno(libc::ENODEV)));
        }
    }

    fn end_begun(&mut self, errno: Errno) {
        for (id, sent) in self.sent.iter_mut().enumerate() {
            let Some(sent) = sent.take() else { continue };
            self.free_ids.push_back(u16::try_from(id).expect("an id"));
            self.free_bounces.extend(sent.bounced.map(|bounced| bounced.index));
        }
        for index in 0..self.requests.len() {
            if let Some(request) = &mut self.requests[index]
                && request.begun
            {
                let outcome = Err(request.failed.unwrap_or(errno));
                self.finish(index, outcome);
            }
        }
    }
}

/// Letting a function go resets it, which takes longer than a reactor may pause.
pub(super) fn bury(controller: Controller) {
    // Without a thread it is dropped here, with the closure.
    let _ = std::thread::Builder::new().name("nvme-let-go".into()).spawn(|| drop(controller));
}

fn to_usize(small: u64) -> usize {
    usize::try_from(small).expect("inside a buffer")
}

/// Makes data ready for command `id`: by its pages, or through a place for bounced data.
fn tell(
    (controller, windows, bounces): (&mut Controller, &mut Windows, &mut Vec<usize>),
    (id, data, from, len, is_write): (u16, &Buffers, usize, usize, bool),
) -> Told {
    let (list, list_at) = controller.list(id);
    let (mut first, mut count, mut second) = (0, 0, 0);
    let mut entries = [0; PAGE / 8];
    let told = prp::pages(windows, controller.bus(), data, from..from + len, |page| {
        match count {
            0 => first = page,
            _ => entries[count - 1] = page,
        }
        count += 1;
    });
    if told {
        match count {
            0 | 1 => {}
            2 => second = entries[0],
            _ => second = write_list(controller, (list, list_at), &entries[..count - 1]),
        }
        return Told::At { first, second, bounced: None };
    }
    let Some(index) = bounces.pop() else { return Told::Wait };
    let len = len.min(BOUNCE_BYTES);
    let (place, at) = controller.bounce(index);
    if is_write {
        let mut place = place;
        for piece in data.slice(from..from + len).pieces() {
            controller.memory().gather(place, piece);
            place += piece.len();
        }
    }
    let pages = len.div_ceil(PAGE);
    for (i, entry) in entries.iter_mut().enumerate().take(pages).skip(1) {
        *entry = at + (i * PAGE) as u64;
    }
    second = match pages {
        0 | 1 => 0,
        2 => entries[1],
        _ => write_list(controller, (list, list_at), &entries[1..pages]),
    };
    Told::At { first: at, second, bounced: Some(Bounced { index, from, len }) }
}

fn write_list(controller: &Controller, (list, at): (usize, u64), entries: &[u64]) -> u64 {
    for (i, entry) in entries.iter().enumerate() {
        controller.memory().write(list + 8 * i, &entry.to_le_bytes());
    }
    at
}

/// The command that makes blocks read as zeroes, and gives their space back if that may be.
fn zeroes(controller: &Controller, lba: u64, blocks: u32, unmap: bool) -> Command {
    assert!(blocks <= BLOCKS_MAX);
    let Identity { namespace, its, .. } = controller.identity();
    let deallocate = unmap && its.may_deallocate();
    Command::write_zeroes(*namespace, lba, blocks, deallocate)
}
