//! What remembers, beside the drives, which of them have everything: their host.
//!
//! A drive that was fenced does not know it. After a crash it may be all that is left, and says
//! that it is whole; only who was told of the fence can refuse it. So that is told before anything
//! is acknowledged that the drive lacks.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use ashlar_reactor::executor::Reactor;
use ashlar_reactor::wait_list::WaitList;

/// An answer is waited for so long: guests do not wait for the disk of the host itself, should that
/// hang.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// What is to be remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Testimony {
    /// Superblocks of a smaller one are old.
    pub generation: u64,
    /// Uuids of the drives that hold everything.
    pub current: Vec<[u8; 16]>,
}

/// Hands a testimony on, at once. False: nobody is there to hear it.
pub type Tell = Box<dyn Fn(Testimony) -> bool>;

#[derive(Default)]
pub(crate) struct Witness {
    tell: RefCell<Option<Tell>>,
    /// The newest generation that it has answered for.
    heard: Cell<u64>,
    answers: WaitList,
}

impl Witness {
    pub(crate) fn set(&self, tell: Tell) {
        *self.tell.borrow_mut() = Some(tell);
    }

    /// Returns when that is remembered, or cannot be.
    pub(crate) async fn tell(&self, reactor: &Reactor, testimony: Testimony) {
        let generation = testimony.generation;
        let is_told = self.tell.borrow().as_ref().is_some_and(|tell| tell(testimony));
        if is_told {
            let deadline = reactor.now().after(PATIENCE);
            let is_heard = || self.heard.get() >= generation;
            self.answers.until_or(reactor, deadline, is_heard).await;
        }
    }

    /// The answer.
    pub(crate) fn has_heard(&self, reactor: &Reactor, generation: u64) {
        self.heard.set(generation.max(self.heard.get()));
        self.answers.wake_all(reactor);
    }
}
