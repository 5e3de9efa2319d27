//! Bytes that are acknowledged but not in place yet: what reads must see before the members.
//!
//! Invariants: patches of one chunk do not overlap; a stripe is in `present` exactly if it has
//! patches; the newest bytes of a row win, whatever was stored of older ones.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ashlar_format::units::StripeIndex;
use ashlar_reactor::buffer::Buffer;
use smallvec::SmallVec;

use crate::stripe_set::{StripeSet, Watch};
use crate::view::View;

/// Keeps a batch of the journal from being forgotten.
pub(crate) type Hold = Rc<()>;

/// New bytes for rows of one data chunk.
#[derive(Clone)]
pub(crate) struct Patch {
    pub(crate) chunk: u8,
    pub(crate) rows: Range<u32>,
    pub(crate) bytes: Buffer,
    /// Of the batch that has them.
    pub(crate) sequence: u64,
    pub(crate) hold: Hold,
}

impl Patch {
    pub(crate) fn overlaps(&self, rows: &Range<u32>) -> bool {
        self.rows.start < rows.end && rows.start < self.rows.end
    }

    /// The part inside `rows`; `None` if there is none.
    pub(crate) fn within(&self, rows: &Range<u32>) -> Option<Patch> {
        let (start, end) = (self.rows.start.max(rows.start), self.rows.end.min(rows.end));
        (start < end).then(|| {
            let at = |row: u32| (row - self.rows.start) as usize;
            let bytes = self.bytes.slice(at(start)..at(end));
            let (chunk, sequence, hold) = (self.chunk, self.sequence, self.hold.clone());
            Patch { chunk, rows: start..end, bytes, sequence, hold }
        })
    }

    /// What is left of it outside `rows`, in order.
    fn without(&self, rows: &Range<u32>) -> impl Iterator<Item = Patch> {
        let parts = [self.within(&(0..rows.start)), self.within(&(rows.end..u32::MAX))];
        parts.into_iter().flatten()
    }
}

#[derive(Default)]
struct Stripe {
    /// In order of chunk and row.
    patches: Vec<Patch>,
    /// The least of their sequences.
    oldest: u64,
    /// Somebody is storing it.
    busy: bool,
    /// What it is in `by_age` as.
    age: Option<u64>,
}

impl Stripe {
    /// Which of the patches have bytes of these rows of a chunk.
    fn overlapping(&self, chunk: u8, rows: &Range<u32>) -> Range<usize> {
        let first = self.patches.partition_point(|p| (p.chunk, p.rows.end) <= (chunk, rows.start));
        let rest = &self.patches[first..];
        let count = rest.iter().take_while(|p| p.chunk == chunk && p.rows.start < rows.end).count();
        first..first + count
    }

    fn bytes(&self, patches: Range<usize>) -> u64 {
        self.patches[patches].iter().map(|patch| patch.bytes.len() as u64).sum()
    }

    /// Forgets bytes of these rows that are not newer than `newest`; returns how many.
    fn cut(&mut self, chunk: u8, rows: &Range<u32>, newest: u64) -> u64 {
        let range = self.overlapping(chunk, rows);
        let before = self.bytes(range.clone());
        if before == 0 {
            return 0;
        }
        let is_cut = |patch: &Patch| patch.sequence <= newest;
        let mut left: SmallVec<[Patch; 4]> = SmallVec::new();
        for patch in &self.patches[range.clone()] {
            match is_cut(patch) {
                true => left.extend(patch.without(rows)),
                false => left.push(patch.clone()),
            }
        }
        let after: u64 = left.iter().map(|patch| patch.bytes.len() as u64).sum();
        self.patches.splice(range, left);
        self.look_for_oldest();
        before - after
    }

    /// Takes the place of whatever has these rows; returns how many bytes that was.
    fn put(&mut self, patch: Patch) -> u64 {
        let range = self.overlapping(patch.chunk, &patch.rows);
        // A block that is written again.
        if let [old] = &mut self.patches[range.clone()]
            && old.rows == patch.rows
        {
            let gone = std::mem::replace(old, patch);
            if gone.sequence == self.oldest {
                self.look_for_oldest();
            }
            return gone.bytes.len() as u64;
        }
        let before = self.cut(patch.chunk, &patch.rows, u64::MAX);
        let others = if self.patches.is_empty() { u64::MAX } else { self.oldest };
        self.oldest = others.min(patch.sequence);
        let place = (patch.chunk, patch.rows.start);
        let at = self.patches.partition_point(|p| (p.chunk, p.rows.start) < place);
        self.patches.insert(at, patch);
        before
    }

    fn look_for_oldest(&mut self) {
        self.oldest = self.patches.iter().map(|patch| patch.sequence).min().unwrap_or(0);
    }
}

pub(crate) struct Pending {
    stripes: BTreeMap<u64, Stripe>,
    present: StripeSet,
    /// Oldest sequence of each stripe that nobody is storing.
    by_age: BTreeSet<(u64, u64)>,
    /// Stripes that nobody takes up.
    barred: BTreeSet<u64>,
    bytes: u64,
}

impl Pending {
    /// Of an array with `stripes`.
    pub(crate) fn none(stripes: u64) -> Pending {
        Pending {
            stripes: BTreeMap::new(),
            present: StripeSet::none(stripes),
            by_age: BTreeSet::new(),
            barred: BTreeSet::new(),
            bytes: 0,
        }
    }

    /// The array has more stripes.
    pub(crate) fn grow(&self, stripes: u64) {
        self.present.grow(stripes);
    }

    /// The view is told of all stripes that have patches.
    pub(crate) fn watch(&self, view: Arc<View>) {
        self.present.watch(Watch::Pending(view));
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.stripes.is_empty()
    }

    pub(crate) fn contains(&self, stripe: StripeIndex) -> bool {
        self.present.contains(stripe)
    }

    /// Whether any of these stripes has patches.
    pub(crate) fn is_within(&self, stripes: &Range<u64>) -> bool {
        self.present.next_in(stripes).is_some()
    }

    /// Newer bytes take the place of older ones. Patches come in the order of their sequences.
    pub(crate) fn insert(&mut self, stripe: StripeIndex, patch: Patch) {
        self.present.insert(stripe);
        self.bytes += patch.bytes.len() as u64;
        let state = self.stripes.entry(stripe.0).or_default();
        self.bytes -= state.put(patch);
        Self::set_age(stripe, state, &self.barred, &mut self.by_age);
    }

    /// Forgets what was stored: bytes of these rows that are not newer than `newest`.
    pub(crate) fn remove(
        &mut self,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
        newest: u64,
    ) {
        self.change(stripe, |stripe| stripe.cut(chunk, rows, newest));
    }

    /// Forgets all bytes of a stripe that are not newer than `newest`.
    pub(crate) fn remove_stripe(&mut self, stripe: StripeIndex, newest: u64) {
        self.change(stripe, |stripe| {
            let before = stripe.bytes(0..stripe.patches.len());
            stripe.patches.retain(|patch| patch.sequence > newest);
            stripe.look_for_oldest();
            before - stripe.bytes(0..stripe.patches.len())
        });
    }

    /// `change` says how many bytes it has taken out.
    fn change(&mut self, index: StripeIndex, change: impl FnOnce(&mut Stripe) -> u64) {
        let Some(stripe) = self.stripes.get_mut(&index.0) else { return };
        self.bytes -= change(stripe);
        Self::set_age(index, stripe, &self.barred, &mut self.by_age);
        // A stripe that is being stored stays, so that nobody else takes it up.
        if stripe.patches.is_empty() && !stripe.busy {
            self.stripes.remove(&index.0);
            self.present.remove(index);
        }
    }

    fn set_age(
        index: StripeIndex,
        stripe: &mut Stripe,
        barred: &BTreeSet<u64>,
        by_age: &mut BTreeSet<(u64, u64)>,
    ) {
        let waits = !stripe.patches.is_empty() && !stripe.busy && !barred.contains(&index.0);
        let age = waits.then_some(stripe.oldest);
        if age != stripe.age {
            let old = std::mem::replace(&mut stripe.age, age);
            old.map(|old| by_age.remove(&(old, index.0)));
            age.map(|age| by_age.insert((age, index.0)));
        }
    }

    /// What is pending of these rows: first row and bytes of each part. For readers, who keep no
    /// batch from being released.
    pub(crate) fn within(
        &self,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
    ) -> impl Iterator<Item = (u32, Buffer)> {
        let stripe = self.stripes.get(&stripe.0);
        let parts = stripe.map_or(&[][..], |its| &its.patches[its.overlapping(chunk, rows)]);
        let parts = parts.iter().filter_map(|patch| patch.within(rows));
        parts.map(|part| (part.rows.start, part.bytes))
    }

    /// Patches of a stripe that are not newer than `newest`, in order of chunk and row.
    pub(crate) fn of(
        &self,
        stripe: StripeIndex,
        newest: u64,
    ) -> impl Iterator<Item = &Patch> + Clone {
        let patches = self.stripes.get(&stripe.0).map_or(&[][..], |stripe| &stripe.patches);
        patches.iter().filter(move |patch| patch.sequence <= newest)
    }

    /// Sequence of the oldest patch of these stripes.
    pub(crate) fn oldest_of(&self, stripes: &[StripeIndex]) -> u64 {
        let oldest = stripes.iter().filter_map(|stripe| self.stripes.get(&stripe.0));
        oldest.map(|stripe| stripe.oldest).min().unwrap_or(u64::MAX)
    }

    /// Takes up to `count` of the stripes that have waited longest, with patches of sequences below
    /// `before`; in ascending order. They are the caller's until `put_back`.
    pub(crate) fn take_oldest(&mut self, count: usize, before: u64) -> Vec<StripeIndex> {
        let old = self.by_age.range(..(before, 0)).take(count);
        let mut taken: Vec<u64> = old.map(|(_, stripe)| *stripe).collect();
        taken.sort_unstable();
        let taken: Vec<StripeIndex> = taken.into_iter().map(StripeIndex).collect();
        taken.iter().for_each(|stripe| self.set_busy(*stripe, true));
        taken
    }

    pub(crate) fn put_back(&mut self, stripe: StripeIndex) {
        assert!(self.stripes.get(&stripe.0).is_some_and(|its| its.busy), "taken before");
        self.set_busy(stripe, false);
    }

    fn set_busy(&mut self, stripe: StripeIndex, busy: bool) {
        self.change(stripe, |stripe| {
            stripe.busy = busy;
            0
        });
    }

    /// Nobody takes the stripe up from now on.
    pub(crate) fn bar(&mut self, stripe: StripeIndex) {
        self.barred.insert(stripe.0);
        self.change(stripe, |_| 0);
    }

    pub(crate) fn unbar(&mut self, stripe: StripeIndex) {
        self.barred.remove(&stripe.0);
        self.change(stripe, |_| 0);
    }

    /// Whether somebody could take a stripe with patches of sequences below `before`.
    pub(crate) fn has_waiting(&self, before: u64) -> bool {
        self.by_age.first().is_some_and(|(oldest, _)| *oldest < before)
    }
}

#[cfg(test)]
mod tests;
