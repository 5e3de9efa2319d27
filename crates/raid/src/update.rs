//! One band of a stripe brought up to date: what is read, what parity becomes, what goes where.
//!
//! Reads are started at once and waited for later, so that many bands are under way together. The
//! caller holds the band's rows exclusively from before `start_update` to after the stores.

use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::drive::{Drive, DriveIo};
use ashlar_drive::error::DriveError;
use ashlar_format::units::StripeIndex;
use ashlar_reactor::buffer::{Buffer, Buffers};
use smallvec::SmallVec;

use crate::array::Array;
use crate::error::ArrayError;
use crate::journal::Slice;
use crate::layout::{Layout, Positions};
use crate::read_plan::in_turn;
use crate::stored::{Store, Stored, Storing, Updated};
use crate::write_plan::{Band, Situation, WritePlan, bits, each, is_storable, plan_write};

/// Stable bytes for rows of one data chunk.
#[derive(Clone)]
pub(crate) struct NewRows {
    pub(crate) chunk: u8,
    pub(crate) rows: Range<u32>,
    pub(crate) bytes: Buffer,
}

/// Of one stripe, in order of chunk and row.
pub(crate) type NewList = SmallVec<[NewRows; 2]>;

impl NewRows {
    pub(crate) fn within(&self, rows: &Range<u32>) -> Option<NewRows> {
        let (start, end) = (self.rows.start.max(rows.start), self.rows.end.min(rows.end));
        (start < end).then(|| {
            let at = |row: u32| (row - self.rows.start) as usize;
            let bytes = self.bytes.slice(at(start)..at(end));
            NewRows { chunk: self.chunk, rows: start..end, bytes }
        })
    }
}

/// Bytes of each parity chunk.
pub(crate) type ParityList = SmallVec<[Buffer; 2]>;

/// Bytes of a position that are to change.
enum OldBytes {
    /// The drive's own memory: it shows what is stored there later.
    Lent(Buffer),
    Read(Buffer, DriveIo),
    /// Its member does not hold them.
    None,
}

/// A band whose old bytes are being read.
pub(crate) struct Update {
    stripe: StripeIndex,
    band: Band,
    new: NewList,
    plan: WritePlan,
    writable: Positions,
    unreadable: Positions,
    reads: SmallVec<[(u8, OldBytes); 4]>,
    /// If it is known already; else empty.
    parity: ParityList,
}

impl Update {
    /// Parity of a band of all chunks, worked out before, or an empty list.
    pub(crate) fn knowing(self, parity: ParityList) -> Update {
        assert!(parity.is_empty() || self.reads.is_empty(), "old bytes are read for nothing");
        Update { parity, ..self }
    }
}

impl Array {
    /// Plans a band, all of which is `new`, and starts to read what it needs.
    pub(crate) fn start_update(
        &self,
        stripe: StripeIndex,
        band: Band,
        new: NewList,
    ) -> Result<Update, ArrayError> {
        self.plan_update(stripe, band, new, 0)
    }

    fn plan_update(
        &self,
        stripe: StripeIndex,
        band: Band,
        new: NewList,
        unreadable: Positions,
    ) -> Result<Update, ArrayError> {
        let layout = self.layout_of(stripe);
        let writable = self.members.held(stripe);
        let plan = if layout.parity == 0 {
            WritePlan::NoRead
        } else {
            let (data, parity) = (layout.data, layout.parity);
            let (touched, readable) = (band.chunks, writable & !unreadable);
            let agrees = !self.unplaced.contains(stripe);
            plan_write(Situation { data, parity, touched, readable, writable, agrees })
        };
        let data = bits(0..layout.data);
        let wanted = match plan {
            WritePlan::Lost => return Err(ArrayError::Lost),
            WritePlan::NoRead => 0,
            WritePlan::ReadModifyWrite => band.chunks | self.parity_bits(stripe) & writable,
            WritePlan::ReconstructWrite => data & !band.chunks,
            WritePlan::Decode => in_turn(&layout, stripe, writable & !unreadable, data),
        };
        let reads = each(wanted).map(|p| (p, self.start_old(stripe, p, &band.rows))).collect();
        let parity = ParityList::new();
        Ok(Update { stripe, band, new, plan, writable, unreadable, reads, parity })
    }

    /// Nobody else writes these rows while the caller has them, so what is lent stays as it is.
    fn start_old(&self, stripe: StripeIndex, position: u8, rows: &Range<u32>) -> OldBytes {
        // What is mended is written into what was read.
        if self.integrity.is_none()
            && let Some((drive, base)) = self.members.at(stripe, position)
        {
            let at = base + self.layout().member_offset(stripe, rows.start);
            if let Some(bytes) = drive.lend(at, (rows.end - rows.start) as usize) {
                return OldBytes::Lent(bytes);
            }
        }
        let started = self.start_position(stripe, position, rows);
        started.map_or(OldBytes::None, |(bytes, io)| OldBytes::Read(bytes, io))
    }

    /// Parity of these rows of all data chunks, which begin at `row`.
    pub(crate) fn parity_of(
        &self,
        layout: &Layout,
        data: &[Buffer],
        row: u32,
    ) -> SmallVec<[Slice; 2]> {
        let data: SmallVec<[&[u8]; 16]> =
            data[..usize::from(layout.data)].iter().map(Buffer::bytes).collect();
        let len = data[0].len();
        let slice = |position| Slice { position, row, bytes: self.reactor.buffer(len) };
        let mut slices: SmallVec<[Slice; 2]> = layout.parity_positions().map(slice).collect();
        if !slices.is_empty() {
            let mut parity: SmallVec<[&mut [u8]; 2]> =
                slices.iter_mut().map(|slice| slice.bytes.bytes_mut()).collect();
            self.kernels.encode(&data, &mut parity);
        }
        slices
    }

    fn parity_bits(&self, stripe: StripeIndex) -> Positions {
        bits(self.layout_of(stripe).parity_positions())
    }

    /// Waits for the old bytes and works parity out.
    pub(crate) async fn finish_update(&self, mut update: Update) -> Result<Updated, ArrayError> {
        loop {
            let (mut old, mut failed) = (SmallVec::<[(u8, Buffer); 8]>::new(), 0);
            for (position, started) in std::mem::take(&mut update.reads) {
                let done = match started {
                    OldBytes::Lent(buffer) => Some(buffer),
                    OldBytes::Read(buffer, io) => match io.await {
                        Ok(()) => {
                            let (stripe, rows) = (update.stripe, &update.band.rows);
                            let mended = self.make_true(stripe, position, rows, &buffer).await;
                            mended.ok().map(|()| buffer)
                        }
                        Err(_) => None,
                    },
                    OldBytes::None => None,
                };
                match done {
                    Some(buffer) => old.push((position, buffer)),
                    None => failed |= 1 << position,
                }
            }
            if failed == 0 {
                return self.updated(update, &old);
            }
            let Update { stripe, band, new, unreadable, .. } = update;
            update = self.plan_update(stripe, band, new, unreadable | failed)?;
        }
    }

    fn updated(&self, mut update: Update, old: &[(u8, Buffer)]) -> Result<Updated, ArrayError> {
        let layout = self.layout_of(update.stripe);
        let whole = layout.parity > 0 && update.band.chunks == bits(0..layout.data);
        self.count(|counters| counters.updates.note(update.plan, whole));
        let parity = match update.plan {
            WritePlan::NoRead if !update.parity.is_empty() => std::mem::take(&mut update.parity),
            WritePlan::ReadModifyWrite => self.add_difference(&update, old),
            WritePlan::ReconstructWrite | WritePlan::Decode => self.encode(&update, old)?,
            WritePlan::NoRead if update.writable & self.parity_bits(update.stripe) != 0 => {
                self.encode(&update, old)?
            }
            WritePlan::NoRead | WritePlan::Lost => ParityList::new(),
        };
        let Update { stripe, band, new, writable, .. } = update;
        let mut stores: SmallVec<[Store; 4]> = SmallVec::new();
        let mut wanted = self.parity_bits(stripe);
        for chunk in new.chunk_by(|a, b| a.chunk == b.chunk) {
            let mut bytes = Buffers::default();
            chunk.iter().for_each(|new| bytes.push(new.bytes.clone()));
            for position in layout.data_positions(chunk[0].chunk) {
                wanted |= 1 << position;
                stores.push(Store { position, row: band.rows.start, bytes: bytes.clone() });
            }
        }
        for (position, bytes) in layout.parity_positions().zip(parity) {
            stores.push(Store { position, row: band.rows.start, bytes: bytes.into() });
        }
        stores.retain(|store| writable & 1 << store.position != 0);
        Ok(Updated { stripe, band, wanted, writable, stores })
    }

    /// Read-modify-write: old parity plus the difference of the written chunks. Parity that is
    /// not held comes out as garbage and is not written.
    fn add_difference(&self, update: &Update, old: &[(u8, Buffer)]) -> ParityList {
        let layout = self.layout_of(update.stripe);
        let rows = &update.band.rows;
        let find = |position: u8| old.iter().find(|(p, _)| *p == position).map(|(_, b)| b);
        let held: SmallVec<[Option<&Buffer>; 2]> = layout.parity_positions().map(find).collect();
        let len = (rows.end - rows.start) as usize;
        let mut parity: ParityList = held.iter().map(|_| self.reactor.buffer(len)).collect();
        for (number, new) in update.new.iter().enumerate() {
            let before = find(new.chunk).expect("read-modify-write reads every chunk it writes");
            let at = (new.rows.start - rows.start) as usize;
            let part = at..at + new.bytes.len();
            let before = &before.bytes()[part.clone()];
            let mut targets: SmallVec<[(usize, &mut [u8]); 2]> = SmallVec::new();
            for ((index, buffer), held) in parity.iter_mut().enumerate().zip(&held) {
                let Some(held) = held else { continue };
                if index == 0 && part == (0..len) && number == 0 {
                    // What most writes come to, in one pass.
                    let sources = [held.bytes(), before, new.bytes.bytes()];
                    self.kernels.sum(sources, buffer.bytes_mut());
                    continue;
                }
                if number == 0 {
                    buffer.copy_from(held);
                }
                targets.push((index, &mut buffer.bytes_mut()[part.clone()]));
            }
            let m = layout.parity.into();
            self.kernels.update(m, new.chunk.into(), before, new.bytes.bytes(), &mut targets);
        }
        parity
    }

    /// Parity from all data: new where written, else old, worked out where it was not read.
    fn encode(&self, update: &Update, old: &[(u8, Buffer)]) -> Result<ParityList, ArrayError> {
        let layout = self.layout_of(update.stripe);
        let rows = &update.band.rows;
        let len = (rows.end - rows.start) as usize;
        // Old bytes of the chunks that are not written, worked out where they were not read.
        let mut rest: SmallVec<[(u8, Buffer); 8]> = SmallVec::new();
        for chunk in each(bits(0..layout.data) & !update.band.chunks) {
            let known = old.iter().find(|(position, _)| *position == chunk);
            let bytes = match known {
                Some((_, bytes)) => bytes.clone(),
                None => self.decode(&layout, chunk, old, len)?,
            };
            rest.push((chunk, bytes));
        }
        let mut parity: ParityList = (0..layout.parity).map(|_| self.reactor.buffer(len)).collect();
        // Between two cuts the bytes of each chunk are in one piece.
        let mut cuts: SmallVec<[u32; 4]> =
            update.new.iter().flat_map(|new| [new.rows.start, new.rows.end]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        for pair in cuts.windows(2) {
            let part = (pair[0] - rows.start) as usize..(pair[1] - rows.start) as usize;
            let of_chunk = |chunk: u8| -> &[u8] {
                if let Some((_, bytes)) = rest.iter().find(|(c, _)| *c == chunk) {
                    return &bytes.bytes()[part.clone()];
                }
                let mut new = update.new.iter().filter(|new| new.chunk == chunk);
                let new = new.find(|new| new.rows.start <= pair[0] && pair[1] <= new.rows.end);
                let new = new.expect("a band covers the same rows of all its chunks");
                let at = (pair[0] - new.rows.start) as usize;
                &new.bytes.bytes()[at..at + part.len()]
            };
            let inputs: SmallVec<[&[u8]; 16]> = (0..layout.data).map(of_chunk).collect();
            let mut outputs: SmallVec<[&mut [u8]; 2]> =
                parity.iter_mut().map(|buffer| &mut buffer.bytes_mut()[part.clone()]).collect();
            self.kernels.encode(&inputs, &mut outputs);
        }
        Ok(parity)
    }

    /// Rows of a data chunk from those of `k` other positions.
    pub(crate) fn decode(
        &self,
        layout: &Layout,
        chunk: u8,
        old: &[(u8, Buffer)],
        len: usize,
    ) -> Result<Buffer, ArrayError> {
        let mut out = self.reactor.buffer(len);
        let present: SmallVec<[(usize, &[u8]); 8]> =
            old.iter().map(|(p, buffer)| (usize::from(*p), buffer.bytes())).collect();
        let mut missing = [(usize::from(chunk), out.bytes_mut())];
        self.kernels
            .reconstruct(layout.data.into(), layout.parity.into(), &present, &mut missing)
            .map_err(|_| ArrayError::Lost)?;
        Ok(out)
    }

    /// Starts to write stores to their members; for `finish_stores`.
    pub(crate) fn start_stores<'a>(
        &self,
        stripe: StripeIndex,
        stores: impl IntoIterator<Item = &'a Store>,
    ) -> SmallVec<[Storing<'a>; 4]> {
        stores.into_iter().map(|store| self.start_store(stripe, store)).collect()
    }

    fn start_store<'a>(&self, stripe: StripeIndex, store: &'a Store) -> Storing<'a> {
        let start = |(drive, base): (Rc<Drive>, u64)| {
            let at = base + self.layout().member_offset(stripe, store.row);
            self.set_sums(stripe, store.position, store.row, &store.bytes);
            let io = drive.write(at, store.bytes.clone());
            (drive, io)
        };
        Storing { store, io: self.members.at(stripe, store.position).map(start) }
    }

    /// A store that failed is started again on a drive that its member got meanwhile, as far as
    /// that holds the stripe: see `asked`.
    pub(crate) async fn finish_stores(
        &self,
        stripe: StripeIndex,
        mut started: SmallVec<[Storing<'_>; 4]>,
    ) -> Stored {
        let mut done = Stored::default();
        let mut missed = 0;
        while !started.is_empty() {
            let mut failed: SmallVec<[_; 1]> = SmallVec::new();
            for Storing { store, io } in started.drain(..) {
                let Some((drive, io)) = io else {
                    failed.push((store, None, DriveError::Gone));
                    continue;
                };
                match io.await {
                    Ok(()) => done.stored |= 1 << store.position,
                    Err(error) => failed.push((store, Some(drive), error)),
                }
            }
            for (store, drive, error) in failed {
                let member = self.layout_of(stripe).member_at(stripe, store.position);
                let is_other = self.members.is_other(member, drive.as_ref());
                let holds = self.members.at(stripe, store.position).is_some();
                if is_other && holds {
                    started.push(self.start_store(stripe, store));
                } else {
                    missed |= 1 << store.position;
                    done.no_space |= !is_other && self.members.lacks_space([member], &[Err(error)]);
                }
            }
        }
        // A position may have had several stores: all or nothing.
        done.stored &= !missed;
        done
    }

    /// Whether everything that was written can be read back, from what was stored.
    pub(crate) fn is_safe(&self, updated: &Updated, stored: Positions) -> bool {
        let layout = self.layout_of(updated.stripe);
        if layout.parity == 0 {
            let copies = |chunk: u8| bits(layout.data_positions(chunk));
            return each(updated.band.chunks).all(|chunk| stored & copies(chunk) != 0);
        }
        let untouched = updated.writable & !updated.wanted;
        let current = (untouched | stored).count_ones();
        // What was not stored itself can be worked out while enough of the stripe is current.
        updated.band.chunks & !stored == 0 || current >= u32::from(layout.data)
    }

    /// Whether a write of this data chunk could be kept.
    pub(crate) fn can_store(&self, stripe: StripeIndex, chunk: u8) -> bool {
        let layout = self.layout_of(stripe);
        if self.is_stranded(stripe) || !self.is_written(stripe) && !self.members.serves_all() {
            return false;
        }
        let writable = self.members.held(stripe);
        if layout.parity == 0 {
            return writable & bits(layout.data_positions(chunk)) != 0;
        }
        let (data, parity) = (layout.data, layout.parity);
        let (touched, readable, agrees) = (1 << chunk, writable, true);
        is_storable(Situation { data, parity, touched, readable, writable, agrees })
    }
}
