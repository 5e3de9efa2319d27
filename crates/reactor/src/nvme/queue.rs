//! A submission queue and the completion queue that answers it (Base 3.3).
//!
//! Invariants:
//! - no more commands are out than the queue has entries, less one (Base 3.3.1.3); whoever pushes
//!   sees to that by its command ids;
//! - an entry is complete in memory before its doorbell is rung, and a completion is read only
//!   after its phase bit was seen.

use std::sync::atomic::{Ordering, fence};

use super::bus::Bus;
use super::command::{COMMAND_BYTES, COMPLETION_BYTES, Command, Completion};
use super::memory::SharedMemory;

/// First doorbell; each next one is a stride further (Base 3.1.3, offset 1000h).
pub const DOORBELLS: usize = 0x1000;

/// Where a pair of queues lies in the shared memory, and how long it is.
#[derive(Clone, Copy)]
pub struct Place {
    pub id: u16,
    pub entries: u16,
    pub submission: usize,
    pub completion: usize,
}

pub struct QueuePair {
    place: Place,
    /// Offsets in BAR 0.
    tail_doorbell: usize,
    head_doorbell: usize,
    tail: u16,
    head: u16,
    /// What the phase bit of a new completion looks like.
    phase: bool,
    /// Doorbells that are behind.
    submitted: bool,
    taken: bool,
}

impl QueuePair {
    /// `stride`: bytes between doorbells. The completion queue is zeroed: its phase bits say that
    /// nothing is there.
    pub fn new(place: Place, stride: usize, memory: &SharedMemory) -> QueuePair {
        memory.clear(place.completion, usize::from(place.entries) * COMPLETION_BYTES);
        let doorbell = |index: usize| DOORBELLS + (2 * usize::from(place.id) + index) * stride;
        QueuePair {
            place,
            tail_doorbell: doorbell(0),
            head_doorbell: doorbell(1),
            tail: 0,
            head: 0,
            phase: true,
            submitted: false,
            taken: false,
        }
    }

    pub fn place(&self) -> Place {
        self.place
    }

    /// Writes an entry; the controller hears of it with `ring`.
    pub fn push(&mut self, memory: &SharedMemory, command: Command) {
        let at = self.place.submission + usize::from(self.tail) * COMMAND_BYTES;
        memory.write(at, &command.to_bytes());
        self.tail = self.next(self.tail);
        self.submitted = true;
    }

    /// Tells the controller what was pushed and taken since.
    pub fn ring(&mut self, bus: &dyn Bus) {
        if std::mem::take(&mut self.submitted) {
            fence(Ordering::SeqCst);
            bus.write(self.tail_doorbell, u32::from(self.tail));
        }
        if std::mem::take(&mut self.taken) {
            bus.write(self.head_doorbell, u32::from(self.head));
        }
    }

    /// The next completion.
    pub fn pop(&mut self, memory: &SharedMemory) -> Option<Completion> {
        let at = self.place.completion + usize::from(self.head) * COMPLETION_BYTES;
        let last = memory.load(at + 12);
        if (last & 1 << 16 != 0) != self.phase {
            return None;
        }
        let found = [memory.load(at), memory.load(at + 4), memory.load(at + 8), last];
        self.head = self.next(self.head);
        if self.head == 0 {
            self.phase = !self.phase;
        }
        self.taken = true;
        Some(Completion::from_dwords(found))
    }

    fn next(&self, index: u16) -> u16 {
        if index + 1 == self.place.entries { 0 } else { index + 1 }
    }
}
