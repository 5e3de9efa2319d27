//! One NVMe controller: brought up, asked who it is, given a queue, reset, shut down.
//!
//! ```text
//! Disabling ─► Enabling ─► Asking(Controller … SubmissionQueue) ─► Running
//!     ▲  any of them, when it takes too long: Failed                  │
//!     └────────────────────────── restart ◄───────────────────────────┘
//! Running ─► Failed: it was taken out, or said what cannot be
//! ```
//!
//! Nothing here waits: `step` looks once. Invariant: a controller that was restarted is the same as
//! before, or it fails: a drive must not change under an array.

use std::os::fd::RawFd;
use std::time::Duration;

use super::bounds::Bounds;
use super::bus::Bus;
use super::command::{
    Command, Completion, ControllerIdentity, IDENTIFY_BYTES, NamespaceIdentity, PAGE, Status,
    first_namespace,
};
use super::memory::SharedMemory;
use super::queue::{Place, QueuePair};
use crate::backend::Instant;

const ADMIN_ENTRIES: u16 = 16;
/// More are never out on one drive; what else is asked waits here.
const IO_ENTRIES_MAX: u16 = 256;
/// Data that the controller cannot reach where it is goes through places of this size.
pub const BOUNCE_BYTES: usize = 128 << 10;
pub const BOUNCES: usize = 32;
/// Bytes of one command: its list of pages is one page, with room to spare.
const TRANSFER_BYTES_MAX: usize = 1 << 20;
const _: () = assert!(TRANSFER_BYTES_MAX / PAGE < PAGE / 8);

/// Where things are in the memory that is shared.
const ADMIN_SUBMISSION: usize = 0;
const ADMIN_COMPLETION: usize = PAGE;
const IDENTIFY: usize = 2 * PAGE;
const IO_SUBMISSION: usize = 3 * PAGE; // 256 × 64 bytes
const IO_COMPLETION: usize = 7 * PAGE; // 256 × 16 bytes
const LISTS: usize = 8 * PAGE; // a page for each command
const BOUNCE: usize = LISTS + IO_ENTRIES_MAX as usize * PAGE;
const SHARED_BYTES: usize = BOUNCE + BOUNCES * BOUNCE_BYTES;

/// The one pair of queues for reads and writes; it answers by interrupt vector 0.
pub const IO_QUEUE: u16 = 1;
/// How long a controller may take for an admin command at its start.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long it may take to put its cache away before it is left.
const SHUT_DOWN_WITHIN: Duration = Duration::from_secs(5);

/// Registers (Base 3.1.3).
const CAP_LOW: usize = 0x00;
const CAP_HIGH: usize = 0x04;
const CC: usize = 0x14;
const CSTS: usize = 0x1c;
const AQA: usize = 0x24;
const ASQ: usize = 0x28;
const ACQ: usize = 0x30;
/// CC: enabled; entries of 2^6 and 2^4 bytes; pages of 4 KiB; the NVM command set.
const CC_ENABLE: u32 = 1 | 6 << 16 | 4 << 20;
const CC_NORMAL_SHUTDOWN: u32 = 1 << 14;
const CSTS_READY: u32 = 1;
const CSTS_FATAL: u32 = 1 << 1;
const CSTS_SHUTDOWN: u32 = 0b11 << 2;
const CSTS_SHUTDOWN_COMPLETE: u32 = 0b10 << 2;
/// Read from a function that is not there.
const ALL_ONES: u32 = u32::MAX;

/// Why a controller cannot be used, or no longer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    #[error("it was taken out")]
    Removed,
    #[error("it reports a fatal error of its own")]
    Fatal,
    #[error("it has not answered for too long ({0})")]
    Silent(&'static str),
    #[error("it said what cannot be ({0})")]
    Absurd(&'static str),
    #[error("it is not like a drive that can be used: {0}")]
    Unsuitable(&'static str),
    #[error("it refused {what}: {status:?}")]
    Refused { what: &'static str, status: Status },
    #[error("memory that it is to reach: {0}")]
    Mapping(String),
}

/// Who the drive is, and what it can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub controller: ControllerIdentity,
    pub namespace: u32,
    pub its: NamespaceIdentity,
    /// Most bytes of one command.
    pub transfer_bytes: usize,
    /// Most commands at once.
    pub depth: u16,
}

impl Identity {
    pub(super) fn bounds(&self) -> Bounds {
        Bounds {
            block_bytes: self.its.block_bytes(),
            bytes: self.its.bytes(),
            write_zeroes: self.controller.write_zeroes,
            volatile_cache: self.controller.volatile_cache,
        }
    }
}

/// What is asked before there is a queue for reads and writes, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    Controller,
    Namespaces,
    Namespace { namespace: u32 },
    QueueCount,
    CompletionQueue,
    SubmissionQueue,
}

impl Question {
    fn name(self) -> &'static str {
        match self {
            Question::Controller => "Identify Controller",
            Question::Namespaces => "Identify Active Namespaces",
            Question::Namespace { .. } => "Identify Namespace",
            Question::QueueCount => "Set Features, Number of Queues",
            Question::CompletionQueue => "Create I/O Completion Queue",
            Question::SubmissionQueue => "Create I/O Submission Queue",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Disabling { until: Instant },
    Enabling { until: Instant },
    Asking { question: Question, until: Instant },
    Running,
    Failed(Trouble),
}

/// What CAP says (Base 3.1.3.1).
#[derive(Clone, Copy)]
struct Capabilities {
    entries: u16,
    /// Bytes between doorbells.
    stride: usize,
    ready_within: Duration,
}

pub struct Controller {
    /// Before `memory`: when it is dropped, the function cannot reach that any more.
    bus: Box<dyn Bus>,
    memory: SharedMemory,
    /// Where the function finds `memory`.
    at: u64,
    capabilities: Capabilities,
    admin: QueuePair,
    io: QueuePair,
    phase: Phase,
    /// Of the admin command that is out.
    asked: Option<u16>,
    admin_id: u16,
    /// Of the drive as it is being asked.
    heard: Option<ControllerIdentity>,
    identity: Option<Identity>,
}

impl Controller {
    /// Begins to bring it up; `step` goes on with that.
    pub fn new(mut bus: Box<dyn Bus>) -> Result<Controller, Trouble> {
        let capabilities = capabilities(bus.as_ref())?;
        let memory = SharedMemory::new(SHARED_BYTES);
        // SAFETY: the controller keeps `memory` until after the bus is dropped, and uses it as the
        // protocol says.
        let at = unsafe { bus.map(memory.start(), memory.bytes()) };
        let at = at.map_err(|error| Trouble::Mapping(error.to_string()))?;
        let admin = QueuePair::new(ADMIN, capabilities.stride, &memory);
        let io = QueuePair::new(io_place(capabilities), capabilities.stride, &memory);
        let now = bus.now();
        let mut controller = Controller {
            bus,
            memory,
            at,
            capabilities,
            admin,
            io,
            phase: Phase::Running,
            asked: None,
            admin_id: 0,
            heard: None,
            identity: None,
        };
        controller.restart(now);
        Ok(controller)
    }

    /// Forgets everything that was asked and brings it up anew. Whatever was out is over once this
    /// has passed `Disabling` (Base 3.7.2).
    pub fn restart(&mut self, now: Instant) {
        self.bus.write(CC, 0);
        self.asked = None;
        self.phase = Phase::Disabling { until: now.after(self.capabilities.ready_within) };
    }

    pub fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    pub fn trouble(&self) -> Option<&Trouble> {
        match &self.phase {
            Phase::Failed(trouble) => Some(trouble),
            Phase::Disabling { .. }
            | Phase::Enabling { .. }
            | Phase::Asking { .. }
            | Phase::Running => None,
        }
    }

    pub fn fail(&mut self, trouble: Trouble) {
        self.phase = Phase::Failed(trouble);
    }

    /// Known once it has run.
    pub fn identity(&self) -> &Identity {
        self.identity.as_ref().expect("it has run")
    }

    pub fn bus(&mut self) -> &mut dyn Bus {
        self.bus.as_mut()
    }

    pub fn events(&self) -> Option<RawFd> {
        self.bus.events()
    }

    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Where command `id` has its list of pages: for us, and for the function.
    pub fn list(&self, id: u16) -> (usize, u64) {
        let offset = LISTS + usize::from(id) * PAGE;
        (offset, self.at + offset as u64)
    }

    /// The same of a place for bounced data.
    pub fn bounce(&self, index: usize) -> (usize, u64) {
        assert!(index < BOUNCES);
        let offset = BOUNCE + index * BOUNCE_BYTES;
        (offset, self.at + offset as u64)
    }

    /// One look; what was waited for may be there, or be overdue.
    pub fn step(&mut self, now: Instant) {
        let next = match self.phase.clone() {
            Phase::Disabling { until } => self.disabling(now, until),
            Phase::Enabling { until } => self.enabling(now, until),
            Phase::Asking { question, until } => self.asking(question, now, until),
            Phase::Running | Phase::Failed(_) => return,
        };
        match next {
            Ok(Some(phase)) => self.phase = phase,
            Ok(None) => {}
            Err(trouble) => self.fail(trouble),
        }
    }

    /// Whether it is there and sound, for one that runs.
    pub fn look(&self) -> Result<(), Trouble> {
        self.state().map(|_| ())
    }

    /// CSTS, if it can be believed.
    fn state(&self) -> Result<u32, Trouble> {
        match self.bus.read(CSTS) {
            ALL_ONES => Err(Trouble::Removed),
            state if state & CSTS_FATAL != 0 => Err(Trouble::Fatal),
            state => Ok(state),
        }
    }

    fn disabling(&mut self, now: Instant, until: Instant) -> Result<Option<Phase>, Trouble> {
        let state = self.bus.read(CSTS);
        if state == ALL_ONES {
            return Err(Trouble::Removed);
        }
        // A fatal error goes with the reset.
        if state & CSTS_READY != 0 {
            return overdue(now, until, "to be disabled").map(|()| None);
        }
        let stride = self.capabilities.stride;
        self.admin = QueuePair::new(ADMIN, stride, &self.memory);
        self.io = QueuePair::new(self.io.place(), stride, &self.memory);
        let entries = u32::from(ADMIN_ENTRIES - 1);
        self.bus.write(AQA, entries << 16 | entries);
        self.write_address(ASQ, self.at + ADMIN_SUBMISSION as u64);
        self.write_address(ACQ, self.at + ADMIN_COMPLETION as u64);
        self.bus.write(CC, CC_ENABLE);
        Ok(Some(Phase::Enabling { until: now.after(self.capabilities.ready_within) }))
    }

    fn write_address(&self, offset: usize, address: u64) {
        let half = |word: u64| u32::try_from(word & 0xffff_ffff).expect("32 bits");
        self.bus.write(offset, half(address));
        self.bus.write(offset + 4, half(address >> 32));
    }

    fn enabling(&mut self, now: Instant, until: Instant) -> Result<Option<Phase>, Trouble> {
        if self.state()? & CSTS_READY == 0 {
            return overdue(now, until, "to be enabled").map(|()| None);
        }
        Ok(Some(self.ask(Question::Controller, now)))
    }

    fn ask(&mut self, question: Question, now: Instant) -> Phase {
        let place = self.io.place();
        let (submission, completion) =
            (self.at + place.submission as u64, self.at + place.completion as u64);
        let command = match question {
            Question::Controller => Command::identify_controller(),
            Question::Namespaces => Command::identify_active_namespaces(),
            Question::Namespace { namespace } => Command::identify_namespace(namespace),
            Question::QueueCount => Command::set_queue_count(1),
            Question::CompletionQueue => {
                Command::create_completion_queue(place.id, place.entries, completion, 0)
            }
            Question::SubmissionQueue => {
                Command::create_submission_queue(place.id, place.entries, submission, place.id)
            }
        };
        let answers_with_a_page = matches!(
            question,
            Question::Controller | Question::Namespaces | Question::Namespace { .. }
        );
        let command = match answers_with_a_page {
            true => command.with_data(self.at + IDENTIFY as u64, 0),
            false => command,
        };
        self.send_admin(command);
        Phase::Asking { question, until: now.after(ANSWER_WITHIN) }
    }

    fn send_admin(&mut self, command: Command) {
        self.admin_id = self.admin_id.wrapping_add(1);
        self.asked = Some(self.admin_id);
        self.admin.push(&self.memory, command.with_id(self.admin_id));
        self.admin.ring(self.bus.as_ref());
    }

    /// The answer to the admin command that is out.
    fn admin_answer(&mut self) -> Result<Option<Completion>, Trouble> {
        let Some(answer) = self.admin.pop(&self.memory) else { return Ok(None) };
        self.admin.ring(self.bus.as_ref());
        if answer.queue != 0 || self.asked.take() != Some(answer.id) {
            return Err(Trouble::Absurd("an answer to an admin command that is not out"));
        }
        Ok(Some(answer))
    }

    fn asking(
        &mut self,
        question: Question,
        now: Instant,
        until: Instant,
    ) -> Result<Option<Phase>, Trouble> {
        let Some(answer) = self.admin_answer()? else {
            self.state()?;
            return overdue(now, until, question.name()).map(|()| None);
        };
        if !answer.status.is_success() {
            return Err(Trouble::Refused { what: question.name(), status: answer.status });
        }
        let mut page = [0; IDENTIFY_BYTES];
        self.memory.read(IDENTIFY, &mut page);
        let next = match question {
            Question::Controller => {
                self.heard = Some(ControllerIdentity::decode(&page));
                Question::Namespaces
            }
            Question::Namespaces => {
                let namespace = first_namespace(&page);
                let namespace = namespace.ok_or(Trouble::Unsuitable("it has no namespace"))?;
                Question::Namespace { namespace }
            }
            Question::Namespace { namespace } => {
                self.meet(namespace, &NamespaceIdentity::decode(&page))?;
                Question::QueueCount
            }
            Question::QueueCount => Question::CompletionQueue,
            Question::CompletionQueue => Question::SubmissionQueue,
            Question::SubmissionQueue => return Ok(Some(Phase::Running)),
        };
        Ok(Some(self.ask(next, now)))
    }

    /// Takes note of the drive, or finds that it is another than before.
    fn meet(&mut self, namespace: u32, its: &NamespaceIdentity) -> Result<(), Trouble> {
        its.check(Trouble::Unsuitable, Trouble::Absurd)?;
        let controller = self.heard.take().expect("asked before");
        let identity = Identity {
            transfer_bytes: controller.transfer_bytes(TRANSFER_BYTES_MAX),
            controller,
            namespace,
            its: *its,
            depth: self.io.place().entries - 1,
        };
        match self.identity.replace(identity) {
            Some(known) if Some(&known) != self.identity.as_ref() => {
                Err(Trouble::Absurd("it is another drive than before its reset"))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Puts a command into the I/O queue; `ring` tells the controller.
    pub fn push(&mut self, command: Command) {
        assert!(self.is_running());
        self.io.push(&self.memory, command);
    }

    pub fn ring(&mut self) {
        self.io.ring(self.bus.as_ref());
    }

    /// The next completion of the I/O queue, which is about this queue and a place in it at least.
    pub fn pop(&mut self) -> Result<Option<Completion>, Trouble> {
        let Some(found) = self.io.pop(&self.memory) else { return Ok(None) };
        let place = self.io.place();
        if found.queue != place.id {
            return Err(Trouble::Absurd("a completion for a queue that is not there"));
        }
        if found.submission_head >= place.entries {
            return Err(Trouble::Absurd("a place behind the end of a queue"));
        }
        Ok(Some(found))
    }

    /// Asks it to give a command up, if nothing else is asked. What became of the command is told
    /// by its own completion.
    pub fn abort(&mut self, id: u16) {
        if self.asked.is_none() {
            self.send_admin(Command::abort(IO_QUEUE, id));
        }
    }

    /// Takes the answer to an abort, which says nothing that matters.
    pub fn hear_abort(&mut self) -> Result<(), Trouble> {
        if self.asked.is_some() {
            self.admin_answer()?;
        }
        Ok(())
    }

    /// Lets the drive put its cache away, as far as it does that in time (Base 3.6.1).
    pub fn shut_down(&mut self) {
        if !self.is_running() || self.look().is_err() {
            return;
        }
        self.bus.write(CC, CC_ENABLE | CC_NORMAL_SHUTDOWN);
        let until = self.bus.now().after(SHUT_DOWN_WITHIN);
        while self.state().is_ok_and(|state| state & CSTS_SHUTDOWN != CSTS_SHUTDOWN_COMPLETE)
            && self.bus.now() < until
        {
            self.bus.wait(Duration::from_millis(1));
        }
        self.bus.write(CC, 0);
    }
}

const ADMIN: Place = Place {
    id: 0,
    entries: ADMIN_ENTRIES,
    submission: ADMIN_SUBMISSION,
    completion: ADMIN_COMPLETION,
};

fn io_place(capabilities: Capabilities) -> Place {
    Place {
        id: IO_QUEUE,
        entries: capabilities.entries.min(IO_ENTRIES_MAX),
        submission: IO_SUBMISSION,
        completion: IO_COMPLETION,
    }
}

fn overdue(now: Instant, until: Instant, what: &'static str) -> Result<(), Trouble> {
    if now > until { Err(Trouble::Silent(what)) } else { Ok(()) }
}

fn capabilities(bus: &dyn Bus) -> Result<Capabilities, Trouble> {
    let (low, high) = (bus.read(CAP_LOW), bus.read(CAP_HIGH));
    if low == ALL_ONES && high == ALL_ONES {
        return Err(Trouble::Removed);
    }
    let field = |word: u32, from: u32, bits: u32| word >> from & ((1 << bits) - 1);
    if field(high, 5, 1) == 0 {
        return Err(Trouble::Unsuitable("it does not know the NVM command set"));
    }
    if field(high, 16, 4) != 0 {
        return Err(Trouble::Unsuitable("its smallest memory page is larger than 4 KiB"));
    }
    // MQES is zero-based, and at least 1: two entries.
    let entries = u16::try_from(field(low, 0, 16)).expect("16 bits").saturating_add(1);
    if entries < 2 {
        return Err(Trouble::Absurd("queues of one entry"));
    }
    let stride = 4 << field(high, 0, 4);
    // TO is in units of 500 ms; some say 0.
    let ready_within = Duration::from_millis(500) * field(low, 24, 8).max(1);
    Ok(Capabilities { entries, stride, ready_within })
}
