//! How much of the drives' time rebuild, resync and scrub take.
//!
//! A job works for a while with enough under way to keep the drives busy, and then stays away: of
//! the time in which nobody else wants the drives it has the share that the operator set, so it
//! moves at that share of what it could. No rate is configured and none is guessed.
//!
//! What guests wait shrinks the share. Requests that a job was in the way of are compared with
//! those that had the drives for themselves: a job that makes them wait `r` times as long goes
//! `r` times slower, in so far as guests ask all the time; but never slower than a tenth of its
//! share, so that it ends.

use std::cell::Cell;
use std::time::Duration;

use ashlar_reactor::backend::Instant;

/// Of its share, a job has at least one part in so many.
const BACK_OFF_MAX: u64 = 10;
/// A mean moves by one part in so many with each request.
const MEAN_OVER: u64 = 64;

/// What guests ask, and how long they wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    /// Mean time of requests that no job was in the way of; zero: unknown.
    pub(crate) calm_ns: u64,
    /// And of the others.
    pub(crate) crowded_ns: u64,
    /// Requests in the last cycle of a job.
    pub(crate) requests: u64,
    pub(crate) cycle: Duration,
}

/// By how much the share shrinks, in thousandths: 1000 is not at all.
fn back_off_milli(load: Load) -> u64 {
    let Load { calm_ns, crowded_ns, requests, cycle } = load;
    if requests == 0 || crowded_ns == 0 {
        return 1000;
    }
    // Nobody knows yet what it would be without the job: half, and soon somebody does.
    let waits_milli = match calm_ns {
        0 => 2000,
        calm_ns => crowded_ns.saturating_mul(1000) / calm_ns,
    };
    // Little's law: 20 requests of 1 ms in 100 ms have the drives for a fifth of the time.
    let cycle_ns = u64::try_from(cycle.as_nanos()).unwrap_or(u64::MAX).max(1);
    let occupied_milli = match calm_ns {
        0 => 1000,
        calm_ns => (requests.saturating_mul(calm_ns).saturating_mul(1000) / cycle_ns).min(1000),
    };
    let more = waits_milli.saturating_sub(1000).min(1000 * BACK_OFF_MAX);
    (1000 + more * occupied_milli / 1000).min(1000 * BACK_OFF_MAX)
}

/// How long a job of this share stays away after it has worked for `active`.
pub(crate) fn rest(active: Duration, share_percent: u8, load: Load) -> Duration {
    assert!((1..=100).contains(&share_percent), "a share of {share_percent} percent");
    // Share s, back-off b: s / b of the time is work, so of each b, b - s is rest.
    let share_milli = u128::from(share_percent) * 1000;
    let away_milli = u128::from(back_off_milli(load)) * 100 - share_milli;
    let ns = active.as_nanos() * away_milli / share_milli;
    Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
}

/// What all jobs of an array share.
#[derive(Default)]
pub(crate) struct Pace {
    /// Jobs at work.
    pub(crate) working: Cell<u32>,
    /// When the last one ceased.
    pub(crate) ceased: Cell<Instant>,
    calm_ns: Cell<u64>,
    crowded_ns: Cell<u64>,
    /// That were ever served.
    requests: Cell<u64>,
}

impl Pace {
    /// A guest's request that began then was served.
    pub(crate) fn served(&self, began: Instant, now: Instant) {
        self.requests.set(self.requests.get() + 1);
        let crowded = self.working.get() > 0 || self.ceased.get() > began;
        self.waited(now.since(began), crowded);
    }

    /// So many requests were served by other reactors. How long some of them took is told apart.
    pub(crate) fn served_elsewhere(&self, requests: u64) {
        self.requests.set(self.requests.get() + requests);
    }

    /// A guest's request took so long; `crowded`: a job was in its way.
    pub(crate) fn waited(&self, took: Duration, crowded: bool) {
        let mean = if crowded { &self.crowded_ns } else { &self.calm_ns };
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
        mean.set(match mean.get() {
            0 => took_ns,
            mean_ns => mean_ns - mean_ns / MEAN_OVER + took_ns / MEAN_OVER,
        });
    }

    pub(crate) fn requests(&self) -> u64 {
        self.requests.get()
    }

    /// In a cycle that has lasted so long, and began after so many requests.
    pub(crate) fn load(&self, cycle: Duration, requests_before: u64) -> Load {
        let (calm_ns, crowded_ns) = (self.calm_ns.get(), self.crowded_ns.get());
        Load { calm_ns, crowded_ns, requests: self.requests.get() - requests_before, cycle }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: an idle array's job has its share exactly; guests make it smaller, to a tenth at most.
    //! Method: made-up loads on both sides of every bound.

    use super::*;

    const WORK: Duration = Duration::from_millis(30);
    const CYCLE: Duration = Duration::from_millis(100);

    fn load(calm_us: u64, crowded_us: u64, requests: u64) -> Load {
        let (calm_ns, crowded_ns) = (calm_us * 1000, crowded_us * 1000);
        Load { calm_ns, crowded_ns, requests, cycle: CYCLE }
    }

    #[test]
    fn alone_a_job_has_its_share() {
        for (share, rest_ms) in [(100, 0), (60, 20), (30, 70), (10, 270), (1, 2970)] {
            let alone = rest(WORK, share, Load::default());
            assert_eq!(alone, Duration::from_millis(rest_ms), "{share}");
            // What guests had to wait for once does not matter when they ask nothing.
            assert_eq!(rest(WORK, share, load(100, 9000, 0)), alone);
        }
    }

    #[test]
    fn it_shrinks_as_guests_wait_longer() {
        // A guest that always has a request under way: 1000 of 100 us in 100 ms.
        for (crowded_us, back_off) in [(50, 1000), (100, 1000), (200, 2000), (550, 5500)] {
            assert_eq!(back_off_milli(load(100, crowded_us, 1000)), back_off, "{crowded_us}");
        }
        // Share 30, half of it: 15 of 100.
        assert_eq!(rest(WORK, 30, load(100, 200, 1000)), Duration::from_millis(170));
        assert_eq!(rest(WORK, 100, load(100, 200, 1000)), WORK);
        // One that asks now and then is waited for in proportion: 250 of them are a quarter.
        assert_eq!(back_off_milli(load(100, 200, 250)), 1250);
        assert_eq!(back_off_milli(load(100, 200, 1_000_000)), 2000);
        assert_eq!(back_off_milli(load(0, 200, 1)), 2000, "it is not known what is usual");
    }

    #[test]
    fn it_never_starves() {
        for (calm, crowded, requests) in [(1, u64::MAX / 1000, u64::MAX), (100, 1001, 1000)] {
            assert_eq!(back_off_milli(load(calm, crowded, requests)), 10_000);
        }
        // A tenth of 30 % is 3 %.
        assert_eq!(rest(WORK, 30, load(100, 5000, 1000)), Duration::from_millis(970));
    }
}
