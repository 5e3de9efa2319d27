//! The production [`Backend`]: io_uring for all files and block devices of a core.
//!
//! What the kernel has is found out when the ring is made ([`probe`]), and for each device when it
//! is registered ([`gauges::DeviceReport`]); whatever is missing is done without.
//!
//! The kernel reads and writes memory that slots own (`slots.rs`): an operation's buffers stay in
//! place until its completion was reaped here.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod probe;
pub mod gauges;
mod tag;
mod entry;
mod ring;
mod device;
mod trial;
mod polled;
mod passthrough;
mod commands;
mod remote;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::arena::Arena;
use crate::backend::{Backend, Instant};
use crate::buffer::{Buffer, Buffers};
use crate::clock::machine_time;
use crate::lossy::Lossy;
use crate::model::Model;
use crate::null::Null;
use crate::nvme::generic::Generic;
use crate::nvme::lent::Lent;
use crate::nvme::remote::device::RemoteDevice;
use crate::op::{Act, Device, DeviceId, Done, Errno, LATE, Op, Outcome, Ticket};
use crate::ram::{Lender, Ram};
use crate::uring::commands::Commands;
use crate::uring::device::{FileDevice, Registered};
use crate::uring::entry::{Target, cancel, entry, readable};
use crate::uring::gauges::{Gauges, Use, Why};
use crate::uring::passthrough::{LOOK_EVERY, Passing, Passthrough, is_refusal};
use crate::uring::polled::{Polled, Polling};
use crate::uring::probe::{Kind, build};
use crate::uring::ring::Ring;
use crate::uring::tag::Tag;

/// The kernel is not asked to sleep for less than this before a modelled drive is to answer: it
/// would be late by a good part of it.
const SLEEP_MIN: Duration = Duration::from_micros(100);

/// What an operator can choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// A thread of the kernel takes submissions, without a system call. It wants a CPU of its own:
    /// where it has none, what is submitted waits for it, also beyond the moment until which it
    /// may be begun.
    pub sqpoll: bool,
    /// Drives that can be polled are.
    pub iopoll: bool,
    /// NVMe drives of the kernel are given commands, past its block layer, where that works.
    pub passthrough: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { sqpoll: false, iopoll: true, passthrough: false }
    }
}

/// io_uring, the machine's clock, and drives that are made of memory.
pub struct UringBackend {
    ring: Ring,
    polling: Polling,
    passing: Passing,
    commands: Commands,
    arena: Option<Rc<Arena>>,
    gauges: Rc<Gauges>,
    /// By the machine's clock.
    started: Duration,
    devices: Vec<Registered>,
    /// By ticket: the pieces of a vectored operation, in place until it has completed.
    pieces: Vec<Vec<libc::iovec>>,
    finished: Vec<Done>,
    /// Of modelled drives: when to tell, in the order of asking.
    due: BinaryHeap<Reverse<(Instant, u64, Ticket, Outcome)>>,
    due_sequence: u64,
    nvme_drives: usize,
    /// Waits for events of such drives that were ever begun.
    nvme_waits: u32,
    /// Operations that lossy drives have asked for.
    lossy_under_way: usize,
    remote_drives: usize,
    /// What connections to such have the kernel do.
    remote_under_way: usize,
    /// Empty between two looks: what rings have to say, and what came too late for them.
    heard: Vec<(u64, Outcome)>,
    late: Vec<u64>,
    turn: Turn,
}

/// From the end of one look to the end of the next.
#[derive(Default)]
struct Turn {
    began: Cell<Instant>,
    /// Whether `began` is known: the time is asked for right after each look, once for the turn
    /// that ends and the one that begins.
    is_dated: Cell<bool>,
    /// The turn that ended.
    was_busy: Cell<bool>,
    has_submitted: bool,
    /// The look before it has completed something.
    has_heard: bool,
}

impl UringBackend {
    /// Fails where io_uring is missing or forbidden; [`probe::remedy`] says what mends that.
    pub fn new() -> std::io::Result<UringBackend> {
        UringBackend::with(Settings::default(), None)
    }

    /// `arena`: where the buffers of its operations come from.
    pub fn with(settings: Settings, arena: Option<Rc<Arena>>) -> std::io::Result<UringBackend> {
        let kind = if settings.sqpoll { Kind::Sqpoll } else { Kind::Interrupts };
        let (io, kernel) = build(kind)?;
        // The kernel may have refused a thread.
        let has_thread = io.params().is_setup_sqpoll();
        let kind = if has_thread { Kind::Sqpoll } else { Kind::Interrupts };
        Ok(UringBackend {
            ring: Ring::new(io, kind, arena.clone()),
            polling: if settings.iopoll { Polling::Untried } else { Polling::Off },
            passing: if settings.passthrough { Passing::Untried } else { Passing::Off },
            commands: Commands::default(),
            gauges: Gauges::new(kernel, arena.clone()),
            arena,
            started: machine_time(),
            devices: Vec::new(),
            pieces: Vec::new(),
            finished: Vec::new(),
            due: BinaryHeap::new(),
            due_sequence: 0,
            nvme_drives: 0,
            nvme_waits: 0,
            lossy_under_way: 0,
            remote_drives: 0,
            remote_under_way: 0,
            heard: Vec::new(),
            late: Vec::new(),
            turn: Turn::default(),
        })
    }

    /// What it does, for others on this thread.
    pub fn gauges(&self) -> Rc<Gauges> {
        self.gauges.clone()
    }

    fn file(&mut self, index: usize) -> Option<&mut FileDevice> {
        match &mut self.devices[index] {
            Registered::File(file) => Some(file),
            Registered::Ram(_)
            | Registered::RamTwin(_)
            | Registered::Null(_)
            | Registered::Model(_)
            | Registered::Lossy(_)
            | Registered::Nvme(_)
            | Registered::Remote(_)
            | Registered::Gone => None,
        }
    }

    /// Lets the ring know a file, and finds out whether it can be polled.
    fn register_file(
        &mut self,
        file: Arc<File>,
        generic: Option<Result<Arc<Generic>, Errno>>,
        index: usize,
    ) {
        let is_block_device =
            file.metadata().is_ok_and(|its| FileTypeExt::is_block_device(&its.file_type()));
        let mut file = FileDevice::new(file, index);
        let gauge = file.gauge.clone();
        let known = self.ring.set_file(index, file.fd());
        file.in_table = known == Use::Yes;
        gauge.file.set(known);
        gauge.buffers.set(self.ring.knows_buffers());
        self.gauges.device_came(file.fd(), &gauge);
        self.devices[index] = Registered::File(file);
        self.try_passthrough(generic, index);
        match self.polling {
            Polling::Off => gauge.polling.set(Use::No(Why::Off)),
            // A file system answers for a hole without its device: a trial would prove nothing.
            Polling::Untried | Polling::Failed(_) | Polling::On(_) if !is_block_device => {
                gauge.polling.set(Use::No(Why::NotBlockDevice));
            }
            Polling::Untried | Polling::Failed(_) | Polling::On(_) => self.try_polling(index),
        }
    }

    fn try_polling(&mut self, index: usize) {
        let UringBackend { devices, polling, arena, started, .. } = self;
        let Registered::File(file) = &mut devices[index] else {
            unreachable!("a file, says the caller");
        };
        let answer = match polling.ring(|| Polled::build(arena.as_ref())) {
            Ok(polled) => {
                polled.probe(index, file);
                polled.news(now(*started));
                Why::Trying
            }
            Err(why) => why,
        };
        file.gauge.polling.set(Use::No(answer));
    }

    fn try_passthrough(&mut self, generic: Option<Result<Arc<Generic>, Errno>>, index: usize) {
        let UringBackend { devices, passing, .. } = self;
        let Registered::File(file) = &mut devices[index] else {
            unreachable!("a file, says the caller");
        };
        let why = match (&passing, generic) {
            (Passing::Off, _) => Why::Off,
            (_, None) => Why::NotNamespace,
            (_, Some(Err(errno))) => Why::Refused(errno),
            (_, Some(Ok(generic))) => match passing.ring(Passthrough::build) {
                Ok(passthrough) => {
                    file.generic = Some(generic);
                    passthrough.try_out(index, file);
                    return;
                }
                Err(why) => why,
            },
        };
        file.gauge.passthrough.set(Use::No(why));
    }

    /// Lets a file go, unless the kernel still tries it.
    fn unregister_file(&mut self, index: usize) {
        let is_probing = self.polling.on().is_some_and(|polled| polled.is_probing(index))
            || self.passing.on().is_some_and(|passthrough| passthrough.is_trying(index));
        let file = self.file(index).expect("a file, says the caller");
        file.is_leaving = true;
        let (fd, in_table) = (file.fd(), file.in_table);
        let (in_polled_table, in_passthrough_table) =
            (file.in_polled_table, file.in_passthrough_table);
        if is_probing {
            return;
        }
        if in_table {
            self.ring.set_file(index, -1);
        }
        if let Some(polled) = self.polling.on().filter(|_| in_polled_table) {
            polled.ring.set_file(index, -1);
        }
        if let Some(passthrough) = self.passing.on().filter(|_| in_passthrough_table) {
            passthrough.ring.set_file(index, -1);
        }
        self.gauges.device_went(fd);
        self.devices[index] = Registered::Gone;
    }

    fn submit_to_file(&mut self, ticket: Ticket, index: usize, op: &Op, until: Instant) {
        let pieces = pieces_of(&mut self.pieces, ticket);
        let Registered::File(file) = &self.devices[index] else {
            unreachable!("a file, says the caller");
        };
        if let Some(passthrough) = self.passing.on()
            && passthrough.submit(file, (index, ticket), op, pieces, until)
        {
            file.gauge.begun();
            return;
        }
        let (ring, target) = match self.polling.on() {
            Some(polled) if file.is_polled_for(op) => (&mut polled.ring, file.polled_target()),
            Some(_) | None => (&mut self.ring, file.target()),
        };
        let span = match op {
            Op::Read { into: buffers, .. } | Op::Write { from: buffers, .. } => {
                ring.span_of(buffers)
            }
            Op::Flush { .. } | Op::WriteZeroes { .. } | Op::Descriptor { .. } => None,
        };
        let tag = Tag::Device { device: index, ticket };
        ring.push(entry(target, op, span, pieces).user_data(tag.bits()), until);
        file.gauge.begun();
    }

    /// Gives the kernel what waits, as far as there is room.
    fn fill(&mut self) {
        let started = self.started;
        self.ring.fill(|| now(started), &mut self.late);
        if let Some(polled) = self.polling.on()
            && polled.ring.fill(|| now(started), &mut self.late)
        {
            polled.news(now(started));
        }
        if let Some(passthrough) = self.passing.on() {
            passthrough.ring.fill(|| now(started), &mut self.late);
        }
        self.commands.fill(|| now(started), &mut self.late);
        while let Some(bits) = self.late.pop() {
            let (Tag::Plain(ticket) | Tag::Device { ticket, .. }) = Tag::from_bits(bits) else {
                unreachable!("what drives and trials ask for is never too late");
            };
            self.end(Tag::from_bits(bits), Done { ticket, outcome: LATE });
        }
    }

    /// Whether more waits than a ring has room for.
    fn has_backlog(&mut self) -> bool {
        self.ring.has_backlog()
            || self.polling.on().is_some_and(|polled| polled.ring.has_backlog())
            || self.passing.on().is_some_and(|passthrough| passthrough.ring.has_backlog())
            || self.commands.has_backlog()
    }

    /// Hears what the rings have to say.
    fn collect(&mut self) {
        let mut heard = std::mem::take(&mut self.heard);
        self.ring.reap(&mut heard);
        self.ring.tell(&self.gauges, heard.len());
        for (bits, outcome) in heard.drain(..) {
            self.hear(Tag::from_bits(bits), outcome);
        }
        if let Some(polled) = self.polling.on() {
            polled.ring.reap(&mut heard);
            polled.ring.tell(&self.gauges, heard.len());
            if !heard.is_empty() {
                polled.news(now(self.started));
            }
        }
        for (bits, outcome) in heard.drain(..) {
            self.hear_polled(Tag::from_bits(bits), outcome);
        }
        if let Some(passthrough) = self.passing.on() {
            passthrough.ring.reap(&mut heard);
            passthrough.ring.tell(&self.gauges, heard.len());
        }
        for (bits, outcome) in heard.drain(..) {
            self.hear_passed(Tag::from_bits(bits), outcome);
        }
        self.commands.reap(&mut heard, &self.gauges);
        for (bits, outcome) in heard.drain(..) {
            self.hear(Tag::from_bits(bits), outcome);
        }
        self.heard = heard;
    }

    fn hear(&mut self, tag: Tag, outcome: Outcome) {
        match tag {
            Tag::Plain(ticket) | Tag::Device { ticket, .. } => {
                self.end(tag, Done { ticket, outcome });
            }
            Tag::Lossy { device, token } => {
                self.lossy_under_way -= 1;
                if let Registered::Lossy(lossy) = &mut self.devices[device] {
                    lossy.complete(token, outcome);
                }
                self.attend(device);
            }
            Tag::Events { device, wait } => {
                if let Registered::Nvme(lent) = &mut self.devices[device] {
                    lent.woken(wait);
                }
            }
            // What it ended tells of itself.
            Tag::EventsEnd { .. } => {}
            Tag::Remote { device, way } => self.hear_remote(device, way, outcome),
            Tag::Probe { device } => {
                let polled = self.polling.on().expect("its ring has told of it");
                let answer = polled.probed(device, outcome);
                let buffers = polled.ring.knows_buffers_if(answer == Use::Yes);
                let file = self.file(device).expect("it stays until it was tried");
                file.gauge.polling.set(answer);
                if let Some(buffers) = buffers {
                    file.gauge.buffers.set(buffers);
                }
                if file.is_leaving {
                    self.unregister_file(device);
                }
            }
            Tag::Trial { device } => {
                let passthrough = self.passing.on().expect("its ring has told of it");
                let answer = passthrough.tried(device, outcome);
                let file = self.file(device).expect("it stays until it was tried");
                file.gauge.passthrough.set(answer);
                if file.is_leaving {
                    self.unregister_file(device);
                }
            }
            Tag::Passthrough => {
                if let Some(passthrough) = self.passing.on() {
                    passthrough.ring.woken();
                }
            }
            Tag::Commands => self.commands.woken(),
        }
    }

    /// A device that cannot be polled after all is polled no more. Who asked hears that it is to be
    /// asked again: nothing is wrong with it.
    fn hear_polled(&mut self, tag: Tag, mut outcome: Outcome) {
        if let Tag::Device { device, .. } = tag
            && let Err(errno @ Errno(libc::EOPNOTSUPP)) = outcome
            && let Some(file) = self.file(device)
        {
            file.gauge.polling.set(Use::No(Why::Refused(errno)));
            outcome = Err(Errno(libc::EAGAIN));
        }
        self.hear(tag, outcome);
    }

    /// The same of one that is refused commands after all.
    fn hear_passed(&mut self, tag: Tag, mut outcome: Outcome) {
        if let Tag::Device { device, ticket } = tag {
            if let Err(errno) = outcome
                && is_refusal(errno)
                && let Some(file) = self.file(device)
            {
                file.gauge.passthrough.set(Use::No(Why::Refused(errno)));
            }
            let passthrough = self.passing.on().expect("its ring has told of it");
            outcome = passthrough.outcome(ticket, outcome);
        }
        self.hear(tag, outcome);
    }

    /// Has the ring for commands wake us. How long to sleep at most.
    fn await_passthrough(&mut self) -> Option<Duration> {
        let passthrough = self.passing.on().filter(|its| its.ring.is_used())?;
        if let Some(fd) = passthrough.ring.await_completions() {
            let wait = readable(fd).user_data(Tag::Passthrough.bits());
            self.ring.push(wait, Instant::MAX);
        }
        Some(LOOK_EVERY)
    }

    fn end(&mut self, tag: Tag, mut done: Done) {
        if let Tag::Device { device, .. } = tag
            && let Some(file) = self.file(device)
        {
            file.gauge.ended();
            done.outcome = file.meant_by(done.outcome);
        }
        self.finished.push(done);
    }

    /// Does what a lossy drive asks for.
    fn attend(&mut self, device: usize) {
        let UringBackend { devices, ring, finished, lossy_under_way, .. } = self;
        let Registered::Lossy(lossy) = &mut devices[device] else { return };
        finished.append(&mut lossy.finished);
        while let Some((token, fd, op, pieces)) = lossy.next_request() {
            let entry = entry(Target::Descriptor(fd), op, None, pieces);
            ring.push(entry.user_data(Tag::Lossy { device, token }.bits()), Instant::MAX);
            *lossy_under_way += 1;
        }
        if lossy.is_gone() {
            devices[device] = Registered::Gone;
        }
    }

    /// Looks at the queues of NVMe drives.
    fn reap_nvme(&mut self) {
        if self.nvme_drives == 0 {
            return;
        }
        let now = now(self.started);
        for device in &mut self.devices {
            if let Registered::Nvme(lent) = device {
                lent.reap(now, &mut self.finished);
            }
        }
    }

    /// Has NVMe drives wake us. How long to sleep at most, until one wants a look.
    fn await_nvme(&mut self) -> Option<Duration> {
        let UringBackend { devices, ring, nvme_waits, .. } = self;
        let mut sleep_max = None;
        for (device, its) in devices.iter_mut().enumerate() {
            let Registered::Nvme(lent) = its else { continue };
            lent.forget_the_dead();
            sleep_max = sleep_max.into_iter().chain(lent.sleep_max()).min();
            if let Some((fd, wait)) = lent.await_events(nvme_waits) {
                let tag = Tag::Events { device, wait };
                ring.push(readable(fd).user_data(tag.bits()), Instant::MAX);
            }
        }
        sleep_max
    }

    fn unregister_nvme(&mut self, device: usize, awaited: Option<u32>) {
        self.devices[device] = Registered::Gone;
        self.nvme_drives -= 1;
        // Nobody waits for its events any more.
        if let Some(wait) = awaited {
            let end = cancel(Tag::Events { device, wait }.bits());
            self.ring.push(end.user_data(Tag::EventsEnd { device }.bits()), Instant::MAX);
        }
    }

    /// Moves what modelled drives have to say by now.
    fn tell_due(&mut self) {
        if self.due.is_empty() {
            return;
        }
        let now = now(self.started);
        while let Some(Reverse((at, _, ticket, outcome))) = self.due.peek().copied()
            && at <= now
        {
            self.due.pop();
            self.finished.push(Done { ticket, outcome });
        }
    }

    /// Counts the turn that ends.
    fn end_turn(&mut self, has_heard: bool) {
        let turn = &mut self.turn;
        let was_busy = turn.has_submitted || turn.has_heard || has_heard;
        self.gauges.count(|counters| counters.turns += 1);
        turn.was_busy.set(was_busy);
        (turn.has_submitted, turn.has_heard) = (false, has_heard);
        turn.is_dated.set(false);
    }

    /// Sleeps until one completion, or for `wait`.
    fn sleep(&mut self, wait: Option<Duration>) {
        let began = self.now();
        self.ring.wait(wait);
        let ended = now(self.started);
        self.gauges.slept(ended.since(began));
        self.turn.began.set(ended);
    }
}

fn pieces_of(pieces: &mut Vec<Vec<libc::iovec>>, ticket: Ticket) -> &mut Vec<libc::iovec> {
    let index = ticket.0 as usize;
    if pieces.len() <= index {
        pieces.resize_with(index + 1, Vec::new);
    }
    &mut pieces[index]
}

fn now(started: Duration) -> Instant {
    Instant::default().after(machine_time() - started)
}

impl Backend for UringBackend {
    fn now(&self) -> Instant {
        let now = now(self.started);
        if !self.turn.is_dated.replace(true) {
            let began = self.turn.began.replace(now);
            if self.turn.was_busy.take() {
                self.gauges.busy(began, now);
            }
        }
        now
    }

    #[expect(clippy::disallowed_methods, reason = "the reactor's calendar")]
    fn unix_s(&self) -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(0, |since| since.as_secs())
    }

    fn register(&mut self, device: Device) -> DeviceId {
        let free = self.devices.iter().position(|d| matches!(d, Registered::Gone));
        let index = free.unwrap_or_else(|| {
            self.devices.push(Registered::Gone);
            self.devices.len() - 1
        });
        let id = DeviceId(u32::try_from(index).expect("few devices"));
        self.devices[index] = match device {
            Device::File { file } => {
                self.register_file(file, None, index);
                return id;
            }
            Device::Namespace { file, generic } => {
                self.register_file(file, Some(generic), index);
                return id;
            }
            Device::Ram { bytes } => {
                let ram = Ram::new(bytes);
                self.gauges.memory_came(ram.page_bytes());
                Registered::Ram(Lender::new(Arc::new(ram)))
            }
            Device::RamTwin { ram } => Registered::RamTwin(ram),
            Device::Null { bytes } => Registered::Null(Null { bytes }),
            Device::Nvme { drive } => {
                self.nvme_drives += 1;
                Registered::Nvme(Box::new(Lent::new(drive)))
            }
            Device::Remote { drive } => {
                self.remote_drives += 1;
                Registered::Remote(Box::new(RemoteDevice::new(drive)))
            }
            Device::Model { bytes, iops, bytes_per_second, latency } => {
                let model = Model::new(bytes, iops, bytes_per_second, latency);
                self.gauges.memory_came(model.page_bytes());
                Registered::Model(model)
            }
            Device::Lossy { file, sector_bytes, seed } => {
                Registered::Lossy(Box::new(Lossy::new(file, id, sector_bytes, seed)))
            }
            Device::Simulated { .. } => panic!("a simulated drive belongs to the simulator"),
        };
        id
    }

    fn twin(&self, device: DeviceId) -> Option<Device> {
        match &self.devices[device.0 as usize] {
            Registered::File(file) => Some(Device::File { file: file.file().clone() }),
            Registered::Ram(Lender { ram, .. }) | Registered::RamTwin(ram) => {
                Some(Device::RamTwin { ram: ram.clone() })
            }
            Registered::Null(null) => Some(Device::Null { bytes: null.bytes }),
            Registered::Remote(remote) => Some(Device::Remote { drive: remote.drive().clone() }),
            // Their answers belong to one reactor's clock, queues or cache.
            Registered::Model(_) | Registered::Nvme(_) | Registered::Lossy(_) => None,
            Registered::Gone => None,
        }
    }

    fn unregister(&mut self, device: DeviceId) {
        let index = device.0 as usize;
        match &mut self.devices[index] {
            Registered::Lossy(lossy) => {
                lossy.close();
                self.attend(index);
                return;
            }
            Registered::File(_) => return self.unregister_file(index),
            Registered::Nvme(lent) => {
                let awaited = lent.awaited();
                return self.unregister_nvme(index, awaited);
            }
            Registered::Remote(_) => return self.unregister_remote(index),
            Registered::Ram(its) => self.gauges.memory_went(its.ram.page_bytes()),
            Registered::Null(_) | Registered::RamTwin(_) => {}
            Registered::Model(model) => self.gauges.memory_went(model.page_bytes()),
            Registered::Gone => unreachable!("let go twice"),
        }
        self.devices[index] = Registered::Gone;
    }

    fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        self.turn.has_submitted = true;
        if let Op::Descriptor { fd, act: Act::Command(command), .. } = op {
            let pieces = pieces_of(&mut self.pieces, ticket);
            if let Err(errno) = self.commands.submit(ticket, *fd, command, pieces, until) {
                self.finished.push(Done { ticket, outcome: Err(errno) });
            }
            return;
        }
        let Some(index) = op.device().map(|device| device.0 as usize) else {
            let pieces = pieces_of(&mut self.pieces, ticket);
            let entry = entry(Target::Descriptor(-1), op, None, pieces);
            self.ring.push(entry.user_data(Tag::Plain(ticket).bits()), until);
            return;
        };
        match &mut self.devices[index] {
            Registered::File(_) => self.submit_to_file(ticket, index, op, until),
            Registered::Nvme(lent) => lent.submit(ticket, op, until),
            Registered::Remote(remote) => remote.submit(ticket, op, until),
            // Nobody else reaches memory of ours: it is never too late for it.
            Registered::Ram(Lender { ram, .. }) | Registered::RamTwin(ram) => {
                let outcome = ram.run(op);
                self.finished.push(Done { ticket, outcome });
            }
            Registered::Null(null) => {
                let outcome = null.run(op);
                self.finished.push(Done { ticket, outcome });
            }
            Registered::Model(model) => {
                let (at, outcome) = model.run(op, now(self.started));
                self.due_sequence += 1;
                self.due.push(Reverse((at, self.due_sequence, ticket, outcome)));
            }
            Registered::Lossy(_) if now(self.started) > until => {
                self.finished.push(Done { ticket, outcome: LATE });
            }
            Registered::Lossy(lossy) => {
                lossy.submit(ticket, op);
                self.attend(index);
            }
            Registered::Gone => {
                self.finished.push(Done { ticket, outcome: Err(Errno(libc::ENODEV)) });
            }
        }
    }

    fn run_now(&mut self, op: &Op) -> Option<Outcome> {
        let outcome = match &mut self.devices[op.device()?.0 as usize] {
            Registered::Ram(Lender { ram, .. }) | Registered::RamTwin(ram) => ram.run(op),
            Registered::Null(null) => null.run(op),
            Registered::File(_)
            | Registered::Nvme(_)
            | Registered::Remote(_)
            | Registered::Model(_)
            | Registered::Lossy(_)
            | Registered::Gone => return None,
        };
        self.turn.has_submitted = true;
        Some(outcome)
    }

    fn read_now(&mut self, device: DeviceId, offset: u64, into: &Buffers) -> Option<Outcome> {
        let outcome = match &self.devices[device.0 as usize] {
            Registered::Ram(Lender { ram, .. }) | Registered::RamTwin(ram) => {
                ram.read(offset, into)
            }
            Registered::Null(null) => null.check(offset, into.len() as u64),
            Registered::File(_)
            | Registered::Nvme(_)
            | Registered::Remote(_)
            | Registered::Model(_)
            | Registered::Lossy(_)
            | Registered::Gone => return None,
        };
        self.turn.has_submitted = true;
        Some(outcome)
    }

    fn lend(&mut self, device: DeviceId, offset: u64, len: usize) -> Option<Buffer> {
        let Registered::Ram(lender) = &self.devices[device.0 as usize] else { return None };
        self.turn.has_submitted = true;
        lender.lend(offset, len)
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        self.attend_remote();
        self.fill();
        self.tell_due();
        self.ring.enter();
        if let Some(polled) = self.polling.on() {
            polled.look(|| now(self.started));
        }
        if let Some(passthrough) = self.passing.on() {
            passthrough.ring.enter();
        }
        self.commands.enter();
        self.collect();
        self.reap_nvme();
        self.end_turn(!self.finished.is_empty());
        done.append(&mut self.finished);
    }

    fn kernel_calls(&self) -> u64 {
        self.gauges.counters().enters
    }

    fn idle(&mut self, until: Option<Instant>) -> bool {
        self.attend_remote();
        self.fill();
        let awaited = [self.await_nvme(), self.await_remote(), self.await_passthrough()];
        let awaited = awaited.into_iter().flatten().min();
        if let Some(fd) = self.commands.await_completions() {
            self.ring.push(readable(fd).user_data(Tag::Commands.bits()), Instant::MAX);
        }
        self.fill();
        // Nobody else tells the kernel of what went into this ring just now.
        if let Some(passthrough) = self.passing.on() {
            passthrough.ring.enter();
        }
        self.commands.enter();
        // What has no room yet is not in the kernel's hands: it is submitted before anybody sleeps.
        if !self.finished.is_empty() || self.has_backlog() {
            return true;
        }
        let now = now(self.started);
        let wait = until.map(|until| until.since(now)).into_iter().chain(awaited).min();
        let due = self.due.peek().map(|Reverse((at, ..))| at.since(now));
        let look = self.polling.on().and_then(|polled| polled.look_in(now));
        if self.ring.in_kernel() == 0 && wait.is_none() && due.is_none() && look.is_none() {
            return false;
        }
        let due = due.map(|due| due.saturating_sub(SLEEP_MIN));
        // What is due now is looked for until it is there.
        let soonest = [due, look].into_iter().flatten().min();
        if soonest != Some(Duration::ZERO) {
            self.sleep(wait.into_iter().chain(soonest).min());
        }
        true
    }
}
