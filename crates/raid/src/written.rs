//! Which regions were ever written. The others read as zeroes, without I/O, whatever stands on the
//! drives; so a new array needs neither zeroing nor resync, and what was discarded is not rebuilt.
//!
//! Invariants:
//! - of a region that is not written nothing on any drive means anything;
//! - a region becomes written while all its stripes are locked: what is read of it is either from
//!   before, and zero, or from zeroes that are durable on every member that can be read;
//! - it is forgotten while all its stripes are locked; who holds a row's lock can rely on what
//!   `is_written` says.
//!
//! Write order of `make_written`, and what a crash leaves at each step:
//! 1. the region is dirty, durably (nothing is known of it yet)
//! 2. all its stripes are locked, and zeroed on all members that answer; those that miss it are
//!    fenced, durably; the others are flushed (crash up to here: not written)
//! 3. its bit is durable (crash before: it may be written or not, and is zero in both cases)
//! 4. the first write into it begins
//!
//! Write order of `forget`:
//! 1. all stripes are locked, and no record that a crash would store again is left of them
//! 2. the bits are cleared, durably; trusted members that are away are fenced (crash up to here:
//!    the regions hold what they held, or are zero)
//! 3. the drives give the space back, or not

use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::error::DriveError;
use ashlar_format::units::{MemberIndex, RegionIndex, StripeIndex, to_usize};
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::Mode;

use crate::array::Array;
use crate::error::ArrayError;

/// Bytes of zeroes in one write to a drive that cannot zero by itself.
const ZEROES_BYTES: u64 = 1 << 20;
/// Stripes that are forgotten under one set of locks, unless a region is larger.
const STRIPES_AT_ONCE: u64 = 4096;

impl Array {
    /// Whether anything was written to the stripe's region. Who holds a lock in the stripe can rely
    /// on it until that is dropped.
    pub fn is_written(&self, stripe: StripeIndex) -> bool {
        self.written.contains(self.written.region_of(stripe))
    }

    /// Makes the stripe's region one that is written, durably; all zero if it was not. The caller
    /// holds no lock, and looks again once it does.
    pub async fn make_written(self: &Rc<Self>, stripe: StripeIndex) -> Result<(), ArrayError> {
        if self.is_written(stripe) {
            return Ok(());
        }
        let region = self.written.region_of(stripe);
        let _dirty = self.mark_dirty(stripe).await?;
        let stripes = self.written.stripes_of(region);
        let _locks = self.lock_stripes(stripes.clone(), Mode::Exclusive).await;
        if self.is_written(stripe) {
            return Ok(());
        }
        let members = 0..self.layout().members();
        let zeroed = join_all(members.map(|index| self.zero_durably(index, &stripes))).await;
        if zeroed.contains(&Err(DriveError::NoSpace)) {
            return Err(ArrayError::NoSpace);
        }
        for stripe in stripes.map(StripeIndex) {
            let missed = self.missed_by(stripe, &zeroed).ok_or(ArrayError::Lost)?;
            self.members.fence_missed(stripe, missed).await?;
        }
        self.written.insert(&[region]).await
    }

    async fn zero_durably(&self, index: usize, stripes: &Range<u64>) -> Result<(), DriveError> {
        match self.zero_part(index, stripes).await {
            Err(DriveError::Unsupported) => self.zero_by_writes(index, stripes).await?,
            other => other?,
        }
        let drive = self.members.list()[index].drive.clone().ok_or(DriveError::Gone)?;
        drive.flush().await
    }

    async fn zero_by_writes(&self, index: usize, stripes: &Range<u64>) -> Result<(), DriveError> {
        let (drive, base) = {
            let list = self.members.list();
            let member = &list[index];
            (member.alive().cloned().ok_or(DriveError::Gone)?, member.areas.data.offset)
        };
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

    /// The regions of a range of stripes read as zeroes afterwards, and need no rebuild.
    pub(crate) async fn forget(self: &Rc<Self>, regions: Range<u64>) -> Result<(), ArrayError> {
        let mut left = regions.map(RegionIndex).filter(|region| self.written.contains(*region));
        loop {
            let mut batch = Vec::new();
            let mut stripes = 0;
            while stripes < STRIPES_AT_ONCE
                && let Some(region) = left.next()
            {
                let inside = self.written.stripes_of(region);
                stripes += inside.end - inside.start;
                batch.push(region);
            }
            if batch.is_empty() {
                return Ok(());
            }
            self.forget_batch(&batch).await?;
        }
    }

    /// `regions`: in ascending order.
    async fn forget_batch(self: &Rc<Self>, regions: &[RegionIndex]) -> Result<(), ArrayError> {
        let mut locks = Vec::new();
        for region in regions {
            let stripes = self.written.stripes_of(*region);
            locks.push(self.lock_stripes(stripes, Mode::Exclusive).await);
        }
        self.journal.retire().await?;
        for region in regions {
            let stripes = self.written.stripes_of(*region);
            stripes.for_each(|stripe| self.unsynced.remove(StripeIndex(stripe)));
        }
        self.written.remove(regions).await?;
        self.members.fence_away().await?;
        for region in regions {
            let stripes = self.written.stripes_of(*region);
            // Only a hint: nothing depends on what stands there.
            let members = 0..self.layout().members();
            join_all(members.map(|index| self.zero_part(index, &stripes))).await;
        }
        Ok(())
    }
}
