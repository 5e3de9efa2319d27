//! The journal: writes are acknowledged once they stand in it, and are put in place later.
//!
//! A batch holds what many requests of one moment have to say (group commit): new bytes, sums of
//! parity (or parity) that is about to be stored with bytes of earlier batches, stripes that become
//! zero. It is written to as many members of one group as may be lost there, plus one; a large one
//! in shares to all of them (`parts.rs`). What is acknowledged and not yet in place is also kept in
//! memory (`pending`), so that reads see it.
//!
//! Batches stand in a ring at the same place on every member. Invariants:
//! - `journal_from` is in the superblock only while every write under way has a batch, and no
//!   stripe waits for resync; so a crash then leaves nothing that the batches do not cure;
//! - a batch's space is used again only after all it holds is durable in place, and after
//!   `journal_from` has durably moved past it, in the order of sequence (but for the last ones, if
//!   they are void: see `void.rs`); so what is found in the
//!   ring from `journal_from` on are always the newest batches, and of two that name the same rows
//!   the older is never found without the newer if the newer was ever stored in place;
//! - a batch that a superblock names keeps its place until another superblock is durable, also once
//!   it has left the ring, so that a start misses it if somebody writes over it (`named.rs`);
//! - batches are completed in the order of sequence, so that `completed` says what `pending` holds;
//! - sequences grow over all starts of the array, so no old batch looks like a new one: a start
//!   begins a new era, and a later one is durably named before the ring is used again;
//! - data is only let into the ring while there is room left for the parity of all that is pending,
//!   so that it never jams.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use ashlar_format::array_superblock::ERA_SEQUENCES_LOG2;
use ashlar_format::journal_batch::{
    Division, ENTRIES_MAX, EntryKind, JournalBatch, PAYLOAD_BYTES_MAX, ParitySum, parity_bytes_max,
    ring_bytes, zeroed_stripes_max,
};
use ashlar_format::units::{MemberIndex, StripeIndex, to_usize};
use ashlar_reactor::backend::Instant;
use ashlar_reactor::buffer::{Buffer, Buffers, memory_of};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use ashlar_reactor::wait_list::WaitList;

use crate::bad_blocks::BadBlocks;
use crate::dirty::Dirty;
use crate::error::ArrayError;
use crate::integrity::Integrity;
use crate::members::{Identity, Members};
use crate::parity::Kernels;
use crate::pending::{Hold, Patch, Pending, PendingSize};
use crate::status::JournalStatus;

mod entry;
mod named;
mod parts;
mod room;
mod target;
mod void;
mod waiting;
use entry::payload_bytes;
pub(crate) use entry::{Entries, Entry, NewData};
use named::{Candidate, Named};
pub(crate) use parts::{Parts, unite};
use target::Target;
pub(crate) use void::Void;
use waiting::Waiting;

/// Small batches that are written at the same time: while they are, others gather for the next.
const SMALL_COMMITS_MAX: u32 = 4;
/// This part of the ring is given back at once, unless somebody waits.
const RELEASED_AT_ONCE: u64 = 16;
/// Payload that is not divided among several batches.
const BATCH_BYTES_MIN: u64 = 64 << 10;
/// A share of less is not worth an operation.
const SHARE_BYTES_MIN: u64 = 8 << 10;
const SHARE_BYTES_WANTED: u64 = 32 << 10;
/// What is pending is kept in memory: at most so many times the bytes of a member's ring.
const PENDING_PER_RING: u64 = 2;
/// What the entries of one batch take there, at most: some a page each, the others less than twice
/// their bytes.
const BATCH_MEMORY_MAX: u64 = 2 * PAYLOAD_BYTES_MAX as u64 + (ENTRIES_MAX * memory_of(1)) as u64;
/// Batches that are written at the same time.
const COMMITS_MAX: u32 = 8;
const HEADER_BYTES: u64 = JournalBatch::BYTES;

/// Rows to be stored at one position.
#[derive(Clone)]
pub(crate) struct Slice {
    pub(crate) position: u8,
    pub(crate) row: u32,
    pub(crate) bytes: Buffer,
}

/// How far a batch may fill the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// So much data: leaves room for its parity, and for that of all that is pending.
    New(PendingSize),
    /// Leaves room for parity of the oldest batch.
    Parity,
    /// Parity of the oldest batch: may use all there is.
    Oldest,
}

/// A batch in the ring. While somebody else has its `hold`, something of it is not in place.
pub(crate) struct Batch {
    pub(crate) sequence: u64,
    pub(crate) at: u64,
    /// On each member.
    pub(crate) len: u64,
    pub(crate) division: Option<Division>,
    pub(crate) hold: Hold,
    /// Whose parity it tells of.
    pub(crate) parity_of: Vec<StripeIndex>,
    pub(crate) void: Void,
}

impl Batch {
    fn payload_bytes_max(&self) -> u64 {
        self.len * self.division.map_or(1, |its| u64::from(its.data))
    }
}

pub(crate) struct Journal {
    reactor: Reactor,
    identity: Rc<Identity>,
    pub(crate) members: Rc<Members>,
    dirty: Rc<Dirty>,
    bad: Rc<BadBlocks>,
    integrity: Option<Rc<Integrity>>,
    kernels: Kernels,
    pub(crate) parity_sum: ParitySum,
    /// Stale members, as bits, whose rings the start has looked through.
    pub(crate) asked_stale: Cell<u64>,
    pub(crate) pending: RefCell<Pending>,
    /// Oldest first.
    pub(crate) ring: RefCell<VecDeque<Batch>>,
    queue: RefCell<VecDeque<Waiting>>,
    /// Payload of those in the queue.
    queued_bytes: Cell<u64>,
    /// Of batches that have a place in the ring, and are not pending yet.
    entered: Cell<PendingSize>,
    commits: Cell<u32>,
    /// One of them has not taken its batch yet: nobody else takes any. While the queue is not
    /// empty, one gathers, or as many as may be are under way.
    gathering: Cell<bool>,
    next_sequence: Cell<u64>,
    /// Sequences below are written, or failed.
    completed: Cell<u64>,
    /// Sequences below are durable, or failed.
    durable: Cell<u64>,
    flushes: Cell<u64>,
    /// Stripes that were stored in place since the last flush began, and the flushes before that.
    stored: RefCell<BTreeMap<u64, u64>>,
    releasing: Cell<bool>,
    /// The next batch has no room yet.
    waiting_for_room: Cell<bool>,
    /// Why the oldest batches cannot be put in place, while that is so.
    stuck: Cell<Option<ArrayError>>,
    /// So often something came that they may have waited for.
    hopes: Cell<u64>,
    /// Counts everything that somebody may wait for.
    changes: Cell<u64>,
    pub(crate) changed: WaitList,
    /// Of a start that has put nothing in place yet: the tail that it found.
    found_tail: Cell<Option<u64>>,
    /// Batches that are void, and may be whole on members that were away then.
    half_void: RefCell<Vec<u64>>,
    one_by_one_until: Cell<Instant>,
    /// None enters before this one is completed.
    last_alone: Cell<Option<u64>>,
    /// Batches that members are being told of, as often as that is.
    voids_under_way: RefCell<Vec<u64>>,
    /// The newest batch that is written, and the newest that is durable.
    newest: Cell<Option<Candidate>>,
    newest_durable: Cell<Option<Candidate>>,
    /// Oldest first: the last one is the newest to be named.
    named: RefCell<VecDeque<Named>>,
    /// There would be room, were it not for those.
    named_takes_room: Cell<bool>,
}

impl Journal {
    pub(crate) fn new(
        reactor: &Reactor,
        identity: Rc<Identity>,
        members: Rc<Members>,
        dirty: Rc<Dirty>,
        bad: Rc<BadBlocks>,
        integrity: Option<Rc<Integrity>>,
    ) -> Rc<Journal> {
        let pending = Pending::none(identity.layout().stripes);
        let parity_sum = ParitySum::of_array(&identity.uuid);
        Rc::new(Journal {
            reactor: reactor.clone(),
            identity,
            members,
            dirty,
            bad,
            integrity,
            kernels: Kernels::detect(),
            parity_sum,
            asked_stale: Cell::new(0),
            pending: RefCell::new(pending),
            ring: RefCell::default(),
            queue: RefCell::default(),
            queued_bytes: Cell::new(0),
            entered: Cell::default(),
            commits: Cell::new(0),
            gathering: Cell::new(false),
            next_sequence: Cell::new(1),
            completed: Cell::new(1),
            durable: Cell::new(1),
            flushes: Cell::new(0),
            stored: RefCell::default(),
            releasing: Cell::new(false),
            waiting_for_room: Cell::new(false),
            stuck: Cell::new(None),
            hopes: Cell::new(0),
            changes: Cell::new(0),
            changed: WaitList::default(),
            found_tail: Cell::default(),
            half_void: RefCell::default(),
            one_by_one_until: Cell::new(reactor.now()),
            last_alone: Cell::default(),
            voids_under_way: RefCell::default(),
            newest: Cell::default(),
            newest_durable: Cell::default(),
            named: RefCell::default(),
            named_takes_room: Cell::default(),
        })
    }

    /// Makes entries part of the next batch, all of the same one, and waits until it is written
    /// (not flushed). Returns its sequence. Data is pending from then on.
    pub(crate) async fn append(self: &Rc<Self>, entries: Entries) -> Result<u64, ArrayError> {
        let (waiting, answer) = Waiting::with(entries);
        let payload = waiting.size.bytes;
        assert!(waiting.entries.len() <= ENTRIES_MAX && payload <= u64::from(PAYLOAD_BYTES_MAX));
        self.queue.borrow_mut().push_back(waiting);
        self.queued_bytes.set(self.queued_bytes.get() + payload);
        self.commit_more();
        answer.wait(&self.reactor).await
    }

    /// Lets a batch be written of what waits, unless one is about to be, or enough are.
    fn commit_more(self: &Rc<Self>) {
        let is_large = self.queued_bytes.get() >= self.batch_bytes();
        let most = if is_large { COMMITS_MAX } else { SMALL_COMMITS_MAX };
        let is_due = !self.queue.borrow().is_empty() && self.commits.get() < most;
        if is_due && !self.gathering.replace(true) {
            self.commits.set(self.commits.get() + 1);
            self.reactor.spawn(self.clone().commit());
        }
    }

    /// Writes batches until nobody waits, or another gathers what does. Whoever spawns it has
    /// counted it, and has said that it gathers.
    async fn commit(self: Rc<Self>) {
        loop {
            self.gather().await;
            let room = self.room_for_next().await;
            let seen = self.changes();
            let mut taken = self.take_batch();
            self.gathering.set(false);
            self.commit_more();
            let written = match room {
                Ok(()) => self.write_taken(&mut taken).await,
                Err(error) => Some(Err(error)),
            };
            match written {
                Some(written) => {
                    taken.iter().for_each(|its| its.answer.give(&self.reactor, written));
                }
                None => {
                    // Another batch took the room meanwhile.
                    self.put_back(taken);
                    self.changed_since(seen).await;
                }
            }
            if self.queue.borrow().is_empty() || self.gathering.replace(true) {
                break;
            }
        }
        self.commits.set(self.commits.get() - 1);
    }

    /// Waits while those that are ready come one after the other, as from a queue of which each
    /// request wakes the next: what they write costs little more in one batch than alone.
    async fn gather(&self) {
        let mut seen = 0;
        loop {
            let waiting = self.queue.borrow().len();
            let is_full = self.queued_bytes.get() >= self.batch_bytes() || waiting >= ENTRIES_MAX;
            if is_full || waiting == seen {
                break;
            }
            seen = waiting;
            self.reactor.yield_now().await;
        }
    }

    /// Writes one batch of all their entries; `None` if the ring has no room for it.
    async fn write_taken(&self, taken: &mut [Waiting]) -> Option<Result<u64, ArrayError>> {
        if !self.members.serves_all() {
            // It would be void, and its place gone until all before it is in place.
            return Some(Err(ArrayError::Lost));
        }
        let sizes = taken.iter().map(|waiting| waiting.size);
        let size = sizes.fold(PendingSize::default(), PendingSize::and);
        let (payload, class) = (size.bytes, Class::New(size));
        if let Err(error) = self.may_enter(class).await {
            return Some(Err(error));
        }
        let (sequence, hold) = self.enter(payload, class, Vec::new())?;
        let entries = taken.iter_mut().flat_map(|waiting| std::mem::take(&mut waiting.entries));
        let entries: Vec<Entry> = entries.collect();
        self.entered.set(self.entered.get().and(size));
        let written = self.write(&entries, sequence, hold).await;
        self.entered.set(self.entered.get().less(size));
        Some(written)
    }

    /// Those at the front of the queue for one batch: not all, so that others can be written at the
    /// same time, but enough for shares that are worth it.
    fn take_batch(&self) -> Vec<Waiting> {
        let mut queue = self.queue.borrow_mut();
        let part = self.batch_bytes();
        let (mut taken, mut count, mut payload) = (Vec::new(), 0, 0);
        while let Some(next) = queue.front() {
            let bytes = next.size.bytes;
            count += next.entries.len();
            let too_much = payload > 0 && payload + bytes > part;
            if too_much || count > ENTRIES_MAX {
                break;
            }
            payload += bytes;
            taken.extend(queue.pop_front());
        }
        self.queued_bytes.set(self.queued_bytes.get() - payload);
        taken
    }

    /// Payload of a batch of what waits.
    fn batch_bytes(&self) -> u64 {
        let most = u64::from(PAYLOAD_BYTES_MAX);
        let least = u64::from(self.identity.layout().data) * SHARE_BYTES_WANTED;
        let part = self.queued_bytes.get() / u64::from(SMALL_COMMITS_MAX);
        part.clamp(least.clamp(BATCH_BYTES_MIN, most), most)
    }

    /// Puts back what was taken from the front.
    fn put_back(&self, taken: Vec<Waiting>) {
        let bytes: u64 = taken.iter().map(|waiting| waiting.size.bytes).sum();
        self.queued_bytes.set(self.queued_bytes.get() + bytes);
        taken.into_iter().rev().for_each(|waiting| self.queue.borrow_mut().push_front(waiting));
    }

    /// Waits until the largest batch fits.
    async fn room_for_next(&self) -> Result<(), ArrayError> {
        let payload = u64::from(PAYLOAD_BYTES_MAX);
        let largest = PendingSize { bytes: payload, memory: BATCH_MEMORY_MAX };
        let has_room = || self.find_room(HEADER_BYTES + payload, Class::New(largest)).is_some();
        if has_room() {
            return Ok(());
        }
        self.waiting_for_room.set(true);
        self.note_change();
        let go_on = || has_room() || self.refusal().is_some();
        self.changed.until(&self.reactor, go_on).await;
        self.waiting_for_room.set(false);
        match self.refusal() {
            Some(error) if !has_room() => Err(error),
            Some(_) | None => Ok(()),
        }
    }

    /// Writes a batch of its own at once; `None` if the ring has no room for it. Not flushed.
    pub(crate) async fn append_now(
        self: &Rc<Self>,
        entries: &[Entry],
        class: Class,
    ) -> Option<Result<(u64, Hold), ArrayError>> {
        if !self.members.serves_all() {
            // As above; and there may never be room.
            return Some(Err(ArrayError::Lost));
        }
        if let Err(error) = self.may_enter(class).await {
            return Some(Err(error));
        }
        let mut parity_of: Vec<_> = entries.iter().filter_map(Entry::parity_of).collect();
        parity_of.dedup();
        let (sequence, hold) = self.enter(payload_bytes(entries), class, parity_of)?;
        if class == Class::Oldest {
            self.last_alone.set(Some(sequence));
        }
        let written = self.write(entries, sequence, hold.clone()).await;
        Some(written.map(|sequence| (sequence, hold)))
    }

    /// Takes a place in the ring.
    fn enter(
        &self,
        payload: u64,
        class: Class,
        parity_of: Vec<StripeIndex>,
    ) -> Option<(u64, Hold)> {
        let division = self.division(payload);
        let payload = u32::try_from(payload).expect("asserted to be small");
        let len = ring_bytes(payload, division);
        let at = self.find_room(len, class)?;
        let sequence = self.next_sequence.get();
        self.next_sequence.set(sequence + 1);
        let (hold, void) = (Hold::default(), Void::No);
        let batch = Batch { sequence, at, len, division, hold: hold.clone(), parity_of, void };
        self.ring.borrow_mut().push_back(batch);
        Some((sequence, hold))
    }

    /// How a batch with so much payload is divided; `None`: not at all.
    fn division(&self, payload: u64) -> Option<Division> {
        let layout = self.identity.layout();
        let division = Division { data: layout.data, parity: layout.parity };
        let is_much = payload >= u64::from(division.data) * SHARE_BYTES_MIN;
        let divides = is_much && division.data > 1 && division.parity > 0;
        // With a share to spare: else one block of a ring that cannot be read would cost a batch.
        let is_spare = || self.targets(0, 0, Some(division)).len() > division.data.into();
        (divides && is_spare()).then_some(division)
    }

    /// Writes a batch to its members, waits for those before it, and makes its data pending.
    async fn write(&self, entries: &[Entry], sequence: u64, hold: Hold) -> Result<u64, ArrayError> {
        let written = self.write_parts(entries, sequence).await;
        if let Err(error) = written {
            if error == ArrayError::NoSpace {
                self.met_no_space();
            }
            self.void(sequence).await;
        }
        self.changed.until(&self.reactor, || self.completed.get() == sequence).await;
        self.completed.set(sequence + 1);
        if let Ok(changes) = written {
            self.take_over(entries, sequence, &hold);
            self.newest.set(Some(Candidate { sequence, changes }));
        }
        self.note_change();
        written.map(|_| sequence)
    }

    fn take_over(&self, entries: &[Entry], sequence: u64, hold: &Hold) {
        let mut pending = self.pending.borrow_mut();
        for entry in entries {
            if let Entry::Data { stripe, chunk, row, bytes } = entry {
                let end = row + u32::try_from(bytes.len()).expect("at most a chunk");
                let (bytes, hold) = (bytes.clone(), hold.clone());
                let patch = Patch { chunk: *chunk, rows: *row..end, bytes, sequence, hold };
                pending.insert(*stripe, patch);
            }
        }
    }

    /// Returns how often members had changed before it was written to those that have it.
    async fn write_parts(&self, entries: &[Entry], sequence: u64) -> Result<u64, ArrayError> {
        let (at, division) = self.place_of(sequence).expect("held, so it is in the ring");
        let parts = self.compose(entries, sequence, division);
        loop {
            // A member that answers no more, but is believed, could come back without the others
            // and without this batch.
            self.members.fence_absent().await?;
            let changes = self.members.trust_changes();
            let targets = self.targets(sequence, at + parts.ring_bytes(), division);
            if targets.is_empty() {
                return Err(ArrayError::Lost);
            }
            let writes = targets.iter().map(|target| parts.write(target, at, sequence));
            let results = join_all(writes).await;
            if results.iter().all(Result::is_ok) {
                return Ok(changes);
            }
            let asked = || targets.iter().map(|its| (its.member, &its.drive));
            if !self.members.is_any_other(asked(), &results) {
                // A member that cannot take batches cannot take writes either.
                let members: Vec<MemberIndex> = asked().map(|(index, _)| index).collect();
                self.members.fence_failed(&members, &results).await?;
            }
        }
    }

    /// Whether a start would look for the parity of the stripe that the ring tells of.
    pub(crate) fn tells_parity_of(&self, stripe: StripeIndex) -> bool {
        self.ring.borrow().iter().any(|batch| batch.parity_of.contains(&stripe))
    }

    /// Where a batch stands in the ring, and how it is divided.
    fn place_of(&self, sequence: u64) -> Option<(u64, Option<Division>)> {
        let ring = self.ring.borrow();
        let batch = ring.iter().rfind(|batch| batch.sequence == sequence)?;
        Some((batch.at, batch.division))
    }

    fn compose(&self, entries: &[Entry], sequence: u64, division: Option<Division>) -> Parts {
        let mut batch = Box::new(JournalBatch::blank());
        batch.array = self.identity.uuid;
        let oldest = || self.ring.borrow().front().map_or(sequence, |batch| batch.sequence);
        batch.tail_sequence = self.found_tail.get().unwrap_or_else(oldest).into();
        let mut payload = Buffers::default();
        let zeroed_max = zeroed_stripes_max(self.identity.region_stripes());
        for (stored, entry) in batch.entries.iter_mut().zip(entries) {
            *stored = entry.stored();
            // After a crash a longer one would be passed over.
            assert!(stored.kind() != Ok(EntryKind::Zeroes) || stored.len.get() <= zeroed_max);
            entry.payload().into_iter().for_each(|bytes| payload.push(bytes.clone()));
        }
        batch.entry_count = u32::try_from(entries.len()).expect("asserted to be few").into();
        batch.payload_bytes = u32::try_from(payload.len()).expect("asserted to be small").into();
        batch.set_division(division);
        Parts::new(&self.reactor, self.kernels, batch, &payload)
    }

    /// Members for a batch that ends at `end` of the ring: all of one group, so that if too many of
    /// them are lost, so is the group. Which group, and which of it have copies, turns with the
    /// sequence. None: no group has enough members for a divided batch.
    pub(crate) fn targets(
        &self,
        sequence: u64,
        end: u64,
        division: Option<Division>,
    ) -> Vec<Target> {
        let layout = self.identity.layout();
        let list = self.members.list();
        let group = usize::from(layout.set_members());
        let groups = list.len() / group;
        let turned = to_usize(sequence % groups as u64);
        for group_index in (0..groups).map(|i| (i + turned) % groups) {
            let members = group_index * group..(group_index + 1) * group;
            let fit = members.filter_map(|index| Target::of(&list, index, group, end));
            let mut fit: Vec<Target> = fit.collect();
            match division {
                Some(division) => {
                    fit.retain(|target| target.share < division.shares());
                    if fit.len() >= division.data.into() {
                        return fit;
                    }
                }
                None if fit.is_empty() => {}
                None => {
                    let first = to_usize(sequence / groups as u64 % fit.len() as u64);
                    let copies = usize::from(layout.tolerated()) + 1;
                    fit.rotate_left(first);
                    fit.truncate(copies);
                    return fit;
                }
            }
        }
        Vec::new()
    }

    pub(crate) fn status(&self) -> JournalStatus {
        let bytes = self.ring_bytes();
        let list = self.members.list();
        let keepers = list.iter().filter(|its| its.keeps_metadata().is_some());
        let pending = self.pending.borrow().size();
        JournalStatus {
            bytes,
            used_bytes: self.used_bytes(),
            pending_bytes: pending.bytes,
            pending_memory_bytes: pending.memory,
            pending_memory_bytes_max: PENDING_PER_RING * bytes,
            crash_read_bytes: keepers.map(|its| its.areas.journal.len).sum(),
            crash_replayed_bytes: self.ring.borrow().iter().map(Batch::payload_bytes_max).sum(),
        }
    }

    /// No member is left to have a batch.
    fn is_nowhere(&self) -> bool {
        self.members.list().iter().all(|member| member.keeps_metadata().is_none())
    }

    /// Whether the ring should be emptied rather sooner than later: half of it is used, or kept for
    /// parity, or half of what may be pending is.
    pub(crate) fn is_filling(&self) -> bool {
        let (pending, ring) = (self.pending.borrow().size(), self.ring_bytes());
        let kept = parity_bytes_max(self.identity.layout().parity, pending.bytes);
        let is_half_full = self.used_bytes() + kept > ring / 2;
        let takes_half = pending.memory > PENDING_PER_RING * ring / 2;
        self.waiting_for_room.get() || is_half_full || takes_half
    }

    /// While the ring fills: data of batches before this one should be put in place. The younger
    /// half is left alone while there is room: a stripe that a log is about to fill would be read.
    pub(crate) fn in_the_way(&self) -> Option<u64> {
        if self.is_short() {
            return Some(u64::MAX);
        }
        let ring = self.ring.borrow();
        let middle = || ring.get(ring.len() / 2).map(|batch| batch.sequence);
        (self.is_filling()).then(middle).flatten()
    }

    pub(crate) fn changes(&self) -> u64 {
        self.changes.get()
    }

    /// Lets everyone who waits for a change look again.
    pub(crate) fn note_change(&self) {
        self.changes.set(self.changes.get() + 1);
        self.changed.wake_all(&self.reactor);
    }

    /// Waits until something has changed since `changes` was `seen`.
    pub(crate) async fn changed_since(&self, seen: u64) {
        self.changed.until(&self.reactor, || self.changes.get() != seen).await;
    }

    /// Sequence of the oldest batch in the ring.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.ring.borrow().front().map(|batch| batch.sequence)
    }

    /// Whether it is the hold of the oldest batch.
    pub(crate) fn is_oldest(&self, hold: &Hold) -> bool {
        self.ring.borrow().front().is_some_and(|batch| Rc::ptr_eq(&batch.hold, hold))
    }

    /// Why there will be no room, however long somebody waits; `None` if there may be.
    pub(crate) fn refusal(&self) -> Option<ArrayError> {
        self.stuck.get().or(self.is_nowhere().then_some(ArrayError::Lost))
    }

    /// What could not be put in place may be by now: who needs room for more can wait.
    pub(crate) fn has_hope(&self) {
        self.hopes.set(self.hopes.get() + 1);
        self.set_stuck(None);
    }

    pub(crate) fn hopes(&self) -> u64 {
        self.hopes.get()
    }

    /// The oldest batches cannot be put in place, or can again (`None`): as was tried since there
    /// were so many `hopes`.
    pub(crate) fn found_stuck(&self, error: Option<ArrayError>, hopes: u64) {
        if error.is_none() || self.hopes.get() == hopes {
            self.set_stuck(error);
        }
    }

    fn set_stuck(&self, error: Option<ArrayError>) {
        if self.stuck.replace(error) != error {
            self.note_change();
        }
    }

    /// Makes everything that was acknowledged before durable.
    pub(crate) async fn flush(&self) -> Result<(), ArrayError> {
        let (completed, newest) = (self.completed.get(), self.newest.get());
        let flushes = self.flushes.get();
        self.flushes.set(flushes + 1);
        self.members.flush().await?;
        self.durable.set(completed.max(self.durable.get()));
        self.newest_durable.set(newest.max(self.newest_durable.get()));
        self.stored.borrow_mut().retain(|_, before| *before > flushes);
        Ok(())
    }

    /// Something was stored in place in this stripe.
    pub(crate) fn note_stored(&self, stripe: StripeIndex) {
        self.stored.borrow_mut().insert(stripe.0, self.flushes.get());
    }

    /// Whether all that was stored in place in this stripe is durable.
    pub(crate) fn is_flushed(&self, stripe: StripeIndex) -> bool {
        !self.stored.borrow().contains_key(&stripe.0)
    }

    /// Sequences below this one are durable.
    pub(crate) fn durable(&self) -> u64 {
        self.durable.get()
    }

    /// Sequences below this one are completed.
    pub(crate) fn completed(&self) -> u64 {
        self.completed.get()
    }

    /// Gives the space of the oldest batches back, if all they hold is in place: makes that
    /// durable, and says so in the superblock.
    pub(crate) async fn release(&self) -> Result<(), ArrayError> {
        // What was stored since the one that runs began is not seen by it.
        while self.releasing.get() {
            self.changed.until(&self.reactor, || !self.releasing.get()).await;
        }
        self.releasing.set(true);
        let result = self.release_stored().await;
        self.releasing.set(false);
        self.changed.wake_all(&self.reactor);
        result
    }

    async fn release_stored(&self) -> Result<(), ArrayError> {
        let Some(stored) = self.last_in_place() else { return self.make_way().await };
        let _joins = self.members.hold_joins().await;
        if !self.members.serves_all() {
            // Who is away, and could be started without those that are here, would not know of it.
            return Err(ArrayError::Lost);
        }
        if let Some(integrity) = &self.integrity {
            integrity.write_back().await?;
        }
        self.flush().await?;
        self.dirty.before_release().await?;
        self.bad.save().await?;
        // Durably forgotten before one of them is overwritten: a crash must not find the older of
        // two batches for one place without the newer.
        let kept = self.ring.borrow().iter().map(|batch| batch.sequence).find(|s| *s > stored);
        if self.members.journal_from() != 0 {
            self.members.set_journal_from(kept.unwrap_or(self.next_sequence.get()));
            self.name_newest();
        }
        // What the ring has room for until the next release is less than an era.
        self.members.set_era(self.next_sequence.get() >> ERA_SEQUENCES_LOG2);
        self.members.settled().await?;
        // Members may be told of some since, and write where another would stand.
        let is_told = || !self.is_any_void_under_way(stored);
        self.changed.until(&self.reactor, is_told).await;
        let mut ring = self.ring.borrow_mut();
        let left = ring.iter().take_while(|batch| batch.sequence <= stored).count();
        let was_cramped = ring.drain(..left).any(|batch| batch.void == Void::Cramped);
        drop(ring);
        self.named_takes_room.set(false);
        self.forget_half_void();
        if was_cramped {
            self.has_hope();
        }
        self.note_change();
        Ok(())
    }

    /// The last batch of those at the front that are in place.
    fn last_in_place(&self) -> Option<u64> {
        self.in_place().0
    }

    /// The same, and the bytes of them all.
    fn in_place(&self) -> (Option<u64>, u64) {
        let ring = self.ring.borrow();
        let in_place = |b: &&Batch| {
            let is_done = Rc::strong_count(&b.hold) == 1 && b.sequence < self.completed.get();
            is_done && !self.voids_under_way.borrow().contains(&b.sequence)
        };
        let all = ring.iter().take_while(in_place);
        all.fold((None, 0), |(_, bytes), batch| (Some(batch.sequence), bytes + batch.len))
    }

    /// Whether so much is in place that it is worth a superblock to give it back.
    pub(crate) fn is_worth_release(&self) -> bool {
        !self.releasing.get() && self.in_place().1 > self.ring_bytes() / RELEASED_AT_ONCE
    }

    /// Whether batches should be released that are in place: somebody is short of their room, or
    /// there is nothing else to do.
    pub(crate) fn wants_release(&self) -> bool {
        let is_due = self.is_short() || self.pending.borrow().is_empty();
        self.named_takes_room.get() || is_due && self.last_in_place().is_some()
    }

    /// Somebody waits for room, or would be told that there is none.
    fn is_short(&self) -> bool {
        self.waiting_for_room.get() || self.stuck.get().is_some()
    }

    /// Sequences of this start of the array are larger than those of any before, which may still
    /// stand in the ring. `era`: the first one of this start, durably.
    pub(crate) fn begin_sequences(&self, era: u64) {
        let first = era << ERA_SEQUENCES_LOG2;
        assert!(self.next_sequence.get() <= first && self.ring.borrow().is_empty());
        self.next_sequence.set(first);
        self.completed.set(first);
        self.durable.set(first);
    }

    /// The sequence of the next batch.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.next_sequence.get()
    }
}

#[cfg(test)]
mod tests;
