//! Which regions were ever written. The others read as zeroes, without I/O, whatever stands on the
//! drives; so a new array needs neither zeroing nor resync, and what was discarded is not rebuilt.
//!
//! Invariants:
//! - of a region that is not written nothing on any drive means anything;
//! - a region becomes written while all its stripes are locked: what is read of it is either from
//!   before, and zero, or from zeroes that are durable on every member that can be read;
//! - it is forgotten while all its stripes are locked; who holds a row's lock can rely on what
//!   `is_written` says;
//! - that it was forgotten is told to nobody, and nothing durable rests on it (a clean dirty map, a
//!   journal that covers all, the progress of a rebuild), before the members have it (`settle`).
//!
//! Write order of `make_written`, and what a crash leaves at each step:
//! 1. the region is dirty, durably (nothing is known of it yet)
//! 2. all its stripes are locked, and zeroed on all members that answer; those that miss it are
//!    fenced, durably; the others are flushed, with the checksums of zeroes where those are kept
//!    (crash up to here: not written)
//! 3. its bit is durable (crash before: it may be written or not, and is zero in both cases)
//! 4. the first write into it begins
//!
//! Write order of `forget`:
//! 1. all stripes are locked; if the journal is used it says that they are zero, so that what it
//!    says before is void; other reactors see them no more; what is pending of them is dropped
//! 2. the bits are cleared, durably, and the journal's batch with them; trusted members that are
//!    away are fenced (crash up to here: the regions hold what they held, or are zero)
//! 3. the drives give the space back, or not

use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::error::DriveError;
use ashlar_format::units::{MemberIndex, RegionIndex, StripeIndex};
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::Mode as Lock;

use crate::array::Array;
use crate::error::ArrayError;
use crate::journal::{Class, Entry};
use crate::layout::Layout;
use crate::mode::Mode;
use crate::pending::{Hold, PendingSize};
use crate::stored::Begun;
use crate::zero_step::REGIONS_LOOKED_AT;

/// Stripes that are forgotten under one set of locks, unless a region is larger.
const STRIPES_AT_ONCE: u64 = 1024;

impl Array {
    /// Whether anything was put in place in the stripe's region. Who holds a lock in the stripe can
    /// rely on it until that is dropped.
    pub fn is_written(&self, stripe: StripeIndex) -> bool {
        self.written.has(stripe)
    }

    /// Whether the stripe is zero without a look at any drive.
    pub(crate) fn is_blank_stripe(&self, stripe: StripeIndex) -> bool {
        !self.is_written(stripe)
            && !self.journal.pending.borrow().contains(stripe)
            && !self.is_stranded(stripe)
    }

    /// The same of all stripes of a region.
    pub(crate) fn is_blank(&self, region: RegionIndex) -> bool {
        let stripes = self.written.stripes_of(region);
        !self.written.contains(region)
            && !self.journal.pending.borrow().is_within(&stripes)
            && !self.is_any_stranded(&stripes)
    }

    /// Makes the stripe's region one that is written, durably; all zero if it was not. The caller
    /// holds no lock, and looks again once it does.
    pub async fn make_written(self: &Rc<Self>, stripe: StripeIndex) -> Result<(), ArrayError> {
        if self.is_written(stripe) {
            return Ok(());
        }
        let _regions = self.hold_regions().await;
        self.make_region_written(self.written.region_of(stripe)).await
    }

    /// The same of a region; the caller holds the regions.
    pub(crate) async fn make_region_written(&self, region: RegionIndex) -> Result<(), ArrayError> {
        let stripes = self.written.stripes_of(region);
        let _dirty = self.mark_dirty(StripeIndex(stripes.start)).await?;
        let _locks = self.lock_stripes(stripes.clone(), Lock::Exclusive).await;
        if self.written.contains(region) {
            return Ok(());
        }
        self.zero_everywhere(stripes).await?;
        // Else it might have bad blocks of before it was forgotten, after a crash.
        self.bad.save().await?;
        self.written.insert(&[region]).await
    }

    /// Zeroes stripes that nothing is known of, durably, on all members that answer; those that
    /// miss it are fenced.
    pub(crate) async fn zero_everywhere(&self, stripes: Range<u64>) -> Result<(), ArrayError> {
        let zeroed = self.members.ask_all(|index| self.zero_durably(index, &stripes)).await;
        if self.members.lacks_space((0..zeroed.len()).map(MemberIndex::new), &zeroed) {
            return Err(ArrayError::NoSpace);
        }
        for stripe in stripes.map(StripeIndex) {
            let done = self.held_and_done(stripe, &zeroed);
            if !self.can_do_with(stripe, done) {
                return Err(ArrayError::Lost);
            }
            self.fence_others(stripe, done).await?;
        }
        if self.integrity.is_some() {
            self.write_sums().await?;
            self.members.flush().await?;
        }
        Ok(())
    }

    async fn zero_durably(&self, index: usize, stripes: &Range<u64>) -> Result<(), DriveError> {
        self.zero_or_write(index, stripes).await?;
        let drive = self.members.list()[index].drive.clone().ok_or(DriveError::Gone)?;
        drive.flush().await
    }

    /// All of these regions read as zeroes afterwards; and they need no rebuild. False: regions may
    /// be others than they were in `layout`.
    pub(crate) async fn forget(
        self: &Rc<Self>,
        regions: Range<u64>,
        layout: &Layout,
    ) -> Result<bool, ArrayError> {
        let mut at = regions.start;
        while at < regions.end {
            if self.layout() != *layout {
                return Ok(false);
            }
            if self.is_blank(RegionIndex(at)) {
                at += 1;
                if at.is_multiple_of(REGIONS_LOOKED_AT) {
                    self.reactor.yield_now().await;
                }
                continue;
            }
            let size = u64::from(self.identity.region_stripes());
            let most = (at + (STRIPES_AT_ONCE / size).max(1)).min(regions.end);
            let end = (at + 1..most).find(|region| self.is_blank(RegionIndex(*region)));
            let batch = at..end.unwrap_or(most);
            if self.forget_batch(batch.clone(), layout).await? {
                at = batch.end;
            }
        }
        Ok(true)
    }

    /// False: it has to be done again.
    async fn forget_batch(
        self: &Rc<Self>,
        regions: Range<u64>,
        layout: &Layout,
    ) -> Result<bool, ArrayError> {
        let mode = self.enter_mode().await?;
        // As long as the mode is held, the array does not grow.
        if self.layout() != *layout {
            return Ok(false);
        }
        let journaled = mode.mode == Mode::Journaled;
        let first = self.written.stripes_of(RegionIndex(regions.start)).start;
        let stripes = first..self.written.stripes_of(RegionIndex(regions.end - 1)).end;
        let seen = self.journal.changes();
        let sectors = if journaled { self.lock_sectors(stripes.clone()).await } else { Vec::new() };
        let locks = self.lock_stripes(stripes.clone(), Lock::Exclusive).await;
        // Not later: once their records are void, nothing may be waited for before they are blank.
        let joins = self.members.hold_joins().await;
        if self.is_any_torn(&stripes) {
            drop((sectors, locks, joins));
            self.mend_torn_of(&stripes).await?;
            return Ok(false);
        }
        // Who is away would miss it, and all stripes of a region are on all members.
        if !self.members.serves_all() {
            return Err(ArrayError::Lost);
        }
        let mut hold = None;
        if journaled {
            hold = self.void_records(stripes.clone()).await?;
            if hold.is_none() {
                drop((sectors, locks, joins));
                if let Some(error) = self.journal.refusal() {
                    return Err(error);
                }
                self.journal.changed_since(seen).await;
                return Ok(false);
            }
        }
        stripes.clone().for_each(|stripe| self.unsynced.remove(StripeIndex(stripe)));
        let regions: Vec<RegionIndex> = regions.map(RegionIndex).collect();
        let mut forgotten = self.written.remove(&regions).await;
        if forgotten.is_ok() {
            self.bad.remove_stripes(stripes.clone());
            forgotten = self.members.fence_absent().await;
        }
        drop(joins);
        if let Err(error) = forgotten {
            // Until the members know, a crash must make it zero.
            self.keep(Begun::Forgetting { stripes }, hold.into_iter().collect(), error);
            return Err(error);
        }
        drop(hold);
        self.journal.note_change();
        // Only a hint: nothing depends on what stands there.
        let members = 0..self.layout().members();
        join_all(members.map(|index| self.zero_part(index, &stripes))).await;
        Ok(true)
    }

    /// Makes the journal say that these stripes are zero. `None`: it has no room for that now.
    async fn void_records(
        self: &Rc<Self>,
        stripes: Range<u64>,
    ) -> Result<Option<Hold>, ArrayError> {
        let entries = [Entry::Zeroes { stripes: stripes.clone() }];
        let Some(appended) =
            self.journal.append_now(&entries, Class::New(PendingSize::default())).await
        else {
            return Ok(None);
        };
        let (sequence, hold) = appended?;
        // Before it is pending no more: what stands in place is older than that.
        self.written.hide(stripes.clone());
        let mut pending = self.journal.pending.borrow_mut();
        stripes.for_each(|stripe| pending.remove_stripe(StripeIndex(stripe), sequence));
        Ok(Some(hold))
    }
}
