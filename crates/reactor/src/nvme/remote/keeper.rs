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
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::association::{Admin, Association, Identity, Link};
use super::{Target, Trouble};
use crate::clock::machine_time;

/// A sign of life is given so often.
const SIGN_EVERY: Duration = Duration::from_secs(1);
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
}

/// The association of who opened the drive, and when it was last used, by the machine's clock.
struct Using {
    association: Association,
    used: Duration,
}

/// What all users of one drive have in common.
pub(super) struct Station {
    pub(super) target: Target,
    /// As it was when it was opened.
    pub(super) identity: Identity,
    /// Before this moment of the machine's clock, a lost association may still act.
    quiet_at: Mutex<Duration>,
    report: Mutex<Report>,
    using: Mutex<Option<Using>>,
    /// It may grow.
    bytes: AtomicU64,
    /// Where threads may run: not on the CPU of a reactor that has them started.
    cpus: Option<CpuSet>,
}

impl Station {
    pub(super) fn new(target: Target, association: Association) -> Station {
        let identity = association.identity().clone();
        let bytes = identity.bytes();
        Station {
            target,
            identity,
            quiet_at: Mutex::default(),
            report: Mutex::default(),
            bytes: AtomicU64::new(bytes),
            using: Mutex::new(Some(Using { association, used: machine_time() })),
            cpus: sched_getaffinity(None).ok(),
        }
    }

    pub(super) fn report(&self) -> Report {
        locked(&self.report).clone()
    }

    /// A new association, to the same namespace as before.
    pub(super) fn open(&self) -> Result<Association, Trouble> {
        loop {
            let left = locked(&self.quiet_at).saturating_sub(machine_time());
            if left.is_zero() {
                break;
            }
            std::thread::park_timeout(left);
        }
        let association = Association::open(&self.target)?;
        if !self.identity.is_still(association.identity()) {
            // Nothing was asked of it that matters.
            let _ = association.end();
            return Err(Trouble::Another);
        }
        self.bytes.fetch_max(association.identity().bytes(), Ordering::Relaxed);
        Ok(association)
    }

    /// Bytes that it had when it was last connected to.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// A user has given it up.
    pub(super) fn lost(&self, why: Trouble) {
        locked(&self.report).lost = Some(why);
    }

    /// It was looked at, and is there.
    pub(super) fn seen(&self) {
        locked(&self.report).lost = None;
    }

    /// Does `work` for who opened the drive, with an association of its own. `changes`: it writes.
    pub(super) fn with<T>(
        &self,
        changes: bool,
        work: impl FnOnce(&mut Association) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        let mut using = locked(&self.using);
        let now = machine_time();
        let mut its = match using.take() {
            Some(its) if now - its.used < its.association.keep_alive() / 2 => its,
            // The controller may have taken a silent host for a dead one.
            Some(stale) => {
                let _ = stale.association.end();
                Using { association: self.open()?, used: now }
            }
            None => Using { association: self.open()?, used: now },
        };
        match work(&mut its.association) {
            Ok(done) => {
                its.used = machine_time();
                *using = Some(its);
                Ok(done)
            }
            // It is not used again. What it was asked may yet be done.
            Err(trouble) => {
                let lasts = its.association.lasts();
                if its.association.end().is_err() && changes {
                    self.wait_for_quiet(lasts);
                }
                Err(trouble)
            }
        }
    }

    /// Ends the association of who opened the drive; there is another when it is needed.
    pub(super) fn rest(&self) {
        if let Some(using) = locked(&self.using).take() {
            // Nothing is under way.
            let _ = using.association.end();
        }
    }

    /// A lost association may act for so long.
    fn wait_for_quiet(&self, lasts: Duration) {
        let mut quiet_at = locked(&self.quiet_at);
        *quiet_at = quiet_at.max(machine_time() + lasts);
    }
}

/// What the user of an association wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// To be connected.
    Path,
    /// The same, but anew. `dirty`: something that changes the drive was under way.
    Another { dirty: bool },
    /// Nothing more.
    End { dirty: bool },
}

/// Where a user and its thread meet.
struct Desk {
    inner: Mutex<Inner>,
    bell: Condvar,
}

struct Inner {
    wish: Wish,
    link: Option<Link>,
    /// It never will be connected again.
    over: Option<Trouble>,
}

impl Desk {
    /// What is wanted, at once if it is something else than a path, and else after `wait`.
    fn wish(&self, wait: Duration) -> Wish {
        let inner = locked(&self.inner);
        let waited = self.bell.wait_timeout_while(inner, wait, |its| its.wish == Wish::Path);
        waited.unwrap_or_else(PoisonError::into_inner).0.wish
    }

    fn say(&self, wish: Wish) {
        locked(&self.inner).wish = wish;
        self.bell.notify_one();
    }

    /// Takes a connection back that nobody has taken. True: so it was.
    fn withdraw(&self) -> bool {
        let mut inner = locked(&self.inner);
        let is_here = inner.link.take().is_some();
        if is_here && inner.wish == Wish::Path {
            inner.wish = Wish::Another { dirty: false };
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
    /// Something that changes the drive may be under way.
    dirty: bool,
}

impl Keeper {
    pub(super) fn start(station: &Arc<Station>) -> Keeper {
        let inner = Inner { wish: Wish::Path, link: None, over: None };
        let desk = Arc::new(Desk { inner: Mutex::new(inner), bell: Condvar::new() });
        let (its, station) = (desk.clone(), station.clone());
        let thread = std::thread::Builder::new().name("nvme-remote".into());
        let started = thread.spawn(move || {
            if let Some(cpus) = &station.cpus {
                // Where that is refused, it runs where it was started.
                let _ = sched_setaffinity(None, cpus);
            }
            locked(&station.report).users += 1;
            keep(&station, &its);
            locked(&station.report).users -= 1;
        });
        if let Err(error) = started {
            locked(&desk.inner).over = Some(Trouble::Unreachable(error.to_string()));
        }
        Keeper { desk, dirty: false }
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
        self.desk.say(Wish::Another { dirty });
    }

    /// The same before it is dropped.
    pub(super) fn leave(mut self, dirty: bool) {
        self.dirty = dirty;
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.desk.say(Wish::End { dirty: self.dirty });
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
                if matches!(desk.wish(backoff), Wish::End { .. }) {
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
        if matches!(wish, Wish::End { .. }) {
            return;
        }
    }
}

/// Keeps a connection alive until it is wanted no longer, or lost; then it is ended.
fn hold(station: &Station, desk: &Desk, mut admin: Admin, link: Link) -> Wish {
    let tap = link.tap();
    locked(&desk.inner).link = Some(link);
    let mut wish = desk.wish(SIGN_EVERY);
    while wish == Wish::Path {
        if let Err(trouble) = admin.keep_alive() {
            locked(&station.report).trouble = Some(trouble);
            wish = take_back(desk, tap.as_ref());
            break;
        }
        wish = desk.wish(SIGN_EVERY);
    }
    // The last one closes it; what was not sent yet never is.
    drop(tap);
    let (lasts, is_quiet) = (admin.lasts, admin.reset().is_ok());
    let (Wish::Another { dirty } | Wish::End { dirty }) = wish else {
        unreachable!("a connection that is wanted");
    };
    if dirty && !is_quiet {
        station.wait_for_quiet(lasts);
    }
    let mut inner = locked(&desk.inner);
    inner.link = None;
    if inner.wish == wish && matches!(wish, Wish::Another { .. }) {
        inner.wish = Wish::Path;
    }
    inner.wish
}

/// The connection is dead: whoever has it is told by its end, and says so.
fn take_back(desk: &Desk, tap: Option<&TcpStream>) -> Wish {
    if !desk.withdraw()
        && let Some(tap) = tap
    {
        // It fails where the other side was faster.
        let _ = tap.shutdown(Shutdown::Both);
    }
    loop {
        match desk.wish(SIGN_EVERY) {
            Wish::Path => {}
            wish @ (Wish::Another { .. } | Wish::End { .. }) => return wish,
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
