//! Tasks that wait for a condition someone else will make true.

use std::cell::RefCell;
use std::task::Poll;

use smallvec::SmallVec;

use crate::backend::Instant;
use crate::executor::Reactor;
use crate::task::TaskId;

/// Waiting tasks. A waiter states its condition, so a spurious wake-up is harmless.
#[derive(Default)]
pub struct WaitList {
    waiting: RefCell<SmallVec<[TaskId; 4]>>,
}

impl WaitList {
    /// Waits until `condition` holds; it is looked at now and after every `wake_all`.
    pub async fn until(&self, reactor: &Reactor, mut condition: impl FnMut() -> bool) {
        std::future::poll_fn(|_| {
            if condition() {
                return Poll::Ready(());
            }
            self.add(reactor);
            Poll::Pending
        })
        .await;
    }

    /// The same, but not longer than until `deadline`.
    pub async fn until_or(
        &self,
        reactor: &Reactor,
        deadline: Instant,
        mut condition: impl FnMut() -> bool,
    ) {
        let mut sleep = std::pin::pin!(reactor.sleep_until(deadline));
        std::future::poll_fn(|context| {
            if condition() {
                return Poll::Ready(());
            }
            self.add(reactor);
            sleep.as_mut().poll(context)
        })
        .await;
    }

    /// The current task is woken by the next `wake_all`; what it waits for is its own affair.
    pub fn add(&self, reactor: &Reactor) {
        let task = reactor.current_task();
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.contains(&task) {
            waiting.push(task);
        }
    }

    /// Lets every waiter look at its condition again.
    pub fn wake_all(&self, reactor: &Reactor) {
        // Taken out first: a woken task may wait again.
        for task in self.waiting.take() {
            reactor.wake(task);
        }
    }
}
