//! Restripe: members are added, and everything is given its place in stripes of the new shape,
//! while the array serves.
//!
//! Stripes are numbered by their rows on the members, in both shapes. A new stripe has more room
//! than an old one: new stripes below the cursor hold all that was in old ones below it, and more.
//! So the number of a stripe alone says which shape it has: the new one below the cursor, else the
//! old one (`Identity::layout_of`). Old stripes from there on whose bytes were moved are dead.
//!
//! ```text
//! 3 to 4 data chunks, cursor 3:  new 0  new 1  new 2 │ dead 3   old 4  old 5 ...
//!                     bytes of:  0..4   4..8   8..12 │ 9..12    12..   15..   chunks
//! ```
//!
//! Order of one window, new stripes from the cursor on, and what a crash leaves at each step:
//! 1. nobody reads or writes these bytes, nothing is pending, the journal is empty
//! 2. the bytes are read, and are in batches of the journal, durably (crash: the batches do not
//!    count)
//! 3. the superblock's cursor is behind the window, durably (crash: the batches count now: what
//!    they hold is put in place)
//! 4. the bytes are pending, and are put in place as whole stripes: by that, and only now, old
//!    stripes are overwritten, dead ones or those in the window. (Before they are, no part of them
//!    may be written: parity of a part would rest on what stands beside it. Where some of it is,
//!    since drives were away, its parity is made anew: `Array::unplaced`.)
//! 5. they may be read and written again
//!
//! Until all of it is moved the array is written through the journal, whatever its policy is: the
//! ring has the order of moving and of what guests write in between.

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MEMBERS_MAX, MemberState};
use ashlar_format::journal_batch::{ENTRIES_MAX, PAYLOAD_BYTES_MAX};
use ashlar_format::units::{MemberIndex, RegionIndex, StripeIndex};
use ashlar_reactor::buffer::Buffer;
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::Mode as Lock;

use crate::array::Array;
use crate::error::{ArrayError, ChangeError};
use crate::grow::Growing;
use crate::journal::{Class, Entry};
use crate::layout::Layout;
use crate::member::Member;
use crate::members::Restripe;
use crate::mode::Mode;
use crate::pending::{Hold, Patch};
use crate::shift::Shift;
use crate::status::ArrayState;
use crate::stored::Begun;

/// Bytes that are moved at a time, unless a stripe has more: so long others wait for them.
const WINDOW_BYTES: u64 = 2 << 20;
/// So long guests wait for a window that cannot be moved: then the array has failed.
const PATIENCE: Duration = Duration::from_secs(30);
/// Before what could not be moved is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Entries of one batch that is written, and what keeps it.
type Written = (Vec<Entry>, u64, Hold);

/// What became of moving a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moved {
    Done,
    /// And why.
    NotNow(&'static str),
}

impl Array {
    /// Adds drives (each with its own new uuid) as members, and starts to move everything to
    /// stripes over all of them; there is more room once that is done. Durably begun when this
    /// returns.
    pub async fn add_members(
        self: &Rc<Self>,
        drives: Vec<([u8; 16], Rc<Drive>)>,
    ) -> Result<(), ChangeError> {
        let _request = self.begin()?;
        let _growing = Growing::begin(self)?;
        self.may_widen()?;
        let layout = self.wider(drives.len())?;
        let mut members = Vec::new();
        for (uuid, drive) in drives {
            self.cover(&drive);
            let mut member = self.plan_replacement(&drive, uuid)?;
            member.state = MemberState::Trusted;
            let index = MemberIndex::new(self.layout().members() + members.len());
            // Nobody believes it before a superblock names the drive.
            self.write_label(index, &member).await?;
            members.push(member);
        }
        let begun = self.widen(layout, members).await;
        if self.is_restriping() {
            self.open_reads_ended().await;
            self.start_restripe();
        }
        begun?;
        Ok(self.renew_metadata().await?)
    }

    fn may_widen(&self) -> Result<(), ChangeError> {
        let runs = self.jobs.restripe_slot().is_running() || self.jobs.scrub_slot().is_running();
        if self.is_restriping() || runs {
            return Err(ChangeError::Busy("a restripe or a scrub"));
        }
        if !self.bad.is_empty() {
            let why = "some blocks are lost (see `array show`); write them anew first";
            return Err(ChangeError::Spec(why.into()));
        }
        if self.state() != ArrayState::Optimal || self.unsynced.count() > 0 {
            return Err(ChangeError::NotOptimal);
        }
        Ok(())
    }

    /// The layout with so many more members.
    fn wider(&self, more: usize) -> Result<Layout, ChangeError> {
        let layout = self.layout();
        let refuse = |why: String| Err(ChangeError::Spec(why));
        if layout.groups > 1 || layout.level == Level::Raid1 {
            return refuse("members can be added at levels 0, 5, 6, 7.3, 10 and N+M".into());
        }
        let copies = usize::from(layout.copies);
        if more == 0 || !more.is_multiple_of(copies) {
            return refuse(format!("drives are added {copies} at a time"));
        }
        if layout.members() + more > MEMBERS_MAX {
            return refuse(format!("an array has at most {MEMBERS_MAX} members"));
        }
        let chunks = u8::try_from(more / copies).expect("checked to be few");
        let wider = Layout { data: layout.data + chunks, ..layout };
        if !self.journal.has_room_for(wider.stripe_bytes()) {
            return refuse("a stripe over so many drives does not fit in the journal".into());
        }
        Ok(wider)
    }

    /// From here on there are more members, and no stripe has the new shape yet.
    async fn widen(self: &Rc<Self>, layout: Layout, new: Vec<Member>) -> Result<(), ChangeError> {
        let _pause = self.pause_drained().await?;
        // A scrub may have begun since, or a member been lost.
        self.may_widen()?;
        let old_data = self.layout().data;
        self.hide();
        self.identity.set_layout(layout);
        self.identity.set_restripe(Some(Restripe { old_data, cursor: 0, saved: 0 }));
        self.members.add(new);
        self.lease.get().into_iter().for_each(|lease| lease.keep_all());
        // From the first superblock on that says so the journal covers all writes: a stripe that is
        // moved in part could not be made to agree with itself.
        if self.modes.mode.get() == Mode::Direct {
            self.begin_journal().await?;
        }
        Ok(self.members.settled().await?)
    }

    /// Goes on where it was, if members were being added.
    pub(crate) fn start_restripe(self: &Rc<Self>) {
        let Some(restripe) = self.identity.restripe() else { return };
        let slot = self.jobs.restripe_slot();
        let end = self.moved_stripes(restripe);
        let done = restripe.cursor.min(end);
        slot.begin(self.reactor.now(), done, end, (end - done) * self.stripe_bytes());
        let array = self.clone();
        self.reactor.spawn(async move {
            array.restripe().await;
            array.jobs.restripe_slot().end();
        });
    }

    /// New stripes that all old ones fill.
    fn moved_stripes(&self, restripe: Restripe) -> u64 {
        let layout = self.layout();
        (layout.stripes * u64::from(restripe.old_data)).div_ceil(u64::from(layout.data))
    }

    /// Until all is moved, or the array stops. One at a time: so it ends before another can begin.
    async fn restripe(self: &Rc<Self>) {
        let mut shift = Shift::begin(self);
        // What was in the way the last time: once is no trouble.
        let mut waited = None;
        while let Some(restripe) = self.identity.restripe() {
            let rebuilds = || self.jobs.rebuild_slot().is_running();
            if rebuilds() {
                shift.wait_while(rebuilds).await;
            } else if shift.is_over() {
                shift.rest().await;
            }
            let drained = match self.journal_holds_much() {
                true => shift.beside(self.drain_as_step()).await,
                false => Ok(()),
            };
            let Ok(request) = self.admit_step().await else { return };
            // Not both at a time.
            if rebuilds() {
                continue;
            }
            self.moving.set(true);
            let end = self.moved_stripes(restripe);
            let moved = match drained {
                Ok(()) if restripe.cursor < end => self.move_window(restripe, end).await,
                Ok(()) => self.end_restripe(end).await.map(|()| Moved::Done),
                Err(error) => Err(error),
            };
            self.moving.set(false);
            self.moved.wake_all(&self.reactor);
            self.jobs.set_restripe_error(match moved {
                Ok(Moved::Done) => None,
                Ok(Moved::NotNow(why)) => waited.replace(why).map(str::to_owned),
                Err(error) => Some(error.to_string()),
            });
            let Some(now) = self.identity.restripe() else {
                // Back to how the array writes otherwise, also if nobody does. A stop waits for it.
                drop(self.enter_mode().await);
                return;
            };
            drop(request);
            if moved == Ok(Moved::Done) {
                waited = None;
                let slot = self.jobs.restripe_slot();
                let stripes = now.cursor.saturating_sub(restripe.cursor);
                slot.worked(self.reactor.now(), stripes * self.stripe_bytes());
                slot.advance(now.cursor);
            } else {
                shift.beside(self.pause(RETRY_AFTER)).await;
            }
        }
    }

    /// That are moved at once, at most.
    fn window_stripes(&self) -> u64 {
        (WINDOW_BYTES / self.stripe_bytes()).max(1)
    }

    /// Stripes that were moved last, as far as they may be in the journal only.
    pub(crate) fn last_window(&self) -> Range<u64> {
        let cursor = self.identity.restripe().map_or(0, |restripe| restripe.cursor);
        cursor.saturating_sub(self.window_stripes())..cursor
    }

    async fn move_window(
        self: &Rc<Self>,
        restripe: Restripe,
        end: u64,
    ) -> Result<Moved, ArrayError> {
        let stripe_bytes = self.stripe_bytes();
        let most = self.window_stripes();
        // What superblocks name stays in the ring, and its end may be too short for a batch.
        let kept = 2 * u64::from(PAYLOAD_BYTES_MAX);
        let has_room = |count: &u64| self.journal.has_room_for(count * stripe_bytes + kept);
        let fits = (1..=most).rev().find(has_room);
        let window = restripe.cursor..end.min(restripe.cursor + fits.unwrap_or(1));
        for stripe in window.clone() {
            self.make_written(StripeIndex(stripe)).await?;
        }
        drop(self.enter_mode().await?);
        let bytes = window.start * stripe_bytes..window.end * stripe_bytes;
        let _addresses = self.address_lock.lock(bytes.clone(), Lock::Exclusive).await;
        let _pause = self.modes.pause(&self.reactor).await;
        if self.modes.mode.get() != Mode::Journaled {
            return Ok(Moved::NotNow("stripes that wait for resync come first"));
        }
        self.drain_journal().await?;
        self.unplaced.remove_from(StripeIndex(0));
        let entries = self.read_window(restripe, &bytes).await;
        self.jobs.not_moved.replace(entries.is_err().then_some(bytes));
        let entries = entries?;
        let stripes = self.lock_stripes(window.clone(), Lock::Exclusive).await;
        let Some(written) = self.journal_window(entries).await? else {
            return Ok(Moved::NotNow("the journal has no room yet"));
        };
        self.move_cursor(restripe, window.end, written).await?;
        drop(stripes);
        self.put_in_place().await?;
        Ok(Moved::Done)
    }

    /// Step 4. Others have to wait until it is done, unless the array has failed. Until there is
    /// space again they wait in any case: no member is worse for that.
    async fn put_in_place(self: &Rc<Self>) -> Result<(), ArrayError> {
        let mut patience = None;
        loop {
            let Err(error) = self.drain_journal().await else { return Ok(()) };
            let now = self.reactor.now();
            patience = patience.filter(|_| error != ArrayError::NoSpace);
            let until = *patience.get_or_insert(now.after(PATIENCE));
            self.jobs.set_restripe_error(Some(error.to_string()));
            if self.is_stopping() {
                return Err(error);
            }
            // What is pending of them, or torn, is the whole of them: nothing beside it is needed.
            if self.state() == ArrayState::Failed {
                return Err(error);
            }
            if now >= until {
                self.members.pull_all();
            }
            self.pause(RETRY_AFTER).await;
        }
    }

    /// What is at these addresses, as entries for their new places. Beyond the old end: zeroes.
    async fn read_window(
        self: &Rc<Self>,
        restripe: Restripe,
        bytes: &Range<u64>,
    ) -> Result<Vec<Entry>, ArrayError> {
        let (new, old) = (self.layout(), restripe.old(self.layout()));
        let len = bytes.end - bytes.start;
        let here = len.min(old.capacity().saturating_sub(bytes.start));
        let chunks = old.pieces(bytes.start, here).collect::<Vec<_>>();
        let reads = chunks.iter().map(|c| self.read_newest(c.stripe, c.chunk, &c.rows, false));
        let read: Vec<Buffer> = join_all(reads).await.into_iter().collect::<Result<_, _>>()?;
        let mut entries = Vec::new();
        for (index, place) in new.pieces(bytes.start, len).enumerate() {
            // Both shapes cut the same bytes into the same chunks.
            let chunk = read.get(index).cloned().unwrap_or_else(|| self.zeroes(&place.rows));
            for row in place.rows.clone().step_by(PAYLOAD_BYTES_MAX as usize) {
                let end = place.rows.end.min(row + PAYLOAD_BYTES_MAX);
                let bytes = chunk.slice(row as usize..end as usize);
                let (stripe, chunk) = (place.stripe, place.chunk);
                entries.push(Entry::Moved { stripe, chunk, row, bytes });
            }
        }
        Ok(entries)
    }

    /// Makes the entries batches of the journal, durably. `None`: there is no room.
    async fn journal_window(
        self: &Rc<Self>,
        entries: Vec<Entry>,
    ) -> Result<Option<Vec<Written>>, ArrayError> {
        let mut written = Vec::new();
        let mut left = entries.into_iter().peekable();
        while left.peek().is_some() {
            let (mut batch, mut payload) = (Vec::new(), 0);
            while let Some(next) = left.peek() {
                payload += next.payload_bytes();
                if batch.len() == ENTRIES_MAX || payload > u64::from(PAYLOAD_BYTES_MAX) {
                    break;
                }
                batch.extend(left.next());
            }
            // What has no room, or no end, does not count: the cursor is not moved over it.
            let Some(appended) = self.journal.append_now(&batch, Class::Parity).await else {
                return Ok(None);
            };
            let (sequence, hold) = appended?;
            written.push((batch, sequence, hold));
        }
        self.journal.flush().await?;
        Ok(Some(written))
    }

    /// Step 3.
    async fn move_cursor(
        self: &Rc<Self>,
        restripe: Restripe,
        cursor: u64,
        written: Vec<Written>,
    ) -> Result<(), ArrayError> {
        self.identity.set_restripe(Some(Restripe { saved: cursor, ..restripe }));
        if let Err(error) = self.save_for_sure().await {
            // Some members may say so: then these batches are all there is of the window, and
            // whoever goes on as if its stripes had the old shape writes to other places.
            self.members.pull_all();
            let holds = written.into_iter().map(|(_, _, hold)| hold).collect();
            self.keep(Begun::Moving, holds, error);
            return Err(error);
        }
        self.identity.set_restripe(Some(Restripe { cursor, saved: cursor, ..restripe }));
        let mut pending = self.journal.pending.borrow_mut();
        for (entries, sequence, hold) in written {
            for entry in entries {
                let Entry::Moved { stripe, chunk, row, bytes } = entry else { continue };
                let end = row + u32::try_from(bytes.len()).expect("at most a chunk");
                let hold = hold.clone();
                self.unplaced.insert(stripe);
                pending.insert(stripe, Patch { chunk, rows: row..end, bytes, sequence, hold });
            }
        }
        drop(pending);
        self.journal.note_change();
        Ok(())
    }

    /// All is moved: what is behind it was never written, and may be given out.
    async fn end_restripe(self: &Rc<Self>, end: u64) -> Result<(), ArrayError> {
        drop(self.enter_mode().await?);
        let _pause = self.pause_drained().await?;
        self.unplaced.remove_from(StripeIndex(0));
        let Some(restripe) = self.identity.restripe() else { return Ok(()) };
        let stripes = self.layout().stripes;
        // Nothing is left in old stripes.
        let all = Restripe { cursor: stripes, saved: stripes, ..restripe };
        self.identity.set_restripe(Some(all));
        let _regions = self.hold_regions().await;
        let region = self.written.region_of(StripeIndex(end.max(1) - 1));
        let in_region = self.written.stripes_of(region).end;
        if end < in_region && self.written.contains(region) {
            let _dirty = self.mark_dirty(StripeIndex(end.max(1) - 1)).await?;
            self.zero_everywhere(end..in_region).await?;
        }
        let behind: Vec<RegionIndex> = (region.0 + 1..self.written.regions())
            .map(RegionIndex)
            .filter(|region| self.written.contains(*region))
            .collect();
        self.written.remove(&behind).await?;
        // Also what was forgotten by a try that failed.
        self.written.settle().await?;
        // What was given up there was of nobody, and agrees with nothing.
        self.bad.remove_stripes(end..stripes);
        self.unsynced.remove_from(StripeIndex(end));
        self.bad.save().await?;
        self.identity.set_restripe(None);
        self.save_for_sure().await?;
        self.set_capacity();
        Ok(())
    }

    /// Makes a superblock durable. An error: it may be, or not, and the array stops, or has failed,
    /// or is another host's.
    async fn save_for_sure(&self) -> Result<(), ArrayError> {
        let mut saved = self.members.save().await;
        let mut patience = self.reactor.now().after(PATIENCE);
        while let Err(error) = saved
            && !self.is_stopping()
            && !self.members.is_pulled()
        {
            if error == ArrayError::NoSpace {
                patience = self.reactor.now().after(PATIENCE);
            }
            if self.reactor.now() >= patience {
                // Which shape counts is for the next start to say; guests have waited long enough.
                self.members.pull_all();
                break;
            }
            self.pause(RETRY_AFTER).await;
            saved = self.members.settled().await;
        }
        saved
    }
}
