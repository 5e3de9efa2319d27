//! Who serves the requests of one lane of a connection: tasks that each take a request, serve it to
//! the end, and take the next. There are as many as requests were ever under way at the same time.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::task::Poll;

use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::task::TaskId;
use ashlar_reactor::wait_list::WaitList;

use crate::nbd::request::Asked;

/// Most requests under way of one lane of a connection; more wait in the socket.
pub(super) const REQUESTS_MAX: usize = 128;
/// One bit per worker in `Workers::parked`.
const _: () = assert!(REQUESTS_MAX <= u128::BITS as usize);

/// A request, and the data that came with it.
pub(super) struct Task {
    pub(super) asked: Asked,
    pub(super) data: Buffers,
}

#[derive(Default)]
pub(super) struct Workers {
    waiting: RefCell<VecDeque<Task>>,
    /// By worker, once it has looked for a request.
    tasks: RefCell<Vec<Option<TaskId>>>,
    /// Bit by bit, the workers that wait for a request.
    parked: Cell<u128>,
    dismissed: Cell<bool>,
    left: Cell<usize>,
    ended: WaitList,
}

impl Workers {
    /// Hands a request to a worker that waits, or to one that `begin` begins: its number says
    /// which it is.
    pub(super) fn give(&self, reactor: &Reactor, task: Task, begin: impl FnOnce(usize)) {
        self.waiting.borrow_mut().push_back(task);
        let parked = self.parked.get();
        if parked == 0 {
            let worker = self.tasks.borrow().len();
            if worker < REQUESTS_MAX {
                self.tasks.borrow_mut().push(None);
                begin(worker);
            }
            return;
        }
        let worker = parked.trailing_zeros() as usize;
        self.parked.set(parked & (parked - 1));
        if let Some(Some(task)) = self.tasks.borrow().get(worker) {
            reactor.wake(*task);
        }
    }

    /// What a worker does next; `None`: it is not needed any more, and says so by `leave`.
    pub(super) async fn next(&self, reactor: &Reactor, worker: usize) -> Option<Task> {
        let bit = 1u128 << worker;
        std::future::poll_fn(|_| {
            // Set again below if there is nothing: a wake-up may be for something else.
            self.parked.set(self.parked.get() & !bit);
            if let Some(known) = self.tasks.borrow_mut().get_mut(worker) {
                *known = Some(reactor.current_task());
            }
            if let Some(task) = self.waiting.borrow_mut().pop_front() {
                return Poll::Ready(Some(task));
            }
            if self.dismissed.get() {
                return Poll::Ready(None);
            }
            self.parked.set(self.parked.get() | bit);
            Poll::Pending
        })
        .await
    }

    /// Lets all look whether what they wait for is still wanted.
    pub(super) fn wake_all(&self, reactor: &Reactor) {
        for task in self.tasks.borrow().iter().flatten() {
            reactor.wake(*task);
        }
    }

    pub(super) fn leave(&self, reactor: &Reactor) {
        self.left.set(self.left.get() + 1);
        self.ended.wake_all(reactor);
    }

    /// Lets all go, and waits until they have gone.
    pub(super) async fn dismiss(&self, reactor: &Reactor) {
        self.dismissed.set(true);
        self.wake_all(reactor);
        self.ended.until(reactor, || self.left.get() == self.tasks.borrow().len()).await;
    }
}
