//! Bytes that are acknowledged but not in place yet: what reads must see before the members.
//!
//! Invariants: patches of one chunk do not overlap; a stripe is in `present` exactly if it has
//! patches; the newest bytes of a row win, whatever was stored of older ones; no patch keeps more
//! memory than a buffer of its length takes, but while its stripe is being stored.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ashlar_format::units::StripeIndex;
use ashlar_reactor::buffer::{Buffer, memory_of};
use smallvec::SmallVec;

use crate::stripe_set::{StripeSet, Watch};
use crate::view::View;
use crate::write_plan::{Band, each};

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

/// Bytes of patches, and of the memory that they take: a small patch takes a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PendingSize {
    pub(crate) bytes: u64,
    pub(crate) memory: u64,
}

impl PendingSize {
    pub(crate) fn of(lens: impl Iterator<Item = usize>) -> PendingSize {
        let mut size = PendingSize::default();
        lens.for_each(|len| size.grow(len));
        size
    }

    pub(crate) fn and(self, more: PendingSize) -> PendingSize {
        PendingSize { bytes: self.bytes + more.bytes, memory: self.memory + more.memory }
    }

    pub(crate) fn less(self, gone: PendingSize) -> PendingSize {
        let less = |all: u64, gone| all.checked_sub(gone).expect("it was added");
        PendingSize { bytes: less(self.bytes, gone.bytes), memory: less(self.memory, gone.memory) }
    }

    fn grow(&mut self, len: usize) {
        self.bytes += len as u64;
        self.memory += memory_of(len) as u64;
    }

    fn add(&mut self, patches: &[Patch]) {
        patches.iter().for_each(|patch| self.grow(patch.bytes.len()));
    }

    fn remove(&mut self, patches: &[Patch]) {
        *self = self.less(PendingSize::of(patches.iter().map(|patch| patch.bytes.len())));
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

    /// Forgets bytes of these rows that are not newer than `newest`. What is left of their patches
    /// is not trimmed. Returns which patches that are.
    fn cut(
        &mut self,
        size: &mut PendingSize,
        chunk: u8,
        rows: &Range<u32>,
        newest: u64,
    ) -> Range<usize> {
        let range = self.overlapping(chunk, rows);
        if range.is_empty() {
            return range;
        }
        let is_cut = |patch: &Patch| patch.sequence <= newest;
        let mut left: SmallVec<[Patch; 4]> = SmallVec::new();
        for patch in &self.patches[range.clone()] {
            match is_cut(patch) {
                true => left.extend(patch.without(rows)),
                false => left.push(patch.clone()),
            }
        }
        size.remove(&self.patches[range.clone()]);
        size.add(&left);
        let left_at = range.start..range.start + left.len();
        self.patches.splice(range, left);
        self.look_for_oldest();
        left_at
    }

    /// Takes the place of whatever has these rows.
    fn put(&mut self, size: &mut PendingSize, patch: Patch) {
        size.add(std::slice::from_ref(&patch));
        let range = self.overlapping(patch.chunk, &patch.rows);
        // A block that is written again.
        if let [old] = &mut self.patches[range.clone()]
            && old.rows == patch.rows
        {
            let gone = std::mem::replace(old, patch);
            let was_oldest = gone.sequence == self.oldest;
            size.remove(&[gone]);
            if was_oldest {
                self.look_for_oldest();
            }
            return;
        }
        let left = self.cut(size, patch.chunk, &patch.rows, u64::MAX);
        self.patches[left].iter_mut().for_each(|patch| patch.bytes.trim());
        let others = if self.patches.is_empty() { u64::MAX } else { self.oldest };
        self.oldest = others.min(patch.sequence);
        let place = (patch.chunk, patch.rows.start);
        let at = self.patches.partition_point(|p| (p.chunk, p.rows.start) < place);
        self.patches.insert(at, patch);
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
    size: PendingSize,
}

impl Pending {
    /// Of an array with `stripes`.
    pub(crate) fn none(stripes: u64) -> Pending {
        Pending {
            stripes: BTreeMap::new(),
            present: StripeSet::none(stripes),
            by_age: BTreeSet::new(),
            barred: BTreeSet::new(),
            size: PendingSize::default(),
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

    pub(crate) fn size(&self) -> PendingSize {
        self.size
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
    pub(crate) fn insert(&mut self, stripe: StripeIndex, mut patch: Patch) {
        patch.bytes.trim();
        self.present.insert(stripe);
        let state = self.stripes.entry(stripe.0).or_default();
        state.put(&mut self.size, patch);
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
        self.change(stripe, |stripe, size| _ = stripe.cut(size, chunk, rows, newest));
    }

    /// Forgets all bytes of a stripe that are not newer than `newest`.
    pub(crate) fn remove_stripe(&mut self, stripe: StripeIndex, newest: u64) {
        self.change(stripe, |stripe, size| {
            size.remove(&stripe.patches);
            stripe.patches.retain(|patch| patch.sequence > newest);
            size.add(&stripe.patches);
            stripe.look_for_oldest();
        });
    }

    fn change(&mut self, index: StripeIndex, change: impl FnOnce(&mut Stripe, &mut PendingSize)) {
        let Some(stripe) = self.stripes.get_mut(&index.0) else { return };
        change(stripe, &mut self.size);
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

    /// Those of them that have bytes of these rows of `chunks`: found without a look at others.
    pub(crate) fn overlapping(
        &self,
        stripe: StripeIndex,
        band: &Band,
        newest: u64,
    ) -> impl Iterator<Item = &Patch> + Clone {
        let stripe = self.stripes.get(&stripe.0);
        let its = stripe.into_iter().flat_map(move |stripe| {
            let of_chunk = move |chunk| &stripe.patches[stripe.overlapping(chunk, &band.rows)];
            each(band.chunks).flat_map(of_chunk)
        });
        its.filter(move |patch| patch.sequence <= newest)
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
        // What is left of those that were stored in parts.
        self.change(stripe, |stripe, _| {
            stripe.patches.iter_mut().for_each(|patch| patch.bytes.trim())
        });
        self.set_busy(stripe, false);
    }

    fn set_busy(&mut self, stripe: StripeIndex, busy: bool) {
        self.change(stripe, |stripe, _| stripe.busy = busy);
    }

    /// Nobody takes the stripe up from now on.
    pub(crate) fn bar(&mut self, stripe: StripeIndex) {
        self.barred.insert(stripe.0);
        self.change(stripe, |_, _| {});
    }

    pub(crate) fn unbar(&mut self, stripe: StripeIndex) {
        self.barred.remove(&stripe.0);
        self.change(stripe, |_, _| {});
    }

    /// Whether somebody could take a stripe with patches of sequences below `before`.
    pub(crate) fn has_waiting(&self, before: u64) -> bool {
        self.by_age.first().is_some_and(|(oldest, _)| *oldest < before)
    }
}

#[cfg(test)]
mod tests;
