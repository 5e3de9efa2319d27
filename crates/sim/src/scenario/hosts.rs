//! A life in which another host comes.

use std::cell::Cell;
use std::rc::Rc;

use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::prng::Prng;

use super::life::{End, Seedling, assemble};
use super::{Phase, Scenario};
use crate::hosts::{Call, FIRST, SECOND};
use crate::rival::{SURELY_KEPT_NS, SURELY_TAKEN_NS};
use crate::world::SimBackend;

impl Scenario {
    /// Runs a life to its end. `None`: it has none by itself.
    pub(super) fn run(
        &mut self,
        reactor: &Reactor,
        life: impl Future<Output = End> + 'static,
        phase: Phase,
    ) -> Option<End> {
        let end = begin(reactor, life);
        reactor.run();
        let Some(call) = self.world.borrow_mut().hosts.call.take() else { return end.get() };
        match self.contest(reactor, call, phase) {
            Some(End::Refused) => {
                reactor.run();
                end.get()
            }
            other => other,
        }
    }

    /// The other host comes, and goes on with the life if it gets the array.
    fn contest(&mut self, first: &Reactor, call: Call, phase: Phase) -> Option<End> {
        let order = Order::Seeded(Prng::from_seed(self.hosts.next_u64()));
        let backend = Box::new(SimBackend::of(SECOND, &self.world));
        let second = Reactor::with_pool(backend, order, self.buffers.clone());
        let offered = self.offer(false);
        {
            let mut world = self.world.borrow_mut();
            world.note(|| format!("ANOTHER HOST comes; this one {call:?}"));
            let now_ns = world.now_ns();
            world.hosts.contest(now_ns, call, first, offered.clone());
        }
        self.host ^= 1;
        let mut seedling = self.seedling(&second);
        (seedling.place, seedling.rival) = (SECOND, None);
        let end = begin(&second, assemble(seedling, offered, phase));
        second.run();
        let end = end.get();
        let mut world = self.world.borrow_mut();
        let is_taken = world.hosts.owner == SECOND;
        if !is_taken {
            self.host ^= 1;
        }
        if end == Some(End::Refused) {
            let has_stood_still = world.hosts.stands_still(world.now_ns());
            if is_taken {
                world.fail("another host began to write, and then refused to start".into());
            } else if has_stood_still && call.still_ns > SURELY_TAKEN_NS && !self.plan.slow {
                world.fail("a host that stands still keeps its array".into());
            }
            world.contests.refused += 1;
            world.hosts.give_up();
        }
        if is_taken && call.still_ns < SURELY_KEPT_NS && !self.plan.slow {
            world.fail("the array was taken from a host that lives".into());
        }
        drop(world);
        self.left.push(second);
        end
    }
}

/// The life's end is in the cell once it has come.
fn begin(reactor: &Reactor, life: impl Future<Output = End> + 'static) -> Rc<Cell<Option<End>>> {
    let end = Rc::new(Cell::new(None));
    let (its, reactor) = (end.clone(), reactor.clone());
    reactor.clone().spawn(async move {
        let end = life.await;
        its.set(Some(end));
        reactor.stop();
    });
    end
}

impl Seedling {
    /// The other host has it from here: of what the first had half-way, all may be or nothing.
    pub(super) fn takes_over(&self) {
        if self.place == FIRST {
            return;
        }
        self.oracle.borrow_mut().process_crash();
        let found = std::mem::take(&mut self.world.borrow_mut().hosts.found);
        self.expect_unsure(found.unsure, found.bad);
    }
}
