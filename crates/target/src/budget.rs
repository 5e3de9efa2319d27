//! How much data the requests of one export, or of one host, may move at a time, so that nobody
//! fills the machine's memory or the reactor's slots.
//!
//! Invariant: who comes first is served first. Else a large request would wait for good beside
//! small ones that always find room in what it waits for.

use std::cell::Cell;
use std::future::poll_fn;
use std::task::Poll;

use ashlar_reactor::executor::Reactor;

use crate::waiters::Waiters;

pub(crate) struct Budget {
    reactor: Reactor,
    total: u64,
    free: Cell<u64>,
    waiting: Waiters,
}

impl Budget {
    pub(crate) fn new(reactor: &Reactor, total: u64) -> Budget {
        let free = Cell::new(total);
        Budget { reactor: reactor.clone(), total, free, waiting: Waiters::default() }
    }

    /// Waits until `amount` is free and holds it; dropping the claim gives it back.
    pub(crate) async fn claim(&self, amount: u64) -> Claim<'_> {
        let is_held = self.take_while(amount, || true).await;
        assert!(is_held, "it is wanted");
        Claim { budget: self, amount }
    }

    /// The same, until it is given back. False: it was wanted no more; whoever waits has to be
    /// woken when that comes to pass.
    pub(crate) async fn take_while(&self, amount: u64, wanted: impl Fn() -> bool) -> bool {
        assert!(amount <= self.total, "{amount} of {} can never be free", self.total);
        let is_next = self.waiting.is_empty() && self.free.get() >= amount;
        // Kept until all is held: the next one looks at what is left then.
        let _place = match is_next || amount == 0 {
            true => None,
            false => Some(self.wait(amount, &wanted).await),
        };
        if !wanted() {
            return false;
        }
        self.free.set(self.free.get() - amount);
        true
    }

    async fn wait(&self, amount: u64, wanted: &impl Fn() -> bool) -> Place<'_> {
        let place = self.queue(amount);
        poll_fn(|_| match !wanted() || place.is_first_and_fits() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
        place
    }

    pub(crate) fn give_back(&self, amount: u64) {
        let free = self.free.get() + amount;
        assert!(free <= self.total);
        self.free.set(free);
        self.wake_first();
    }

    fn queue(&self, amount: u64) -> Place<'_> {
        let number = self.waiting.join(amount, self.reactor.current_task());
        Place { budget: self, number }
    }

    /// Lets the first go on, if there is room for it.
    fn wake_first(&self) {
        if let Some(first) = self.waiting.first()
            && first.amount <= self.free.get()
        {
            self.reactor.wake(first.task);
        }
    }
}

/// Of one that waits, until it has what it waits for or does not want it any more.
struct Place<'a> {
    budget: &'a Budget,
    number: u64,
}

impl Place<'_> {
    fn is_first_and_fits(&self) -> bool {
        let first = self.budget.waiting.first().filter(|first| first.number == self.number);
        first.is_some_and(|first| first.amount <= self.budget.free.get())
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let has_left = self.budget.waiting.leave(self.number);
        assert!(has_left, "{} has left before", self.number);
        // It may have been the one that kept the next from going on.
        self.budget.wake_first();
    }
}

pub(crate) struct Claim<'a> {
    budget: &'a Budget,
    amount: u64,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.budget.give_back(self.amount);
    }
}

#[cfg(test)]
mod tests {
    //! Goal: whoever waits is served after those that came before it, and nobody waits for what is
    //! free.
    //! Method: virtual time; claims that overlap, so that all is never free by itself.

    use std::cell::RefCell;
    use std::rc::Rc;
    use std::time::Duration;

    use ashlar_reactor::executor::Order;
    use ashlar_reactor::join::join_all;
    use ashlar_reactor::task::TaskId;
    use ashlar_reactor::virtual_time::VirtualBackend;

    use super::*;

    fn budget(total: u64) -> (Reactor, Rc<Budget>) {
        let reactor = Reactor::new(Box::new(VirtualBackend::default()), Order::Fifo);
        let budget = Rc::new(Budget::new(&reactor, total));
        (reactor, budget)
    }

    const STEP: Duration = Duration::from_millis(10);

    /// Claims half for two steps, again and again.
    async fn claim_halves(reactor: Reactor, budget: Rc<Budget>, served: Rc<Cell<u32>>) {
        for _ in 0..1000 {
            let claim = budget.claim(50).await;
            reactor.sleep(2 * STEP).await;
            served.set(served.get() + 1);
            drop(claim);
        }
    }

    #[test]
    fn a_large_claim_is_served_beside_a_stream_of_small_ones() {
        let (reactor, budget) = budget(100);
        let served = Rc::new(Cell::new(0));
        // One lets go in the middle of the other's time: never both.
        reactor.spawn(claim_halves(reactor.clone(), budget.clone(), served.clone()));
        reactor.block_on(reactor.sleep(STEP)).unwrap();
        reactor.spawn(claim_halves(reactor.clone(), budget.clone(), served.clone()));
        reactor.block_on(reactor.sleep(STEP / 2)).unwrap();
        let before = served.get();
        let its = budget.clone();
        reactor.block_on(async move { drop(its.claim(100).await) }).unwrap();
        assert!(served.get() <= before + 2, "{} went before it", served.get() - before);
    }

    #[test]
    fn all_are_served_in_turn() {
        let (reactor, budget) = budget(100);
        let order = Rc::new(RefCell::new(Vec::new()));
        let one = |amount: u64| {
            let (reactor, budget, order) = (reactor.clone(), budget.clone(), order.clone());
            async move {
                let claim = budget.claim(amount).await;
                order.borrow_mut().push(amount);
                reactor.sleep(STEP).await;
                drop(claim);
            }
        };
        let amounts = [60, 50, 100, 10, 20, 0, 99, 1];
        reactor.block_on(join_all(amounts.map(one))).unwrap();
        assert_eq!(*order.borrow(), [60, 0, 50, 100, 10, 20, 99, 1], "nothing waits for no room");
        assert_eq!((budget.free.get(), budget.waiting.len()), (100, 0));
    }

    /// Claims so much in a task of its own as long as that is wanted; what has come of it.
    fn claim_in_task(reactor: &Reactor, budget: &Rc<Budget>, amount: u64) -> Rc<Asked> {
        let asked = Rc::new(Asked::default());
        let (reactor, budget, its) = (reactor.clone(), budget.clone(), asked.clone());
        reactor.clone().spawn(async move {
            its.task.set(Some(reactor.current_task()));
            let is_held = budget.take_while(amount, || !its.gives_up.get()).await;
            its.outcome.set(Some(is_held));
        });
        asked
    }

    #[derive(Default)]
    struct Asked {
        task: Cell<Option<TaskId>>,
        gives_up: Cell<bool>,
        outcome: Cell<Option<bool>>,
    }

    #[test]
    fn who_gives_up_keeps_nobody_waiting() {
        let (reactor, budget) = budget(100);
        let step = || reactor.block_on(reactor.sleep(STEP)).unwrap();
        let held = claim_in_task(&reactor, &budget, 60);
        step();
        assert_eq!(held.outcome.get(), Some(true));
        let first = claim_in_task(&reactor, &budget, 100);
        step();
        // The second is dropped while it waits.
        let its = budget.clone();
        reactor
            .block_on(async move {
                let mut claim = Box::pin(its.claim(90));
                poll_fn(|context| match claim.as_mut().poll(context) {
                    Poll::Pending => Poll::Ready(()),
                    Poll::Ready(_) => panic!("there is no room"),
                })
                .await;
                assert_eq!(its.waiting.len(), 2);
            })
            .unwrap();
        let last = claim_in_task(&reactor, &budget, 40);
        step();
        assert_eq!((first.outcome.get(), last.outcome.get()), (None, None), "one after the other");
        first.gives_up.set(true);
        reactor.wake(first.task.get().unwrap());
        step();
        assert_eq!((first.outcome.get(), last.outcome.get()), (Some(false), Some(true)));
        budget.give_back(60);
        budget.give_back(40);
        assert!(budget.waiting.is_empty() && budget.free.get() == 100);
    }
}
