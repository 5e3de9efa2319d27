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
    /// The part inside `rows`; `None` if there is none.
    pub(crate) fn within(&self, rows: &Range<u32>) -> Option<Patch> {
        let (start, end) = (self.rows.start.max(rows.start), self.rows.end.min(rows.end));
        (start < end).then(|| {
            let at = |row: u32| (row - self.rows.start) as usize;
            let bytes = self.bytes.slice(at(start)..at(end));
            Patch { rows: start..end, bytes, ..self.clone() }
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
    oldest: u64,
    /// Somebody is storing it.
    busy: bool,
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
    pub(crate) fn is_within(&self, stripes: Range<u64>) -> bool {
        let next = self.present.next(StripeIndex(stripes.start));
        next.is_some_and(|stripe| stripe.0 < stripes.end)
    }

    /// Newer bytes take the place of older ones. Patches come in the order of their sequences.
    pub(crate) fn insert(&mut self, stripe: StripeIndex, patch: Patch) {
        self.change(stripe, |patches| {
            let (chunk, rows) = (patch.chunk, patch.rows.clone());
            cut(patches, chunk, &rows, u64::MAX);
            let at = patches.partition_point(|p| (p.chunk, p.rows.start) < (chunk, rows.start));
            patches.insert(at, patch);
        });
    }

    /// Forgets what was stored: bytes of these rows that are not newer than `newest`.
    pub(crate) fn remove(
        &mut self,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
        newest: u64,
    ) {
        self.change(stripe, |patches| cut(patches, chunk, rows, newest));
    }

    /// Forgets all bytes of a stripe that are not newer than `newest`.
    pub(crate) fn remove_stripe(&mut self, stripe: StripeIndex, newest: u64) {
        self.change(stripe, |patches| patches.retain(|patch| patch.sequence > newest));
    }

    fn change(&mut self, index: StripeIndex, change: impl FnOnce(&mut Vec<Patch>)) {
        let mut stripe = self.stripes.remove(&index.0).unwrap_or_default();
        self.by_age.remove(&(stripe.oldest, index.0));
        let bytes = |stripe: &Stripe| stripe.patches.iter().map(|p| p.bytes.len() as u64).sum();
        let before: u64 = bytes(&stripe);
        change(&mut stripe.patches);
        let after: u64 = bytes(&stripe);
        self.bytes = self.bytes + after - before;
        // A stripe that is being stored stays, so that nobody else takes it up.
        if stripe.patches.is_empty() && !stripe.busy {
            self.present.remove(index);
            return;
        }
        stripe.oldest = stripe.patches.iter().map(|p| p.sequence).min().unwrap_or(0);
        if !stripe.busy && !self.barred.contains(&index.0) {
            self.by_age.insert((stripe.oldest, index.0));
        }
        self.present.insert(index);
        self.stripes.insert(index.0, stripe);
    }

    /// What is pending of these rows: first row and bytes of each part. For readers, who keep no
    /// batch from being released.
    pub(crate) fn within(
        &self,
        stripe: StripeIndex,
        chunk: u8,
        rows: &Range<u32>,
    ) -> impl Iterator<Item = (u32, Buffer)> {
        let patches = self.stripes.get(&stripe.0).map_or(&[][..], |stripe| &stripe.patches);
        let parts = patches.iter().filter(move |patch| patch.chunk == chunk);
        parts.filter_map(|patch| patch.within(rows)).map(|part| (part.rows.start, part.bytes))
    }

    /// Patches of a stripe that are not newer than `newest`, in order of chunk and row.
    pub(crate) fn of(&self, stripe: StripeIndex, newest: u64) -> Vec<Patch> {
        let patches = self.stripes.get(&stripe.0).map_or(&[][..], |stripe| &stripe.patches);
        patches.iter().filter(|patch| patch.sequence <= newest).cloned().collect()
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
        for stripe in &taken {
            let stripe_state = self.stripes.get_mut(stripe).expect("a stripe with an age");
            stripe_state.busy = true;
            self.by_age.remove(&(stripe_state.oldest, *stripe));
        }
        taken.into_iter().map(StripeIndex).collect()
    }

    pub(crate) fn put_back(&mut self, stripe: StripeIndex) {
        self.stripes.get_mut(&stripe.0).expect("taken before").busy = false;
        self.change(stripe, |_| {});
    }

    /// Nobody takes the stripe up from now on.
    pub(crate) fn bar(&mut self, stripe: StripeIndex) {
        self.barred.insert(stripe.0);
        self.change(stripe, |_| {});
    }

    pub(crate) fn unbar(&mut self, stripe: StripeIndex) {
        self.barred.remove(&stripe.0);
        self.change(stripe, |_| {});
    }

    /// Whether somebody could take a stripe with patches of sequences below `before`.
    pub(crate) fn has_waiting(&self, before: u64) -> bool {
        self.by_age.first().is_some_and(|(oldest, _)| *oldest < before)
    }
}

/// Takes `rows` of a chunk out, as far as they are not newer than `newest`.
fn cut(patches: &mut Vec<Patch>, chunk: u8, rows: &Range<u32>, newest: u64) {
    let overlaps = |patch: &Patch| {
        let overlap = patch.rows.start < rows.end && rows.start < patch.rows.end;
        patch.chunk == chunk && overlap && patch.sequence <= newest
    };
    if patches.iter().any(overlaps) {
        let old = std::mem::take(patches);
        for patch in old {
            if overlaps(&patch) {
                patches.extend(patch.without(rows));
            } else {
                patches.push(patch);
            }
        }
    }
}

#[cfg(test)]
mod tests;
