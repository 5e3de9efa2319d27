//! How fast an export may go: requests and bytes a second, reads and writes apart.
//!
//! Each limit is a virtual schedule (the generic cell rate algorithm, ITU-T I.371, annex A): a
//! request is due one interval after the one before it, and may be early by what was saved up. So
//! a limit is one number that all reactors of an export share, and costs one atomic operation;
//! where nothing is limited, two loads.

use std::cell::Cell;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use ashlar_reactor::backend::Instant;
use ashlar_reactor::executor::Reactor;

use crate::request::Operation;

/// Requests that wait look this often whether the limit was changed, or they are not to wait.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longest time for which unused allowance is saved up.
pub const BURST_MAX: Duration = Duration::from_secs(3600);

/// One direction. `None`: not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    pub requests_per_second: Option<u64>,
    pub bytes_per_second: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    pub read: Rate,
    /// Writes, discards and write-zeroes; of the latter those bytes that have to be written for
    /// them.
    pub write: Rate,
    /// For how long unused allowance is saved up, at most [`BURST_MAX`].
    pub burst: Duration,
}

/// One limit, shared by reactors.
#[derive(Debug, Default)]
struct Meter {
    /// 0: no limit.
    per_second: AtomicU64,
    /// When the next request is due, in nanoseconds of the limits' clock.
    due: AtomicU64,
}

#[derive(Debug, Default)]
struct Lane {
    requests: Meter,
    bytes: Meter,
}

/// The limits of one export, for all its reactors.
#[derive(Debug)]
pub struct RateLimits {
    read: Lane,
    write: Lane,
    burst_ns: AtomicU64,
    /// Counts changes, so that who waits asks anew.
    generation: AtomicU64,
    began: std::time::Instant,
}

impl Meter {
    fn set(&self, per_second: Option<u64>) {
        self.per_second.store(per_second.unwrap_or(0), Ordering::Relaxed);
        self.due.store(0, Ordering::Relaxed);
    }

    fn is_on(&self) -> bool {
        self.per_second.load(Ordering::Relaxed) > 0
    }

    /// Takes `amount` of the allowance; when it may be used, not before `now`.
    fn charge(&self, amount: u64, now: u64, burst: u64) -> u64 {
        let per_second = self.per_second.load(Ordering::Relaxed);
        if per_second == 0 {
            return now;
        }
        let cost = cost_ns(amount, per_second);
        let charge = |due: u64| Some(due.max(now).saturating_add(cost));
        let due = self.due.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charge);
        let (Ok(due) | Err(due)) = due;
        due.saturating_sub(burst).max(now)
    }

    /// Gives back what was charged and not used, before it was due. It shortens the wait of who
    /// comes later. Who waits already keeps the moment that was worked out behind what was dropped:
    /// the limit holds all the same, and others need not ask anew.
    fn refund(&self, amount: u64) {
        let per_second = self.per_second.load(Ordering::Relaxed);
        if per_second > 0 {
            let refund = |due: u64| Some(due.saturating_sub(cost_ns(amount, per_second)));
            let _ = self.due.fetch_update(Ordering::Relaxed, Ordering::Relaxed, refund);
        }
    }
}

fn cost_ns(amount: u64, per_second: u64) -> u64 {
    let cost = u128::from(amount) * 1_000_000_000 / u128::from(per_second);
    u64::try_from(cost).unwrap_or(u64::MAX)
}

impl RateLimits {
    #[expect(clippy::disallowed_methods, reason = "a clock that all reactors of the export share")]
    pub fn new(rates: Rates) -> Arc<RateLimits> {
        let limits = RateLimits {
            read: Lane::default(),
            write: Lane::default(),
            burst_ns: AtomicU64::new(0),
            generation: AtomicU64::new(0),
            began: std::time::Instant::now(),
        };
        limits.set(rates);
        Arc::new(limits)
    }

    /// From now on these hold, also for what waits already; as much is saved up as can be.
    pub fn set(&self, rates: Rates) {
        let burst = u64::try_from(rates.burst.min(BURST_MAX).as_nanos()).unwrap_or(u64::MAX);
        self.burst_ns.store(burst, Ordering::Relaxed);
        for (lane, rate) in [(&self.read, rates.read), (&self.write, rates.write)] {
            lane.requests.set(rate.requests_per_second);
            lane.bytes.set(rate.bytes_per_second);
        }
        self.generation.fetch_add(1, Ordering::Release);
    }
}

/// What a request takes of an export's allowance: itself, and so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Toll {
    Read(u64),
    Write(u64),
    /// More bytes of a write that was let in already.
    MoreWritten(u64),
    None,
}

/// Whether what waits is still to be done. Who makes it false wakes the tasks that wait.
pub(crate) type Wanted<'a> = &'a dyn Fn() -> bool;

impl Toll {
    pub(crate) fn of(operation: &Operation) -> Toll {
        match operation {
            Operation::Read { into, .. } => Toll::Read(into.len() as u64),
            Operation::Write { from, .. } => Toll::Write(from.len() as u64),
            // What is written for them is paid for bit by bit.
            Operation::Discard { .. } | Operation::WriteZeroes { .. } => Toll::Write(0),
            Operation::Flush | Operation::Identify { .. } | Operation::Refuse(_) => Toll::None,
        }
    }
}

/// The limits of an export as one of its reactors keeps them.
pub(crate) struct Throttle {
    reactor: Reactor,
    limits: Arc<RateLimits>,
    /// What the limits' clock is ahead of the reactor's, in nanoseconds; it may wrap.
    ahead: u64,
    /// How many want nobody to wait.
    hurries: Cell<u32>,
    waited: Cell<u64>,
}

impl Throttle {
    pub(crate) fn new(reactor: &Reactor, limits: Arc<RateLimits>) -> Throttle {
        let shared = u64::try_from(limits.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let ahead = shared.wrapping_sub(reactor.now().as_ns());
        let (hurries, waited) = Default::default();
        Throttle { reactor: reactor.clone(), limits, ahead, hurries, waited }
    }

    /// Requests that had to wait.
    pub(crate) fn waited(&self) -> u64 {
        self.waited.get()
    }

    /// Nobody waits until [`calm`](Throttle::calm): a queue is to come to rest. What goes early
    /// counts, so whoever comes after waits for it.
    pub(crate) fn hurry(&self) {
        self.hurries.set(self.hurries.get() + 1);
    }

    pub(crate) fn calm(&self) {
        self.hurries.set(self.hurries.get() - 1);
    }

    /// Whether bytes that are written count.
    pub(crate) fn paces_written_bytes(&self) -> bool {
        self.limits.write.bytes.is_on()
    }

    /// Waits until what takes this may begin. False: it is not wanted any more, and takes nothing.
    #[inline]
    pub(crate) async fn admit(&self, toll: Toll, wanted: Wanted<'_>) -> bool {
        let (lane, requests, bytes) = match toll {
            Toll::Read(bytes) => (&self.limits.read, 1, bytes),
            Toll::Write(bytes) => (&self.limits.write, 1, bytes),
            Toll::MoreWritten(bytes) => (&self.limits.write, 0, bytes),
            Toll::None => return true,
        };
        if lane.requests.is_on() || lane.bytes.is_on() {
            return self.wait(lane, (requests, bytes), wanted).await;
        }
        true
    }

    async fn wait(&self, lane: &Lane, (requests, bytes): (u64, u64), wanted: Wanted<'_>) -> bool {
        let mut has_waited = false;
        loop {
            let generation = self.limits.generation.load(Ordering::Acquire);
            let is_changed = || self.limits.generation.load(Ordering::Acquire) != generation;
            let burst = self.limits.burst_ns.load(Ordering::Relaxed);
            let now = self.reactor.now().as_ns().wrapping_add(self.ahead);
            let of_bytes = lane.bytes.charge(bytes, now, burst);
            let start = match requests {
                0 => of_bytes,
                _ => lane.requests.charge(requests, now, burst).max(of_bytes),
            };
            let start = Instant::from_ns(start.wrapping_sub(self.ahead));
            let has_to_wait = || self.reactor.now() < start && self.hurries.get() == 0;
            while has_to_wait() && !is_changed() && wanted() {
                if !std::mem::replace(&mut has_waited, true) && requests > 0 {
                    self.waited.set(self.waited.get() + 1);
                }
                let look = self.reactor.now().after(LOOK_EVERY);
                self.sleep_until(start.min(look), wanted).await;
            }
            if is_changed() {
                continue;
            }
            if wanted() {
                return true;
            }
            lane.requests.refund(requests);
            lane.bytes.refund(bytes);
            return false;
        }
    }

    /// Ends early when its task is woken and is not wanted any more.
    async fn sleep_until(&self, deadline: Instant, wanted: Wanted<'_>) {
        let mut sleep = std::pin::pin!(self.reactor.sleep_until(deadline));
        poll_fn(|context| if wanted() { sleep.as_mut().poll(context) } else { Poll::Ready(()) })
            .await;
    }
}

#[cfg(test)]
mod tests {
    //! Goal: no more passes than is allowed, in any second, but for what was saved up; and all of
    //! that passes.
    //! Method: virtual time; reads and writes as fast as they are let.

    use std::rc::Rc;

    use ashlar_reactor::buffer::Buffers;
    use ashlar_reactor::executor::Order;
    use ashlar_reactor::join::join_all;
    use ashlar_reactor::virtual_time::VirtualBackend;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const BLOCK: usize = 4096;

    fn rates(requests: Option<u64>, bytes: Option<u64>, burst: Duration) -> Rates {
        let write = Rate { requests_per_second: requests, bytes_per_second: bytes };
        Rates { read: Rate::default(), write, burst }
    }

    struct Rig {
        reactor: Reactor,
        limits: Arc<RateLimits>,
        /// As two reactors have them.
        throttles: [Rc<Throttle>; 2],
    }

    impl Rig {
        fn new(rates: Rates) -> Rig {
            let reactor = Reactor::new(Box::new(VirtualBackend::default()), Order::Fifo);
            let limits = RateLimits::new(rates);
            let first = Throttle::new(&reactor, limits.clone());
            // Their clocks are read one after the other.
            let second = Throttle { ahead: first.ahead, ..Throttle::new(&reactor, limits.clone()) };
            let throttles = [first, second].map(Rc::new);
            Rig { reactor, limits, throttles }
        }

        fn write(&self) -> Operation {
            Operation::Write { offset: 0, from: Buffers::from(self.reactor.buffer(BLOCK)) }
        }

        /// The moments, in ms, at which so many writes that are asked for at once may begin, half
        /// of them on each reactor.
        fn writes(&self, count: usize) -> Vec<u128> {
            let began = self.reactor.now();
            let one = |index: usize| {
                let (throttle, write) = (self.throttles[index % 2].clone(), self.write());
                let reactor = self.reactor.clone();
                async move {
                    throttle.admit(Toll::of(&write), &|| true).await;
                    reactor.now().since(began).as_millis()
                }
            };
            let all: Vec<_> = (0..count).map(one).collect();
            self.reactor.block_on(join_all(all)).unwrap()
        }
    }

    #[test]
    fn requests_come_at_the_rate_once_the_burst_is_used_up() {
        let rig = Rig::new(rates(Some(100), None, SECOND));
        let moments = rig.writes(500);
        assert_eq!(moments.iter().filter(|at| **at == 0).count(), 101);
        assert_eq!(moments.iter().max(), Some(&3990));
        for second in 0..3 {
            let within = |at: &&u128| (second * 1000 + 1..=second * 1000 + 1000).contains(*at);
            let count = moments.iter().filter(within).count();
            assert!((99..=101).contains(&count), "{count} in second {second}");
        }
        assert_eq!(rig.throttles.iter().map(|its| its.waited()).sum::<u64>(), 399);
    }

    #[test]
    fn bytes_count_too_and_reads_are_apart() {
        let rig = Rig::new(rates(Some(1000), Some(10 * BLOCK as u64), Duration::ZERO));
        assert_eq!(rig.writes(21).into_iter().max(), Some(2000));
        let into = Buffers::from(rig.reactor.buffer(BLOCK));
        let (throttle, now) = (rig.throttles[0].clone(), rig.reactor.now());
        let read = Operation::Read { offset: 0, into };
        rig.reactor.block_on(async move {
            throttle.admit(Toll::of(&read), &|| true).await;
        });
        assert_eq!(rig.reactor.now(), now);
    }

    #[test]
    fn a_change_holds_for_what_waits() {
        let rig = Rig::new(rates(Some(1), None, Duration::ZERO));
        let (reactor, limits) = (rig.reactor.clone(), rig.limits.clone());
        reactor.clone().spawn(async move {
            reactor.sleep(SECOND * 10 - LOOK_EVERY / 2).await;
            limits.set(Rates::default());
        });
        let moments = rig.writes(100);
        assert_eq!(moments.iter().filter(|at| **at < 9950).count(), 10);
        assert!(moments.iter().all(|at| *at <= 10_050), "{moments:?}");
    }

    #[test]
    fn who_hurries_is_let_through_and_pays_later() {
        let rig = Rig::new(rates(Some(10), None, Duration::ZERO));
        rig.throttles.iter().for_each(|its| its.hurry());
        assert_eq!(rig.writes(30).into_iter().max(), Some(0));
        rig.throttles.iter().for_each(|its| its.calm());
        assert_eq!(rig.writes(1), [3000]);
    }

    /// The moment, in ms, at which a write may begin that is asked for now.
    fn next(rig: &Rig) -> u128 {
        rig.writes(1)[0]
    }

    #[test]
    fn who_is_not_wanted_any_more_goes_at_once_and_takes_nothing() {
        let rig = Rig::new(rates(Some(10), Some(10 * BLOCK as u64), Duration::ZERO));
        assert_eq!(next(&rig), 0);
        let (reactor, throttle) = (rig.reactor.clone(), rig.throttles[0].clone());
        let wanted = Rc::new(Cell::new(true));
        let tasks: Rc<Cell<u32>> = Rc::default();
        for _ in 0..50 {
            let (throttle, wanted, tasks) = (throttle.clone(), wanted.clone(), tasks.clone());
            reactor.spawn(async move {
                let admitted = throttle.admit(Toll::Write(BLOCK as u64), &|| wanted.get()).await;
                tasks.set(tasks.get() + 1 + 1000 * u32::from(admitted));
            });
        }
        let (began, waits) = (reactor.now(), reactor.clone());
        reactor.block_on(async move { waits.sleep(Duration::from_millis(50)).await });
        assert_eq!(tasks.get(), 0);
        wanted.set(false);
        let (waits, all) = (reactor.clone(), tasks.clone());
        reactor.block_on(async move {
            while all.get() < 50 {
                waits.sleep(Duration::from_millis(1)).await;
            }
        });
        assert_eq!(tasks.get(), 50, "none was let in");
        let since = reactor.now().since(began);
        assert!(since <= LOOK_EVERY + Duration::from_millis(2), "{since:?}");
        // As if they had never been there.
        assert!(next(&rig) <= 100);
    }

    #[test]
    fn more_bytes_of_a_write_are_no_request() {
        let rig = Rig::new(rates(Some(1), Some(BLOCK as u64), Duration::ZERO));
        let (reactor, throttle) = (rig.reactor.clone(), rig.throttles[0].clone());
        reactor.block_on(async move {
            for _ in 0..4 {
                throttle.admit(Toll::MoreWritten(BLOCK as u64 / 4), &|| true).await;
            }
        });
        // The two clocks are read one after the other.
        let took = rig.reactor.now().as_ns();
        assert!((749_000_000..=750_000_000).contains(&took), "{took} ns");
        assert_eq!(rig.throttles[0].waited(), 0);
    }
}
