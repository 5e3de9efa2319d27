//! Reads and writes of one connection go in lanes of their own: as writes that wait for their turn
//! stop no reads, and reads no writes, as long as there is room for one more of them.

use std::cell::Cell;

use crate::nbd::request::{Asked, Command};
use crate::nbd::workers::{REQUESTS_MAX, Workers};

/// Data of one lane that is held for it, from when a request is taken up until its answer is sent;
/// a request that is larger is there alone.
const BYTES_MAX: u64 = 16 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// And all else that has no data of the client's and changes nothing.
    Reads,
    Writes,
}

impl Lane {
    pub(super) const COUNT: usize = 2;

    pub(super) fn of(asked: &Asked) -> Lane {
        match asked.command {
            Command::Write { .. } | Command::Trim { .. } | Command::WriteZeroes { .. } => {
                Lane::Writes
            }
            Command::Refuse(_) if asked.payload > 0 => Lane::Writes,
            Command::Read { .. }
            | Command::Flush
            | Command::Cache
            | Command::BlockStatus { .. }
            | Command::Refuse(_) => Lane::Reads,
        }
    }
}

/// What is under way in a lane.
#[derive(Default)]
pub(super) struct Traffic {
    pub(super) workers: Workers,
    /// Requests that were taken up and whose answers were not sent.
    under_way: Cell<usize>,
    held_bytes: Cell<u64>,
}

impl Traffic {
    pub(super) fn is_empty(&self) -> bool {
        self.under_way.get() == 0
    }

    pub(super) fn has_room(&self, bytes: u64) -> bool {
        let held = self.held_bytes.get();
        let fits = bytes == 0 || held == 0 || held + bytes <= BYTES_MAX;
        self.under_way.get() < REQUESTS_MAX && fits
    }

    pub(super) fn take(&self, bytes: u64) {
        assert!(self.has_room(bytes));
        self.under_way.set(self.under_way.get() + 1);
        self.held_bytes.set(self.held_bytes.get() + bytes);
    }

    pub(super) fn give_back(&self, (requests, bytes): (usize, u64)) {
        self.under_way.set(self.under_way.get() - requests);
        self.held_bytes.set(self.held_bytes.get() - bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_has_room_for_much_or_for_one_large_request() {
        let traffic = Traffic::default();
        assert!(traffic.is_empty() && traffic.has_room(2 * BYTES_MAX));
        traffic.take(BYTES_MAX - 512);
        assert!(traffic.has_room(512) && !traffic.has_room(1024));
        traffic.give_back((1, BYTES_MAX - 512));
        traffic.take(BYTES_MAX + 512);
        assert!(!traffic.has_room(512) && traffic.has_room(0));
        traffic.give_back((1, BYTES_MAX + 512));
        (0..REQUESTS_MAX).for_each(|_| traffic.take(0));
        assert!(!traffic.has_room(0));
    }
}
