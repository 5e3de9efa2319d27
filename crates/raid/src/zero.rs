//! Zeroing and TRIM: whole stripes by the drives themselves, the rest as ordinary writes.
//!
//! A stripe of zeroes has parity of zeroes at every level, so drives can zero their parts without
//! any data being sent.

use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::error::DriveError;
use ashlar_format::units::{MemberIndex, RegionIndex, StripeIndex, to_usize};
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::Mode;

use crate::array::Array;
use crate::error::ArrayError;
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
        let stripe = self.stripe_bytes();
        let end = offset + len;
        let first = offset.next_multiple_of(stripe).min(end);
        let last = (end / stripe * stripe).max(first);
        self.write_zero_bytes(offset, first).await?;
        let mut at = first / stripe;
        while at < last / stripe {
            let until = (at + STRIPES_AT_ONCE).min(last / stripe);
            self.zero_stripes(at..until).await?;
            at = until;
        }
        self.write_zero_bytes(last, end).await
    }

    /// Gives space under whole stripes of the range back; they read as zeroes. What is left of the
    /// range keeps its bytes, and so does all of it where giving back would mean to write: a
    /// degraded array, drives that cannot.
    pub async fn discard(self: &Rc<Self>, offset: u64, len: u64) -> Result<(), ArrayError> {
        let _request = self.begin()?;
        if !self.layout().contains(offset, len) {
            return Err(ArrayError::Range);
        }
        let stripe = self.stripe_bytes();
        let (mut at, last) = (offset.div_ceil(stripe), (offset + len) / stripe);
        while at < last {
            let until = (at + STRIPES_AT_ONCE).min(last);
            if self.is_journaled() || self.zero_by_drives(at..until).await? == Zeroed::Untouched {
                return Ok(());
            }
            at = until;
        }
        Ok(())
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

    async fn zero_by_drives(self: &Rc<Self>, stripes: Range<u64>) -> Result<Zeroed, ArrayError> {
        let mut regions = Vec::new();
        if self.layout().is_redundant() {
            let first = self.dirty.region_of(StripeIndex(stripes.start));
            let last = self.dirty.region_of(StripeIndex(stripes.end - 1));
            for region in first.0..=last.0 {
                regions.push(self.dirty.mark(RegionIndex(region)).await?);
            }
        }
        let _locks = self.lock_stripes(stripes.clone(), Mode::Exclusive).await;
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
            let member = |position: u8| layout.member_at(stripe, position).index();
            let missed = each(bits(0..layout.positions())).filter(|p| results[member(*p)].is_err());
            let missed = missed.fold(0, |bits, position| bits | 1 << position);
            let mut current = vec![false; layout.members()];
            each(self.members.held(stripe) & !missed).for_each(|p| current[member(p)] = true);
            if missed != 0 && (unable || !layout.survives(&current)) {
                // Some drives have zeroed their part: until all of it is written, the stripes may
                // not agree.
                if layout.is_redundant() {
                    stripes.for_each(|stripe| self.unsynced.insert(StripeIndex(stripe)));
                }
                return Ok(Zeroed::Some);
            }
            self.members.fence_missed(stripe, missed).await?;
        }
        stripes.for_each(|stripe| self.unsynced.remove(StripeIndex(stripe)));
        Ok(Zeroed::All)
    }

    async fn zero_part(&self, index: usize, stripes: &Range<u64>) -> Result<(), DriveError> {
        let (drive, base) = {
            let list = self.members.list();
            let member = &list[index];
            let drive = member.alive().cloned().ok_or(DriveError::Gone)?;
            (drive, member.areas.data.offset)
        };
        let range = self.layout().member_range(stripes.clone(), MemberIndex::new(index));
        if range.is_empty() {
            return Ok(());
        }
        drive.write_zeroes(base + range.start, range.end - range.start).await
    }

    /// Asks one member to zero its whole data area. False if it cannot do that quickly.
    pub(crate) async fn zero_member(&self, index: MemberIndex) -> bool {
        let (drive, area) = {
            let list = self.members.list();
            let member = &list[index.index()];
            let Some(drive) = member.alive().cloned() else { return false };
            (drive, member.areas.data)
        };
        if !drive.limits().zeroes_cheaply {
            return false;
        }
        let mut at = 0;
        while at < area.len {
            let part = (1 << 30).min(area.len - at);
            if drive.write_zeroes(area.offset + at, part).await.is_err() {
                return false;
            }
            at += part;
        }
        true
    }
}
