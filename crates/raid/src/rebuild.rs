//! Rebuild: fills a replaced member while the array serves.
//!
//! Stripes are done in order, a window at a time, each window locked until the member's
//! `rebuilt_stripes` has moved over it. How far it is goes to the superblock now and then, after a
//! flush of the new drive: a restart goes on from there.

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::MemberState;
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::Mode;

use crate::array::Array;
use crate::error::ArrayError;
use crate::journal::Slice;

/// Bytes of the new member that are filled at a time.
const WINDOW_BYTES: u64 = 1 << 20;
/// Between two superblocks that say how far it is.
const SAVE_PERIOD: Duration = Duration::from_secs(2);

/// The member that is filled, and the drive it had when that began: another drive in its place
/// must not inherit what was done for this one.
#[derive(Clone, Copy)]
struct Target {
    index: MemberIndex,
    drive_uuid: [u8; 16],
}

impl Array {
    /// Rebuilds members that wait for it, until none is left that can be.
    pub(crate) fn start_rebuild(self: &Rc<Self>) {
        if self.jobs.rebuild_slot().is_running() {
            return;
        }
        self.jobs.set_rebuild_error(None);
        let array = self.clone();
        let slot = self.jobs.rebuild_slot();
        slot.begin(self.reactor.now(), 0, self.layout().stripes);
        self.reactor.spawn(async move {
            // A member that cannot be rebuilt does not keep the others from it.
            let mut given_up = Vec::new();
            while !array.is_stopping()
                && let Some(index) = array.rebuilding_member(&given_up)
            {
                if let Err(error) = array.rebuild_member(index).await {
                    array.jobs.set_rebuild_error(Some(format!("member {index}, {error}")));
                    given_up.push(index);
                }
            }
            array.jobs.rebuild_slot().end();
        });
    }

    fn rebuilding_member(&self, given_up: &[MemberIndex]) -> Option<MemberIndex> {
        let list = self.members.list();
        let mut members = (0..list.len()).map(MemberIndex::new);
        members.find(|index| {
            let member = &list[index.index()];
            let waiting = member.state == MemberState::Rebuilding && member.alive().is_some();
            waiting && !given_up.contains(index)
        })
    }

    async fn rebuild_member(self: &Rc<Self>, index: MemberIndex) -> Result<(), String> {
        let stripes = self.layout().stripes;
        let window = (WINDOW_BYTES / u64::from(self.layout().chunk_bytes)).max(1);
        let (target, mut at) = {
            let member = &self.members.list()[index.index()];
            (Target { index, drive_uuid: member.drive_uuid }, member.rebuilt_stripes)
        };
        self.jobs.rebuild_slot().begin(self.reactor.now(), at, stripes);
        let mut saved = self.reactor.now();
        while at < stripes {
            let Ok(_request) = self.begin() else { return Ok(()) };
            let began = self.reactor.now();
            let end = self.window_end(target, at, window);
            let text = |error: ArrayError| format!("stripes {at} to {end}: {error}");
            self.rebuild_window(target, at..end).await.map_err(text)?;
            at = end;
            self.jobs.rebuild_slot().advance(at);
            if self.reactor.now().since(saved) >= SAVE_PERIOD {
                self.save_rebuild(target, MemberState::Rebuilding).await?;
                saved = self.reactor.now();
            }
            self.give_way(began).await;
        }
        let Ok(_request) = self.begin() else { return Ok(()) };
        self.save_rebuild(target, MemberState::Trusted).await
    }

    /// All of a region that needs nothing is one window.
    fn window_end(&self, target: Target, at: u64, window: u64) -> u64 {
        let region = self.written.stripes_of(self.written.region_of(StripeIndex(at)));
        if self.is_lacked(target, StripeIndex(at)) {
            (at + window).min(self.layout().stripes)
        } else {
            region.end
        }
    }

    fn is_lacked(&self, target: Target, stripe: StripeIndex) -> bool {
        self.is_written(stripe) && self.members.list()[target.index.index()].lacked(stripe)
    }

    async fn rebuild_window(
        self: &Rc<Self>,
        target: Target,
        stripes: Range<u64>,
    ) -> Result<(), ArrayError> {
        for stripe in stripes.clone() {
            if self.unsynced.contains(StripeIndex(stripe)) {
                self.sync_now(StripeIndex(stripe)).await?;
            }
        }
        let _locks = self.lock_stripes(stripes.clone(), Mode::Exclusive).await;
        let all = stripes.clone().map(StripeIndex);
        let lacked = all.filter(|stripe| self.is_lacked(target, *stripe));
        let each = lacked.map(|stripe| self.rebuild_stripe(target, stripe));
        join_all(each).await.into_iter().collect::<Result<(), _>>()?;
        // Still held by our locks: no write can have come between. But the member may have been
        // given another drive, which holds nothing of this.
        self.rebuild_target(target).ok_or(ArrayError::Lost)?;
        self.members.set_rebuilt(target.index, stripes.end);
        Ok(())
    }

    /// The drive that is filled and where its data begins, if it is still the one.
    fn rebuild_target(&self, target: Target) -> Option<(Rc<Drive>, u64)> {
        let list = self.members.list();
        let member = &list[target.index.index()];
        let same = member.drive_uuid == target.drive_uuid;
        let drive = member.alive().filter(|_| same && member.state == MemberState::Rebuilding)?;
        Some((drive.clone(), member.areas.data.offset))
    }

    /// Writes what the member should hold of one stripe. The caller holds the stripe.
    async fn rebuild_stripe(&self, target: Target, stripe: StripeIndex) -> Result<(), ArrayError> {
        let layout = self.layout_of(stripe);
        let Some(position) = layout.position_of(stripe, target.index) else { return Ok(()) };
        let rows = 0..layout.chunk_bytes;
        let bytes = if layout.parity > 0 {
            self.reconstruct(stripe, position, &rows, 0).await?
        } else {
            self.read_locked(stripe, position / layout.copies, &rows).await?.0
        };
        let (drive, base) = self.rebuild_target(target).ok_or(ArrayError::Lost)?;
        let slice = Slice { position, row: 0, bytes };
        let at = base + layout.member_offset(stripe, slice.row);
        drive.write(at, slice.bytes.into()).await.map_err(|_| ArrayError::Lost)
    }

    /// Makes the member's progress (or its end) durable: its data first, then the superblock.
    async fn save_rebuild(
        self: &Rc<Self>,
        target: Target,
        state: MemberState,
    ) -> Result<(), String> {
        let rebuilt_stripes = self.members.list()[target.index.index()].rebuilt_stripes;
        let Some((drive, _)) = self.rebuild_target(target) else {
            return Err("its drive is gone".into());
        };
        if state == MemberState::Trusted {
            // Batches that were written without the member are on fewer members than they should
            // be once another one may be lost again.
            self.drain_journal().await.map_err(|error| error.to_string())?;
            // A crash while it was labelled may have left it with one copy.
            let member = self.members.list()[target.index.index()].clone();
            let labelled = self.write_label(target.index, &member).await;
            labelled.map_err(|error| error.to_string())?;
        }
        drive.flush().await.map_err(|error| error.to_string())?;
        let changed = self.members.change(target.index, |member| {
            // It may have been fenced, or replaced, while the flush ran.
            if member.state == MemberState::Rebuilding && member.drive_uuid == target.drive_uuid {
                member.state = state;
                member.rebuilt_flushed = rebuilt_stripes;
                if state == MemberState::Trusted {
                    member.rebuilt_stripes = 0;
                    member.rebuilt_flushed = 0;
                    member.catches_up = false;
                    member.behind = None;
                }
            }
        });
        changed.await.map_err(|error| error.to_string())
    }
}
