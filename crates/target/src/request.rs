//! What a front end asks of a volume, and the permit to answer it.
//!
//! Invariant: every permit is turned into exactly one [`Answer`]. One that is dropped unanswered is
//! a guest that waits for ever, so that is a panic, not a warning.

use ashlar_reactor::buffer::Buffers;

/// What shall be done. Offsets and lengths in bytes, checked against nothing yet.
#[derive(Debug)]
pub enum Operation {
    Read {
        offset: u64,
        into: Buffers,
    },
    Write {
        offset: u64,
        from: Buffers,
    },
    /// Everything answered before is durable afterwards.
    Flush,
    /// The content of the range does not matter any more.
    Discard {
        offset: u64,
        len: u64,
    },
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        offset: u64,
        len: u64,
    },
    /// Fills `into` with the name of the device, zero-padded.
    Identify {
        into: Buffers,
    },
    /// Badly formed, but well enough to be answered: nothing is done.
    Refuse(Status),
}

/// What the initiator is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Done,
    Failed,
    /// The drives have no room for it.
    NoSpace,
    Unsupported,
}

/// One request on its way.
#[derive(Debug)]
pub struct Request {
    pub operation: Operation,
    pub permit: Permit,
}

/// The right, and the duty, to answer one request.
#[derive(Debug)]
pub struct Permit {
    tag: u16,
    answered: bool,
}

/// What goes back to the initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the initiator still waits"]
pub struct Answer {
    /// As given to [`Permit::new`].
    pub tag: u16,
    pub status: Status,
    /// Bytes of data that were put into the initiator's memory.
    pub bytes: u32,
}

impl Permit {
    /// `tag`: how the front end knows the request.
    pub fn new(tag: u16) -> Permit {
        Permit { tag, answered: false }
    }

    pub fn complete(mut self, status: Status, bytes: u32) -> Answer {
        self.answered = true;
        Answer { tag: self.tag, status, bytes }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        assert!(self.answered || std::thread::panicking(), "request {} never answered", self.tag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permit_becomes_one_answer() {
        let answer = Permit::new(7).complete(Status::Done, 512);
        assert_eq!(answer, Answer { tag: 7, status: Status::Done, bytes: 512 });
    }

    #[test]
    #[should_panic(expected = "request 7 never answered")]
    fn a_dropped_permit_panics() {
        drop(Permit::new(7));
    }
}
