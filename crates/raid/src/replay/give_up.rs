//! What a start by force gives up, so that the next one needs none: what the journal says and
//! nobody can read any more, if no member is away. (Also one that is stale may have the batch.)

use std::ops::Range;
use std::rc::Rc;

use ashlar_format::units::StripeIndex;

use super::{Findings, Piece, outside};
use crate::array::Array;
use crate::bad_set::BadRange;
use crate::error::ArrayError;
use crate::journal::NewData;
use crate::member::Member;
use crate::verify::overlap;
use crate::write_plan::each;

impl Findings {
    /// What came before this data is void in its rows.
    fn replace(&mut self, by: &Piece) {
        let is_before = |its: &Piece| {
            (its.position, true) == (by.position, its.sequence < by.sequence)
                && overlap(&its.rows, &by.rows)
        };
        let (mut left, by) = (Vec::new(), std::slice::from_ref(&by.rows));
        for (piece, hold) in std::mem::take(&mut self.data) {
            if is_before(&piece) {
                let parts = outside(&piece.rows, by).into_iter();
                left.extend(parts.map(|rows| (piece.part(&rows), hold.clone())));
            } else {
                left.push((piece, hold));
            }
        }
        self.data = left;
    }

    /// What is not found of the data that parity of these rows belongs to.
    fn missing(&self, stripe: StripeIndex, rows: &Range<u32>, of: &NewData) -> Vec<BadRange> {
        let found = |chunk: u8| {
            let data = self.data.iter().map(|(piece, _)| piece);
            let its = data.filter(move |its| its.position == chunk && its.sequence <= of.newest);
            its.map(|piece| piece.rows.clone()).collect::<Vec<_>>()
        };
        let missing = each(of.chunks).flat_map(|chunk| {
            let parts = outside(rows, &found(chunk)).into_iter();
            parts.map(move |rows| BadRange { stripe, chunk, rows })
        });
        missing.collect()
    }
}

impl Array {
    /// Data and parity of which nobody can read the bytes.
    pub(super) async fn give_up_lost(
        self: &Rc<Self>,
        stripe: StripeIndex,
        findings: &mut Findings,
    ) -> Result<(), ArrayError> {
        let lost = std::mem::take(&mut findings.lost).into_iter().map(|(piece, _)| piece);
        let (parity, data): (Vec<_>, Vec<_>) = lost.partition(|piece| piece.kind.is_parity());
        findings.given_up.extend(parity.into_iter().map(|piece| piece.rows));
        data.iter().for_each(|piece| findings.replace(piece));
        let bad = |its: Piece| BadRange { stripe, chunk: its.position, rows: its.rows };
        self.give_up_data(stripe, data.into_iter().map(bad).collect()).await
    }

    /// Parity of these rows, which can be neither as it was nor as it was to be, and what is not
    /// found of its data.
    pub(super) async fn give_up_band(
        self: &Rc<Self>,
        stripe: StripeIndex,
        rows: &Range<u32>,
        data: &NewData,
        findings: &Findings,
    ) -> Result<(), ArrayError> {
        self.give_up_data(stripe, findings.missing(stripe, rows, data)).await
    }

    async fn give_up_data(
        self: &Rc<Self>,
        stripe: StripeIndex,
        bad: Vec<BadRange>,
    ) -> Result<(), ArrayError> {
        let is_here = |member: &Member| member.alive().is_some();
        if !self.members.is_forced() || !self.members.list().iter().all(is_here) {
            return Err(ArrayError::Lost);
        }
        // Else it reads as zeroes.
        self.make_written(stripe).await?;
        if bad.is_empty() {
            return Ok(());
        }
        match self.bad.insert(stripe, bad).await {
            // It is kept as what cannot be done.
            Err(ArrayError::TooManyBad) => Err(ArrayError::Lost),
            inserted => inserted,
        }
    }
}
