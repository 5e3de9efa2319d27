//! How much data the requests of one export may move at a time, so that no guest fills the
//! machine's memory or the reactor's slots.

use std::cell::Cell;

use ashlar_reactor::executor::Reactor;
use ashlar_reactor::wait_list::WaitList;

pub(crate) struct Budget {
    reactor: Reactor,
    total: u64,
    free: Cell<u64>,
    waiting: WaitList,
}

impl Budget {
    pub(crate) fn new(reactor: &Reactor, total: u64) -> Budget {
        let waiting = WaitList::default();
        Budget { reactor: reactor.clone(), total, free: Cell::new(total), waiting }
    }

    /// Waits until `amount` is free and holds it; dropping the claim gives it back.
    pub(crate) async fn claim(&self, amount: u64) -> Claim<'_> {
        assert!(amount <= self.total, "{amount} of {} can never be free", self.total);
        self.waiting.until(&self.reactor, || self.free.get() >= amount).await;
        self.free.set(self.free.get() - amount);
        Claim { budget: self, amount }
    }
}

pub(crate) struct Claim<'a> {
    budget: &'a Budget,
    amount: u64,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let free = self.budget.free.get() + self.amount;
        assert!(free <= self.budget.total);
        self.budget.free.set(free);
        self.budget.waiting.wake_all(&self.budget.reactor);
    }
}
