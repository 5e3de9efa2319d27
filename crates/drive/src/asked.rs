//! What a drive is asked to do.

use std::fmt::{Display, Formatter};

use ashlar_reactor::backend::Instant;
use ashlar_reactor::executor::{Io, Reactor};
use ashlar_reactor::op::{Op, Outcome};

/// From when to when an operation was under way, whenever its task looked.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
}

impl Span {
    pub(crate) fn of(io: &Io) -> Span {
        Span { began: io.started(), ended: io.ended() }
    }

    pub(crate) fn of_now(reactor: &Reactor) -> Span {
        Span { began: reactor.turn_time(), ended: reactor.turn_time() }
    }
}

/// `write of 4096 bytes at 8192`
pub(crate) struct Shown<'a>(pub(crate) &'a Op);

impl Display for Shown<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Op::Read { offset, into, .. } => write!(f, "read of {} bytes at {offset}", into.len()),
            Op::Write { offset, from, .. } => {
                write!(f, "write of {} bytes at {offset}", from.len())
            }
            Op::WriteZeroes { offset, len, .. } => write!(f, "zeroing of {len} bytes at {offset}"),
            Op::Flush { .. } => f.write_str("flush"),
            Op::Descriptor { .. } => unreachable!("nobody asks that of a drive"),
        }
    }
}

/// Without its place and its bytes: the slot of the operation has these.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    Read { bytes: u64 },
    Write { bytes: u64 },
    Flush,
    WriteZeroes { bytes: u64 },
}

impl Asked {
    pub(crate) fn of(op: &Op) -> Asked {
        match op {
            Op::Read { into, .. } => Asked::Read { bytes: into.len() as u64 },
            Op::Write { from, .. } => Asked::Write { bytes: from.len() as u64 },
            Op::Flush { .. } => Asked::Flush,
            Op::WriteZeroes { len, .. } => Asked::WriteZeroes { bytes: *len },
            Op::Descriptor { .. } => unreachable!("nobody asks that of a drive"),
        }
    }

    pub(crate) fn changes_drive(self) -> bool {
        match self {
            Asked::Write { .. } | Asked::WriteZeroes { .. } => true,
            Asked::Read { .. } | Asked::Flush => false,
        }
    }

    /// Whether the drive has done all of it.
    pub(crate) fn is_answered_by(self, outcome: Outcome) -> bool {
        let expected = match self {
            Asked::Read { bytes } | Asked::Write { bytes } => bytes,
            Asked::Flush | Asked::WriteZeroes { .. } => 0,
        };
        outcome.is_ok_and(|moved| moved >= expected)
    }
}
