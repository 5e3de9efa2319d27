//! Resync: makes parity or copies agree again, stripe by stripe, and cleans the dirty map behind.
//!
//! A stripe that must be used before its turn is made to agree first (`sync_now`).

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::latency::{Latency, LatencySummary};
use ashlar_drive::slow::judge;
use ashlar_format::array_superblock::MemberState;
use ashlar_format::units::StripeIndex;
use ashlar_reactor::buffer::Buffer;
use ashlar_reactor::range_lock::Mode;
use ashlar_reactor::window::HALF_WINDOW;
use smallvec::SmallVec;

use crate::array::Array;
use crate::dirty::QUIET_BEFORE_CLEAN;
use crate::error::ArrayError;
use crate::journal::Slice;
use crate::lanes::Lanes;
use crate::layout::Positions;
use crate::member::Member;
use crate::shift::Shift;
use crate::write_plan::{bits, each};

/// Between two looks at what maintenance has to do.
const MAINTENANCE_PERIOD: Duration = Duration::from_millis(250);
/// After so long without any request, an array that has nothing to put in order is at rest: what
/// its drives did lately is forgotten by then.
const REST_AFTER: Duration = Duration::from_secs(10);
/// Between two looks at an array at rest: at whether a scrub is due, and which drives are there.
const REST_PERIOD: Duration = Duration::from_secs(5);
const _: () = assert!(REST_AFTER.as_secs() >= 2 * HALF_WINDOW.as_secs());
/// Rounds of maintenance between two looks at how fast the drives are.
const LOOK_ROUNDS: u32 = 4;
/// Rounds of maintenance between two tries of stripes that could not be synced.
const RETRY_ROUNDS: u32 = 240;

/// Of one chunk, with their positions.
type Copies = SmallVec<[(u8, Buffer); 4]>;

fn all_agree(copies: &Copies) -> bool {
    copies.windows(2).all(|pair| pair[0].1.bytes() == pair[1].1.bytes())
}

impl Array {
    /// Makes a stripe agree, if it does not.
    pub(crate) async fn sync_now(self: &Rc<Self>, stripe: StripeIndex) -> Result<(), ArrayError> {
        self.sync_chunks(stripe, Positions::MAX).await
    }

    /// The same for who needs these chunks only: copies of others may not be here.
    pub(crate) async fn sync_chunks(
        self: &Rc<Self>,
        stripe: StripeIndex,
        wanted: Positions,
    ) -> Result<(), ArrayError> {
        let _regions = self.hold_regions().await;
        let _region = self.mark_dirty(stripe).await?;
        let _stripe = self.lock_stripe(stripe, Mode::Exclusive).await;
        if !self.unsynced.contains(stripe) {
            return Ok(());
        }
        if self.layout().is_mirrored() {
            let left = self.sync_copies(stripe).await?;
            if left != 0 {
                return if left & wanted == 0 { Ok(()) } else { Err(ArrayError::Lost) };
            }
        } else {
            self.sync_parity(stripe).await?;
        }
        self.unsynced.remove(stripe);
        self.bad.placed(stripe);
        Ok(())
    }

    /// Makes a stripe agree, if need be by giving up what keeps it from that.
    pub(crate) async fn sync_or_give_up(
        self: &Rc<Self>,
        stripe: StripeIndex,
    ) -> Result<(), ArrayError> {
        let synced = self.sync_now(stripe).await;
        if synced != Err(ArrayError::Lost) {
            return synced;
        }
        let _regions = self.hold_regions().await;
        let _stripe = self.lock_stripe(stripe, Mode::Exclusive).await;
        if self.is_written(stripe) {
            self.give_up_locked(stripe).await?;
        }
        Ok(())
    }

    /// Makes parity anew from the data. Data that cannot be read leaves nothing to be sure of, nor
    /// does what is not as it was written: that must not become parity.
    async fn sync_parity(&self, stripe: StripeIndex) -> Result<(), ArrayError> {
        let layout = self.layout_of(stripe);
        let rows = 0..layout.chunk_bytes;
        let mut started: SmallVec<[_; 8]> = SmallVec::new();
        for position in 0..layout.data {
            started.push((position, self.start_position(stripe, position, &rows)));
        }
        let mut data = SmallVec::<[_; 8]>::new();
        for (position, started) in started {
            let Some((buffer, io)) = started else { continue };
            let bytes = buffer.clone().into();
            if io.await.is_ok() && self.fits(stripe, position, 0, &bytes).await {
                data.push(buffer);
            }
        }
        if data.len() < usize::from(layout.data) {
            return Err(ArrayError::Lost);
        }
        let slices = self.parity_of(&layout, &data, 0);
        self.store(stripe, &slices, bits(layout.parity_positions())).await
    }

    /// Writes the first copy that can be read over others that differ. Tells the chunks of which
    /// there is none.
    async fn sync_copies(&self, stripe: StripeIndex) -> Result<Positions, ArrayError> {
        let layout = self.layout_of(stripe);
        let rows = 0..layout.chunk_bytes;
        let mut left = 0;
        for chunk in 0..layout.data {
            let positions = bits(layout.data_positions(chunk));
            if self.members.held(stripe) & positions == 0 {
                // Lost as a whole, for now: the copies may come back, and still differ.
                left |= 1 << chunk;
                continue;
            }
            let held = self.members.held(stripe) & positions;
            let copies = self.copies_at(stripe, held, &rows).await;
            if copies.len() == positions.count_ones() as usize && all_agree(&copies) {
                continue;
            }
            let bytes = match copies.first() {
                Some((_, copy)) => copy.clone(),
                None => match self.read_anyhow(stripe, chunk, &rows).await {
                    Err(ArrayError::Lost) => {
                        left |= 1 << chunk;
                        continue;
                    }
                    read => read?,
                },
            };
            let good = copies.iter().filter(|(_, copy)| copy.bytes() == bytes.bytes());
            let other = positions & !good.fold(0, |bits, (position, _)| bits | 1 << position);
            let slices: SmallVec<[Slice; 4]> = each(other)
                .map(|position| Slice { position, row: 0, bytes: bytes.clone() })
                .collect();
            self.store(stripe, &slices, other).await?;
        }
        Ok(left)
    }

    /// What members hold at these positions, where it can be read. Nothing of an array with
    /// checksums: those of equal blocks may differ.
    async fn copies_at(&self, stripe: StripeIndex, held: Positions, rows: &Range<u32>) -> Copies {
        let mut copies = Copies::new();
        if self.integrity.is_some() {
            return copies;
        }
        let mut started: SmallVec<[_; 4]> = SmallVec::new();
        for position in each(held) {
            // It may stand in caches only, of drives that a daemon wrote to that was killed.
            let drive = self.members.at(stripe, position).map(|(drive, _)| drive);
            drive.iter().for_each(|drive| drive.note_unflushed());
            started.push((position, self.start_position(stripe, position, rows)));
        }
        for (position, started) in started {
            let Some((buffer, io)) = started else { continue };
            if io.await.is_ok() {
                copies.push((position, buffer));
            }
        }
        copies
    }

    /// Writes slices; members that miss them are fenced.
    async fn store(
        &self,
        stripe: StripeIndex,
        slices: &[Slice],
        wanted: u64,
    ) -> Result<(), ArrayError> {
        let done = self.write_slices(stripe, slices).await;
        if done.no_space {
            return Err(ArrayError::NoSpace);
        }
        self.members.fence_missed(stripe, wanted & !done.stored).await
    }

    /// Runs as long as the array does: resyncs, and cleans the dirty map.
    pub(crate) async fn maintain(self: Rc<Self>) {
        let (mut rounds_until_retry, mut rounds_until_look) = (0u32, LOOK_ROUNDS);
        let mut seen = (self.begun(), self.reactor.now());
        self.set_maintained(true);
        while !self.is_stopping() {
            let now = self.reactor.now();
            self.hear_readers();
            if seen.0 != self.begun() {
                seen = (self.begun(), now);
            }
            if now.since(seen.1) >= REST_AFTER && self.is_in_order() {
                self.until_used(REST_PERIOD).await;
            } else {
                self.pause(MAINTENANCE_PERIOD).await;
            }
            self.sure().await;
            rounds_until_retry = rounds_until_retry.saturating_sub(1);
            if self.jobs.resync_slot().is_running() {
                rounds_until_retry = RETRY_ROUNDS;
            } else if self.unsynced.count() > 0 && rounds_until_retry == 0 {
                self.begin_resync();
                rounds_until_retry = RETRY_ROUNDS;
            }
            // What cannot be said now is tried again in the next round.
            let _ = self.members.fence_lost_caches().await;
            self.begin_journal_if_due();
            self.rebuild_if_due();
            self.scrub_if_due();
            rounds_until_look = rounds_until_look.saturating_sub(1);
            if rounds_until_look == 0 {
                self.compare_drives();
                // What is left is tried again. Of what is torn, no destager hears by itself; if it
                // stays so, nobody else may tell those who wait for room.
                let hopes = self.journal.hopes();
                let _ = self.finish_kept().await;
                let mended = self.mend_torn().await;
                if let Some(error) = mended.err().or_else(|| self.blocked()) {
                    self.journal.found_stuck(Some(error), hopes);
                }
                self.mend_table().await;
                rounds_until_look = LOOK_ROUNDS;
            }
            if self.journal.refusal().is_some() {
                // Who waits for room must hear that there is no member left to have it.
                self.journal.note_change();
            }
            // An array that cannot write its dirty map keeps its bits: that only costs a resync.
            let _ = self.clean_dirty_map(QUIET_BEFORE_CLEAN).await;
            let regions = self.hold_regions().await;
            let _ = self.dirty.clear_missed().await;
            drop(regions);
            let _ = self.settle_bad().await;
        }
        self.set_maintained(false);
    }

    /// Whether there is nothing that maintenance could do before the next request.
    fn is_in_order(&self) -> bool {
        let agrees = self.unsynced.count() == 0 && self.kept.borrow().is_empty();
        let missed = self.dirty.missed.count() > 0 && !self.members.is_any_behind();
        let bad = !self.bad.unsettled().is_empty();
        let clean = self.dirty.is_clean() && self.journal.pending.borrow().is_empty();
        self.is_quiet() && agrees && clean && !missed && !bad && self.journal.refusal().is_none()
    }

    /// Which drives are slow, say their siblings. One that is rebuilt does other work than they.
    fn compare_drives(&self) {
        let list = self.members.list();
        let at_work = |member: &Member| {
            let same = member.state == MemberState::Trusted;
            member.alive().filter(|_| same).map(|drive| drive.latency())
        };
        let latencies: Vec<Option<Latency>> = list.iter().map(at_work).collect();
        let of = |which: fn(Latency) -> LatencySummary| -> Vec<Option<LatencySummary>> {
            latencies.iter().map(|latency| latency.map(which)).collect()
        };
        let (reads, writes) = (of(|its| its.reads), of(|its| its.writes));
        let verdicts = judge(&reads).into_iter().zip(judge(&writes));
        for (member, (reads, writes)) in list.iter().zip(verdicts) {
            member.alive().into_iter().for_each(|drive| drive.compared(reads, writes));
        }
        self.hedging.learn(&reads);
    }

    /// One pass over all unsynced stripes. Those that cannot be synced are left. (What is done is
    /// cleaned meanwhile: a crash must not begin with that.)
    fn begin_resync(self: &Rc<Self>) {
        let total = self.unsynced.count();
        let left = total * self.stripe_bytes();
        self.jobs.resync_slot().begin(self.reactor.now(), 0, total, left);
        let array = self.clone();
        self.reactor.spawn(async move {
            array.resync(total).await;
            array.jobs.resync_slot().end();
        });
    }

    async fn resync(self: &Rc<Self>, total: u64) {
        let (lanes, mut shift) = (Lanes::new(&self.reactor), Shift::begin(self));
        let mut at = StripeIndex(0);
        while let Some(stripe) = self.unsynced.next(at) {
            at = StripeIndex(stripe.0 + 1);
            if shift.is_over() {
                lanes.drained().await;
                shift.rest().await;
            }
            let Ok(request) = self.admit_step().await else { break };
            let lane = lanes.enter(shift.stripes_at_once()).await;
            let array = self.clone();
            self.reactor.spawn(async move {
                // One that cannot be synced is left.
                let _ = array.resync_stripe(stripe).await;
                array.jobs.resync_slot().worked(array.reactor.now(), array.stripe_bytes());
                let left = array.unsynced.count();
                array.jobs.resync_slot().advance(total.saturating_sub(left));
                drop((lane, request));
            });
        }
        lanes.drained().await;
    }

    async fn resync_stripe(self: &Rc<Self>, stripe: StripeIndex) -> Result<(), ArrayError> {
        // While some are away, they may come back, and have what is needed.
        let all_here = self.members.held(stripe) == bits(0..self.layout_of(stripe).positions());
        if all_here { self.sync_or_give_up(stripe).await } else { self.sync_now(stripe).await }
    }

    /// Clears the bits of regions where nothing is going on any more.
    pub(crate) async fn clean_dirty_map(
        self: &Rc<Self>,
        quiet_for: Duration,
    ) -> Result<(), ArrayError> {
        let _regions = self.hold_regions().await;
        let mut quiet = self.dirty.quiet(quiet_for);
        quiet.retain(|region| {
            let stripes = self.dirty.map.stripes_of(*region);
            !self.is_half_forgotten(&stripes) && self.unsynced.next_in(&stripes).is_none()
        });
        if quiet.is_empty() {
            return Ok(());
        }
        let began = self.reactor.now();
        self.written.settle().await?;
        self.write_sums().await?;
        self.members.flush().await?;
        self.dirty.clean(&quiet, began).await
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what stands in stripes that do not agree is not believed for that, and what was
    //! written in place is, also after a crash.
    //! Method: a stripe of an array with checksums is said not to agree, and a member is lost.
    #![allow(clippy::unwrap_used, reason = "a test")]

    use std::fs::File;
    use std::sync::Arc;

    use ashlar_drive::drive::{Drive, Limits};
    use ashlar_format::array_superblock::Level;
    use ashlar_reactor::executor::{Order, Reactor};
    use ashlar_reactor::op::Device;
    use ashlar_reactor::uring::UringBackend;
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::layout::Shape;
    use crate::member::Member;
    use crate::mode::Mode as WriteMode;
    use crate::settings::SettingsChange;
    use crate::start::{ArraySpec, AssembleOptions};

    const BLOCK: usize = 4096;
    const CHUNK: u32 = 16 << 10;
    const MEMBERS: u8 = 3;
    const STRIPE: StripeIndex = StripeIndex(0);

    fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor) -> F) {
        let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
        let future = test(reactor.clone());
        assert_eq!(reactor.block_on(future), Some(()));
        reactor.abandon();
    }

    fn open(reactor: &Reactor, file: &Arc<File>) -> Rc<Drive> {
        let bytes = file.metadata().unwrap().len();
        let limits = Limits { bytes, sector_bytes: 512, zeroes_cheaply: true };
        Drive::new(reactor, Device::File { file: file.clone() }, limits, "drive")
    }

    /// With two stripes of 1s, in place.
    async fn array(reactor: &Reactor) -> (Rc<Array>, Vec<Arc<File>>) {
        let file = |_| {
            let file = File::from(memfd_create("drive", MemfdFlags::CLOEXEC).unwrap());
            file.set_len(12 << 20).unwrap();
            Arc::new(file)
        };
        let files: Vec<Arc<File>> = (0..MEMBERS).map(file).collect();
        let spec = ArraySpec {
            uuid: [9; 16],
            name: "test".into(),
            level: Level::Raid5,
            chunk_bytes: CHUNK,
            shape: Shape::default(),
            policy: None,
            integrity: true,
            settings: SettingsChange::default(),
            host: None,
        };
        let drives = files.iter().map(|file| open(reactor, file));
        let drives = (0..MEMBERS).map(|index| [index; 16]).zip(drives).collect();
        let array = Array::create(reactor, &spec, drives).await.unwrap();
        array.write(0, filled(reactor, 1, 4 * CHUNK as usize).into()).await.unwrap();
        array.destage_all().await.unwrap();
        (array, files)
    }

    fn filled(reactor: &Reactor, with: u8, len: usize) -> Buffer {
        let mut buffer = reactor.buffer(len);
        buffer.bytes_mut().fill(with);
        buffer
    }

    async fn read(array: &Rc<Array>, at: u64, len: usize) -> Result<Vec<u8>, ArrayError> {
        let into = array.reactor.buffer(len);
        array.read(at, into.clone().into()).await?;
        Ok(into.bytes().to_vec())
    }

    #[test]
    fn a_resync_does_not_believe_what_a_drive_made_of_a_block() {
        run(|reactor| async move {
            for away in [None, Some(0), Some(2)] {
                let (array, _) = array(&reactor).await;
                let (drive, base) = array.members.at(STRIPE, 1).unwrap();
                let at = base + array.layout().member_offset(STRIPE, 0);
                drive.write(at, filled(&reactor, 0x5a, BLOCK).into()).await.unwrap();
                let away = away.map(|position| array.layout().member_at(STRIPE, position));
                away.into_iter().for_each(|member| array.pull_member(member).unwrap());
                array.unsynced.insert(STRIPE);
                assert_eq!(array.sync_now(STRIPE).await, Err(ArrayError::Lost));
                let lied = u64::from(CHUNK);
                assert!(read(&array, lied, BLOCK).await.is_err());
                let rest = CHUNK as usize - BLOCK;
                assert!(read(&array, lied + BLOCK as u64, rest).await == Ok(vec![1; rest]));
            }
        });
    }

    #[test]
    fn what_is_written_in_place_has_its_checksums_after_a_crash() {
        run(|reactor| async move {
            let (array, files) = array(&reactor).await;
            let away = array.layout().member_at(STRIPE, 0);
            array.pull_member(away).unwrap();
            // It cannot be made to agree, so all others are written in place.
            array.unsynced.insert(STRIPE);
            let at = array.stripe_bytes();
            array.write(at, filled(&reactor, 2, 2 * CHUNK as usize).into()).await.unwrap();
            assert_eq!(array.modes.mode.get(), WriteMode::Direct);
            let is_here = |chunk: &u8| array.members.at(StripeIndex(1), *chunk).is_some();
            let at = at + u64::from((0..2).find(is_here).unwrap()) * u64::from(CHUNK);
            array.members.list().iter().filter_map(Member::alive).for_each(|drive| drive.pull());
            let left = (0..).zip(&files).filter(|(index, _)| *index != away.index());
            let left = left.map(|(_, file)| open(&reactor, file)).collect();
            let array = Array::assemble(&reactor, left, AssembleOptions::default()).await.unwrap();
            assert!(array.unsynced.contains(StripeIndex(1)));
            let len = CHUNK as usize;
            assert!(read(&array, at, len).await == Ok(vec![2; len]));
        });
    }
}
