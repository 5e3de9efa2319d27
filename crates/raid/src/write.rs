//! Writing: through the journal, or in place with parity kept right.
//!
//! Write order in place, and what a crash leaves at each step:
//! 1. the region's dirty bit is durable, and it is one that was written (crash up to here: nothing
//!    was written)
//! 2. the rows are locked, the caller's bytes copied once, old data or parity read
//! 3. data and parity are written (crash: resync of the region)
//! 4. members that missed the write are fenced, durably
//! 5. checksums are written back, where they are kept (crash up to here: they may be old)
//! 6. the write is acknowledged
//!
//! Through the journal: the caller's bytes are copied once, become entries of one batch, and the
//! write is acknowledged when that is written to enough members (`journal.rs`, `destage.rs`).

use std::ops::Range;
use std::rc::Rc;

use ashlar_format::journal_batch::{ENTRIES_MAX, PAYLOAD_BYTES_MAX};
use ashlar_format::units::{MemberIndex, StripeIndex, to_usize};
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::{Mode as Lock, RangeGuard};
use ashlar_reactor::traffic::Kind;
use smallvec::SmallVec;

use crate::array::Array;
use crate::error::ArrayError;
use crate::journal::{Entries, Entry, Slice};
use crate::layout::{CHUNK_BYTES_MIN, Layout, Piece, Positions};
use crate::mode::Mode;
use crate::stored::{Store, Stored, Updated};
use crate::update::{NewList, NewRows, ParityList};
use crate::write_plan::{Band, bands, each};

/// Bytes of each chunk of a whole stripe that are copied before their parity is worked out: those
/// of a few chunks fit in the CPU's nearest caches, together with where they come from.
const COPIED_AT_ONCE: usize = 16 << 10;
const _: () = assert!((CHUNK_BYTES_MIN as usize).is_multiple_of(COPIED_AT_ONCE));

impl Array {
    /// Writes `from` at `offset`; both multiples of 512 bytes. The bytes are copied before
    /// anything is computed from them, so the caller's memory may change meanwhile.
    pub async fn write(self: &Rc<Self>, offset: u64, from: Buffers) -> Result<(), ArrayError> {
        let end = offset.checked_add(from.len() as u64).ok_or(ArrayError::Range)?;
        self.write_ranges(std::slice::from_ref(&(offset..end)), from).await
    }

    /// The same of several ranges, which `from` fills in order: one write, as atomic as any.
    pub async fn write_ranges(
        self: &Rc<Self>,
        ranges: &[Range<u64>],
        from: Buffers,
    ) -> Result<(), ArrayError> {
        let _request = self.admit().await?;
        let _passage = self.traffic.enter();
        let began = self.reactor.turn_time();
        let len: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        assert!(len == from.len() as u64, "the ranges are as long as what fills them");
        if ranges.iter().any(|range| !self.contains(range.start, range.end - range.start)) {
            return Err(ArrayError::Range);
        }
        let mode = self.enter_mode().await?;
        let (mut pieces, mut at) = (SmallVec::<[Piece; 4]>::new(), 0);
        for range in ranges {
            let part = range.end - range.start;
            let of_range = self.pieces(range.start, part);
            pieces.extend(of_range.map(|piece| Piece { at: at + piece.at, ..piece }));
            at += to_usize(part);
        }
        self.check_room_for_bad(&pieces)?;
        let result = match mode.mode {
            Mode::Journaled => {
                self.count(|counters| counters.journaled += 1);
                self.write_journaled(&pieces, &from).await
            }
            Mode::Direct => self.write_direct(&pieces, &from).await,
        };
        let now = self.reactor.turn_time();
        self.traffic.served(Kind::Write, len, began, now);
        self.pace.served(began, now);
        result
    }

    /// Everything acknowledged before is durable when this returns.
    pub async fn flush(self: &Rc<Self>) -> Result<(), ArrayError> {
        let _request = self.admit().await?;
        let _passage = self.traffic.enter();
        let began = self.reactor.turn_time();
        self.written.settle().await?;
        self.bad.save().await?;
        self.journal.flush().await?;
        self.journal.name_first().await;
        self.traffic.served(Kind::Flush, 0, began, self.reactor.turn_time());
        Ok(())
    }

    /// Before writes that may leave parts of bad ranges.
    fn check_room_for_bad(&self, pieces: &[Piece]) -> Result<(), ArrayError> {
        if self.bad.is_empty() {
            return Ok(());
        }
        let pending = self.journal.pending.borrow();
        let waiting = self.bad.stripes().into_iter().map(|s| pending.of(s, u64::MAX).count()).sum();
        let bears = |p: &Piece| self.bad.bears(p.stripe, p.chunk, &p.rows, waiting);
        if pieces.iter().all(bears) { Ok(()) } else { Err(ArrayError::TooManyBad) }
    }

    /// Before a write in place is acknowledged: these rows are bad no longer, durably. By then the
    /// new bytes are, too.
    async fn heal(
        &self,
        stripe: StripeIndex,
        written: &[(u8, Range<u32>)],
    ) -> Result<(), ArrayError> {
        let is_bad = |(chunk, rows): &(u8, _)| self.bad.is_within(stripe, *chunk, rows);
        if !written.iter().any(is_bad) {
            return Ok(());
        }
        self.members.flush().await?;
        written.iter().for_each(|(chunk, rows)| self.bad.remove(stripe, *chunk, rows));
        self.bad.save().await
    }

    /// A write that fits in one batch is atomic; whatever is promised to be fits in one.
    async fn write_journaled(
        self: &Rc<Self>,
        pieces: &[Piece],
        from: &Buffers,
    ) -> Result<(), ArrayError> {
        if pieces.iter().any(|piece| !self.can_store(piece.stripe, piece.chunk)) {
            return Err(ArrayError::Lost);
        }
        let _sectors = self.lock_parts(pieces).await;
        let mut batches: SmallVec<[Entries; 1]> = SmallVec::new();
        let (mut batch, mut payload) = (Entries::new(), 0);
        for piece in pieces.iter().flat_map(|piece| split(piece, self.sector_bytes)) {
            let new = self.stable_copy(&piece, from, Mode::Journaled).await?;
            let len = new.bytes.len();
            if batch.len() == ENTRIES_MAX || payload + len > PAYLOAD_BYTES_MAX as usize {
                batches.push(std::mem::take(&mut batch));
                payload = 0;
            }
            payload += len;
            let (stripe, row) = (piece.stripe, new.rows.start);
            batch.push(Entry::Data { stripe, chunk: piece.chunk, row, bytes: new.bytes });
        }
        if batches.is_empty() {
            return self.journal.append(batch).await.map(|_| ());
        }
        let promised = self.settings().atomic_bytes(self.sector_bytes) as usize;
        assert!(from.len() > promised, "an atomic write in several batches");
        batches.push(batch);
        let appends = batches.into_iter().map(|batch| self.journal.append(batch));
        join_all(appends).await.into_iter().try_for_each(|appended| appended.map(|_| ()))
    }

    /// What is around a part of a sector must not change between its being read and stored: whoever
    /// writes parts has the stripe alone, others share it. Nothing is locked where every request
    /// is of whole sectors. In order of stripes, each once: pieces come as the ranges of a volume.
    async fn lock_parts(&self, pieces: &[Piece]) -> SmallVec<[RangeGuard; 2]> {
        let mut guards = SmallVec::new();
        if self.sector_bytes == 512 {
            return guards;
        }
        let part = |its: &Piece| (its.stripe.0, self.whole_sectors(&its.rows) == its.rows);
        let mut parts: SmallVec<[(u64, bool); 2]> = pieces.iter().map(part).collect();
        // What is not whole stands first.
        parts.sort_unstable();
        parts.dedup_by_key(|(stripe, _)| *stripe);
        for (stripe, whole) in parts {
            let lock = if whole { Lock::Shared } else { Lock::Exclusive };
            guards.push(self.sector_locks.lock(stripe..stripe + 1, lock).await);
        }
        guards
    }

    async fn write_direct(
        self: &Rc<Self>,
        pieces: &[Piece],
        from: &Buffers,
    ) -> Result<(), ArrayError> {
        let same_stripe = |a: &Piece, b: &Piece| a.stripe == b.stripe;
        if pieces.windows(2).all(|pair| same_stripe(&pair[0], &pair[1])) {
            self.write_stripe(pieces, from).await?;
        } else {
            let stripes = pieces.chunk_by(same_stripe).map(|p| self.write_stripe(p, from));
            join_all(stripes).await.into_iter().collect::<Result<(), _>>()?;
        }
        // No batch sets them again after a crash.
        self.write_sums().await
    }

    /// `pieces`: of one stripe, at least one.
    async fn write_stripe(
        self: &Rc<Self>,
        pieces: &[Piece],
        from: &Buffers,
    ) -> Result<(), ArrayError> {
        let Some(first) = pieces.first() else { return Ok(()) };
        let stripe = first.stripe;
        // Of what is written, and of parity, the old bytes and the new.
        let operations = 2 * (pieces.len() + usize::from(self.layout().parity));
        self.reactor.breathe(u32::try_from(operations).unwrap_or(u32::MAX)).await;
        let _region = self.mark_dirty(stripe).await?;
        let wide = pieces.iter().map(|piece| self.whole_sectors(&piece.rows));
        let first_row = wide.clone().map(|rows| rows.start).min().unwrap_or(0);
        let last_row = wide.map(|rows| rows.end).max().unwrap_or(0);
        let whole = self.is_whole_stripe(pieces);
        let _rows = self.lock_in_sync(stripe, first_row..last_row, whole).await?;
        let (new, parity) = match whole {
            true => self.copy_whole(stripe, pieces, from),
            false => (self.copy_each(pieces, from).await?, SmallVec::new()),
        };
        let written: SmallVec<[_; 4]> = new.iter().map(|n| (n.chunk, n.rows.clone())).collect();
        let bands = bands(&written, u32::MAX);
        let result = match bands.as_slice() {
            [band] => self.write_band(stripe, band.clone(), new, parity).await,
            _ => self.write_bands(stripe, bands, &new).await,
        };
        if whole && result.is_ok() {
            self.unsynced.remove(stripe);
        }
        result?;
        self.heal(stripe, &written).await
    }

    /// What nearly every write is.
    async fn write_band(
        &self,
        stripe: StripeIndex,
        band: Band,
        new: NewList,
        parity: ParityList,
    ) -> Result<(), ArrayError> {
        let update = self.start_update(stripe, band, new)?;
        let updated = self.finish_update(update.knowing(parity)).await?;
        self.fence_first(&updated).await?;
        let done = self.finish_stores(stripe, self.start_stores(stripe, &updated.stores)).await;
        self.acknowledge(&updated, done).await
    }

    /// Bands of one stripe, at the same time.
    async fn write_bands(
        &self,
        stripe: StripeIndex,
        bands: SmallVec<[Band; 3]>,
        new: &[NewRows],
    ) -> Result<(), ArrayError> {
        let mut started: SmallVec<[_; 3]> = SmallVec::new();
        let (mut ready, mut failed) = (SmallVec::<[_; 3]>::new(), None);
        for band in bands {
            let new = new.iter().filter_map(|new| new.within(&band.rows)).collect();
            match self.start_update(stripe, band, new) {
                Ok(update) => started.push(update),
                Err(error) => failed = Some(error),
            }
        }
        // Nothing that was started is left behind, and nothing is stored unless all can be.
        for update in started {
            match self.finish_update(update).await {
                Ok(updated) => ready.push(updated),
                Err(error) => failed = Some(error),
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        for updated in &ready {
            self.fence_first(updated).await?;
        }
        let started = ready.iter().map(|updated| self.start_stores(stripe, &updated.stores));
        let started: SmallVec<[_; 3]> = started.collect();
        let mut result = Ok(());
        for (updated, storing) in ready.iter().zip(started) {
            let done = self.finish_stores(stripe, storing).await;
            result = result.and(self.acknowledge(updated, done).await);
        }
        result
    }

    fn is_whole_stripe(&self, pieces: &[Piece]) -> bool {
        let is_whole = |layout: Layout| {
            let mut each = pieces.iter().zip(0..);
            each.all(|(piece, chunk)| piece.chunk == chunk && piece.rows == (0..layout.chunk_bytes))
                && pieces.len() == usize::from(layout.data)
        };
        pieces.first().is_some_and(|piece| is_whole(self.layout_of(piece.stripe)))
    }

    /// Locks rows of a stripe whose parity or copies agree, making them agree first where needed.
    /// A `whole` write needs no agreement: it makes it.
    async fn lock_in_sync(
        self: &Rc<Self>,
        stripe: StripeIndex,
        rows: Range<u32>,
        whole: bool,
    ) -> Result<RangeGuard, ArrayError> {
        loop {
            self.make_written(stripe).await?;
            let guard = self.lock_rows(stripe, rows.clone(), Lock::Exclusive).await;
            if !self.is_written(stripe) {
                continue;
            }
            if whole || !self.unsynced.contains(stripe) {
                return Ok(guard);
            }
            drop(guard);
            self.sync_now(stripe).await?;
        }
    }

    /// Copies a whole stripe, and works its parity out, part by part: while it is copied, a part is
    /// in the CPU's nearest cache.
    fn copy_whole(
        &self,
        stripe: StripeIndex,
        pieces: &[Piece],
        from: &Buffers,
    ) -> (NewList, ParityList) {
        let layout = self.layout_of(stripe);
        let len = layout.chunk_bytes as usize;
        let new_rows = |piece: &Piece| {
            let Piece { chunk, ref rows, .. } = *piece;
            NewRows { chunk, rows: rows.clone(), bytes: self.reactor.buffer(len) }
        };
        let new: NewList = pieces.iter().map(new_rows).collect();
        let mut parity: ParityList = (0..layout.parity).map(|_| self.reactor.buffer(len)).collect();
        for at in (0..len).step_by(COPIED_AT_ONCE) {
            let part = at..at + COPIED_AT_ONCE;
            for (piece, new) in pieces.iter().zip(&new) {
                let source = from.slice(piece.at + part.start..piece.at + part.end);
                Buffers::from(new.bytes.slice(part.clone())).copy_from(&source);
            }
            if !parity.is_empty() {
                let data: SmallVec<[&[u8]; 16]> =
                    new.iter().map(|new| &new.bytes.bytes()[part.clone()]).collect();
                let mut outputs: SmallVec<[&mut [u8]; 2]> =
                    parity.iter_mut().map(|its| &mut its.bytes_mut()[part.clone()]).collect();
                self.kernels.encode(&data, &mut outputs);
            }
        }
        (new, parity)
    }

    async fn copy_each(
        self: &Rc<Self>,
        pieces: &[Piece],
        from: &Buffers,
    ) -> Result<NewList, ArrayError> {
        let mut new = NewList::new();
        for piece in pieces {
            new.push(self.stable_copy(piece, from, Mode::Direct).await?);
        }
        Ok(new)
    }

    /// Copies the caller's bytes; reads what is around them where they are no whole sectors.
    async fn stable_copy(
        self: &Rc<Self>,
        piece: &Piece,
        from: &Buffers,
        mode: Mode,
    ) -> Result<NewRows, ArrayError> {
        let rows = self.whole_sectors(&piece.rows);
        let len = (rows.end - rows.start) as usize;
        // What is read was made for us: nobody else will use it.
        let bytes = match mode {
            _ if rows == piece.rows => self.reactor.buffer(len),
            Mode::Journaled => self.read_newest(piece.stripe, piece.chunk, &rows, false).await?,
            // The caller holds the rows.
            Mode::Direct => {
                self.bad.check(piece.stripe, piece.chunk, &rows, std::iter::empty())?;
                self.read_anyhow(piece.stripe, piece.chunk, &rows).await?
            }
        };
        let at = (piece.rows.start - rows.start) as usize;
        let own = Buffers::from(bytes.slice(at..at + piece.len()));
        own.copy_from(&from.slice(piece.in_request()));
        Ok(NewRows { chunk: piece.chunk, rows, bytes })
    }

    /// Writes slices to their members, all at once.
    pub(crate) async fn write_slices(&self, stripe: StripeIndex, slices: &[Slice]) -> Stored {
        let store = |slice: &Slice| {
            let Slice { position, row, bytes } = slice.clone();
            Store { position, row, bytes: bytes.into() }
        };
        let stores: SmallVec<[Store; 4]> = slices.iter().map(store).collect();
        self.finish_stores(stripe, self.start_stores(stripe, &stores)).await
    }

    /// Before anything is stored: who will miss it is believed no more. Else one that alone has it,
    /// and the dirty bit that says so, could come back to others that went on without it.
    async fn fence_first(&self, updated: &Updated) -> Result<(), ArrayError> {
        match updated.missed() {
            0 => Ok(()),
            missed => self.fence_for(updated.stripe, missed).await,
        }
    }

    /// Fences members of the stripe for a write that they miss. Not in an array that has failed as
    /// a whole: members that hear nothing of it, nor of the fence, could be started without the one
    /// that has both.
    async fn fence_for(&self, stripe: StripeIndex, missed: Positions) -> Result<(), ArrayError> {
        let layout = self.layout_of(stripe);
        let members = each(missed).map(|position| layout.member_at(stripe, position));
        if !self.members.survives_without(&members.collect::<SmallVec<[MemberIndex; 4]>>()) {
            return Err(ArrayError::Lost);
        }
        self.members.fence_missed(stripe, missed).await
    }

    /// Decides what the writer hears.
    async fn acknowledge(&self, updated: &Updated, done: Stored) -> Result<(), ArrayError> {
        let behind: Positions = updated.wanted & !done.stored;
        if behind == 0 {
            return Ok(());
        }
        if self.is_safe(updated, done.stored)
            && !done.no_space
            && self.fence_for(updated.stripe, behind).await.is_ok()
        {
            return Ok(());
        }
        // Nobody is fenced for a write that is not acknowledged; but what it left behind may not
        // agree any more.
        if self.layout().is_redundant() {
            self.unsynced.insert(updated.stripe);
        }
        self.hide();
        Err(if done.no_space { ArrayError::NoSpace } else { ArrayError::Lost })
    }
}

/// The piece in parts that each fit in a batch together with what is around them. Cut between
/// sectors: of two parts of one sector, each would have old bytes where the other has new ones.
fn split(piece: &Piece, sector_bytes: u32) -> impl Iterator<Item = Piece> {
    let piece = piece.clone();
    let first = piece.rows.start / sector_bytes * sector_bytes;
    (first..piece.rows.end).step_by(PAYLOAD_BYTES_MAX as usize).map(move |cut| {
        let rows = cut.max(piece.rows.start)..(cut + PAYLOAD_BYTES_MAX).min(piece.rows.end);
        let at = piece.at + (rows.start - piece.rows.start) as usize;
        Piece { rows, at, ..piece.clone() }
    })
}
