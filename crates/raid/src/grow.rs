//! Growing: an array uses what the drives of its members have beyond what the smallest of them had.
//!
//! Order, and what a crash leaves at each step:
//! 1. the labels name larger data areas, durably (crash: room that nobody uses)
//! 2. nobody writes, the journal is empty, and nobody uses a region's number. A region that becomes
//!    a part of one that was written is made written; stripes that do so are zeroed, durably
//!    (crash: as before)
//! 3. new pages of the maps are durable (crash: they do not count)
//! 4. the superblock names the new size, and which pages count (crash: the old size, or the new)
//! 5. the bytes are given out. They were never written, so they read as zeroes and cost nothing
//!
//! Writers wait from 2 to 4; readers never do.

use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::STRIPES_MAX;
use ashlar_format::drive_label::{DriveLabel, MemberLayout};
use ashlar_format::units::{MemberIndex, StripeIndex, to_usize};
use ashlar_reactor::range_lock::Mode;

use crate::array::Array;
use crate::error::{ArrayError, ChangeError};
use crate::label;
use crate::member::Member;
use crate::members::Size;
use crate::region_map::growth::region_stripes_of;
use crate::start::drive_error;
use crate::status::ArrayState;

/// Between two looks at whether a region is being written.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Says that the array's size is being changed.
pub(crate) struct Growing(Rc<Array>);

impl Growing {
    pub(crate) fn begin(array: &Rc<Array>) -> Result<Growing, ChangeError> {
        if array.growing.replace(true) {
            return Err(ChangeError::Busy("a change of the array's size"));
        }
        Ok(Growing(array.clone()))
    }
}

impl Drop for Growing {
    fn drop(&mut self) {
        self.0.growing.set(false);
    }
}

impl Array {
    /// Uses all that fits on every member, whose drives may have grown or been replaced by larger
    /// ones. Returns the bytes that were gained for volumes; durable when this returns.
    pub async fn grow(self: &Rc<Self>) -> Result<u64, ChangeError> {
        let _request = self.begin()?;
        let _growing = Growing::begin(self)?;
        if self.is_restriping() {
            return Err(ChangeError::Busy("a restripe"));
        }
        if self.state() != ArrayState::Optimal {
            return Err(ChangeError::NotOptimal);
        }
        let size = self.plan_growth()?;
        for index in 0..self.layout().members() {
            self.extend_label(MemberIndex::new(index)).await?;
        }
        let before = self.capacity();
        self.grow_to(size).await?;
        Ok(self.capacity() - before)
    }

    /// The size that the drives have room for; an error if it is the one that the array has.
    fn plan_growth(&self) -> Result<Size, ChangeError> {
        let layout = self.layout();
        let list = self.members.list();
        let fits = |member: &Member| grown(member).map_or(0, |areas| areas.data.len);
        let smallest = (0..list.len()).min_by_key(|index| fits(&list[*index]));
        let smallest = smallest.expect("an array has members");
        let chunks = fits(&list[smallest]) / u64::from(layout.chunk_bytes);
        let groups = u64::from(layout.groups);
        let stripes = chunks.min(STRIPES_MAX / groups) * groups;
        // After a superblock that could not be written, the layout is ahead of what is given out.
        let today = self.capacity() / layout.stripe_bytes();
        let region_stripes = region_stripes_of(stripes, self.identity.region_stripes());
        match region_stripes {
            Some(region_stripes) if stripes > today => Ok(Size { stripes, region_stripes }),
            Some(_) | None => {
                let holds = today / groups * u64::from(layout.chunk_bytes);
                Err(nothing_to_gain(MemberIndex::new(smallest), &list[smallest], holds))
            }
        }
    }

    /// Makes a member's label name all of its drive.
    async fn extend_label(&self, index: MemberIndex) -> Result<(), ChangeError> {
        let old = self.member(index)?;
        let areas = grown(&old).ok_or(ChangeError::NotOptimal)?;
        let drive = old.drive.clone().ok_or(ChangeError::NotOptimal)?;
        let label = self.label_of(&Member { areas, ..old.clone() });
        let healed = label::heal(&self.reactor, &drive, &label, index.0.into()).await;
        healed.map_err(drive_error(&drive))?;
        if areas == old.areas {
            return Ok(());
        }
        self.members.set_areas(index, areas);
        // What is now in the midst of the data area must not be taken for a label, should the drive
        // ever be cut off there.
        let zeroes = self.reactor.buffer(to_usize(DriveLabel::BYTES));
        zeroes.fill_zero();
        let written = drive.write(label::last_home(&old.areas), zeroes.into()).await;
        written.map_err(drive_error(&drive))
    }

    /// Steps 2 to 5.
    async fn grow_to(self: &Rc<Self>, size: Size) -> Result<(), ArrayError> {
        let _pause = self.pause_drained().await?;
        let _regions = loop {
            // What is pending is put in place region by region.
            self.drain_journal().await?;
            let regions = self.region_lock.lock(0..1, Mode::Exclusive).await;
            if self.dirty.is_idle() {
                break regions;
            }
            // Whoever took stripes up of which a discard has left nothing still has their regions,
            // and may be about to wait for this lock.
            drop(regions);
            self.reactor.sleep(LOOK_AGAIN).await;
        };
        // Who has just come back has all maps by now, and nobody comes back to maps that change.
        let _joins = self.members.hold_joins().await;
        for region in self.written.swallowed(size) {
            self.make_region_written(region).await?;
        }
        let last = StripeIndex(self.layout().stripes.saturating_sub(1));
        if self.is_written(last) {
            // Whoever misses this must be known to have missed it.
            let _dirty = self.mark_dirty(last).await?;
            let region = last.0 / u64::from(size.region_stripes) + 1;
            let end = (region * u64::from(size.region_stripes)).min(size.stripes);
            if last.0 + 1 < end {
                self.zero_everywhere(last.0 + 1..end).await?;
            }
        }
        self.dirty.prepare(size).await?;
        self.written.prepare(size).await?;
        let merged = size.region_stripes > self.identity.region_stripes();
        self.hide();
        self.dirty.adopt(size);
        self.written.adopt(size);
        self.unsynced.grow(size.stripes);
        self.torn_stripes.grow(size.stripes);
        self.unplaced.grow(size.stripes);
        self.journal.pending.borrow_mut().grow(size.stripes);
        self.identity.grow(size);
        self.members.save().await?;
        // Who is away would say otherwise, were it started without the others.
        self.members.fence_absent().await?;
        self.set_capacity();
        if merged {
            self.write_maps().await?;
        }
        Ok(())
    }
}

/// `smallest`: the member that has the least room, and holds so many bytes of data.
fn nothing_to_gain(member: MemberIndex, smallest: &Member, holds: u64) -> ChangeError {
    let drive = smallest.drive.as_ref();
    let has = drive.map_or(0, |drive| label::usable_bytes(drive));
    let drive = drive.map_or(String::new(), |drive| drive.name().to_owned());
    if label::lacks_sums(&smallest.areas, has) {
        return ChangeError::NoRoomForChecksums { member, drive, has, holds };
    }
    ChangeError::NothingToGain { member, drive, has, holds }
}

/// A member's areas if they went to the end of its drive; `None` if that is not here.
fn grown(member: &Member) -> Option<MemberLayout> {
    let drive = member.alive()?;
    Some(label::extend(member.areas, label::usable_bytes(drive)))
}
