//! A read that does not wait for a late drive: it is worked out from the others, too, and whichever
//! comes first is the answer.
//!
//! Invariant: no drive is ever given the caller's memory: a late one would write there when the
//! caller has long got other bytes, or uses its memory for something else. What is read goes to
//! memory of the engine, and is copied. While reads may be hedged that costs each of them a timer
//! and a copy, 1 to 2 µs of the core (`hedge_bench`); and those that are late cost what drives do
//! twice.

use std::cell::RefCell;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

use ashlar_drive::drive::{Drive, DriveIo};
use ashlar_drive::error::DriveError;
use ashlar_format::units::StripeIndex;
use ashlar_reactor::backend::Instant;
use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::range_lock::Mode;
use ashlar_reactor::wait_list::WaitList;

use crate::array::Array;
use crate::error::ArrayError;
use crate::layout::Piece;

/// A read under way, and when it is late.
pub(crate) struct HedgedIo {
    io: DriveIo,
    buffer: Buffer,
    position: u8,
    late: Instant,
}

/// What the others have come to.
#[derive(Default)]
struct Others {
    result: RefCell<Option<Result<Buffer, ArrayError>>>,
    come: WaitList,
}

enum First {
    Own(Result<(), DriveError>),
    Others(Result<Buffer, ArrayError>),
}

impl Array {
    /// Starts to read from the member at `position`, whose drive has the piece at `at`.
    pub(crate) fn start_hedged(
        &self,
        piece: &Piece,
        position: u8,
        drive: &Rc<Drive>,
        at: u64,
    ) -> HedgedIo {
        self.hedging.earn(self.settings().hedge_percent());
        let member = self.layout_of(piece.stripe).member_at(piece.stripe, position);
        let late = self.reactor.turn_time().after(self.hedging.patience(member.index()));
        let buffer = self.reactor.buffer(piece.len());
        HedgedIo { io: drive.read(at, buffer.clone().into()), buffer, position, late }
    }

    /// Waits for what comes first, and copies it to the caller. An error is the member's own.
    pub(crate) async fn finish_hedged(
        self: &Rc<Self>,
        piece: &Piece,
        into: &Buffers,
        mut hedged: HedgedIo,
    ) -> Result<(), DriveError> {
        let own = match self.before_late(&mut hedged).await {
            Some(own) => own,
            None => match self.race(piece, &mut hedged.io, hedged.position).await {
                First::Own(own) => own,
                First::Others(Ok(bytes)) => {
                    self.count(|counters| counters.hedges_won += 1);
                    into.copy_from(&bytes.into());
                    self.leave_behind(hedged.io);
                    return Ok(());
                }
                First::Others(Err(_)) => hedged.io.await,
            },
        };
        own?;
        let bytes = hedged.buffer.into();
        if !self.fits(piece.stripe, hedged.position, piece.rows.start, &bytes).await {
            return Err(DriveError::Media);
        }
        into.copy_from(&bytes);
        Ok(())
    }

    /// `None`: its time is over.
    async fn before_late(&self, hedged: &mut HedgedIo) -> Option<Result<(), DriveError>> {
        let mut late = std::pin::pin!(self.reactor.sleep_until(hedged.late));
        std::future::poll_fn(|context| match Pin::new(&mut hedged.io).poll(context) {
            Poll::Ready(own) => Poll::Ready(Some(own)),
            Poll::Pending => late.as_mut().poll(context).map(|()| None),
        })
        .await
    }

    /// Asks the others, if that may be, while the own member goes on.
    async fn race(self: &Rc<Self>, piece: &Piece, io: &mut DriveIo, position: u8) -> First {
        let others = Rc::new(Others::default());
        if !self.hedging.spend() {
            return First::Own(io.await);
        }
        self.count(|counters| counters.hedged += 1);
        // The array does not stop before they have come.
        let request = self.go_on();
        let (array, piece, theirs) = (self.clone(), piece.clone(), others.clone());
        self.reactor.spawn(async move {
            let read = array.read_others(piece.stripe, piece.chunk, &piece.rows, position).await;
            *theirs.result.borrow_mut() = Some(read);
            theirs.come.wake_all(&array.reactor);
            drop(request);
        });
        std::future::poll_fn(|context| {
            if let Poll::Ready(own) = Pin::new(&mut *io).poll(context) {
                return Poll::Ready(First::Own(own));
            }
            if let Some(read) = others.result.borrow_mut().take() {
                return Poll::Ready(First::Others(read));
            }
            others.come.add(&self.reactor);
            Poll::Pending
        })
        .await
    }

    /// Rows of a data chunk without the member that is late.
    async fn read_others(
        &self,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
        late: u8,
    ) -> Result<Buffer, ArrayError> {
        let _rows = self.lock_rows(stripe, rows.clone(), Mode::Shared).await;
        // Forgotten since, or not to be trusted: the own member answers for that.
        if !self.is_written(stripe) || self.unsynced.contains(stripe) {
            return Err(ArrayError::Lost);
        }
        if !self.layout().is_mirrored() {
            return self.reconstruct(stripe, late, rows, 0).await;
        }
        for position in self.layout().data_positions(chunk).filter(|position| *position != late) {
            if let Some(read) = self.read_position(stripe, position, rows).await {
                return read.map_err(|_| ArrayError::Lost);
            }
        }
        Err(ArrayError::Lost)
    }

    /// How late it was is to be known, and what went wrong; and the array stops after it.
    fn leave_behind(self: &Rc<Self>, io: DriveIo) {
        let request = self.go_on();
        self.reactor.spawn(async move {
            let _ = io.await;
            drop(request);
        });
    }
}
