//! Rebuild: fills replaced members while the array serves.
//!
//! A leg fills a range of stripes for all members that wait for them (`rebuild_plan.rs`); each
//! stripe is read once. Many stripes are under way at once, and paced (`shift.rs`). Invariants:
//! - a stripe is locked from before it is read until its members hold it, in memory: no write in
//!   between can miss them;
//! - stripes of one leg are locked in ascending order, one after the other, and none is held from
//!   one leg to the next: the order of all who hold several;
//! - a member holds a stripe of a leg only after it holds all before it in that leg;
//! - how far a member is goes to the superblock now and then, after a flush of its drive: a restart
//!   goes on from there.
//!
//! What cannot be worked out is given up (`give_up.rs`).

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::MemberState;
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_reactor::buffer::Buffer;
use ashlar_reactor::range_lock::{Mode, RangeGuard};
use smallvec::SmallVec;

use crate::array::{Array, RequestGuard};
use crate::error::ArrayError;
use crate::lanes::{Lane, Lanes};
use crate::layout::Positions;
use crate::member::Member;
use crate::rebuild_plan::{self, Standing};
use crate::shift::Shift;
use crate::write_plan::each;

/// Between two superblocks that say how far it is.
const SAVE_PERIOD: Duration = Duration::from_secs(2);
/// Or so many times what the last one took: all that guests had written had to be in place.
const PERIOD_PER_SAVE: u32 = 8;
/// After a rebuild has stopped.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// A member that is filled, and what it was when that began: another drive in its place must not
/// inherit what was done for this one, nor the same drive after it missed something meanwhile.
#[derive(Clone)]
struct Target {
    index: MemberIndex,
    drive_uuid: [u8; 16],
    drive: Rc<Drive>,
    fences: u64,
}

impl Target {
    /// `None`: it does not wait to be filled.
    fn of(index: usize, member: &Member) -> Option<Target> {
        let drive = member.alive().filter(|_| member.state == MemberState::Rebuilding)?.clone();
        let (index, drive_uuid) = (MemberIndex::new(index), member.drive_uuid);
        Some(Target { index, drive_uuid, drive, fences: member.fences })
    }

    /// Whether the member is still what it was.
    fn is_still(&self, member: &Member) -> bool {
        Target::of(self.index.index(), member).as_ref() == Some(self)
    }
}

impl PartialEq for Target {
    fn eq(&self, other: &Target) -> bool {
        let same = self.index == other.index && self.drive_uuid == other.drive_uuid;
        same && self.fences == other.fences && Rc::ptr_eq(&self.drive, &other.drive)
    }
}

/// Stripes that are being filled for the same members.
struct Leg {
    stripes: Range<u64>,
    targets: Vec<Target>,
    lanes: Rc<Lanes>,
    /// Members that cannot be filled, and why.
    failed: RefCell<Vec<(Target, String)>>,
}

impl Leg {
    fn fail(&self, target: &Target, why: String) {
        if !self.has_failed(target) {
            self.failed.borrow_mut().push((target.clone(), why));
        }
    }

    fn has_failed(&self, target: &Target) -> bool {
        self.failed.borrow().iter().any(|(failed, _)| failed == target)
    }
}

impl Array {
    /// Rebuilds members that wait for it, until none is left that can be. If it runs already, it
    /// tries again those that it has given up: what they lacked may be here now.
    pub(crate) fn start_rebuild(self: &Rc<Self>) {
        if self.jobs.rebuild_slot().is_running() {
            self.jobs.rebuild_again.set(true);
            return;
        }
        self.jobs.set_rebuild_error(None);
        self.begin_rebuild();
    }

    /// Tries members again that were given up: a drive that refused a write may take it now.
    pub(crate) fn rebuild_if_due(self: &Rc<Self>) {
        let since = self.reactor.now().since(self.jobs.rebuild_ended.get());
        let stopped = self.jobs.has_rebuild_error() && !self.jobs.rebuild_slot().is_running();
        if stopped && since >= RETRY_AFTER && !self.rebuilding(&[]).is_empty() {
            self.begin_rebuild();
        }
    }

    fn begin_rebuild(self: &Rc<Self>) {
        self.jobs.rebuild_slot().begin(self.reactor.now(), 0, self.layout().stripes, 0);
        let array = self.clone();
        self.reactor.spawn(async move {
            // No other window is begun while this runs.
            array.moved.until(&array.reactor, || !array.moving.get()).await;
            array.rebuild_all().await;
            array.jobs.rebuild_slot().end();
            array.jobs.rebuild_ended.set(array.reactor.now());
        });
    }

    async fn rebuild_all(self: &Rc<Self>) {
        // A member that cannot be rebuilt does not keep the others from it.
        let mut given_up: Vec<Target> = Vec::new();
        let mut shift = Shift::begin(self);
        while !self.is_stopping() {
            if self.jobs.rebuild_again.take() {
                self.jobs.set_rebuild_error(None);
                given_up.clear();
            }
            let waiting = self.rebuilding(&given_up);
            let mut failed = Vec::new();
            if let Some(filled) = waiting.iter().find(|target| self.is_filled(target)) {
                let Ok(_request) = self.admit_step().await else { return };
                let saved = shift.beside(self.save_rebuild(filled, MemberState::Trusted)).await;
                failed.extend(saved.err().map(|why| (filled.clone(), why)));
            } else if let Some(leg) = self.next_leg(&waiting) {
                self.fill_leg(&leg, &waiting, &given_up, &mut shift).await;
                failed = leg.failed.take();
            } else {
                if given_up.is_empty() {
                    self.jobs.set_rebuild_error(None);
                }
                return;
            }
            for (target, why) in failed {
                let why = format!("member {}, {why}", target.index);
                self.jobs.set_rebuild_error(Some(why));
                given_up.push(target);
            }
        }
    }

    /// Members that wait to be filled, or to be trusted.
    fn rebuilding(&self, given_up: &[Target]) -> Vec<Target> {
        let list = self.members.list();
        let targets = list.iter().enumerate().filter_map(|(index, its)| Target::of(index, its));
        targets.filter(|target| !given_up.contains(target)).collect()
    }

    fn is_filled(&self, target: &Target) -> bool {
        let list = self.members.list();
        list[target.index.index()].filled.first_gap() >= self.layout().stripes
    }

    /// `None`: nobody waits.
    fn next_leg(&self, waiting: &[Target]) -> Option<Rc<Leg>> {
        let list = self.members.list();
        let standing = |(index, member): (usize, &Member)| {
            if waiting.iter().any(|its| its.index.index() == index) {
                return Standing::Filling(member.filled.clone());
            }
            if member.is_whole() { Standing::Whole } else { Standing::Away }
        };
        let standings: Vec<Standing> = list.iter().enumerate().map(standing).collect();
        let leg = rebuild_plan::next_leg(&self.layout(), &standings)?;
        let targets = waiting.iter().filter(|its| leg.members >> its.index.index() & 1 == 1);
        let filled = |target: &Target| list[target.index.index()].filled.count();
        let done = waiting.iter().map(filled).sum();
        let total = self.layout().stripes * waiting.len() as u64;
        let left = waiting.iter().map(|its| self.chunks_left(&list[its.index.index()]));
        let left = left.sum::<u64>() * u64::from(self.layout().chunk_bytes);
        self.jobs.rebuild_slot().begin(self.reactor.now(), done, total, left);
        Some(Rc::new(Leg {
            stripes: leg.stripes,
            targets: targets.cloned().collect(),
            lanes: Lanes::new(&self.reactor),
            failed: RefCell::default(),
        }))
    }

    /// Chunks that have to be written to a member that is filled.
    fn chunks_left(&self, member: &Member) -> u64 {
        let regions = self.written.inside().into_iter();
        let regions = regions.map(|region| self.written.stripes_of(region));
        let lacked = regions.filter(|stripes| member.lacked(StripeIndex(stripes.start)));
        let left = lacked.map(|its| its.end - its.start - member.filled.count_in(&its));
        left.sum::<u64>() / u64::from(self.layout().groups)
    }

    /// Ends early when a member fails, or others wait now, or those that were given up are to be
    /// tried again: then another leg may come first.
    async fn fill_leg(
        self: &Rc<Self>,
        leg: &Rc<Leg>,
        waiting: &[Target],
        given_up: &[Target],
        shift: &mut Shift<'_>,
    ) {
        let (mut at, mut save_at) = (leg.stripes.start, self.reactor.now().after(SAVE_PERIOD));
        while at < leg.stripes.end
            && leg.failed.borrow().is_empty()
            && (given_up.is_empty() || !self.jobs.rebuild_again.get())
            && self.rebuilding(given_up) == waiting
        {
            if shift.is_over() {
                leg.lanes.drained().await;
                shift.rest().await;
            }
            if self.reactor.now() >= save_at {
                leg.lanes.drained().await;
                let began = self.reactor.now();
                shift.beside(self.save_leg(leg)).await;
                let now = self.reactor.now();
                save_at = now.after(SAVE_PERIOD.max(now.since(began) * PERIOD_PER_SAVE));
            }
            let Ok(request) = self.admit_step().await else { break };
            let stripes = self.next_stripes(leg, at);
            at = stripes.end;
            self.sync_before(leg, &stripes).await;
            let lane = leg.lanes.enter(shift.stripes_at_once()).await;
            let locks = self.lock_for(leg, &stripes).await;
            let array = self.clone();
            self.reactor.spawn(array.fill(leg.clone(), stripes, lane, locks, request));
        }
        leg.lanes.drained().await;
    }

    /// Members of the leg that a stripe may be for, as positions.
    fn wanted(&self, leg: &Leg, stripe: StripeIndex) -> Positions {
        let targets = leg.targets.iter().filter(|target| !leg.has_failed(target));
        let positions =
            targets.filter_map(|its| self.layout_of(stripe).position_of(stripe, its.index));
        positions.fold(0, |bits, position| bits | 1 << position)
    }

    /// Members of the leg that have to be given a stripe.
    fn lacking(&self, leg: &Leg, stripe: StripeIndex) -> Positions {
        // What was moved to new stripes is read here no more.
        if !self.is_written(stripe) || self.is_dead(stripe) {
            return 0;
        }
        let list = self.members.list();
        let lacks = |position: &u8| {
            list[self.layout_of(stripe).member_at(stripe, *position).index()].lacked(stripe)
        };
        each(self.wanted(leg, stripe)).filter(lacks).fold(0, |bits, position| bits | 1 << position)
    }

    /// What is filled at once from `at` on: one stripe, with those before it that the leg is not
    /// for; or what follows in its region, up to a stripe that lacks something.
    fn next_stripes(&self, leg: &Leg, at: u64) -> Range<u64> {
        let mut rest = (at..leg.stripes.end).map(StripeIndex);
        let Some(first) = rest.find(|stripe| self.wanted(leg, *stripe) != 0) else {
            return at..leg.stripes.end;
        };
        // What was moved away is so stripe by stripe.
        if self.lacking(leg, first) != 0 || self.is_dead(first) {
            return at..first.0 + 1;
        }
        let region = self.written.stripes_of(self.written.region_of(first));
        // Members of other groups may lack their stripes of it.
        let mut rest = first.0 + 1..region.end.min(leg.stripes.end);
        let end = rest.end;
        at..rest.find(|stripe| self.lacking(leg, StripeIndex(*stripe)) != 0).unwrap_or(end)
    }

    async fn sync_before(self: &Rc<Self>, leg: &Leg, stripes: &Range<u64>) {
        for stripe in stripes.clone().map(StripeIndex) {
            if self.wanted(leg, stripe) == 0 {
                continue;
            }
            if self.torn_stripes.contains(stripe) {
                // What it still lacks then, `fill_stripe` says.
                let _ = self.mend_torn_of(&(stripe.0..stripe.0 + 1)).await;
            }
            if self.unsynced.contains(stripe)
                && let Err(error) = self.sync_or_give_up(stripe).await
            {
                self.fail_all(leg, stripe, error);
            }
        }
    }

    fn fail_all(&self, leg: &Leg, stripe: StripeIndex, error: ArrayError) {
        for target in &leg.targets {
            if self.layout_of(stripe).position_of(stripe, target.index).is_some() {
                leg.fail(target, format!("stripe {}: {error}", stripe.0));
            }
        }
    }

    async fn lock_for(&self, leg: &Leg, stripes: &Range<u64>) -> Vec<RangeGuard> {
        let mut locks = vec![self.hold_regions().await];
        for stripe in stripes.clone().map(StripeIndex) {
            if self.wanted(leg, stripe) != 0 {
                locks.push(self.lock_stripe(stripe, Mode::Exclusive).await);
            }
        }
        locks
    }

    async fn fill(
        self: Rc<Self>,
        leg: Rc<Leg>,
        stripes: Range<u64>,
        lane: Lane,
        _locks: Vec<RangeGuard>,
        _request: RequestGuard,
    ) {
        // More than one only of a region that was first written since.
        for stripe in stripes.clone().map(StripeIndex) {
            if self.lacking(&leg, stripe) != 0 {
                self.fill_stripe(&leg, stripe).await;
            }
        }
        // A member that failed before must not hold what comes after.
        lane.turn().await;
        for target in leg.targets.iter().filter(|target| !leg.has_failed(target)) {
            // It may have been fenced, or given another drive, which holds nothing of this.
            if self.data_of(target).is_some() {
                self.members.fill(target.index, stripes.clone());
            }
        }
        let filled = stripes.end - stripes.start;
        self.jobs.rebuild_slot().advance_by(filled * leg.targets.len() as u64);
    }

    /// Where the data of the member begins on its drive, if that is still the one.
    fn data_of(&self, target: &Target) -> Option<u64> {
        let list = self.members.list();
        let member = &list[target.index.index()];
        target.is_still(member).then_some(member.areas.data.offset)
    }

    /// Writes what members should hold of one stripe, which is locked.
    async fn fill_stripe(&self, leg: &Leg, stripe: StripeIndex) {
        let wanted = self.lacking(leg, stripe);
        if wanted == 0 {
            return;
        }
        let mut chunks = self.what_should_stand(stripe, wanted).await;
        if matches!(chunks, Err(ArrayError::Lost)) {
            chunks = match self.give_up_locked(stripe).await {
                Ok(Some(lost)) => self.beside_lost(stripe, wanted, &lost).await,
                Ok(None) => Err(ArrayError::Lost),
                Err(error) => Err(error),
            };
        }
        let chunks = match chunks {
            Ok(chunks) => chunks,
            Err(error) => return self.fail_all(leg, stripe, error),
        };
        let mut started: SmallVec<[_; 2]> = SmallVec::new();
        for target in &leg.targets {
            let position = self.layout_of(stripe).position_of(stripe, target.index);
            let chunk = chunks.iter().find(|(its, _)| Some(*its) == position);
            if let Some(((position, bytes), base)) = chunk.zip(self.data_of(target)) {
                let at = base + self.layout().member_offset(stripe, 0);
                self.set_sums(stripe, *position, 0, &bytes.clone().into());
                started.push((target, target.drive.write(at, bytes.clone().into())));
            }
        }
        for (target, io) in started {
            if let Err(error) = io.await {
                leg.fail(target, format!("stripe {}: {}: {error}", stripe.0, target.drive.name()));
            } else {
                let bytes = u64::from(self.layout().chunk_bytes);
                self.jobs.rebuild_slot().worked(self.reactor.now(), bytes);
            }
        }
    }

    /// Whole chunks of some positions of a stripe, from the others.
    async fn what_should_stand(
        &self,
        stripe: StripeIndex,
        wanted: Positions,
    ) -> Result<SmallVec<[(u8, Buffer); 2]>, ArrayError> {
        if self.torn_stripes.contains(stripe) {
            return Err(ArrayError::Lost);
        }
        let layout = self.layout_of(stripe);
        let rows = 0..layout.chunk_bytes;
        if layout.parity > 0 {
            return self.reconstruct_all(stripe, wanted, &rows, 0).await;
        }
        let mut chunks: SmallVec<[(u8, Buffer); 2]> = SmallVec::new();
        for position in each(wanted) {
            let copies = layout.data_positions(position / layout.copies);
            let known = chunks.iter().find(|(its, _)| copies.contains(its));
            let bytes = match known {
                Some((_, bytes)) => bytes.clone(),
                None => {
                    let chunk = position / layout.copies;
                    self.read_anyhow(stripe, chunk, &rows).await?
                }
            };
            chunks.push((position, bytes));
        }
        Ok(chunks)
    }

    /// Makes progress durable. What cannot be saved is filled again after a restart.
    async fn save_leg(self: &Rc<Self>, leg: &Leg) {
        let Ok(_request) = self.admit_step().await else { return };
        for target in &leg.targets {
            let is_ahead = |member: &Member| member.filled.storable() != member.filled_flushed;
            let ahead = is_ahead(&self.members.list()[target.index.index()]);
            if ahead && let Err(why) = self.save_rebuild(target, MemberState::Rebuilding).await {
                leg.fail(target, why);
            }
        }
    }

    /// Makes the member's progress (or its end) durable: its data first, then the superblock.
    async fn save_rebuild(
        self: &Rc<Self>,
        target: &Target,
        state: MemberState,
    ) -> Result<(), String> {
        if state == MemberState::Trusted {
            // Whoever gave it the drive may still be writing its label, and the rest of the
            // metadata: it is not relied on before, and the array does not grow.
            drop(self.members.replacing.lock(0..1, Mode::Shared).await);
        }
        let filled = self.members.list()[target.index.index()].filled.storable();
        if self.data_of(target).is_none() {
            return Err("its drive is gone".into());
        }
        // A ring that is larger than its journal is emptied, and nobody writes until it is trusted.
        // One may become so meanwhile, if the smallest member is lost.
        let own = self.members.list()[target.index.index()].areas.journal.len;
        let shrinks = state == MemberState::Trusted && own < self.members.largest_journal();
        let _pause = if shrinks {
            Some(self.pause_drained().await.map_err(|error| error.to_string())?)
        } else {
            None
        };
        // Batches that were written without the member are on fewer members than they should be
        // once another one may be lost again; and a replay would store what they say of its stripes
        // over what was rebuilt since.
        match self.drain_journal().await {
            Err(_) if state == MemberState::Rebuilding => return Ok(()),
            drained => drained.map_err(|error| error.to_string())?,
        }
        if state == MemberState::Trusted {
            if !self.members.survives_without(&[target.index]) {
                return Err(ArrayError::Lost.to_string());
            }
            self.settle_bad().await.map_err(|error| error.to_string())?;
            // A crash while it was labelled may have left it with one copy.
            let member = self.members.list()[target.index.index()].clone();
            let labelled = self.write_label(target.index, &member).await;
            labelled.map_err(|error| error.to_string())?;
            if let Some(lease) = self.lease.get() {
                lease.tell(target.index.index()).await.map_err(|error| error.to_string())?;
            }
        }
        // What was passed over as blank must be so after a crash, too.
        self.written.settle().await.map_err(|error| error.to_string())?;
        self.write_sums().await.map_err(|error| error.to_string())?;
        target.drive.flush().await.map_err(|error| error.to_string())?;
        // It may have been fenced, or replaced, while the flush ran.
        if self.data_of(target).is_none() {
            return Ok(());
        }
        let save = |member: &mut Member| member.filled_flushed = filled;
        let mut saved = self.members.change(target.index, save).await;
        if saved.is_ok() && state == MemberState::Trusted {
            saved = self.members.trust(target.index, |member| target.is_still(member)).await;
        }
        saved.map_err(|error| error.to_string())
    }
}
