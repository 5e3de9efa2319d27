//! Zeroing and TRIM: whole stripes by the drives themselves, the rest as ordinary writes.
//!
//! Whole regions are forgotten (see `written`). A stripe of zeroes has parity of zeroes at every
//! level, so beside them drives can zero their parts without any data being sent.

use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_format::units::{MemberIndex, RegionIndex, StripeIndex, to_usize};
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::range_lock::{Mode as Lock, RangeGuard};

use crate::array::Array;
use crate::error::ArrayError;
use crate::journal::{Class, Entry};
use crate::layout::{Layout, Piece, Positions};
use crate::mode::Mode;
use crate::pending::PendingSize;
use crate::stored::Begun;
use crate::write_plan::{bits, each};
use crate::zero_step::{Grid, Helpers, STRIPES_AT_ONCE, ZEROES_BYTES, ZeroStep, Zeroing};

/// Of blank space, looked at before others have their turn.
const LOOKED_AT_BYTES: u64 = 64 << 20;

/// What the drives did of a range of stripes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Zeroed {
    All,
    Some,
    Untouched,
}

impl Array {
    /// The range reads as zeroes afterwards; space under whole stripes may be given back.
    pub async fn write_zeroes(self: &Rc<Self>, offset: u64, len: u64) -> Result<(), ArrayError> {
        let _request = self.admit().await?;
        if !self.contains(offset, len) {
            return Err(ArrayError::Range);
        }
        loop {
            if self.is_restriping() {
                self.write_zero_bytes(offset, offset + len).await?;
                return self.finish_zeroing(self.stripes_of(offset, len)).await;
            }
            let layout = self.layout();
            let (whole, parts) = self.by_regions(offset, len);
            for part in parts {
                self.zero_range(&layout, part).await?;
            }
            if self.forget(whole, &layout).await? {
                // What was blank may be about to become so, for somebody else.
                return self.finish_zeroing(self.stripes_of(offset, len)).await;
            }
        }
    }

    /// Gives space under whole stripes of the range back; they read as zeroes. What is left of the
    /// range keeps its bytes, and so does what is beside whole regions where drives cannot zero.
    pub async fn discard(self: &Rc<Self>, offset: u64, len: u64) -> Result<(), ArrayError> {
        let _request = self.admit().await?;
        if !self.contains(offset, len) {
            return Err(ArrayError::Range);
        }
        // While members are being added nothing is given back, but what is bad does not stay so:
        // it would be in their way, and nobody may be left to write it.
        while !self.is_restriping() {
            let layout = self.layout();
            let (whole, parts) = self.by_regions(offset, len);
            for part in parts {
                self.discard_range(&layout, part).await?;
            }
            if self.forget(whole, &layout).await? {
                break;
            }
        }
        if self.is_restriping() {
            self.zero_bad(offset..offset + len).await?;
        }
        self.finish_zeroing(self.stripes_of(offset, len)).await
    }

    /// Stripes with bad blocks, and what a restripe could not read just now, read as zeroes
    /// afterwards, as far as whole sectors of theirs are in the range.
    async fn zero_bad(self: &Rc<Self>, range: Range<u64>) -> Result<(), ArrayError> {
        let of_stripe = |stripe: StripeIndex| {
            let bytes = self.layout_of(stripe).stripe_bytes();
            stripe.0 * bytes..(stripe.0 + 1) * bytes
        };
        let bad = self.bad.stripes().into_iter().filter(|stripe| !self.is_dead(*stripe));
        let in_the_way = bad.map(of_stripe).chain(self.jobs.not_moved.borrow().clone());
        let sector = u64::from(self.sector_bytes);
        let (start, end) = (range.start.next_multiple_of(sector), range.end / sector * sector);
        let mut result = Ok(());
        for its in in_the_way.collect::<Vec<_>>() {
            let (from, to) = (its.start.max(start), its.end.min(end));
            if from < to {
                result = result.and(self.write_zero_bytes(from, to).await);
            }
        }
        result
    }

    /// How much of a range, from its start on, to zero or discard with one call, and what of that
    /// is written: for whoever shall not write too fast. It holds at this moment. The range is not
    /// empty, and in the array.
    pub fn zero_step(&self, zeroing: Zeroing, range: Range<u64>) -> ZeroStep {
        let grid = Grid {
            stripe: self.stripe_bytes(),
            region: self.region_bytes(),
            capacity: self.capacity(),
            restriping: self.is_restriping(),
            helpers: self.helpers.get(),
        };
        grid.step(zeroing, range, |region| self.is_blank(RegionIndex(region)))
    }

    /// Those that a range has a part of, in either shape while members are added; perhaps others
    /// between them.
    pub(crate) fn stripes_of(&self, offset: u64, len: u64) -> Range<u64> {
        let stripe = self.stripe_bytes();
        // Those of before had less each.
        let old = self.identity.restripe().map(|its| its.old(self.layout()).stripe_bytes());
        offset / stripe..(offset + len).div_ceil(old.unwrap_or(stripe))
    }

    /// A range in one region.
    async fn discard_range(
        self: &Rc<Self>,
        layout: &Layout,
        range: Range<u64>,
    ) -> Result<(), ArrayError> {
        let stripe = layout.stripe_bytes();
        let stripes = range.start.div_ceil(stripe)..range.end / stripe;
        for some in in_steps(stripes, STRIPES_AT_ONCE) {
            if self.helpers.get() != Helpers::None {
                self.zero_by_drives(layout, some).await?;
            }
        }
        Ok(())
    }

    /// The whole regions of a range, and the bytes beside them in regions that are not blank. (What
    /// is in a blank one is zero now, and stays so unless someone writes to it at the same time.)
    fn by_regions(&self, offset: u64, len: u64) -> (Range<u64>, Vec<Range<u64>>) {
        let region = self.region_bytes();
        let end = offset + len;
        // The last region of the array may be a short one.
        let to_end = end == self.capacity();
        let first = offset.div_ceil(region);
        let last = if to_end { end.div_ceil(region) } else { end / region };
        let whole = first..last.max(first);
        let head = offset..(whole.start * region).min(end);
        let tail = (whole.end * region).clamp(head.end, end)..end;
        let parts = [head, tail].into_iter();
        let parts = parts.filter(|part| !part.is_empty());
        (whole, parts.filter(|part| !self.is_blank(RegionIndex(part.start / region))).collect())
    }

    /// A range in one region.
    async fn zero_range(
        self: &Rc<Self>,
        layout: &Layout,
        range: Range<u64>,
    ) -> Result<(), ArrayError> {
        let stripe = layout.stripe_bytes();
        let first = range.start.next_multiple_of(stripe).min(range.end);
        let last = (range.end / stripe * stripe).max(first);
        self.write_zero_bytes(range.start, first).await?;
        for stripes in in_steps(first / stripe..last / stripe, STRIPES_AT_ONCE) {
            self.zero_stripes(layout, stripes).await?;
        }
        self.write_zero_bytes(last, range.end).await
    }

    async fn write_zero_bytes(self: &Rc<Self>, from: u64, to: u64) -> Result<(), ArrayError> {
        // Whole stripes at a time, since whole stripes need no reads; one buffer serves them all.
        let stripe = self.stripe_bytes();
        let step = (ZEROES_BYTES / stripe).max(1) * stripe;
        let zeroes = self.reactor.buffer(to_usize(ZEROES_BYTES));
        zeroes.fill_zero();
        let mut at = from;
        while at < to {
            let mut part = to_usize(step.min(to - at));
            if self.is_restriping() {
                // Else even a range that nobody wrote would be written whole.
                let (is_blank, len) = self.blank_part(at, part as u64);
                if is_blank {
                    at += self.blank_part(at, (to - at).min(LOOKED_AT_BYTES)).1;
                    self.reactor.yield_now().await;
                    continue;
                }
                part = to_usize(len);
            }
            let mut bytes = Buffers::default();
            while bytes.len() < part {
                bytes.push(zeroes.slice(0..zeroes.len().min(part - bytes.len())));
            }
            self.write(at, bytes).await?;
            at += part as u64;
        }
        Ok(())
    }

    /// How many of these bytes, from the first on, are in blank stripes; or in others, if it is
    /// false.
    fn blank_part(&self, offset: u64, len: u64) -> (bool, u64) {
        let is_blank = |piece: &Piece| self.is_blank_stripe(piece.stripe);
        let mut pieces = self.pieces(offset, len).peekable();
        let first = pieces.peek().is_some_and(is_blank);
        let same = pieces.take_while(|piece| is_blank(piece) == first);
        (first, same.map(|piece| piece.len() as u64).sum())
    }

    async fn zero_stripes(
        self: &Rc<Self>,
        layout: &Layout,
        stripes: Range<u64>,
    ) -> Result<(), ArrayError> {
        if self.zero_by_drives(layout, stripes.clone()).await? == Zeroed::All {
            return Ok(());
        }
        let stripe = layout.stripe_bytes();
        self.write_zero_bytes(stripes.start * stripe, stripes.end * stripe).await
    }

    /// `stripes`: of one region, if the array has still this layout.
    async fn zero_by_drives(
        self: &Rc<Self>,
        layout: &Layout,
        stripes: Range<u64>,
    ) -> Result<Zeroed, ArrayError> {
        let mode = self.enter_mode().await?;
        if self.layout() != *layout || self.is_restriping() {
            return Ok(Zeroed::Untouched);
        }
        if mode.mode == Mode::Journaled {
            self.zero_journaled(stripes).await?;
            return Ok(Zeroed::All);
        }
        let _dirty = self.mark_dirty(StripeIndex(stripes.start)).await?;
        let _locks = self.lock_stripes(stripes.clone(), Lock::Exclusive).await;
        if !self.is_written(StripeIndex(stripes.start)) {
            return Ok(Zeroed::All);
        }
        if !stripes.clone().map(StripeIndex).all(|stripe| self.may_zero(stripe)) {
            return Err(ArrayError::Lost);
        }
        // As before writes in place.
        for stripe in stripes.clone().map(StripeIndex) {
            self.fence_others(stripe, self.members.held(stripe)).await?;
        }
        let members = 0..self.layout().members();
        let asked = |index: &usize| {
            let member = MemberIndex::new(*index);
            let part = self.layout().member_range(stripes.clone(), member);
            !part.is_empty() && self.drive_of(*index).is_ok()
        };
        // The others have nothing of it, or are not here, and did nothing in any case.
        let asked: Vec<usize> = members.filter(asked).collect();
        let mut results = self.members.ask_all(|index| self.zero_part(index, &stripes)).await;
        if asked.iter().all(|index| results[*index] == Err(DriveError::Unsupported)) {
            self.helpers.set(Helpers::None);
            return Ok(Zeroed::Untouched);
        }
        // Others have zeroed their part: without these the stripes would not agree.
        for index in asked {
            if results[index] == Err(DriveError::Unsupported) {
                results[index] = self.write_zero_part(index, &stripes).await;
            }
            if results[index].is_ok() {
                self.set_zero_sums(MemberIndex::new(index), &stripes);
            }
        }
        let zeroed = self.zeroed(stripes, &results).await?;
        // As after writes in place.
        self.write_sums().await?;
        Ok(zeroed)
    }

    /// The journal says durably that the stripes are zero before the first of them becomes so: a
    /// crash half-way would leave parity that fits nothing.
    async fn zero_journaled(self: &Rc<Self>, stripes: Range<u64>) -> Result<(), ArrayError> {
        let entries = [Entry::Zeroes { stripes: stripes.clone() }];
        let _touched = self.touch(StripeIndex(stripes.start));
        loop {
            let seen = self.journal.changes();
            // Before the stripes: whoever has a sector may wait for those who need a stripe.
            let _sectors = self.lock_sectors(stripes.clone()).await;
            // Held first: what is written from now on is put in place after the zeroes.
            let _locks = self.lock_stripes(stripes.clone(), Lock::Exclusive).await;
            if self.is_any_torn(&stripes) {
                drop((_locks, _sectors));
                self.mend_torn_of(&stripes).await?;
                continue;
            }
            let Some(appended) =
                self.journal.append_now(&entries, Class::New(PendingSize::default())).await
            else {
                drop((_locks, _sectors));
                if let Some(error) = self.journal.refusal() {
                    return Err(error);
                }
                self.journal.changed_since(seen).await;
                continue;
            };
            let (sequence, hold) = appended?;
            if let Err(error) = self.journal.flush().await {
                self.journal.void(sequence).await;
                return Err(error);
            }
            if self.is_written(StripeIndex(stripes.start))
                && let Err(error) = self.zero_in_place(stripes.clone()).await
            {
                // Half of it may be done: it must be done whole.
                self.keep(Begun::Zeroing { stripes, sequence }, vec![hold], error);
                return Err(error);
            }
            self.is_zero(&stripes, sequence);
            drop(hold);
            self.journal.note_change();
            return Ok(());
        }
    }

    /// The batch of this sequence has made the stripes zero in place.
    pub(crate) fn is_zero(&self, stripes: &Range<u64>, sequence: u64) {
        self.bad.remove_stripes(stripes.clone());
        let mut pending = self.journal.pending.borrow_mut();
        stripes.clone().for_each(|stripe| pending.remove_stripe(StripeIndex(stripe), sequence));
    }

    /// Locks all sectors of these stripes that may be written in parts.
    pub(crate) async fn lock_sectors(&self, stripes: Range<u64>) -> Vec<RangeGuard> {
        let mut guards = Vec::new();
        for stripe in stripes.filter(|_| self.sector_bytes > 512) {
            let sectors = self.sector_locks.lock(stripe..stripe + 1, Lock::Exclusive);
            guards.push(sectors.await);
        }
        guards
    }

    /// Zeroes stripes on all members that hold them; those that miss it are fenced.
    pub(crate) async fn zero_in_place(&self, stripes: Range<u64>) -> Result<(), ArrayError> {
        let results = self.members.ask_all(|index| self.zero_or_write(index, &stripes)).await;
        if self.members.lacks_space((0..results.len()).map(MemberIndex::new), &results) {
            return Err(ArrayError::NoSpace);
        }
        for stripe in stripes.map(StripeIndex) {
            let done = self.held_and_done(stripe, &results);
            if !self.can_do_with(stripe, done) {
                return Err(ArrayError::Lost);
            }
            self.fence_others(stripe, done).await?;
        }
        Ok(())
    }

    /// Whether a whole stripe can become zero: enough members hold it, and none is away that would
    /// have to be fenced for that and cannot be.
    fn may_zero(&self, stripe: StripeIndex) -> bool {
        let held = self.members.held(stripe);
        self.can_do_with(stripe, held) && self.members.bears(stripe, self.others(stripe, held))
    }

    /// Those that are not among these positions of the stripe.
    fn others(&self, stripe: StripeIndex, positions: Positions) -> Positions {
        bits(0..self.layout_of(stripe).positions()) & !positions
    }

    /// Lets one member zero its part, or writes zeroes for it.
    pub(crate) async fn zero_or_write(
        &self,
        index: usize,
        stripes: &Range<u64>,
    ) -> Result<(), DriveError> {
        let mut zeroed = self.zero_part(index, stripes).await;
        if zeroed == Err(DriveError::Unsupported) {
            self.helpers.set(Helpers::None);
            zeroed = self.write_zero_part(index, stripes).await;
        }
        if zeroed.is_ok() {
            self.set_zero_sums(MemberIndex::new(index), stripes);
        }
        zeroed
    }

    /// The positions of a stripe that are held, by members whose result is good.
    pub(crate) fn held_and_done(
        &self,
        stripe: StripeIndex,
        results: &[Result<(), DriveError>],
    ) -> Positions {
        let layout = self.layout_of(stripe);
        let good = |position: &u8| results[layout.member_at(stripe, *position).index()].is_ok();
        let done = each(self.members.held(stripe)).filter(good);
        done.fold(0, |bits, position| bits | 1 << position)
    }

    /// The other positions of the stripe missed what these have.
    pub(crate) async fn fence_others(
        &self,
        stripe: StripeIndex,
        done: Positions,
    ) -> Result<(), ArrayError> {
        self.members.fence_missed(stripe, self.others(stripe, done)).await
    }

    /// The same of positions that missed something, if the others are enough: else none of them.
    pub(crate) async fn fence_bearable(
        &self,
        stripe: StripeIndex,
        missed: Positions,
    ) -> Result<(), ArrayError> {
        if missed != 0 && !self.can_do_with(stripe, self.members.held(stripe) & !missed) {
            return Err(ArrayError::Lost);
        }
        self.members.fence_missed(stripe, missed).await
    }

    /// Whether these positions are enough to read all of the stripe.
    pub(crate) fn can_do_with(&self, stripe: StripeIndex, positions: Positions) -> bool {
        let layout = self.layout_of(stripe);
        let copies = |chunk: u8| bits(layout.data_positions(chunk));
        if layout.parity > 0 {
            return positions.count_ones() >= u32::from(layout.data);
        }
        (0..layout.data).all(|chunk| positions & copies(chunk) != 0)
    }

    /// Zeroes for a drive that cannot make them itself.
    async fn write_zero_part(&self, index: usize, stripes: &Range<u64>) -> Result<(), DriveError> {
        if self.helpers.get() == Helpers::All {
            self.helpers.set(Helpers::Some);
        }
        let (drive, base) = self.drive_of(index)?;
        let range = self.layout().member_range(stripes.clone(), MemberIndex::new(index));
        self.write_zeroes_to(&drive, base + range.start..base + range.end).await
    }

    /// Zeroes for a range of a drive that cannot make them itself.
    pub(crate) async fn write_zeroes_to(
        &self,
        drive: &Rc<Drive>,
        range: Range<u64>,
    ) -> Result<(), DriveError> {
        let most = ZEROES_BYTES.min(range.end - range.start);
        let zeroes = self.reactor.buffer(to_usize(most));
        zeroes.fill_zero();
        let mut at = range.start;
        while at < range.end {
            let part = most.min(range.end - at);
            drive.write(at, zeroes.slice(0..to_usize(part)).into()).await?;
            at += part;
        }
        Ok(())
    }

    fn drive_of(&self, index: usize) -> Result<(Rc<Drive>, u64), DriveError> {
        let list = self.members.list();
        let drive = list[index].keeps_metadata().cloned().ok_or(DriveError::Gone)?;
        Ok((drive, list[index].areas.data.offset))
    }

    /// Members that did not zero their part are fenced, if the others can stand for them: else it
    /// is left to ordinary writes, which say so.
    async fn zeroed(
        &self,
        stripes: Range<u64>,
        results: &[Result<(), DriveError>],
    ) -> Result<Zeroed, ArrayError> {
        let all = (0..results.len()).map(MemberIndex::new);
        let unable = self.members.lacks_space(all, results);
        for stripe in stripes.clone().map(StripeIndex) {
            let done = self.held_and_done(stripe, results);
            let missed = done != self.members.held(stripe);
            let bearable = self.can_do_with(stripe, done)
                && self.members.bears(stripe, self.others(stripe, done));
            let is_done = bearable && !(missed && unable);
            let fenced = if is_done { self.fence_others(stripe, done).await } else { Ok(()) };
            if is_done && fenced.is_ok() {
                continue;
            }
            // Some drives have zeroed their part: until all of it is written, the stripes may not
            // agree.
            if self.layout().is_redundant() {
                stripes.for_each(|stripe| self.unsynced.insert(StripeIndex(stripe)));
            }
            return fenced.map(|()| Zeroed::Some);
        }
        stripes.clone().for_each(|stripe| self.unsynced.remove(StripeIndex(stripe)));
        if stripes.clone().any(|stripe| !self.bad.of(StripeIndex(stripe)).is_empty()) {
            self.members.flush().await?;
            self.bad.remove_stripes(stripes);
            self.bad.save().await?;
        }
        Ok(Zeroed::All)
    }

    /// Lets one member zero its part of these stripes.
    pub(crate) async fn zero_part(
        &self,
        index: usize,
        stripes: &Range<u64>,
    ) -> Result<(), DriveError> {
        let (drive, base) = self.drive_of(index)?;
        let range = self.layout().member_range(stripes.clone(), MemberIndex::new(index));
        if range.is_empty() {
            return Ok(());
        }
        drive.write_zeroes(base + range.start, range.end - range.start).await
    }
}

/// A range cut into ranges of at most `step`.
fn in_steps(range: Range<u64>, step: u64) -> impl Iterator<Item = Range<u64>> {
    let Range { start, end } = range;
    (start..end).step_by(to_usize(step)).map(move |at| at..(at + step).min(end))
}
