//! Reads that drives of memory answer at once. Nothing is waited for, so that nothing changes
//! between the first look and the last byte: no lock is taken, no request is counted as under way.
//!
//! Whatever is not as usual is left to `read.rs`, which has the rules: what is refused here has
//! changed nothing.

use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::range_lock::Mode;
use smallvec::SmallVec;

use crate::array::Array;
use crate::layout::Piece;
use crate::read_plan;
use crate::write_plan::each;

impl Array {
    /// Fills `into` from `offset`, if that is one piece, as it was written, and there at once.
    /// False: it has to be waited for.
    pub(crate) fn read_now(&self, offset: u64, into: &Buffers) -> bool {
        let len = into.len() as u64;
        let is_usual = self.integrity.is_none() && self.settings().hedge_percent() == 0;
        if !is_usual || !self.is_open() || !self.contains(offset, len) {
            return false;
        }
        let Some(piece) = self.one_piece(offset, len) else { return false };
        let done = self.is_in_place(&piece)
            && match self.one_that_has(&piece) {
                Some((_, drive, at)) => drive.read_now(at, into),
                None => self.work_out_now(&piece, into),
            };
        if done {
            self.count_read(self.reactor.turn_time(), len);
        }
        done
    }

    /// The same of a piece whose member is away.
    fn work_out_now(&self, piece: &Piece, into: &Buffers) -> bool {
        let Piece { stripe, chunk, ref rows, .. } = *piece;
        let (layout, usable) = (self.layout(), self.members.held(stripe));
        if layout.parity == 0
            || usable & 1 << chunk != 0
            || usable.count_ones() < layout.data.into()
            || !self.agrees(stripe)
            || !self.may_lock_now(stripe, rows, Mode::Shared)
        {
            return false;
        }
        let mut have: SmallVec<[(u8, Buffer); 8]> = SmallVec::new();
        for position in each(read_plan::sources(&layout, stripe, usable, 0)) {
            let Some((drive, base)) = self.members.at(stripe, position) else { return false };
            let at = base + layout.member_offset(stripe, rows.start);
            let Some(bytes) = drive.lend(at, into.len()) else { return false };
            have.push((position, bytes));
        }
        let Ok(worked_out) = self.work_out(stripe, 1 << chunk, &have) else { return false };
        let [(_, bytes)] = worked_out.as_slice() else { return false };
        into.copy_from(&bytes.clone().into());
        self.count(|counters| counters.reconstructed += 1);
        true
    }
}
