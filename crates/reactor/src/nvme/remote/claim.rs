//! Which namespaces this process has open, each once at a time, and when nothing of before is done
//! to them any more.
//!
//! Invariants:
//! - who opens a namespace again finds that whoever had it before has nothing under way;
//! - what is known of lost associations outlives who had them.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Trouble;
use super::association::{Identity, Name};
use crate::clock::machine_time;

/// How long whoever had it may take to let it go.
const LET_GO_WITHIN: Duration = Duration::from_secs(1);

/// What a namespace is known by. Without a name of its own: its subsystem, the serial number of
/// that, and its number there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Name([u8; 16], [u8; 16], [u8; 8]),
    Place(String, String, u32),
}

static NAMESPACES: LazyLock<Mutex<BTreeMap<Key, Arc<Namespace>>>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Namespace {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_taken: bool,
    /// By the machine's clock: before, a lost association may still act.
    quiet_at: Duration,
    /// Lost ones that may act, and of which nobody knows yet for how long.
    unsettled: u32,
}

/// A namespace that is this one's alone.
#[cfg_attr(test, derive(Default))]
pub(super) struct Claim {
    namespace: Arc<Namespace>,
}

impl Claim {
    /// Waits a moment if somebody is about to let it go.
    pub(super) fn take(subsystem: &str, identity: &Identity) -> Result<Claim, Trouble> {
        let namespace = locked(&NAMESPACES).entry(key(subsystem, identity)).or_default().clone();
        let state = locked(&namespace.state);
        let waited = namespace.changed.wait_timeout_while(state, LET_GO_WITHIN, |its| its.is_taken);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.is_taken {
            return Err(Trouble::Taken);
        }
        state.is_taken = true;
        drop(state);
        Ok(Claim { namespace })
    }

    /// A lost association may act, until `settle`.
    pub(super) fn unsettle(&self) {
        locked(&self.namespace.state).unsettled += 1;
    }

    /// It does nothing more; or for at most `lasts` from now.
    pub(super) fn settle(&self, lasts: Option<Duration>) {
        let mut state = locked(&self.namespace.state);
        state.unsettled -= 1;
        if let Some(lasts) = lasts {
            state.quiet_at = state.quiet_at.max(machine_time() + lasts);
        }
        drop(state);
        self.namespace.changed.notify_all();
    }

    #[cfg(test)]
    pub(super) fn unsettled(&self) -> u32 {
        locked(&self.namespace.state).unsettled
    }

    /// Returns when no lost association does anything more.
    pub(super) fn await_quiet(&self) {
        let Namespace { state, changed } = &*self.namespace;
        let mut state = locked(state);
        loop {
            let left = state.quiet_at.saturating_sub(machine_time());
            state = if state.unsettled > 0 {
                changed.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else if left > Duration::ZERO {
                let waited = changed.wait_timeout(state, left);
                waited.unwrap_or_else(PoisonError::into_inner).0
            } else {
                return;
            };
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        locked(&self.namespace.state).is_taken = false;
        self.namespace.changed.notify_all();
    }
}

fn key(subsystem: &str, identity: &Identity) -> Key {
    let Identity { controller, namespace, name, .. } = identity;
    match name {
        name if name.is_none() => {
            Key::Place(subsystem.to_owned(), controller.serial.clone(), *namespace)
        }
        Name { nguid, uuid, eui64 } => Key::Name(*nguid, *uuid, *eui64),
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
