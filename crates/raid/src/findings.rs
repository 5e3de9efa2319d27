//! What a scrub found in one stripe, and how its report tells of it.
//!
//! Each stripe is counted once: it agrees, did so after blocks of it were worked out from the
//! others (damaged), does not (mismatched), or could not be checked (unreadable).

use std::collections::BTreeSet;
use std::ops::Range;

use ashlar_format::scrub_report::Flaw;
use ashlar_format::units::StripeIndex;

use crate::array::Array;
use crate::locate::Mismatch;
use crate::status::{SCRUB_PLACES_MAX, ScrubPlace, ScrubReport};
use crate::verify::Flawed;

/// What became of one stripe.
pub(crate) enum Verdict {
    Agrees,
    /// It cannot be told: members are missing, or what they return cannot be used.
    Unreadable,
    /// With whether each was mended.
    Differs(Vec<(Mismatch, bool)>),
}

pub(crate) struct Finding {
    pub(crate) verdict: Verdict,
    /// What was wrong before the stripe could be compared with itself.
    pub(crate) flawed: Vec<Flawed>,
}

impl Verdict {
    /// Positions whose member returned other bytes than fit those of the others.
    fn located(&self) -> BTreeSet<u8> {
        let found = match self {
            Verdict::Differs(found) => found.as_slice(),
            Verdict::Agrees | Verdict::Unreadable => &[],
        };
        found.iter().filter_map(|(its, _)| its.liar_position()).collect()
    }
}

impl Finding {
    /// Positions whose member returned other bytes than it was given. One that says that it cannot
    /// read has not.
    fn liars(&self) -> BTreeSet<u8> {
        let lied = self.flawed.iter().filter(|its| its.flaw != Flaw::Unreadable);
        lied.map(|its| its.position).chain(self.verdict.located()).collect()
    }
}

impl Array {
    /// Whether it is to be stored at once: a place of a mismatch is told. Others wait for the next
    /// counts. What is left of them after a crash is met again; of what was mended the counts of
    /// the drives tell.
    pub(crate) fn note_finding(&self, stripe: StripeIndex, finding: &Finding) -> bool {
        let mut report = self.jobs.scrub_report.borrow_mut();
        let report = report.get_or_insert_default();
        report.bad_stripes += u64::from(!self.bad.of(stripe).is_empty());
        let all_mended = finding.flawed.iter().all(|its| its.is_mended);
        let mut places: Vec<ScrubPlace> = joined(&finding.flawed)
            .iter()
            .map(|its| {
                let place = self.place(stripe, Some(its.position), &its.rows);
                ScrubPlace { flaw: its.flaw, repaired: its.is_mended, ..place }
            })
            .collect();
        match &finding.verdict {
            Verdict::Unreadable => report.unreadable_stripes += 1,
            Verdict::Agrees if finding.flawed.is_empty() => return false,
            Verdict::Agrees => {
                report.damaged_stripes += 1;
                report.repaired_stripes += u64::from(all_mended);
            }
            Verdict::Differs(found) => {
                let all_mended = all_mended && found.iter().all(|(_, mended)| *mended);
                let undecided = found.iter().any(|(its, _)| its.liar.is_none());
                report.mismatched_stripes += 1;
                report.undecided_stripes += u64::from(undecided);
                report.repaired_stripes += u64::from(all_mended);
                places.extend(found.iter().map(|(its, repaired)| {
                    let place = self.place(stripe, its.liar_position(), &its.rows);
                    ScrubPlace { repaired: *repaired, ..place }
                }));
            }
        }
        // Of what does not fit its checksum the drive knows already.
        for position in finding.verdict.located() {
            if let Some((drive, _)) = self.members.at(stripe, position) {
                drive.note_wrong_block();
            }
        }
        for position in finding.liars() {
            let member = self.layout().member_at(stripe, position);
            *report.wrong_by_member.entry(member).or_default() += 1;
        }
        let told = places.into_iter().filter(|place| tell(report, *place));
        told.filter(|place| place.flaw == Flaw::Mismatch).count() > 0
    }

    /// A mismatch that is not repaired, in these rows of a position.
    fn place(&self, stripe: StripeIndex, position: Option<u8>, rows: &Range<u32>) -> ScrubPlace {
        let layout = self.layout();
        let member = position.map(|position| layout.member_at(stripe, position));
        let first = stripe.0 * layout.stripe_bytes();
        let data_positions = layout.data * layout.copies;
        let (offset, len) = match position.filter(|position| *position < data_positions) {
            Some(position) => {
                let chunk = u64::from(position / layout.copies) * u64::from(layout.chunk_bytes);
                (first + chunk + u64::from(rows.start), u64::from(rows.end - rows.start))
            }
            None => (first, layout.stripe_bytes()),
        };
        let (stripe, flaw) = (stripe.0, Flaw::Mismatch);
        ScrubPlace { stripe, offset, len, member, flaw, repaired: false }
    }
}

/// Neighbours with the same fate are one. (A drive that loses what is written over its blocks shows
/// them twice.)
fn joined(flawed: &[Flawed]) -> Vec<Flawed> {
    let mut all: Vec<Flawed> = Vec::new();
    for next in flawed {
        let is_like = |its: &&mut Flawed| {
            let (its, next) = (&**its, next);
            let same = (its.position, its.flaw, its.is_mended);
            same == (next.position, next.flaw, next.is_mended)
                && its.rows.start <= next.rows.start
                && its.rows.end >= next.rows.start
        };
        match all.iter_mut().rev().find(is_like) {
            Some(last) => last.rows.end = last.rows.end.max(next.rows.end),
            None => all.push(next.clone()),
        }
    }
    all
}

/// Whether there is room for it. What somebody has to see to takes the room of what is repaired.
fn tell(report: &mut ScrubReport, place: ScrubPlace) -> bool {
    if report.places.len() == SCRUB_PLACES_MAX {
        let last = report.places.iter().rposition(|its| its.repaired);
        let Some(last) = last.filter(|_| !place.repaired) else { return false };
        report.places.remove(last);
    }
    report.places.push(place);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flawed(position: u8, rows: Range<u32>, is_mended: bool) -> Flawed {
        Flawed { position, rows, flaw: Flaw::Block, is_mended }
    }

    #[test]
    fn neighbours_are_one() {
        let all = [
            flawed(0, 0..4096, true),
            flawed(0, 4096..8192, true),
            flawed(0, 8192..12288, false),
            flawed(1, 8192..12288, true),
            flawed(0, 4096..8192, true),
            flawed(0, 12288..16384, true),
        ];
        let expected = [
            flawed(0, 0..8192, true),
            flawed(0, 8192..12288, false),
            flawed(1, 8192..12288, true),
            flawed(0, 12288..16384, true),
        ];
        assert_eq!(joined(&all), expected);
    }

    #[test]
    fn what_is_not_repaired_is_told_before_the_rest() {
        let place = |stripe: u64, repaired| {
            let (member, flaw) = (None, Flaw::Block);
            ScrubPlace { stripe, offset: 0, len: 4096, member, flaw, repaired }
        };
        let mut report = ScrubReport::default();
        assert!((0..16).all(|stripe| tell(&mut report, place(stripe, true))));
        assert!(!tell(&mut report, place(16, true)));
        assert!((17..33).all(|stripe| tell(&mut report, place(stripe, false))));
        assert!(!tell(&mut report, place(33, false)));
        let stripes: Vec<u64> = report.places.iter().map(|place| place.stripe).collect();
        assert_eq!(stripes, (17..33).collect::<Vec<_>>());
    }
}
