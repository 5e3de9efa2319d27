//! Destage: puts in place what the journal has acknowledged.
//!
//! Lazily, so that writes to one stripe become one: what is pending waits until the journal fills,
//! or for `AGE_MAX`. Order of one round, and what a crash leaves at each step:
//! 1. stripes are locked, and what was stored of them before made durable: parity in the journal
//!    must not depend on bytes that a power cut takes away. What is pending of them, as far as it
//!    is durable, is cut into bands; old bytes are read
//! 2. sums of parity that shall be stored become entries of the journal, durably (crash up to here:
//!    nothing is in place yet; the data is pending again)
//! 3. parity is stored in place, durably (crash: from the sums, the new data in the journal and
//!    what is in place, all parity is made new; see `parity_sums.rs`); members that missed it are
//!    fenced, durably
//! 4. data is stored in place, and parity that the journal has in full (crash: the first parity is
//!    new, and the rest is stored again)
//! 5. members that missed it are fenced, durably
//! 6. it is pending no longer, and its batches may be released once members were flushed again
//!
//! Of more than two parity chunks the journal has all but the first two in full: sums of two are
//! enough for any loss beside that (`parity_sums.rs`). A band of all data chunks needs neither: its
//! parity follows from its data.
//! What cannot be stored because too much beside it cannot be read waits until its batch is the
//! oldest; then that is given up (`give_up.rs`). What would be missed by a member that is away, and
//! that the others cannot stand for, waits for that member.
//! What could not be stored whole is torn: it is stored again, exactly as it was, before anything
//! else is done with its stripe, and its batches stay.

use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::journal_batch::{
    ENTRIES_MAX, PAYLOAD_BYTES_MAX, SUM_BYTES, SUM_ROWS, SUMMED_PARITY_MAX,
};
use ashlar_format::units::StripeIndex;
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::{Mode, RangeGuard};
use smallvec::SmallVec;

use crate::array::Array;
use crate::error::ArrayError;
use crate::journal::{Class, Entry, NewData};
use crate::layout::Positions;
use crate::mode::Pause;
use crate::parity_sums::sums_of;
use crate::pending::{Hold, Patch};
use crate::stored::{Store, Stored, Torn, Updated};
use crate::update::{NewList, NewRows};
use crate::write_plan::{Band, bands, bits, each};

/// What is pending is taken up after this time, and before twice of it.
pub(crate) const AGE_MAX: Duration = Duration::from_secs(4);
/// Before what could not be stored is tried again.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Stripes that one round takes up.
const STRIPES_PER_ROUND: usize = 32;
/// Before others have to wait until nothing is pending, it is put in place so often at most: what
/// they write meanwhile is less each time.
const DRAINS_BEFORE: u32 = 4;
/// More of the ring takes longer than they should wait: this part of it, or so many bytes.
const MUCH_OF_RING: u64 = 16;
const MUCH_BYTES: u64 = 1 << 20;
/// Bands of them that take each step together: with one parity chunk their sums fit in one batch of
/// the journal, and what is read of them in the CPU's cache.
const BANDS_AT_ONCE: usize = ENTRIES_MAX;
/// Rounds under way at the same time: while some wait for the slowest drive of a step, others keep
/// the rest busy.
pub(crate) const DESTAGERS: u32 = 6;

/// A band of a stripe that is pending.
struct Job {
    stripe: StripeIndex,
    band: Band,
    /// Of its batches.
    holds: SmallVec<[Hold; 2]>,
    /// The first of them.
    oldest: u64,
}

impl Array {
    /// Runs as long as the array does.
    pub(crate) async fn destage(self: Rc<Self>) {
        self.set_destagers(self.destagers.get() + 1);
        while let Some(before) = self.wait_for_destage().await {
            self.sure().await;
            let hopes = self.journal.hopes();
            let _ = self.journal.void_cramped().await;
            let mut round = self.destage_round(before).await;
            if self.journal.is_worth_release() || self.journal.wants_release() {
                round = round.and(self.journal.release().await);
            }
            if self.journal.is_cramped() {
                round = round.and(Err(ArrayError::NoSpace));
            }
            let stuck = round.err().or_else(|| self.blocked());
            self.journal.found_stuck(stuck, hopes);
            if stuck.is_some() && self.journal.hopes() == hopes {
                let deadline = self.reactor.now().after(RETRY_AFTER);
                self.drained.until_or(&self.reactor, deadline, || self.is_over()).await;
            }
        }
        self.set_destagers(self.destagers.get() - 1);
    }

    /// Waits until there is something that should not wait longer: data of batches before the
    /// sequence that is returned. `None`: the array stops.
    async fn wait_for_destage(&self) -> Option<u64> {
        let journal = &self.journal;
        loop {
            if self.is_over() {
                return None;
            }
            let aged = self.destage_before.get();
            let before = journal.in_the_way().map_or(aged, |before| before.max(aged));
            let has_waiting = journal.pending.borrow().has_waiting(before);
            if has_waiting || journal.wants_release() || journal.is_cramped() {
                return Some(before);
            }
            let seen = journal.changes();
            if !journal.pending.borrow().has_waiting(u64::MAX) {
                journal.changed_since(seen).await;
                continue;
            }
            // All that came before this moment is old enough after it.
            let completed = journal.completed();
            let deadline = self.reactor.now().after(AGE_MAX);
            self.drained_or_filling(deadline).await;
            if self.reactor.now() >= deadline {
                self.destage_before.set(completed.max(self.destage_before.get()));
            }
        }
    }

    async fn drained_or_filling(&self, deadline: ashlar_reactor::backend::Instant) {
        let journal = &self.journal;
        let in_the_way = |before| journal.pending.borrow().has_waiting(before);
        let is_filling = || journal.in_the_way().is_some_and(in_the_way);
        // What has to be told again is not put off for what is too young.
        let wanted = || self.is_over() || journal.is_cramped() || is_filling();
        self.journal.changed.until_or(&self.reactor, deadline, wanted).await;
    }

    /// Puts all in place that was acknowledged before, at once: else it waits for up to twice
    /// `AGE_MAX`. An error: some of it cannot be, now.
    pub async fn destage_all(self: &Rc<Self>) -> Result<(), ArrayError> {
        let _request = self.admit_step().await?;
        self.drain_journal().await
    }

    /// As [`Self::drain_most`]; a stop waits for it.
    pub(crate) async fn drain_as_step(self: &Rc<Self>) -> Result<(), ArrayError> {
        let _request = self.admit_step().await?;
        self.drain_most().await
    }

    /// Puts all in place that is pending now, and makes the ring forget it. An error: it cannot be.
    pub(crate) async fn drain_journal(self: &Rc<Self>) -> Result<(), ArrayError> {
        let journal = &self.journal;
        let last = journal.next_sequence();
        loop {
            let (oldest, seen) = (journal.oldest(), journal.changes());
            if oldest.is_none_or(|oldest| oldest >= last) {
                return Ok(());
            }
            let left = || (journal.pending.borrow().size(), self.kept.borrow().len());
            let named = || journal.members.journal_newest();
            let state = || (journal.next_sequence(), named(), left());
            let before = state();
            let round = self.destage_round(u64::MAX).await;
            journal.release().await?;
            if journal.oldest() == oldest {
                round?;
                self.finish_kept().await?;
                // Before the destagers of a start, or after those of a stop.
                let is_alone = self.destagers.get() == 0;
                if is_alone && state() == before {
                    // There is no room in the ring for what has to be said first, and will be none.
                    return Err(ArrayError::Lost);
                }
                // Somebody else is about to store it.
                journal.changed_since(seen).await;
            }
        }
    }

    /// Puts most of what is pending in place, before others have to wait for the rest.
    pub(crate) async fn drain_most(self: &Rc<Self>) -> Result<(), ArrayError> {
        for _ in 0..DRAINS_BEFORE {
            self.drain_journal().await?;
            // What was written meanwhile.
            if !self.journal_holds_much() {
                break;
            }
        }
        Ok(())
    }

    /// Whether to put it all in place takes longer than others can wait.
    pub(crate) fn journal_holds_much(&self) -> bool {
        self.journal.used_bytes() > (self.journal.ring_bytes() / MUCH_OF_RING).min(MUCH_BYTES)
    }

    /// Keeps everyone from entering a mode, with nothing left in the journal.
    pub(crate) async fn pause_drained(self: &Rc<Self>) -> Result<Pause, ArrayError> {
        self.drain_most().await?;
        let pause = self.modes.pause(&self.reactor).await;
        self.drain_journal().await?;
        Ok(pause)
    }

    /// Takes up the stripes that have waited longest, with data of batches before `before`.
    pub(crate) async fn destage_round(self: &Rc<Self>, before: u64) -> Result<(), ArrayError> {
        self.mend_torn().await?;
        let stripes = self.journal.pending.borrow_mut().take_oldest(STRIPES_PER_ROUND, before);
        if stripes.is_empty() {
            return Ok(());
        }
        let (lost, mut result) = self.destage_stripes(&stripes, before, u64::MAX).await;
        self.put_back(stripes.iter().filter(|stripe| !lost.contains(stripe)));
        if !lost.is_empty() {
            result = result.and(self.destage_lost(lost).await);
        }
        match &self.integrity {
            Some(integrity) => result.and(integrity.trim().await),
            None => result,
        }
    }

    /// Others may take up these stripes; torn ones once they are mended.
    pub(crate) fn put_back<'a>(&self, stripes: impl Iterator<Item = &'a StripeIndex>) {
        for stripe in stripes.filter(|stripe| !self.is_torn(**stripe)) {
            self.journal.pending.borrow_mut().put_back(*stripe);
        }
        self.journal.note_change();
    }

    /// Stores what batches up to `newest` have of these stripes, in bands with data of batches
    /// before `before`: younger ones may yet be written again. `stripes`: ascending; nobody else
    /// stores anything of them. Also returns those of which too much cannot be read, unless
    /// they are torn.
    pub(crate) async fn destage_stripes(
        self: &Rc<Self>,
        stripes: &[StripeIndex],
        before: u64,
        newest: u64,
    ) -> (Vec<StripeIndex>, Result<(), ArrayError>) {
        let mut lost = Vec::new();
        let result = self.store_stripes(stripes, before, newest, &mut lost).await;
        lost.sort_unstable();
        lost.dedup();
        lost.retain(|stripe| !self.is_torn(*stripe));
        (lost, result)
    }

    async fn store_stripes(
        self: &Rc<Self>,
        stripes: &[StripeIndex],
        before: u64,
        newest: u64,
        lost: &mut Vec<StripeIndex>,
    ) -> Result<(), ArrayError> {
        let _touched: Vec<_> = stripes.iter().map(|stripe| self.touch(*stripe)).collect();
        let blank = stripes.iter().filter(|stripe| !self.is_written(**stripe));
        let made = join_all(blank.map(|stripe| self.make_written(*stripe))).await;
        let mut result: Result<(), _> = made.into_iter().collect();
        let mut _locks: Vec<RangeGuard> = Vec::new();
        for stripe in stripes {
            _locks.push(self.lock_stripe(*stripe, Mode::Exclusive).await);
        }
        // A record of these rows makes the one before it void. What that one stored is not stored
        // again, so its checksums must be durable by now.
        self.write_sums().await?;
        // What is durable by then is stored: parity in the journal is worth nothing without the
        // data that it belongs to, be that in the journal or in place.
        let journal = &self.journal;
        if self.integrity.is_some()
            || journal.pending.borrow().oldest_of(stripes) >= journal.durable()
            || stripes.iter().any(|stripe| !journal.is_flushed(*stripe))
        {
            journal.flush().await?;
        }
        let newest = newest.min(self.journal.durable() - 1);
        let mut jobs = self.jobs_of(stripes, before, newest);
        while !jobs.is_empty() {
            let rest = jobs.split_off(jobs.len().min(BANDS_AT_ONCE));
            // A stripe that is torn by now waits until it is mended.
            jobs.retain(|(job, _)| self.may_store(job.stripe));
            result = result.and(self.store_bands(jobs, newest, lost).await);
            jobs = rest;
        }
        result
    }

    /// Steps 1, from the reads on, to 6.
    async fn store_bands(
        &self,
        jobs: Vec<(Job, NewList)>,
        newest: u64,
        lost: &mut Vec<StripeIndex>,
    ) -> Result<(), ArrayError> {
        let mut result = Ok(());
        let mut started = Vec::with_capacity(jobs.len());
        for (job, new) in jobs {
            self.reactor.breathe(self.small_update()).await;
            match self.start_update(job.stripe, job.band.clone(), new) {
                Ok(update) => started.push((job, update)),
                Err(ArrayError::Lost) => lost.push(job.stripe),
                Err(error) => result = Err(error),
            }
        }
        let mut ready = Vec::with_capacity(started.len());
        for (job, update) in started {
            match self.finish_update(update).await {
                Ok(updated) => ready.push((job, updated)),
                Err(ArrayError::Lost) => lost.push(job.stripe),
                Err(error) => result = Err(error),
            }
        }
        // A member that would be needed may come back, and have what this is stored beside.
        let bears =
            |(job, updated): &(Job, Updated)| self.members.bears(job.stripe, updated.missed());
        let (ready, waiting): (Vec<_>, Vec<_>) = ready.into_iter().partition(bears);
        lost.extend(waiting.iter().map(|(job, _)| job.stripe));
        // Before the record: were a member believed that misses this, storing it again after a
        // crash would not make the stripe agree.
        for (job, updated) in &ready {
            if updated.missed() != 0 {
                self.members.fence_missed(job.stripe, updated.missed()).await?;
            }
        }
        let (ready, records, recorded) = self.record_parity(ready, newest).await;
        if !records.is_empty()
            && let Err(error) = self.journal.flush().await
        {
            // Nothing is in place. Made again with each try, they would fill the ring.
            for (sequence, _) in records.iter().rev() {
                self.journal.void(*sequence).await;
            }
            return Err(error);
        }
        let parity_holds = records.into_iter().map(|(_, hold)| hold).collect();
        let stored = self.store_all(ready, newest, parity_holds).await;
        result.and(recorded).and(stored)
    }

    /// What is pending of the stripes, of batches up to `newest`, in bands with some of before
    /// `before`; those first that have waited longest.
    fn jobs_of(&self, stripes: &[StripeIndex], before: u64, newest: u64) -> Vec<(Job, NewList)> {
        // With room for all parity in full, though the first has sums.
        let parity = u32::from(self.layout().parity).max(1);
        let rows_max = PAYLOAD_BYTES_MAX / parity / 4096 * 4096;
        let pending = self.journal.pending.borrow();
        let mut jobs = Vec::new();
        for stripe in stripes.iter().filter(|stripe| self.may_store(**stripe)) {
            let patches = pending.of(*stripe, newest);
            let written: SmallVec<[_; 16]> = patches.map(|p| (p.chunk, p.rows.clone())).collect();
            for band in bands(&written, rows_max) {
                let inside = pending.overlapping(*stripe, &band, newest);
                let oldest = inside.clone().map(|patch| patch.sequence).min();
                let oldest = oldest.expect("a band is made of patches");
                if oldest < before {
                    let holds = inside.clone().map(|patch| patch.hold.clone()).collect();
                    let new = inside.filter_map(|patch| new_rows(patch).within(&band.rows));
                    let new: NewList = new.collect();
                    jobs.push((Job { stripe: *stripe, band, holds, oldest }, new));
                }
            }
        }
        jobs.sort_by_key(|(job, _)| job.oldest);
        jobs
    }

    /// Whether what is pending of the stripe has a place that it can be put in.
    fn may_store(&self, stripe: StripeIndex) -> bool {
        self.is_written(stripe) && !self.torn_stripes.contains(stripe)
    }

    /// Makes parity entries of the journal of what needs them. Returns what has them, as far as
    /// there was room, and their batches; also when the next one met an error: recorded again with
    /// each try, these would fill the ring.
    async fn record_parity(
        &self,
        ready: Vec<(Job, Updated)>,
        newest: u64,
    ) -> (Vec<(Job, Updated)>, Vec<(u64, Hold)>, Result<(), ArrayError>) {
        let (mut recorded, mut records) = (Vec::new(), Vec::new());
        let mut ready = VecDeque::from(ready);
        while let Some((first, _)) = ready.front() {
            let (mut count, mut entries) = self.parity_batch(ready.iter(), newest);
            let mut class = Class::Parity;
            let oldest = first.oldest;
            while !entries.is_empty() {
                match self.journal.append_now(&entries, class).await {
                    Some(Ok(record)) => {
                        records.push(record);
                        break;
                    }
                    Some(Err(error)) => return (recorded, records, Err(error)),
                    None => {}
                }
                // What has waited longest may use all the room there is, so that there is some
                // again; the rest waits for that.
                let most = if class == Class::Oldest { count / 2 } else { usize::MAX };
                if most == 0 || self.journal.oldest() != Some(oldest) {
                    return (recorded, records, Ok(()));
                }
                let of_oldest = ready.iter().take_while(|(job, _)| job.oldest == oldest);
                (count, entries) = self.parity_batch(of_oldest.take(most), newest);
                class = Class::Oldest;
            }
            recorded.extend(ready.drain(..count));
        }
        (recorded, records, Ok(()))
    }

    /// How many of these fit in one batch, and their entries.
    fn parity_batch<'a>(
        &self,
        jobs: impl Iterator<Item = &'a (Job, Updated)>,
        newest: u64,
    ) -> (usize, Vec<Entry>) {
        let (mut count, mut entries, mut payload) = (0, Vec::new(), 0);
        for (job, updated) in jobs {
            let more = self.parity_entries(job, updated, newest);
            payload += more.iter().map(Entry::payload_bytes).sum::<u64>();
            if entries.len() + more.len() > ENTRIES_MAX || payload > u64::from(PAYLOAD_BYTES_MAX) {
                break;
            }
            entries.extend(more);
            count += 1;
        }
        (count, entries)
    }

    /// Whether the journal has to know of the parity of a band before it is stored.
    fn is_recorded(&self, stripe: StripeIndex, band: &Band) -> bool {
        let layout = self.layout_of(stripe);
        layout.parity > 0 && band.chunks != bits(0..layout.data)
    }

    /// Positions that are stored first: parity of which the journal has only sums.
    fn stored_first(&self, updated: &Updated) -> Positions {
        if !self.is_recorded(updated.stripe, &updated.band) {
            return 0;
        }
        let parity = self.layout_of(updated.stripe).parity_positions();
        bits(parity.start..parity.end.min(parity.start + SUMMED_PARITY_MAX))
    }

    fn parity_entries(&self, job: &Job, updated: &Updated, newest: u64) -> SmallVec<[Entry; 2]> {
        if !self.is_recorded(job.stripe, &job.band) {
            return SmallVec::new();
        }
        let summed = self.stored_first(updated);
        let parity = self.layout_of(job.stripe).parity_positions();
        let stores = updated.stores.iter().filter(|store| parity.contains(&store.position));
        let entry = |store: &Store| {
            let Store { position, row, bytes } = store;
            let (stripe, position, row) = (job.stripe, *position, *row);
            let data = NewData { chunks: job.band.chunks, newest, oldest: job.oldest };
            let bytes = bytes.pieces()[0].clone();
            if summed & 1 << position == 0 {
                return Entry::Parity { stripe, position, row, bytes, data };
            }
            let len = u32::try_from(bytes.len()).expect("at most a chunk");
            let mut sums = self.reactor.buffer((len / SUM_ROWS * SUM_BYTES) as usize);
            let places = sums.bytes_mut().as_chunks_mut().0.iter_mut();
            places
                .zip(sums_of(&self.journal.parity_sum, bytes.bytes()))
                .for_each(|(place, sum)| *place = sum);
            Entry::ParitySums { stripe, position, row, len, sums, data }
        };
        stores.map(entry).collect()
    }

    async fn store_all(
        &self,
        ready: Vec<(Job, Updated)>,
        newest: u64,
        parity_holds: Vec<Hold>,
    ) -> Result<(), ArrayError> {
        let updates: Vec<(&Updated, Positions)> = ready.iter().map(|(_, its)| (its, 0)).collect();
        let (stored, tried) = self.store_in_order(&updates).await;
        let mut result = tried;
        let mut left = Vec::new();
        for ((job, updated), done) in ready.into_iter().zip(stored) {
            if let Err(error) = self.stored(&updated, done, newest, tried).await {
                result = Err(error);
                let holds = parity_holds.iter().chain(&job.holds).cloned().collect();
                left.push(Torn { updated, stored: done.stored, newest, _holds: holds });
            }
        }
        self.keep_torn(left);
        result
    }

    /// Stores bands, but for positions that have them already. An error: not all were tried.
    async fn store_in_order(
        &self,
        bands: &[(&Updated, Positions)],
    ) -> (Vec<Stored>, Result<(), ArrayError>) {
        let has =
            |(_, stored): &(&Updated, Positions)| Stored { stored: *stored, ..Stored::default() };
        let mut stored: Vec<Stored> = bands.iter().map(has).collect();
        let first: Vec<Positions> = bands.iter().map(|(band, _)| self.stored_first(band)).collect();
        let all_at_once = |first: &Positions| if *first == 0 { Positions::MAX } else { *first };
        let now: Vec<Positions> = first.iter().map(all_at_once).collect();
        self.store_some(bands, &mut stored, &now).await;
        if first.iter().all(|first| *first == 0) {
            return (stored, Ok(()));
        }
        if let Err(error) = self.journal.flush().await {
            return (stored, Err(error));
        }
        let mut later = Vec::with_capacity(bands.len());
        for (((band, _), now), stored) in bands.iter().zip(&now).zip(&mut stored) {
            if *now != Positions::MAX {
                stored.waits = self.may_follow(band, *now, *stored).await.err();
            }
            later.push(if stored.waits.is_none() { !now } else { 0 });
        }
        self.store_some(bands, &mut stored, &later).await;
        (stored, Ok(()))
    }

    /// Whether data may follow its parity. An error: where that has no space, it waits. And members
    /// that have missed parity must be out, durably: a start that believed them would work out what
    /// others have from old parity and new data.
    async fn may_follow(
        &self,
        band: &Updated,
        parity: Positions,
        done: Stored,
    ) -> Result<(), ArrayError> {
        let missed = parity & band.wanted & !done.stored;
        match missed {
            _ if done.no_space => Err(ArrayError::NoSpace),
            0 => Ok(()),
            missed => self.members.fence_missed(band.stripe, missed).await,
        }
    }

    /// Operations of a band of one chunk, to read what is there or to write what shall be.
    fn small_update(&self) -> u32 {
        1 + u32::from(self.layout().parity)
    }

    /// `now`: which positions of each band.
    async fn store_some(
        &self,
        bands: &[(&Updated, Positions)],
        stored: &mut [Stored],
        now: &[Positions],
    ) {
        let mut started = Vec::with_capacity(bands.len());
        for ((band, has), now) in bands.iter().zip(now) {
            let wanted = now & !has;
            let stores = band.stores.iter().filter(|store| wanted & 1 << store.position != 0);
            self.reactor.breathe(self.small_update()).await;
            started.push(self.start_stores(band.stripe, stores));
        }
        for (((band, _), storing), stored) in bands.iter().zip(started).zip(stored) {
            let done = self.finish_stores(band.stripe, storing).await;
            stored.stored |= done.stored;
            stored.no_space |= done.no_space;
        }
    }

    /// All at once, and before anybody looks at their stripes again: whoever stored them, or mends
    /// them next, is the only one that has them.
    fn keep_torn(&self, torn: Vec<Torn>) {
        torn.iter().for_each(|torn| self.torn_stripes.insert(torn.updated.stripe));
        self.torn.borrow_mut().extend(torn);
    }

    /// A band was stored on some positions, or on all. `tried`: all had their turn.
    async fn stored(
        &self,
        updated: &Updated,
        done: Stored,
        newest: u64,
        tried: Result<(), ArrayError>,
    ) -> Result<(), ArrayError> {
        let behind = updated.wanted & !done.stored;
        if behind & updated.writable != 0 {
            tried?;
            if let Some(error) = done.waits {
                return Err(error);
            }
            if done.no_space {
                return Err(ArrayError::NoSpace);
            }
            if !self.is_safe(updated, done.stored) {
                return Err(ArrayError::Lost);
            }
            self.members.fence_missed(updated.stripe, behind).await?;
        }
        self.journal.note_stored(updated.stripe);
        let mut pending = self.journal.pending.borrow_mut();
        for chunk in each(updated.band.chunks) {
            self.bad.remove(updated.stripe, chunk, &updated.band.rows);
            pending.remove(updated.stripe, chunk, &updated.band.rows, newest);
        }
        Ok(())
    }

    pub(crate) fn is_any_torn(&self, stripes: &Range<u64>) -> bool {
        stripes.clone().any(|stripe| self.torn_stripes.contains(StripeIndex(stripe)))
    }

    /// Mends these stripes, or it is an error. The caller holds none of them.
    pub(crate) async fn mend_torn_of(&self, stripes: &Range<u64>) -> Result<(), ArrayError> {
        self.mend_torn().await?;
        // Somebody else may be mending them.
        self.journal.changed.until(&self.reactor, || self.mended.borrow().is_empty()).await;
        let finished = self.finish_kept().await;
        if self.is_any_torn(stripes) { finished.and(Err(ArrayError::Lost)) } else { Ok(()) }
    }

    /// Stores what is torn again.
    pub(crate) async fn mend_torn(&self) -> Result<(), ArrayError> {
        let torn = std::mem::take(&mut *self.torn.borrow_mut());
        if torn.is_empty() {
            return Ok(());
        }
        let mut stripes: Vec<StripeIndex> = torn.iter().map(|t| t.updated.stripe).collect();
        stripes.sort_unstable();
        stripes.dedup();
        self.mended.borrow_mut().extend(&stripes);
        let (mut result, mut left) = (Ok(()), Vec::new());
        for mut torn in torn {
            let stripe = torn.updated.stripe;
            let _touched = self.touch(stripe);
            let _stripe = self.lock_stripe(stripe, Mode::Exclusive).await;
            let (stored, tried) = self.store_in_order(&[(&torn.updated, torn.stored)]).await;
            torn.stored = stored[0].stored;
            let done = self.stored(&torn.updated, stored[0], torn.newest, tried).await;
            if let Err(error) = done {
                result = Err(error);
                left.push(torn);
            }
        }
        self.keep_torn(left);
        self.mended.borrow_mut().retain(|stripe| !stripes.contains(stripe));
        for stripe in stripes {
            if !self.is_torn(stripe) {
                self.torn_stripes.remove(stripe);
                self.journal.pending.borrow_mut().put_back(stripe);
            }
        }
        if result.is_ok() {
            self.journal.has_hope();
        }
        self.journal.note_change();
        result
    }

    /// Whoever mends it puts it back.
    pub(crate) fn is_torn(&self, stripe: StripeIndex) -> bool {
        let is_mended = self.mended.borrow().contains(&stripe);
        is_mended || self.torn.borrow().iter().any(|torn| torn.updated.stripe == stripe)
    }
}

fn new_rows(patch: &Patch) -> NewRows {
    NewRows { chunk: patch.chunk, rows: patch.rows.clone(), bytes: patch.bytes.clone() }
}
