//! First come, first served lock over ranges of a key space, in two modes.
//!
//! Invariant: two held ranges overlap only if both are shared, and a range is granted only when no
//! earlier overlapping one (held or waiting) conflicts with it; so nobody starves.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::task::Poll;

use crate::executor::Reactor;
use crate::task::TaskId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Many may hold it: the range is only read.
    Shared,
    Exclusive,
}

struct Entry {
    id: u64,
    range: Range<u64>,
    mode: Mode,
    waiter: Option<TaskId>,
}

impl Entry {
    fn conflicts(&self, other: &Entry) -> bool {
        let overlap = self.range.start < other.range.end && other.range.start < self.range.end;
        overlap && (self.mode == Mode::Exclusive || other.mode == Mode::Exclusive)
    }
}

#[derive(Default)]
struct Bucket {
    /// In order of arrival, held and waiting ones mixed.
    entries: Vec<Entry>,
}

impl Bucket {
    fn may_hold(&self, id: u64) -> bool {
        let at = self.entries.iter().position(|e| e.id == id).expect("an entry until unlocked");
        let (earlier, rest) = self.entries.split_at(at);
        earlier.iter().all(|other| !other.conflicts(&rest[0]))
    }
}

/// Keys are spread over buckets by their high bits; a range must stay inside one group of
/// `2^group_log2` keys (for an array: one stripe's rows).
pub struct RangeLock {
    reactor: Reactor,
    buckets: Vec<RefCell<Bucket>>,
    group_log2: u32,
    next_id: std::cell::Cell<u64>,
}

const BUCKETS: usize = 256;

impl RangeLock {
    pub fn new(reactor: &Reactor, group_log2: u32) -> Rc<RangeLock> {
        let buckets = (0..BUCKETS).map(|_| RefCell::default()).collect();
        let next_id = std::cell::Cell::new(0);
        Rc::new(RangeLock { reactor: reactor.clone(), buckets, group_log2, next_id })
    }

    fn bucket(&self, group: u64) -> &RefCell<Bucket> {
        // Below BUCKETS, so it fits.
        &self.buckets[usize::try_from(group % BUCKETS as u64).unwrap_or(0)]
    }

    /// Waits until no conflicting range that was asked for earlier is held or waiting.
    pub async fn lock(self: &Rc<Self>, range: Range<u64>, mode: Mode) -> RangeGuard {
        assert!(range.start < range.end, "an empty range locks nothing");
        let group = range.start >> self.group_log2;
        assert!((range.end - 1) >> self.group_log2 == group, "{range:?} crosses a group");
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        let entry = Entry { id, range, mode, waiter: None };
        self.bucket(group).borrow_mut().entries.push(entry);
        let guard = RangeGuard { lock: self.clone(), group, id };
        std::future::poll_fn(|_| {
            let mut bucket = self.bucket(group).borrow_mut();
            if bucket.may_hold(id) {
                return Poll::Ready(());
            }
            let task = self.reactor.current_task();
            if let Some(entry) = bucket.entries.iter_mut().find(|entry| entry.id == id) {
                entry.waiter = Some(task);
            }
            Poll::Pending
        })
        .await;
        guard
    }

    /// Whether a lock of this range would be had without a wait.
    pub fn is_free(&self, range: Range<u64>, mode: Mode) -> bool {
        let bucket = self.bucket(range.start >> self.group_log2).borrow();
        let wanted = Entry { id: u64::MAX, range, mode, waiter: None };
        bucket.entries.iter().all(|entry| !entry.conflicts(&wanted))
    }

    /// Whether nothing is held or waited for.
    pub fn is_idle(&self) -> bool {
        self.buckets.iter().all(|bucket| bucket.borrow().entries.is_empty())
    }
}

/// Holds (or, before `lock` returned, waits for) one range; dropping it lets the next ones in.
pub struct RangeGuard {
    lock: Rc<RangeLock>,
    group: u64,
    id: u64,
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let mut bucket = self.lock.bucket(self.group).borrow_mut();
        let at = bucket.entries.iter().position(|e| e.id == self.id).expect("until unlocked");
        let gone = bucket.entries.remove(at);
        for later in bucket.entries[at..].iter_mut().filter(|later| later.conflicts(&gone)) {
            if let Some(task) = later.waiter.take() {
                self.lock.reactor.wake(task);
            }
        }
    }
}
