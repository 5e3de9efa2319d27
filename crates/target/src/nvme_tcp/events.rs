//! What a host wants to be told without asking (Base 5.2), and which namespaces have changed. Pure.
//!
//! ```text
//!            a namespace changes            the host reads the log
//!   quiet ───────────────────────► owed ──► told ───────────────────► quiet
//!                                   a request for events is there
//! ```
//!
//! Invariant: between being told and reading the log, a host is not told again.

use std::collections::BTreeSet;

use ashlar_reactor::nvme::command::Status;

use crate::nvme_tcp::identify::{ASYNC_EVENTS_MAX, EVENT_NAMESPACES};
use crate::nvme_tcp::log_page::CHANGED_NAMESPACES;

/// Of completions of event requests: a notice, that namespace attributes have changed.
const NAMESPACES_CHANGED: u32 = 2 | (CHANGED_NAMESPACES as u32) << 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Notice {
    #[default]
    Quiet,
    Owed,
    Told,
}

/// A request for events that is to be completed, with this result.
pub(crate) type Told = (u16, u32);

#[derive(Debug)]
pub(crate) struct Events {
    /// Requests that wait, by command identifier.
    waiting: Vec<u16>,
    /// Which events the host wants.
    wanted: u32,
    notice: Notice,
    changed: BTreeSet<u32>,
}

impl Default for Events {
    fn default() -> Events {
        let (notice, changed) = (Notice::default(), BTreeSet::default());
        let waiting = Vec::with_capacity(ASYNC_EVENTS_MAX.into());
        Events { waiting, wanted: EVENT_NAMESPACES, notice, changed }
    }
}

impl Events {
    /// The host asks for events; one that is owed is told at once.
    pub(crate) fn request(&mut self, id: u16) -> Result<Option<Told>, Status> {
        if self.waiting.len() == usize::from(ASYNC_EVENTS_MAX) {
            return Err(Status::ASYNC_EVENT_LIMIT);
        }
        self.waiting.push(id);
        Ok(self.tell())
    }

    /// A namespace came, went or has another size.
    pub(crate) fn namespace_changed(&mut self, namespace: u32) -> Option<Told> {
        self.changed.insert(namespace);
        if self.notice == Notice::Quiet {
            self.notice = Notice::Owed;
        }
        self.tell()
    }

    fn tell(&mut self) -> Option<Told> {
        if self.notice != Notice::Owed || self.wanted & EVENT_NAMESPACES == 0 {
            return None;
        }
        let id = self.waiting.pop()?;
        self.notice = Notice::Told;
        Some((id, NAMESPACES_CHANGED))
    }

    /// Which have changed since the host was last told.
    pub(crate) fn changed(&self) -> Vec<u32> {
        self.changed.iter().copied().collect()
    }

    /// The host has read which have changed, and will not read that again.
    pub(crate) fn changes_are_known(&mut self) {
        self.changed.clear();
        self.notice = Notice::Quiet;
    }

    pub(crate) fn wanted(&self) -> u32 {
        self.wanted
    }

    pub(crate) fn set_wanted(&mut self, wanted: u32) -> Option<Told> {
        self.wanted = wanted;
        self.tell()
    }

    /// Takes one request back: a host may have given several the same number. False: none waits.
    pub(crate) fn abort(&mut self, id: u16) -> bool {
        let at = self.waiting.iter().position(|waiting| *waiting == id);
        at.map(|at| self.waiting.remove(at)).is_some()
    }

    /// The controller was reset: nothing is asked for, and nothing owed. Returns how many requests
    /// are never answered.
    pub(crate) fn reset(&mut self) -> u16 {
        let forgotten = std::mem::take(self).waiting.len();
        u16::try_from(forgotten).expect("no more wait than may")
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a host hears of each change, once, and misses none.
    //! Method: the orders in which requests, changes and reads of the log can come.

    use super::*;

    #[test]
    fn a_change_is_told_once_until_the_log_is_read() {
        let mut events = Events::default();
        assert_eq!(events.request(1), Ok(None));
        assert_eq!(events.namespace_changed(5), Some((1, 0x0004_0002)));
        assert_eq!(events.request(2), Ok(None));
        assert_eq!(events.namespace_changed(6), None, "it was told already");
        assert_eq!(events.changed(), [5, 6]);
        assert_eq!(events.namespace_changed(7), None);
        assert_eq!(events.changed(), [5, 6, 7]);
        events.changes_are_known();
        assert!(events.changed().is_empty());
        assert_eq!(events.namespace_changed(7), Some((2, 0x0004_0002)));
    }

    #[test]
    fn what_is_owed_waits_for_a_request() {
        let mut events = Events::default();
        assert_eq!(events.namespace_changed(5), None);
        assert_eq!(events.request(1), Ok(Some((1, 0x0004_0002))));
        assert_eq!(events.set_wanted(0), None);
        events.changes_are_known();
        assert_eq!(events.request(2), Ok(None));
        assert_eq!(events.namespace_changed(5), None, "it is not wanted");
        assert_eq!(events.set_wanted(EVENT_NAMESPACES), Some((2, 0x0004_0002)));
    }

    #[test]
    fn requests_have_a_limit_and_can_be_taken_back() {
        let mut events = Events::default();
        for id in 0..ASYNC_EVENTS_MAX.into() {
            assert_eq!(events.request(id), Ok(None));
        }
        assert_eq!(events.request(9), Err(Status::ASYNC_EVENT_LIMIT));
        assert!(events.abort(1) && !events.abort(1));
        assert_eq!(events.request(9), Ok(None));
        assert!(events.abort(0));
        assert_eq!(events.request(9), Ok(None));
        assert!(events.abort(9) && events.abort(9) && !events.abort(9), "one at a time");
        assert_eq!(events.reset(), u16::from(ASYNC_EVENTS_MAX) - 2);
        assert_eq!(events.reset(), 0);
        assert_eq!(events.namespace_changed(1), None);
    }
}
