//! Operations in flight, each in a slot that owns its buffers until the backend is done with them.
//!
//! Invariant: a slot keeps its [`Op`] from `submit` to the reaped `Done`, also when the future that
//! waited for it was dropped; so the kernel never writes into memory that was given back.

use crate::op::{Done, Op, Outcome, Ticket};
use crate::task::TaskId;

/// Most operations in flight on one reactor: more than all the queues of a hundred exports can ask
/// for at once.
pub const IN_FLIGHT_MAX: usize = 1 << 20;

enum Slot {
    Free,
    InFlight { op: Op, waiter: Option<TaskId>, abandoned: bool },
    Completed(Outcome),
}

#[derive(Default)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<Ticket>,
}

impl Slots {
    /// Takes a slot for `op` and returns a view of the op to submit.
    pub(crate) fn start(&mut self, op: Op) -> (Ticket, &Op) {
        if let Op::Read { into, .. } = &op {
            into.fill_started();
        }
        let ticket = self.free.pop().unwrap_or_else(|| {
            assert!(self.slots.len() < IN_FLIGHT_MAX, "too many operations in flight");
            self.slots.push(Slot::Free);
            Ticket(u32::try_from(self.slots.len() - 1).expect("below IN_FLIGHT_MAX"))
        });
        let slot = &mut self.slots[ticket.0 as usize];
        *slot = Slot::InFlight { op, waiter: None, abandoned: false };
        match slot {
            Slot::InFlight { op, .. } => (ticket, op),
            Slot::Free | Slot::Completed(_) => unreachable!("just stored"),
        }
    }

    /// Stores a completion and lets the buffers go. Returns the task to wake.
    pub(crate) fn complete(&mut self, done: Done) -> Option<TaskId> {
        let slot = &mut self.slots[done.ticket.0 as usize];
        let Slot::InFlight { op, waiter, abandoned } = std::mem::replace(slot, Slot::Free) else {
            panic!("operation {:?} completed twice", done.ticket);
        };
        if let Op::Read { into, .. } = &op {
            into.fill_ended();
        }
        if abandoned {
            self.free.push(done.ticket);
            return None;
        }
        *slot = Slot::Completed(done.outcome);
        waiter
    }

    /// The outcome, once there is one; otherwise remembers who waits for it.
    pub(crate) fn take(&mut self, ticket: Ticket, task: TaskId) -> Option<Outcome> {
        let slot = &mut self.slots[ticket.0 as usize];
        match slot {
            Slot::Completed(outcome) => {
                let outcome = *outcome;
                *slot = Slot::Free;
                self.free.push(ticket);
                Some(outcome)
            }
            Slot::InFlight { waiter, .. } => {
                *waiter = Some(task);
                None
            }
            Slot::Free => panic!("operation {ticket:?} was answered before"),
        }
    }

    /// Nobody waits any more; the slot frees itself when the backend is done.
    pub(crate) fn abandon(&mut self, ticket: Ticket) {
        let slot = &mut self.slots[ticket.0 as usize];
        match slot {
            Slot::InFlight { abandoned, .. } => *abandoned = true,
            Slot::Completed(_) => {
                *slot = Slot::Free;
                self.free.push(ticket);
            }
            Slot::Free => panic!("operation {ticket:?} was answered before"),
        }
    }

    /// The backend has ended: it fills nothing any more, and what was in flight lets its buffers go.
    pub(crate) fn end(self) {
        for slot in &self.slots {
            if let Slot::InFlight { op: Op::Read { into, .. }, .. } = slot {
                into.fill_ended();
            }
        }
    }
}
