//! Scrub: reads everything and verifies that parity or copies agree with the data. Blocks that do
//! not fit their checksums, or cannot be read, are mended first, as in any read, and told.
//!
//! It begins by itself once a period, or by hand; many stripes are under way, paced (`shift.rs`);
//! where it is goes to the superblock now and then, so that a restart goes on from there. Which
//! chunk is wrong is told where that can be (`locate.rs`), and then mended at once. Where it cannot
//! be, parity and copies are made anew only if an operator asks for it: the data may be what is
//! wrong.
//!
//! The dirty map is not marked for what is mended: rows are wrong before and right after, and a
//! crash in between leaves each of them one or the other. (Resync would take wrong data for right.)

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::scrub_report::{Flaw, Phase};
use ashlar_format::units::StripeIndex;
use ashlar_reactor::backend::Instant;
use ashlar_reactor::buffer::Buffer;
use ashlar_reactor::range_lock::Mode;
use smallvec::SmallVec;

use crate::array::Array;
use crate::error::{ArrayError, ChangeError};
use crate::findings::{Finding, Verdict};
use crate::journal::Slice;
use crate::lanes::Lanes;
use crate::layout::Positions;
use crate::locate::{Liar, Mismatch, locate};
use crate::scrub_plan::ScrubMark;
use crate::scrub_store::StoredScrub;
use crate::shift::Shift;
use crate::status::ScrubReport;
use crate::verify::{Flawed, blocks, overlap};
use crate::write_plan::each;

/// Between two superblocks that say how far it is. The first mismatches are told at once.
const SAVE_PERIOD: Duration = Duration::from_secs(10);
/// The journal is drained again for a stripe that is written before it is looked at; so many times.
const DRAINS_MAX: u32 = 4;

/// What a scrub does where it cannot tell which chunk is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Undecided {
    Leave,
    /// Parity is made to fit the data, copies to be as the first.
    MakeAgree,
}

impl Array {
    /// Starts to read and verify everything. What is surely wrong is mended; with `repair`, where
    /// that cannot be told parity or copies are written anew, to agree with the data (or with the
    /// first copy).
    pub fn start_scrub(self: &Rc<Self>, repair: bool) -> Result<(), ChangeError> {
        if !self.layout().is_redundant() {
            return Err(ChangeError::Spec("level 0 has nothing to verify data with".into()));
        }
        if self.is_restriping() {
            return Err(ChangeError::Busy("a restripe"));
        }
        if self.jobs.scrub_slot().is_running() {
            return Err(ChangeError::Busy("a scrub"));
        }
        let mark = ScrubMark { next: 0, began_s: self.reactor.unix_s() };
        let began_s = mark.began_s;
        self.begin_scrub(mark, ScrubReport { began_s, repairs: repair, ..ScrubReport::default() });
        Ok(())
    }

    /// Ends the scrub that runs; the next one begins from the start.
    pub fn stop_scrub(&self) -> Result<(), ChangeError> {
        if !self.jobs.scrub_slot().is_running() {
            return Err(ChangeError::Spec("no scrub is running".into()));
        }
        self.jobs.scrub_stopped.set(true);
        Ok(())
    }

    /// Tells what the last scrub found, and goes on with one that the array's last stop, or a
    /// crash, interrupted.
    pub(crate) fn resume_scrub(self: &Rc<Self>, stored: Option<StoredScrub>) {
        let mark = self.members.scrub();
        stored.iter().for_each(|stored| self.recall_scrub(stored));
        let (next, report) = match stored {
            Some(stored) if stored.phase == Phase::Running => (stored.next, stored.report),
            // It came to its end before a superblock said so.
            Some(_) => return self.members.set_scrub(ScrubMark { next: 0, ..mark }),
            None => {
                let (began_s, first_stripe) = (mark.began_s, mark.next);
                let report = ScrubReport { began_s, first_stripe, ..ScrubReport::default() };
                (mark.next, report)
            }
        };
        if mark.next > 0 && self.layout().is_redundant() && !self.is_restriping() {
            let next = next.min(self.layout().stripes);
            self.begin_scrub(ScrubMark { next, ..mark }, report);
        }
    }

    /// Where members are missing or stripes wait for resync, little could be verified.
    pub(crate) fn scrub_if_due(self: &Rc<Self>) {
        let period_s = self.settings().scrub_period_s();
        let ready = self.members.all_trusted() && self.unsynced.count() == 0;
        if ready && self.members.scrub().is_due(period_s, self.reactor.unix_s()) {
            // Refused while one runs, and at level 0.
            let _ = self.start_scrub(false);
        }
    }

    /// `report`: of what came before.
    fn begin_scrub(self: &Rc<Self>, mark: ScrubMark, report: ScrubReport) {
        let undecided = if report.repairs { Undecided::MakeAgree } else { Undecided::Leave };
        let stripes = self.layout().stripes;
        let left = self.written.stripes_inside(mark.next..stripes) * self.stripe_bytes();
        self.jobs.scrub_slot().begin(self.reactor.now(), mark.next, stripes, left);
        self.jobs.scrub_stopped.set(false);
        *self.jobs.scrub_report.borrow_mut() = Some(report);
        let array = self.clone();
        self.reactor.spawn(async move {
            let next = array.scrub(mark, undecided).await;
            if let Ok(_request) = array.admit_step().await {
                let is_stopped = array.jobs.scrub_stopped.get();
                let ended_s = array.reactor.unix_s();
                array.jobs.scrub_report.borrow_mut().get_or_insert_default().ended_s =
                    Some(ended_s);
                let phase = if is_stopped { Phase::Stopped } else { Phase::Finished };
                array.save_scrub(ScrubMark { next, ..mark }, phase).await;
            } else if next > 0 {
                // For `keep_scrub`. One that has looked at nothing leaves the one before as it was.
                array.members.set_scrub(ScrubMark { next, ..mark });
            }
            array.jobs.scrub_slot().end();
        });
    }

    /// Returns the first stripe that is not looked at.
    async fn scrub(self: &Rc<Self>, mark: ScrubMark, undecided: Undecided) -> u64 {
        let (lanes, mut shift) = (Lanes::new(&self.reactor), Shift::begin(self));
        let saved = Rc::new(Cell::new(None));
        let mut at = mark.next;
        while at < self.layout().stripes && !self.jobs.scrub_stopped.get() {
            let stripe = StripeIndex(at);
            if !self.is_written(stripe) {
                at = self.written.stripes_of(self.written.region_of(stripe)).end;
                continue;
            }
            if self.is_mending() {
                lanes.drained().await;
                shift.wait_while(|| self.is_mending()).await;
            } else if shift.is_over() {
                lanes.drained().await;
                shift.rest().await;
            }
            let Ok(request) = self.admit_step().await else { break };
            let lane = lanes.enter(shift.stripes_at_once()).await;
            let (array, saved) = (self.clone(), saved.clone());
            self.reactor.spawn(async move {
                let finding = array.scrub_stripe(stripe, undecided).await;
                lane.turn().await;
                let is_told = array.note_finding(stripe, &finding);
                let (now, next) = (array.reactor.now(), stripe.0 + 1);
                array.jobs.scrub_slot().worked(now, array.stripe_bytes());
                array.jobs.scrub_slot().advance(next);
                let is_old = |saved: Instant| now.since(saved) >= SAVE_PERIOD;
                // Those that follow wait for their turn: one is saved at a time.
                if is_told || saved.get().is_none_or(is_old) {
                    saved.set(Some(now));
                    array.save_scrub(ScrubMark { next, ..mark }, Phase::Running).await;
                }
                drop((lane, request));
            });
            at += 1;
        }
        lanes.drained().await;
        at
    }

    /// What is more urgent is done: redundancy is made where there is too little of it.
    fn is_mending(&self) -> bool {
        let mending = self.jobs.rebuild_slot().is_running() || self.jobs.resync_slot().is_running();
        mending && !self.jobs.scrub_stopped.get()
    }

    /// What was found below the mark, then the mark. What cannot be stored is scrubbed again after
    /// a restart.
    async fn save_scrub(&self, mark: ScrubMark, phase: Phase) {
        self.save_scrub_report(phase, mark.next).await;
        let next = if phase == Phase::Running { mark.next } else { 0 };
        self.members.set_scrub(ScrubMark { next, ..mark });
        let _ = self.members.save().await;
    }

    /// What a scrub that the stop interrupts has found since it was saved. Nothing is under way.
    pub(crate) async fn keep_scrub(&self) {
        let mark = self.members.scrub();
        let next = self.jobs.scrub_slot().done().max(mark.next);
        if next > 0 {
            let is_stopped = self.jobs.scrub_stopped.get();
            let phase = if is_stopped { Phase::Stopped } else { Phase::Running };
            self.save_scrub(ScrubMark { next, ..mark }, phase).await;
        }
    }

    async fn scrub_stripe(self: &Rc<Self>, stripe: StripeIndex, undecided: Undecided) -> Finding {
        let (mut flawed, mut drains) = (Vec::new(), 0..DRAINS_MAX);
        loop {
            if let Some(verdict) = self.look_at(stripe, undecided, &mut flawed).await {
                return Finding { verdict, flawed };
            }
            if drains.next().is_none() || self.drain_journal().await.is_err() {
                break;
            }
        }
        // It is written all the time, or the journal cannot be drained now; another scrub may have
        // more luck.
        let verdict = self.look_at(stripe, Undecided::Leave, &mut flawed).await;
        Finding { verdict: verdict.unwrap_or(Verdict::Unreadable), flawed }
    }

    /// `None`: parity cannot be made anew before the journal is drained: a start would look for the
    /// parity that stood there. `flawed`: what it met, also what it has mended before.
    async fn look_at(
        self: &Rc<Self>,
        stripe: StripeIndex,
        undecided: Undecided,
        flawed: &mut Vec<Flawed>,
    ) -> Option<Verdict> {
        if self.unsynced.contains(stripe) && self.sync_now(stripe).await.is_err() {
            return Some(Verdict::Unreadable);
        }
        let _stripe = self.lock_stripe(stripe, Mode::Exclusive).await;
        if !self.is_written(stripe) {
            return Some(Verdict::Agrees);
        }
        if self.unsynced.contains(stripe) || self.torn_stripes.contains(stripe) {
            return Some(Verdict::Unreadable);
        }
        let Some(have) = self.read_mended(stripe, flawed).await else {
            return Some(Verdict::Unreadable);
        };
        self.compare(stripe, undecided, &have).await
    }

    /// The chunks of all positions, with what could be mended.
    async fn read_mended(
        &self,
        stripe: StripeIndex,
        flawed: &mut Vec<Flawed>,
    ) -> Option<SmallVec<[Buffer; 8]>> {
        // What was not mended is met again.
        flawed.retain(|its| its.is_mended);
        let mut have = self.read_all(stripe, flawed).await;
        if let Err(unreadable) = have {
            flawed.retain(|its| its.is_mended);
            self.renew(stripe, unreadable, flawed).await;
            have = self.read_all(stripe, flawed).await;
            if have.is_ok() {
                // It was for a moment only.
                flawed.retain(|its| its.is_mended || its.flaw != Flaw::Unreadable);
            }
        }
        have.ok()
    }

    /// The caller holds the stripe.
    async fn compare(
        &self,
        stripe: StripeIndex,
        undecided: Undecided,
        have: &[Buffer],
    ) -> Option<Verdict> {
        let layout = self.layout();
        let should = if layout.is_mirrored() {
            self.first_copies(have)
        } else {
            self.parity_of(&layout, have, 0)
        };
        let agrees = |its: &Slice| its.bytes.bytes() == have[usize::from(its.position)].bytes();
        if should.iter().all(agrees) {
            return Some(Verdict::Agrees);
        }
        let chunks: SmallVec<[&[u8]; 16]> = have.iter().map(Buffer::bytes).collect();
        let mut found = Vec::new();
        let mismatches = locate(&layout, self.kernels, &chunks, self.sector_bytes);
        if undecided == Undecided::MakeAgree
            && mismatches.iter().any(|its| its.liar.is_none())
            && self.journal.tells_parity_of(stripe)
        {
            return None;
        }
        // Of these copies it is known which one is wrong: it must not be the one that is taken.
        let told = |rows: &Range<u32>, position: u8| {
            mismatches.iter().any(|its| {
                let same = |liar: &Liar| liar.position / layout.copies == position / layout.copies;
                overlap(&its.rows, rows) && its.liar.as_ref().is_some_and(same)
            })
        };
        let are_told = mismatches.iter().any(|its| its.liar.is_some());
        let mut all = Vec::new();
        for mismatch in &mismatches {
            // What is told of copies in one sector says nothing of the next.
            let parts = match are_told && mismatch.liar.is_none() {
                true => {
                    let sectors = self.sectors(&mismatch.rows);
                    sectors.map(|rows| Mismatch { rows, liar: None }).collect()
                }
                false => vec![mismatch.clone()],
            };
            let mut mended = true;
            for part in parts {
                let should = should.iter().filter(|its| !told(&part.rows, its.position));
                mended &= self.mend(stripe, &part, undecided, should).await;
            }
            all.push(mended);
        }
        found.extend(mismatches.into_iter().zip(all));
        Some(Verdict::Differs(found))
    }

    /// The chunks of all positions. The error: there are others, and these of them cannot be read
    /// by their members. The caller holds the stripe.
    async fn read_all(
        &self,
        stripe: StripeIndex,
        flawed: &mut Vec<Flawed>,
    ) -> Result<SmallVec<[Buffer; 8]>, Positions> {
        let rows = 0..self.layout().chunk_bytes;
        let started: SmallVec<[_; 8]> = (0..self.layout().positions())
            .map(|position| (position, self.start_position(stripe, position, &rows)))
            .collect();
        let (mut have, mut unreadable) = (SmallVec::new(), 0);
        for (position, started) in started {
            let Some((buffer, io)) = started else { continue };
            if io.await.is_err() {
                unreadable |= 1 << position;
                continue;
            }
            let made = self.make_true_and_tell(stripe, position, &rows, &buffer, flawed).await;
            have.extend(made.is_ok().then_some(buffer));
        }
        let is_complete = have.len() == usize::from(self.layout().positions());
        if is_complete { Ok(have) } else { Err(unreadable) }
    }

    /// Writes blocks anew that these positions' members cannot read, as the rest of the stripe
    /// tells what they were. The caller holds the stripe. (They are looked for by probes: how many
    /// there are says nothing more about the drive.)
    async fn renew(&self, stripe: StripeIndex, unreadable: Positions, flawed: &mut Vec<Flawed>) {
        let whole = 0..self.layout().chunk_bytes;
        for position in each(unreadable) {
            let Ok(probed) = self.probe(stripe, position, &whole, false).await else { continue };
            for rows in blocks(&whole).filter(|rows| !probed.is_readable(rows)) {
                let is_mended = self.renew_block(stripe, position, &rows).await;
                flawed.push(Flawed { position, rows, flaw: Flaw::Unreadable, is_mended });
            }
        }
    }

    /// Whether it is written anew.
    async fn renew_block(&self, stripe: StripeIndex, position: u8, rows: &Range<u32>) -> bool {
        let Ok(bytes) = self.what_others_have(stripe, position, rows).await else { return false };
        // As for a read: one of the others may be the liar.
        if self.layout().parity > 0
            && !self.may_be(stripe, position, rows, &bytes).await
            && !self.outvote_checksum(stripe, position, rows, &bytes).await
        {
            return false;
        }
        let slice = Slice { position, row: rows.start, bytes };
        let stored = self.write_slices(stripe, &[slice]).await.stored;
        self.journal.note_stored(stripe);
        let is_mended = stored == 1 << position;
        self.count(|counters| counters.repaired += u64::from(is_mended));
        is_mended
    }

    /// Rows of a position as the others have them.
    async fn what_others_have(
        &self,
        stripe: StripeIndex,
        position: u8,
        rows: &Range<u32>,
    ) -> Result<Buffer, ArrayError> {
        let layout = self.layout();
        if layout.parity > 0 {
            return self.reconstruct(stripe, position, rows, 0).await;
        }
        for copy in layout.data_positions(position / layout.copies).filter(|p| *p != position) {
            if let Some(Ok(bytes)) = self.read_position(stripe, copy, rows).await {
                return Ok(bytes);
            }
        }
        Err(ArrayError::Lost)
    }

    /// Writes the rows that are wrong anew. The caller holds the stripe.
    async fn mend(
        &self,
        stripe: StripeIndex,
        mismatch: &Mismatch,
        undecided: Undecided,
        should: impl Iterator<Item = &Slice>,
    ) -> bool {
        let row = mismatch.rows.start;
        let slices: SmallVec<[Slice; 2]> = match (&mismatch.liar, undecided) {
            (Some(liar), _) => {
                let bytes = self.reactor.buffer(liar.right.len());
                bytes.copy_from_slice(&liar.right);
                [Slice { position: liar.position, row, bytes }].into_iter().collect()
            }
            (None, Undecided::Leave) => return false,
            (None, Undecided::MakeAgree) => {
                let rows = row as usize..mismatch.rows.end as usize;
                let part = |its: &Slice| {
                    let bytes = its.bytes.slice(rows.clone());
                    Slice { position: its.position, row, bytes }
                };
                should.map(part).collect()
            }
        };
        let wanted = slices.iter().fold(0, |bits, slice| bits | 1 << slice.position);
        let stored = self.write_slices(stripe, &slices).await.stored;
        // What rests on it in the journal is not to be there without it.
        self.journal.note_stored(stripe);
        stored == wanted
    }

    fn first_copies(&self, have: &[Buffer]) -> SmallVec<[Slice; 2]> {
        let copies = self.layout().copies;
        let others = (0..self.layout().positions()).filter(|p| p % copies != 0);
        let slice = |position: u8| {
            let first = usize::from(position - position % copies);
            Slice { position, row: 0, bytes: have[first].clone() }
        };
        others.map(slice).collect()
    }
}
