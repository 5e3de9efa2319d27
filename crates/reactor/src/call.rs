//! Calls from one reactor to another: a question, with memory lent along, and its answer.
//!
//! ```text
//! caller                                             callee
//! call ── question, addresses of the memory ──────►  a worker answers, with views of that memory
//!      ◄─ answer ──────────────────────────────────
//!      ◄─ the memory, if something held it longer ──  its last view is dropped
//! ```
//!
//! Buffers count their views without atomics, so no view of one reactor is ever touched by another:
//! the callee makes its own, by address.
//!
//! Invariant: what was lent is kept by the caller's end, marked as being filled, until the callee
//! has dropped its last view; whether or not anybody waits for the answer. So the slot's rule holds
//! across reactors: a drive that was given up may write there for as long as it likes.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::Poll;

use crate::buffer::{Buffers, Lent};
use crate::executor::Reactor;
use crate::link::{End, Link, News, link};
use crate::task::TaskId;
use crate::wait_list::WaitList;

/// Most calls under way of one caller; more wait.
pub const CALLS_MAX: usize = 1024;
/// Each call has two messages back at most.
const REPLIES_MAX: usize = 2 * CALLS_MAX;

struct Question<Q> {
    number: usize,
    question: Q,
    lent: Lent,
}

enum Reply<A> {
    /// `returned`: what was lent is the caller's alone again.
    Answer {
        number: usize,
        answer: A,
        returned: bool,
    },
    Returned {
        number: usize,
    },
}

/// Where questions are asked, before it is opened.
pub struct CallerEnd<Q, A>(End<Question<Q>, Reply<A>>);
/// Where they are answered, before it is opened.
pub struct CalleeEnd<Q, A>(End<Reply<A>, Question<Q>>);

/// A way for calls, to be opened at its ends by the two reactors.
pub fn calls<Q: Send, A: Send>() -> std::io::Result<(CallerEnd<Q, A>, CalleeEnd<Q, A>)> {
    let (caller, callee) = link(REPLIES_MAX, CALLS_MAX)?;
    Ok((CallerEnd(caller), CalleeEnd(callee)))
}

/// A call that is under way.
enum Slot<A> {
    Free,
    Asked {
        memory: Buffers,
        caller: Option<TaskId>,
    },
    /// Nobody waits for the answer any more.
    Unheard {
        memory: Buffers,
    },
    /// `memory`: the callee still has it.
    Answered {
        answer: A,
        memory: Option<Buffers>,
    },
    /// The answer was heard.
    Lent {
        memory: Buffers,
    },
}

/// The end that asks.
pub struct Caller<Q, A> {
    reactor: Reactor,
    link: OnceCell<Rc<Link<Question<Q>, Reply<A>>>>,
    slots: RefCell<Vec<Slot<A>>>,
    free: RefCell<Vec<usize>>,
    freed: WaitList,
}

impl<Q: Send + 'static, A: Send + 'static> CallerEnd<Q, A> {
    /// It is to be [closed](Caller::close).
    pub fn open(self, reactor: &Reactor) -> Rc<Caller<Q, A>> {
        let caller = Rc::new(Caller {
            reactor: reactor.clone(),
            link: OnceCell::new(),
            slots: RefCell::new((0..CALLS_MAX).map(|_| Slot::Free).collect()),
            free: RefCell::new((0..CALLS_MAX).rev().collect()),
            freed: WaitList::default(),
        });
        let its = Rc::downgrade(&caller);
        let link = self.0.open(reactor, move |news| match (news, its.upgrade()) {
            (News::Message(reply), Some(caller)) => caller.hear(reply),
            // Who answers goes after who asks.
            (News::Closed, _) | (_, None) => {}
        });
        assert!(caller.link.set(link).is_ok(), "opened once");
        caller
    }
}

impl<Q: Send + 'static, A: Send + 'static> Caller<Q, A> {
    /// Asks, and waits for the answer. Nobody may ask once it is being closed.
    pub async fn call(&self, question: Q, memory: Buffers) -> A {
        self.freed.until(&self.reactor, || !self.free.borrow().is_empty()).await;
        let number = self.free.borrow_mut().pop().expect("one is free");
        memory.fill_started();
        let lent = memory.lend();
        self.slots.borrow_mut()[number] = Slot::Asked { memory, caller: None };
        self.link().send(Question { number, question, lent });
        let waiting = Waiting { caller: self, number };
        std::future::poll_fn(|_| waiting.poll()).await
    }

    /// Waits until everything that was lent has come back, and ends the other end, too.
    pub async fn close(&self) {
        let all_free = || self.free.borrow().len() == CALLS_MAX;
        self.freed.until(&self.reactor, all_free).await;
        self.link().close().await;
    }

    fn link(&self) -> &Link<Question<Q>, Reply<A>> {
        self.link.get().expect("set when it was opened")
    }

    fn hear(&self, reply: Reply<A>) {
        match reply {
            Reply::Answer { number, answer, returned } => self.answered(number, answer, returned),
            Reply::Returned { number } => self.returned(number),
        }
    }

    fn answered(&self, number: usize, answer: A, returned: bool) {
        let mut slots = self.slots.borrow_mut();
        let kept = |memory: Buffers| {
            if returned {
                memory.fill_ended();
            }
            (!returned).then_some(memory)
        };
        match std::mem::replace(&mut slots[number], Slot::Free) {
            Slot::Asked { memory, caller } => {
                slots[number] = Slot::Answered { answer, memory: kept(memory) };
                caller.into_iter().for_each(|task| self.reactor.wake(task));
            }
            Slot::Unheard { memory } => match kept(memory) {
                Some(memory) => slots[number] = Slot::Lent { memory },
                None => self.free(number),
            },
            Slot::Free | Slot::Answered { .. } | Slot::Lent { .. } => {
                unreachable!("call {number} was answered before");
            }
        }
    }

    fn returned(&self, number: usize) {
        let mut slots = self.slots.borrow_mut();
        match std::mem::replace(&mut slots[number], Slot::Free) {
            Slot::Answered { answer, memory: Some(memory) } => {
                memory.fill_ended();
                slots[number] = Slot::Answered { answer, memory: None };
            }
            Slot::Lent { memory } => {
                memory.fill_ended();
                self.free(number);
            }
            Slot::Free | Slot::Asked { .. } | Slot::Unheard { .. } | Slot::Answered { .. } => {
                unreachable!("what call {number} lent has come back before");
            }
        }
    }

    fn free(&self, number: usize) {
        self.free.borrow_mut().push(number);
        self.freed.wake_all(&self.reactor);
    }
}

/// Who waits for an answer.
struct Waiting<'a, Q: Send + 'static, A: Send + 'static> {
    caller: &'a Caller<Q, A>,
    number: usize,
}

impl<Q: Send + 'static, A: Send + 'static> Waiting<'_, Q, A> {
    fn poll(&self) -> Poll<A> {
        let mut slots = self.caller.slots.borrow_mut();
        let slot = &mut slots[self.number];
        if let Slot::Asked { caller, .. } = slot {
            *caller = Some(self.caller.reactor.current_task());
            return Poll::Pending;
        }
        // Free for as long as this is alive: `drop` gives the number back.
        let Slot::Answered { answer, memory } = std::mem::replace(slot, Slot::Free) else {
            unreachable!("heard once");
        };
        if let Some(memory) = memory {
            *slot = Slot::Lent { memory };
        }
        Poll::Ready(answer)
    }
}

impl<Q: Send + 'static, A: Send + 'static> Drop for Waiting<'_, Q, A> {
    fn drop(&mut self) {
        let mut slots = self.caller.slots.borrow_mut();
        let slot = &mut slots[self.number];
        match std::mem::replace(slot, Slot::Free) {
            // Nobody waits any more.
            Slot::Asked { memory, .. } => *slot = Slot::Unheard { memory },
            Slot::Answered { memory: Some(memory), .. } | Slot::Lent { memory } => {
                *slot = Slot::Lent { memory };
            }
            Slot::Answered { memory: None, .. } | Slot::Free => self.caller.free(self.number),
            Slot::Unheard { .. } => unreachable!("it waits"),
        }
    }
}

/// Memory of a caller, while views of it are out. The last of them drops this.
struct Loan<Q: 'static, A: 'static> {
    link: Rc<Link<Reply<A>, Question<Q>>>,
    number: usize,
    /// That it is back goes with the answer.
    is_told: Cell<bool>,
}

impl<Q: 'static, A: 'static> Drop for Loan<Q, A> {
    fn drop(&mut self) {
        if !self.is_told.get() {
            self.link.send(Reply::Returned { number: self.number });
        }
    }
}

/// The end that answers.
struct Callee<Q, A, F> {
    reactor: Reactor,
    link: OnceCell<Rc<Link<Reply<A>, Question<Q>>>>,
    answer: F,
    asked: RefCell<VecDeque<Question<Q>>>,
    idle: RefCell<Vec<TaskId>>,
    workers: Cell<usize>,
    is_over: Cell<bool>,
    ended: WaitList,
}

impl<Q: Send + 'static, A: Send + 'static> CalleeEnd<Q, A> {
    /// Answers questions, many at a time, until the caller closes its end.
    pub fn serve(self, reactor: &Reactor, answer: impl AsyncFn(Q, Buffers) -> A + 'static) {
        let callee = Rc::new(Callee {
            reactor: reactor.clone(),
            link: OnceCell::new(),
            answer,
            asked: RefCell::default(),
            idle: RefCell::default(),
            workers: Cell::new(0),
            is_over: Cell::new(false),
            ended: WaitList::default(),
        });
        let its = Rc::downgrade(&callee);
        let link = self.0.open(reactor, move |news| {
            if let Some(callee) = its.upgrade() {
                callee.hear(news);
            }
        });
        assert!(callee.link.set(link).is_ok(), "opened once");
        reactor.spawn(callee.end());
    }
}

impl<Q, A, F> Callee<Q, A, F>
where
    Q: Send + 'static,
    A: Send + 'static,
    F: AsyncFn(Q, Buffers) -> A + 'static,
{
    fn hear(self: Rc<Self>, news: News<Question<Q>>) {
        match news {
            News::Message(question) => {
                self.asked.borrow_mut().push_back(question);
                let idle = self.idle.borrow_mut().pop();
                match idle {
                    Some(task) => self.reactor.wake(task),
                    None => {
                        self.workers.set(self.workers.get() + 1);
                        self.reactor.spawn(self.clone().work());
                    }
                }
            }
            News::Closed => {
                self.is_over.set(true);
                self.idle.take().into_iter().for_each(|task| self.reactor.wake(task));
                self.ended.wake_all(&self.reactor);
            }
        }
    }

    /// Keeps this end until the caller has closed its own, and all workers have ended.
    async fn end(self: Rc<Self>) {
        let is_over = || self.is_over.get() && self.workers.get() == 0;
        self.ended.until(&self.reactor, is_over).await;
        self.link().close().await;
    }

    fn link(&self) -> &Rc<Link<Reply<A>, Question<Q>>> {
        self.link.get().expect("set when it was opened")
    }

    /// Answers one question after the other.
    async fn work(self: Rc<Self>) {
        let link = self.link();
        while let Some(Question { number, question, lent }) = self.next().await {
            if lent.is_empty() {
                let answer = (self.answer)(question, Buffers::default()).await;
                link.send(Reply::Answer { number, answer, returned: true });
                continue;
            }
            let loan = Rc::new(Loan { link: link.clone(), number, is_told: Cell::new(false) });
            // SAFETY: the caller's slot keeps the memory until it is told that it has come back,
            // which is with the answer if the loan is dropped here, else when it is.
            let memory = unsafe { lent.adopt(loan.clone()) };
            let answer = (self.answer)(question, memory).await;
            let returned = Rc::strong_count(&loan) == 1;
            loan.is_told.set(returned);
            link.send(Reply::Answer { number, answer, returned });
        }
        self.workers.set(self.workers.get() - 1);
        self.ended.wake_all(&self.reactor);
    }

    /// `None`: there will be none.
    async fn next(&self) -> Option<Question<Q>> {
        std::future::poll_fn(|_| {
            let asked = self.asked.borrow_mut().pop_front();
            let task = self.reactor.current_task();
            let mut idle = self.idle.borrow_mut();
            if asked.is_some() || self.is_over.get() {
                // It may have been woken for something else: nobody is to count on it now.
                idle.retain(|its| *its != task);
                return Poll::Ready(asked);
            }
            if !idle.contains(&task) {
                idle.push(task);
            }
            Poll::Pending
        })
        .await
    }
}
