//! Rows of a stripe that cannot be worked out are given up: they become bad blocks, and the stripe
//! agrees again without them.
//!
//! That is so where sectors cannot be read and too few others are left, and where parity is not to
//! be relied on after a crash (the write hole) and data is missing. Nothing is given up that a
//! trusted member may bring back, nor while a whole group lacks members.
//! It is done where a rebuild or a resync comes by, and where what is acknowledged could not be put
//! in place otherwise: the journal would jam.
//!
//! Order, with the stripe locked, and what a crash leaves at each step:
//! 1. its region is dirty, durably (crash: nothing has changed)
//! 2. the rows are in the list of bad blocks, durably, as not settled (crash: at start 3 is done
//!    again, before anything is served)
//! 3. zeroes take the place of what is lost, and parity is made anew (crash: as 2; the journal may
//!    hold older parity, and store that again before)
//! 4. all is durable, and nothing older is in the journal; the rows are settled (crash: parity
//!    agrees)

use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::error::DriveError;
use ashlar_format::units::StripeIndex;
use ashlar_reactor::buffer::Buffer;
use ashlar_reactor::range_lock::Mode;
use smallvec::SmallVec;

use crate::array::Array;
use crate::bad_set::BadRange;
use crate::destage::RETRY_AFTER;
use crate::error::ArrayError;
use crate::journal::Slice;
use crate::layout::{Layout, Positions};
use crate::verify::{cut, overlap, within};
use crate::write_plan::{bits, each};

/// Rows of one position, as far as they can be read.
pub(crate) struct Probed {
    position: u8,
    pub(crate) bytes: Buffer,
    unreadable: Vec<Range<u32>>,
}

impl Probed {
    /// Whether all of these rows could be read.
    pub(crate) fn is_readable(&self, rows: &Range<u32>) -> bool {
        !self.unreadable.iter().any(|bad| overlap(bad, rows))
    }
}

/// What becomes of rows that cannot be used as they stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Verdict {
    /// Data chunks that are lost.
    lost: Positions,
    /// Positions that are written anew.
    written: Positions,
}

/// `held`: positions whose members are here and current; `readable`: of these. `agrees`: parity
/// and copies can be relied on.
fn judge(layout: &Layout, held: Positions, readable: Positions, agrees: bool) -> Verdict {
    let mut verdict = Verdict { lost: 0, written: held & !readable };
    if layout.parity == 0 {
        for chunk in 0..layout.data {
            let copies = held & bits(layout.data_positions(chunk));
            match each(readable & copies).next() {
                None => verdict.lost |= 1 << chunk,
                Some(first) if !agrees => verdict.written |= copies & !(1 << first),
                Some(_) => {}
            }
        }
        return verdict;
    }
    let data = bits(0..layout.data);
    let enough = readable.count_ones() >= u32::from(layout.data);
    if !(agrees && enough) {
        verdict.lost = data & !readable;
    }
    if verdict.lost != 0 || !agrees {
        verdict.written |= held & bits(layout.parity_positions());
    }
    verdict
}

impl Array {
    /// Makes a stripe one that can be read, as far as it can, and written. Returns what is lost of
    /// it; `None`: nothing had to change. The caller holds the stripe, and before it the regions.
    pub(crate) async fn give_up_locked(
        &self,
        stripe: StripeIndex,
    ) -> Result<Option<Vec<BadRange>>, ArrayError> {
        let _region = self.mark_dirty(stripe).await?;
        let agrees = !self.unsynced.contains(stripe);
        let rows = 0..self.layout().chunk_bytes;
        let lost = self.give_up_rows(stripe, &rows, agrees).await?;
        self.unsynced.remove(stripe);
        // At once, if the ring tells of nothing older: else what is put there next would be given
        // up with the rest by a start after a crash.
        if self.bad.unsettled().contains(&stripe) && !self.journal.tells_parity_of(stripe) {
            self.make_durable().await?;
            self.bad.settle_stripe(stripe).await?;
        }
        Ok(lost.or_else(|| (!agrees).then(Vec::new)))
    }

    /// What stands at these positions of a stripe that was just given up, and is still held: `lost`
    /// is zero, also if a drive does not read what was written there.
    pub(crate) async fn beside_lost(
        &self,
        stripe: StripeIndex,
        wanted: Positions,
        lost: &[BadRange],
    ) -> Result<SmallVec<[(u8, Buffer); 2]>, ArrayError> {
        let (layout, rows) = (self.layout_of(stripe), 0..self.layout().chunk_bytes);
        let held = self.members.held(stripe);
        let probed = self.probe_all(stripe, held, &rows).await?;
        let whole = |position| (position, self.reactor.buffer(layout.chunk_bytes as usize));
        let chunks: SmallVec<[(u8, Buffer); 2]> = each(wanted).map(whole).collect();
        let cuts = probed.iter().flat_map(|its| &its.unreadable);
        for band in cut(&rows, cuts.chain(lost.iter().map(|its| &its.rows)).cloned()) {
            let readable = readable(held, &probed, &band);
            let lost = lost.iter().filter(|its| overlap(&its.rows, &band));
            let lost = lost.fold(0, |bits, its| bits | 1 << its.chunk);
            let verdict = Verdict { lost, written: wanted };
            let slices = self.contents(stripe, &probed, &rows, &band, readable, verdict)?;
            for ((_, chunk), slice) in chunks.iter().zip(slices) {
                chunk.slice(within(&rows, &band)).copy_from(&slice.bytes);
            }
        }
        Ok(chunks)
    }

    /// Puts data in place where too much beside it cannot be read. `stripes`: those of which that
    /// is known, ascending; they are the caller's, and put back here. Each waits until the oldest
    /// of its data is the oldest of all; what is newer is for the next round.
    pub(crate) async fn destage_lost(
        self: &Rc<Self>,
        mut stripes: Vec<StripeIndex>,
    ) -> Result<(), ArrayError> {
        let result = self.destage_in_turn(&mut stripes).await;
        self.put_back(stripes.iter());
        result
    }

    async fn destage_in_turn(
        self: &Rc<Self>,
        left: &mut Vec<StripeIndex>,
    ) -> Result<(), ArrayError> {
        let journal = &self.journal;
        let deadline = self.reactor.now().after(RETRY_AFTER);
        while !left.is_empty() {
            let seen = journal.changes();
            journal.release().await?;
            let Some(oldest) = journal.oldest() else { return Ok(()) };
            let is_next = |at: &StripeIndex| journal.pending.borrow().oldest_of(&[*at]) <= oldest;
            let next: Vec<StripeIndex> = left.iter().copied().filter(is_next).collect();
            if !next.is_empty() {
                let (mut ready, mut result) = (Vec::new(), Ok(()));
                for stripe in next {
                    match self.give_up_under(stripe, oldest).await {
                        Ok(()) => ready.push(stripe),
                        Err(error) => result = Err(error),
                    }
                }
                // All at once: the batch stays in the ring until the last of them is stored, and
                // so does each record of their parity.
                let (lost, stored) = self.destage_stripes(&ready, u64::MAX, oldest).await;
                // At once: what is torn now belongs to whoever mends it.
                left.retain(|stripe| !ready.contains(stripe));
                self.put_back(ready.iter());
                stored.and(result)?;
                if !lost.is_empty() {
                    return Err(ArrayError::Lost);
                }
            } else if self.reactor.now() < deadline {
                // Somebody else is about to store it.
                let changed = || journal.changes() != seen;
                journal.changed.until_or(&self.reactor, deadline, changed).await;
            } else {
                // Whether the oldest can be stored is for others to say.
                return journal.refusal().or_else(|| self.blocked()).map_or(Ok(()), Err);
            }
        }
        Ok(())
    }

    /// Gives up what is in the way of the data of batch `oldest` in this stripe. That is the oldest
    /// in the ring: whatever the ring says of parity of these rows belongs to data from before it,
    /// which is not looked for any more. So the rows are settled at once, and what is stored there
    /// next cannot be lost with them.
    async fn give_up_under(
        self: &Rc<Self>,
        stripe: StripeIndex,
        oldest: u64,
    ) -> Result<(), ArrayError> {
        let _regions = self.hold_regions().await;
        let _region = self.mark_dirty(stripe).await?;
        let _stripe = self.lock_stripe(stripe, Mode::Exclusive).await;
        if self.unsynced.contains(stripe) {
            return Err(ArrayError::Lost);
        }
        let is_settled = !self.bad.unsettled().contains(&stripe);
        // Parity is made anew of what stands there: that must be durable.
        self.make_durable().await?;
        let pending = &self.journal.pending;
        let pending: Vec<_> =
            pending.borrow().of(stripe, oldest).map(|patch| patch.rows.clone()).collect();
        for rows in pending {
            self.give_up_rows(stripe, &rows, true).await?;
        }
        self.make_durable().await?;
        if is_settled { self.bad.settle_stripe(stripe).await } else { Ok(()) }
    }

    async fn make_durable(&self) -> Result<(), ArrayError> {
        self.write_sums().await?;
        self.journal.flush().await
    }

    /// At start: bad rows that a crash left unsettled.
    pub(crate) async fn give_up_again(self: &Rc<Self>) -> Result<(), ArrayError> {
        for stripe in self.bad.unsettled() {
            for (_, rows) in self.bad.of(stripe) {
                self.give_up_unsettled(stripe, &rows).await?;
            }
        }
        Ok(())
    }

    /// The same of these rows.
    pub(crate) async fn give_up_unsettled(
        self: &Rc<Self>,
        stripe: StripeIndex,
        rows: &Range<u32>,
    ) -> Result<(), ArrayError> {
        // By force, what is known of it is left as it is.
        if self.is_stranded(stripe) {
            return Ok(());
        }
        let _region = self.mark_dirty(stripe).await?;
        let _stripe = self.lock_stripe(stripe, Mode::Exclusive).await;
        match self.give_up_rows(stripe, &self.whole_sectors(rows), false).await {
            Ok(_) => Ok(()),
            // Until the member is back that could have the rest of these rows, or there is room.
            Err(ArrayError::Lost | ArrayError::TooManyBad) => {
                self.unsynced.insert(stripe);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Step 4, for all that was given up before.
    pub(crate) async fn settle_bad(self: &Rc<Self>) -> Result<(), ArrayError> {
        if self.bad.unsettled().is_empty() {
            return Ok(());
        }
        let added = self.bad.added();
        self.drain_journal().await?;
        self.write_sums().await?;
        self.members.flush().await?;
        self.bad.settle(added).await
    }

    /// Returns what is lost; `None`: nothing had to change. The caller holds the stripe, and its
    /// region is dirty.
    async fn give_up_rows(
        &self,
        stripe: StripeIndex,
        rows: &Range<u32>,
        agrees: bool,
    ) -> Result<Option<Vec<BadRange>>, ArrayError> {
        let held = self.members.held(stripe);
        let may_return = self.members.may_return(stripe);
        if may_return || self.torn_stripes.contains(stripe) || !self.can_do_with(stripe, held) {
            return Err(ArrayError::Lost);
        }
        let probed = self.probe_all(stripe, held, rows).await?;
        let (mut lost, mut slices, mut written) = (Vec::new(), Vec::new(), 0);
        for band in bands(rows, &probed) {
            let readable = readable(held, &probed, &band);
            let verdict = judge(&self.layout_of(stripe), held, readable, agrees);
            if verdict == Verdict::default() {
                continue;
            }
            let range = |chunk| BadRange { stripe, chunk, rows: band.clone() };
            lost.extend(each(verdict.lost).map(range));
            slices.extend(self.contents(stripe, &probed, rows, &band, readable, verdict)?);
            written |= verdict.written;
        }
        let changed = !lost.is_empty() || written != 0;
        if !lost.is_empty() {
            self.bad.insert(stripe, lost.clone()).await?;
        }
        let stored = self.write_slices(stripe, &slices).await;
        let missed = written & !stored.stored;
        if missed != 0 {
            let left = self.members.held(stripe) & !missed;
            let bearable = self.can_do_with(stripe, left) && self.members.bears(stripe, missed);
            if stored.no_space || !bearable {
                self.unsynced.insert(stripe);
                return Err(if stored.no_space { ArrayError::NoSpace } else { ArrayError::Lost });
            }
            self.members.fence_missed(stripe, missed).await?;
        }
        self.bad.placed(stripe);
        Ok(changed.then_some(lost))
    }

    async fn probe_all(
        &self,
        stripe: StripeIndex,
        positions: Positions,
        rows: &Range<u32>,
    ) -> Result<SmallVec<[Probed; 8]>, ArrayError> {
        let mut probed = SmallVec::new();
        for position in each(positions) {
            probed.push(self.probe(stripe, position, rows, true).await?);
        }
        Ok(probed)
    }

    /// Reads rows of a position, down to the sectors that cannot be, or (`is_checked`) are not as
    /// they were written.
    pub(crate) async fn probe(
        &self,
        stripe: StripeIndex,
        position: u8,
        rows: &Range<u32>,
        is_checked: bool,
    ) -> Result<Probed, ArrayError> {
        let bytes = self.reactor.buffer((rows.end - rows.start) as usize);
        let (mut unreadable, mut left) = (Vec::new(), vec![rows.clone()]);
        while let Some(part) = left.pop() {
            let (drive, base) = self.members.at(stripe, position).ok_or(ArrayError::Lost)?;
            let into = bytes.slice(within(rows, &part));
            let at = base + self.layout().member_offset(stripe, part.start);
            let read = drive.probe(at, into.clone().into()).await;
            let row = part.start;
            match read {
                Ok(()) if !is_checked || self.fits(stripe, position, row, &into.into()).await => {}
                // What is not as it was written must not become parity.
                Ok(()) | Err(DriveError::Media) => {
                    let sectors = (part.end - part.start) / self.sector_bytes;
                    let middle = part.start + sectors / 2 * self.sector_bytes;
                    if sectors > 1 {
                        left.extend([middle..part.end, part.start..middle]);
                    } else {
                        unreadable.push(part);
                    }
                }
                Err(_) => return Err(ArrayError::Lost),
            }
        }
        Ok(Probed { position, bytes, unreadable })
    }

    /// What is to stand in a band of the rows that were probed.
    fn contents(
        &self,
        stripe: StripeIndex,
        probed: &[Probed],
        rows: &Range<u32>,
        band: &Range<u32>,
        readable: Positions,
        verdict: Verdict,
    ) -> Result<Vec<Slice>, ArrayError> {
        let layout = self.layout_of(stripe);
        let part = within(rows, band);
        let usable = probed.iter().filter(|its| readable & 1 << its.position != 0);
        let usable = usable.map(|its| (its.position, its.bytes.slice(part.clone())));
        let usable: SmallVec<[(u8, Buffer); 8]> = usable.collect();
        let mut data = SmallVec::<[Buffer; 8]>::new();
        for chunk in 0..layout.data {
            let copies = layout.data_positions(chunk);
            let known = usable.iter().find(|(position, _)| copies.contains(position));
            data.push(match known {
                Some((_, bytes)) => bytes.clone(),
                None if verdict.lost & 1 << chunk != 0 => self.zeroes(band),
                // Copies of other chunks tell nothing of it.
                None if layout.is_mirrored() => return Err(ArrayError::Lost),
                None => {
                    let enough = usable.get(..usize::from(layout.data)).ok_or(ArrayError::Lost)?;
                    self.decode(&layout, chunk, enough, part.len())?
                }
            });
        }
        let parity = self.parity_of(&layout, &data, band.start);
        let slice = |position: u8| {
            let bytes = match position.checked_sub(layout.data * layout.copies) {
                Some(index) => &parity[usize::from(index)].bytes,
                None => &data[usize::from(position / layout.copies)],
            };
            Slice { position, row: band.start, bytes: bytes.clone() }
        };
        Ok(each(verdict.written).map(slice).collect())
    }
}

/// Positions of these that can be read in all of a band.
fn readable(held: Positions, probed: &[Probed], band: &Range<u32>) -> Positions {
    let unreadable = probed.iter().filter(|its| !its.is_readable(band));
    held & !unreadable.fold(0, |bits, its| bits | 1 << its.position)
}

/// The rows, cut wherever a position begins or ends to be readable.
fn bands(rows: &Range<u32>, probed: &[Probed]) -> Vec<Range<u32>> {
    cut(rows, probed.iter().flat_map(|its| &its.unreadable).cloned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Shape;
    use ashlar_format::array_superblock::Level;

    /// Every case of small stripes: nothing is given up that could be worked out, and afterwards
    /// whatever is held can be read, and agrees.
    #[test]
    fn all_verdicts() {
        for (level, members) in [(Level::Raid5, 4), (Level::Raid6, 5), (Level::Raid10, 4)] {
            let layout = Layout::new(level, members, Shape::default(), 16 << 10).unwrap();
            for held in 0..=bits(0..layout.positions()) {
                for readable in (0..=held).filter(|readable| readable & !held == 0) {
                    for agrees in [false, true] {
                        check(&layout, held, readable, agrees);
                    }
                }
            }
        }
    }

    fn check(layout: &Layout, held: Positions, readable: Positions, agrees: bool) {
        let case = format!("{layout:?} {held:b} {readable:b} {agrees}");
        let Verdict { lost, written } = judge(layout, held, readable, agrees);
        assert!(written & !held == 0 && (held & !readable) & !written == 0, "{case}");
        for chunk in 0..layout.data {
            let copies = bits(layout.data_positions(chunk));
            let enough = readable.count_ones() >= u32::from(layout.data);
            let can_be_had = readable & copies != 0 || layout.parity > 0 && agrees && enough;
            assert_eq!(lost & 1 << chunk == 0, can_be_had, "{case}");
            if layout.parity == 0 && !agrees {
                let kept = (held & copies & !written).count_ones();
                assert_eq!(kept, u32::from(readable & copies != 0), "{case}");
            }
        }
        let parity = held & bits(layout.parity_positions());
        if lost != 0 || !agrees {
            assert!(parity & !written == 0, "{case}");
        }
        if agrees && readable == held && lost == 0 {
            assert_eq!(written, 0, "{case}");
        }
    }
}
