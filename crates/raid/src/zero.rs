//! Zeroing and TRIM: whole stripes by the drives themselves, the rest as ordinary writes.
//!
//! A stripe of zeroes has parity of zeroes at every level, so drives can zero their parts without
//! any data being sent.

use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_format::units::{MemberIndex, RegionIndex, StripeIndex, to_usize};
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::Mode as Lock;

use crate::array::Array;
use crate::error::ArrayError;
use crate::journal::{Class, Entry};
use crate::layout::Positions;
use crate::mode::Mode;
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
    /// range keeps its bytes, and so does all of it where drives cannot do it themselves.
    pub async fn discard(self: &Rc<Self>, offset: u64, len: u64) -> Result<(), ArrayError> {
        let _request = self.begin()?;
        if !self.layout().contains(offset, len) {
            return Err(ArrayError::Range);
        }
        let stripe = self.stripe_bytes();
        let (mut at, last) = (offset.div_ceil(stripe), (offset + len) / stripe);
        while at < last && !self.cannot_zero.get() {
            let until = (at + STRIPES_AT_ONCE).min(last);
            self.zero_by_drives(at..until).await?;
            at = until;
        }
        Ok(())
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
        if self.zero_by_drives(stripes.clone()).await? == Zeroed::All {
            return Ok(());
        }
        let stripe = self.stripe_bytes();
        self.write_zero_bytes(stripes.start * stripe, stripes.end * stripe).await
    }

    async fn zero_by_drives(self: &Rc<Self>, stripes: Range<u64>) -> Result<Zeroed, ArrayError> {
        let mode = self.enter_mode().await?;
        if mode.mode == Mode::Journaled {
            self.zero_journaled(stripes).await?;
            return Ok(Zeroed::All);
        }
        let mut regions = Vec::new();
        if self.layout().is_redundant() {
            let first = self.dirty.region_of(StripeIndex(stripes.start));
            let last = self.dirty.region_of(StripeIndex(stripes.end - 1));
            for region in first.0..=last.0 {
                regions.push(self.dirty.mark(RegionIndex(region)).await?);
            }
        }
        let _locks = self.lock_stripes(stripes.clone(), Lock::Exclusive).await;
        let members = 0..self.layout().members();
        let results = join_all(members.map(|index| self.zero_part(index, &stripes))).await;
        if results.iter().all(|result| *result == Err(DriveError::Unsupported)) {
            self.cannot_zero.set(true);
            return Ok(Zeroed::Untouched);
        }
        self.zeroed(stripes, &results).await
    }

    /// The journal says durably that the stripes are zero before the first of them becomes so: a
    /// crash half-way would leave parity that fits nothing.
    async fn zero_journaled(self: &Rc<Self>, stripes: Range<u64>) -> Result<(), ArrayError> {
        let entries = [Entry::Zeroes { stripes: stripes.clone() }];
        loop {
            let seen = self.journal.changes();
            // Before the stripes: whoever has a sector may wait for those who need a stripe.
            let mut _sectors = Vec::new();
            for stripe in stripes.clone().filter(|_| self.sector_bytes > 512) {
                let sectors = self.sector_locks.lock(stripe..stripe + 1, Lock::Exclusive);
                _sectors.push(sectors.await);
            }
            // Held first: what is written from now on is put in place after the zeroes.
            let _locks = self.lock_stripes(stripes.clone(), Lock::Exclusive).await;
            let Some(appended) = self.journal.append_now(&entries, Class::Parity).await else {
                drop((_locks, _sectors));
                if let Some(error) = self.journal.stuck() {
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
            if let Err(error) = self.zero_in_place(stripes.clone()).await {
                // Half of it may be done: after a crash it must be done whole.
                self.kept_batches.borrow_mut().push(hold);
                stripes.for_each(|stripe| self.torn_stripes.insert(StripeIndex(stripe)));
                return Err(error);
            }
            let mut pending = self.journal.pending.borrow_mut();
            for stripe in stripes.clone() {
                pending.remove_stripe(StripeIndex(stripe), sequence);
            }
            drop(pending);
            drop(hold);
            self.journal.note_change();
            return Ok(());
        }
    }

    /// Zeroes stripes on all members that hold them; those that miss it are fenced.
    pub(crate) async fn zero_in_place(&self, stripes: Range<u64>) -> Result<(), ArrayError> {
        let layout = self.layout();
        let members = 0..layout.members();
        let mut results = join_all(members.map(|index| self.zero_part(index, &stripes))).await;
        for (index, result) in results.iter_mut().enumerate() {
            if *result == Err(DriveError::Unsupported) {
                self.cannot_zero.set(true);
                *result = self.write_zero_part(index, &stripes).await;
            }
        }
        if results.contains(&Err(DriveError::NoSpace)) {
            return Err(ArrayError::NoSpace);
        }
        let all = bits(0..layout.positions());
        for stripe in stripes.map(StripeIndex) {
            let member = |position: u8| layout.member_at(stripe, position).index();
            let held = self.members.held(stripe);
            let done = each(held).filter(|p| results[member(*p)].is_ok());
            let done: Positions = done.fold(0, |bits, position| bits | 1 << position);
            if done != held && !self.can_do_with(done) {
                return Err(ArrayError::Lost);
            }
            self.members.fence_missed(stripe, all & !done).await?;
        }
        Ok(())
    }

    /// Whether these positions of a stripe are enough to read all of it.
    fn can_do_with(&self, positions: Positions) -> bool {
        let layout = self.layout();
        let copies = |chunk: u8| bits(layout.data_positions(chunk));
        if layout.parity > 0 {
            return positions.count_ones() >= u32::from(layout.data);
        }
        (0..layout.data).all(|chunk| positions & copies(chunk) != 0)
    }

    /// Zeroes for a drive that cannot make them itself.
    async fn write_zero_part(&self, index: usize, stripes: &Range<u64>) -> Result<(), DriveError> {
        let (drive, base) = self.drive_of(index)?;
        let range = self.layout().member_range(stripes.clone(), MemberIndex::new(index));
        let zeroes = self.reactor.buffer(to_usize(ZEROES_BYTES));
        zeroes.fill_zero();
        let mut at = range.start;
        while at < range.end {
            let part = ZEROES_BYTES.min(range.end - at);
            drive.write(base + at, zeroes.slice(0..to_usize(part)).into()).await?;
            at += part;
        }
        Ok(())
    }

    fn drive_of(&self, index: usize) -> Result<(Rc<Drive>, u64), DriveError> {
        let list = self.members.list();
        let drive = list[index].alive().cloned().ok_or(DriveError::Gone)?;
        Ok((drive, list[index].areas.data.offset))
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
        let (drive, base) = self.drive_of(index)?;
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
