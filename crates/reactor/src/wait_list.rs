//! Tasks that wait for a condition someone else will make true.

use std::cell::RefCell;
use std::task::Poll;

use crate::executor::Reactor;
use crate::task::TaskId;

/// Waiting tasks. A waiter states its condition, so a spurious wake-up is harmless.
#[derive(Default)]
pub struct WaitList {
    waiting: RefCell<Vec<TaskId>>,
}

impl WaitList {
    /// Waits until `condition` holds; it is looked at now and after every `wake_all`.
    pub async fn until(&self, reactor: &Reactor, mut condition: impl FnMut() -> bool) {
        std::future::poll_fn(|_| {
            if condition() {
                return Poll::Ready(());
            }
            let task = reactor.current_task();
            let mut waiting = self.waiting.borrow_mut();
            if !waiting.contains(&task) {
                waiting.push(task);
            }
            Poll::Pending
        })
        .await;
    }

    /// Lets every waiter look at its condition again.
    pub fn wake_all(&self, reactor: &Reactor) {
        // Taken out first: a woken task may wait again.
        for task in self.waiting.take() {
            reactor.wake(task);
        }
    }

    /// Lets the longest waiter look again.
    pub fn wake_one(&self, reactor: &Reactor) {
        let first = {
            let mut waiting = self.waiting.borrow_mut();
            (!waiting.is_empty()).then(|| waiting.remove(0))
        };
        if let Some(task) = first {
            reactor.wake(task);
        }
    }
}
