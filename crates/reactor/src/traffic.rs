//! What is asked of one place, such as an array or an export: reads, writes and flushes apart, and
//! how many requests are under way.

use std::cell::{Cell, RefCell};
use std::iter::Sum;
use std::ops::Add;
use std::time::Duration;

use crate::backend::Instant;
use crate::window::{Lately, Total, Window};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Flush,
}

/// See the file's head.
#[derive(Default)]
pub struct Traffic {
    reads: RefCell<Window>,
    writes: RefCell<Window>,
    flushes: RefCell<Window>,
    under_way: Cell<u32>,
    under_way_max: Cell<u32>,
}

/// Requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    pub total: Total,
    pub lately: Lately,
}

/// Everything at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub reads: Requests,
    pub writes: Requests,
    pub flushes: Requests,
    /// Requests of any kind under way, now and at most.
    pub depth: u32,
    pub depth_max: u32,
}

impl Report {
    /// How many requests were under way lately, on average, in thousandths.
    pub fn depth_mean_milli(&self) -> u64 {
        let kinds = [self.reads.lately, self.writes.lately, self.flushes.lately];
        let part = |its: &Lately| u128::from(its.time_ns) * 1000 / u128::from(its.span_ns.max(1));
        u64::try_from(kinds.iter().map(part).sum::<u128>()).unwrap_or(u64::MAX)
    }
}

impl Add for Requests {
    type Output = Requests;

    fn add(self, other: Requests) -> Requests {
        Requests { total: self.total + other.total, lately: self.lately + other.lately }
    }
}

/// Of several places together, such as the parts of an export.
impl Sum for Report {
    fn sum<I: Iterator<Item = Report>>(parts: I) -> Report {
        parts.fold(Report::default(), |all, part| Report {
            reads: all.reads + part.reads,
            writes: all.writes + part.writes,
            flushes: all.flushes + part.flushes,
            depth: all.depth + part.depth,
            depth_max: all.depth_max + part.depth_max,
        })
    }
}

impl Traffic {
    /// A request is under way, until what is returned is dropped.
    pub fn enter(&self) -> Passage<'_> {
        let under_way = self.under_way.get() + 1;
        self.under_way.set(under_way);
        self.under_way_max.set(self.under_way_max.get().max(under_way));
        Passage { traffic: self }
    }

    /// A request of so many bytes, which began then, was done `now`.
    pub fn served(&self, kind: Kind, bytes: u64, began: Instant, now: Instant) {
        self.took(kind, bytes, now.since(began), now);
    }

    /// The same of one that took so long.
    pub fn took(&self, kind: Kind, bytes: u64, took: Duration, now: Instant) {
        self.window(kind).borrow_mut().add(now, took, bytes);
    }

    pub fn report(&self, now: Instant) -> Report {
        let requests = |kind| {
            let mut window = self.window(kind).borrow_mut();
            Requests { lately: window.lately(now), total: window.total() }
        };
        Report {
            reads: requests(Kind::Read),
            writes: requests(Kind::Write),
            flushes: requests(Kind::Flush),
            depth: self.under_way.get(),
            depth_max: self.under_way_max.get(),
        }
    }

    /// Reads of the last seconds, and those of another window as if they were of this place.
    pub fn reads_with(&self, others: &mut Window, now: Instant) -> Lately {
        self.reads.borrow_mut().lately_with(others, now)
    }

    fn window(&self, kind: Kind) -> &RefCell<Window> {
        match kind {
            Kind::Read => &self.reads,
            Kind::Write => &self.writes,
            Kind::Flush => &self.flushes,
        }
    }
}

/// While it lives, one request more is under way.
#[must_use = "the request is counted while this lives"]
pub struct Passage<'a> {
    traffic: &'a Traffic,
}

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        self.traffic.under_way.set(self.traffic.under_way.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    //! Goal: kinds are kept apart, and the depth is that of all.
    //! Method: made-up moments.

    use super::*;

    #[test]
    fn kinds_are_apart_and_the_depth_is_of_all() {
        let at = |ms: u64| Instant::from_ns(1_000_000 * ms);
        let traffic = Traffic::default();
        {
            let _read = traffic.enter();
            let _write = traffic.enter();
            assert_eq!(traffic.report(at(10_000)).depth, 2);
        }
        for ms in 10_000..15_000 {
            traffic.served(Kind::Read, 4096, at(ms - 2), at(ms));
            traffic.served(Kind::Write, 512, at(ms - 4), at(ms));
        }
        traffic.served(Kind::Flush, 0, at(14_000), at(15_000));
        let report = traffic.report(at(15_000));
        let counts = [report.reads, report.writes, report.flushes].map(|its| its.total.count);
        assert_eq!((counts, report.reads.total.bytes), ([5000, 5000, 1], 5000 * 4096));
        assert!(report.writes.lately.p50_ns > report.reads.lately.p50_ns);
        assert_eq!((report.depth, report.depth_max), (0, 2));
        // Five seconds of two reads and four writes, and in one of them a flush.
        assert_eq!(report.depth_mean_milli(), 6200);
        let both: Report = [report, report].into_iter().sum();
        assert_eq!((both.writes.total.count, both.reads.lately.count), (10_000, 10_000));
        assert_eq!(both.writes.lately.p50_ns, report.writes.lately.p50_ns);
        assert_eq!((both.depth_mean_milli(), both.depth_max), (12_400, 4));
    }
}
