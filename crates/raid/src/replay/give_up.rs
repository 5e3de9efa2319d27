//! What a start by force gives up, so that the next one needs none: what the journal says and
//! nobody can read any more, if no member is away. (Also one that is stale may have the batch.)
//!
//! Order, and what a crash leaves at each step:
//! 1. data that is lost is in the list of bad blocks, durably (crash: the same is found again, and
//!    it takes force again as long as the ring has it)
//! 2. parity of all such rows is made anew, before anything is stored there: from here on as in
//!    `give_up.rs`. Where that cannot be done now, the stripe is kept as it is, and what the ring
//!    has of it stays there
//! 3. what is found of these rows is put in place as any other

use std::ops::Range;
use std::rc::Rc;

use ashlar_format::units::StripeIndex;

use super::{Findings, Piece, outside};
use crate::array::Array;
use crate::bad_set::BadRange;
use crate::error::ArrayError;
use crate::member::Member;

impl Findings {
    /// What came before this data is void in its rows.
    fn replace(&mut self, by: &Piece) {
        let left = std::mem::take(&mut self.data).into_iter().flat_map(|(piece, hold)| {
            let is_before = piece.position == by.position && piece.sequence < by.sequence;
            let void = if is_before { std::slice::from_ref(&by.rows) } else { &[] };
            let parts = outside(&piece.rows, void).into_iter();
            parts.map(move |rows| (piece.part(&rows), hold.clone()))
        });
        self.data = left.collect();
    }
}

impl Array {
    /// Data and parity of which nobody can read the bytes.
    pub(super) async fn give_up_lost(
        self: &Rc<Self>,
        stripe: StripeIndex,
        findings: &mut Findings,
    ) -> Result<(), ArrayError> {
        self.check_may_give_up()?;
        let lost = std::mem::take(&mut findings.lost).into_iter().map(|(piece, _)| piece);
        let (parity, data): (Vec<_>, Vec<_>) = lost.partition(|piece| piece.kind.is_parity());
        data.iter().for_each(|piece| findings.replace(piece));
        let mut bad: Vec<_> = data.into_iter().map(|its| (its.position, its.rows)).collect();
        for piece in parity {
            bad.extend(findings.missing(&piece.data, &piece.rows));
            findings.given_up.push(piece.rows);
        }
        self.give_up_data(stripe, bad).await
    }

    /// An error: it is left to another start.
    pub(super) fn check_may_give_up(&self) -> Result<(), ArrayError> {
        // A member that died meanwhile may come back.
        let is_here = |member: &Member| member.alive().is_some();
        let may = self.members.is_forced() && self.members.list().iter().all(is_here);
        if may { Ok(()) } else { Err(ArrayError::Lost) }
    }

    /// Rows of data chunks.
    pub(super) async fn give_up_data(
        self: &Rc<Self>,
        stripe: StripeIndex,
        bad: Vec<(u8, Range<u32>)>,
    ) -> Result<(), ArrayError> {
        // Else it reads as zeroes, whatever is bad of it, and has no parity.
        self.make_written(stripe).await?;
        if bad.is_empty() {
            return Ok(());
        }
        let bad = bad.into_iter().map(|(chunk, rows)| BadRange { stripe, chunk, rows });
        match self.bad.insert(stripe, bad.collect()).await {
            // It is kept as what cannot be done.
            Err(ArrayError::TooManyBad) => Err(ArrayError::Lost),
            inserted => inserted,
        }
    }

    /// Of a stripe's rows. `Lost`: it cannot be now.
    pub(super) async fn make_parity_anew(
        self: &Rc<Self>,
        stripe: StripeIndex,
        rows: &[Range<u32>],
    ) -> Result<(), ArrayError> {
        for rows in rows {
            self.give_up_unsettled(stripe, rows).await?;
            // Nobody would know of it after a crash: the ring has to say so until another start.
            if self.unsynced.contains(stripe) {
                self.unsynced.remove(stripe);
                return Err(ArrayError::Lost);
            }
        }
        Ok(())
    }
}
