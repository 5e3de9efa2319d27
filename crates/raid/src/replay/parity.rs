//! Parity of which the journal has sums, after a crash: worked out and stored before any data is.

use std::ops::Range;
use std::rc::Rc;

use ashlar_format::journal_batch::{EntryKind, ParitySum, SUM_BYTES, SUM_ROWS};
use ashlar_format::units::StripeIndex;
use ashlar_reactor::buffer::Buffer;
use smallvec::SmallVec;

use super::{Findings, Piece, outside};
use crate::array::Array;
use crate::error::ArrayError;
use crate::give_up::Probed;
use crate::layout::Positions;
use crate::parity_sums::Sector;
use crate::stored::Store;
use crate::verify::{cut, overlap, within};
use crate::write_plan::{bands, bits, each};

impl Array {
    /// Makes parity as its sums say; it is durable once members were flushed. Rows whose parity is
    /// made anew in any case are dropped from the findings.
    pub(super) async fn restore_parity(
        self: &Rc<Self>,
        stripe: StripeIndex,
        findings: &mut Findings,
    ) -> Result<(), ArrayError> {
        let mut done = self.stored_anew(stripe, findings);
        let (mut kept, mut given_up) = (Vec::new(), Vec::new());
        for band in findings.bands() {
            let parts = outside(&band[0].rows, &done);
            let mut parts: Vec<Range<u32>> =
                parts.iter().flat_map(|rows| self.cut_at_bad(stripe, rows)).collect();
            while let Some(rows) = parts.pop() {
                match self.restore_band(stripe, &rows, band, findings).await {
                    Ok(()) => {
                        kept.extend(band.iter().map(|piece| piece.after_sums(&rows)));
                    }
                    Err(ArrayError::Lost) if self.is_known(stripe, &rows, band, findings) => {}
                    Err(ArrayError::Lost) => {
                        self.check_may_give_up()?;
                        if let Some(halves) = self.halves(&rows) {
                            parts.extend(halves);
                        } else {
                            let missing = findings.missing(&band[0].data, &rows);
                            self.give_up_data(stripe, missing).await?;
                            given_up.push(rows);
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
            done.push(band[0].rows.clone());
        }
        findings.parity = kept;
        findings.given_up.extend(given_up);
        Ok(())
    }

    /// What was given up is apart from what was not.
    fn cut_at_bad(&self, stripe: StripeIndex, rows: &Range<u32>) -> Vec<Range<u32>> {
        cut(rows, self.unsettled_rows(stripe).into_iter())
    }

    /// Parity of after some of these rows were given up is neither old nor new, and made anew in
    /// any case. By force that may not be all that is lost of them.
    fn is_known(
        &self,
        stripe: StripeIndex,
        rows: &Range<u32>,
        band: &[Piece],
        findings: &Findings,
    ) -> bool {
        let was_given_up = self.unsettled_rows(stripe).iter().any(|bad| overlap(bad, rows));
        let is_all = || findings.missing(&band[0].data, rows).is_empty();
        was_given_up && (!self.members.is_forced() || is_all())
    }

    /// `None`: it is one sector.
    fn halves(&self, rows: &Range<u32>) -> Option<[Range<u32>; 2]> {
        let sector = self.sector_bytes.max(SUM_ROWS);
        let sectors = (rows.end - rows.start).div_ceil(sector);
        let middle = rows.start + sectors / 2 * sector;
        (sectors > 1).then_some([middle..rows.end, rows.start..middle])
    }

    /// Those that were given up, while a start has to do that again.
    fn unsettled_rows(&self, stripe: StripeIndex) -> Vec<Range<u32>> {
        if !self.bad.unsettled().contains(&stripe) {
            return Vec::new();
        }
        self.bad.of(stripe).iter().map(|(_, rows)| self.whole_sectors(rows)).collect()
    }

    /// Rows with data of all chunks: their parity follows from that, and what is in place may be
    /// torn.
    fn stored_anew(&self, stripe: StripeIndex, findings: &Findings) -> Vec<Range<u32>> {
        let data = findings.data.iter().map(|(piece, _)| (piece.position, piece.rows.clone()));
        let all = bits(0..self.layout_of(stripe).data);
        let bands = bands(&data.collect::<Vec<_>>(), u32::MAX).into_iter();
        bands.filter(|band| band.chunks == all).map(|band| band.rows).collect()
    }

    /// `band`: entries of one batch.
    async fn restore_band(
        &self,
        stripe: StripeIndex,
        rows: &Range<u32>,
        band: &[Piece],
        findings: &Findings,
    ) -> Result<(), ArrayError> {
        let layout = self.layout_of(stripe);
        let held = self.members.held(stripe);
        let summed = summed(band);
        if summed == 0 {
            return findings.new_data(&band[0].data, rows).map(|_| ()).ok_or(ArrayError::Lost);
        }
        let new = new_chunks(layout.data, rows, band, findings).ok_or(ArrayError::Lost)?;
        let mut crashed = CrashedBand {
            rows: rows.clone(),
            new,
            place: (0..layout.positions()).map(|_| None).collect(),
            sums: layout.parity_positions().map(|p| sums(rows, p, band, held)).collect(),
            full: layout.parity_positions().map(|p| full(rows, p, band)).collect(),
            sum: self.journal.parity_sum.clone(),
        };
        crashed.read(self, stripe, held & summed, false).await;
        let mut stored = held & summed;
        if crashed.is_new() {
            for (position, probed) in (0..).zip(&crashed.place) {
                let Some(probed) = probed else { continue };
                self.set_sums(stripe, position, rows.start, &probed.bytes.clone().into());
            }
        } else {
            // Data that is to be replaced, too: where its old bytes count, it was not stored yet,
            // and what was there before has a checksum that is durable.
            crashed.read(self, stripe, held & bits(0..layout.data), true).await;
            let parity = bits(layout.parity_positions());
            crashed.read(self, stripe, held & parity & !summed, false).await;
            let stores = crashed.restore(self).ok_or(ArrayError::Lost)?;
            let done = self.finish_stores(stripe, self.start_stores(stripe, &stores)).await;
            if done.no_space {
                return Err(ArrayError::NoSpace);
            }
            stored = done.stored;
        }
        // Also a member that is absent now misses this, and must not be believed later.
        self.fence_bearable(stripe, summed & !stored).await
    }
}

/// Rows of a stripe that a crash may have left with some of their parity stored, or of their data.
struct CrashedBand {
    rows: Range<u32>,
    /// By data chunk; `None`: it is not written.
    new: Vec<Option<Vec<u8>>>,
    /// By position; `None`: it is not here, or was not read.
    place: Vec<Option<Probed>>,
    /// By parity chunk; `None`: it has none, or no member.
    sums: Vec<Option<Vec<u64>>>,
    /// By parity chunk, those that the journal has in full.
    full: Vec<Option<Buffer>>,
    sum: ParitySum,
}

impl CrashedBand {
    /// `is_checked`: with `--integrity` these have the checksums that they were written with.
    async fn read(
        &mut self,
        array: &Array,
        stripe: StripeIndex,
        positions: Positions,
        is_checked: bool,
    ) {
        for position in each(positions) {
            let probed = array.probe(stripe, position, &self.rows, is_checked).await;
            self.place[usize::from(position)] = probed.ok();
        }
    }

    fn is_new(&self) -> bool {
        self.sectors().all(|row| self.with_sector(row, |sector| sector.is_new()))
    }

    /// Parity as its sums say; `None`: too much is lost.
    fn restore(&self, array: &Array) -> Option<Vec<Store>> {
        let parity = self.sums.iter().zip(self.new.len()..).filter(|(sums, _)| sums.is_some());
        let len = (self.rows.end - self.rows.start) as usize;
        let buffers: Vec<(usize, Buffer)> =
            parity.map(|(_, position)| (position, array.reactor.buffer(len))).collect();
        for row in self.sectors() {
            let known = self.with_sector(row, |sector| sector.restore(array.kernels))?;
            for (position, bytes) in known {
                let buffer = buffers.iter().find(|(its, _)| *its == position)?;
                buffer.1.slice(self.part(row)).copy_from_slice(&bytes);
            }
        }
        let store = |(position, buffer): (usize, Buffer)| Store {
            position: u8::try_from(position).expect("few positions"),
            row: self.rows.start,
            bytes: buffer.into(),
        };
        Some(buffers.into_iter().map(store).collect())
    }

    /// First rows of its sectors.
    fn sectors(&self) -> impl Iterator<Item = u32> + use<> {
        self.rows.clone().step_by(SUM_ROWS as usize)
    }

    fn part(&self, row: u32) -> Range<usize> {
        within(&self.rows, &(row..row + SUM_ROWS))
    }

    fn with_sector<R>(&self, row: u32, look: impl FnOnce(&Sector) -> R) -> R {
        let part = self.part(row);
        let new = self.new.iter().map(|bytes| bytes.as_ref().map(|bytes| &bytes[part.clone()]));
        let rows = row..row + SUM_ROWS;
        let place = self.place.iter().map(|probed| {
            let probed = probed.as_ref().filter(|probed| probed.is_readable(&rows))?;
            Some(&probed.bytes.bytes()[part.clone()])
        });
        let sums = self.sums.iter().map(|sums| sums.as_ref().map(|s| s[part.start / part.len()]));
        let full = self.full.iter().map(|its| its.as_ref().map(|its| &its.bytes()[part.clone()]));
        look(&Sector {
            new: &new.collect::<SmallVec<[_; 16]>>(),
            place: &place.collect::<SmallVec<[_; 16]>>(),
            sums: &sums.collect::<SmallVec<[_; 2]>>(),
            full: &full.collect::<SmallVec<[_; 2]>>(),
            sum: &self.sum,
        })
    }
}

/// The new bytes of each data chunk that is written; `None`: some are not found.
fn new_chunks(
    chunks: u8,
    rows: &Range<u32>,
    band: &[Piece],
    findings: &Findings,
) -> Option<Vec<Option<Vec<u8>>>> {
    let written = band[0].data.chunks;
    let len = (rows.end - rows.start) as usize;
    let blank = |chunk: u8| (written & 1 << chunk != 0).then(|| vec![0; len]);
    let mut new: Vec<Option<Vec<u8>>> = (0..chunks).map(blank).collect();
    for piece in findings.new_data(&band[0].data, rows)? {
        let part = piece.rows.start.max(rows.start)..piece.rows.end.min(rows.end);
        let bytes = piece.bytes.as_ref()?.slice(within(&piece.rows, &part));
        let into = new[usize::from(piece.position)].as_mut()?;
        into[within(rows, &part)].copy_from_slice(bytes.bytes());
    }
    Some(new)
}

/// Positions of parity that has sums.
fn summed(band: &[Piece]) -> Positions {
    let summed = band.iter().filter(|piece| piece.kind == EntryKind::ParitySums);
    summed.fold(0, |bits, piece| bits | 1 << piece.position)
}

/// These rows of parity at a position, if the journal has them.
fn full(rows: &Range<u32>, position: u8, band: &[Piece]) -> Option<Buffer> {
    piece_at(band, EntryKind::Parity, position)?.part(rows).bytes
}

fn piece_at(band: &[Piece], kind: EntryKind, position: u8) -> Option<&Piece> {
    band.iter().find(|piece| (piece.kind, piece.position) == (kind, position))
}

/// The sums of these rows of parity at a position, unless it has none or its member is not here.
fn sums(rows: &Range<u32>, position: u8, band: &[Piece], held: Positions) -> Option<Vec<u64>> {
    let piece = piece_at(band, EntryKind::ParitySums, position);
    let piece = piece.filter(|_| held & 1 << position != 0)?;
    let all = piece.bytes.as_ref()?.bytes().as_chunks::<{ SUM_BYTES as usize }>().0;
    let at = |row: u32| ((row - piece.rows.start) / SUM_ROWS) as usize;
    Some(all[at(rows.start)..at(rows.end)].iter().map(|sum| u64::from_le_bytes(*sum)).collect())
}
