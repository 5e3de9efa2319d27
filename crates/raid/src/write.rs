//! Writing: in place, with parity kept right.
//!
//! Write order of one rectangle, and what a crash leaves at each step:
//! 1. the region's dirty bit is durable (crash up to here: nothing was written)
//! 2. the rows are locked, the caller's bytes copied once, old data or parity read
//! 3. degraded parity only: the record in the stripe journal is durable (crash: replayed)
//! 4. data and parity are written (crash: resync of the region, or replay)
//! 5. members that missed the write are fenced, durably
//! 6. the write is acknowledged

use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::drive::DriveIo;
use ashlar_drive::error::DriveError;
use ashlar_format::units::StripeIndex;
use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::{Mode, RangeGuard};
use smallvec::SmallVec;

use crate::array::Array;
use crate::error::ArrayError;
use crate::journal::{Journal, Slice};
use crate::layout::{Piece, Positions};
use crate::write_plan::{Rect, Situation, WritePlan, bits, each, plan_write, rects};

/// Stable bytes for rows of one data chunk.
pub(crate) struct NewRows {
    chunk: u8,
    rows: Range<u32>,
    bytes: Buffer,
}

impl NewRows {
    fn piece(&self, stripe: StripeIndex) -> Piece {
        Piece { stripe, chunk: self.chunk, rows: self.rows.clone(), at: 0 }
    }

    fn rows_of(&self, rows: &Range<u32>) -> Buffer {
        let from = (rows.start - self.rows.start) as usize;
        self.bytes.slice(from..from + (rows.end - rows.start) as usize)
    }
}

/// What a write left behind on the members.
#[derive(Clone, Copy, Default)]
pub(crate) struct Stored {
    /// Positions that hold the new bytes.
    pub(crate) stored: Positions,
    pub(crate) no_space: bool,
}

impl Array {
    /// Writes `from` at `offset`; both multiples of 512 bytes. The bytes are copied before
    /// anything is computed from them, so the caller's memory may change meanwhile.
    pub async fn write(self: &Rc<Self>, offset: u64, from: Buffers) -> Result<(), ArrayError> {
        let _request = self.begin()?;
        let len = from.len() as u64;
        if !self.layout().contains(offset, len) {
            return Err(ArrayError::Range);
        }
        let pieces: SmallVec<[Piece; 4]> = self.layout().pieces(offset, len).collect();
        let same_stripe = |a: &Piece, b: &Piece| a.stripe == b.stripe;
        let result = if pieces.windows(2).all(|pair| same_stripe(&pair[0], &pair[1])) {
            self.write_stripe(&pieces, &from).await
        } else {
            let stripes = pieces.chunk_by(same_stripe).map(|p| self.write_stripe(p, &from));
            join_all(stripes).await.into_iter().collect()
        };
        self.count(|counters| {
            counters.writes += 1;
            counters.write_bytes += len;
        });
        result
    }

    /// Everything acknowledged before is durable when this returns.
    pub async fn flush(self: &Rc<Self>) -> Result<(), ArrayError> {
        let _request = self.begin()?;
        self.count(|counters| counters.flushes += 1);
        self.members.flush().await
    }

    /// `pieces`: of one stripe, at least one.
    async fn write_stripe(
        self: &Rc<Self>,
        pieces: &[Piece],
        from: &Buffers,
    ) -> Result<(), ArrayError> {
        let Some(first) = pieces.first() else { return Ok(()) };
        let stripe = first.stripe;
        let _region = if self.layout().is_redundant() {
            Some(self.dirty.mark(self.dirty.region_of(stripe)).await?)
        } else {
            None
        };
        let wide: SmallVec<[Range<u32>; 4]> =
            pieces.iter().map(|piece| self.whole_sectors(&piece.rows)).collect();
        let first_row = wide.iter().map(|rows| rows.start).min().unwrap_or(0);
        let last_row = wide.iter().map(|rows| rows.end).max().unwrap_or(0);
        let whole = self.is_whole_stripe(pieces);
        let _rows = self.lock_in_sync(stripe, first_row..last_row, whole).await?;
        let mut new: SmallVec<[NewRows; 4]> = SmallVec::new();
        for (piece, rows) in pieces.iter().zip(wide) {
            new.push(self.stable_copy(piece, rows, from).await?);
        }
        if self.layout().parity == 0 {
            self.write_copies(stripe, &new).await?;
        } else {
            let pieces: SmallVec<[Piece; 4]> = new.iter().map(|new| new.piece(stripe)).collect();
            // A rectangle must fit in one record of the journal.
            let rows_max = Journal::rows_max(self.layout().positions());
            let rects: SmallVec<[Rect; 3]> =
                rects(&pieces).iter().flat_map(|rect| rect.bands(rows_max)).collect();
            if let [rect] = &rects[..] {
                self.write_rect(stripe, rect, &new).await?;
            } else {
                let writes = rects.iter().map(|rect| self.write_rect(stripe, rect, &new));
                join_all(writes).await.into_iter().collect::<Result<(), _>>()?;
            }
        }
        if whole {
            self.unsynced.remove(stripe);
        }
        Ok(())
    }

    fn is_whole_stripe(&self, pieces: &[Piece]) -> bool {
        pieces.len() == usize::from(self.layout().data)
            && pieces.iter().all(|piece| piece.rows == (0..self.layout().chunk_bytes))
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
            let guard = self.lock_rows(stripe, rows.clone(), Mode::Exclusive).await;
            if whole || !self.unsynced.contains(stripe) {
                return Ok(guard);
            }
            drop(guard);
            self.sync_now(stripe).await?;
        }
    }

    /// Copies the caller's bytes; reads what is around them when `rows` is wider than the piece.
    async fn stable_copy(
        &self,
        piece: &Piece,
        rows: Range<u32>,
        from: &Buffers,
    ) -> Result<NewRows, ArrayError> {
        let len = (rows.end - rows.start) as usize;
        let bytes = if rows == piece.rows {
            self.reactor.buffer(len)
        } else {
            // The buffer was just made for us: nobody else will use it.
            self.read_locked(piece.stripe, piece.chunk, &rows).await?.0
        };
        let at = (piece.rows.start - rows.start) as usize;
        let own = Buffers::from(bytes.slice(at..at + piece.len()));
        own.copy_from(&from.slice(piece.in_request()));
        Ok(NewRows { chunk: piece.chunk, rows, bytes })
    }

    /// Levels without parity: the same bytes to every copy.
    async fn write_copies(&self, stripe: StripeIndex, new: &[NewRows]) -> Result<(), ArrayError> {
        let held = self.members.held(stripe);
        let mut slices: SmallVec<[Slice; 4]> = SmallVec::new();
        let mut wanted = 0;
        for new in new {
            for position in self.layout().data_positions(new.chunk) {
                wanted |= 1 << position;
                if held & 1 << position != 0 {
                    let (row, bytes) = (new.rows.start, new.bytes.clone());
                    slices.push(Slice { position, row, bytes });
                }
            }
        }
        let done = self.write_slices(stripe, &slices).await;
        let stored_somewhere =
            new.iter().all(|new| done.stored & bits(self.layout().data_positions(new.chunk)) != 0);
        self.acknowledge(stripe, wanted, done, stored_somewhere).await
    }

    async fn write_rect(
        &self,
        stripe: StripeIndex,
        rect: &Rect,
        new: &[NewRows],
    ) -> Result<(), ArrayError> {
        let layout = self.layout();
        let touched = bits(rect.chunks.clone());
        let mut unreadable = 0;
        let (parity, writable) = loop {
            let writable = self.members.held(stripe);
            let readable = writable & !unreadable;
            let (data, m) = (layout.data, layout.parity);
            let plan = plan_write(Situation { data, parity: m, touched, readable, writable });
            match self.new_parity(stripe, rect, new, plan, readable).await? {
                Ok(parity) => break (parity, writable),
                Err(failed) => unreadable |= failed,
            }
        };
        let mut slices: SmallVec<[Slice; 4]> = SmallVec::new();
        for new in new.iter().filter(|new| rect.chunks.contains(&new.chunk)) {
            let (position, row) = (new.chunk, rect.rows.start);
            slices.push(Slice { position, row, bytes: new.rows_of(&rect.rows) });
        }
        for (position, bytes) in layout.parity_positions().zip(parity) {
            slices.push(Slice { position, row: rect.rows.start, bytes });
        }
        slices.retain(|slice| writable & 1 << slice.position != 0);
        // Before the record: were a member believed that has missed the write, storing the record
        // again after a crash would not make the stripe agree.
        let parity_bits = bits(layout.parity_positions());
        let missed = (touched | parity_bits) & !writable;
        if missed != 0 {
            self.members.fence_missed(stripe, missed).await?;
        }
        let _record = self.journal.record_if_degraded(stripe, &slices, &self.unsynced).await?;
        let done = self.write_slices(stripe, &slices).await;
        let current = (writable & !(touched | parity_bits)) | done.stored;
        let not_current = layout.positions() - count(current);
        // What was not stored itself can be worked out while enough of the stripe is current.
        let safe = touched & !done.stored == 0 || not_current <= layout.parity;
        self.acknowledge(stripe, touched | parity_bits, done, safe).await
    }

    /// Parity of the rectangle after the write. The inner error: positions that cannot be read.
    async fn new_parity(
        &self,
        stripe: StripeIndex,
        rect: &Rect,
        new: &[NewRows],
        plan: WritePlan,
        readable: Positions,
    ) -> Result<Result<SmallVec<[Buffer; 2]>, Positions>, ArrayError> {
        let layout = self.layout();
        let touched = bits(rect.chunks.clone());
        let data = bits(0..layout.data);
        let wanted = match plan {
            WritePlan::Lost => return Err(ArrayError::Lost),
            WritePlan::NoRead if touched != data => return Ok(Ok(SmallVec::new())),
            WritePlan::NoRead => 0,
            WritePlan::ReadModifyWrite => {
                touched | bits(layout.parity_positions()) & self.members.held(stripe)
            }
            WritePlan::ReconstructWrite => data & !touched,
            WritePlan::Decode => {
                let first_k = each(readable).take(layout.data.into());
                first_k.fold(0, |bits, position| bits | 1 << position)
            }
        };
        let old = match self.read_positions(stripe, &rect.rows, wanted).await {
            Ok(old) => old,
            Err(failed) => return Ok(Err(failed)),
        };
        let fresh: SmallVec<[(u8, Buffer); 8]> = new
            .iter()
            .filter(|new| rect.chunks.contains(&new.chunk))
            .map(|new| (new.chunk, new.rows_of(&rect.rows)))
            .collect();
        let len = (rect.rows.end - rect.rows.start) as usize;
        Ok(Ok(if plan == WritePlan::ReadModifyWrite {
            self.add_difference(old, &fresh, len)
        } else {
            self.encode(old, &fresh, len)?
        }))
    }

    /// Reads rows of these positions. The error: those that failed.
    async fn read_positions(
        &self,
        stripe: StripeIndex,
        rows: &Range<u32>,
        wanted: Positions,
    ) -> Result<SmallVec<[(u8, Buffer); 8]>, Positions> {
        let started: SmallVec<[_; 8]> =
            each(wanted).map(|p| (p, self.start_position(stripe, p, rows))).collect();
        let (mut have, mut failed) = (SmallVec::new(), 0);
        for (position, started) in started {
            let done = match started {
                Some((buffer, io)) => io.await.ok().map(|()| buffer),
                None => None,
            };
            match done {
                Some(buffer) => have.push((position, buffer)),
                None => failed |= 1 << position,
            }
        }
        if failed == 0 { Ok(have) } else { Err(failed) }
    }

    /// Read-modify-write: old parity plus the difference of the written chunks. Parity that is
    /// not held comes out as garbage and is not written.
    fn add_difference(
        &self,
        old: SmallVec<[(u8, Buffer); 8]>,
        fresh: &[(u8, Buffer)],
        len: usize,
    ) -> SmallVec<[Buffer; 2]> {
        let layout = self.layout();
        let find = |position: u8| old.iter().find(|(p, _)| *p == position).map(|(_, b)| b.clone());
        let held: SmallVec<[Option<Buffer>; 2]> = layout.parity_positions().map(find).collect();
        let mut parity: SmallVec<[Buffer; 2]> =
            held.iter().map(|b| b.clone().unwrap_or_else(|| self.reactor.buffer(len))).collect();
        for (chunk, bytes) in fresh {
            let before = find(*chunk).expect("read-modify-write reads every chunk it writes");
            let mut targets: SmallVec<[(usize, &mut [u8]); 2]> = parity
                .iter_mut()
                .enumerate()
                .filter(|(index, _)| held[*index].is_some())
                .map(|(index, buffer)| (index, buffer.bytes_mut()))
                .collect();
            let (m, chunk) = (layout.parity.into(), (*chunk).into());
            self.kernels.update(m, chunk, before.bytes(), bytes.bytes(), &mut targets);
        }
        parity
    }

    /// Parity from all data: new where written, else old, worked out where it was not read.
    fn encode(
        &self,
        old: SmallVec<[(u8, Buffer); 8]>,
        fresh: &[(u8, Buffer)],
        len: usize,
    ) -> Result<SmallVec<[Buffer; 2]>, ArrayError> {
        let layout = self.layout();
        let mut data: SmallVec<[Buffer; 8]> = SmallVec::new();
        for chunk in 0..layout.data {
            let known = fresh.iter().chain(&old).find(|(position, _)| *position == chunk);
            let bytes = match known {
                Some((_, bytes)) => bytes.clone(),
                None => self.decode(chunk, &old, len)?,
            };
            data.push(bytes);
        }
        let mut parity: SmallVec<[Buffer; 2]> =
            (0..layout.parity).map(|_| self.reactor.buffer(len)).collect();
        let inputs: SmallVec<[&[u8]; 16]> = data.iter().map(Buffer::bytes).collect();
        let mut outputs: SmallVec<[&mut [u8]; 2]> =
            parity.iter_mut().map(Buffer::bytes_mut).collect();
        self.kernels.encode(&inputs, &mut outputs);
        drop(outputs);
        Ok(parity)
    }

    fn decode(&self, chunk: u8, old: &[(u8, Buffer)], len: usize) -> Result<Buffer, ArrayError> {
        let layout = self.layout();
        let mut out = self.reactor.buffer(len);
        let present: SmallVec<[(usize, &[u8]); 8]> =
            old.iter().map(|(p, buffer)| (usize::from(*p), buffer.bytes())).collect();
        let mut missing = [(usize::from(chunk), out.bytes_mut())];
        self.kernels
            .reconstruct(layout.data.into(), layout.parity.into(), &present, &mut missing)
            .map_err(|_| ArrayError::Lost)?;
        Ok(out)
    }

    /// Writes slices to their members, all at once.
    pub(crate) async fn write_slices(&self, stripe: StripeIndex, slices: &[Slice]) -> Stored {
        let mut started: SmallVec<[(u8, DriveIo); 8]> = SmallVec::new();
        for slice in slices {
            if let Some((drive, base)) = self.members.at(stripe, slice.position) {
                let at = base + self.layout().member_offset(stripe, slice.row);
                started.push((slice.position, drive.write(at, slice.bytes.clone().into())));
            }
        }
        let mut done = Stored::default();
        let mut failed = 0;
        for (position, io) in started {
            match io.await {
                Ok(()) => done.stored |= 1 << position,
                Err(error) => {
                    failed |= 1 << position;
                    done.no_space |= error == DriveError::NoSpace;
                }
            }
        }
        // A position may have had several slices: all or nothing.
        done.stored &= !failed;
        done
    }

    /// Decides what the writer hears. `safe`: everything it wrote can be read back.
    async fn acknowledge(
        &self,
        stripe: StripeIndex,
        wanted: Positions,
        done: Stored,
        safe: bool,
    ) -> Result<(), ArrayError> {
        if done.stored == wanted {
            return Ok(());
        }
        if safe && !done.no_space {
            return self.members.fence_missed(stripe, wanted & !done.stored).await;
        }
        // Nobody is fenced for a write that is not acknowledged; but what it left behind may not
        // agree any more.
        if self.layout().is_redundant() {
            self.unsynced.insert(stripe);
        }
        if self.members.journal_from() != 0 {
            self.members.set_journal_from(0);
            self.members.settled().await?;
        }
        Err(if done.no_space { ArrayError::NoSpace } else { ArrayError::Lost })
    }
}

fn count(positions: Positions) -> u8 {
    u8::try_from(positions.count_ones()).expect("at most 64")
}
