//! Zeroing and TRIM: whole stripes by the drives themselves, the rest as ordinary writes.
//!
//! Whole regions are forgotten (see `written`). A stripe of zeroes has parity of zeroes at every
//! level, so beside them drives can zero their parts without any data being sent.

use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::error::DriveError;
use ashlar_format::units::{MemberIndex, StripeIndex, to_usize};
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::Mode;

use crate::array::Array;
use crate::error::ArrayError;
use crate::layout::Positions;
use crate::write_plan::{bits, each};

/// Stripes that are zeroed under one set of locks.
const STRIPES_AT_ONCE: u64 = 64;
/// Bytes of zeroes in one ordinary write, unless a stripe is larger.
const ZEROES_BYTES: u64 = 1 << 20;

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
        let _request = self.begin()?;
        if !self.layout().contains(offset, len) {
            return Err(ArrayError::Range);
        }
        let (whole, parts) = self.by_regions(offset, len);
        for part in parts {
            self.zero_range(part).await?;
        }
        self.forget(whole).await
    }

    /// Gives space under whole stripes of the range back; they read as zeroes. What is left of the
    /// range keeps its bytes, and so does what is left beside whole regions where giving back
    /// would mean to write: a degraded array, drives that cannot.
    pub async fn discard(self: &Rc<Self>, offset: u64, len: u64) -> Result<(), ArrayError> {
        let _request = self.begin()?;
        if !self.layout().contains(offset, len) {
            return Err(ArrayError::Range);
        }
        let (whole, parts) = self.by_regions(offset, len);
        for part in parts {
            let stripe = self.stripe_bytes();
            let stripes = part.start.div_ceil(stripe)..part.end / stripe;
            for some in in_steps(stripes, STRIPES_AT_ONCE) {
                if !self.is_journaled() {
                    self.zero_by_drives(some).await?;
                }
            }
        }
        self.forget(whole).await
    }

    /// The whole regions of a range, and the bytes beside them that are in written regions. (What
    /// is in others is zero now, and stays so unless someone writes to it at the same time.)
    fn by_regions(&self, offset: u64, len: u64) -> (Range<u64>, Vec<Range<u64>>) {
        let region = self.region_bytes();
        let end = offset + len;
        // The last region of the array may be a short one.
        let to_end = end == self.capacity();
        let first = offset.div_ceil(region);
        let last = if to_end { end.div_ceil(region) } else { end / region };
        let whole = first..last.max(first);
        let is_written = |part: &Range<u64>| {
            let stripe = StripeIndex(part.start / self.stripe_bytes());
            !part.is_empty() && self.is_written(stripe)
        };
        let head = offset..(whole.start * region).min(end);
        let tail = (whole.end * region).clamp(head.end, end)..end;
        (whole, [head, tail].into_iter().filter(is_written).collect())
    }

    /// A range in one region.
    async fn zero_range(self: &Rc<Self>, range: Range<u64>) -> Result<(), ArrayError> {
        let stripe = self.stripe_bytes();
        let first = range.start.next_multiple_of(stripe).min(range.end);
        let last = (range.end / stripe * stripe).max(first);
        self.write_zero_bytes(range.start, first).await?;
        for stripes in in_steps(first / stripe..last / stripe, STRIPES_AT_ONCE) {
            self.zero_stripes(stripes).await?;
        }
        self.write_zero_bytes(last, range.end).await
    }

    /// A degraded stripe of parity changes only through the journal, which ordinary writes use.
    fn is_journaled(&self) -> bool {
        self.layout().parity > 0 && !self.members.all_trusted()
    }

    async fn write_zero_bytes(self: &Rc<Self>, from: u64, to: u64) -> Result<(), ArrayError> {
        // Whole stripes at a time, since whole stripes need no reads; one buffer serves them all.
        let stripe = self.stripe_bytes();
        let step = (ZEROES_BYTES / stripe).max(1) * stripe;
        let zeroes = self.reactor.buffer(to_usize(ZEROES_BYTES));
        zeroes.fill_zero();
        let mut at = from;
        while at < to {
            let part = to_usize(step.min(to - at));
            let mut bytes = Buffers::default();
            while bytes.len() < part {
                bytes.push(zeroes.slice(0..zeroes.len().min(part - bytes.len())));
            }
            self.write(at, bytes).await?;
            at += part as u64;
        }
        Ok(())
    }

    async fn zero_stripes(self: &Rc<Self>, stripes: Range<u64>) -> Result<(), ArrayError> {
        if !self.is_journaled() && self.zero_by_drives(stripes.clone()).await? == Zeroed::All {
            return Ok(());
        }
        let stripe = self.stripe_bytes();
        self.write_zero_bytes(stripes.start * stripe, stripes.end * stripe).await
    }

    /// `stripes`: of one region.
    async fn zero_by_drives(self: &Rc<Self>, stripes: Range<u64>) -> Result<Zeroed, ArrayError> {
        let _dirty = self.mark_dirty(StripeIndex(stripes.start)).await?;
        let _locks = self.lock_stripes(stripes.clone(), Mode::Exclusive).await;
        if !self.is_written(StripeIndex(stripes.start)) {
            return Ok(Zeroed::All);
        }
        if self.is_journaled() {
            return Ok(Zeroed::Untouched);
        }
        let _unrecorded = self.journal.begin_unrecorded().await?;
        if self.is_journaled() {
            return Ok(Zeroed::Untouched);
        }
        let members = 0..self.layout().members();
        let results = join_all(members.map(|index| self.zero_part(index, &stripes))).await;
        if results.iter().all(|result| *result == Err(DriveError::Unsupported)) {
            return Ok(Zeroed::Untouched);
        }
        self.zeroed(stripes, &results).await
    }

    /// Members that did not zero their part are fenced, if the others can stand for them.
    async fn zeroed(
        &self,
        stripes: Range<u64>,
        results: &[Result<(), DriveError>],
    ) -> Result<Zeroed, ArrayError> {
        let layout = self.layout();
        let unable = [Err(DriveError::Unsupported), Err(DriveError::NoSpace)];
        let unable = results.iter().any(|result| unable.contains(result));
        for stripe in stripes.clone().map(StripeIndex) {
            match self.missed_by(stripe, results) {
                Some(missed) if missed == 0 || !unable => {
                    self.members.fence_missed(stripe, missed).await?;
                }
                Some(_) | None => {
                    // Some drives have zeroed their part: until all of it is written, the stripes
                    // may not agree.
                    if layout.is_redundant() {
                        stripes.for_each(|stripe| self.unsynced.insert(StripeIndex(stripe)));
                    }
                    return Ok(Zeroed::Some);
                }
            }
        }
        stripes.for_each(|stripe| self.unsynced.remove(StripeIndex(stripe)));
        Ok(Zeroed::All)
    }

    /// The positions of a stripe whose members did not do what all had to; `None` if the others
    /// cannot stand for them.
    pub(crate) fn missed_by(
        &self,
        stripe: StripeIndex,
        results: &[Result<(), DriveError>],
    ) -> Option<Positions> {
        let layout = self.layout();
        let member = |position: &u8| layout.member_at(stripe, *position).index();
        let all = || each(bits(0..layout.positions()));
        let missed = all().filter(|p| results[member(p)].is_err());
        let missed = missed.fold(0, |bits, position| bits | 1 << position);
        let mut current = vec![false; layout.members()];
        // Members of other groups do not matter here.
        let group = layout.group_of(stripe);
        (0..current.len()).filter(|m| !group.contains(m)).for_each(|m| current[m] = true);
        each(self.members.held(stripe) & !missed).for_each(|p| current[member(&p)] = true);
        layout.survives(&current).then_some(missed)
    }

    /// Lets one member zero its part of these stripes.
    pub(crate) async fn zero_part(
        &self,
        index: usize,
        stripes: &Range<u64>,
    ) -> Result<(), DriveError> {
        let (drive, base) = {
            let list = self.members.list();
            let member = &list[index];
            let drive = member.keeps_metadata().cloned().ok_or(DriveError::Gone)?;
            (drive, member.areas.data.offset)
        };
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
