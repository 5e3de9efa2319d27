//! Who else is asked on this reactor: an export that is not alone takes shorter turns.

use std::cell::Cell;
use std::time::Duration;

use ashlar_reactor::backend::Instant;

/// How long an export is a neighbour for after it was asked for something. A guest that asks now
/// and then is one to whom each wait matters.
const LATELY: Duration = Duration::from_millis(10);

thread_local! {
    /// A reactor is a thread.
    static ASKED: Cell<Asked> = const { Cell::new(Asked::NEVER) };
}

/// `who`, which is any number of its own, is asked for something.
pub(crate) fn note(who: usize, now: Instant) {
    ASKED.set(ASKED.get().noted(who, now));
}

/// Whether somebody else was asked lately.
pub(crate) fn are_beside(who: usize, now: Instant) -> bool {
    let others = ASKED.get().others(who);
    others.is_some_and(|at| now.since(at) < LATELY)
}

/// The export that was asked last, and when one that is not this one was.
#[derive(Clone, Copy)]
struct Asked {
    last: Option<(usize, Instant)>,
    other: Option<Instant>,
}

impl Asked {
    const NEVER: Asked = Asked { last: None, other: None };

    fn noted(self, who: usize, now: Instant) -> Asked {
        Asked { last: Some((who, now)), other: self.others(who) }
    }

    /// When anyone but `who` was asked last.
    fn others(self, who: usize) -> Option<Instant> {
        match self.last {
            Some((last, at)) if last != who => Some(at),
            _ => self.other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_but_oneself_is_a_neighbour_for_a_while() {
        let at = |ms: u64| Instant::from_ns(ms * 1_000_000);
        assert!(!are_beside(1, at(0)));
        note(1, at(0));
        note(1, at(1));
        assert!(!are_beside(1, at(1)), "it is alone");
        assert!(are_beside(2, at(1)));
        note(2, at(5));
        note(2, at(6));
        assert!(are_beside(1, at(15)) && !are_beside(1, at(16)));
        assert!(are_beside(2, at(10)) && !are_beside(2, at(11)));
        assert!(are_beside(3, at(15)) && !are_beside(3, at(16)));
        // Of three, the two others.
        note(3, at(20));
        note(1, at(21));
        assert!(are_beside(1, at(29)) && !are_beside(1, at(30)));
        assert!(are_beside(3, at(30)) && !are_beside(3, at(31)));
    }
}
