//! Deadlines, earliest first. The executor owns them; `Reactor::sleep` is how to wait.

use std::collections::BTreeMap;

use crate::backend::Instant;
use crate::task::TaskId;

#[derive(Default)]
pub(crate) struct Timers {
    due: BTreeMap<(Instant, u64), TaskId>,
    next_entry: u64,
}

impl Timers {
    /// Returns the entry's number, for `remove`.
    pub(crate) fn add(&mut self, deadline: Instant, task: TaskId) -> u64 {
        self.next_entry += 1;
        self.due.insert((deadline, self.next_entry), task);
        self.next_entry
    }

    /// Forgets an entry; one that has fired is gone already.
    pub(crate) fn remove(&mut self, deadline: Instant, entry: u64) {
        self.due.remove(&(deadline, entry));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.due.is_empty()
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.due.first_key_value().map(|((deadline, _), _)| *deadline)
    }

    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<TaskId> {
        let first = self.due.first_entry()?;
        if first.key().0 > now {
            return None;
        }
        Some(first.remove())
    }
}
