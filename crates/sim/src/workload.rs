//! What the users of the volume do, and what they may be told.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::Policy;
use ashlar_pool::pool::Pool;
use ashlar_pool::volume::Volume;
use ashlar_raid::array::Array;
use ashlar_raid::error::ArrayError;
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::prng::Prng;
use ashlar_reactor::wait_list::WaitList;

use crate::canary::Canary;
use crate::faults::{CHUNK_BYTES_LARGE, Plan, Single};
use crate::fleet::Fleet;
use crate::hosts::FIRST;
use crate::oracle::{Oracle, Sector, Ticket};
use crate::rival;
use crate::served::{NAMES, Others, Served};
use crate::sight::Sight;
use crate::world::SharedWorld;

pub const SECTOR: u64 = 512;
/// Longest request in sectors, drawn. The long ones cross stripes; they cost most and are few.
const LEN_SECTORS_MAX: [u64; 20] =
    [1, 1, 1, 1, 8, 8, 8, 8, 8, 16, 16, 16, 16, 16, 64, 64, 64, 64, 128, 400];
/// The longest where a chunk is large: of more than one batch of the journal.
const LEN_SECTORS_LARGE: u64 = 1400;

/// What a life's tasks share.
pub struct Life {
    pub plan: Rc<Plan>,
    /// It ends by a crash or a power cut.
    pub ends_suddenly: bool,
    /// It comes in this life, once the array serves.
    pub single: Option<Single>,
    pub world: SharedWorld,
    pub reactor: Reactor,
    /// Which of the hosts this is (see `hosts`).
    pub place: usize,
    pub array: Rc<Array>,
    pub pool: Rc<Pool>,
    pub volume: Volume,
    /// Of the volume: what requests may use.
    pub bytes: Cell<u64>,
    pub oracle: Rc<RefCell<Oracle>>,
    pub fleet: Rc<RefCell<Fleet>>,
    /// Stripes that waited for resync when the life began, or had bad blocks, and were not written
    /// whole since. With a member lost they may answer with an error (the write hole of the
    /// `bitmap` policy).
    pub unsure: Rc<RefCell<BTreeSet<u64>>>,
    /// Those that ever were: blocks of one may be given up until what made it sure is in place.
    pub ever_unsure: Rc<RefCell<BTreeSet<u64>>>,
    /// A member was impaired at some moment of this life.
    pub impaired_seen: Cell<bool>,
    pub working: Cell<usize>,
    pub waiting: WaitList,
    pub outage: Cell<Outage>,
    /// So often has one begun or ended.
    pub outage_turns: Cell<u64>,
    /// The journal covers all writes of this life.
    pub covered: Rc<Cell<bool>>,
    pub sight: Sight,
    /// Volumes beside `volume`.
    pub others: Others,
}

/// More drives are away than the array bears (see `outage`).
///
/// ```text
/// None ──► UnderWay ──all were taken back──► None
///             └──some were refused──► WaitsForStart
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outage {
    #[default]
    None,
    UnderWay,
    /// The drives are back, and the array has to be stopped and started for them.
    WaitsForStart,
}

/// What is known when a request begins.
struct Before {
    /// Some of its stripes wait for resync.
    unsure: bool,
    /// There had been so many.
    outage_turns: u64,
}

impl Life {
    pub fn fail(&self, why: String) {
        self.world.borrow_mut().fail(why);
    }

    pub fn note(&self, text: impl FnOnce() -> String) {
        self.world.borrow_mut().note(text);
    }

    /// What nearly all requests are for.
    fn main(&self) -> Served {
        Served::main(&self.volume)
    }

    fn before(&self, served: &Served, offset: u64, len: u64) -> Before {
        if !self.array.has_doubts() && !self.is_replaced() {
            // Those of before are in sync; new ones are named by what brings them.
            self.unsure.borrow_mut().clear();
        }
        Before { unsure: self.is_unsure(served, offset, len), outage_turns: self.outage_turns() }
    }

    pub fn outage_turns(&self) -> u64 {
        self.outage_turns.get()
    }

    pub fn is_out(&self) -> bool {
        self.outage.get() != Outage::None
    }

    /// Whether another host wants the array, so that this one may hear that it has lost it.
    pub fn is_contested(&self) -> bool {
        self.place == FIRST && self.world.borrow().hosts.is_contested
    }

    /// Whether another host has the array.
    pub fn is_replaced(&self) -> bool {
        self.world.borrow().hosts.owner != self.place
    }

    /// Whether this host uses the array no longer: another has it, or this one has found its lease.
    pub fn has_let_go(&self) -> bool {
        self.is_replaced() || self.is_contested() && self.array.status().lost_to.is_some()
    }

    /// The fleet learns of its members what this host knows, unless that is of before.
    pub fn refresh_fleet(&self) {
        if !self.has_let_go() {
            self.fleet.borrow_mut().refresh(&self.array.status());
        }
    }

    /// Whether a change that began after so many turns of outages was bound to succeed.
    pub fn may_not_fail(&self, turns: u64) -> bool {
        !self.plan.beyond && self.unsure.borrow().is_empty() && !self.was_out(turns)
    }

    /// Whether there was an outage in a time that began after so many turns, or the array may be
    /// lost to another host.
    pub fn was_out(&self, turns: u64) -> bool {
        self.is_out() || self.outage_turns() != turns || self.is_contested()
    }

    pub fn outage_begins(&self) {
        self.outage.set(Outage::UnderWay);
        self.impaired_seen.set(true);
        self.outage_turns.set(self.outage_turns() + 1);
    }

    /// Waits until all that drives work on now is answered.
    pub async fn heard_of_all(&self) {
        let mut left = self.world.borrow().tickets();
        while !left.is_empty() {
            self.reactor.sleep(Duration::from_millis(1)).await;
            let now = self.world.borrow().tickets();
            left.retain(|ticket| now.contains(ticket));
        }
    }

    /// The drives are back, or (`is_over` false) can be with a start.
    pub fn outage_ends(&self, is_over: bool) {
        self.outage.set(if is_over { Outage::None } else { Outage::WaitsForStart });
        self.outage_turns.set(self.outage_turns() + 1);
        if is_over {
            self.oracle.borrow_mut().settled();
        }
        self.waiting.wake_all(&self.reactor);
    }

    /// Whether the array has to be stopped, as well as it can be, and started.
    pub fn waits_for_start(&self) -> bool {
        self.outage.get() == Outage::WaitsForStart
    }

    fn is_unsure(&self, served: &Served, offset: u64, len: u64) -> bool {
        let mut ranges = served.ranges(offset, len);
        let unsure = ranges.any(|range| {
            let stripe_at = |byte| self.array.stripe_at(byte).0;
            let (first, last) = (stripe_at(range.start), stripe_at(range.end - 1));
            self.unsure.borrow().range(first.min(last)..=first.max(last)).next().is_some()
        });
        unsure && self.array.has_doubts()
    }

    /// Whether a request over these bytes may be answered with an error.
    fn may_fail(&self, before: &Before, served: &Served, offset: u64, len: u64) -> bool {
        let unsure = before.unsure || self.is_unsure(served, offset, len);
        let was_out = self.was_out(before.outage_turns);
        self.plan.beyond || was_out || (unsure && self.impaired_seen.get())
    }

    /// These bytes were to be written while drives were away. What is not covered by the journal
    /// may have left stripes that wait for resync.
    fn may_differ(&self, served: &Served, offset: u64, len: u64) {
        let is_covered = self.array.policy() == Policy::Journal && !self.plan.policy_changes;
        if (self.plan.outages || self.plan.full) && !is_covered && self.array.layout().parity > 0 {
            let stripe = self.array.stripe_bytes();
            for range in served.ranges(offset, len) {
                let stripes = range.start / stripe..range.end.div_ceil(stripe);
                self.unsure.borrow_mut().extend(stripes.clone());
                self.ever_unsure.borrow_mut().extend(stripes);
            }
        }
    }

    fn judge(
        &self,
        what: &str,
        before: &Before,
        served: &Served,
        (offset, len): (u64, u64),
        result: Result<(), ArrayError>,
    ) -> bool {
        match result {
            Ok(()) => true,
            Err(error) if self.may_fail(before, served, offset, len) => {
                self.note(|| format!("{what} {offset} +{len}: {error} (allowed)"));
                false
            }
            Err(error) => {
                let name = served.volume.name();
                self.fail(format!("{what} of {len} bytes at {offset} of {name} failed: {error}"));
                false
            }
        }
    }

    /// Reads and checks. False if it answered with an error that is allowed.
    pub async fn read(&self, offset: u64, len: u64) -> bool {
        self.read_of(&self.main(), offset, len).await
    }

    pub async fn read_of(&self, served: &Served, offset: u64, len: u64) -> bool {
        self.look_for_zeroes(served, offset, len).await;
        let before = self.before(served, offset, len);
        let ticket = self.oracle.borrow_mut().read_begins(served.base + offset, len);
        let into = self.buffers(len, 1 << 20);
        let result = match self.is_seen(served, offset, &into).await {
            true => Ok(()),
            false => served.volume.read(offset, into.clone()).await,
        };
        if !self.judge("read", &before, served, (offset, len), result) {
            self.oracle.borrow_mut().read_fails(&ticket);
            return false;
        }
        if self.is_replaced() {
            self.fail("a read was answered after another host had taken the array".into());
        }
        let sectors = into.pieces().iter().flat_map(|piece| piece.bytes().as_chunks().0);
        let checked = self.oracle.borrow_mut().read_ends(&ticket, sectors);
        match checked {
            Ok(()) => self.note(|| format!("read {offset} +{len}: as it should be")),
            Err(why) => {
                let stripe = offset / self.array.stripe_bytes();
                let (state, name) = (self.array.state().name(), served.volume.name());
                self.fail(format!(
                    "WRONG DATA: read of {len} bytes at {offset} of {name} (stripe {stripe}, \
                     array {state}): {why}"
                ));
            }
        }
        true
    }

    /// Who is told that something is zero does not read it: that has to be as true.
    async fn look_for_zeroes(&self, served: &Served, offset: u64, len: u64) {
        const ZEROES: Sector = [0; size_of::<Sector>()];
        let before = self.before(served, offset, len);
        let ticket = self.oracle.borrow_mut().read_begins(served.base + offset, len);
        let result = served.volume.block_status(offset, len).await;
        let found = result.unwrap_or_default();
        self.judge("block status", &before, served, (offset, len), result.map(|_| ()));
        if result.is_ok() && !(1..=len).contains(&found.len) {
            self.fail(format!("{found:?} of {len} bytes"));
        }
        let zeroes = if found.is_zero { found.len / SECTOR } else { 0 };
        let sectors = (0..zeroes).map(|_| &ZEROES);
        let checked = self.oracle.borrow_mut().read_ends(&ticket, sectors);
        if let Err(why) = checked {
            let name = served.volume.name();
            self.fail(format!("WRONG DATA: {found:?} at {offset} of {name}: {why}"));
        }
    }

    /// Reads by a view of the array, if that can be.
    async fn is_seen(&self, served: &Served, offset: u64, into: &Buffers) -> bool {
        if !self.plan.views {
            return false;
        }
        let ranges = served.ranges(offset, into.len() as u64);
        let is_seen = self.sight.read(&self.reactor, &self.array, ranges, into).await;
        self.world.borrow_mut().seen += u64::from(is_seen);
        is_seen
    }

    /// Writes new content, or zeroes.
    pub async fn write(&self, offset: u64, len: u64, zeroes: bool) {
        self.write_of(&self.main(), offset, len, zeroes).await;
    }

    async fn write_of(&self, served: &Served, offset: u64, len: u64, zeroes: bool) {
        let before = self.before(served, offset, len);
        let ticket = self.oracle.borrow_mut().write_begins(served.base + offset, len, zeroes);
        let atomic = self.array.settings().atomic_bytes(self.plan.sector_bytes());
        let atomic = !zeroes && len <= u64::from(atomic) && self.is_journaled();
        if atomic {
            self.oracle.borrow_mut().is_atomic(&ticket);
        }
        let what = if zeroes { "zeroing" } else { "write" };
        self.note(|| format!("{what} {offset} +{len} {ticket:?}"));
        let result = if zeroes {
            served.volume.write_zeroes(offset, len).await
        } else {
            let first_piece = if len.is_multiple_of(3) { 1536 } else { 1 << 20 };
            let from = self.buffers(len, first_piece);
            self.oracle.borrow().fill(&ticket, &from);
            let canary = self.world.borrow().canary;
            match canary {
                Some(Canary::SplitWrites) if atomic => {
                    self.write_in_two(&served.volume, offset, from).await
                }
                Some(_) | None => served.volume.write(offset, from).await,
            }
        };
        let good = self.judge(what, &before, served, (offset, len), result);
        if !good {
            self.may_differ(served, offset, len);
        }
        self.oracle.borrow_mut().write_ends(&ticket, good);
        if !good && (self.is_out() || self.plan.beyond) {
            self.oracle.borrow_mut().is_unsettled(&ticket);
        }
        if atomic && u64::from(self.plan.sector_bytes()) > SECTOR {
            // Who writes a part of a sector from now on brings along what this one wrote beside it.
            self.oracle.borrow_mut().may_be_split(&ticket);
        }
        if good {
            self.note(|| format!("{what} {offset} +{len} acknowledged"));
            if self.array.status().restripe.is_none() && !self.is_replaced() {
                let stripe = self.array.stripe_bytes();
                for range in served.ranges(offset, len) {
                    for whole in range.start.div_ceil(stripe)..range.end / stripe {
                        self.unsure.borrow_mut().remove(&whole);
                    }
                }
            }
            self.can_be_read(&served.volume, offset, len).await;
        }
    }

    /// Zeroes bytes of the array that are not all of the main volume.
    pub async fn zero_beyond(&self, at: u64, len: u64) {
        let all: Vec<Rc<Served>> = self.others.all().chain([Rc::new(self.main())]).collect();
        let mut tickets = Vec::new();
        for served in &all {
            for known in served.inside(at..at + len) {
                let (offset, len) = (served.base + known.start, known.end - known.start);
                tickets.push(self.oracle.borrow_mut().write_begins(offset, len, true));
            }
        }
        let zeroed = self.array.write_zeroes(at, len).await;
        self.note(|| format!("{len} bytes at {at} zeroed: {zeroed:?}"));
        for ticket in tickets {
            self.oracle.borrow_mut().write_ends(&ticket, zeroed.is_ok());
        }
    }

    /// What was acknowledged is bad no longer.
    async fn can_be_read(&self, volume: &Volume, offset: u64, len: u64) {
        if self.array.has_doubts() && !self.plan.beyond {
            let (into, turns) = (self.buffers(len, 1 << 20), self.outage_turns());
            if let Err(error) = volume.read(offset, into).await
                && !self.was_out(turns)
            {
                self.fail(format!("{len} bytes at {offset} were written, and then: {error}"));
            }
        }
    }

    /// Whether a write that begins now goes through the journal.
    fn is_journaled(&self) -> bool {
        self.array.policy() == Policy::Journal && self.array.status().unsynced_stripes == 0
    }

    /// What the array must not do of itself, for a canary.
    async fn write_in_two(
        &self,
        volume: &Volume,
        offset: u64,
        from: Buffers,
    ) -> Result<(), ArrayError> {
        let half = from.len().div_ceil(2).next_multiple_of(512).min(from.len());
        volume.write(offset, from.slice(0..half)).await?;
        volume.write(offset + half as u64, from.slice(half..from.len())).await
    }

    /// Whole stripes of the range may become zeroes (a hint: they may also stay), the rest stays.
    async fn discard(&self, served: &Served, offset: u64, len: u64) {
        let before = self.before(served, offset, len);
        let inner = self.discard_begins(served, offset, len);
        self.note(|| format!("discard {offset} +{len}"));
        let result = served.volume.discard(offset, len).await;
        let good = self.judge("discard", &before, served, (offset, len), result);
        if !good || self.was_out(before.outage_turns) {
            // It is a hint, and good also if only some drives took it.
            self.may_differ(served, offset, len);
        }
        for ticket in inner {
            self.note(|| format!("discard {offset} +{len}: {good}"));
            self.oracle.borrow_mut().write_ends(&ticket, false);
            if self.is_out() || self.plan.beyond {
                self.oracle.borrow_mut().is_unsettled(&ticket);
            }
        }
    }

    /// The whole stripes of the array among these bytes.
    fn discard_begins(&self, served: &Served, offset: u64, len: u64) -> Vec<Ticket> {
        let stripe = served.volume.discard_bytes();
        let mut tickets = Vec::new();
        for range in served.ranges(offset, len) {
            let whole = range.start.next_multiple_of(stripe)..range.end / stripe * stripe;
            // The stripes may be larger ones once it is done.
            let whole = if self.plan.adds { range } else { whole };
            for inner in served.inside(whole) {
                let (first, count) = (served.base + inner.start, inner.end - inner.start);
                tickets.push(self.oracle.borrow_mut().write_begins(first, count, true));
            }
        }
        tickets
    }

    pub async fn flush(&self) {
        let began = self.oracle.borrow_mut().flush_begins();
        let turns = self.outage_turns();
        match self.volume.flush().await {
            Ok(()) => {
                self.note(|| "flush acknowledged".into());
                self.oracle.borrow_mut().flush_ends(began);
            }
            Err(error) if self.plan.beyond || self.was_out(turns) => {
                self.note(|| format!("flush: {error} (allowed)"));
            }
            Err(error) => self.fail(format!("flush failed: {error}")),
        }
    }

    fn buffers(&self, len: u64, first_piece: u64) -> Buffers {
        let mut buffers = Buffers::default();
        let mut left = len;
        let mut piece = first_piece;
        while left > 0 {
            let part = left.min(piece).min(1 << 20);
            let bytes = usize::try_from(part).expect("at most 1 MiB");
            buffers.push(self.reactor.buffer(bytes));
            left -= part;
            piece = 1 << 20;
        }
        buffers
    }

    /// Waits until all workers have ended, and an outage that is under way.
    pub async fn workers_ended(&self) {
        self.waiting.until(&self.reactor, || self.working.get() == 0).await;
        let is_over = || self.outage.get() != Outage::UnderWay;
        self.waiting.until(&self.reactor, is_over).await;
    }

    /// Starts the workers.
    pub fn start_workers(self: &Rc<Life>, prng: &mut Prng) {
        let hot = hot_stripes(&self.plan, self.bytes.get() / self.array.stripe_bytes());
        self.working.set(self.plan.workers);
        for _ in 0..self.plan.workers {
            let (life, hot) = (self.clone(), hot.clone());
            let mut own = Prng::from_seed(prng.next_u64());
            self.reactor.spawn(async move {
                for _ in 0..life.plan.ops_per_worker {
                    life.one_request(&hot, &mut own).await;
                    if life.world.borrow().is_dark() {
                        return;
                    }
                }
                life.working.set(life.working.get() - 1);
                life.waiting.wake_all(&life.reactor);
            });
        }
    }

    pub async fn one_request(&self, hot: &[u64], prng: &mut Prng) {
        if self.is_replaced() {
            return rival::in_vain(self, prng).await;
        }
        if self.plan.pause_ns_max > 0 && prng.chance(1, 3) {
            let pause = prng.below(self.plan.pause_ns_max);
            self.reactor.sleep(Duration::from_nanos(pause)).await;
        }
        if prng.chance(1, 400) {
            // Long enough for regions to be cleaned.
            self.reactor.sleep(Duration::from_secs(4)).await;
        }
        if prng.chance(1, self.plan.flush_one_in) {
            return self.flush().await;
        }
        if prng.chance(1, 60) {
            return self.forget_regions(hot, prng).await;
        }
        if self.plan.has_others() && prng.chance(1, 3) {
            return self.request_of_another(prng).await;
        }
        let (offset, len) = self.range(hot, prng);
        match prng.below(20) {
            0 => self.write(offset, len, true).await,
            1 => self.discard(&self.main(), offset, len).await,
            2..9 => {
                self.read(offset, len).await;
            }
            9 => {
                let stripe = self.array.stripe_bytes();
                let first = offset / stripe * stripe;
                self.write(first, stripe.min(self.bytes.get() - first), false).await;
            }
            _ => self.write(offset, len, false).await,
        }
    }

    /// Of one of the small volumes beside the main one: often where it begins or ends, since there
    /// neighbours may have a part of the stripe.
    async fn request_of_another(&self, prng: &mut Prng) {
        let index = prng.index(NAMES.len());
        let Some(served) = self.others.begin(index) else { return };
        let bytes = served.bytes();
        let longest = LEN_SECTORS_MAX[prng.index(LEN_SECTORS_MAX.len())];
        let len = (SECTOR * (1 + prng.below(longest))).min(bytes);
        let offset = match prng.below(3) {
            0 => 0,
            1 => bytes - len,
            _ => SECTOR * prng.below((bytes - len) / SECTOR + 1),
        };
        match prng.below(20) {
            0 => self.write_of(&served, offset, len, true).await,
            1 => self.discard(&served, 0, bytes).await,
            2..9 => {
                self.read_of(&served, offset, len).await;
            }
            9 => self.write_of(&served, 0, bytes, false).await,
            _ => self.write_of(&served, offset, len, false).await,
        }
        self.others.end(index);
        self.waiting.wake_all(&self.reactor);
    }

    /// Zeroes or discards a region or two, and perhaps a little more.
    async fn forget_regions(&self, hot: &[u64], prng: &mut Prng) {
        let region = self.array.region_bytes();
        let stripe = hot[prng.index(hot.len())] * self.array.stripe_bytes();
        let more = SECTOR * prng.below(9);
        let last = self.bytes.get() - SECTOR;
        let offset = (stripe / region * region).saturating_sub(more).min(last);
        let len = region * (1 + prng.below(2)) + more;
        let len = len.min(self.bytes.get() - offset);
        if prng.chance(1, 2) {
            self.write(offset, len, true).await;
        } else {
            self.discard(&self.main(), offset, len).await;
        }
    }

    /// Whole sectors that begin in a hot stripe; mostly small.
    fn range(&self, hot: &[u64], prng: &mut Prng) -> (u64, u64) {
        let stripe = self.array.stripe_bytes();
        let first = hot[prng.index(hot.len())] * stripe;
        let len_max = match self.plan.floods {
            true => 256,
            false => LEN_SECTORS_MAX[prng.index(LEN_SECTORS_MAX.len())],
        };
        let is_large = self.plan.geometry.chunk_bytes >= CHUNK_BYTES_LARGE;
        let len_max = if is_large && len_max == 400 { LEN_SECTORS_LARGE } else { len_max };
        let mut len = SECTOR * (1 + prng.below(len_max));
        let mut offset = first + SECTOR * prng.below(stripe / SECTOR);
        if prng.chance(1, 2) {
            (offset, len) = (offset / 4096 * 4096, len.next_multiple_of(4096));
        }
        if prng.chance(1, 4) {
            // The same few places again and again.
            offset = first;
        }
        offset = offset.min(self.bytes.get() - SECTOR);
        (offset, len.min(self.bytes.get() - offset))
    }
}

/// Stripes in the first, a middle and the last region of the volume; all for a flood.
pub fn hot_stripes(plan: &Plan, stripes: u64) -> Vec<u64> {
    // A small volume is less than one stripe once members were added.
    let stripes = stripes.max(1);
    let mut prng = Prng::stream(plan.seed, "hot");
    let bases = [0, stripes / 2, stripes - 1];
    if plan.floods {
        return (0..stripes).collect();
    }
    let pick = |index: usize| {
        let near = bases[index % bases.len()] + prng.below(5);
        near.min(stripes - 1)
    };
    (0..plan.hot_stripes).map(pick).collect()
}
