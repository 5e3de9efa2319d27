//! The batches that a crash left in the journals, and those that it may have left where nothing can
//! be read.
//!
//! A batch that was acknowledged stands on more members of a group than the group can do without,
//! or has a share on all but so many. So where it is not found, though each of these could be read
//! or is absent by leave of the array, it was acknowledged to nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Range, RangeInclusive};
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::MemberState;
use ashlar_format::journal_batch::{
    self, BLOCK_BYTES, EntryKind, JournalBatch, PAYLOAD_BYTES_MAX, StoredEntry, ring_bytes,
};
use ashlar_format::record::{self, RecordError, payload_checksum};
use ashlar_format::units::{Area, MemberIndex, StripeIndex, to_usize};
use ashlar_reactor::buffer::{Buffer, DIRECT_ALIGN};
use ashlar_reactor::executor::Reactor;

use super::Piece;
use crate::array::Array;
use crate::assemble::JournalMark;
use crate::error::{ArrayError, AssembleError};
use crate::journal::{Batch, NewData, Void, unite};
use crate::member::{Keeper, Member};
use crate::pending::Hold;
use crate::verify::overlap;

/// Bytes of the ring that are read at once.
const READ_BYTES: u64 = 512 << 10;
const BLOCK: u64 = BLOCK_BYTES as u64;
const BATCH_BYTES_MAX: u64 = JournalBatch::BYTES + PAYLOAD_BYTES_MAX as u64;

/// A batch that was found, with the members that have it.
pub(super) struct Found {
    pub(super) batch: JournalBatch,
    /// Of all entries; none where all are zeroes, before the shares are united, and if it is lost.
    pub(super) payload: Option<Buffer>,
    shares: Vec<(u8, Buffer)>,
    pub(super) at: u64,
    pub(super) members: Vec<MemberIndex>,
}

impl Found {
    pub(super) fn sequence(&self) -> u64 {
        self.batch.header.sequence.get()
    }

    fn is_void(&self) -> bool {
        self.batch.entries().is_empty()
    }

    /// Its payload cannot be read on enough members.
    pub(super) fn is_lost(&self) -> bool {
        self.payload.is_none() && self.batch.payload_bytes.get() > 0
    }

    /// Whether the two can be parts of one batch.
    fn is_like(&self, other: &Found) -> bool {
        let shape = |its: &Found| (its.batch.payload_bytes, its.batch.division(), its.at);
        shape(self) == shape(other)
    }

    /// Bytes it takes in the ring.
    pub(super) fn len(&self) -> u64 {
        ring_bytes(self.batch.payload_bytes.get(), self.batch.division())
    }

    fn range(&self) -> Range<u64> {
        self.at..self.at + self.len()
    }

    /// Where the next one may begin, at the first or the last of these bytes or in between: how
    /// long a voided one was is not known, and its place may be given to the next.
    fn next(&self) -> RangeInclusive<u64> {
        let end = self.range().end;
        let longest = self.at + BATCH_BYTES_MAX;
        if self.is_void() { self.at..=longest } else { end..=end }
    }

    /// As the ring has it, with the stripes of parity that it tells of.
    pub(super) fn as_batch(&self, parity_of: Vec<StripeIndex>) -> Batch {
        Batch {
            sequence: self.sequence(),
            at: self.at,
            len: self.len(),
            division: self.batch.division(),
            hold: Hold::default(),
            parity_of,
            void: Void::No,
        }
    }

    /// Entries with their bytes, which drives of such sectors take as they are.
    pub(super) fn entries(
        &self,
        reactor: &Reactor,
        sector_bytes: u32,
    ) -> impl Iterator<Item = Piece> {
        let unit = DIRECT_ALIGN.max(sector_bytes as usize);
        let mut at = 0;
        self.batch.entries().iter().filter_map(move |stored| {
            let len = stored.payload_len() as usize;
            let bytes = self.payload.as_ref().map(|payload| payload.slice(at..at + len));
            let bytes = bytes.map(|bytes| aligned(reactor, bytes, unit));
            at += len;
            let row = stored.row.get();
            let kind = stored.kind().ok()?;
            let piece = Piece {
                kind,
                sequence: self.sequence(),
                stripe: StripeIndex(stored.stripe.get()),
                position: stored.position,
                rows: row..row.saturating_add(stored.len.get()),
                bytes,
                is_lost: self.is_lost() && len > 0,
                data: NewData {
                    chunks: stored.chunks.get(),
                    newest: stored.newest.get(),
                    oldest: stored.oldest.get(),
                },
            };
            Some(piece)
        })
    }
}

/// What stands behind sums of parity begins anywhere.
fn aligned(reactor: &Reactor, bytes: Buffer, unit: usize) -> Buffer {
    // Zeroes have none.
    if bytes.is_empty() || bytes.bytes().as_ptr().addr().is_multiple_of(unit) {
        return bytes;
    }
    let copy = reactor.buffer(bytes.len());
    copy.copy_from(&bytes);
    copy
}

/// A member's whole ring.
#[derive(Default)]
struct Ring {
    bytes: Vec<u8>,
    gaps: Gaps,
}

/// Where blocks of a member's ring cannot be read.
#[derive(Clone, Default)]
pub(super) struct Gaps(Vec<u64>);

impl Gaps {
    fn has(&self, range: &Range<u64>) -> bool {
        self.0.iter().any(|at| *at < range.end && range.start < at + BLOCK)
    }
}

/// What a crash left in the journals.
#[derive(Default)]
pub(crate) struct LeftBatches {
    /// All batches that may not be in place, oldest first.
    pub(super) found: Vec<Found>,
    /// Those of which too little is here, and which were acknowledged to nobody.
    pub(super) left_out: Vec<Found>,
    /// The sequence from which that is so.
    pub(super) tail: u64,
    /// How long they were looked for, and bytes of rings that were read for it.
    pub(super) took: Duration,
    pub(super) read_bytes: u64,
    pub(super) gaps: BTreeMap<MemberIndex, Gaps>,
    /// Somebody has written over batches that were durable.
    pub(crate) is_gone: bool,
}

/// The batch that the superblock names.
struct NamedBatch {
    sequence: u64,
    /// Neither it nor a later one is found.
    is_gone: bool,
    /// Where it ends in the ring.
    end: Option<u64>,
}

impl NamedBatch {
    fn meet(&mut self, one: &Found) {
        self.is_gone &= one.sequence() < self.sequence;
        if one.sequence() == self.sequence {
            self.end = Some(one.range().end);
        }
    }
}

impl Array {
    /// Looks through the rings, and writes nothing. By `force` also where others may have been that
    /// cannot be read, or are gone.
    pub(crate) async fn find_batches(
        &self,
        JournalMark { from: journal_from, newest }: JournalMark,
        force: bool,
    ) -> Result<LeftBatches, AssembleError> {
        let began = self.reactor.now();
        if journal_from >= self.journal.next_sequence() {
            // The array was stopped when all was in place.
            return Ok(LeftBatches { tail: journal_from, ..LeftBatches::default() });
        }
        let mut found: BTreeMap<u64, Found> = BTreeMap::new();
        let (mut ring, mut gaps, mut read_bytes) = (Ring::default(), BTreeMap::new(), 0);
        let mut named = NamedBatch { sequence: newest, is_gone: newest != 0, end: None };
        for keeper in self.members.keepers() {
            read_bytes += keeper.areas.journal.len;
            self.read_ring(&keeper.drive, keeper.areas.journal, &mut ring).await;
            self.open_batches(&keeper, &mut ring, journal_from, |one| {
                named.meet(&one);
                if one.sequence() >= journal_from {
                    keep(&mut found, one);
                }
            })?;
            gaps.insert(keeper.index, ring.gaps.clone());
        }
        // They have died since they were counted.
        if self.may_hold_more(&gaps, &(0..0)) {
            return Err(ArrayError::Lost.into());
        }
        let tails = found.values().map(|one| one.batch.tail_sequence.get());
        let tail = tails.max().unwrap_or(0).max(journal_from);
        found.retain(|sequence, _| *sequence >= tail);
        drop_replaced(&mut found);
        found.values_mut().for_each(|one| self.unite(one));
        let may_count = |one: &Found| self.may_hold_more(&gaps, &one.range());
        let was_durable = |one: &Found| one.sequence() == newest || is_told_of(one, &found);
        let lost = found.values().filter(|one| one.is_lost() && !may_count(one));
        let (gone, left_out): (Vec<&Found>, Vec<&Found>) = lost.partition(|one| was_durable(one));
        if let Some(gone) = gone.first().filter(|_| !force) {
            // Superblocks of this start would not say that it was durable.
            let stripe = gone.batch.entries().first().map_or(0, |its| its.stripe.get());
            return Err(AssembleError::Journal { stripe });
        }
        let left_out: Vec<u64> = left_out.into_iter().map(Found::sequence).collect();
        let left_out = left_out.iter().filter_map(|sequence| found.remove(sequence)).collect();
        if found.values().any(Found::is_lost) {
            self.ask_stale(&mut found, journal_from, may_count).await;
            found.values_mut().for_each(|one| self.unite(one));
        }
        let ring_bytes = self.journal.ring_bytes();
        let is_doubtful = |at: u64| {
            let is_live = at < ring_bytes && may_begin(at, &found, tail, ring_bytes, named.end);
            is_live && self.may_hold_more(&gaps, &(at..at + BLOCK))
        };
        let doubtful = gaps.iter().find(|(_, its)| its.0.iter().any(|at| is_doubtful(*at)));
        if let Some((member, _)) = doubtful.filter(|_| !force) {
            return Err(AssembleError::JournalUnreadable { member: *member });
        }
        // Where it cannot be read nobody has written over it.
        let is_gone = named.is_gone && doubtful.is_none();
        if is_gone && !force {
            let degraded = self.layout().parity > 0 && !self.members.all_trusted();
            return Err(AssembleError::JournalGone { degraded });
        }
        let (found, took) = (found.into_values().collect(), self.reactor.now().since(began));
        Ok(LeftBatches { found, left_out, tail, took, read_bytes, gaps, is_gone })
    }

    /// Adds what stale members have of batches whose payload is lost: by force the array may have
    /// gone on without a member that has it. Of other batches they say nothing that counts, nor of
    /// those that were acknowledged to nobody: a start before may have done without these, and have
    /// stored parity of what else there was.
    async fn ask_stale(
        &self,
        found: &mut BTreeMap<u64, Found>,
        journal_from: u64,
        may_count: impl Fn(&Found) -> bool,
    ) {
        let (mut ring, mut theirs) = (Ring::default(), BTreeMap::new());
        for keeper in self.members.stale_here() {
            self.read_ring(&keeper.drive, keeper.areas.journal, &mut ring).await;
            // One that a newer build wrote to since is left as it is.
            let meet = |one: Found| {
                if one.sequence() >= journal_from {
                    keep(&mut theirs, one);
                }
            };
            if self.open_batches(&keeper, &mut ring, journal_from, meet).is_ok() {
                let asked = &self.journal.asked_stale;
                asked.set(asked.get() | 1 << keeper.index.0);
            }
        }
        for (sequence, one) in theirs {
            let is_it = |known: &Found| known.is_lost() && known.is_like(&one) && may_count(known);
            if found.get(&sequence).is_some_and(is_it) {
                keep(found, one);
            }
        }
    }

    /// Makes blocks readable that are of none of these batches: at another start, when other
    /// members are absent, they would be in doubt. That may fail, as it may then.
    pub(super) async fn close_gaps(
        &self,
        gaps: &mut BTreeMap<MemberIndex, Gaps>,
        batches: &[Found],
    ) {
        for keeper in self.members.keepers() {
            let Some(gaps) = gaps.get_mut(&keeper.index) else { continue };
            let is_free = |at: &mut u64| batches.iter().all(|one| !one.range().contains(at));
            for at in gaps.0.extract_if(.., is_free) {
                let blank = self.reactor.buffer(to_usize(BLOCK));
                blank.fill_zero();
                let _ = keeper.drive.write(keeper.areas.journal.offset + at, blank.into()).await;
            }
        }
    }

    /// Whether of a group so few trusted members could be read at these bytes of the ring that what
    /// stood there may have been acknowledged.
    fn may_hold_more(&self, gaps: &BTreeMap<MemberIndex, Gaps>, range: &Range<u64>) -> bool {
        let list = self.members.list();
        let layout = self.layout();
        let group = usize::from(layout.set_members());
        list.chunks(group).zip(0..).any(|(members, number)| {
            let first = number * group;
            let is_read = |(i, member): (usize, &Member)| {
                // Of one that died before it was read there are none.
                let has_gap =
                    gaps.get(&MemberIndex::new(first + i)).is_none_or(|its| its.has(range));
                member.state == MemberState::Trusted && !has_gap
            };
            let read = members.iter().enumerate().filter(|its| is_read(*its)).count();
            members.len() - read > layout.tolerated().into()
        })
    }

    /// Shows the batches of one ring, also those before `journal_from`.
    fn open_batches(
        &self,
        keeper: &Keeper,
        ring: &mut Ring,
        journal_from: u64,
        mut meet: impl FnMut(Found),
    ) -> Result<(), AssembleError> {
        let mut at = 0;
        while at < keeper.areas.journal.len {
            let opened = self.open_batch(keeper, ring, at, journal_from);
            if let Err(RecordError::Version(version)) = opened
                && version > journal_batch::VERSION
            {
                let drive = keeper.drive.name().to_owned();
                return Err(AssembleError::Newer { drive, what: "journal", version });
            }
            // What is in one that is not whole may be newer.
            let whole = opened.as_ref().ok().filter(|one| !one.members.is_empty());
            at += whole.map_or(BLOCK, Found::len);
            opened.into_iter().for_each(&mut meet);
        }
        Ok(())
    }

    /// Makes the payload of its shares. Else it is lost.
    fn unite(&self, one: &mut Found) {
        if let Some(division) = one.batch.division().filter(|_| one.payload.is_none()) {
            one.payload = unite(&self.reactor, self.kernels, &one.batch, division, &one.shares);
            if one.payload.is_some() {
                one.shares = Vec::new();
            }
        }
    }

    /// What cannot be read is zero, and so no batch.
    async fn read_ring(&self, drive: &Rc<Drive>, area: Area, ring: &mut Ring) {
        let Ring { bytes, gaps } = ring;
        bytes.clear();
        gaps.0.clear();
        bytes.reserve_exact(to_usize(area.len));
        let buffer = self.reactor.buffer(to_usize(READ_BYTES));
        for step in [READ_BYTES, BLOCK] {
            while (bytes.len() as u64) < area.len {
                let at = bytes.len() as u64;
                let part = buffer.slice(0..to_usize(step.min(area.len - at)));
                let (home, into) = (area.offset + at, part.clone().into());
                // That many blocks of a ring cannot be read is no reason to do without the others.
                let read =
                    if step == BLOCK { drive.probe(home, into) } else { drive.read(home, into) };
                match read.await {
                    Ok(()) => part.append_to(bytes),
                    Err(_) if step == BLOCK => {
                        gaps.0.push(at);
                        bytes.resize(bytes.len() + part.len(), 0);
                    }
                    // On from here in small steps.
                    Err(_) => break,
                }
            }
        }
    }

    /// The batch, or share of one, at `at` of a ring. Of one before `journal_from`, which is in
    /// place, nothing but how long it is.
    fn open_batch(
        &self,
        keeper: &Keeper,
        ring: &mut Ring,
        at: u64,
        journal_from: u64,
    ) -> Result<Found, RecordError> {
        let home = keeper.areas.journal.offset + at;
        let bytes = ring.bytes.get_mut(to_usize(at)..).ok_or(RecordError::Blank)?;
        record::upgrade::<JournalBatch>(bytes);
        let batch = record::open::<JournalBatch>(bytes, Some(keeper.drive_uuid), home)?.clone();
        let len = batch.bytes_that_follow() as usize;
        let follows = bytes.get(size_of::<JournalBatch>()..).and_then(|bytes| bytes.get(..len));
        let follows = follows.ok_or(RecordError::Damaged)?;
        let mut one = Found { batch, payload: None, shares: Vec::new(), at, members: Vec::new() };
        if one.batch.array != self.uuid() {
            return Err(RecordError::Damaged);
        }
        if payload_checksum(follows) != one.batch.payload_checksum.get() {
            let has_gap = ring.gaps.has(&one.range());
            return if has_gap { Ok(one) } else { Err(RecordError::Damaged) };
        }
        one.members.push(keeper.index);
        if len > 0 && one.sequence() >= journal_from {
            let copy = self.reactor.buffer(len);
            copy.copy_from_slice(follows);
            match one.batch.division() {
                None => one.payload = Some(copy),
                Some(_) => one.shares.push((one.batch.share, copy)),
            }
        }
        Ok(one)
    }
}

/// Of one sequence the voided batch counts: the caller of the other was told of an error.
fn keep(found: &mut BTreeMap<u64, Found>, mut one: Found) {
    let known = found.get_mut(&one.sequence());
    match known.filter(|known| known.is_void() || !one.is_void()) {
        Some(known) if known.is_void() == one.is_void() && known.is_like(&one) => {
            known.members.append(&mut one.members);
            known.payload = known.payload.take().or(one.payload);
            // A batch that was begun on one group and written to another has a share twice.
            one.shares.retain(|(its, _)| known.shares.iter().all(|(share, _)| share != its));
            known.shares.append(&mut one.shares);
        }
        Some(_) => {}
        None => {
            found.insert(one.sequence(), one);
        }
    }
}

/// Whether parity is found that belongs to data of this batch: so it was durable.
fn is_told_of(one: &Found, found: &BTreeMap<u64, Found>) -> bool {
    let entries = || found.values().flat_map(|other| other.batch.entries());
    let parity = || entries().filter(|its| its.kind().is_ok_and(EntryKind::is_parity));
    let is_its = |parity: &StoredEntry, data: &StoredEntry| {
        let rows = |its: &StoredEntry| its.row.get()..its.row.get().saturating_add(its.len.get());
        (parity.oldest.get()..=parity.newest.get()).contains(&one.sequence())
            && parity.stripe == data.stripe
            && matches!(data.kind(), Ok(EntryKind::Data | EntryKind::Moved))
            && parity.chunks.get().checked_shr(data.position.into()).is_some_and(|its| its & 1 == 1)
            && overlap(&rows(parity), &rows(data))
    };
    one.batch.entries().iter().any(|data| parity().any(|parity| is_its(parity, data)))
}

/// Drops batches whose places later ones have: they were void when these came.
fn drop_replaced(found: &mut BTreeMap<u64, Found>) {
    // Newest first: where places begin, and where they end.
    let mut places: BTreeMap<u64, u64> = BTreeMap::new();
    let mut replaced = BTreeSet::new();
    for (sequence, one) in found.iter().rev() {
        let Range { start, end } = one.range();
        let before = places.range(..end).next_back();
        if before.is_some_and(|(_, end)| *end > start) {
            replaced.insert(*sequence);
        } else {
            places.insert(start, end);
        }
    }
    found.retain(|sequence, _| !replaced.contains(sequence));
}

/// Whether a batch of `tail` or later that is not found may begin at this block: batches stand one
/// behind the other, but for the first after the end of the ring. In an empty one, behind the batch
/// that is named, which has left it, or at the beginning: with `named_end` at 8192 and a void batch
/// of 4096 bytes found at 0 (it had no room behind the other), the next may begin at 0, at 8192 (it
/// was shorter), or at 4096.
fn may_begin(
    at: u64,
    found: &BTreeMap<u64, Found>,
    tail: u64,
    ring_bytes: u64,
    named_end: Option<u64>,
) -> bool {
    let follows = |one: &Found| {
        if one.is_void() {
            // Others that are void may have had the places behind it, and been followed by one that
            // has its place; and it may have been all that there was.
            return at == 0 || named_end == Some(at) || one.next().contains(&at);
        }
        let turns = at == 0 && one.next().end() + BATCH_BYTES_MAX > ring_bytes;
        !found.contains_key(&(one.sequence() + 1)) && (turns || one.next().contains(&at))
    };
    let is_free = found.values().all(|one| one.is_void() || !one.range().contains(&at));
    is_free && (!found.contains_key(&tail) || found.values().any(follows))
}
