//! An export's share of a turn of its reactor, for requests that come as tasks: from sockets and
//! files. While other exports are asked, too, few of them begin in one turn, however many there
//! are. (Of a ring no more than that are popped: see `vhost/queue`.)
//!
//! Who has taken more than its share in one turn sits out the next ones (deficit round robin:
//! Shreedhar and Varghese, SIGCOMM 1995).
//!
//! Invariant: who comes first begins first, but for what is not wanted any more.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use ashlar_reactor::backend::Instant;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::poller::{Poller, PollerId};
use ashlar_reactor::task::TaskId;

use crate::limits::{Toll, Wanted};
use crate::neighbours;

/// A request counts as no less: so many bytes are copied in the time that one without any takes.
pub(crate) const REQUEST_BYTES_MIN: u64 = 4096;
/// What an export may begin in a turn beside others. More than of a ring: answers leave once in a
/// turn, by a system call.
const TURN_BYTES: u64 = 32 * REQUEST_BYTES_MIN;

/// What a request takes of a share.
pub(crate) fn cost_bytes(toll: Toll) -> u64 {
    match toll {
        Toll::Read(bytes) | Toll::Write(bytes) | Toll::MoreWritten(bytes) => {
            bytes.max(REQUEST_BYTES_MIN)
        }
        Toll::None => REQUEST_BYTES_MIN,
    }
}

pub(crate) struct Share {
    reactor: Reactor,
    /// What may still begin; below zero, what was taken of later turns.
    credit: Cell<i64>,
    /// When that was looked at last without anybody who waits. While one does, each turn renews it.
    turn: Cell<Instant>,
    /// In the order in which they came.
    waiting: RefCell<VecDeque<Waiter>>,
    /// Number of the last that had to wait, and of the last of these that may begin.
    last: Cell<u64>,
    begun: Cell<u64>,
    /// Once one had to wait.
    poller: Cell<Option<PollerId>>,
}

struct Waiter {
    number: u64,
    cost: u64,
    task: TaskId,
}

impl Share {
    pub(crate) fn new(reactor: &Reactor) -> Rc<Share> {
        Rc::new(Share {
            reactor: reactor.clone(),
            credit: Cell::default(),
            turn: Cell::default(),
            waiting: RefCell::default(),
            last: Cell::default(),
            begun: Cell::default(),
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
        let (is_next, now) = (self.waiting.borrow().is_empty(), self.reactor.turn_time());
        if is_next && self.turn.replace(now) != now {
            self.renew();
        }
        if is_next && self.may_begin(cost_bytes(toll)) {
            return true;
        }
        self.wait(cost_bytes(toll), wanted).await
    }

    /// Takes what it costs, if there is something left of the share.
    fn may_begin(&self, cost: u64) -> bool {
        let (credit, has_neighbours) = (self.credit.get(), self.has_neighbours());
        if has_neighbours && credit > 0 {
            self.credit.set(credit.saturating_sub_unsigned(cost));
        }
        !has_neighbours || credit > 0
    }

    /// What is not used is not saved up.
    fn renew(&self) {
        let credit = self.credit.get().saturating_add_unsigned(TURN_BYTES);
        self.credit.set(credit.min(TURN_BYTES.cast_signed()));
    }

    async fn wait(self: &Rc<Self>, cost: u64, wanted: Wanted<'_>) -> bool {
        let number = self.last.get() + 1;
        self.last.set(number);
        let task = self.reactor.current_task();
        self.waiting.borrow_mut().push_back(Waiter { number, cost, task });
        match self.poller.get() {
            Some(poller) => self.reactor.rouse(poller),
            None => self.poller.set(Some(self.reactor.add_poller(self.clone()))),
        }
        poll_fn(|_| match number <= self.begun.get() || !wanted() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
        wanted()
    }

    /// Nobody begins any more.
    pub(crate) fn close(&self) {
        if let Some(poller) = self.poller.take() {
            self.reactor.remove_poller(poller);
        }
    }
}

impl Poller for Share {
    fn poll(&self) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        let any = !waiting.is_empty();
        if any {
            self.renew();
        }
        while let Some(first) = waiting.front()
            && self.may_begin(first.cost)
        {
            self.begun.set(first.number);
            self.reactor.wake(first.task);
            waiting.pop_front();
        }
        any
    }

    fn arm(&self) -> bool {
        !self.waiting.borrow().is_empty()
    }

    fn disarm(&self) {}
}

#[cfg(test)]
mod tests {
    //! Goal: beside others an export begins its share in a turn and no more, in order; alone, all
    //! at once.
    //! Method: requests that take no time, in virtual time, and a count of what began in each turn.

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
        share: Rc<Share>,
        other: Rc<Share>,
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
            self.share.note(self.reactor.turn_time());
            for number in 0..REQUESTS {
                let (share, began, turns) = (self.share.clone(), began.clone(), self.turns.clone());
                self.reactor.spawn(async move {
                    assert!(share.begin(toll, &|| true).await);
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
            let (share, other) = (Share::new(&its), Share::new(&its));
            test(Rig { reactor: its.clone(), turns, share: share.clone(), other }).await;
            share.close();
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
                let most = TURN_BYTES.div_ceil(cost);
                assert!(in_each.clone().all(|count| count <= most), "{bytes}: {turns:?}");
                // It has all of its share.
                let took = (turns.last().unwrap() - turns.first().unwrap()) as u64;
                let due = REQUESTS as u64 * cost / TURN_BYTES;
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
    fn what_is_not_wanted_any_more_waits_no_longer() {
        run(|rig| async move {
            rig.share.note(rig.reactor.turn_time());
            rig.other.note(rig.reactor.turn_time());
            assert!(rig.share.begin(Toll::Read(1 << 40), &|| true).await);
            let (wanted, begins) = (Rc::new(Cell::new(true)), Rc::new(Cell::new(None)));
            let (task, share) = (Rc::new(Cell::new(None)), rig.share.clone());
            let (its, reactor) =
                ((wanted.clone(), begins.clone(), task.clone()), rig.reactor.clone());
            rig.reactor.spawn(async move {
                its.2.set(Some(reactor.current_task()));
                its.1.set(Some(share.begin(Toll::None, &|| its.0.get()).await));
            });
            rig.turns(100).await;
            assert_eq!(begins.get(), None, "it waits");
            wanted.set(false);
            rig.reactor.wake(task.get().unwrap());
            rig.turns(1).await;
            assert_eq!(begins.get(), Some(false));
        });
    }
}
