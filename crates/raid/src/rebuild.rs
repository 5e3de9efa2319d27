//! Rebuild: fills a replaced member while the array serves.
//!
//! Stripes are done in order, a window at a time, each window locked until the member's
//! `rebuilt_stripes` has moved over it. How far it is goes to the superblock now and then, after a
//! flush of the new drive: a restart goes on from there.

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

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

impl Array {
    /// Rebuilds members that wait for it, until none does or one cannot be rebuilt.
    pub(crate) fn start_rebuild(self: &Rc<Self>) {
        if self.jobs.rebuild_slot().is_running() {
            return;
        }
        self.jobs.set_rebuild_error(None);
        let array = self.clone();
        let slot = self.jobs.rebuild_slot();
        slot.begin(self.reactor.now(), 0, self.layout().stripes);
        self.reactor.spawn(async move {
            while !array.is_stopping()
                && let Some(index) = array.rebuilding_member()
            {
                if let Err(error) = array.rebuild_member(index).await {
                    array.jobs.set_rebuild_error(Some(error));
                    break;
                }
                if array.is_stopping() {
                    break;
                }
            }
            array.jobs.rebuild_slot().end();
        });
    }

    fn rebuilding_member(&self) -> Option<MemberIndex> {
        let list = self.members.list();
        let wanting =
            |m: &crate::members::Member| m.state == MemberState::Rebuilding && m.alive().is_some();
        list.iter().position(wanting).map(MemberIndex::new)
    }

    async fn rebuild_member(self: &Rc<Self>, index: MemberIndex) -> Result<(), String> {
        let stripes = self.layout().stripes;
        let window = (WINDOW_BYTES / u64::from(self.layout().chunk_bytes)).max(1);
        let mut at = self.members.list()[index.index()].rebuilt_stripes;
        self.jobs.rebuild_slot().begin(self.reactor.now(), at, stripes);
        let mut saved = self.reactor.now();
        while at < stripes {
            let Ok(_request) = self.begin() else { return Ok(()) };
            let began = self.reactor.now();
            let end = (at + window).min(stripes);
            let text = |error: ArrayError| format!("stripes {at} to {end}: {error}");
            self.rebuild_window(index, at..end).await.map_err(text)?;
            at = end;
            self.jobs.rebuild_slot().advance(at);
            if self.reactor.now().since(saved) >= SAVE_PERIOD {
                self.save_rebuild(index, MemberState::Rebuilding).await?;
                saved = self.reactor.now();
            }
            self.give_way(began).await;
        }
        self.save_rebuild(index, MemberState::Trusted).await
    }

    async fn rebuild_window(
        self: &Rc<Self>,
        index: MemberIndex,
        stripes: Range<u64>,
    ) -> Result<(), ArrayError> {
        for stripe in stripes.clone() {
            if self.unsynced.contains(StripeIndex(stripe)) {
                self.sync_now(StripeIndex(stripe)).await?;
            }
        }
        let _locks = self.lock_stripes(stripes.clone(), Mode::Exclusive).await;
        let each = stripes.clone().map(|stripe| self.rebuild_stripe(index, StripeIndex(stripe)));
        join_all(each).await.into_iter().collect::<Result<(), _>>()?;
        // Still held by our locks: no write can have come between.
        let rebuilding = {
            let list = self.members.list();
            let member = &list[index.index()];
            member.state == MemberState::Rebuilding && member.alive().is_some()
        };
        if !rebuilding {
            return Err(ArrayError::Lost);
        }
        self.members.set_rebuilt(index, stripes.end);
        Ok(())
    }

    /// Writes what the member should hold of one stripe. The caller holds the stripe.
    async fn rebuild_stripe(
        &self,
        index: MemberIndex,
        stripe: StripeIndex,
    ) -> Result<(), ArrayError> {
        let layout = self.layout();
        let position = layout.position_of(stripe, index);
        let rows = 0..layout.chunk_bytes;
        let bytes = if layout.parity > 0 {
            self.reconstruct(stripe, position, &rows, 0).await?
        } else {
            self.read_locked(stripe, position / layout.copies, &rows).await?.0
        };
        let (drive, base) = {
            let list = self.members.list();
            let member = &list[index.index()];
            let drive = member.alive().cloned().ok_or(ArrayError::Lost)?;
            (drive, member.areas.data.offset)
        };
        let slice = Slice { position, row: 0, bytes };
        let at = base + layout.member_offset(stripe, slice.row);
        drive.write(at, slice.bytes.into()).await.map_err(|_| ArrayError::Lost)
    }

    /// Makes the member's progress (or its end) durable: its data first, then the superblock.
    async fn save_rebuild(&self, index: MemberIndex, state: MemberState) -> Result<(), String> {
        let (drive, rebuilt_stripes) = {
            let member = &self.members.list()[index.index()];
            (member.drive.clone(), member.rebuilt_stripes)
        };
        let flushed = match drive {
            Some(drive) => drive.flush().await.map_err(|error| error.to_string()),
            None => Err("its drive is gone".into()),
        };
        flushed?;
        let changed = self.members.change(index, |member| {
            // It may have been fenced while the flush ran.
            if member.state == MemberState::Rebuilding {
                member.state = state;
                member.rebuilt_flushed = rebuilt_stripes;
                if state == MemberState::Trusted {
                    member.rebuilt_stripes = 0;
                    member.rebuilt_flushed = 0;
                }
            }
        });
        changed.await.map_err(|error| error.to_string())
    }
}
