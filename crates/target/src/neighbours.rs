//! Who else is asked on this reactor: an export that is not alone takes shorter turns.

use std::cell::Cell;
use std::time::Duration;

use ashlar_reactor::backend::Instant;

/// How long an export is a neighbour for after it was asked for something. A guest that asks now
/// and then is one to whom each wait matters.
pub(crate) const LATELY: Duration = Duration::from_millis(10);

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

/// How many queues of one export have something to do.
#[derive(Clone, Copy, Default)]
pub(crate) struct Asking {
    turn: Instant,
    now: u16,
    before: u16,
}

impl Asking {
    /// With one more in this turn, or merely in this turn.
    pub(crate) fn at(self, turn: Instant, one_more: bool) -> Asking {
        let (before, now) = if self.turn == turn { (self.before, self.now) } else { (self.now, 0) };
        Asking { turn, now: now + u16::from(one_more), before }
    }

    /// In this turn as far as it has come, or in the one before, if there were more.
    pub(crate) fn count(self) -> u16 {
        self.now.max(self.before).max(1)
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

    #[test]
    fn queues_that_ask_are_counted_in_each_turn() {
        let at = |ns| Instant::from_ns(ns);
        let mut asking = Asking::default();
        assert_eq!(asking.at(at(1), false).count(), 1);
        for count in 1..=3 {
            asking = asking.at(at(2), true);
            assert_eq!(asking.count(), count);
        }
        // It is not known yet how many do in this turn.
        asking = asking.at(at(3), true);
        assert_eq!(asking.count(), 3);
        assert_eq!(asking.at(at(4), true).count(), 1);
        assert_eq!(asking.at(at(4), false).at(at(5), false).count(), 1);
    }
}
