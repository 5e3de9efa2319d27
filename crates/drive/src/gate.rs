//! A gate: until when the drives of an array may be given what changes them.
//!
//! Whoever may lose the array to another puts one before its drives, and moves it on for as long as
//! it is sure of the array. Nothing passes later than that: it waits, until the gate has moved on
//! or was shut.
//!
//! Invariant: a gate that was shut stays shut, and nobody waits at it.

use std::cell::Cell;
use std::rc::Rc;

use ashlar_reactor::backend::Instant;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::wait_list::WaitList;

pub struct Gate {
    /// `None`: shut.
    until: Cell<Option<Instant>>,
    /// Times that whoever waited was turned away.
    turned_away: Cell<u64>,
    waiting: WaitList,
}

impl Gate {
    pub fn open_until(until: Instant) -> Rc<Gate> {
        Rc::new(Gate {
            until: Cell::new(Some(until)),
            turned_away: Cell::new(0),
            waiting: WaitList::default(),
        })
    }

    /// The last moment at which anything passes; `None`: never again.
    pub fn until(&self) -> Option<Instant> {
        self.until.get()
    }

    /// It is open until then, unless it is open for longer, or was shut.
    pub fn move_on(&self, reactor: &Reactor, until: Instant) {
        self.until.set(self.until.get().map(|before| before.max(until)));
        self.waiting.wake_all(reactor);
    }

    /// Who waits now hears that it was in vain.
    pub fn turn_away(&self, reactor: &Reactor) {
        self.turned_away.set(self.turned_away.get() + 1);
        self.waiting.wake_all(reactor);
    }

    /// Nothing passes any more, and who waits hears so.
    pub fn shut(&self, reactor: &Reactor) {
        self.until.set(None);
        self.waiting.wake_all(reactor);
    }

    pub(crate) fn turned_away(&self) -> u64 {
        self.turned_away.get()
    }

    /// The current task is woken when anything changes here.
    pub(crate) fn wait(&self, reactor: &Reactor) {
        self.waiting.add(reactor);
    }
}
