//! Who waits for a batch: the entries of one caller, and what became of them.

use std::cell::Cell;
use std::rc::Rc;

use ashlar_reactor::buffer::Buffer;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::wait_list::WaitList;

use super::entry::{Entries, Entry};
use crate::error::ArrayError;
use crate::pending::PendingSize;

pub(super) struct Waiting {
    pub(super) entries: Entries,
    pub(super) size: PendingSize,
    pub(super) answer: Rc<Answer>,
}

impl Waiting {
    pub(super) fn with(entries: Entries) -> (Waiting, Rc<Answer>) {
        let lens = entries.iter().filter_map(Entry::payload).map(Buffer::len);
        let (size, answer) = (PendingSize::of(lens), Rc::<Answer>::default());
        (Waiting { entries, size, answer: answer.clone() }, answer)
    }
}

/// The sequence of the batch that has the entries, once it is written.
#[derive(Default)]
pub(super) struct Answer {
    given: Cell<Option<Result<u64, ArrayError>>>,
    /// The caller alone: each batch would wake all the others for nothing.
    waits: WaitList,
}

impl Answer {
    pub(super) fn give(&self, reactor: &Reactor, answer: Result<u64, ArrayError>) {
        self.given.set(Some(answer));
        self.waits.wake_all(reactor);
    }

    pub(super) async fn wait(&self, reactor: &Reactor) -> Result<u64, ArrayError> {
        self.waits.until(reactor, || self.given.get().is_some()).await;
        self.given.get().expect("looked at above")
    }
}
