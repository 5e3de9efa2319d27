//! What requests of one export may begin in a turn of its reactor while others are asked, too: for
//! requests that come as tasks, from sockets and files, however many come at once. (A ring has
//! less: see `vhost/queue`.)
//!
//! Who has taken more than its quantum in one turn sits out the next ones (deficit round robin:
//! Shreedhar and Varghese, SIGCOMM 1995). Who has asked for nothing for a while owes nothing.
//!
//! Invariant: of those that wait, who comes first begins first.

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use ashlar_reactor::backend::Instant;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::poller::{Poller, PollerId};

use crate::limits::{Toll, Wanted};
use crate::neighbours::{self, LATELY};
use crate::waiters::Waiters;

/// A request counts as no less: so many bytes are copied in the time that one without any takes.
pub(crate) const REQUEST_BYTES_MIN: u64 = 4096;
/// More than of a ring: answers leave once in a turn, by a system call.
const QUANTUM_BYTES: u64 = 32 * REQUEST_BYTES_MIN;

/// What a request takes of it.
pub(crate) fn cost_bytes(toll: Toll) -> u64 {
    match toll {
        Toll::Read(bytes) | Toll::Write(bytes) | Toll::MoreWritten(bytes) => {
            bytes.max(REQUEST_BYTES_MIN)
        }
        Toll::None => REQUEST_BYTES_MIN,
    }
}

pub(crate) struct Quantum {
    reactor: Reactor,
    /// What may still begin; below zero, what was taken of later turns.
    credit: Cell<i64>,
    /// The turn for which that was renewed last.
    turn: Cell<Instant>,
    /// With what each costs.
    waiting: Waiters,
    /// Since one had to wait.
    poller: Cell<Option<PollerId>>,
}

impl Quantum {
    pub(crate) fn new(reactor: &Reactor) -> Rc<Quantum> {
        Rc::new(Quantum {
            reactor: reactor.clone(),
            credit: Cell::default(),
            turn: Cell::default(),
            waiting: Waiters::default(),
            poller: Cell::default(),
        })
    }

    /// The export is asked for something.
    pub(crate) fn note(&self, now: Instant) {
        neighbours::note(self.own_number(), now);
    }

    /// Whether the reactor was lately asked for something by other exports, too.
    pub(crate) fn has_neighbours(&self) -> bool {
        neighbours::are_beside(self.own_number(), self.reactor.turn_time())
    }

    fn own_number(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Waits until a request may begin. False: it is not wanted any more; who makes that so wakes
    /// its task.
    #[inline]
    pub(crate) async fn begin(self: &Rc<Self>, toll: Toll, wanted: Wanted<'_>) -> bool {
        let (cost, is_next) = (cost_bytes(toll), self.waiting.is_empty());
        if is_next {
            self.renew_in_a_new_turn();
        }
        is_next && self.take(cost) || self.wait(cost, wanted).await
    }

    /// Takes what it costs, if there is something left.
    fn take(&self, cost: u64) -> bool {
        let (credit, has_neighbours) = (self.credit.get(), self.has_neighbours());
        if has_neighbours && credit > 0 {
            self.credit.set(credit.saturating_sub_unsigned(cost));
        }
        !has_neighbours || credit > 0
    }

    fn renew_in_a_new_turn(&self) {
        let now = self.reactor.turn_time();
        let before = self.turn.replace(now);
        if now.since(before) >= LATELY {
            self.credit.set(QUANTUM_BYTES.cast_signed());
        } else if now != before {
            self.renew();
        }
    }

    /// What is not used is not saved up.
    fn renew(&self) {
        let credit = self.credit.get().saturating_add_unsigned(QUANTUM_BYTES);
        self.credit.set(credit.min(QUANTUM_BYTES.cast_signed()));
    }

    async fn wait(self: &Rc<Self>, cost: u64, wanted: Wanted<'_>) -> bool {
        let place = self.queue(cost);
        poll_fn(|_| match !place.waits() || !wanted() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
        wanted()
    }

    fn queue(self: &Rc<Self>, cost: u64) -> Place<'_> {
        let number = self.waiting.join(cost, self.reactor.current_task());
        match self.poller.get() {
            Some(poller) => self.reactor.rouse(poller),
            None => self.poller.set(Some(self.reactor.add_poller(self.clone()))),
        }
        Place { quantum: self, number }
    }

    /// Nobody waits, as who does keeps the export.
    pub(crate) fn close(&self) {
        if let Some(poller) = self.poller.take() {
            self.reactor.remove_poller(poller);
        }
    }
}

/// Of one that waits, until it may begin or is not wanted any more.
struct Place<'a> {
    quantum: &'a Quantum,
    number: u64,
}

impl Place<'_> {
    /// Those before it have begun when it does.
    fn waits(&self) -> bool {
        self.quantum.waiting.first().is_some_and(|first| first.number <= self.number)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        // Who may begin has been taken out.
        let _ = self.quantum.waiting.leave(self.number);
    }
}

impl Poller for Quantum {
    fn poll(&self) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        // In each turn, also where time stands still. And who waits is a neighbour.
        let now = self.reactor.turn_time();
        self.turn.set(now);
        self.renew();
        self.note(now);
        while let Some(first) = self.waiting.first()
            && self.take(first.amount)
        {
            self.reactor.wake(first.task);
            self.waiting.leave(first.number);
        }
        true
    }

    fn arm(&self) -> bool {
        !self.waiting.is_empty()
    }

    fn disarm(&self) {}
}

#[cfg(test)]
mod tests {
    //! Goal: beside others an export begins its quantum in a turn and no more, in order; alone, all
    //! at once.
    //! Method: requests that take no time, in virtual time, and a count of what began in each turn.

    use std::cell::RefCell;

    use ashlar_reactor::executor::Order;
    use ashlar_reactor::virtual_time::VirtualBackend;

    use super::*;

    const REQUESTS: usize = 200;
    const TURNS_MAX: usize = 100 * REQUESTS;

    /// Counts turns.
    #[derive(Default)]
    struct Turns(Cell<usize>);

    impl Poller for Turns {
        fn poll(&self) -> bool {
            self.0.set(self.0.get() + 1);
            true
        }

        fn arm(&self) -> bool {
            true
        }

        fn disarm(&self) {}
    }

    struct Rig {
        reactor: Reactor,
        turns: Rc<Turns>,
        quantum: Rc<Quantum>,
        other: Rc<Quantum>,
    }

    impl Rig {
        async fn turns(&self, count: usize) {
            let end = self.turns.0.get() + count;
            while self.turns.0.get() < end {
                self.reactor.yield_now().await;
            }
        }

        /// In which turn each of many requests began, that came at once.
        async fn began(&self, toll: Toll) -> Vec<usize> {
            let began = Rc::new(RefCell::new(Vec::new()));
            self.quantum.note(self.reactor.turn_time());
            for number in 0..REQUESTS {
                let (quantum, began, turns) =
                    (self.quantum.clone(), began.clone(), self.turns.clone());
                self.reactor.spawn(async move {
                    assert!(quantum.begin(toll, &|| true).await);
                    began.borrow_mut().push((number, turns.0.get()));
                });
            }
            let end = self.turns.0.get() + TURNS_MAX;
            while began.borrow().len() < REQUESTS {
                assert!(self.turns.0.get() < end, "they wait for ever");
                self.turns(1).await;
            }
            let began = began.take();
            assert!(began.iter().map(|(number, _)| *number).eq(0..REQUESTS), "{began:?}");
            began.into_iter().map(|(_, turn)| turn).collect()
        }
    }

    fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Rig) -> F + 'static) {
        let reactor = Reactor::new(Box::new(VirtualBackend::default()), Order::Fifo);
        let its = reactor.clone();
        let ran = reactor.block_on(async move {
            let turns = Rc::new(Turns::default());
            let poller = its.add_poller(turns.clone());
            let (quantum, other) = (Quantum::new(&its), Quantum::new(&its));
            test(Rig { reactor: its.clone(), turns, quantum: quantum.clone(), other }).await;
            quantum.close();
            its.remove_poller(poller);
        });
        assert!(ran.is_some());
        reactor.abandon();
    }

    #[test]
    fn beside_others_few_begin_in_a_turn() {
        run(|rig| async move {
            rig.other.note(rig.reactor.turn_time());
            for bytes in [0, 4096, 64 << 10, 1 << 20] {
                let turns = rig.began(Toll::Read(bytes)).await;
                let cost = bytes.max(REQUEST_BYTES_MIN);
                let in_each = turns.chunk_by(PartialEq::eq).map(|same| same.len() as u64);
                let most = QUANTUM_BYTES.div_ceil(cost);
                assert!(in_each.clone().all(|count| count <= most), "{bytes}: {turns:?}");
                // It has all that it may have.
                let took = (turns.last().unwrap() - turns.first().unwrap()) as u64;
                let due = REQUESTS as u64 * cost / QUANTUM_BYTES;
                assert!(took <= due + 1, "{took} turns of {due}, {bytes}");
            }
        });
    }

    #[test]
    fn alone_all_begin_at_once() {
        run(|rig| async move {
            let turns = rig.began(Toll::Write(1 << 20)).await;
            assert_eq!(turns.first(), turns.last());
        });
    }

    #[test]
    fn who_gives_up_keeps_nobody_waiting() {
        run(|rig| async move {
            rig.quantum.note(rig.reactor.turn_time());
            rig.other.note(rig.reactor.turn_time());
            assert!(rig.quantum.begin(Toll::Read(50 * QUANTUM_BYTES), &|| true).await);
            let wanted = Rc::new(Cell::new(true));
            let began = [(); 2].map(|()| Rc::new(Cell::new(None)));
            let task = Rc::new(Cell::new(None));
            for (toll, began) in [Toll::Read(1 << 40), Toll::None].into_iter().zip(&began) {
                let (reactor, quantum) = (rig.reactor.clone(), rig.quantum.clone());
                let (wanted, began, task) = (wanted.clone(), began.clone(), task.clone());
                rig.reactor.spawn(async move {
                    let is_large = toll != Toll::None;
                    if is_large {
                        task.set(Some(reactor.current_task()));
                    }
                    let is_wanted = || !is_large || wanted.get();
                    began.set(Some(quantum.begin(toll, &is_wanted).await));
                });
            }
            rig.turns(10).await;
            assert_eq!(began.each_ref().map(|its| its.get()), [None, None], "they wait");
            wanted.set(false);
            rig.reactor.wake(task.get().unwrap());
            rig.turns(1).await;
            assert_eq!(began.each_ref().map(|its| its.get()), [Some(false), None]);
            rig.turns(100).await;
            assert_eq!(began[1].get(), Some(true));
        });
    }
}
