//! Who makes associations for a reactor, keeps them alive, and makes them anew: a thread for each,
//! since all of that waits for the other side.
//!
//! ```text
//!            ┌────────────── lost ◄── keep-alive fails, or the reactor says so
//!            ▼                 ▲
//! waiting ─► connecting ─► in use ─► ended: the reactor has let the drive go
//!    ▲           │ refused, unreachable
//!    └───────────┘ waits, each time for longer
//! ```
//!
//! Invariants:
//! - a connection is offered only when the controller of the one before does nothing more: it was
//!   reset, or it has heard nothing for so long that it has given up. So a write that was lost on
//!   its way cannot come after what is written now;
//! - the namespace at its other end is the one that was opened, or there is no connection.

use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::association::{Admin, Association, Identity, Link};
use super::claim::{Claim, locked};
use super::{KEEP_ALIVE, SIGN_EVERY, Target, Trouble};
use crate::clock::machine_time;
use crate::nvme::power_cycle::PowerCycle;

/// With each so manieth of them the namespace is asked for one of its names.
const LOOK_EVERY: usize = 4;
/// How long to wait before it is tried to connect again; doubled each time.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// How reactors reach a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// That want to, and that can now.
    pub users: u32,
    pub connected: u32,
    /// Times that one was connected again.
    pub reconnects: u64,
    /// Why one could not, last; `None`: all could since.
    pub trouble: Option<Trouble>,
    /// Why one has given the drive up; `None`: it was seen since.
    pub lost: Option<Trouble>,
    /// One has given the drive up, and nobody has begun with it since.
    pub was_given_up: bool,
}

/// The association of who opened the drive, and when it last gave a sign of life, by the machine's
/// clock.
struct Using {
    association: Association,
    signed: Duration,
    /// When it was of use last, by the same clock.
    used: Duration,
    /// It has written what a volatile cache may still have.
    unflushed: bool,
}

/// What who opened the drive does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Read,
    Write,
    Flush,
}

/// What all users of one drive have in common.
pub(super) struct Station {
    pub(super) target: Target,
    /// As it was when it was opened.
    pub(super) identity: Identity,
    pub(super) claim: Claim,
    /// Whoever has it under way ends that, and asks nothing again.
    is_let_go: AtomicBool,
    report: Mutex<Report>,
    using: Mutex<Option<Using>>,
    /// What a volatile cache had may be lost, and no flush has said so yet.
    forgotten: AtomicBool,
    /// It may grow.
    bytes: AtomicU64,
    /// When it was last connected to.
    power: Mutex<Option<PowerCycle>>,
    /// Where threads may run: not on the CPU of a reactor that has them started.
    cpus: Option<CpuSet>,
}

impl Station {
    pub(super) fn new(target: Target, association: Association, claim: Claim) -> Station {
        let identity = association.identity().clone();
        let bytes = identity.its.bytes();
        let power = Mutex::new(identity.power);
        Station {
            target,
            identity,
            claim,
            is_let_go: AtomicBool::new(false),
            report: Mutex::default(),
            bytes: AtomicU64::new(bytes),
            power,
            using: Mutex::new(Some(Using::new(association))),
            forgotten: AtomicBool::new(false),
            cpus: sched_getaffinity(None).ok(),
        }
    }

    pub(super) fn report(&self) -> Report {
        locked(&self.report).clone()
    }

    /// A new association, to the same namespace as before.
    pub(super) fn open(&self) -> Result<Association, Trouble> {
        self.claim.await_quiet();
        let association = Association::open(&self.target)?;
        if !self.identity.is_still(association.identity()) {
            // Nothing was asked of it that matters.
            let _ = association.end();
            return Err(Trouble::Another);
        }
        // Commands are cut by what was so when the drive was attached.
        if association.identity().transfer_bytes < self.identity.transfer_bytes {
            let _ = association.end();
            return Err(Trouble::Unsuitable(
                "it takes less at once than before; detach the drive, and attach it anew",
            ));
        }
        self.bytes.fetch_max(association.identity().its.bytes(), Ordering::Relaxed);
        *locked(&self.power) = association.identity().power;
        Ok(association)
    }

    /// Bytes that it had when it was last connected to.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Since when it had power when it was last connected to; `None`: it did not say.
    pub(super) fn power(&self) -> Option<PowerCycle> {
        *locked(&self.power)
    }

    /// A user has given it up.
    pub(super) fn lost(&self, why: Trouble) {
        let mut report = locked(&self.report);
        report.lost = Some(why);
        report.was_given_up = true;
    }

    /// What keeps one that was given up from being there again says more than why it was.
    pub(super) fn still_lost(&self, why: &Trouble) {
        let mut report = locked(&self.report);
        if report.was_given_up {
            report.lost = Some(why.clone());
        }
    }

    pub(super) fn let_go(&self) {
        self.is_let_go.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_let_go(&self) -> bool {
        self.is_let_go.load(Ordering::Relaxed)
    }

    /// It was looked at, and is there.
    pub(super) fn seen(&self) {
        locked(&self.report).lost = None;
    }

    /// Does `work` for who opened the drive, with an association of its own.
    pub(super) fn with<T>(
        &self,
        kind: Work,
        mut work: impl FnMut(&mut Association) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        let mut using = locked(&self.using);
        let had_one = using.is_some();
        let done = self.once(&mut using, kind, &mut work);
        // What it had was of before the way broke, perhaps; a read does no harm twice.
        let done = match done {
            Err(_) if had_one && kind == Work::Read => self.once(&mut using, kind, &mut work),
            other => other,
        };
        done.inspect_err(|trouble| self.still_lost(trouble))
    }

    fn once<T>(
        &self,
        using: &mut Option<Using>,
        kind: Work,
        work: &mut impl FnMut(&mut Association) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        self.claim.await_quiet();
        // The controller may have taken a silent host for a dead one.
        let mut its = match using.take_if(Using::is_alive) {
            Some(its) => its,
            None => {
                self.end(using.take());
                Using::new(self.open()?)
            }
        };
        if kind == Work::Flush && self.forgotten.swap(false, Ordering::Relaxed) {
            *using = Some(its);
            return Err(Trouble::Forgetful);
        }
        its.unflushed |= kind == Work::Write;
        match work(&mut its.association) {
            Ok(done) => {
                its.unflushed &= kind != Work::Flush;
                its.used = machine_time();
                *using = Some(its);
                Ok(done)
            }
            // It is not used again. What it was asked may yet be done.
            Err(trouble) => {
                let lasts = its.association.lasts();
                self.forget(its.unflushed && kind != Work::Flush);
                if kind == Work::Write {
                    self.claim.unsettle();
                }
                let is_quiet = its.association.end().is_ok();
                if kind == Work::Write {
                    self.claim.settle((!is_quiet).then_some(lasts));
                }
                Err(trouble)
            }
        }
    }

    /// Ends the association of who opened the drive; there is another when it is needed.
    pub(super) fn rest(&self) {
        self.end(locked(&self.using).take());
    }

    /// The same, if it has not been used for moments and nobody is at it: it is not kept alive,
    /// and the other side would take this host for dead.
    pub(super) fn rest_if_unused(&self) {
        let Ok(mut using) = self.using.try_lock() else { return };
        self.end(using.take_if(|its| machine_time() - its.used >= SIGN_EVERY));
    }

    fn end(&self, using: Option<Using>) {
        let Some(Using { mut association, unflushed, .. }) = using else { return };
        self.forget(unflushed && association.flush().is_err());
        // Nothing is under way.
        let _ = association.end();
    }

    /// What was written may be lost, if so: the next flush says it.
    fn forget(&self, is_lost: bool) {
        if is_lost && self.identity.controller.volatile_cache {
            self.forgotten.store(true, Ordering::Relaxed);
        }
    }
}

impl Using {
    fn new(association: Association) -> Using {
        let now = machine_time();
        Using { association, signed: now, used: now, unflushed: false }
    }

    /// Whether the controller has it still: it hears of it in time, from here at the latest.
    fn is_alive(&mut self) -> bool {
        let since = machine_time() - self.signed;
        if since < SIGN_EVERY {
            return true;
        }
        let signed = machine_time();
        let is_alive = since < KEEP_ALIVE && self.association.keep_alive().is_ok();
        self.signed = signed;
        is_alive
    }
}

/// What the user of an association wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// To be connected.
    Path,
    /// The same, but anew.
    Another,
    /// Nothing more.
    End,
}

/// Where a user and its thread meet.
struct Desk {
    inner: Mutex<Inner>,
    bell: Condvar,
}

struct Inner {
    wish: Wish,
    /// Something that changes the drive was under way when that was said first. It holds until
    /// the association is settled, whatever is said after it.
    dirty: bool,
    link: Option<Link>,
    /// Another hold on the connection, to end it by.
    tap: Option<TcpStream>,
    /// It never will be connected again.
    over: Option<Trouble>,
}

impl Inner {
    fn new() -> Inner {
        Inner { wish: Wish::Path, dirty: false, link: None, tap: None, over: None }
    }
}

impl Desk {
    /// What is wanted, at once if it is something else than a path, and else after `wait`.
    fn wish(&self, wait: Duration) -> Wish {
        let inner = locked(&self.inner);
        let waited = self.bell.wait_timeout_while(inner, wait, |its| its.wish == Wish::Path);
        waited.unwrap_or_else(PoisonError::into_inner).0.wish
    }

    /// The connection is closed, where there was one.
    fn say(&self, wish: Wish, dirty: bool, claim: &Claim) {
        let mut inner = locked(&self.inner);
        inner.wish = wish;
        if dirty && !inner.dirty {
            inner.dirty = true;
            claim.unsettle();
        }
        // Closed by the last one that has it: what was not sent yet never is.
        inner.tap = None;
        drop(inner);
        self.bell.notify_one();
    }

    /// Takes a connection back that nobody has taken. True: so it was.
    fn withdraw(&self) -> bool {
        let mut inner = locked(&self.inner);
        let is_here = inner.link.take().is_some();
        if is_here && inner.wish == Wish::Path {
            inner.wish = Wish::Another;
        }
        is_here
    }
}

/// What there is for a user.
pub(super) enum Offered {
    Nothing,
    Link(Box<Link>),
    Over(Trouble),
}

/// One user's end. Dropping it ends its association.
pub(super) struct Keeper {
    desk: Arc<Desk>,
    station: Arc<Station>,
    /// Something that changes the drive may be under way.
    dirty: bool,
}

impl Keeper {
    pub(super) fn start(station: &Arc<Station>) -> Keeper {
        locked(&station.report).was_given_up = false;
        let desk = Desk { inner: Mutex::new(Inner::new()), bell: Condvar::new() };
        let desk = Arc::new(desk);
        let (its, common) = (desk.clone(), station.clone());
        let thread = std::thread::Builder::new().name("nvme-remote".into());
        let started = thread.spawn(move || {
            if let Some(cpus) = &common.cpus {
                // Where that is refused, it runs where it was started.
                let _ = sched_setaffinity(None, cpus);
            }
            locked(&common.report).users += 1;
            keep(&common, &its);
            locked(&common.report).users -= 1;
        });
        if let Err(error) = started {
            locked(&desk.inner).over = Some(Trouble::Unreachable(error.to_string()));
        }
        Keeper { desk, station: station.clone(), dirty: false }
    }

    pub(super) fn take(&self) -> Offered {
        let mut inner = locked(&self.desk.inner);
        match (inner.link.take(), inner.over.clone()) {
            (_, Some(trouble)) => Offered::Over(trouble),
            (Some(link), None) => Offered::Link(Box::new(link)),
            (None, None) => Offered::Nothing,
        }
    }

    /// The connection is of no use any more, and closed here. `dirty`: something that changes the
    /// drive was under way.
    pub(super) fn renew(&self, dirty: bool) {
        self.desk.say(Wish::Another, dirty, &self.station.claim);
    }

    /// The same before it is dropped.
    pub(super) fn leave(mut self, dirty: bool) {
        self.dirty = dirty;
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.desk.say(Wish::End, self.dirty, &self.station.claim);
    }
}

fn keep(station: &Station, desk: &Desk) {
    station.rest();
    let mut backoff = BACKOFF_MIN;
    let mut connections: u64 = 0;
    loop {
        let association = match station.open() {
            Ok(association) => association,
            Err(trouble) => {
                let is_over = trouble == Trouble::Another;
                locked(&station.report).trouble = Some(trouble.clone());
                if is_over {
                    locked(&desk.inner).over = Some(trouble);
                    return;
                }
                if desk.wish(backoff) == Wish::End {
                    return;
                }
                backoff = (backoff * 2).min(BACKOFF_MAX);
                continue;
            }
        };
        backoff = BACKOFF_MIN;
        connections += 1;
        {
            let mut report = locked(&station.report);
            report.connected += 1;
            report.reconnects += u64::from(connections > 1);
            report.trouble = None;
        }
        let (admin, link) = association.split();
        let wish = hold(station, desk, admin, link);
        locked(&station.report).connected -= 1;
        if wish == Wish::End {
            return;
        }
    }
}

/// Keeps a connection alive until it is wanted no longer, or lost; then it is ended.
fn hold(station: &Station, desk: &Desk, mut admin: Admin, link: Link) -> Wish {
    {
        let mut inner = locked(&desk.inner);
        inner.tap = link.tap();
        inner.link = Some(link);
    }
    let (mut wish, mut beats) = (desk.wish(SIGN_EVERY), 0_usize);
    while wish == Wish::Path {
        let began = machine_time();
        let mut sign = admin.keep_alive();
        if sign.is_ok() && beats.is_multiple_of(LOOK_EVERY) {
            sign = admin.look(&station.identity.name, beats / LOOK_EVERY);
        }
        beats += 1;
        if let Err(trouble) = sign {
            locked(&station.report).trouble = Some(trouble);
            wish = take_back(desk);
            break;
        }
        // From sign to sign, however long an answer takes.
        wish = desk.wish(SIGN_EVERY.saturating_sub(machine_time() - began));
    }
    let lasts = admin.lasts;
    // Nobody has taken it, perhaps.
    drop(locked(&desk.inner).link.take());
    let is_quiet = admin.reset().is_ok();
    let mut inner = locked(&desk.inner);
    inner.tap = None;
    if std::mem::take(&mut inner.dirty) {
        station.claim.settle((!is_quiet).then_some(lasts));
    }
    if inner.wish == wish && wish == Wish::Another {
        inner.wish = Wish::Path;
    }
    inner.wish
}

/// The connection is dead: whoever has it is told by its end, and says so.
fn take_back(desk: &Desk) -> Wish {
    if !desk.withdraw()
        && let Some(tap) = &locked(&desk.inner).tap
    {
        // It fails where the other side was faster.
        let _ = tap.shutdown(Shutdown::Both);
    }
    loop {
        match desk.wish(SIGN_EVERY) {
            Wish::Path => {}
            wish @ (Wish::Another | Wish::End) => return wish,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_under_way_is_not_forgotten_by_what_is_said_next() {
        let claim = Claim::default();
        let desk = Desk { inner: Mutex::new(Inner::new()), bell: Condvar::new() };
        desk.say(Wish::Another, true, &claim);
        desk.say(Wish::End, false, &claim);
        assert!(locked(&desk.inner).dirty);
        assert_eq!(desk.wish(Duration::ZERO), Wish::End);
        assert_eq!(claim.unsettled(), 1, "it is waited for");
        desk.say(Wish::End, true, &claim);
        assert_eq!(claim.unsettled(), 1, "once");
    }
}
