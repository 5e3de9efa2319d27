//! An array as another reactor reads it: from its drives, while the view of it says that this is
//! all there is to do. Whatever is not done here is the owner's to do.

use std::cell::Cell;
use std::sync::Arc;

use ashlar_reactor::buffer::{Buffers, DIRECT_ALIGN};
use ashlar_reactor::executor::{Io, Reactor};
use ashlar_reactor::op::{Device, DeviceId, Op};
use smallvec::SmallVec;

use crate::layout::Piece;
use crate::notes::{Notes, Sample, Sampling};
use crate::view::View;

/// A view on its way to another reactor, and the members' drives with it.
pub struct Shown {
    pub(crate) view: Arc<View>,
    /// Of who reads by it.
    pub(crate) notes: Notes,
    /// By member.
    pub(crate) devices: Vec<Device>,
}

/// A read of one drive.
struct PieceRead {
    io: Io,
    len: u64,
    /// By its number.
    member: usize,
}

/// It has the drives until it is dropped.
pub struct Viewer {
    reactor: Reactor,
    view: Arc<View>,
    notes: Notes,
    sampling: Sampling,
    devices: Vec<DeviceId>,
    /// Turns over the copies of a mirror.
    next_copy: Cell<u8>,
}

impl Drop for Viewer {
    fn drop(&mut self) {
        self.devices.iter().for_each(|device| self.reactor.unregister(*device));
    }
}

impl Viewer {
    pub fn open(reactor: &Reactor, shown: Shown) -> Viewer {
        let Shown { view, notes, devices } = shown;
        let devices = devices.into_iter().map(|device| reactor.register(device)).collect();
        Viewer {
            reactor: reactor.clone(),
            view,
            notes,
            sampling: Sampling::default(),
            devices,
            next_copy: Cell::new(0),
        }
    }

    pub fn is_open(&self) -> bool {
        self.view.is_open()
    }

    /// Fills `into` from `offset` of the array. False: the owner is to do it; whatever stands in
    /// `into` then means nothing, and nobody else fills it any more.
    pub async fn read(&self, offset: u64, into: &Buffers) -> bool {
        let Some(reads) = self.begin(offset, into) else { return false };
        let timed = self.sampling.choose(self.reactor.turn_time(), reads.len());
        let was_crowded = timed.is_some() && self.view.is_crowded();
        let (mut is_good, mut took) = (true, None);
        // All are waited for: a drive may still be writing to the caller's memory.
        for (index, mut read) in reads.into_iter().enumerate() {
            is_good &= (&mut read.io).await == Ok(read.len);
            if timed == Some(index) {
                took = Some((read.member, read.io.latency()));
            }
        }
        if is_good && self.view.was_open() {
            self.notes.count(into.len() as u64);
            if let Some((member, took)) = took {
                let crowded = was_crowded || self.view.is_crowded();
                self.notes.add(Sample { member, took, crowded });
            }
            return true;
        }
        self.reactor.reclaim(into).await;
        false
    }

    /// Starts what is to be read, if all of it can be.
    fn begin(&self, offset: u64, into: &Buffers) -> Option<SmallVec<[PieceRead; 2]>> {
        let (view, len) = (&self.view, into.len() as u64);
        let align = DIRECT_ALIGN.max(view.sector_bytes as usize);
        if !view.is_open() || !view.layout.contains(offset, len) || !into.is_aligned(align) {
            return None;
        }
        let pieces: SmallVec<[Piece; 2]> = match view.layout.one_piece(offset, len) {
            Some(piece) => SmallVec::from_iter([piece]),
            None => view.layout.pieces(offset, len).collect(),
        };
        if !pieces.iter().all(|its| view.is_plain(its.stripe) && view.is_whole(&its.rows)) {
            return None;
        }
        let read = |piece: &Piece| {
            let (member, offset) = self.place(piece);
            let (device, into) = (self.devices[member], into.slice(piece.in_request()));
            let io = self.reactor.submit(Op::Read { device, offset, into });
            PieceRead { io, len: piece.len() as u64, member }
        };
        Some(pieces.iter().map(read).collect())
    }

    /// The member that has the piece, by its number, and where it is there.
    fn place(&self, piece: &Piece) -> (usize, u64) {
        let layout = &self.view.layout;
        let positions = layout.data_positions(piece.chunk);
        let turn = if layout.is_mirrored() { self.next_copy.get() } else { 0 };
        self.next_copy.set(turn.wrapping_add(1));
        let position = positions.start + turn % layout.copies;
        let member = layout.member_at(piece.stripe, position).index();
        let at = layout.member_offset(piece.stripe, piece.rows.start);
        (member, self.view.data[member] + at)
    }
}
