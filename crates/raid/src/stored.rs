//! What is on its way to the members: what goes where, what has arrived, what is left to be done.

use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::drive::{Drive, DriveIo};
use ashlar_format::units::StripeIndex;
use ashlar_reactor::buffer::Buffers;
use smallvec::SmallVec;

use crate::error::ArrayError;
use crate::layout::Positions;
use crate::pending::Hold;
use crate::write_plan::Band;

/// Bytes for one position.
#[derive(Clone)]
pub(crate) struct Store {
    pub(crate) position: u8,
    pub(crate) row: u32,
    pub(crate) bytes: Buffers,
}

/// Bytes on their way to a drive; `None`: there was none that holds the stripe.
pub(crate) struct Storing<'a> {
    pub(crate) store: &'a Store,
    pub(crate) io: Option<(Rc<Drive>, DriveIo)>,
}

/// A band that can be stored.
pub(crate) struct Updated {
    pub(crate) stripe: StripeIndex,
    pub(crate) band: Band,
    /// Positions that should have the new bytes; those that can are in `stores`.
    pub(crate) wanted: Positions,
    pub(crate) writable: Positions,
    pub(crate) stores: SmallVec<[Store; 4]>,
}

impl Updated {
    /// Positions whose members are behind from now on.
    pub(crate) fn missed(&self) -> Positions {
        self.wanted & !self.writable
    }
}

/// What a write left behind on the members.
#[derive(Clone, Copy, Default)]
pub(crate) struct Stored {
    /// Positions that hold the new bytes.
    pub(crate) stored: Positions,
    pub(crate) no_space: bool,
    /// Why the rest was not tried: it waits for parity that has sums.
    pub(crate) waits: Option<ArrayError>,
}

/// A band that was stored in part. Its stripe is taken out of what is pending until it is whole.
pub(crate) struct Torn {
    pub(crate) updated: Updated,
    /// Positions that have it already.
    pub(crate) stored: Positions,
    pub(crate) newest: u64,
    /// Its batches, those of its parity too.
    pub(crate) _holds: Vec<Hold>,
}

/// What was begun and could not be finished (see `kept`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// By the batch of this sequence, of stripes of one region.
    Zeroing {
        stripes: Range<u64>,
        sequence: u64,
    },
    Forgetting {
        stripes: Range<u64>,
    },
    Moving,
    Replay {
        stripe: StripeIndex,
    },
}

pub(crate) struct Kept {
    pub(crate) begun: Begun,
    /// Its batches.
    pub(crate) holds: Vec<Hold>,
    /// Why it was not finished.
    pub(crate) error: ArrayError,
}
