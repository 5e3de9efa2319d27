//! The journal after a crash: what it holds is put in place before anything is served.
//!
//! For each row of a stripe, from the batches that are found (all whose data may not be in place):
//!
//! | found | the row in place | becomes |
//! |---|---|---|
//! | data of all chunks | anything | pending: it is stored with new parity, and nothing is read |
//! | parity, and the data that it belongs to | as it was, or torn | both are stored again |
//! | sums of parity, and its data | the same | parity is worked out and stored, then the rest is |
//! | data only | as it was before | pending |
//! | zeroes | zeroes, or torn | zeroed again; what came before is void |
//!
//! Parity whose oldest data is not looked for any more was stored completely: that data was
//! released only after it. Other parity was written when its data was durable: if that is not
//! found, more members are lost than the array can do without, and so is the stripe. Every batch
//! is first given back to as many members as it should be on, since a crash may have left it on
//! one. What a batch says that may have been acknowledged, and can be read on too few members, is
//! lost, and so are its stripes: such a start is refused. By force, what an absent member may bring
//! is left to another start, and the rest is given up (`replay/give_up.rs`). A batch of which too
//! little is here, and that nobody can have been told of, is made void before anything else is
//! stored: else a member that comes back might complete it beside parity that knows nothing of it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use ashlar_format::journal_batch::{EntryKind, zeroed_stripes_max};
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::join::join_all;

use crate::array::Array;
use crate::bad_set::BadRange;
use crate::error::{ArrayError, AssembleError};
use crate::journal::{Batch, NewData, Parts};
use crate::layout::Positions;
use crate::pending::{Hold, Patch};
use crate::status::Replayed;
use crate::stored::{Begun, Store};
use crate::verify::{overlap, within};
use crate::write_plan::{bands, bits, each};

mod found;
mod give_up;
mod parity;

use found::Found;
pub(crate) use found::LeftBatches;

/// Stripes that are zeroed in one operation.
const STRIPES_AT_ONCE: u64 = 1024;

/// What a batch says of rows of one position. Of zeroes: `rows` counts stripes from `stripe`.
#[derive(Clone)]
struct Piece {
    kind: EntryKind,
    sequence: u64,
    stripe: StripeIndex,
    position: u8,
    rows: Range<u32>,
    /// `None`: they are zeroes, or stand in place, or are lost.
    bytes: Option<Buffer>,
    is_lost: bool,
    /// Of parity.
    data: NewData,
}

impl Piece {
    /// Some of its rows.
    fn part(&self, rows: &Range<u32>) -> Piece {
        let bytes = self.bytes.as_ref().map(|bytes| bytes.slice(within(&self.rows, rows)));
        Piece { rows: rows.clone(), bytes, ..self.clone() }
    }

    /// Some of its rows, once parity that has sums stands in place.
    fn after_sums(&self, rows: &Range<u32>) -> Piece {
        if self.kind == EntryKind::ParitySums {
            return Piece { rows: rows.clone(), bytes: None, ..self.clone() };
        }
        self.part(rows)
    }
}

/// All that is found of one stripe, oldest first.
#[derive(Default)]
struct Findings {
    data: Vec<(Piece, Hold)>,
    parity: Vec<Piece>,
    /// The last one to make it zero.
    zeroed_at: Option<u64>,
    /// All of it is zero in place, by now.
    is_zero: bool,
    /// Data or parity of which nobody can read the bytes.
    lost: Vec<(Piece, Hold)>,
    /// Rows whose parity is not to be relied on, before it is made anew.
    given_up: Vec<Range<u32>>,
}

impl Findings {
    /// Data or parity.
    fn add(&mut self, piece: Piece, hold: &Hold) {
        if piece.is_lost {
            self.lost.push((piece, hold.clone()));
        } else if piece.kind.is_parity() {
            self.parity.push(piece);
        } else {
            self.data.push((piece, hold.clone()));
        }
    }

    /// What is kept of them if they cannot be put in place.
    fn kept(&self, stripe: StripeIndex) -> KeptFindings {
        let all = || self.data.iter().chain(&self.lost);
        let counts =
            |piece: &&Piece| !piece.kind.is_parity() && Some(piece.sequence) > self.zeroed_at;
        let data = all().map(|(piece, _)| piece).filter(counts);
        let rows = data.map(|its| BadRange { stripe, chunk: its.position, rows: its.rows.clone() });
        KeptFindings {
            stripe,
            holds: all().map(|(_, hold)| hold.clone()).collect(),
            rows: rows.collect(),
        }
    }

    /// Parity of the same rows in one batch: itself, or sums of it.
    fn bands(&self) -> impl Iterator<Item = &[Piece]> {
        let is_same = |a: &Piece, b: &Piece| (a.sequence, &a.rows) == (b.sequence, &b.rows);
        self.parity.chunk_by(is_same)
    }

    /// What parity of these rows belongs to, in order of sequence: of two for the same rows the
    /// later counts. `None`: some of it is not found.
    fn new_data(&self, of: &NewData, rows: &Range<u32>) -> Option<Vec<&Piece>> {
        let data =
            self.data.iter().map(|(piece, _)| piece).filter(|piece| {
                piece.sequence <= of.newest && of.chunks & 1 << piece.position != 0
            });
        let pieces: Vec<&Piece> = data.filter(|piece| overlap(&piece.rows, rows)).collect();
        self.missing(of, rows).is_empty().then_some(pieces)
    }

    /// What is not found of that: rows of chunks.
    fn missing(&self, of: &NewData, rows: &Range<u32>) -> Vec<(u8, Range<u32>)> {
        let found = |chunk: u8| {
            let data = self.data.iter().map(|(piece, _)| piece);
            let its = data.filter(move |its| its.position == chunk && its.sequence <= of.newest);
            its.filter(|piece| overlap(&piece.rows, rows))
                .map(|piece| piece.rows.clone())
                .collect::<Vec<_>>()
        };
        let missing = each(of.chunks).flat_map(|chunk| {
            outside(rows, &found(chunk)).into_iter().map(move |rows| (chunk, rows))
        });
        missing.collect()
    }
}

struct KeptFindings {
    stripe: StripeIndex,
    holds: Vec<Hold>,
    /// Where other data stands in place than was written last, for all that is known.
    rows: Vec<BadRange>,
}

impl Array {
    /// Puts in place what the journal holds. Nothing is served yet. By `force` what can be served
    /// will be; else an error leaves it all to another start.
    pub(crate) async fn replay(
        self: &Rc<Self>,
        left: LeftBatches,
        force: bool,
    ) -> Result<(), AssembleError> {
        let began = self.reactor.now();
        let LeftBatches { found, left_out, tail, took, read_bytes, mut gaps, is_gone: _ } = left;
        self.close_gaps(&mut gaps, &found).await;
        let batches = found.len() as u64;
        let bytes = found.iter().map(|one| u64::from(one.batch.payload_bytes.get())).sum();
        self.replay_batches(found, left_out, tail, force).await?;
        if self.journal.oldest().is_none() {
            // Also of what was lost.
            self.close_gaps(&mut gaps, &[]).await;
        }
        let took = (took + self.reactor.now().since(began)).as_millis();
        let took_ms = u64::try_from(took).unwrap_or(u64::MAX);
        self.jobs.replayed.set(Some(Replayed { read_bytes, batches, bytes, took_ms }));
        Ok(())
    }

    async fn replay_batches(
        self: &Rc<Self>,
        found: Vec<Found>,
        left_out: Vec<Found>,
        tail: u64,
        force: bool,
    ) -> Result<(), AssembleError> {
        let mut ring: Vec<Batch> = left_out.iter().map(|one| one.as_batch(Vec::new())).collect();
        let mut stripes: BTreeMap<u64, Findings> = BTreeMap::new();
        for one in &found {
            let pieces: Vec<Piece> = one.entries(&self.reactor, self.sector_bytes).collect();
            let parity = pieces.iter().filter(|piece| piece.kind.is_parity());
            let batch = one.as_batch(parity.map(|piece| piece.stripe).collect());
            for piece in pieces {
                self.sort_in(&mut stripes, piece, &batch.hold);
            }
            ring.push(batch);
        }
        ring.sort_by_key(|batch| batch.sequence);
        *self.journal.ring.borrow_mut() = ring.into();
        self.journal.void_left_out(left_out.iter().map(Found::sequence), tail).await?;
        self.heal_batches(&found).await?;
        drop(found);
        self.members.set_forced(force);
        self.zero_runs(&mut stripes).await;
        let mut kept: BTreeMap<u64, KeptFindings> = BTreeMap::new();
        for (stripe, findings) in &mut stripes {
            let its = findings.kept(StripeIndex(*stripe));
            match self.restore_stripe(StripeIndex(*stripe), findings, tail).await {
                Ok(()) => _ = kept.insert(*stripe, its),
                error => self.replayed(its, error, force)?,
            }
        }
        // No data is stored before its parity is durable.
        self.members.flush().await?;
        let mut given_up = Vec::new();
        for (stripe, mut findings) in stripes {
            // Else it is stranded.
            let Some(its) = kept.remove(&stripe) else { continue };
            let rows = std::mem::take(&mut findings.given_up);
            match self.replay_stripe(its.stripe, findings).await {
                Ok(()) => given_up.push((its, rows)),
                error => self.replayed(its, error, force)?,
            }
        }
        // What is pending can wait for absent members.
        self.members.set_forced(false);
        // Before anything is written into such rows: what is would be given up, too.
        self.give_up_again().await?;
        for (kept, rows) in given_up {
            let made = self.make_parity_anew(kept.stripe, &rows).await;
            self.replayed(kept, made, force)?;
        }
        self.members.flush().await?;
        match self.drain_journal().await {
            Ok(()) | Err(ArrayError::Lost) => {}
            Err(error) => return Err(error.into()),
        }
        if self.journal.oldest().is_none() {
            // A batch of which too little was here does not come true when the rest of it is.
            self.members.set_journal_from(self.journal.next_sequence());
            self.members.settled().await?;
        }
        Ok(())
    }

    fn replayed(
        &self,
        kept: KeptFindings,
        result: Result<(), ArrayError>,
        force: bool,
    ) -> Result<(), AssembleError> {
        let KeptFindings { stripe, holds, rows } = kept;
        match result {
            Err(ArrayError::Lost) if force => {
                self.keep(Begun::Replay { stripe }, holds, ArrayError::Lost);
                self.bad.note(&rows);
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
        // Checksums are of whole blocks.
        let unit = self.identity.least_sector();
        let is_whole = piece.rows.start.is_multiple_of(unit) && piece.rows.end.is_multiple_of(unit);
        let fits = piece.rows.end <= layout.chunk_bytes && first < layout.stripes && is_whole;
        match piece.kind {
            // The superblock says whether the stripe has its new shape.
            EntryKind::Moved if !moved => {}
            EntryKind::Data | EntryKind::Moved if fits && piece.position < layout.data => {
                stripes.entry(first).or_default().add(piece, hold);
            }
            EntryKind::Parity | EntryKind::ParitySums
                if fits && layout.parity_positions().contains(&piece.position) =>
            {
                stripes.entry(first).or_default().add(piece, hold);
            }
            EntryKind::Data | EntryKind::Moved | EntryKind::Parity | EntryKind::ParitySums => {}
            EntryKind::Zeroes => {
                let end = self.end_of_zeroes(&piece).unwrap_or(first);
                for stripe in first..end.min(layout.stripes) {
                    stripes.entry(stripe).or_default().zeroed_at = Some(piece.sequence);
                }
            }
        }
    }

    /// Zeroes stripes that follow each other at once. Where that fails, each is tried by itself.
    async fn zero_runs(self: &Rc<Self>, stripes: &mut BTreeMap<u64, Findings>) {
        let is_due = |(stripe, findings): &(&u64, &Findings)| {
            findings.zeroed_at.is_some() && self.is_written(StripeIndex(**stripe))
        };
        let mut due = stripes.iter().filter(is_due).map(|(stripe, _)| *stripe).peekable();
        let mut runs: Vec<Range<u64>> = Vec::new();
        while let Some(first) = due.next() {
            let mut end = first + 1;
            while end - first < STRIPES_AT_ONCE && due.next_if_eq(&end).is_some() {
                end += 1;
            }
            runs.push(first..end);
        }
        for run in runs {
            let _touched: Vec<_> =
                run.clone().map(|stripe| self.touch(StripeIndex(stripe))).collect();
            if self.zero_in_place(run.clone()).await.is_ok() {
                self.bad.remove_stripes(run.clone());
                stripes.range_mut(run).for_each(|(_, findings)| findings.is_zero = true);
            }
        }
    }

    /// `None`: it says more stripes than an entry can.
    fn end_of_zeroes(&self, piece: &Piece) -> Option<u64> {
        let most = zeroed_stripes_max(self.identity.region_stripes());
        let count = Some(piece.rows.end).filter(|count| *count <= most)?;
        piece.stripe.0.checked_add(count.into())
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
            if self.is_written(stripe) && !findings.is_zero {
                self.zero_in_place(stripe.0..stripe.0 + 1).await?;
                self.bad.remove_stripes(stripe.0..stripe.0 + 1);
            }
        }
        let counts = |parity: &Piece| parity.data.oldest >= tail;
        findings.lost.retain(|(piece, _)| {
            let is_void = Some(piece.sequence) <= findings.zeroed_at;
            !is_void && (!piece.kind.is_parity() || counts(piece))
        });
        if !findings.lost.is_empty() {
            self.give_up_lost(stripe, findings).await?;
        }
        findings.parity.retain(counts);
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
            if piece.kind == EntryKind::Moved {
                self.unplaced.insert(stripe);
            }
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
            let done = self.finish_stores(stripe, self.start_stores(stripe, &store)).await;
            if done.no_space {
                return Err(ArrayError::NoSpace);
            }
            missed |= 1 << piece.position & !done.stored;
        }
        // Also a member that is absent now misses this, and must not be believed later.
        self.fence_bearable(stripe, missed).await
    }

    /// Gives every batch back to members that should have it and do not. One that cannot take it is
    /// as good as away; it is still believed, since nothing was acknowledged without it.
    async fn heal_batches(self: &Rc<Self>, found: &[Found]) -> Result<(), ArrayError> {
        for one in found.iter().filter(|one| !one.is_lost()) {
            while let Some(failed) = self.heal_batch(one).await? {
                if !self.members.survives_without(&failed) {
                    return Err(ArrayError::Lost);
                }
                for index in failed {
                    self.pull_member(index).map_err(|_| ArrayError::Lost)?;
                }
            }
        }
        self.journal.flush().await
    }

    /// Members that cannot take it; `None`: all that should have it do.
    async fn heal_batch(&self, one: &Found) -> Result<Option<Vec<MemberIndex>>, ArrayError> {
        let division = one.batch.division();
        let mut targets = self.journal.targets(one.sequence(), one.at + one.len(), division);
        targets.retain(|target| !one.members.contains(&target.member));
        if targets.is_empty() {
            return Ok(None);
        }
        let mut payload = Buffers::default();
        one.payload.iter().for_each(|bytes| payload.push(bytes.clone()));
        let parts = Parts::new(&self.reactor, self.kernels, Box::new(one.batch.clone()), &payload);
        let writes = targets.iter().map(|target| parts.write(target, one.at, one.sequence()));
        let results = join_all(writes).await;
        if self.members.lacks_space(targets.iter().map(|target| target.member), &results) {
            return Err(ArrayError::NoSpace);
        }
        let failed = targets.iter().zip(results).filter(|(_, result)| result.is_err());
        let failed: Vec<MemberIndex> = failed.map(|(target, _)| target.member).collect();
        Ok(Some(failed).filter(|failed| !failed.is_empty()))
    }
}

/// The parts of `rows` that are in none of `others`.
fn outside(rows: &Range<u32>, others: &[Range<u32>]) -> Vec<Range<u32>> {
    let mut written: Vec<(u8, Range<u32>)> = vec![(0, rows.clone())];
    written.extend(others.iter().map(|rows| (1, rows.clone())));
    let only = bands(&written, u32::MAX).into_iter().filter(|band| band.chunks == bits(0..1));
    only.map(|band| band.rows).collect()
}
