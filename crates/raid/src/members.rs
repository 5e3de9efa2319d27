//! The members of an array: which can be used, and the superblock that says which can be trusted.
//!
//! Invariants:
//! - a member that missed a write is `Stale` in a durable superblock on every trusted member
//!   before that write is acknowledged (`fence`, `settled`), and the host knows (`witness.rs`);
//!   of parity levels whoever is away then is stale with it (`fence_those_beside`);
//! - nobody is fenced whom the others cannot stand for, nor while the array has failed as a whole:
//!   members that hear nothing of it could be started without those that have it, and two that
//!   are stale keep each other from catching up (but see `set_forced`);
//! - nobody is trusted anew before those that were trusted already, and are enough by themselves,
//!   know of it (`trust`): started without it they would believe that nobody went on alone;
//! - generations only grow, and one superblock write runs at a time.

use std::cell::{Cell, Ref, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_format::array_superblock::{ArraySuperblock, MemberState, Policy, SLOTS};
use ashlar_format::block_sums::BLOCK_BYTES;
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::record::Record;
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::RangeLock;
use ashlar_reactor::wait_list::WaitList;
use smallvec::SmallVec;

use crate::bad_set::BadRange;
use crate::error::ArrayError;
use crate::layout::{Layout, Positions};
use crate::member::{Keeper, Member, are_enough};
use crate::missed::Behind;
use crate::scrub_plan::ScrubMark;
use crate::settings::Settings;
use crate::view::View;
use crate::witness::{Testimony, Witness};
use crate::write_plan::{bits, each};

mod superblock;
mod trust;

/// What an array is. Of this only its size changes while it runs (see `grow`).
pub struct Identity {
    pub uuid: [u8; 16],
    pub name: String,
    layout: Cell<Layout>,
    region_stripes: Cell<u32>,
    /// Members keep a checksum of every block.
    pub integrity: bool,
    restripe: Cell<Option<Restripe>>,
}

/// Members were added, and stripes are being given the shape that goes with that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restripe {
    /// Data chunks of a stripe before.
    pub old_data: u8,
    /// Stripes below have the new shape.
    pub cursor: u64,
    /// What a superblock says of the cursor: it moves there first.
    pub saved: u64,
}

impl Identity {
    pub fn new(
        uuid: [u8; 16],
        name: String,
        layout: Layout,
        region_stripes: u32,
        integrity: bool,
    ) -> Identity {
        let (layout, region_stripes) = (Cell::new(layout), Cell::new(region_stripes));
        Identity { uuid, name, layout, region_stripes, integrity, restripe: Cell::new(None) }
    }

    pub fn restripe(&self) -> Option<Restripe> {
        self.restripe.get()
    }

    /// Bytes that volumes may use at a start: while members are added, those of the old shape.
    pub(crate) fn given_out(&self) -> u64 {
        let layout = self.layout();
        self.restripe().map_or(layout, |restripe| restripe.old(layout)).capacity()
    }

    pub(crate) fn set_restripe(&self, restripe: Option<Restripe>) {
        self.restripe.set(restripe);
    }

    /// In memory only.
    pub(crate) fn set_layout(&self, layout: Layout) {
        self.layout.set(layout);
    }

    /// The shape of one stripe. While members are being added: of the stripes with numbers below
    /// the cursor the new one, of the others the old one. (What was in the old stripes below is in
    /// new ones by then: those have more room.)
    pub fn layout_of(&self, stripe: StripeIndex) -> Layout {
        let layout = self.layout.get();
        match self.restripe.get() {
            Some(restripe) if stripe.0 >= restripe.cursor => restripe.old(layout),
            Some(_) | None => layout,
        }
    }

    /// Data chunks of the stripe that are not read there any more: they were moved to new stripes.
    pub(crate) fn moved_away(&self, stripe: StripeIndex) -> Positions {
        let layout = self.layout();
        let Some(its) = self.restripe().filter(|its| stripe.0 >= its.cursor) else { return 0 };
        let first = stripe.0 * u64::from(its.old(layout).data);
        let moved = (its.cursor * u64::from(layout.data)).saturating_sub(first);
        bits(0..u8::try_from(moved).unwrap_or(u8::MAX).min(its.old(layout).data))
    }

    /// Whether nothing is lost with these rows, since they are not read there any more.
    pub(crate) fn is_moved(&self, rows: &BadRange) -> bool {
        self.moved_away(rows.stripe) >> rows.chunk & 1 == 1
    }

    pub fn layout(&self) -> Layout {
        self.layout.get()
    }

    /// Stripes covered by one bit of a map.
    pub fn region_stripes(&self) -> u32 {
        self.region_stripes.get()
    }

    /// A checksum is of a whole block.
    pub fn least_sector(&self) -> u32 {
        if self.integrity { BLOCK_BYTES } else { 512 }
    }

    /// An error says why a policy is not for this array.
    pub fn check_policy(&self, policy: Policy) -> Result<(), String> {
        let layout = self.layout();
        if self.integrity && !layout.is_redundant() {
            return Err(
                "level 0 has nothing to mend a block from; create it without --integrity".into()
            );
        }
        layout.check_policy(policy)?;
        if self.integrity && policy != Policy::Journal {
            // Checksums and blocks do not become durable together.
            return Err("checksums of blocks need policy journal: without it a crash leaves \
                        blocks that do not fit them; create the array without --integrity"
                .into());
        }
        Ok(())
    }

    /// In memory only; the next superblock says so.
    pub(crate) fn grow(&self, size: Size) {
        let layout = self.layout.get();
        assert!(size.stripes >= layout.stripes);
        assert!(size.region_stripes.is_multiple_of(self.region_stripes.get()));
        self.layout.set(Layout { stripes: size.stripes, ..layout });
        self.region_stripes.set(size.region_stripes);
    }
}

impl Restripe {
    /// The layout before.
    pub fn old(&self, layout: Layout) -> Layout {
        Layout { data: self.old_data, ..layout }
    }
}

/// What grows of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) stripes: u64,
    pub(crate) region_stripes: u32,
}

pub struct Members {
    pub(crate) reactor: Reactor,
    pub(crate) identity: Rc<Identity>,
    list: RefCell<Vec<Member>>,
    /// Of the state in memory.
    generation: Cell<u64>,
    /// Of the newest superblock that is durable on all members that keep metadata.
    durable_generation: Cell<u64>,
    /// See the superblock's fields of these names.
    journal_from: Cell<u64>,
    journal_newest: Cell<u64>,
    /// Of the first superblock that says so.
    newest_since: Cell<u64>,
    trust_changes: Cell<u64>,
    policy: Cell<Policy>,
    settings: Cell<Settings>,
    scrub: Cell<ScrubMark>,
    era: Cell<u64>,
    writing: Cell<bool>,
    pulled: Cell<bool>,
    forced: Cell<bool>,
    /// A member that was trusted is fenced, and no durable superblock says so.
    pub(crate) fencing: Cell<bool>,
    waiting: WaitList,
    pub(crate) joins: Rc<RangeLock>,
    /// Of whoever gives a member a drive.
    pub(crate) replacing: Rc<RangeLock>,
    /// What other reactors read by.
    view: RefCell<Option<Arc<View>>>,
    pub(crate) witness: Witness,
}

impl Members {
    pub fn new(
        reactor: &Reactor,
        identity: Rc<Identity>,
        list: Vec<Member>,
        generation: u64,
        journal_from: u64,
        policy: Policy,
        settings: Settings,
    ) -> Members {
        assert!(list.len() == identity.layout().members());
        Members {
            reactor: reactor.clone(),
            identity,
            list: RefCell::new(list),
            generation: Cell::new(generation),
            durable_generation: Cell::new(generation),
            journal_from: Cell::new(journal_from),
            journal_newest: Cell::default(),
            newest_since: Cell::default(),
            trust_changes: Cell::default(),
            policy: Cell::new(policy),
            settings: Cell::new(settings),
            scrub: Cell::default(),
            era: Cell::new(0),
            writing: Cell::new(false),
            pulled: Cell::new(false),
            forced: Cell::new(false),
            fencing: Cell::new(false),
            waiting: WaitList::default(),
            joins: RangeLock::new(reactor, 0),
            replacing: RangeLock::new(reactor, 0),
            view: RefCell::default(),
            witness: Witness::default(),
        }
    }

    /// Nothing is started on the drives any more: the array is another host's now, or nobody can
    /// say how it is to go on.
    pub fn pull_all(&self) {
        self.hide();
        self.pulled.set(true);
        self.list.borrow().iter().flat_map(|member| &member.drive).for_each(|drive| drive.pull());
    }

    /// It is over: nothing that fails now can be done later.
    pub(crate) fn is_pulled(&self) -> bool {
        self.pulled.get()
    }

    pub(crate) fn view(&self) -> Option<Arc<View>> {
        self.view.borrow().clone()
    }

    /// It is closed before a member is no longer what it was.
    pub(crate) fn watch(&self, view: Arc<View>) {
        *self.view.borrow_mut() = Some(view);
    }

    /// Closes the view, if there is one.
    pub(crate) fn hide(&self) {
        self.view.take().into_iter().for_each(|view| view.close());
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.get()
    }

    /// Of the newest superblock that is durable on all that keep metadata: what may be remembered
    /// elsewhere. Nothing was acknowledged that rests on a newer one.
    pub(crate) fn durable_generation(&self) -> u64 {
        self.durable_generation.get()
    }

    /// There are more of them; the caller changes the layout at once.
    pub(crate) fn add(&self, members: Vec<Member>) {
        self.hide();
        self.list.borrow_mut().extend(members);
        self.generation.set(self.generation.get() + 1);
    }

    pub fn list(&self) -> Ref<'_, Vec<Member>> {
        self.list.borrow()
    }

    /// The drive at `position` of `stripe`, if it holds it, and where its data area begins.
    pub fn at(&self, stripe: StripeIndex, position: u8) -> Option<(Rc<Drive>, u64)> {
        let list = self.list.borrow();
        let member = &list[self.identity.layout_of(stripe).member_at(stripe, position).index()];
        member.holds(stripe).map(|drive| (drive.clone(), member.areas.data.offset))
    }

    /// Positions of `stripe` that hold all acknowledged data.
    pub fn held(&self, stripe: StripeIndex) -> Positions {
        let list = self.list.borrow();
        let layout = self.identity.layout_of(stripe);
        let held = (0..layout.positions())
            .filter(|p| list[layout.member_at(stripe, *p).index()].holds(stripe).is_some());
        held.fold(0, |bits, position| bits | 1 << position)
    }

    /// Whether a trusted member that is not here may bring something of `stripe` back.
    pub fn may_return(&self, stripe: StripeIndex) -> bool {
        let list = self.list.borrow();
        let layout = self.identity.layout_of(stripe);
        let mut members =
            (0..layout.positions()).map(|p| &list[layout.member_at(stripe, p).index()]);
        members.any(|member| member.state == MemberState::Trusted && member.alive().is_none())
    }

    /// Whether all blocks of all stripes can be served.
    pub fn serves_all(&self) -> bool {
        self.all_trusted() || self.survives_without(&[])
    }

    /// Stripes that the member was given, as far as it was to be rebuilt.
    pub fn rebuilt(&self, member: &Member) -> u64 {
        let all = self.identity.layout().stripes;
        if member.state == MemberState::Trusted { all } else { member.filled.count() }
    }

    /// Of trusted members.
    pub(crate) fn largest_journal(&self) -> u64 {
        let list = self.list.borrow();
        let trusted = list.iter().filter(|member| member.state == MemberState::Trusted);
        trusted.map(|member| member.areas.journal.len).max().unwrap_or(0)
    }

    pub fn all_trusted(&self) -> bool {
        self.list.borrow().iter().all(Member::is_whole)
    }

    /// Whether somebody lacks what only the maps can tell.
    pub fn is_any_behind(&self) -> bool {
        self.list.borrow().iter().any(|member| member.catches_up)
    }

    /// At start: what members lack that were catching up, at most.
    pub fn set_behind(&self, behind: &Behind) {
        for member in self.list.borrow_mut().iter_mut() {
            if member.state == MemberState::Rebuilding && member.catches_up {
                member.behind = Some(Rc::new(behind.clone()));
            }
        }
    }

    /// While an operator has the array started although too much of it is away, `forced`: what a
    /// replay cannot give absent members is fenced all the same, stripe by stripe.
    pub(crate) fn set_forced(&self, forced: bool) {
        self.forced.set(forced);
    }

    pub(crate) fn is_forced(&self) -> bool {
        self.forced.get()
    }

    /// Members at these positions of `stripe` that are not known to be behind.
    fn believed(&self, stripe: StripeIndex, of: Positions) -> SmallVec<[MemberIndex; 4]> {
        let (layout, list) = (self.identity.layout_of(stripe), self.list.borrow());
        let members = each(of).map(|position| layout.member_at(stripe, position));
        members.filter(|member| list[member.index()].is_current(stripe)).collect()
    }

    /// Whether these positions of `stripe` may miss something: nobody has to be fenced for that
    /// whom the others cannot stand for.
    pub(crate) fn bears(&self, stripe: StripeIndex, missed: Positions) -> bool {
        let behind = self.believed(stripe, missed);
        behind.is_empty() || self.forced.get() || self.survives_without(&behind)
    }

    /// Makes sure, durably, that what these positions of `stripe` missed is never read from them.
    /// Members that are known to be behind already are left alone; if the others cannot be fenced,
    /// none is, and it is lost.
    pub async fn fence_missed(
        &self,
        stripe: StripeIndex,
        missed: Positions,
    ) -> Result<(), ArrayError> {
        if !self.bears(stripe, missed) {
            return Err(ArrayError::Lost);
        }
        self.fence(self.believed(stripe, missed).into_iter()).await
    }

    /// Marks members as stale, durably: they missed something that is about to be acknowledged. The
    /// caller knows that the others can stand for them.
    pub async fn fence(&self, missed: impl Iterator<Item = MemberIndex>) -> Result<(), ArrayError> {
        if self.mark_stale(missed) {
            self.generation.set(self.generation.get() + 1);
        }
        self.settled().await
    }

    /// In memory only. True if that changed anything.
    pub(crate) fn mark_stale(&self, missed: impl Iterator<Item = MemberIndex>) -> bool {
        let mut changed = false;
        for index in missed {
            let member = &mut self.list.borrow_mut()[index.index()];
            if member.state != MemberState::Stale {
                self.hide();
                let was_trusted = member.state == MemberState::Trusted;
                self.fencing.set(self.fencing.get() | was_trusted);
                if was_trusted {
                    self.trust_changed();
                }
                member.catches_up |= was_trusted;
                member.become_stale();
                // By this handle it could never be brought up to date.
                let failed = member.drive.as_ref().filter(|drive| drive.has_failed_flush());
                failed.into_iter().for_each(|drive| drive.pull());
                changed = true;
            }
        }
        changed
    }

    /// Changes one member, durably.
    pub async fn change(
        &self,
        index: MemberIndex,
        change: impl FnOnce(&mut Member),
    ) -> Result<(), ArrayError> {
        self.hide();
        {
            let member = &mut self.list.borrow_mut()[index.index()];
            let trusted = |member: &Member| {
                (member.state == MemberState::Trusted).then_some(member.drive_uuid)
            };
            let before = trusted(member);
            change(member);
            let after = trusted(member);
            let is_barred = before.is_some() && after != before;
            self.fencing.set(self.fencing.get() | is_barred);
            if after != before {
                self.trust_changed();
            }
        }
        self.generation.set(self.generation.get() + 1);
        self.settled().await
    }

    /// Writes a new superblock although nothing has changed.
    pub async fn save(&self) -> Result<(), ArrayError> {
        self.generation.set(self.generation.get() + 1);
        self.settled().await
    }

    /// Its label has them already.
    pub fn set_areas(&self, index: MemberIndex, areas: MemberLayout) {
        self.list.borrow_mut()[index.index()].areas = areas;
    }

    /// Makes everything that was acknowledged before durable. Members that cannot are fenced, while
    /// the others can stand for them.
    pub async fn flush(&self) -> Result<(), ArrayError> {
        let believed: Vec<(MemberIndex, Option<Rc<Drive>>)> = {
            let list = self.list.borrow();
            let believed = list.iter().enumerate().filter(|(_, m)| m.state != MemberState::Stale);
            believed.map(|(index, m)| (MemberIndex::new(index), m.drive.clone())).collect()
        };
        // Whose drive was never here may have come through a power cut without what it had not
        // flushed. A drive that is gone but had nothing in its cache missed nothing.
        let unknown = believed.iter().filter(|(_, drive)| drive.is_none()).map(|(index, _)| *index);
        let mut failed: Vec<MemberIndex> = unknown.collect();
        let here = believed.iter().filter_map(|(index, drive)| Some((*index, drive.as_ref()?)));
        let waiting: Vec<_> = here.filter(|(_, drive)| drive.is_unflushed()).collect();
        let results = join_all(waiting.iter().map(|(_, drive)| drive.flush())).await;
        let unflushed = waiting.iter().zip(&results).filter(|(_, result)| result.is_err());
        // What one lost that is back is among what it is given, if it was not fenced for nothing.
        let still = unflushed.filter(|((index, drive), _)| !self.is_other(*index, Some(drive)));
        failed.extend(still.map(|((index, _), _)| *index));
        if failed.is_empty() {
            return self.settled().await;
        }
        if !self.survives_without(&failed) {
            return Err(ArrayError::Lost);
        }
        self.fence(failed.into_iter()).await
    }

    /// A rebuilding member holds these stripes, too; in memory only.
    pub(crate) fn fill(&self, index: MemberIndex, stripes: Range<u64>) {
        let member = &mut self.list.borrow_mut()[index.index()];
        assert!(member.state == MemberState::Rebuilding, "member {index} is not rebuilt");
        member.filled.add(stripes);
    }

    /// Waits until the state in memory is durable. In a settled array: returns at once.
    pub async fn settled(&self) -> Result<(), ArrayError> {
        while self.durable_generation.get() < self.generation.get() {
            if self.writing.get() {
                self.waiting.until(&self.reactor, || !self.writing.get()).await;
                continue;
            }
            self.writing.set(true);
            let written = self.write_superblocks().await;
            self.writing.set(false);
            self.waiting.wake_all(&self.reactor);
            written?;
        }
        Ok(())
    }

    /// Writes the state of this moment to all that keep metadata. Whoever fails becomes stale, and
    /// the next round says so.
    async fn write_superblocks(&self) -> Result<(), ArrayError> {
        if self.fencing.get() && !self.forced.get() {
            self.others_answer().await?;
            // Some may have this one, from a try that failed, without those.
            if self.fence_those_beside() {
                self.generation.set(self.generation.get() + 1);
            }
        }
        let (generation, fences) = (self.next_generation(), self.fencing.get());
        let targets = self.keepers();
        if targets.is_empty() || self.is_pulled() {
            return Err(ArrayError::Lost);
        }
        self.fencing.set(false);
        let (still, results) = self.give(&targets, generation, || self.superblock()).await;
        // Of an array that is another host's nobody waits for space.
        let heard = |error| if self.is_pulled() { ArrayError::Lost } else { error };
        let failed = self.may_fence(&still, &results).map_err(heard);
        let is_durable = failed.is_ok() && still.len() == targets.len();
        // Some may have it now: it still is not durable on all.
        self.fencing.set(self.fencing.get() || fences && !is_durable);
        if self.mark_stale(failed?.into_iter()) {
            self.generation.set(self.generation.get() + 1);
        }
        if is_durable {
            if fences {
                let testimony = Testimony { generation, current: self.current() };
                self.witness.tell(&self.reactor, testimony).await;
            }
            self.durable_generation.set(generation);
        }
        Ok(())
    }

    /// Writes the superblock of a generation. Returns who is still the one that was asked, and what
    /// each of those says.
    async fn give(
        &self,
        targets: &[Keeper],
        generation: u64,
        superblock: impl Fn() -> ArraySuperblock,
    ) -> (Vec<MemberIndex>, Vec<Result<(), DriveError>>) {
        for Keeper { index, .. } in targets {
            self.list.borrow_mut()[index.index()].own.ask(generation);
        }
        let writes = targets.iter();
        let writes =
            writes.map(|its| its.write_superblock(&self.reactor, superblock(), generation));
        let results = join_all(writes).await;
        // Of a member whose drive came back meanwhile the old handle's answer says nothing: the
        // next round gives it this.
        let answers = targets.iter().zip(results);
        let answers = answers.filter(|(its, _)| !self.is_other(its.index, Some(&its.drive)));
        let (still, results): (Vec<MemberIndex>, Vec<_>) =
            answers.map(|(target, result)| (target.index, result)).unzip();
        // Who failed may have it or not.
        for (index, _) in still.iter().zip(&results).filter(|(_, result)| result.is_ok()) {
            self.list.borrow_mut()[index.index()].own.took(generation);
        }
        (still, results)
    }

    /// Drives that hold everything.
    fn current(&self) -> Vec<[u8; 16]> {
        let list = self.list.borrow();
        list.iter().filter(|member| member.is_whole()).map(|member| member.drive_uuid).collect()
    }

    /// Not in the slot of the newest that is durable: a power cut may tear what is written.
    fn next_generation(&self) -> u64 {
        let (wanted, durable) = (self.generation.get(), self.durable_generation.get());
        let next = wanted + u64::from(wanted % SLOTS == durable % SLOTS);
        assert!(next > durable, "superblock {durable} is durable, {wanted} is to be written");
        self.generation.set(next);
        next
    }

    /// Who failed to take metadata and can be done without. Nobody is given up for a full file
    /// system, or when the others could not stand for them: that is the caller's error instead.
    fn may_fence(
        &self,
        targets: &[MemberIndex],
        results: &[Result<(), DriveError>],
    ) -> Result<Vec<MemberIndex>, ArrayError> {
        let failed = targets.iter().zip(results).filter(|(_, result)| result.is_err());
        let failed: Vec<MemberIndex> = failed.map(|(index, _)| *index).collect();
        if self.lacks_space(targets.iter().copied(), results) {
            return Err(ArrayError::NoSpace);
        }
        let has_failed = !failed.is_empty() || results.is_empty();
        if has_failed && !self.survives_without(&failed) {
            return Err(ArrayError::Lost);
        }
        Ok(failed)
    }

    /// After metadata was written to `targets`: fences those that failed, if that may be.
    pub async fn fence_failed(
        &self,
        targets: &[MemberIndex],
        results: &[Result<(), DriveError>],
    ) -> Result<(), ArrayError> {
        let failed = self.may_fence(targets, results)?;
        if results.iter().all(Result::is_err) {
            // Whoever has joined meanwhile does not have it, either.
            return Err(ArrayError::Lost);
        }
        self.fence(failed.into_iter()).await
    }

    /// Whether no trusted one is here.
    pub(crate) fn are_untrusted(&self) -> bool {
        !self.list.borrow().iter().any(Member::is_whole)
    }

    /// Members that keep metadata.
    pub(crate) fn keepers(&self) -> Vec<Keeper> {
        self.those(|member| member.keeps_metadata().cloned())
    }

    /// Stale members whose own drives are here, and were used nowhere else.
    pub(crate) fn stale_here(&self) -> Vec<Keeper> {
        let is_own = |its: &Member| its.state == MemberState::Stale && its.catches_up;
        self.those(|member| member.alive().filter(|_| is_own(member)).cloned())
    }

    fn those(&self, of: impl Fn(&Member) -> Option<Rc<Drive>>) -> Vec<Keeper> {
        let list = self.list.borrow();
        let keeper = |(index, member): (usize, &Member)| {
            Some(member.keeper(MemberIndex::new(index), of(member)?))
        };
        list.iter().enumerate().filter_map(keeper).collect()
    }

    /// Makes a record durable at its `home` on every member that keeps metadata; who fails is
    /// fenced.
    pub(crate) async fn write_to_all<T: Record>(
        &self,
        record: &T,
        sequence: u64,
        home: impl Fn(&MemberLayout) -> u64,
    ) -> Result<(), ArrayError> {
        loop {
            let (keepers, results) = self.write_each(record, sequence, &home).await;
            let asked = || keepers.iter().map(|its| (its.index, &its.drive));
            // Where all failed, one that has joined meanwhile may still take it.
            let all_failed = results.iter().all(Result::is_err);
            let is_new = |now: &Keeper| !asked().any(|(_, drive)| Rc::ptr_eq(drive, &now.drive));
            let is_left = all_failed && self.keepers().iter().any(is_new);
            if !is_left && !self.is_any_other(asked(), &results) {
                let members: Vec<MemberIndex> = asked().map(|(index, _)| index).collect();
                return self.fence_failed(&members, &results).await;
            }
        }
    }

    /// The same of what nobody rests on: who cannot take it is no worse for that.
    pub(crate) async fn write_each<T: Record>(
        &self,
        record: &T,
        sequence: u64,
        home: impl Fn(&MemberLayout) -> u64,
    ) -> (Vec<Keeper>, Vec<Result<(), DriveError>>) {
        let keepers = self.keepers();
        let writes = keepers
            .iter()
            .map(|keeper| keeper.write(&self.reactor, record, home(&keeper.areas), sequence));
        let results = join_all(writes).await;
        (keepers, results)
    }

    /// Whether the others hold every block, as far as they are here.
    pub(crate) fn survives_without(&self, failed: &[MemberIndex]) -> bool {
        let layout = self.identity.layout();
        are_enough(&layout, &self.list.borrow(), |index, its| {
            its.is_whole() && !failed.contains(&index)
        })
    }

    /// Whether a member, here or not, holds what the others do not.
    pub(crate) fn is_needed(&self, index: MemberIndex) -> bool {
        let trusted = self.list.borrow()[index.index()].state == MemberState::Trusted;
        trusted && !self.survives_without(&[index])
    }
}
