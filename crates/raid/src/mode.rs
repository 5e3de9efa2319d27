//! How the array is written right now: in place at once, or through the journal.
//!
//! ```text
//!   Direct ──nothing under way, flushed, no stripe waits for resync──► Journaled
//!      ▲──────────all in place, and the superblock says so durably─────────┘
//! ```
//!
//! Which one it should be, `policy.rs` decides. It stays `Journaled` until most is in place, for
//! which nobody waits; and where not all can be put in place, which is tried again later.

use std::cell::Cell;
use std::rc::Rc;

use ashlar_reactor::backend::Instant;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::wait_list::WaitList;

use crate::error::ArrayError;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    #[default]
    Direct,
    Journaled,
}

/// The mode, and how many requests rely on it.
#[derive(Default)]
pub(crate) struct Modes {
    pub(crate) mode: Cell<Mode>,
    pub(crate) users: Cell<u64>,
    pub(crate) switching: Cell<bool>,
    /// The journal is to be ended, and what is in it is put in place first, beside those who write.
    pub(crate) ending: Cell<bool>,
    /// Why the journal could not be ended, and when that is tried again.
    pub(crate) not_ended: Cell<Option<(ArrayError, Instant)>>,
    /// Before, nobody but a write tries to begin the journal.
    pub(crate) not_before: Cell<Instant>,
    pub(crate) changed: WaitList,
}

/// Keeps the mode as it is.
pub(crate) struct ModeGuard {
    pub(crate) reactor: Reactor,
    pub(crate) modes: Rc<Modes>,
    pub(crate) mode: Mode,
}

impl Drop for ModeGuard {
    fn drop(&mut self) {
        self.modes.users.set(self.modes.users.get() - 1);
        if self.modes.users.get() == 0 {
            self.modes.changed.wake_all(&self.reactor);
        }
    }
}

/// Keeps everyone from entering a mode.
pub(crate) struct Pause {
    reactor: Reactor,
    modes: Rc<Modes>,
}

impl Drop for Pause {
    fn drop(&mut self) {
        self.modes.switching.set(false);
        self.modes.changed.wake_all(&self.reactor);
    }
}

impl Modes {
    /// Waits until nobody relies on the mode: nobody writes until the pause is dropped.
    pub(crate) async fn pause(self: &Rc<Self>, reactor: &Reactor) -> Pause {
        self.changed.until(reactor, || !self.switching.get()).await;
        self.switching.set(true);
        let pause = Pause { reactor: reactor.clone(), modes: self.clone() };
        self.changed.until(reactor, || self.users.get() == 0).await;
        pause
    }

    /// While nobody uses it.
    pub(crate) fn set(&self, mode: Mode) {
        assert!(self.users.get() == 0);
        self.mode.set(mode);
    }
}
