//! Who waits for something, in the order in which they came.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use ashlar_reactor::task::TaskId;

#[derive(Clone, Copy)]
pub(crate) struct Waiter {
    pub(crate) number: u64,
    pub(crate) amount: u64,
    pub(crate) task: TaskId,
}

#[derive(Default)]
pub(crate) struct Waiters {
    /// Numbers ascend.
    waiting: RefCell<VecDeque<Waiter>>,
    last: Cell<u64>,
}

impl Waiters {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.borrow().is_empty()
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.waiting.borrow().len()
    }

    pub(crate) fn first(&self) -> Option<Waiter> {
        self.waiting.borrow().front().copied()
    }

    /// One more, behind all others; its number.
    pub(crate) fn join(&self, amount: u64, task: TaskId) -> u64 {
        let number = self.last.get() + 1;
        self.last.set(number);
        self.waiting.borrow_mut().push_back(Waiter { number, amount, task });
        number
    }

    /// False: it had left before. Mostly it is the first one; of many that give up, in any order,
    /// each is found soon.
    pub(crate) fn leave(&self, number: u64) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.front().is_some_and(|first| first.number == number) {
            return waiting.pop_front().is_some();
        }
        let found = waiting.binary_search_by_key(&number, |its| its.number);
        found.ok().and_then(|at| waiting.remove(at)).is_some()
    }
}
