//! The stripe journal: closes the write hole of a degraded parity stripe.
//!
//! With a member missing, data and parity of a stripe must change together: a crash between them
//! would change what the missing blocks work out to. So every write of a degraded parity array
//! first becomes a record, durable on as many members as may still be lost, plus one; then it is
//! stored in place. After a crash the records are stored again.
//!
//! Records stand in a ring at the same place on every member. Invariants:
//! - `journal_from` is in the superblock only while every write under way has a record, and no
//!   stripe waits for resync; so a crash then leaves nothing that the records do not cure;
//! - a record's space is used again only after what it stored is durable in place, and after
//!   `journal_from` has moved past it, in the order of sequence; so what is found in the ring from
//!   `journal_from` on is always the newest records, without a gap;
//! - sequences grow over all starts of the array, so no old record looks like a new one.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_format::journal_record::{JournalRecord, PAYLOAD_BYTES_MAX, StoredSlice};
use ashlar_format::record::{self, payload_checksum};
use ashlar_format::units::{Area, MemberIndex, StripeIndex, to_usize};
use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use ashlar_reactor::wait_list::WaitList;
use zerocopy::IntoBytes;

use crate::error::ArrayError;
use crate::label;
use crate::members::{Identity, Members};
use crate::unsynced::Unsynced;

/// Sequences that one start of an array has for its records.
const SEQUENCES_PER_GENERATION_LOG2: u32 = 32;

/// Bytes of the ring that are read at once after a crash.
const READ_BYTES: u64 = 512 << 10;

/// Rows to be stored at one position.
#[derive(Clone)]
pub(crate) struct Slice {
    pub(crate) position: u8,
    pub(crate) row: u32,
    pub(crate) bytes: Buffer,
}

/// A record that was found after a crash.
pub(crate) struct Found {
    pub(crate) sequence: u64,
    pub(crate) tail_sequence: u64,
    pub(crate) stripe: StripeIndex,
    pub(crate) slices: Vec<(u8, u32, Vec<u8>)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its stripe is being written.
    Live,
    /// Stored in place, but perhaps not durable there.
    Stored,
}

struct Entry {
    sequence: u64,
    at: u64,
    len: u64,
    stage: Stage,
}

pub(crate) struct Journal {
    reactor: Reactor,
    identity: Rc<Identity>,
    members: Rc<Members>,
    /// Oldest first.
    ring: Rc<RefCell<VecDeque<Entry>>>,
    next_sequence: Cell<u64>,
    /// Writes under way that have no record.
    unrecorded: Rc<Cell<u64>>,
    /// Writes without a record that ever began.
    unrecorded_begun: Cell<u64>,
    waiting: Rc<WaitList>,
    making_room: Cell<bool>,
}

/// A write under way; says when it is stored.
pub(crate) struct Recorded {
    reactor: Reactor,
    waiting: Rc<WaitList>,
    kind: Kind,
}

enum Kind {
    None(Rc<Cell<u64>>),
    Record { sequence: u64, ring: Rc<RefCell<VecDeque<Entry>>> },
}

impl Drop for Recorded {
    fn drop(&mut self) {
        match &self.kind {
            Kind::None(unrecorded) => unrecorded.set(unrecorded.get() - 1),
            Kind::Record { sequence, ring } => {
                let mut ring = ring.borrow_mut();
                if let Some(entry) = ring.iter_mut().find(|entry| entry.sequence == *sequence) {
                    entry.stage = Stage::Stored;
                }
            }
        }
        self.waiting.wake_all(&self.reactor);
    }
}

impl Journal {
    pub(crate) fn new(reactor: &Reactor, identity: Rc<Identity>, members: Rc<Members>) -> Journal {
        Journal {
            reactor: reactor.clone(),
            identity,
            members,
            ring: Rc::default(),
            next_sequence: Cell::new(1),
            unrecorded: Rc::default(),
            unrecorded_begun: Cell::new(0),
            waiting: Rc::default(),
            making_room: Cell::new(false),
        }
    }

    /// Most rows of `positions` slices that fit in one record.
    pub(crate) fn rows_max(positions: u8) -> u32 {
        PAYLOAD_BYTES_MAX / u32::from(positions) / 4096 * 4096
    }

    /// Before a stripe of parity is written: makes a record durable if the array is degraded and no
    /// stripe waits for resync. Keep the result until the write is stored.
    pub(crate) async fn record_if_degraded(
        &self,
        stripe: StripeIndex,
        slices: &[Slice],
        unsynced: &Unsynced,
    ) -> Result<Recorded, ArrayError> {
        loop {
            if self.members.all_trusted() || unsynced.count() > 0 {
                return self.begin_unrecorded().await;
            }
            if self.cover(unsynced).await? {
                break;
            }
        }
        let payload: u64 = slices.iter().map(|slice| slice.bytes.len() as u64).sum();
        let len = (JournalRecord::BYTES + payload).next_multiple_of(4096);
        let (sequence, at) = self.make_room(len).await?;
        let recorded = self.recorded(Kind::Record { sequence, ring: self.ring.clone() });
        if let Err(error) = self.append(stripe, slices, sequence, at).await {
            // Some member may have the record, and its write will not be done: it must never be
            // stored after a crash, over writes that came later.
            self.members.set_journal_from(0);
            self.members.settled().await?;
            return Err(error);
        }
        Ok(recorded)
    }

    /// Before a write without a record: the superblock says durably that the journal does not
    /// cover every write. (Else a crash would store old records over this write, and would take
    /// its stripe for one that agrees.) Keep the result until the write is stored.
    pub(crate) async fn begin_unrecorded(&self) -> Result<Recorded, ArrayError> {
        // Counted first, so that nobody else says the opposite meanwhile.
        self.unrecorded.set(self.unrecorded.get() + 1);
        self.unrecorded_begun.set(self.unrecorded_begun.get() + 1);
        let recorded = self.recorded(Kind::None(self.unrecorded.clone()));
        if self.members.journal_from() != 0 {
            self.members.set_journal_from(0);
        }
        self.members.settled().await?;
        Ok(recorded)
    }

    fn recorded(&self, kind: Kind) -> Recorded {
        Recorded { reactor: self.reactor.clone(), waiting: self.waiting.clone(), kind }
    }

    /// Says in the superblock that the journal covers every write, once it does. False if that
    /// is not so, or not wanted, after all.
    async fn cover(&self, unsynced: &Unsynced) -> Result<bool, ArrayError> {
        while self.members.journal_from() == 0 {
            // Records from before count as much as writes without: what begins now does not cover
            // them.
            let alone = || {
                let ring = self.ring.borrow();
                self.unrecorded.get() == 0 && ring.iter().all(|entry| entry.stage != Stage::Live)
            };
            self.waiting.until(&self.reactor, alone).await;
            let begun = self.unrecorded_begun.get();
            // What was written without a record must not be undone by a power cut any more: no
            // record would cure it.
            self.members.flush().await?;
            if self.members.all_trusted() || unsynced.count() > 0 {
                return Ok(false);
            }
            if self.unrecorded_begun.get() == begun && self.members.journal_from() == 0 {
                self.members.set_journal_from(self.next_sequence.get());
            }
        }
        self.members.settled().await?;
        Ok(self.members.journal_from() != 0)
    }

    fn ring_bytes(&self) -> u64 {
        let list = self.members.list();
        let present = list.iter().filter(|member| member.drive.is_some());
        present.map(|member| member.areas.journal.len).min().unwrap_or(0)
    }

    /// Waits for space and takes it. Returns the record's sequence and place in the ring.
    async fn make_room(&self, len: u64) -> Result<(u64, u64), ArrayError> {
        loop {
            if let Some(at) = self.find_room(len) {
                let sequence = self.next_sequence.get();
                self.next_sequence.set(sequence + 1);
                let entry = Entry { sequence, at, len, stage: Stage::Live };
                self.ring.borrow_mut().push_back(entry);
                return Ok((sequence, at));
            }
            self.release_oldest().await?;
        }
    }

    /// Waits until the oldest record is stored, and gives its space back; others may do so first.
    async fn release_oldest(&self) -> Result<(), ArrayError> {
        let first = || self.ring.borrow().front().map(|entry| entry.sequence);
        let is_stored =
            || self.ring.borrow().front().is_some_and(|entry| entry.stage == Stage::Stored);
        let before = first();
        let changed = || first() != before || (!self.making_room.get() && is_stored());
        self.waiting.until(&self.reactor, changed).await;
        if first() != before {
            return Ok(());
        }
        self.making_room.set(true);
        let released = self.release().await;
        self.making_room.set(false);
        self.waiting.wake_all(&self.reactor);
        released
    }

    /// Makes everything recorded so far durable in place: no crash stores it again.
    pub(crate) async fn retire(&self) -> Result<(), ArrayError> {
        let end = self.next_sequence.get();
        let left = || self.ring.borrow().front().is_some_and(|entry| entry.sequence < end);
        while self.members.journal_from() != 0 && left() {
            self.release_oldest().await?;
        }
        self.members.settled().await
    }

    fn find_room(&self, len: u64) -> Option<u64> {
        let size = self.ring_bytes();
        let ring = self.ring.borrow();
        let (Some(first), Some(last)) = (ring.front(), ring.back()) else {
            return (len <= size).then_some(0);
        };
        let end = last.at + last.len;
        if last.at >= first.at {
            // Used in one piece: behind it, else at the front.
            if end + len <= size {
                return Some(end);
            }
            return (len < first.at).then_some(0);
        }
        (end + len < first.at).then_some(end)
    }

    /// Makes stored records durable in place and gives their space back.
    async fn release(&self) -> Result<(), ArrayError> {
        let stored = {
            let ring = self.ring.borrow();
            let stored = ring.iter().take_while(|entry| entry.stage == Stage::Stored);
            stored.map(|entry| entry.sequence).last()
        };
        let Some(stored) = stored else { return Ok(()) };
        self.members.flush().await?;
        // Durably forgotten before one of them is overwritten: a crash must not find the older of
        // two records for one place without the newer.
        if self.members.journal_from() != 0 {
            let kept = self.ring.borrow().iter().map(|entry| entry.sequence).find(|s| *s > stored);
            self.members.set_journal_from(kept.unwrap_or(self.next_sequence.get()));
        }
        self.members.settled().await?;
        let mut ring = self.ring.borrow_mut();
        while ring.front().is_some_and(|entry| entry.sequence <= stored) {
            ring.pop_front();
        }
        Ok(())
    }

    /// Writes the record to as many members as may still be lost, plus one, and flushes it.
    async fn append(
        &self,
        stripe: StripeIndex,
        slices: &[Slice],
        sequence: u64,
        at: u64,
    ) -> Result<(), ArrayError> {
        let (mut record, payload) = self.compose(stripe, slices);
        let oldest = self.ring.borrow().front().map_or(sequence, |entry| entry.sequence);
        record.tail_sequence = oldest.into();
        loop {
            let targets = self.targets(sequence);
            if targets.is_empty() {
                return Err(ArrayError::Lost);
            }
            let writes = targets.iter().map(|(_, drive, drive_uuid, area)| {
                write_copy(
                    &self.reactor,
                    drive,
                    &record,
                    &payload,
                    (*drive_uuid, area + at, sequence),
                )
            });
            let results = join_all(writes).await;
            if results.iter().all(Result::is_ok) {
                return Ok(());
            }
            // A member that cannot take records cannot take the write either.
            let members: Vec<MemberIndex> = targets.iter().map(|(index, ..)| *index).collect();
            // The others have the record already, and a lone target can be done without.
            self.members.fence_failed(&members, &results).await?;
        }
    }

    fn compose(&self, stripe: StripeIndex, slices: &[Slice]) -> (JournalRecord, Buffers) {
        let mut record = JournalRecord::blank();
        record.array = self.identity.uuid;
        record.stripe = stripe.0.into();
        let mut payload = Buffers::default();
        let mut bytes = Vec::new();
        for (stored, slice) in record.slices.iter_mut().zip(slices) {
            let len = u32::try_from(slice.bytes.len()).expect("at most a chunk");
            *stored = StoredSlice::new(slice.position, slice.row, len);
            payload.push(slice.bytes.clone());
            bytes.extend_from_slice(slice.bytes.bytes());
        }
        record.slice_count = u32::try_from(slices.len()).expect("few positions").into();
        record.payload_bytes = u32::try_from(bytes.len()).expect("at most 512 KiB").into();
        record.payload_checksum = payload_checksum(&bytes).into();
        (record, payload)
    }

    /// Members for the copies of a record; which ones, turns with the sequence.
    fn targets(&self, sequence: u64) -> Vec<(MemberIndex, Rc<Drive>, [u8; 16], u64)> {
        let list = self.members.list();
        let keep: Vec<usize> =
            (0..list.len()).filter(|index| list[*index].keeps_metadata().is_some()).collect();
        let parity = usize::from(self.identity.layout.parity);
        let missing = list.len() - keep.len();
        let copies = (parity + 1).saturating_sub(missing).max(1);
        let first = to_usize(sequence % keep.len().max(1) as u64);
        let chosen = keep.iter().cycle().skip(first).take(copies.min(keep.len()));
        let target = |index: &usize| {
            let member = &list[*index];
            let drive = member.drive.clone()?;
            let area = member.areas.journal.offset;
            Some((MemberIndex::new(*index), drive, member.drive_uuid, area))
        };
        chosen.filter_map(target).collect()
    }

    /// All records on all members that the superblock says must be stored again, oldest first.
    pub(crate) async fn find(&self, journal_from: u64) -> Vec<Found> {
        let members: Vec<_> = {
            let list = self.members.list();
            let with_drive = |m: &crate::members::Member| {
                Some((m.keeps_metadata()?.clone(), m.drive_uuid, m.areas.journal))
            };
            list.iter().filter_map(with_drive).collect()
        };
        let mut found = BTreeMap::new();
        for (drive, drive_uuid, area) in members {
            let bytes = self.read_area(&drive, area).await;
            let mut at = 0;
            while at < area.len {
                let one = self.open_at(&bytes, drive_uuid, area.offset, at);
                at += one.as_ref().map_or(4096, |(_, len)| *len);
                if let Some((one, _)) = one {
                    found.insert(one.sequence, one);
                }
            }
        }
        let newest_tail = found.values().map(|one| one.tail_sequence).max().unwrap_or(0);
        let newest = found.keys().last().map_or(0, |last| *last).max(journal_from);
        self.next_sequence.set(self.next_sequence.get().max(newest + 1));
        found.retain(|sequence, _| *sequence >= journal_from.max(newest_tail));
        found.into_values().collect()
    }

    /// A member's whole ring. What cannot be read is zero, and so no record.
    async fn read_area(&self, drive: &Rc<Drive>, area: Area) -> Vec<u8> {
        let mut bytes = Vec::new();
        for step in [READ_BYTES, 4096] {
            while (bytes.len() as u64) < area.len {
                let at = bytes.len() as u64;
                let len = step.min(area.len - at);
                let read = label::read_bytes(&self.reactor, drive, area.offset + at, len).await;
                match read {
                    Ok(read) => bytes.extend(read),
                    Err(_) if step == 4096 => bytes.resize(bytes.len() + 4096, 0),
                    // On from here in small steps.
                    Err(_) => break,
                }
            }
        }
        bytes
    }

    /// The whole record at `at` of a ring that begins at `ring` on its drive, and its length;
    /// `None` if there is none.
    fn open_at(
        &self,
        bytes: &[u8],
        drive_uuid: [u8; 16],
        ring: u64,
        at: u64,
    ) -> Option<(Found, u64)> {
        let bytes = bytes.get(to_usize(at)..)?;
        let record = record::open::<JournalRecord>(bytes, Some(drive_uuid), ring + at).ok()?;
        let payload_bytes = record.payload_bytes.get() as usize;
        let payload = bytes.get(size_of::<JournalRecord>()..)?.get(..payload_bytes)?;
        let sum = record.payload_checksum.get();
        if record.array != self.identity.uuid || payload_checksum(payload) != sum {
            return None;
        }
        let len = (JournalRecord::BYTES + payload_bytes as u64).next_multiple_of(4096);
        let mut from = 0;
        let mut slices = Vec::new();
        for slice in record.slices() {
            let len = slice.len.get() as usize;
            let bytes = payload.get(from..from + len)?.to_vec();
            slices.push((slice.position, slice.row.get(), bytes));
            from += len;
        }
        let found = Found {
            sequence: record.header.sequence.get(),
            tail_sequence: record.tail_sequence.get(),
            stripe: StripeIndex(record.stripe.get()),
            slices,
        };
        Some((found, len))
    }

    /// Sequences of this start of the array are larger than those of any before, which may still
    /// stand in the ring. `generation`: the first one of this start.
    pub(crate) fn begin_sequences(&self, generation: u64) {
        self.next_sequence.set(generation << SEQUENCES_PER_GENERATION_LOG2);
    }

    /// The sequence of the next record.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.next_sequence.get()
    }
}

/// `place`: the drive's uuid, the byte offset, the sequence.
async fn write_copy(
    reactor: &Reactor,
    drive: &Rc<Drive>,
    record: &JournalRecord,
    payload: &Buffers,
    place: ([u8; 16], u64, u64),
) -> Result<(), DriveError> {
    let (drive_uuid, at, sequence) = place;
    let mut record = record.clone();
    record::seal(&mut record, drive_uuid, at, sequence);
    let header = reactor.buffer(size_of::<JournalRecord>());
    header.copy_from_slice(record.as_bytes());
    let mut all = Buffers::from(header);
    payload.pieces().iter().for_each(|piece| all.push(piece.clone()));
    drive.write(at, all).await?;
    drive.flush().await
}
