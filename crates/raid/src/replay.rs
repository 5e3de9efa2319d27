//! The journal after a crash: what it holds is put in place before anything is served.
//!
//! For each row of a stripe, from the batches that are found (all whose data may not be in place):
//!
//! | found | the row in place | becomes |
//! |---|---|---|
//! | data of all chunks | anything | pending: it is stored with new parity, and nothing is read |
//! | parity, and the data that it belongs to | as it was, or torn | both are stored again |
//! | sums of parity, and its data | the same | parity is worked out and stored, then the data |
//! | data only | as it was before | pending |
//! | zeroes | zeroes, or torn | zeroed again; what came before is void |
//!
//! Parity whose oldest data is not looked for any more was stored completely: that data was
//! released only after it. Other parity was written when its data was durable: if that is not
//! found, more members are lost than the array can do without, and so is the stripe. Every batch
//! is first given back to as many members as it should be on, since a crash may have left it on
//! one; of a divided one, too few shares are none.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::journal_batch::{self, EntryKind, JournalBatch, ring_bytes};
use ashlar_format::record::{self, RecordError, payload_checksum};
use ashlar_format::units::{Area, MemberIndex, StripeIndex, to_usize};
use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::join::join_all;

use crate::array::Array;
use crate::error::{ArrayError, AssembleError};
use crate::journal::{Batch, NewData, Parts, unite};
use crate::label;
use crate::layout::Positions;
use crate::members::Keeper;
use crate::pending::{Hold, Patch};
use crate::stored::{Begun, Store};
use crate::verify::within;
use crate::write_plan::{bands, bits, each};

mod parity;

/// Bytes of the ring that are read at once.
const READ_BYTES: u64 = 512 << 10;

/// A batch that was found, with the members that have it.
struct Found {
    batch: JournalBatch,
    /// Of all entries; none where all are zeroes, and before the shares are united.
    payload: Option<Buffer>,
    shares: Vec<(u8, Buffer)>,
    at: u64,
    members: Vec<MemberIndex>,
}

impl Found {
    fn sequence(&self) -> u64 {
        self.batch.header.sequence.get()
    }

    fn is_void(&self) -> bool {
        self.batch.entries().is_empty()
    }

    /// Whether the two can be parts of one batch.
    fn is_like(&self, other: &Found) -> bool {
        let shape = |its: &Found| (its.batch.payload_bytes, its.batch.division(), its.at);
        shape(self) == shape(other)
    }

    /// Bytes it takes in the ring.
    fn len(&self) -> u64 {
        ring_bytes(self.batch.payload_bytes.get(), self.batch.division())
    }

    /// Entries with their bytes.
    fn entries(&self) -> impl Iterator<Item = Piece> {
        let mut at = 0;
        self.batch.entries().iter().filter_map(move |stored| {
            let len = stored.payload_len() as usize;
            let bytes = self.payload.as_ref().map(|payload| payload.slice(at..at + len));
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

/// What a batch says of rows of one position. Of zeroes: `rows` counts stripes from `stripe`.
#[derive(Clone)]
struct Piece {
    kind: EntryKind,
    sequence: u64,
    stripe: StripeIndex,
    position: u8,
    rows: Range<u32>,
    /// `None`: they are zeroes, or stand in place.
    bytes: Option<Buffer>,
    /// Of parity.
    data: NewData,
}

impl Piece {
    /// Some of its rows.
    fn part(&self, rows: &Range<u32>) -> Piece {
        let bytes = self.bytes.as_ref().map(|bytes| bytes.slice(within(&self.rows, rows)));
        Piece { rows: rows.clone(), bytes, ..self.clone() }
    }

    /// Some of its rows, which were stored.
    fn stands(&self, rows: &Range<u32>) -> Piece {
        Piece { rows: rows.clone(), bytes: None, ..self.clone() }
    }
}

/// All that is found of one stripe, oldest first.
#[derive(Default)]
struct Findings {
    data: Vec<(Piece, Hold)>,
    parity: Vec<Piece>,
    /// The last one to make it zero.
    zeroed_at: Option<u64>,
    /// Rows that were given up, and whose parity is made anew when their data is in place.
    given_up: Vec<Range<u32>>,
}

impl Findings {
    fn holds(&self) -> Vec<Hold> {
        self.data.iter().map(|(_, hold)| hold.clone()).collect()
    }

    /// Parity of the same rows in one batch.
    fn bands(&self) -> impl Iterator<Item = &[Piece]> {
        self.parity.chunk_by(|a, b| (a.sequence, &a.rows) == (b.sequence, &b.rows))
    }

    /// What parity of these rows belongs to, in order of sequence: of two for the same rows the
    /// later counts. `None`: some of it is not found.
    fn new_data(&self, of: &NewData, rows: &Range<u32>) -> Option<Vec<&Piece>> {
        let data =
            self.data.iter().map(|(piece, _)| piece).filter(|piece| {
                piece.sequence <= of.newest && of.chunks & 1 << piece.position != 0
            });
        let pieces: Vec<&Piece> = data.filter(|piece| overlap(piece, rows)).collect();
        let covered = each(of.chunks).all(|chunk| {
            let of_chunk = pieces.iter().filter(|piece| piece.position == chunk);
            let ranges: Vec<Range<u32>> = of_chunk.map(|piece| piece.rows.clone()).collect();
            outside(rows, &ranges).is_empty()
        });
        covered.then_some(pieces)
    }
}

impl Array {
    /// Puts in place what the journal holds from `journal_from` on. Nothing is served yet. By
    /// `force` what can be served will be; else an error leaves it all to another start.
    pub(crate) async fn replay(
        self: &Rc<Self>,
        journal_from: u64,
        force: bool,
    ) -> Result<(), AssembleError> {
        let (found, tail) = self.find_batches(journal_from).await?;
        self.heal_batches(&found).await?;
        let mut ring = VecDeque::new();
        let mut stripes: BTreeMap<u64, Findings> = BTreeMap::new();
        for one in &found {
            let hold = Hold::default();
            let (sequence, at, len) = (one.sequence(), one.at, one.len());
            let division = one.batch.division();
            ring.push_back(Batch { sequence, at, len, division, hold: hold.clone() });
            for piece in one.entries() {
                self.sort_in(&mut stripes, piece, &hold);
            }
        }
        *self.journal.ring.borrow_mut() = ring;
        for (stripe, findings) in &mut stripes {
            let stripe = StripeIndex(*stripe);
            let restored = self.restore_stripe(stripe, findings, tail).await;
            self.replayed(stripe, findings.holds(), restored, force)?;
        }
        let given_up = stripes.iter().flat_map(|(stripe, its)| {
            its.given_up.iter().map(|rows| (StripeIndex(*stripe), rows.clone()))
        });
        let given_up: Vec<(StripeIndex, Range<u32>)> = given_up.collect();
        // No data is stored before its parity is durable.
        self.members.flush().await?;
        for (stripe, findings) in stripes {
            let (stripe, holds) = (StripeIndex(stripe), findings.holds());
            if !self.torn_stripes.contains(stripe) {
                let replayed = self.replay_stripe(stripe, findings).await;
                self.replayed(stripe, holds, replayed, force)?;
            }
        }
        // Before anything is written into bad rows: what is would be given up, too.
        self.give_up_again().await?;
        self.members.flush().await?;
        match self.drain_journal().await {
            Ok(()) | Err(ArrayError::Lost) => {}
            Err(error) => return Err(error.into()),
        }
        for (stripe, rows) in given_up {
            self.give_up_unsettled(stripe, &rows).await?;
        }
        Ok(())
    }

    fn replayed(
        &self,
        stripe: StripeIndex,
        holds: Vec<Hold>,
        result: Result<(), ArrayError>,
        force: bool,
    ) -> Result<(), AssembleError> {
        match result {
            Err(ArrayError::Lost) if force => {
                self.keep(Begun::Replay { stripe }, holds, ArrayError::Lost);
                Ok(())
            }
            // Its data must not be dropped while an absent member may have the rest.
            Err(ArrayError::Lost) => Err(AssembleError::Journal { stripe: stripe.0 }),
            other => Ok(other?),
        }
    }

    /// Entries that do not fit the array are passed over: no build of ours wrote them.
    fn sort_in(&self, stripes: &mut BTreeMap<u64, Findings>, piece: Piece, hold: &Hold) {
        let layout = self.layout_of(piece.stripe);
        let moved = self.identity.restripe().is_some_and(|its| piece.stripe.0 < its.cursor);
        let first = piece.stripe.0;
        let fits = piece.rows.end <= layout.chunk_bytes && first < layout.stripes;
        match piece.kind {
            // The superblock says whether the stripe has its new shape.
            EntryKind::Moved if !moved => {}
            EntryKind::Data | EntryKind::Moved if fits && piece.position < layout.data => {
                stripes.entry(first).or_default().data.push((piece, hold.clone()));
            }
            EntryKind::Parity | EntryKind::ParitySums
                if fits && layout.parity_positions().contains(&piece.position) =>
            {
                stripes.entry(first).or_default().parity.push(piece);
            }
            EntryKind::Data | EntryKind::Moved | EntryKind::Parity | EntryKind::ParitySums => {}
            EntryKind::Zeroes => {
                let end = (first + u64::from(piece.rows.end)).min(layout.stripes);
                for stripe in first..end {
                    stripes.entry(stripe).or_default().zeroed_at = Some(piece.sequence);
                }
            }
        }
    }

    /// Drops what is void, and makes parity new of which there are only sums.
    async fn restore_stripe(
        self: &Rc<Self>,
        stripe: StripeIndex,
        findings: &mut Findings,
        tail: u64,
    ) -> Result<(), ArrayError> {
        let _touched = self.touch(stripe);
        if let Some(zeroed_at) = findings.zeroed_at {
            findings.data.retain(|(piece, _)| piece.sequence > zeroed_at);
            findings.parity.clear();
            if self.is_written(stripe) {
                self.zero_in_place(stripe.0..stripe.0 + 1).await?;
                self.bad.remove_stripes(stripe.0..stripe.0 + 1);
            }
        }
        findings.parity.retain(|parity| parity.data.oldest >= tail);
        // Newest first: of two for the same rows, only the newer counts.
        findings.parity.sort_by_key(|parity| std::cmp::Reverse(parity.sequence));
        self.restore_parity(stripe, findings).await
    }

    async fn replay_stripe(
        self: &Rc<Self>,
        stripe: StripeIndex,
        findings: Findings,
    ) -> Result<(), ArrayError> {
        let _touched = self.touch(stripe);
        for band in findings.bands() {
            self.cure(stripe, band, &findings).await?;
        }
        for (piece, hold) in findings.data {
            let Some(bytes) = piece.bytes else { continue };
            let (chunk, rows, sequence) = (piece.position, piece.rows, piece.sequence);
            let patch = Patch { chunk, rows, bytes, sequence, hold };
            self.journal.pending.borrow_mut().insert(stripe, patch);
        }
        // What was just stored needs no room for its parity again: the ring may have none.
        for band in &findings.parity {
            for chunk in each(band.data.chunks) {
                self.bad.remove(stripe, chunk, &band.rows);
                let mut pending = self.journal.pending.borrow_mut();
                pending.remove(stripe, chunk, &band.rows, band.data.newest);
            }
        }
        Ok(())
    }

    /// Stores rows of parity and the data that they belong to. `band`: entries of one batch.
    async fn cure(
        &self,
        stripe: StripeIndex,
        band: &[Piece],
        findings: &Findings,
    ) -> Result<(), ArrayError> {
        let rows = &band[0].rows;
        let data = findings.new_data(&band[0].data, rows).ok_or(ArrayError::Lost)?;
        let pieces = data.into_iter().chain(band);
        let mut missed: Positions = 0;
        for piece in pieces {
            let part = piece.rows.start.max(rows.start)..piece.rows.end.min(rows.end);
            let Piece { position, rows, bytes: Some(bytes), .. } = piece.part(&part) else {
                continue;
            };
            let store = [Store { position, row: rows.start, bytes: bytes.into() }];
            let done = self.finish_stores(self.start_stores(stripe, &store)).await;
            if done.no_space {
                return Err(ArrayError::NoSpace);
            }
            missed |= 1 << piece.position & !done.stored;
        }
        // Also a member that is absent now misses this, and must not be believed later.
        self.fence_bearable(stripe, missed).await
    }

    /// Gives every batch back to members that should have it and do not.
    async fn heal_batches(&self, found: &[Found]) -> Result<(), ArrayError> {
        for one in found {
            let division = one.batch.division();
            let targets = self.journal.targets(one.sequence(), one.at + one.len(), division);
            let missing: Vec<_> =
                targets.iter().filter(|target| !one.members.contains(&target.member)).collect();
            if missing.is_empty() {
                continue;
            }
            let mut payload = Buffers::default();
            one.payload.iter().for_each(|bytes| payload.push(bytes.clone()));
            let parts = Parts::new(&self.reactor, self.kernels, one.batch.clone(), &payload);
            let writes = missing.iter().map(|target| parts.write(target, one.at, one.sequence()));
            let results = join_all(writes).await;
            if let Some(Err(error)) = results.into_iter().find(Result::is_err) {
                let full = error == ashlar_drive::error::DriveError::NoSpace;
                return Err(if full { ArrayError::NoSpace } else { ArrayError::Lost });
            }
        }
        self.journal.flush().await
    }

    /// All batches that may not be in place, oldest first; and the sequence from which that is so.
    async fn find_batches(&self, journal_from: u64) -> Result<(Vec<Found>, u64), AssembleError> {
        let mut found: BTreeMap<u64, Found> = BTreeMap::new();
        for Keeper { index, drive, drive_uuid, areas } in self.members.keepers() {
            let area = areas.journal;
            let mut bytes = self.read_ring(&drive, area).await;
            let mut at = 0;
            while at < area.len {
                let home = area.offset;
                let opened = self.open_batch(&mut bytes, drive_uuid, home, at, journal_from);
                if let Err(RecordError::Version(version)) = opened
                    && version > journal_batch::VERSION
                {
                    let drive = drive.name().to_owned();
                    return Err(AssembleError::Newer { drive, what: "journal", version });
                }
                at += opened.as_ref().map_or(4096, Found::len);
                if let Ok(one) = opened
                    && one.sequence() >= journal_from
                {
                    keep(&mut found, one, index);
                }
            }
        }
        let tails = found.values().map(|one| one.batch.tail_sequence.get());
        let tail = tails.max().unwrap_or(0).max(journal_from);
        found.retain(|sequence, one| *sequence >= tail && self.unite(one));
        Ok((found.into_values().collect(), tail))
    }

    /// Makes the payload of its shares. False: they are too few. So it was acknowledged to nobody,
    /// unless more members are lost than the array can do without.
    fn unite(&self, one: &mut Found) -> bool {
        let Some(division) = one.batch.division() else { return true };
        let shares = std::mem::take(&mut one.shares);
        one.payload = unite(&self.reactor, self.kernels, &one.batch, division, &shares);
        one.payload.is_some()
    }

    /// A member's whole ring. What cannot be read is zero, and so no batch.
    async fn read_ring(&self, drive: &Rc<Drive>, area: Area) -> Vec<u8> {
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

    /// The whole batch, or share of one, at `at` of a ring that begins at `ring` on its drive. Of
    /// one before `journal_from`, which is in place, nothing but how long it is.
    fn open_batch(
        &self,
        bytes: &mut [u8],
        drive: [u8; 16],
        ring: u64,
        at: u64,
        journal_from: u64,
    ) -> Result<Found, RecordError> {
        let bytes = bytes.get_mut(to_usize(at)..).ok_or(RecordError::Blank)?;
        record::upgrade::<JournalBatch>(bytes);
        let batch = record::open::<JournalBatch>(bytes, Some(drive), ring + at)?.clone();
        let len = batch.bytes_that_follow() as usize;
        let follows = bytes.get(size_of::<JournalBatch>()..).and_then(|bytes| bytes.get(..len));
        let follows = follows.ok_or(RecordError::Damaged)?;
        if batch.array != self.uuid() || payload_checksum(follows) != batch.payload_checksum.get() {
            return Err(RecordError::Damaged);
        }
        let counts = len > 0 && batch.header.sequence.get() >= journal_from;
        let copy = counts.then(|| self.reactor.buffer(len));
        copy.iter().for_each(|copy| copy.copy_from_slice(follows));
        let (payload, shares) = match batch.division() {
            None => (copy, Vec::new()),
            Some(_) => (None, copy.into_iter().map(|copy| (batch.share, copy)).collect()),
        };
        Ok(Found { batch, payload, shares, at, members: Vec::new() })
    }
}

/// Of one sequence the voided batch counts: the caller of the other was told of an error.
fn keep(found: &mut BTreeMap<u64, Found>, mut one: Found, member: MemberIndex) {
    let known = found.get_mut(&one.sequence());
    match known.filter(|known| known.is_void() || !one.is_void()) {
        Some(known) if known.is_void() == one.is_void() && known.is_like(&one) => {
            known.members.push(member);
            // A batch that was begun on one group and written to another has a share twice.
            one.shares.retain(|(its, _)| known.shares.iter().all(|(share, _)| share != its));
            known.shares.append(&mut one.shares);
        }
        Some(_) => {}
        None => {
            one.members.push(member);
            found.insert(one.sequence(), one);
        }
    }
}

fn overlap(piece: &Piece, rows: &Range<u32>) -> bool {
    piece.rows.start < rows.end && rows.start < piece.rows.end
}

/// The parts of `rows` that are in none of `others`.
fn outside(rows: &Range<u32>, others: &[Range<u32>]) -> Vec<Range<u32>> {
    let mut written: Vec<(u8, Range<u32>)> = vec![(0, rows.clone())];
    written.extend(others.iter().map(|rows| (1, rows.clone())));
    let only = bands(&written, u32::MAX).into_iter().filter(|band| band.chunks == bits(0..1));
    only.map(|band| band.rows).collect()
}
