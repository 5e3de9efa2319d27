//! Reading: from the member that holds a block, else from the others.
//!
//! What was never written is zero. A healthy read takes no lock and goes straight into the caller's
//! memory. A read that must be reconstructed locks its rows, so that no write changes them
//! half-way. What does not fit its checksum is read again under that lock (`verify.rs`). Where a
//! request wants a chunk that is away, and others of its stripe, these are read once for both.

use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::drive::{Drive, DriveIo};
use ashlar_drive::error::DriveError;
use ashlar_format::units::StripeIndex;
use ashlar_reactor::backend::Instant;
use ashlar_reactor::buffer::{Buffer, Buffers, DIRECT_ALIGN};
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::Mode;
use ashlar_reactor::traffic::Kind;
use smallvec::SmallVec;

use crate::array::Array;
use crate::error::ArrayError;
use crate::hedged_read::HedgedIo;
use crate::layout::{Piece, Positions};
use crate::read_plan;
use crate::verify::{cut, overlap, within};
use crate::write_plan::each;

/// How a piece is being read. What is rare is boxed: this is moved with every read.
enum Started {
    /// It was zero.
    Done,
    /// From a position into the caller's memory.
    Direct(u8, DriveIo),
    Hedged(Box<HedgedIo>),
    /// It takes more than one member.
    Not,
}

impl Array {
    /// Fills `into` from `offset`; both multiples of 512 bytes.
    pub async fn read(self: &Rc<Self>, offset: u64, into: Buffers) -> Result<(), ArrayError> {
        if self.read_now(offset, &into)
            || self.reactor.breathe(1).await && self.read_now(offset, &into)
        {
            return Ok(());
        }
        let _request = self.admit().await?;
        let _passage = self.traffic.enter();
        let began = self.reactor.turn_time();
        let len = into.len() as u64;
        let _addresses = self.hold_addresses(offset, len).await;
        if !self.contains(offset, len) {
            return Err(ArrayError::Range);
        }
        let result = match self.one_piece(offset, len) {
            Some(piece) => {
                let seen = self.bad.added_near(piece.stripe);
                let read = self.begin_read(&piece, &into);
                self.end_read(&piece, &into, read, seen).await
            }
            None => self.read_pieces(offset, into).await,
        };
        self.count_read(began, len);
        self.still_ours().await?;
        result
    }

    pub(crate) fn count_read(&self, began: Instant, len: u64) {
        let now = self.reactor.turn_time();
        self.traffic.served(Kind::Read, len, began, now);
        self.pace.served(began, now);
    }

    /// A read of more than one chunk.
    async fn read_pieces(self: &Rc<Self>, offset: u64, into: Buffers) -> Result<(), ArrayError> {
        // All are started before the first is waited for; and all are waited for, also after an
        // error, since a drive may still be writing to the caller's memory.
        let mut started: SmallVec<[(Piece, Buffers, Started, u64); 2]> = SmallVec::new();
        let pieces: SmallVec<[Piece; 2]> = self.pieces(offset, into.len() as u64).collect();
        let mut together: SmallVec<[_; 1]> = SmallVec::new();
        for pieces in pieces.chunk_by(|a, b| a.stripe == b.stripe) {
            if let Some(rows) = self.less_together(pieces) {
                together.push((pieces, rows));
                continue;
            }
            for piece in pieces {
                let into = into.slice(piece.in_request());
                let seen = self.bad.added_near(piece.stripe);
                let read = self.begin_read(piece, &into);
                started.push((piece.clone(), into, read, seen));
            }
        }
        if !together.is_empty() {
            for piece in self.read_all_together(&together, &into).await {
                let into = into.slice(piece.in_request());
                started.push((piece, into, Started::Not, 0));
            }
        }
        let mut result = Ok(());
        for (piece, into, read, seen) in started {
            result = result.and(self.end_read(&piece, &into, read, seen).await);
        }
        result
    }

    /// Waits for a piece, and reads it another way if that was nothing. `seen`: bad blocks added
    /// near it before it was begun.
    async fn end_read(
        self: &Rc<Self>,
        piece: &Piece,
        into: &Buffers,
        read: Started,
        seen: u64,
    ) -> Result<(), ArrayError> {
        let direct = match read {
            Started::Done => return Ok(()),
            Started::Direct(position, io) => {
                let row = piece.rows.start;
                Some(io.await.is_ok() && self.fits(piece.stripe, position, row, into).await)
            }
            Started::Hedged(io) => Some(self.finish_hedged(piece, into, *io).await.is_ok()),
            Started::Not => None,
        };
        // Zeroes take the place of what is given up meanwhile.
        if direct == Some(true) && self.bad.added_near(piece.stripe) == seen {
            return Ok(());
        }
        // A drive that was given up may still be writing there, and would do so over what is put
        // there instead, or over what the guest makes of its memory next.
        self.reactor.reclaim(into).await;
        self.read_indirect(piece, into, direct == Some(false)).await
    }

    /// Starts the read if one member can answer it, or none has to.
    fn begin_read(&self, piece: &Piece, into: &Buffers) -> Started {
        let stripe = piece.stripe;
        if self.is_blank_stripe(stripe) && self.is_settled(&(stripe.0..stripe.0 + 1)) {
            into.fill_zero();
            return Started::Done;
        }
        if !self.is_in_place(piece) {
            return Started::Not;
        }
        let Some((position, drive, at)) = self.one_that_has(piece) else { return Started::Not };
        if self.settings().hedge_percent() > 0 && self.layout().is_redundant() {
            return Started::Hedged(Box::new(self.start_hedged(piece, position, &drive, at)));
        }
        if !into.is_aligned(DIRECT_ALIGN.max(self.sector_bytes as usize)) {
            return Started::Not;
        }
        Started::Direct(position, drive.read(at, into.clone()))
    }

    /// Whether what was written last is what the stripe has, in whole sectors.
    pub(crate) fn is_in_place(&self, piece: &Piece) -> bool {
        let Piece { stripe, chunk, ref rows, .. } = *piece;
        let sector = self.sector_bytes;
        let whole = rows.start.is_multiple_of(sector) && rows.end.is_multiple_of(sector);
        whole
            && self.is_written(stripe)
            && !self.journal.pending.borrow().contains(stripe)
            && !self.becomes_zero(stripe)
            && !self.bad.is_within(stripe, chunk, rows)
    }

    /// The rows of these pieces of one stripe, if they should be read together: one is away.
    fn less_together(&self, pieces: &[Piece]) -> Option<Range<u32>> {
        let stripe = pieces.first()?.stripe;
        let layout = self.layout_of(stripe);
        if pieces.len() == 1 || layout.parity == 0 || self.settings().hedge_percent() > 0 {
            return None;
        }
        let rows = read_plan::less_together(layout.data, pieces, self.members.held(stripe))?;
        let pending = self.journal.pending.borrow().contains(stripe);
        (!pending && self.agrees(stripe)).then(|| self.whole_sectors(&rows))
    }

    /// Whether anything of the stripe can be worked out from the rest.
    pub(crate) fn agrees(&self, stripe: StripeIndex) -> bool {
        let doubtful = self.unsynced.contains(stripe) || self.torn_stripes.contains(stripe);
        self.is_written(stripe) && !doubtful && self.bad.of(stripe).is_empty()
    }

    /// What is left of it is to be read piece by piece.
    async fn read_all_together(
        &self,
        together: &[(&[Piece], Range<u32>)],
        into: &Buffers,
    ) -> Vec<Piece> {
        let reads = together.iter().map(|(pieces, rows)| self.read_together(pieces, rows, into));
        let done = join_all(reads).await;
        let left = together.iter().zip(done).filter(|(_, done)| !done);
        left.flat_map(|((pieces, _), _)| pieces.iter().cloned()).collect()
    }

    /// Reads pieces of one stripe, some of which are away, from `k` positions. False: each is to be
    /// read by itself.
    async fn read_together(&self, pieces: &[Piece], rows: &Range<u32>, into: &Buffers) -> bool {
        let Some(stripe) = pieces.first().map(|piece| piece.stripe) else { return false };
        let seen = self.bad.added_near(stripe);
        let _rows = self.lock_rows(stripe, rows.clone(), Mode::Shared).await;
        if !self.agrees(stripe) {
            return false;
        }
        let wanted = pieces.iter().fold(0, |bits, piece| bits | 1 << piece.chunk);
        let Ok(Ok(mut all)) = self.read_any_k(stripe, rows, 0, wanted).await else { return false };
        let away = all.iter().fold(wanted, |bits, (position, _)| bits & !(1 << position));
        match self.work_out(stripe, away, &all) {
            Ok(others) => all.extend(others),
            Err(_) => return false,
        }
        if self.bad.added_near(stripe) != seen {
            return false;
        }
        for piece in pieces {
            let (_, bytes) = all.iter().find(|(p, _)| *p == piece.chunk).expect("it was wanted");
            let at = (piece.rows.start - rows.start) as usize;
            let bytes = Buffers::from(bytes.slice(at..at + piece.len()));
            into.slice(piece.in_request()).copy_from(&bytes);
        }
        self.count(|counters| counters.reconstructed += u64::from(away.count_ones()));
        true
    }

    /// A position that holds the piece, its drive, and where it is there.
    pub(crate) fn one_that_has(&self, piece: &Piece) -> Option<(u8, Rc<Drive>, u64)> {
        let positions = self.layout().data_positions(piece.chunk);
        let mut turn = 0;
        if self.layout().is_mirrored() {
            // Copies that may differ must be made one before any is shown.
            if self.unsynced.contains(piece.stripe) {
                return None;
            }
            turn = self.next_copy.get();
            self.next_copy.set(turn.wrapping_add(1));
        }
        let copies = self.layout().copies;
        let mut order = (0..copies).map(|i| positions.start + turn.wrapping_add(i) % copies);
        let (position, (drive, base)) =
            order.find_map(|p| Some((p, self.members.at(piece.stripe, p)?)))?;
        Some((position, drive, base + self.layout().member_offset(piece.stripe, piece.rows.start)))
    }

    /// Reads through engine memory: reconstructed, unaligned, or after an error.
    async fn read_indirect(
        self: &Rc<Self>,
        piece: &Piece,
        into: &Buffers,
        after_error: bool,
    ) -> Result<(), ArrayError> {
        if self.layout().is_mirrored() && self.unsynced.contains(piece.stripe) {
            self.sync_chunks(piece.stripe, 1 << piece.chunk).await?;
        }
        let rows = self.whole_sectors(&piece.rows);
        let buffer = self.read_newest(piece.stripe, piece.chunk, &rows, after_error).await?;
        let from = (piece.rows.start - rows.start) as usize;
        into.copy_from(&Buffers::from(buffer.slice(from..from + piece.len())));
        Ok(())
    }

    /// Rows of one data chunk with what is pending of them, in memory of their own. `after_error`:
    /// they could not be read before; what is worked out is written over them.
    pub(crate) async fn read_newest(
        self: &Rc<Self>,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
        after_error: bool,
    ) -> Result<Buffer, ArrayError> {
        loop {
            let seen = self.bad.added_near(stripe);
            let buffer = self.read_newest_now(stripe, chunk, rows, after_error).await?;
            if self.bad.added_near(stripe) == seen {
                return Ok(buffer);
            }
        }
    }

    async fn read_newest_now(
        self: &Rc<Self>,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
        after_error: bool,
    ) -> Result<Buffer, ArrayError> {
        // Looked at before the members are: what is put in place meanwhile is in one of the two.
        let parts: SmallVec<[(u32, Buffer); 4]> =
            self.journal.pending.borrow().within(stripe, chunk, rows).collect();
        let newer = || parts.iter().map(|(row, bytes)| *row..*row + len_of(bytes));
        if self.is_written(stripe) {
            self.bad.check(stripe, chunk, rows, newer())?;
        }
        let pending: u32 = parts.iter().map(|(_, bytes)| len_of(bytes)).sum();
        if pending == 0 {
            return self.read_in_place(stripe, chunk, rows, after_error).await;
        }
        // One read is better than many. But what is pending may stand in part, and not fit, or not
        // be readable at all.
        let mut whole = None;
        if self.integrity.is_none() && pending < rows.end - rows.start {
            whole = self.read_in_place(stripe, chunk, rows, after_error).await.ok();
        }
        let buffer = match whole {
            Some(buffer) => buffer,
            None => self.read_beside(stripe, chunk, rows, after_error, newer).await?,
        };
        for (first, bytes) in &parts {
            buffer.slice(within(rows, &(*first..*first + len_of(bytes)))).copy_from(bytes);
        }
        Ok(buffer)
    }

    /// The rows with what is in place, but for those that are `newer`: anything stands there.
    async fn read_beside<I: Iterator<Item = Range<u32>>>(
        self: &Rc<Self>,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
        after_error: bool,
        newer: impl Fn() -> I,
    ) -> Result<Buffer, ArrayError> {
        let is_newer = |part: &Range<u32>| newer().any(|newer| overlap(&newer, part));
        let left = cut(rows, newer()).into_iter().filter(|part| !is_newer(part));
        let left: SmallVec<[_; 2]> = left.map(|part| self.whole_sectors(&part)).collect();
        let reads = left.iter().map(|part| self.read_in_place(stripe, chunk, part, after_error));
        let buffer = self.reactor.buffer((rows.end - rows.start) as usize);
        for (part, read) in left.iter().zip(join_all(reads).await) {
            buffer.slice(within(rows, part)).copy_from(&read?);
        }
        Ok(buffer)
    }

    /// The rows, if they are zeroes whatever stands on the members, and after any restart.
    async fn zeroes_of(
        &self,
        stripe: StripeIndex,
        rows: &Range<u32>,
    ) -> Result<Option<Buffer>, ArrayError> {
        if !self.is_written(stripe) {
            if self.is_stranded(stripe) {
                // What is missing may be of any row.
                return Err(ArrayError::Lost);
            }
            self.finish_forgetting(stripe.0..stripe.0 + 1).await?;
        } else if !self.becomes_zero(stripe) {
            return Ok(None);
        }
        Ok(Some(self.zeroes(rows)))
    }

    /// Locks the rows only if they must be worked out.
    async fn read_in_place(
        self: &Rc<Self>,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
        after_error: bool,
    ) -> Result<Buffer, ArrayError> {
        let first = self.layout().data_positions(chunk).start;
        if let Some(zeroes) = self.zeroes_of(stripe, rows).await? {
            return Ok(zeroes);
        }
        let mut after_error = after_error;
        if !after_error && let Some(read) = self.read_position(stripe, first, rows).await {
            match read {
                Ok(buffer) => return Ok(buffer),
                Err(_) => after_error = true,
            }
        }
        let mode = if after_error { Mode::Exclusive } else { Mode::Shared };
        let _rows = self.lock_rows(stripe, rows.clone(), mode).await;
        // Whoever held them until now may have made them so.
        if let Some(zeroes) = self.zeroes_of(stripe, rows).await? {
            return Ok(zeroes);
        }
        if after_error && let Some((buffer, parts)) = self.to_replace(stripe, chunk, rows).await {
            self.read_parts(stripe, chunk, rows, parts, true, &buffer).await?;
            return Ok(buffer);
        }
        self.read_anyhow(stripe, chunk, rows).await
    }

    /// Rows of one data chunk for a caller who holds them.
    pub(crate) async fn read_anyhow(
        &self,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
    ) -> Result<Buffer, ArrayError> {
        let read = self.read_locked(stripe, chunk, rows, false).await;
        let parts = match read {
            Err(ArrayError::Lost) if rows.end - rows.start > self.sector_bytes => {
                self.sectors(rows).collect()
            }
            read => return read.map(|(buffer, _)| buffer),
        };
        let buffer = self.reactor.buffer((rows.end - rows.start) as usize);
        self.read_parts(stripe, chunk, rows, parts, false, &buffer).await?;
        Ok(buffer)
    }

    /// Reads these parts of the rows, each from wherever it can be had as a whole, or else each of
    /// its sectors. `again`: they could not be read before, and are written where that was.
    async fn read_parts(
        &self,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
        mut parts: Vec<Range<u32>>,
        again: bool,
        into: &Buffer,
    ) -> Result<(), ArrayError> {
        while let Some(part) = parts.pop() {
            match self.read_locked(stripe, chunk, &part, again).await {
                Ok((bytes, bad)) => {
                    if again {
                        self.repair(stripe, part.start, &bytes, bad).await;
                    }
                    into.slice(within(rows, &part)).copy_from(&bytes);
                }
                Err(ArrayError::Lost) if part.end - part.start > self.sector_bytes => {
                    parts.extend(self.sectors(&part));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what a chunk's own member has of these rows, and tells what it cannot read of them, or
    /// what is not as it was written. No more than that is to be replaced: were another member
    /// wrong about a sector that is well, that would be believed. `None`: the member is not here.
    async fn to_replace(
        &self,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
    ) -> Option<(Buffer, Vec<Range<u32>>)> {
        let mut positions = self.layout().data_positions(chunk);
        let own = positions.find(|p| self.members.at(stripe, *p).is_some())?;
        let probed = self.probe(stripe, own, rows, true).await.ok()?;
        let mut parts: Vec<Range<u32>> = Vec::new();
        for sector in self.sectors(rows).filter(|sector| !probed.is_readable(sector)) {
            match parts.last_mut() {
                Some(last) if last.end == sector.start => last.end = sector.end,
                Some(_) | None => parts.push(sector),
            }
        }
        Some((probed.bytes, parts))
    }

    /// Each of the members' sectors.
    pub(crate) fn sectors(&self, rows: &Range<u32>) -> impl Iterator<Item = Range<u32>> + use<> {
        let (end, bytes) = (rows.end, self.sector_bytes);
        rows.clone().step_by(bytes as usize).map(move |row| row..end.min(row + bytes))
    }

    pub(crate) fn zeroes(&self, rows: &Range<u32>) -> Buffer {
        let buffer = self.reactor.buffer((rows.end - rows.start) as usize);
        buffer.fill_zero();
        buffer
    }

    /// The rows widened to whole sectors of the members.
    pub(crate) fn whole_sectors(&self, rows: &Range<u32>) -> Range<u32> {
        let sector = self.sector_bytes;
        rows.start / sector * sector..rows.end.next_multiple_of(sector)
    }

    /// Rows of one data chunk, from wherever they can be had. The caller holds the rows' lock.
    /// Also tells which of the chunk's own positions should have had them and could not. `again`:
    /// the only one was tried a moment ago, and says nothing more about its drive.
    pub(crate) async fn read_locked(
        &self,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
        again: bool,
    ) -> Result<(Buffer, Positions), ArrayError> {
        let mut bad = 0;
        let read = if again && !self.layout().is_mirrored() { Drive::probe } else { Drive::read };
        for position in self.layout().data_positions(chunk) {
            let started = self.start_position_by(read, stripe, position, rows);
            let Some((buffer, io)) = started else { continue };
            match io.await {
                Err(_) => bad |= 1 << position,
                Ok(()) => match self.make_true(stripe, position, rows, &buffer).await {
                    Ok(()) => return Ok((buffer, bad)),
                    // Another copy may be what it should be.
                    Err(error) if self.layout().parity > 0 => return Err(error),
                    Err(_) => {}
                },
            }
        }
        if self.layout().parity == 0 {
            return Err(ArrayError::Lost);
        }
        let buffer = self.reconstruct(stripe, chunk, rows, bad).await?;
        // What is known of a drive that is gone by now says no more than of one that never was.
        bad &= self.members.held(stripe);
        if bad != 0
            && !self.may_be(stripe, chunk, rows, &buffer).await
            && !self.outvote_checksum(stripe, chunk, rows, &buffer).await
        {
            return Err(ArrayError::Lost);
        }
        self.count(|counters| counters.reconstructed += 1);
        Ok((buffer, bad))
    }

    /// Starts to read rows of one position; `None` if its member does not hold them.
    pub(crate) fn start_position(
        &self,
        stripe: StripeIndex,
        position: u8,
        rows: &Range<u32>,
    ) -> Option<(Buffer, DriveIo)> {
        self.start_position_by(Drive::read, stripe, position, rows)
    }

    fn start_position_by(
        &self,
        read: fn(&Rc<Drive>, u64, Buffers) -> DriveIo,
        stripe: StripeIndex,
        position: u8,
        rows: &Range<u32>,
    ) -> Option<(Buffer, DriveIo)> {
        let (drive, base) = self.members.at(stripe, position)?;
        let buffer = self.reactor.buffer((rows.end - rows.start) as usize);
        let at = base + self.layout().member_offset(stripe, rows.start);
        let io = read(&drive, at, buffer.clone().into());
        Some((buffer, io))
    }

    /// What is not as the member was given it counts as unreadable.
    pub(crate) async fn read_position(
        &self,
        stripe: StripeIndex,
        position: u8,
        rows: &Range<u32>,
    ) -> Option<Result<Buffer, DriveError>> {
        let (buffer, io) = self.start_position(stripe, position, rows)?;
        if let Err(error) = io.await {
            return Some(Err(error));
        }
        let fits = self.fits(stripe, position, rows.start, &buffer.clone().into()).await;
        Some(if fits { Ok(buffer) } else { Err(DriveError::Media) })
    }

    /// Works rows of one position out from `k` others. `bad` cannot be read.
    pub(crate) async fn reconstruct(
        &self,
        stripe: StripeIndex,
        position: u8,
        rows: &Range<u32>,
        bad: Positions,
    ) -> Result<Buffer, ArrayError> {
        let mut all = self.reconstruct_all(stripe, 1 << position, rows, bad).await?;
        Ok(all.remove(0).1)
    }

    /// The same for several positions, which are read for once.
    pub(crate) async fn reconstruct_all(
        &self,
        stripe: StripeIndex,
        wanted: Positions,
        rows: &Range<u32>,
        bad: Positions,
    ) -> Result<SmallVec<[(u8, Buffer); 2]>, ArrayError> {
        // Parity that may not fit the data would give wrong data.
        if self.unsynced.contains(stripe) || self.torn_stripes.contains(stripe) {
            return Err(ArrayError::Lost);
        }
        let mut bad = bad | wanted;
        let have = loop {
            match self.read_any_k(stripe, rows, bad, 0).await? {
                Ok(have) => break have,
                Err(unreadable) => bad |= unreadable,
            }
        };
        self.work_out(stripe, wanted, &have)
    }

    /// Positions from the same rows of `k` others.
    pub(crate) fn work_out(
        &self,
        stripe: StripeIndex,
        wanted: Positions,
        have: &[(u8, Buffer)],
    ) -> Result<SmallVec<[(u8, Buffer); 2]>, ArrayError> {
        let len = have.first().map_or(0, |(_, buffer)| buffer.len());
        let mut out: SmallVec<[(u8, Buffer); 2]> =
            each(wanted).map(|position| (position, self.reactor.buffer(len))).collect();
        let present: SmallVec<[(usize, &[u8]); 8]> =
            have.iter().map(|(p, buffer)| (usize::from(*p), buffer.bytes())).collect();
        let mut missing: SmallVec<[(usize, &mut [u8]); 2]> =
            out.iter_mut().map(|(p, buffer)| (usize::from(*p), buffer.bytes_mut())).collect();
        let layout = self.layout_of(stripe);
        self.kernels
            .reconstruct(layout.data.into(), layout.parity.into(), &present, &mut missing)
            .map_err(|_| ArrayError::Lost)?;
        drop(missing);
        Ok(out)
    }

    /// Reads rows of `k` positions, those in `first` before others. The inner error: positions that
    /// failed.
    async fn read_any_k(
        &self,
        stripe: StripeIndex,
        rows: &Range<u32>,
        bad: Positions,
        first: Positions,
    ) -> Result<Result<SmallVec<[(u8, Buffer); 8]>, Positions>, ArrayError> {
        let usable = self.members.held(stripe) & !bad;
        let layout = self.layout_of(stripe);
        if usable.count_ones() < u32::from(layout.data) {
            return Err(ArrayError::Lost);
        }
        let started: SmallVec<[_; 8]> = each(read_plan::sources(&layout, stripe, usable, first))
            .map(|p| (p, self.start_position(stripe, p, rows).expect("held a moment ago")))
            .collect();
        let (mut have, mut failed) = (SmallVec::new(), 0);
        for (position, (buffer, io)) in started {
            let bytes = buffer.clone().into();
            if io.await.is_ok() && self.fits(stripe, position, rows.start, &bytes).await {
                have.push((position, buffer));
            } else {
                failed |= 1 << position;
            }
        }
        Ok(if failed == 0 { Ok(have) } else { Err(failed) })
    }

    /// Writes what was reconstructed over the blocks that could not be read. The caller holds the
    /// rows exclusively. A drive that cannot even do that counts its own errors.
    async fn repair(&self, stripe: StripeIndex, row: u32, buffer: &Buffer, bad: Positions) {
        for position in each(bad) {
            if let Some((drive, base)) = self.members.at(stripe, position) {
                let at = base + self.layout().member_offset(stripe, row);
                self.set_sums(stripe, position, row, &buffer.clone().into());
                if drive.write(at, buffer.clone().into()).await.is_ok() {
                    self.count(|counters| counters.repaired += 1);
                }
            }
        }
    }
}

fn len_of(bytes: &Buffer) -> u32 {
    u32::try_from(bytes.len()).expect("at most a chunk")
}
