//! Scrub: reads everything and verifies that parity or copies agree with the data.

use std::rc::Rc;

use ashlar_format::units::StripeIndex;
use ashlar_reactor::buffer::Buffer;
use ashlar_reactor::range_lock::Mode;
use smallvec::SmallVec;

use crate::array::Array;
use crate::error::ChangeError;
use crate::journal::Slice;
use crate::status::ScrubReport;

enum Verdict {
    Agrees,
    /// It cannot be told: members are missing or cannot read.
    Unreadable,
    /// What should stand at these positions.
    Differs(SmallVec<[Slice; 2]>),
}

impl Array {
    /// Starts to read and verify everything; `repair` writes parity or copies anew where they do
    /// not agree with the data (for mirrors: with the first copy).
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
        self.jobs.scrub_slot().begin(self.reactor.now(), 0, self.layout().stripes);
        self.jobs.set_scrub_report(ScrubReport::default());
        let array = self.clone();
        self.reactor.spawn(async move {
            array.scrub(repair).await;
            array.jobs.scrub_slot().end();
        });
        Ok(())
    }

    async fn scrub(self: &Rc<Self>, repair: bool) {
        let mut report = ScrubReport::default();
        for stripe in 0..self.layout().stripes {
            if !self.is_written(StripeIndex(stripe)) {
                continue;
            }
            let Ok(_request) = self.begin() else { return };
            let began = self.reactor.now();
            self.scrub_stripe(StripeIndex(stripe), repair, &mut report).await;
            self.jobs.set_scrub_report(report);
            self.jobs.scrub_slot().advance(stripe + 1);
            self.give_way(began).await;
        }
    }

    async fn scrub_stripe(
        self: &Rc<Self>,
        stripe: StripeIndex,
        repair: bool,
        report: &mut ScrubReport,
    ) {
        if self.unsynced.contains(stripe) && self.sync_now(stripe).await.is_err() {
            report.unreadable_stripes += 1;
            return;
        }
        let _regions = self.hold_regions().await;
        // Before the lock: a writer marks its region before it locks, too.
        let region = self.mark_dirty(stripe);
        let _region = match repair.then_some(region) {
            None => None,
            Some(region) => match region.await {
                Ok(guard) => Some(guard),
                Err(_) => {
                    report.unreadable_stripes += 1;
                    return;
                }
            },
        };
        let _stripe = self.lock_stripe(stripe, Mode::Exclusive).await;
        if !self.is_written(stripe) {
            return;
        }
        match self.verify(stripe).await {
            Verdict::Agrees => {}
            Verdict::Unreadable => report.unreadable_stripes += 1,
            Verdict::Differs(slices) => {
                report.mismatched_stripes += 1;
                report.first_mismatch.get_or_insert(stripe.0);
                if repair {
                    let stored = self.write_slices(stripe, &slices).await.stored;
                    let written = slices.iter().fold(0, |bits, slice| bits | 1 << slice.position);
                    if stored == written {
                        report.repaired_stripes += 1;
                    }
                }
            }
        }
    }

    /// The caller holds the stripe.
    async fn verify(&self, stripe: StripeIndex) -> Verdict {
        let layout = self.layout();
        let rows = 0..layout.chunk_bytes;
        let mut started: SmallVec<[_; 8]> = SmallVec::new();
        for position in 0..layout.positions() {
            started.push(self.start_position(stripe, position, &rows));
        }
        let mut have: SmallVec<[Buffer; 8]> = SmallVec::new();
        let mut complete = true;
        for started in started {
            match started {
                Some((buffer, io)) => {
                    complete &= io.await.is_ok();
                    have.push(buffer);
                }
                None => complete = false,
            }
        }
        if !complete {
            return Verdict::Unreadable;
        }
        let should: SmallVec<[Slice; 2]> =
            if layout.is_mirrored() { self.first_copies(&have) } else { self.parity_of(&have) };
        let differs = should
            .into_iter()
            .filter(|slice| slice.bytes.bytes() != have[usize::from(slice.position)].bytes());
        let differs: SmallVec<[Slice; 2]> = differs.collect();
        if differs.is_empty() { Verdict::Agrees } else { Verdict::Differs(differs) }
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

    fn parity_of(&self, have: &[Buffer]) -> SmallVec<[Slice; 2]> {
        let layout = self.layout();
        let len = layout.chunk_bytes as usize;
        let mut slices: SmallVec<[Slice; 2]> = layout
            .parity_positions()
            .map(|position| Slice { position, row: 0, bytes: self.reactor.buffer(len) })
            .collect();
        let data: SmallVec<[&[u8]; 16]> =
            have[..usize::from(layout.data)].iter().map(Buffer::bytes).collect();
        let mut parity: SmallVec<[&mut [u8]; 2]> =
            slices.iter_mut().map(|slice| slice.bytes.bytes_mut()).collect();
        self.kernels.encode(&data, &mut parity);
        drop(parity);
        slices
    }
}
