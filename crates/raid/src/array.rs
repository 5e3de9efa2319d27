//! An array while it runs: what it is made of, and what all its parts share.
//!
//! Reading, writing, starting and the long jobs are in their own files and add to `Array` there.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::region_map::MapKind;
use ashlar_format::units::{MemberIndex, StripeIndex, to_usize};
use ashlar_format::volume_table::VolumeTable;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::range_lock::{Mode, RangeGuard, RangeLock};
use ashlar_reactor::traffic::Traffic;
use ashlar_reactor::wait_list::WaitList;

use crate::bad_blocks::{BadBlocks, StoredList};
use crate::dirty::{Dirty, RegionGuard};
use crate::error::{ArrayError, ChangeError};
use crate::hedge::Hedging;
use crate::integrity::Integrity;
use crate::job::Jobs;
use crate::journal::Journal;
use crate::layout::{Layout, Piece};
use crate::lease::Leasehold;
use crate::member::{Member, sector_bytes};
use crate::members::{Identity, Members, Restripe};
use crate::mode::Modes;
use crate::notes::{Readers, Served};
use crate::pace::Pace;
use crate::parity::Kernels;
use crate::region_map::{RegionMap, StoredMap};
use crate::settings::{Settings, SettingsChange};
use crate::status::{ArrayCounters, ArrayState, ArrayStatus, MemberStatus};
use crate::stored::{Kept, Torn};
use crate::stripe_set::StripeSet;
use crate::witness::Tell;
use crate::write_plan::bits;
use crate::zero_step::Helpers;

pub struct Array {
    pub(crate) reactor: Reactor,
    pub(crate) identity: Rc<Identity>,
    pub(crate) members: Rc<Members>,
    pub(crate) dirty: Rc<Dirty>,
    pub(crate) written: Rc<RegionMap>,
    pub(crate) bad: Rc<BadBlocks>,
    pub(crate) journal: Rc<Journal>,
    /// `None`: members keep no checksums.
    pub(crate) integrity: Option<Rc<Integrity>>,
    pub(crate) modes: Rc<Modes>,
    /// Bands that are stored in part, and their stripes.
    pub(crate) torn: RefCell<Vec<Torn>>,
    pub(crate) torn_stripes: StripeSet,
    /// Got their new shape, and may hold what stood there before: their parity fits nothing.
    pub(crate) unplaced: StripeSet,
    /// What was begun and could not be finished.
    pub(crate) kept: RefCell<Vec<Rc<Kept>>>,
    /// What is pending of batches before this one is old enough to be put in place.
    pub(crate) destage_before: Cell<u64>,
    pub(crate) destagers: Cell<u32>,
    /// Torn stripes that somebody is about to store again.
    pub(crate) mended: RefCell<Vec<StripeIndex>>,
    /// What drives were found to do of a zeroing; where it is none, discards are not passed on.
    pub(crate) helpers: Cell<Helpers>,
    pub(crate) unsynced: StripeSet,
    pub(crate) locks: Rc<RangeLock>,
    /// Of stripes, while parts of their sectors are written through the journal.
    pub(crate) sector_locks: Rc<RangeLock>,
    pub(crate) kernels: Kernels,
    /// Largest sector of any member: what reads and writes of members are multiples of.
    pub(crate) sector_bytes: u32,
    pub(crate) jobs: Jobs,
    pub(crate) pace: Pace,
    pub(crate) hedging: Hedging,
    /// Other reactors that read by views.
    pub(crate) readers: Readers,
    counters: Cell<ArrayCounters>,
    pub(crate) traffic: Traffic,
    requests: Cell<u64>,
    /// Requests and steps of jobs that were ever begun, those served elsewhere included.
    begun: Cell<u64>,
    /// Maintenance sleeps until something is begun.
    at_rest: Cell<bool>,
    stopping: Cell<bool>,
    pub(crate) drained: WaitList,
    /// The maintenance task has not ended yet.
    pub(crate) maintained: Cell<bool>,
    /// Turns over the copies of a mirror.
    pub(crate) next_copy: Cell<u8>,
    pub(crate) table: TableNotes,
    pub(crate) table_lock: Rc<RangeLock>,
    /// Bytes that are given out; what has just grown is not yet durably so.
    capacity: Cell<u64>,
    /// Of byte ranges of the array, while they may be moved to other stripes.
    pub(crate) address_lock: Rc<RangeLock>,
    /// Who reads without that lock.
    open_reads: Cell<u64>,
    open_reads_done: WaitList,
    /// A window of a restripe is under way.
    pub(crate) moving: Cell<bool>,
    pub(crate) moved: WaitList,
    /// Somebody changes its size.
    pub(crate) growing: Cell<bool>,
    /// Shared by those who use numbers of regions, exclusive while these change.
    pub(crate) region_lock: Rc<RangeLock>,
    /// Where other hosts could reach the drives.
    pub(crate) lease: OnceCell<Rc<Leasehold>>,
}

/// What is known of volume tables on members.
#[derive(Default)]
pub(crate) struct TableNotes {
    /// Of the newest that was written, or found.
    pub(crate) sequence: Cell<u64>,
    /// Of the newest that is known to be on members.
    pub(crate) known: Cell<u64>,
    /// Every trusted member has that, or did when it went.
    pub(crate) is_sure: Cell<bool>,
    /// The one that holds: a newer one may stand on members, of a change that was answered with an
    /// error.
    pub(crate) served: RefCell<Option<Box<VolumeTable>>>,
    /// Its sequence where it was last written whole.
    pub(crate) served_at: Cell<u64>,
    /// Such a change has left something on members, perhaps.
    pub(crate) is_half_changed: Cell<bool>,
    /// A bit for each slot that some member has no table in: parts of one may stand there.
    pub(crate) parts: Cell<u64>,
}

/// What the members say of regions.
pub(crate) struct StoredMaps {
    pub(crate) dirty: StoredMap,
    pub(crate) written: StoredMap,
    pub(crate) missed: StoredMap,
    pub(crate) bad: StoredList,
}

impl StoredMaps {
    /// Gives the newest of all of them to members that lack it. See `Newest::spread`.
    pub(crate) async fn spread(&self, reactor: &Reactor) {
        self.dirty.spread(reactor, MapKind::Dirty).await;
        self.written.spread(reactor, MapKind::Written).await;
        self.missed.spread(reactor, MapKind::Missed).await;
        self.bad.spread(reactor).await;
    }
}

/// Keeps the array from stopping while a request is under way.
pub(crate) struct RequestGuard {
    array: Rc<Array>,
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.array.requests.set(self.array.requests.get() - 1);
        if self.array.is_over() {
            self.array.drained.wake_all(&self.array.reactor);
            self.array.journal.note_change();
        }
    }
}

/// See `hold_addresses`.
pub(crate) enum AddressGuard {
    Held(#[expect(dead_code, reason = "it is held")] RangeGuard),
    /// Nothing is moved before it is dropped.
    Open(Rc<Array>),
}

impl Drop for AddressGuard {
    fn drop(&mut self) {
        if let AddressGuard::Open(array) = self {
            array.open_reads.set(array.open_reads.get() - 1);
            if array.open_reads.get() == 0 {
                array.open_reads_done.wake_all(&array.reactor);
            }
        }
    }
}

impl Array {
    pub(crate) fn new(
        reactor: &Reactor,
        identity: Rc<Identity>,
        members: Rc<Members>,
        maps: &StoredMaps,
    ) -> Rc<Array> {
        let sector_bytes = sector_bytes(&members.list()).max(identity.least_sector());
        let new_integrity = || Integrity::new(reactor, identity.clone(), members.clone());
        let integrity = identity.integrity.then(new_integrity);
        let map = |kind, of| RegionMap::new(kind, reactor, identity.clone(), members.clone(), of);
        let missed = map(MapKind::Missed, &maps.missed);
        let dirty = Dirty::new(reactor, members.clone(), map(MapKind::Dirty, &maps.dirty), missed);
        let bad = BadBlocks::new(reactor, identity.clone(), members.clone(), &maps.bad);
        let (layout, given_out) = (identity.layout(), identity.given_out());
        Rc::new(Array {
            reactor: reactor.clone(),
            journal: Journal::new(
                reactor,
                identity.clone(),
                members.clone(),
                dirty.clone(),
                bad.clone(),
                integrity.clone(),
            ),
            integrity,
            dirty,
            bad,
            written: map(MapKind::Written, &maps.written),
            modes: Rc::default(),
            torn: RefCell::default(),
            torn_stripes: StripeSet::none(layout.stripes),
            unplaced: StripeSet::none(layout.stripes),
            kept: RefCell::default(),
            destage_before: Cell::new(0),
            destagers: Cell::new(0),
            mended: RefCell::default(),
            helpers: Cell::new(Helpers::All),
            identity,
            members,
            unsynced: StripeSet::none(layout.stripes),
            locks: RangeLock::new(reactor, layout.chunk_bytes.trailing_zeros()),
            sector_locks: RangeLock::new(reactor, 0),
            kernels: Kernels::detect(),
            sector_bytes,
            jobs: Jobs::default(),
            pace: Pace::default(),
            hedging: Hedging::default(),
            readers: Readers::default(),
            counters: Cell::default(),
            traffic: Traffic::default(),
            requests: Cell::new(0),
            begun: Cell::new(0),
            at_rest: Cell::new(false),
            stopping: Cell::new(false),
            drained: WaitList::default(),
            maintained: Cell::new(false),
            next_copy: Cell::new(0),
            table: TableNotes::default(),
            table_lock: RangeLock::new(reactor, 0),
            capacity: Cell::new(given_out),
            moving: Cell::new(false),
            moved: WaitList::default(),
            growing: Cell::new(false),
            address_lock: RangeLock::new(reactor, 63),
            open_reads: Cell::new(0),
            open_reads_done: WaitList::default(),
            region_lock: RangeLock::new(reactor, 0),
            lease: OnceCell::new(),
        })
    }

    /// Who is told from now on which drives have everything, before anything is acknowledged that
    /// others lack.
    pub fn set_witness(&self, tell: Tell) {
        self.members.witness.set(tell);
    }

    /// The witness remembers what it was told of this generation, or cannot.
    pub fn witness_has_heard(&self, generation: u64) {
        self.members.witness.has_heard(&self.reactor, generation);
    }

    pub fn uuid(&self) -> [u8; 16] {
        self.identity.uuid
    }

    pub fn name(&self) -> &str {
        &self.identity.name
    }

    pub fn layout(&self) -> Layout {
        self.identity.layout()
    }

    /// The shape of one stripe: not all have the same while members are being added.
    pub(crate) fn layout_of(&self, stripe: StripeIndex) -> Layout {
        self.identity.layout_of(stripe)
    }

    pub(crate) fn is_restriping(&self) -> bool {
        self.identity.restripe().is_some()
    }

    /// Whether nothing is in the stripe any more: all of it was moved.
    pub(crate) fn is_dead(&self, stripe: StripeIndex) -> bool {
        let of_old = |its: Restripe| bits(0..its.old(self.layout()).data);
        self.identity.restripe().map(of_old) == Some(self.identity.moved_away(stripe))
    }

    /// Whether `offset..offset + len` is inside the array and of whole sectors.
    pub(crate) fn contains(&self, offset: u64, len: u64) -> bool {
        self.layout().contains(offset, len) && offset + len <= self.capacity()
    }

    /// Cuts a byte range into pieces that each lie in one chunk, in order. Who does so relies on it
    /// only while holding the mode, or these addresses.
    pub(crate) fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = Piece> + use<> {
        let layout = self.layout();
        let restripe = self.identity.restripe();
        let moved = restripe.map_or(u64::MAX, |its| its.cursor * layout.stripe_bytes());
        let new = moved.clamp(offset, offset + len) - offset;
        let old = restripe.map_or(layout, |its| its.old(layout)).pieces(offset + new, len - new);
        let at = to_usize(new);
        layout.pieces(offset, new).chain(old.map(move |its| Piece { at: its.at + at, ..its }))
    }

    /// The range as a piece, if it lies in one chunk: what most requests do.
    pub(crate) fn one_piece(&self, offset: u64, len: u64) -> Option<Piece> {
        if self.is_restriping() {
            let mut pieces = self.pieces(offset, len);
            return pieces.next().filter(|piece| piece.len() as u64 == len);
        }
        self.layout().one_piece(offset, len)
    }

    /// The stripe that holds this byte now.
    pub fn stripe_at(&self, offset: u64) -> StripeIndex {
        let sector = self.pieces(offset / 512 * 512, 512).next();
        sector.expect("a sector is in one piece").stripe
    }

    /// Where in the array a row of a data chunk is, in bytes.
    pub fn offset_of(&self, stripe: StripeIndex, chunk: u8, row: u32) -> u64 {
        self.layout_of(stripe).array_offset(stripe, chunk, row)
    }

    /// Keeps what is at these addresses from being moved to other stripes.
    pub(crate) async fn hold_addresses(self: &Rc<Self>, offset: u64, len: u64) -> AddressGuard {
        if self.is_restriping() && len > 0 {
            let end = offset.saturating_add(len);
            return AddressGuard::Held(self.address_lock.lock(offset..end, Mode::Shared).await);
        }
        self.open_reads.set(self.open_reads.get() + 1);
        AddressGuard::Open(self.clone())
    }

    /// Waits for those who hold addresses since before members were added.
    pub(crate) async fn open_reads_ended(&self) {
        self.open_reads_done.until(&self.reactor, || self.open_reads.get() == 0).await;
    }

    /// Bytes for volumes.
    pub fn capacity(&self) -> u64 {
        self.capacity.get()
    }

    /// All of the layout may be given out: a superblock says durably that it is there.
    pub(crate) fn set_capacity(&self) {
        self.capacity.set(self.layout().capacity());
    }

    /// Bytes of data in one region: what is written or not as a whole.
    pub fn region_bytes(&self) -> u64 {
        u64::from(self.identity.region_stripes()) * self.stripe_bytes()
    }

    /// Bytes of data in one stripe.
    pub fn stripe_bytes(&self) -> u64 {
        self.layout().stripe_bytes()
    }

    /// A request from outside begins; not before it is sure that the array is still ours. Without a
    /// trusted member none does, though memory may have the answer: a write that failed with the
    /// last of them may come true with it, and nobody is to be told anything else meanwhile.
    pub(crate) async fn admit(self: &Rc<Self>) -> Result<RequestGuard, ArrayError> {
        self.sure().await;
        let request = self.begin()?;
        if self.members.are_untrusted() { Err(ArrayError::Lost) } else { Ok(request) }
    }

    /// A step of a job begins; not before it is sure that the array is still ours.
    pub(crate) async fn admit_step(self: &Rc<Self>) -> Result<RequestGuard, ArrayError> {
        self.sure().await;
        self.begin()
    }

    /// From now on (true) that is not waited for without end; or again (false).
    pub(crate) fn set_ending(&self, ending: bool) {
        if let Some(lease) = self.lease.get() {
            lease.set_ending(ending);
        }
    }

    /// Waits while it is unknown whether the array is still ours.
    pub(crate) async fn sure(&self) {
        if let Some(lease) = self.lease.get() {
            lease.sure().await;
        }
    }

    /// The host may have stood still since a request was admitted, and the array be another's: what
    /// was read is somebody else's then.
    pub(crate) async fn still_ours(&self) -> Result<(), ArrayError> {
        let Some(lease) = self.lease.get().filter(|lease| !lease.is_sure()) else { return Ok(()) };
        lease.sure().await;
        match lease.is_sure() {
            true => Ok(()),
            false if lease.is_lost() => Err(ArrayError::Stopped),
            // Nobody is left who could tell.
            false => Err(ArrayError::Lost),
        }
    }

    pub(crate) fn begin(self: &Rc<Self>) -> Result<RequestGuard, ArrayError> {
        if self.stopping.get() || self.lease.get().is_some_and(|lease| lease.is_lost()) {
            return Err(ArrayError::Stopped);
        }
        self.requests.set(self.requests.get() + 1);
        self.note_use(1);
        Ok(RequestGuard { array: self.clone() })
    }

    /// So many requests or steps of jobs were begun: it is not at rest.
    fn note_use(&self, begun: u64) {
        self.begun.set(self.begun.get() + begun);
        if self.at_rest.replace(false) {
            self.drained.wake_all(&self.reactor);
        }
    }

    /// Other reactors have read so much.
    pub(crate) fn used_elsewhere(&self, served: Served) {
        self.note_use(served.reads);
        self.count(|counters| {
            counters.reads += served.reads;
            counters.read_bytes += served.bytes;
        });
    }

    /// Whether a request would be admitted at once.
    pub(crate) fn is_open(&self) -> bool {
        let is_ours = self.lease.get().is_none_or(|lease| lease.is_sure());
        is_ours && !self.stopping.get() && !self.members.are_untrusted()
    }

    /// Part of a request that is under way goes on after it: also while the array is to stop.
    pub(crate) fn go_on(self: &Rc<Self>) -> RequestGuard {
        assert!(self.requests.get() > 0, "there is no request to go on with");
        self.requests.set(self.requests.get() + 1);
        RequestGuard { array: self.clone() }
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    /// Whether it is to stop, and no request is under way that may wait for the journal's room.
    pub(crate) fn is_over(&self) -> bool {
        self.stopping.get() && self.requests.get() == 0
    }

    /// Whether nothing is under way, jobs included: no request, and no row locked.
    pub fn is_quiet(&self) -> bool {
        self.requests.get() == 0 && self.locks.is_idle()
    }

    /// Refuses new requests and waits for those under way, jobs included.
    pub(crate) async fn drain(&self) {
        self.members.hide();
        self.stopping.set(true);
        self.drained.wake_all(&self.reactor);
        self.journal.note_change();
        let idle =
            || self.requests.get() == 0 && !self.maintained.get() && self.destagers.get() == 0;
        self.drained.until(&self.reactor, idle).await;
    }

    /// Waits, unless the array is to stop.
    pub(crate) async fn pause(&self, wait: Duration) {
        let deadline = self.reactor.now().after(wait);
        self.drained.until_or(&self.reactor, deadline, || self.stopping.get()).await;
    }

    /// Requests and steps of jobs that were ever begun.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.get()
    }

    /// Waits until something is begun, or the array is to stop; not longer than `wait`.
    pub(crate) async fn until_used(&self, wait: Duration) {
        let deadline = self.reactor.now().after(wait);
        self.at_rest.set(true);
        let over = || self.stopping.get() || !self.at_rest.get();
        self.drained.until_or(&self.reactor, deadline, over).await;
        self.at_rest.set(false);
    }

    /// Maintenance begins (true) or ends (false).
    pub(crate) fn set_maintained(&self, maintained: bool) {
        self.maintained.set(maintained);
        self.drained.wake_all(&self.reactor);
    }

    pub(crate) fn set_destagers(&self, destagers: u32) {
        self.destagers.set(destagers);
        self.drained.wake_all(&self.reactor);
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut ArrayCounters)) {
        let mut counters = self.counters.get();
        change(&mut counters);
        self.counters.set(counters);
    }

    /// Before the members of a stripe change: its region is dirty, durably, while the guard lives.
    pub(crate) async fn mark_dirty(
        &self,
        stripe: StripeIndex,
    ) -> Result<Option<RegionGuard>, ArrayError> {
        if !self.layout().is_redundant() {
            return Ok(None);
        }
        self.dirty.mark(self.dirty.map.region_of(stripe)).await.map(Some)
    }

    /// The same of what the journal covers: its region is known to be dirty while the guard lives.
    pub(crate) fn touch(&self, stripe: StripeIndex) -> RegionGuard {
        self.dirty.touch(self.dirty.map.region_of(stripe))
    }

    /// Keeps regions from being made larger, and so their numbers from becoming others. Whoever
    /// uses such a number over an await holds this, or the mode. Nobody takes it who holds a
    /// stripe, or has it already.
    pub(crate) async fn hold_regions(&self) -> RangeGuard {
        self.region_lock.lock(0..1, Mode::Shared).await
    }

    /// Writes every map anew to all members: for one that has just joined.
    pub(crate) async fn write_maps(&self) -> Result<(), ArrayError> {
        self.dirty.missed.write_all().await?;
        self.written.write_all().await?;
        self.bad.write_all().await?;
        // Last: what is clean is so because the others say what was missed.
        self.dirty.map.write_all().await
    }

    /// Locks rows of one stripe.
    pub(crate) async fn lock_rows(
        &self,
        stripe: StripeIndex,
        rows: std::ops::Range<u32>,
        mode: Mode,
    ) -> RangeGuard {
        self.locks.lock(self.row_keys(stripe, &rows), mode).await
    }

    /// Whether rows of one stripe could be locked without a wait.
    pub(crate) fn may_lock_now(
        &self,
        stripe: StripeIndex,
        rows: &std::ops::Range<u32>,
        mode: Mode,
    ) -> bool {
        self.locks.is_free(self.row_keys(stripe, rows), mode)
    }

    fn row_keys(&self, stripe: StripeIndex, rows: &std::ops::Range<u32>) -> std::ops::Range<u64> {
        let first = stripe.0 * u64::from(self.layout().chunk_bytes);
        first + u64::from(rows.start)..first + u64::from(rows.end)
    }

    /// Locks all rows of one stripe.
    pub(crate) async fn lock_stripe(&self, stripe: StripeIndex, mode: Mode) -> RangeGuard {
        self.lock_rows(stripe, 0..self.layout().chunk_bytes, mode).await
    }

    /// Locks stripes in ascending order, which is the order of all who hold several.
    pub(crate) async fn lock_stripes(
        &self,
        stripes: std::ops::Range<u64>,
        mode: Mode,
    ) -> Vec<RangeGuard> {
        let mut guards = Vec::new();
        for stripe in stripes {
            guards.push(self.lock_stripe(StripeIndex(stripe), mode).await);
        }
        guards
    }

    pub fn state(&self) -> ArrayState {
        if self.members.all_trusted() {
            ArrayState::Optimal
        } else if self.members.serves_all() {
            ArrayState::Degraded
        } else {
            ArrayState::Failed
        }
    }

    /// Whether some stripes wait for resync, or have bad blocks: reads of those may fail.
    pub fn has_doubts(&self) -> bool {
        self.unsynced.count() > 0 || !self.bad.is_empty()
    }

    pub fn status(&self) -> ArrayStatus {
        self.hear_readers();
        let layout = self.layout();
        let member = |(index, member): (usize, &Member)| MemberStatus {
            index: MemberIndex::new(index),
            drive_uuid: member.drive_uuid,
            drive: member.drive.clone(),
            state: member.state,
            rebuilt_stripes: self.members.rebuilt(member),
            catches_up: member.catches_up,
            is_needed: self.members.is_needed(MemberIndex::new(index)),
        };
        let now = self.reactor.now();
        let traffic = self.traffic.report(now);
        ArrayStatus {
            uuid: self.identity.uuid,
            name: self.identity.name.clone(),
            level: layout.level,
            copies: layout.copies,
            groups: layout.groups,
            data_chunks: layout.data,
            parity_chunks: layout.parity,
            chunk_bytes: layout.chunk_bytes,
            stripes: layout.stripes,
            capacity: self.capacity(),
            generation: self.members.durable_generation(),
            epoch: self.lease.get().map_or(0, |lease| lease.claim().epoch()),
            state: self.state(),
            lost_to: self.lease.get().and_then(|lease| lease.lost_to()),
            policy: self.policy(),
            integrity: self.identity.integrity,
            settings: self.settings(),
            needs: self.member_needs(),
            journal: self.journal.status(),
            replayed: self.jobs.replayed.get(),
            members: self.members.list().iter().enumerate().map(member).collect(),
            regions: RegionMap::region_count(layout.stripes, self.identity.region_stripes()),
            written_regions: self.written.count(),
            dirty_regions: self.dirty.map.count(),
            unsynced_stripes: self.unsynced.count(),
            bad: self.bad.ranges(),
            resync: self.jobs.resync(now),
            rebuild: self.jobs.rebuild(now),
            rebuild_error: self.jobs.rebuild_error(),
            restripe: self.jobs.restripe(now),
            restripe_error: self.jobs.restripe_error(),
            scrub: self.jobs.scrub(now),
            worked: self.jobs.worked(),
            counters: self.counters.get().with(&traffic),
            traffic,
        }
    }

    pub fn settings(&self) -> Settings {
        self.members.settings()
    }

    /// Changes what an operator can set; durably, while the array serves.
    pub async fn set_settings(self: &Rc<Self>, change: SettingsChange) -> Result<(), ChangeError> {
        let _request = self.begin()?;
        let tell = |members: &Members| {
            let settings = members.settings().changed(change, self.sector_bytes);
            members.set_settings(settings.map_err(ChangeError::Spec)?);
            Ok(())
        };
        self.members.tell_all(tell).await
    }

    /// The member's drive was pulled: it is used no longer. Returns at once.
    ///
    /// It stays trusted until a write is acknowledged that it has missed, unless it went with
    /// something in its cache; so a drive that comes back before that needs no rebuild.
    pub fn pull_member(self: &Rc<Self>, index: MemberIndex) -> Result<(), ChangeError> {
        let drive = self.member(index)?.drive;
        self.hide();
        drive.iter().for_each(|drive| drive.pull());
        Ok(())
    }

    pub(crate) fn member(&self, index: MemberIndex) -> Result<Member, ChangeError> {
        let list = self.members.list();
        list.get(index.index()).cloned().ok_or(ChangeError::NoMember(index))
    }
}
