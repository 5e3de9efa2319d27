//! What a job has under way: so many tasks at a time, that end in the order in which they began.

use std::cell::Cell;
use std::rc::Rc;

use ashlar_reactor::executor::Reactor;
use ashlar_reactor::wait_list::WaitList;

pub(crate) struct Lanes {
    reactor: Reactor,
    begun: Cell<u64>,
    ended: Cell<u64>,
    changed: WaitList,
}

/// One task's. Dropped when the task ends.
pub(crate) struct Lane {
    lanes: Rc<Lanes>,
    number: u64,
}

impl Lanes {
    pub(crate) fn new(reactor: &Reactor) -> Rc<Lanes> {
        let (begun, ended) = (Cell::new(0), Cell::new(0));
        Rc::new(Lanes { reactor: reactor.clone(), begun, ended, changed: WaitList::default() })
    }

    /// Waits until fewer than `most` are under way, and is one more.
    pub(crate) async fn enter(self: &Rc<Self>, most: u64) -> Lane {
        assert!(most > 0, "nothing could ever begin");
        let free = || self.begun.get() - self.ended.get() < most;
        self.changed.until(&self.reactor, free).await;
        let number = self.begun.get();
        self.begun.set(number + 1);
        Lane { lanes: self.clone(), number }
    }

    /// Waits until none is under way.
    pub(crate) async fn drained(&self) {
        self.changed.until(&self.reactor, || self.begun.get() == self.ended.get()).await;
    }
}

impl Lane {
    /// Waits until all that began before have ended.
    pub(crate) async fn turn(&self) {
        let lanes = &self.lanes;
        lanes.changed.until(&lanes.reactor, || lanes.ended.get() == self.number).await;
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.lanes.ended.set(self.lanes.ended.get() + 1);
        self.lanes.changed.wake_all(&self.lanes.reactor);
    }
}
