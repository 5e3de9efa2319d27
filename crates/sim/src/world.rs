//! The world under the engine: a virtual clock, simulated drives, and what is in flight on them.
//!
//! Everything that happens is an operation that completes at a moment; operations complete in the
//! order of (time, sequence). Once the world is dark (power cut, crash, or a failed check) nothing
//! happens any more, and the reactor's `run` returns.
//!
//! Chance comes from named streams of the seed, so that one more draw in one stream does not
//! change another.

use std::borrow::Cow;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::rc::Rc;

use ashlar_format::drive_label::MemberLayout;
use ashlar_raid::layout::Layout;
use ashlar_reactor::backend::{Backend, Instant};
use ashlar_reactor::buffer::{Buffer, Buffers, DIRECT_ALIGN};
use ashlar_reactor::op::{Device, DeviceId, Done, Errno, LATE, Op, Outcome, Ticket};
use ashlar_reactor::prng::Prng;

use crate::canary::{self, Canary, Sabotage};
use crate::drive::{Loss, SimDrive};
use crate::hosts::{Contests, FIRST, Found, Hosts, SECOND};
use crate::inspect;
use crate::trace::{Trace, place};

struct InFlight {
    /// Who waits for it, and by which of its tickets.
    host: usize,
    ticket: Ticket,
    drive: u32,
    op: Op,
    /// Writes that a flush covers.
    covers: u64,
}

/// What is to happen at a certain completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtCompletion {
    /// The lights go out; the scenario decides what that was.
    Dark,
    /// The drive stops answering.
    Death(u32),
    /// The drive that would complete it stops answering.
    OwnDeath,
    /// This operation, and every retry of it, fails.
    Fail,
}

/// How often the array was changed while it served: also counted while that is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    pub policy: u64,
    pub grown: u64,
    pub added: u64,
    /// Drives that took a member's place.
    pub filled: u64,
    /// Stops of this life that put in place what the journal had.
    pub drained: u64,
}

/// How often more drives were away than the array bears, and how often they could be taken back
/// without a start; and how often there was no space for a while.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outages {
    pub begun: u64,
    pub healed: u64,
    pub full: u64,
}

/// What became of arrays that had lost more than their level bears.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PastLimit {
    /// Reads that were answered with data, and with an error.
    pub served: u64,
    pub refused: u64,
    /// Arrays that were whole again once all drives were back.
    pub whole: u64,
    /// Starts by force that gave up, or kept, what the journal says and cannot be done.
    pub forced: u64,
}

/// After a silence a drive answers what it was asked within this time.
pub const WAKING_NS_MAX: u64 = 1_000_000;
/// Virtual time in which any life must end.
const LIFE_NS_MAX: u64 = 4 * 3600 * 1_000_000_000;
/// And so many operations: some that hang are busy.
const LIFE_OPERATIONS_MAX: u64 = 2_000_000;

pub struct World {
    now_ns: u64,
    life_began_ns: u64,
    life_began_after: u64,
    sequence: u64,
    /// By number.
    in_flight: Vec<Option<InFlight>>,
    /// When each operation in flight completes: (time, sequence, number).
    due: BinaryHeap<Reverse<(u64, u64, u32)>>,
    pub drives: Vec<SimDrive>,
    /// Until then no drive answers anything.
    pub silent_until_ns: u64,
    /// Some have no space, or had none a moment ago: what is void may not be so there.
    pub is_short: bool,
    /// But for reads and flushes, as if the file system under all of them were frozen.
    pub frozen: bool,
    latency: Prng,
    pub faults: Prng,
    /// What becomes of caches that single drives lose.
    pub caches: Prng,
    /// Operations completed since the world began.
    pub completions: u64,
    /// So many of them when the array last was up.
    pub up_after: u64,
    /// Reads that the engine also asked others for, in lives that ended in order.
    pub hedged: u64,
    /// Reads that were done by a view of the array.
    pub seen: u64,
    /// Volumes that came, beside the main one.
    pub volumes_made: u64,
    pub changes: Changes,
    pub outages: Outages,
    pub past_limit: PastLimit,
    pub hosts: Hosts,
    pub contests: Contests,
    /// What the clock was set forward or back by.
    pub clock_set_s: i64,
    /// When the last planned fault struck.
    pub changes_at_fault: Changes,
    /// Lives that began when members were being added.
    pub restriping_lives: u64,
    plans: BTreeMap<u64, AtCompletion>,
    dark: bool,
    /// The first check that failed.
    failure: Option<String>,
    pub trace: Trace,
    /// The planted bug, and whether it is at work yet.
    pub canary: Option<Canary>,
    pub canary_awake: bool,
    /// Of the array, once it is there, and of each of its drives.
    pub array: Option<(Layout, MemberLayout)>,
    /// Place of the operation that fails for good.
    failing: Option<(u32, u64, &'static str)>,
}

pub type SharedWorld = Rc<RefCell<World>>;

impl World {
    pub fn new(seed: u64, trace: bool) -> World {
        World {
            now_ns: 0,
            life_began_ns: 0,
            life_began_after: 0,
            sequence: 0,
            in_flight: Vec::new(),
            due: BinaryHeap::new(),
            drives: Vec::new(),
            silent_until_ns: 0,
            frozen: false,
            is_short: false,
            latency: Prng::stream(seed, "latency"),
            faults: Prng::stream(seed, "faults"),
            caches: Prng::stream(seed, "caches"),
            completions: 0,
            up_after: 0,
            hedged: 0,
            seen: 0,
            volumes_made: 0,
            changes: Changes::default(),
            outages: Outages::default(),
            past_limit: PastLimit::default(),
            hosts: Hosts::default(),
            contests: Contests::default(),
            clock_set_s: 0,
            changes_at_fault: Changes::default(),
            restriping_lives: 0,
            plans: BTreeMap::new(),
            dark: false,
            failure: None,
            trace: Trace::new(trace),
            canary: None,
            canary_awake: false,
            array: None,
            failing: None,
        }
    }

    pub fn add_drive(&mut self, drive: SimDrive) -> u32 {
        self.drives.push(drive);
        u32::try_from(self.drives.len() - 1).expect("few drives")
    }

    pub fn drive(&mut self, drive: u32) -> &mut SimDrive {
        &mut self.drives[drive as usize]
    }

    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    pub fn is_dark(&self) -> bool {
        self.dark
    }

    pub fn note(&mut self, text: impl FnOnce() -> String) {
        self.trace.note(self.now_ns, text);
    }

    /// A check failed: the seed ends here.
    pub fn fail(&mut self, why: String) {
        self.note(|| format!("FAILED: {why}"));
        self.failure.get_or_insert(why);
        self.dark = true;
    }

    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Plans something `after` so many completions from now.
    pub fn plan(&mut self, after: u64, what: AtCompletion) {
        let mut at = self.completions + after.max(1);
        while self.plans.contains_key(&at) {
            at += 1;
        }
        self.plans.insert(at, what);
    }

    /// Whether a drive is to die, and has not yet.
    pub fn expects_a_death(&self) -> bool {
        let is_one =
            |what: &AtCompletion| matches!(what, AtCompletion::Death(_) | AtCompletion::OwnDeath);
        self.plans.values().any(is_one)
    }

    /// Faults planned and not come yet are called off.
    pub fn clear_plans(&mut self) {
        self.plans.clear();
        self.failing = None;
    }

    pub fn kill(&mut self, drive: u32) {
        self.note(|| format!("drive {drive} dies"));
        self.drive(drive).dead = true;
        self.drive(drive).unpowered = false;
    }

    /// The power fails, or (`loss` is `None`) only the process dies. Nothing of this life goes on.
    pub fn end_life(&mut self, loss: Option<Loss>) {
        self.note(|| match loss {
            Some(loss) => format!("POWER CUT ({loss:?})"),
            None => "PROCESS CRASH".into(),
        });
        while let Some(left) = self.next_due(u64::MAX) {
            self.land_partly(&left);
        }
        let World { drives, caches, .. } = self;
        drives.iter_mut().for_each(|drive| drive.lose_if_due(u64::MAX, true, caches));
        if let Some(loss) = loss {
            let World { drives, faults, .. } = self;
            drives.iter_mut().for_each(|drive| drive.cut_power(loss, faults));
        }
        self.clear_plans();
    }

    /// The next life begins.
    pub fn begin_life(&mut self) {
        assert!(self.due.is_empty(), "operations of the last life are still in flight");
        self.dark = self.failure.is_some();
        self.silent_until_ns = 0;
        for drive in &mut self.drives {
            (drive.refuses, drive.misses, drive.silent_until_ns) = (None, 0, 0);
            drive.full = None;
            drive.refused.clear();
            drive.held_back = None;
            drive.heal_cache();
            drive.dead &= !std::mem::take(&mut drive.unpowered);
        }
        self.hosts = Hosts::default();
        self.life_began_ns = self.now_ns;
        self.life_began_after = self.completions;
    }

    /// The array serves from now on.
    pub fn comes_up(&mut self) {
        self.up_after = self.completions;
        self.changes.drained = 0;
    }

    pub fn go_dark(&mut self) {
        self.dark = true;
    }

    /// Operations that are under way.
    pub fn tickets(&self) -> BTreeSet<u32> {
        self.in_flight.iter().flatten().map(number).collect()
    }

    /// Those on these drives of the host that leads, as text.
    pub fn in_flight(&self, on: impl Fn(u32) -> bool) -> Vec<String> {
        let text = |op: &InFlight| format!("d{} {:?}", op.drive, place(&op.op));
        let its = |op: &&InFlight| on(op.drive) && self.hosts.leads(op.host);
        self.in_flight.iter().flatten().filter(its).map(text).collect()
    }

    /// The operation that completes next, if it does until then.
    fn next_due(&mut self, until_ns: u64) -> Option<InFlight> {
        let Reverse((at, ..)) = self.due.peek()?;
        if *at > until_ns {
            return None;
        }
        let Reverse((_, _, number)) = self.due.pop()?;
        self.in_flight[number as usize].take()
    }

    /// Puts an operation off that is due while its drive is silent. False: it is not.
    fn put_off(&mut self, op: &InFlight) -> bool {
        let concerned = !self.frozen || matches!(op.op, Op::Write { .. } | Op::WriteZeroes { .. });
        let of_all = if concerned { self.silent_until_ns } else { 0 };
        let until = self.drive(op.drive).silent_until_ns.max(of_all);
        let silent = self.now_ns < until;
        if silent {
            self.sequence += 1;
            let at = until + self.latency.below(WAKING_NS_MAX);
            self.due.push(Reverse((at, self.sequence, number(op))));
        }
        silent
    }

    fn land_partly(&mut self, left: &InFlight) {
        let World { drives, faults, .. } = self;
        let drive = &mut drives[left.drive as usize];
        match &left.op {
            Op::Write { offset, from, .. } => {
                drive.write_torn(*offset, from.len() as u64, Some(&bytes_of(from)), faults);
            }
            Op::WriteZeroes { offset, len, .. } => drive.write_torn(*offset, *len, None, faults),
            Op::Read { .. } | Op::Flush { .. } | Op::Descriptor { .. } => {}
        }
    }

    fn submit(&mut self, host: usize, ticket: Ticket, drive: u32, op: &Op) {
        if !self.dark && host != self.hosts.owner {
            self.claims(host, op);
        }
        if self.dark {
            return;
        }
        let traits = self.drive(drive).traits;
        assert_is_direct(op, traits.sector_bytes);
        let spread = traits.latency_ns_max - traits.latency_ns_min;
        let mut latency = traits.latency_ns_min + self.latency.below(spread + 1);
        let now_ns = self.now_ns;
        let own = self.drive(drive);
        if now_ns < own.slow_until_ns {
            latency *= own.slow_factor;
        }
        let covers = own.writes_done();
        self.sequence += 1;
        let op = InFlight { host, ticket, drive, op: op.clone(), covers };
        self.due.push(Reverse((self.now_ns + latency, self.sequence, number(&op))));
        let slot = number(&op) as usize;
        if self.in_flight.len() <= slot {
            self.in_flight.resize_with(slot + 1, || None);
        }
        let before = self.in_flight[slot].replace(op);
        assert!(before.is_none(), "ticket {ticket:?} is in flight twice");
    }

    /// A host that has not the array changes something.
    fn claims(&mut self, host: usize, op: &Op) {
        let (kind, offset, len) = place(op);
        let (true, Some((_, areas))) = (matches!(kind, "write" | "zero"), &self.array) else {
            return;
        };
        if areas.lease.range().contains(&offset) {
            self.hosts.is_contested = true;
        } else if host == FIRST {
            self.fail(format!("two hosts write: {kind} {offset} +{len} after the other began to"));
        } else {
            self.is_taken_over();
        }
    }

    /// The second host begins to write.
    fn is_taken_over(&mut self) {
        let leases = self.array.as_ref().map(|(_, areas)| areas.lease.range());
        let its = |op: &&InFlight| {
            let (kind, offset, _) = place(&op.op);
            let is_lease = leases.as_ref().is_none_or(|leases| leases.contains(&offset));
            op.host == FIRST && matches!(kind, "write" | "zero") && !is_lease
        };
        let left = self.in_flight.iter().flatten().filter(its).count();
        self.note(|| "the array is TAKEN OVER".into());
        if left > 0 {
            self.fail(format!("two hosts write: {left} of the other are under way"));
        }
        let drives = || self.hosts.offered.iter().map(|drive| &self.drives[*drive as usize]);
        let (unsure, bad) = (inspect::unsure_stripes(drives()), inspect::bad_stripes(drives()));
        self.hosts.take(self.now_ns, Found { unsure, bad });
        self.contests.taken += 1;
    }

    fn reap(&mut self, host: usize, done: &mut Vec<Done>) {
        self.land_due();
        self.hosts.hear(host, done);
    }

    fn land_due(&mut self) {
        while !self.dark {
            let Some(op) = self.next_due(self.now_ns) else { return };
            if self.put_off(&op) {
                let slot = number(&op) as usize;
                self.in_flight[slot] = Some(op);
                continue;
            }
            self.completions += 1;
            let planned = self.plans.remove(&self.completions);
            if planned.is_some() {
                self.changes_at_fault = self.changes;
            }
            match planned {
                Some(AtCompletion::Dark) => self.dark = true,
                Some(AtCompletion::Death(drive)) => self.kill(drive),
                Some(AtCompletion::OwnDeath) => self.kill(op.drive),
                Some(AtCompletion::Fail) => {
                    let (kind, offset, _) = place(&op.op);
                    self.failing = Some((op.drive, offset, kind));
                }
                None => {}
            }
            if self.dark {
                // It was cut off in its last moment.
                self.land_partly(&op);
                return;
            }
            let outcome = self.complete(&op);
            let (kind, offset, len) = place(&op.op);
            let failed = outcome.err().map(|errno| errno.0);
            self.trace.op(self.now_ns, (op.drive, kind, offset, len), failed);
            self.hosts.answer(op.host, Done { ticket: op.ticket, outcome });
        }
    }

    fn complete(&mut self, done: &InFlight) -> Outcome {
        if self.drive(done.drive).dead {
            self.land_partly(done);
            return Err(Errno(libc::ENODEV));
        }
        let World { drives, caches, now_ns, .. } = self;
        let adds = !matches!(done.op, Op::Read { .. });
        drives[done.drive as usize].lose_if_due(*now_ns, adds, caches);
        let (kind, at, _) = place(&done.op);
        if self.failing == Some((done.drive, at, kind)) {
            self.land_partly(done);
            return Err(Errno(libc::EIO));
        }
        match &done.op {
            Op::Read { offset, into, .. } => {
                let outcome = self.read(done.drive, *offset, into);
                let is_blind = self.sabotaged(|canary| canary.on_anothers_lease());
                if is_blind && done.host == SECOND && !self.hosts.is_contested {
                    canary::nobody_has_it(self.array.as_ref(), *offset, into);
                }
                outcome
            }
            Op::Write { offset, from, .. } => {
                self.write(done.drive, *offset, from.len() as u64, Some(&bytes_of(from)))
            }
            Op::WriteZeroes { .. } if !self.drive(done.drive).traits.zeroes => {
                Err(Errno(libc::EOPNOTSUPP))
            }
            Op::WriteZeroes { offset, len, .. } => self.write(done.drive, *offset, *len, None),
            Op::Flush { .. } => self.flush(done),
            Op::Descriptor { .. } => Err(Errno(libc::EINVAL)),
        }
    }

    fn flush(&mut self, done: &InFlight) -> Outcome {
        let now_ns = self.now_ns;
        if self.sabotaged(|canary| canary.on_flush()) {
            return Ok(0);
        }
        match self.drive(done.drive).fails_flush(now_ns) {
            Some(_) if self.sabotaged(|canary| canary.on_failed_flush()) => Ok(0),
            Some(errno) => Err(Errno(errno)),
            None => {
                self.drive(done.drive).flush(done.covers);
                Ok(0)
            }
        }
    }

    fn sabotaged(&self, by: impl FnOnce(Canary) -> bool) -> bool {
        self.canary_awake && self.canary.is_some_and(by)
    }

    fn read(&mut self, drive: u32, offset: u64, into: &Buffers) -> Outcome {
        let len = into.len() as u64;
        let World { drives, faults, .. } = self;
        let drive = &mut drives[drive as usize];
        if !drive.accepts(offset, len) {
            return Err(Errno(libc::EINVAL));
        }
        if drive.stumbles(offset, false, faults) || drive.is_latent(offset, len) {
            return Err(Errno(libc::EIO));
        }
        drive.read(offset, into);
        Ok(len)
    }

    fn write(&mut self, drive: u32, at: u64, len: u64, bytes: Option<&[u8]>) -> Outcome {
        let World { drives, faults, canary, canary_awake, array, .. } = self;
        let drive = &mut drives[drive as usize];
        if !drive.accepts(at, len) {
            return Err(Errno(libc::EINVAL));
        }
        if !drive.has_space(at) {
            drive.write_torn(at, len, bytes, faults);
            return Err(Errno(libc::ENOSPC));
        }
        let refuses = drive.refuses(at);
        if refuses || drive.stumbles(at, true, faults) {
            drive.write_torn(at, len, bytes, faults);
            drive.refused.extend(refuses.then_some(at));
            return Err(Errno(libc::EIO));
        }
        drive.refused.retain(|refused| !(at..at + len).contains(refused));
        let canary = canary.filter(|_| *canary_awake);
        let sabotage = canary
            .map_or(Sabotage::Nothing, |canary| canary.on_write(drive, array.as_ref(), at, bytes));
        let Some(to) = drive.fate(at, len) else { return Ok(len) };
        match (sabotage, bytes) {
            (Sabotage::Drop, _) => {}
            (Sabotage::Replace(bytes), _) => drive.write(to, &bytes),
            (Sabotage::Nothing, Some(bytes)) => drive.write(to, bytes),
            (Sabotage::Nothing, None) => drive.write_zeroes(to, len),
        }
        if to != at {
            drive.lies_at(to, len);
        }
        Ok(len)
    }
}

/// By which an operation is found, whoever waits for it.
fn number(op: &InFlight) -> u32 {
    op.ticket.0 * 2 + u32::from(op.host == SECOND)
}

/// Direct I/O takes whole sectors from each piece of memory, at addresses that a drive can reach:
/// pieces that only together are some, and others, real drives refuse.
fn assert_is_direct(op: &Op, sector_bytes: u32) {
    let (Op::Read { into: memory, .. } | Op::Write { from: memory, .. }) = op else { return };
    let unit = DIRECT_ALIGN.max(sector_bytes as usize);
    let shown = || {
        let piece = |its: &Buffer| (its.bytes().as_ptr().addr() % unit, its.len());
        memory.pieces().iter().map(piece).collect::<Vec<_>>()
    };
    assert!(memory.is_aligned(unit), "{:?} of memory at {:?} of {unit}", place(op), shown());
}

/// What a write brings; not copied if it lies in one piece.
fn bytes_of(from: &Buffers) -> Cow<'_, [u8]> {
    if let [piece] = from.pieces() {
        return piece.bytes().into();
    }
    let mut bytes = vec![0; from.len()];
    from.copy_to_slice(&mut bytes);
    bytes.into()
}

/// A host's view of the world, for one life.
pub struct SimBackend {
    world: SharedWorld,
    host: usize,
    devices: Vec<u32>,
    late: Vec<Ticket>,
}

impl SimBackend {
    pub fn new(world: &SharedWorld) -> SimBackend {
        SimBackend::of(FIRST, world)
    }

    pub fn of(host: usize, world: &SharedWorld) -> SimBackend {
        SimBackend { world: world.clone(), host, devices: Vec::new(), late: Vec::new() }
    }
}

impl Backend for SimBackend {
    fn now(&self) -> Instant {
        Instant::from_ns(self.world.borrow().now_ns)
    }

    /// An hour in 900 ms: scrubs become due while there is something to scrub.
    fn unix_s(&self) -> u64 {
        let world = self.world.borrow();
        (1_800_000_000 + world.now_ns / 250_000).saturating_add_signed(world.clock_set_s)
    }

    fn register(&mut self, device: Device) -> DeviceId {
        let Device::Simulated { drive } = device else {
            panic!("the simulated world has simulated drives only");
        };
        self.devices.push(drive);
        DeviceId(u32::try_from(self.devices.len() - 1).expect("few drives"))
    }

    /// For who reads by a view, as if from elsewhere.
    fn twin(&self, device: DeviceId) -> Option<Device> {
        Some(Device::Simulated { drive: self.devices[device.0 as usize] })
    }

    fn unregister(&mut self, device: DeviceId) {
        assert!((device.0 as usize) < self.devices.len());
    }

    fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        let is_late = self.now() > until;
        if is_late && !self.world.borrow().sabotaged(|canary| canary.on_late_write()) {
            self.late.push(ticket);
            return;
        }
        let device = match op {
            Op::Read { device, .. }
            | Op::Write { device, .. }
            | Op::Flush { device }
            | Op::WriteZeroes { device, .. } => *device,
            Op::Descriptor { .. } => panic!("nothing in the simulated world has a descriptor"),
        };
        let drive = self.devices[device.0 as usize];
        self.world.borrow_mut().submit(self.host, ticket, drive, op);
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        done.extend(self.late.drain(..).map(|ticket| Done { ticket, outcome: LATE }));
        self.world.borrow_mut().reap(self.host, done);
    }

    fn idle(&mut self, until: Option<Instant>) -> bool {
        let until = until.map(Instant::as_ns);
        let mut world = self.world.borrow_mut();
        if world.dark {
            return false;
        }
        if !self.late.is_empty() || world.hosts.hears(self.host) {
            return true;
        }
        if !world.hosts.leads(self.host) {
            world.hosts.rests(self.host, until);
            return false;
        }
        let now_ns = world.now_ns;
        if let Some(beside) = world.hosts.take_turn(now_ns) {
            world.contests.awoken += u64::from(world.hosts.wakes());
            drop(world);
            beside.run();
            return true;
        }
        let next = world.due.peek().map(|Reverse((at, ..))| *at);
        let wake = next.into_iter().chain(until).chain(world.hosts.beside_at_ns()).min();
        let Some(wake) = wake else { return false };
        world.now_ns = world.now_ns.max(wake);
        let is_long = world.now_ns > world.life_began_ns + LIFE_NS_MAX;
        if is_long || world.completions > world.life_began_after + LIFE_OPERATIONS_MAX {
            world.fail("hung: a life does not end, something waits for ever".into());
            return false;
        }
        true
    }
}
