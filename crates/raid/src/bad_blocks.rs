//! Blocks that are lost for good, until they are written again: a read of them is an error, and the
//! rest of the array is served. One list, on every member.
//!
//! Invariants:
//! - rows are in the list, durably, before anything else stands where they stood (`give_up`);
//! - they leave it in memory when new bytes stand there, or are about to be served from the
//!   journal; and durably only after these are durable: in place, or in a batch that is released
//!   only after the list was saved. So a crash leaves an error or the new bytes;
//! - the newest list on any member decides. At start it is written anew, as the maps of regions.
//!
//! A write that leaves a part of a bad range may need one range more: such writes are refused while
//! the list is almost full. Parts of a sector cannot be written while the rest of it is bad.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use ashlar_format::array_superblock::MemberState;
use ashlar_format::bad_blocks::{BadBlocks as Record, RANGES_MAX, SLOTS, StoredBadRange};
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::record;
use ashlar_format::units::{StripeIndex, to_usize};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use ashlar_reactor::wait_list::WaitList;
use zerocopy::IntoBytes;

use crate::bad_set::{BadRange, BadSet};
use crate::error::ArrayError;
use crate::label;
use crate::member::{Keeper, Member};
use crate::members::{Identity, Members};
use crate::own_generation::start_of_sequences;

/// Ranges that are kept free for writes under way that leave parts of bad ranges.
const CUTS_UNDER_WAY: usize = 160;
/// Counters that stripes share.
const NEAR: usize = 64;

/// The list as it was found on the members.
#[derive(Default)]
pub struct StoredList {
    /// `None`: none was ever written, as far as can be seen.
    newest: Option<Box<Record>>,
    /// A crash has left it on others only.
    lacking: Vec<Keeper>,
}

impl StoredList {
    fn sequence(&self) -> u64 {
        self.newest.as_ref().map_or(0, |newest| newest.header.sequence.get())
    }

    /// As `Newest::spread`.
    pub(crate) async fn spread(&self, reactor: &Reactor) {
        let Some(newest) = &self.newest else { return };
        let sequence = self.sequence();
        let writes = self
            .lacking
            .iter()
            .map(|to| to.write(reactor, &**newest, home(&to.areas, sequence), sequence));
        join_all(writes).await;
    }
}

/// Where a list of this sequence stands.
fn home(areas: &MemberLayout, sequence: u64) -> u64 {
    areas.bad_blocks.offset + sequence % SLOTS * Record::BYTES
}

pub struct BadBlocks {
    reactor: Reactor,
    identity: Rc<Identity>,
    members: Rc<Members>,
    set: RefCell<BadSet>,
    /// Stripes with more bad rows than there was room for: all of each counts, until the next
    /// start.
    beyond: RefCell<BTreeSet<u64>>,
    /// Stripes whose parity may not agree in bad rows: since when it does, or `None`.
    unsettled: RefCell<BTreeMap<u64, Option<u64>>>,
    sequence: Cell<u64>,
    /// Counts what was added.
    added: Cell<u64>,
    /// The same, each of some of the stripes.
    added_near: [Cell<u64>; NEAR],
    changes: Cell<u64>,
    /// The members have the list as it was after so many changes.
    saved: Cell<u64>,
    saving: Cell<bool>,
    waiting: WaitList,
}

impl BadBlocks {
    pub fn new(
        reactor: &Reactor,
        identity: Rc<Identity>,
        members: Rc<Members>,
        stored: &StoredList,
    ) -> Rc<BadBlocks> {
        let (mut set, mut unsettled) = (BadSet::default(), BTreeMap::new());
        let layout = identity.layout();
        for range in stored.newest.iter().flat_map(|newest| newest.ranges()) {
            let (stripe, chunk) = (StripeIndex(range.stripe.get()), range.chunk);
            let rows = range.row.get()..range.row.get() + range.len.get();
            let fits = stripe.0 < layout.stripes && rows.end <= layout.chunk_bytes;
            // No build of ours wrote what does not fit.
            if fits && chunk < layout.data {
                set.insert(&BadRange { stripe, chunk, rows });
                if range.unsettled == 1 {
                    unsettled.insert(stripe.0, None);
                }
            }
        }
        Rc::new(BadBlocks {
            reactor: reactor.clone(),
            identity,
            members,
            set: RefCell::new(set),
            beyond: RefCell::default(),
            unsettled: RefCell::new(unsettled),
            sequence: Cell::new(stored.sequence()),
            added: Cell::default(),
            added_near: [const { Cell::new(0) }; NEAR],
            changes: Cell::default(),
            saved: Cell::default(),
            saving: Cell::default(),
            waiting: WaitList::default(),
        })
    }

    pub fn is_empty(&self) -> bool {
        self.set.borrow().is_empty()
    }

    /// What reads may meet, in order.
    pub fn ranges(&self) -> Vec<BadRange> {
        self.set.borrow().ranges().filter(|range| !self.identity.is_moved(range)).collect()
    }

    /// Bad rows of a stripe, of any chunk.
    pub(crate) fn of(&self, stripe: StripeIndex) -> Vec<(u8, Range<u32>)> {
        self.set.borrow().of(stripe).to_vec()
    }

    pub(crate) fn is_within(&self, stripe: StripeIndex, chunk: u8, rows: &Range<u32>) -> bool {
        let set = self.set.borrow();
        (!set.is_empty() && set.within(stripe, chunk, rows).next().is_some())
            || self.beyond.borrow().contains(&stripe.0)
    }

    /// An error if some of these rows are bad and none of the `others`, which are newer.
    pub(crate) fn check(
        &self,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
        others: impl Iterator<Item = Range<u32>>,
    ) -> Result<(), ArrayError> {
        if !self.is_within(stripe, chunk, rows) {
            return Ok(());
        }
        let mut left = BadSet::default();
        let bad = match self.beyond.borrow().contains(&stripe.0) {
            true => vec![rows.clone()],
            false => self.set.borrow().within(stripe, chunk, rows).collect(),
        };
        bad.into_iter().for_each(|rows| left.insert(&BadRange { stripe, chunk, rows }));
        for newer in others {
            left.remove(stripe, chunk, &newer);
        }
        if left.is_empty() { Ok(()) } else { Err(ArrayError::Bad) }
    }

    /// Counts what was added: whoever reads without a lock looks before and after.
    pub(crate) fn added(&self) -> u64 {
        self.added.get()
    }

    /// The same of this stripe, and a few others: who looks again and again must not wait for as
    /// long as somebody adds anything anywhere.
    pub(crate) fn added_near(&self, stripe: StripeIndex) -> u64 {
        self.near(stripe).get()
    }

    fn near(&self, stripe: StripeIndex) -> &Cell<u64> {
        &self.added_near[to_usize(stripe.0) % NEAR]
    }

    fn note_added(&self, stripe: StripeIndex) {
        self.added.set(self.added.get() + 1);
        self.near(stripe).set(self.near(stripe).get() + 1);
    }

    /// Whether there is room for what a write of these rows leaves, beside `others` that are
    /// acknowledged and not in place.
    pub(crate) fn bears(
        &self,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
        others: usize,
    ) -> bool {
        let set = self.set.borrow();
        let full = set.count() + others + CUTS_UNDER_WAY > RANGES_MAX;
        !full || !set.is_cut_by(stripe, chunk, rows)
    }

    /// Stripes with bad rows.
    pub(crate) fn stripes(&self) -> Vec<StripeIndex> {
        let mut stripes: Vec<_> = self.set.borrow().ranges().map(|range| range.stripe).collect();
        stripes.dedup();
        stripes
    }

    /// Returns once these rows of a stripe are in the list, durably. Until `placed` its parity is
    /// not relied on after a crash.
    pub(crate) async fn insert(
        &self,
        stripe: StripeIndex,
        bad: Vec<BadRange>,
    ) -> Result<(), ArrayError> {
        let mut set = self.set.borrow().clone();
        let before = set.count();
        bad.iter().for_each(|range| set.insert(range));
        if set.count() > before && set.count() + CUTS_UNDER_WAY > RANGES_MAX {
            return Err(ArrayError::TooManyBad);
        }
        self.members.hide();
        *self.set.borrow_mut() = set;
        self.unsettled.borrow_mut().insert(stripe.0, None);
        self.note_added(stripe);
        self.note_change();
        self.save().await
    }

    /// Adds rows of which a batch that stays in the ring has newer data, and nobody can put it in
    /// place: every start finds that anew. Their parity is as it was. Where there is no room for
    /// more, all of their stripe is bad.
    pub(crate) fn note(&self, bad: &[BadRange]) {
        self.members.hide();
        for range in bad {
            let mut set = self.set.borrow_mut();
            let was = set.clone();
            set.insert(range);
            if set.count() + CUTS_UNDER_WAY > RANGES_MAX {
                *set = was;
                self.beyond.borrow_mut().insert(range.stripe.0);
            }
        }
        self.note_change();
    }

    /// What was worked out for the stripe stands in place, not durably yet.
    pub(crate) fn placed(&self, stripe: StripeIndex) {
        self.note_added(stripe);
        if let Some(since) = self.unsettled.borrow_mut().get_mut(&stripe.0) {
            *since = Some(self.added.get());
        }
    }

    pub(crate) fn unsettled(&self) -> Vec<StripeIndex> {
        self.unsettled.borrow().keys().copied().map(StripeIndex).collect()
    }

    /// What was placed before `added` was so large is durable, and the journal holds nothing older.
    pub(crate) async fn settle(&self, added: u64) -> Result<(), ArrayError> {
        let is_later = |since: &Option<u64>| since.is_none_or(|since| since > added);
        self.unsettled.borrow_mut().retain(|_, since| is_later(since));
        self.note_change();
        self.save().await
    }

    /// The same of one stripe, about which the journal holds nothing older.
    pub(crate) async fn settle_stripe(&self, stripe: StripeIndex) -> Result<(), ArrayError> {
        if self.unsettled.borrow_mut().remove(&stripe.0).is_some() {
            self.note_change();
            self.save().await?;
        }
        Ok(())
    }

    /// New bytes stand there. In memory; `save` makes it durable.
    pub(crate) fn remove(&self, stripe: StripeIndex, chunk: u8, rows: &Range<u32>) {
        if !self.is_empty() && self.set.borrow_mut().remove(stripe, chunk, rows) {
            self.note_change();
        }
    }

    /// Whole stripes are zero.
    pub(crate) fn remove_stripes(&self, stripes: Range<u64>) {
        if !self.is_empty() && self.set.borrow_mut().remove_stripes(stripes) {
            self.note_change();
        }
    }

    fn note_change(&self) {
        self.changes.set(self.changes.get() + 1);
        let (mut set, mut unsettled) = (self.set.borrow_mut(), self.unsettled.borrow_mut());
        // What was moved to new stripes is in the list only until the parity beside it is settled.
        let is_over = |range: &BadRange| !unsettled.contains_key(&range.stripe.0);
        let moved = set.ranges().filter(|range| is_over(range) && self.identity.is_moved(range));
        for BadRange { stripe, chunk, rows } in moved.collect::<Vec<_>>() {
            set.remove(stripe, chunk, &rows);
        }
        unsettled.retain(|stripe, _| !set.of(StripeIndex(*stripe)).is_empty());
    }

    /// At start: what was found is what holds from now on, whatever an absent member shows later.
    pub(crate) async fn write_anew(&self) -> Result<(), ArrayError> {
        let all_here = self.members.list().iter().all(|m| m.keeps_metadata().is_some());
        if all_here && self.sequence.get() == 0 {
            return Ok(());
        }
        self.sequence.set(start_of_sequences(self.members.era(), self.sequence.get()));
        self.write_all().await
    }

    /// Writes the list to all members, for one that has just joined. None has one if none was ever
    /// written.
    pub(crate) async fn write_all(&self) -> Result<(), ArrayError> {
        if self.sequence.get() == 0 {
            return Ok(());
        }
        self.note_change();
        self.save().await
    }

    /// Returns once the members have the list as it is now.
    pub(crate) async fn save(&self) -> Result<(), ArrayError> {
        let wanted = self.changes.get();
        while self.saved.get() < wanted {
            if self.saving.get() {
                self.waiting.until(&self.reactor, || !self.saving.get()).await;
                continue;
            }
            self.saving.set(true);
            let changes = self.changes.get();
            let written = self.write().await;
            if written.is_ok() {
                self.saved.set(changes);
            }
            self.saving.set(false);
            self.waiting.wake_all(&self.reactor);
            written?;
        }
        Ok(())
    }

    async fn write(&self) -> Result<(), ArrayError> {
        let mut list = Record::empty(self.identity.uuid);
        self.fill(&mut list)?;
        let sequence = self.sequence.get() + 1;
        self.sequence.set(sequence);
        self.members.write_to_all(&*list, sequence, |areas| home(areas, sequence)).await
    }

    fn fill(&self, list: &mut Record) -> Result<(), ArrayError> {
        let set = self.set.borrow();
        let count = set.count();
        if count > RANGES_MAX {
            return Err(ArrayError::TooManyBad);
        }
        list.range_count = u32::try_from(count).expect("few ranges").into();
        for (stored, range) in list.ranges.iter_mut().zip(set.ranges()) {
            let BadRange { stripe, chunk, rows } = range;
            *stored = StoredBadRange::new(stripe.0, chunk, rows.start, rows.end - rows.start);
            stored.unsettled = self.unsettled.borrow().contains_key(&stripe.0).into();
        }
        Ok(())
    }
}

/// The newest list on any member that is not stale. `None`: no trusted member can show what it has,
/// and lost blocks might pass for good ones.
pub async fn read(reactor: &Reactor, array: [u8; 16], members: &[Member]) -> Option<StoredList> {
    let (mut found, mut is_sure) = (StoredList::default(), false);
    let mut shown = Vec::new();
    for (index, member) in members.iter().enumerate() {
        let Some(keeper) = member.as_keeper(index) else { continue };
        let (mut is_whole, mut own) = (true, 0);
        for slot in 0..SLOTS {
            let home = home(&keeper.areas, slot);
            let read = label::read_bytes(reactor, &keeper.drive, home, Record::BYTES).await;
            is_whole &= read.is_ok();
            let Ok(bytes) = read else { continue };
            let opened = record::open::<Record>(&bytes, Some(keeper.drive_uuid), home);
            let Some(list) = opened.ok().filter(|list| list.array == array) else { continue };
            own = list.header.sequence.get().max(own);
            if own > found.sequence() {
                let mut copy = Record::empty(array);
                copy.as_mut_bytes().copy_from_slice(list.as_bytes());
                found.newest = Some(copy);
            }
        }
        shown.push((keeper, own));
        is_sure |= is_whole && member.state == MemberState::Trusted;
    }
    let lacking = shown.into_iter().filter(|(_, own)| *own < found.sequence());
    found.lacking = lacking.map(|(keeper, _)| keeper).collect();
    is_sure.then_some(found)
}
