//! Operations in flight, each in a slot that owns its buffers until the backend is done with them.
//!
//! Invariants:
//! - a slot keeps its [`Op`] from `submit` to the reaped `Done`, also when nobody waits for it any
//!   more; so the kernel never writes into memory that was given back;
//! - a device is let go only after the last operation on it was reaped.

use std::time::Duration;

use crate::backend::Instant;
use crate::buffer::Buffers;
use crate::op::{DeviceId, Done, Errno, Op, Outcome, Ticket};
use crate::task::TaskId;

/// Most operations in flight on one reactor: more than all the queues of a hundred exports can ask
/// for at once.
pub const IN_FLIGHT_MAX: usize = 1 << 20;
/// What is heard of an operation whose device was let go.
const REVOKED: Outcome = Err(Errno(libc::ENODEV));

/// Who will hear of an operation in flight.
enum Listener {
    Task(Option<TaskId>),
    /// Someone who will hear [`REVOKED`], whatever the backend says.
    Revoked,
    Nobody,
}

enum Slot {
    Free,
    InFlight {
        op: Op,
        started: Instant,
        listener: Listener,
    },
    /// With the operation, for whoever wants to try it again.
    Completed {
        op: Op,
        outcome: Outcome,
        ended: Instant,
    },
}

/// What whoever waited for an operation hears.
pub(crate) struct Heard {
    pub(crate) outcome: Outcome,
    pub(crate) ended: Instant,
    /// `None`: the backend may still be at it.
    pub(crate) op: Option<Op>,
}

/// What follows from a completion.
#[derive(Default)]
pub(crate) struct Completion {
    pub(crate) wake: Option<TaskId>,
    /// Nobody waited for it; someone may wait for its memory.
    pub(crate) unheard: bool,
    /// The last operation on a device that is to be let go.
    pub(crate) idle_device: Option<DeviceId>,
}

#[derive(Default)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<Ticket>,
    /// Devices to be let go, and how many operations the backend still has on each.
    leaving: Vec<(DeviceId, usize)>,
}

impl Slots {
    /// Takes a slot for `op` and returns a view of the op to submit.
    pub(crate) fn start(&mut self, op: Op, started: Instant) -> (Ticket, &Op) {
        if let Some(into) = op.fills() {
            into.fill_started();
        }
        let ticket = self.free.pop().unwrap_or_else(|| {
            assert!(self.slots.len() < IN_FLIGHT_MAX, "too many operations in flight");
            self.slots.push(Slot::Free);
            Ticket(u32::try_from(self.slots.len() - 1).expect("below IN_FLIGHT_MAX"))
        });
        let slot = &mut self.slots[ticket.0 as usize];
        *slot = Slot::InFlight { op, started, listener: Listener::Task(None) };
        match slot {
            Slot::InFlight { op, .. } => (ticket, op),
            Slot::Free | Slot::Completed { .. } => unreachable!("just stored"),
        }
    }

    /// Stores a completion.
    pub(crate) fn complete(&mut self, done: Done, now: Instant) -> Completion {
        let slot = &mut self.slots[done.ticket.0 as usize];
        let Slot::InFlight { op, listener, .. } = std::mem::replace(slot, Slot::Free) else {
            panic!("operation {:?} completed twice", done.ticket);
        };
        if let Some(into) = op.fills() {
            into.fill_ended();
        }
        let mut completion = Completion::default();
        if !self.leaving.is_empty() {
            completion.idle_device = op.device().filter(|device| self.leaves(*device));
        }
        let slot = &mut self.slots[done.ticket.0 as usize];
        match listener {
            Listener::Task(waiter) => {
                *slot = Slot::Completed { op, outcome: done.outcome, ended: now };
                completion.wake = waiter;
            }
            Listener::Revoked => {
                *slot = Slot::Completed { op, outcome: REVOKED, ended: now };
                completion.unheard = true;
            }
            Listener::Nobody => {
                self.free.push(done.ticket);
                completion.unheard = true;
            }
        }
        completion
    }

    /// Counts one operation less on a device that is to be let go. True if it was the last.
    fn leaves(&mut self, device: DeviceId) -> bool {
        let Some(index) = self.leaving.iter().position(|(id, _)| *id == device) else {
            return false;
        };
        self.leaving[index].1 -= 1;
        let last = self.leaving[index].1 == 0;
        if last {
            self.leaving.swap_remove(index);
        }
        last
    }

    /// The outcome and when it came, once there is one; otherwise remembers who waits for it.
    pub(crate) fn take(&mut self, ticket: Ticket, task: TaskId) -> Option<Heard> {
        let slot = &mut self.slots[ticket.0 as usize];
        if let Slot::InFlight { listener, started, .. } = slot {
            return match listener {
                Listener::Task(waiter) => {
                    *waiter = Some(task);
                    None
                }
                Listener::Revoked => {
                    *listener = Listener::Nobody;
                    Some(Heard { outcome: REVOKED, ended: *started, op: None })
                }
                Listener::Nobody => panic!("operation {ticket:?} was answered before"),
            };
        }
        let Slot::Completed { op, outcome, ended } = std::mem::replace(slot, Slot::Free) else {
            panic!("operation {ticket:?} was answered before");
        };
        self.free.push(ticket);
        Some(Heard { outcome, ended, op: Some(op) })
    }

    /// Nobody waits any more; the slot frees itself when the backend is done.
    pub(crate) fn abandon(&mut self, ticket: Ticket) {
        let slot = &mut self.slots[ticket.0 as usize];
        match slot {
            Slot::InFlight { listener, .. } => *listener = Listener::Nobody,
            Slot::Completed { .. } => {
                *slot = Slot::Free;
                self.free.push(ticket);
            }
            Slot::Free => panic!("operation {ticket:?} was answered before"),
        }
    }

    /// Whoever waits for an operation on `device` hears [`REVOKED`]; returns those tasks. The
    /// device is `idle_device` of a later completion, unless the backend has nothing on it now:
    /// then the second value is true.
    pub(crate) fn revoke(&mut self, device: DeviceId) -> (Vec<TaskId>, bool) {
        let (mut wake, mut left) = (Vec::new(), 0);
        for slot in &mut self.slots {
            if let Slot::InFlight { op, listener, .. } = slot
                && op.device() == Some(device)
            {
                left += 1;
                if let Listener::Task(waiter) = listener {
                    wake.extend(*waiter);
                    *listener = Listener::Revoked;
                }
            }
        }
        if left > 0 {
            assert!(self.leaving.iter().all(|(id, _)| *id != device), "{device:?} let go twice");
            self.leaving.push((device, left));
        }
        (wake, left == 0)
    }

    /// Whether an operation that nobody waits for fills any of this memory. Looks at all
    /// slots: not for every operation.
    pub(crate) fn fills_unheard(&self, memory: &Buffers) -> bool {
        self.slots.iter().any(|slot| match slot {
            Slot::InFlight { op, listener: Listener::Revoked | Listener::Nobody, .. } => {
                op.fills().is_some_and(|into| into.overlaps(memory))
            }
            Slot::InFlight { .. } | Slot::Free | Slot::Completed { .. } => false,
        })
    }

    /// The first moment at which an operation on `device` will have taken longer than `allowed`.
    /// Slow, as above.
    pub(crate) fn deadline(
        &self,
        device: DeviceId,
        allowed: impl Fn(&Op) -> Duration,
    ) -> Option<Instant> {
        let deadlines = self.slots.iter().filter_map(|slot| match slot {
            Slot::InFlight { op, started, .. } if op.device() == Some(device) => {
                Some(started.after(allowed(op)))
            }
            Slot::InFlight { .. } | Slot::Free | Slot::Completed { .. } => None,
        });
        deadlines.min()
    }

    /// The backend has ended: it fills nothing any more, and what was in flight lets its buffers
    /// go.
    pub(crate) fn end(self) {
        for slot in &self.slots {
            if let Slot::InFlight { op, .. } = slot
                && let Some(into) = op.fills()
            {
                into.fill_ended();
            }
        }
    }
}
