//! A set of stripes, in memory: those whose parity or copies may not agree with the data (the dirty
//! map keeps their regions), and those with bytes that are not in place yet.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;

use ashlar_format::units::{StripeIndex, to_usize};

use crate::view::View;

pub struct StripeSet {
    bits: RefCell<Vec<u64>>,
    count: Cell<u64>,
    watch: RefCell<Option<Watch>>,
}

/// Who is told of what comes and goes.
pub(crate) enum Watch {
    /// It ends with the first one that comes.
    Doubts(Arc<View>),
    /// It counts them.
    Pending(Arc<View>),
}

impl StripeSet {
    /// None of `stripes` is unsynced.
    pub fn none(stripes: u64) -> StripeSet {
        let words = to_usize(stripes.div_ceil(64));
        let bits = RefCell::new(vec![0; words]);
        StripeSet { bits, count: Cell::new(0), watch: RefCell::default() }
    }

    /// Tells it of all that are in the set from now on. Whoever was told before is not any more.
    pub(crate) fn watch(&self, watch: Watch) {
        if let Watch::Pending(view) = &watch {
            let mut at = StripeIndex(0);
            while let Some(stripe) = self.next(at) {
                view.began(stripe);
                at = StripeIndex(stripe.0 + 1);
            }
        }
        *self.watch.borrow_mut() = Some(watch);
    }

    /// There are more stripes; none of the new ones is in the set.
    pub fn grow(&self, stripes: u64) {
        self.bits.borrow_mut().resize(to_usize(stripes.div_ceil(64)), 0);
    }

    fn place(stripe: StripeIndex) -> (usize, u64) {
        (to_usize(stripe.0 / 64), 1 << (stripe.0 % 64))
    }

    pub fn count(&self) -> u64 {
        self.count.get()
    }

    pub fn contains(&self, stripe: StripeIndex) -> bool {
        // The usual case, and the only look at it on the way of a request.
        if self.count.get() == 0 {
            return false;
        }
        let (word, bit) = Self::place(stripe);
        self.bits.borrow()[word] & bit != 0
    }

    pub fn insert(&self, stripe: StripeIndex) {
        let (word, bit) = Self::place(stripe);
        let word = &mut self.bits.borrow_mut()[word];
        if *word & bit == 0 {
            *word |= bit;
            self.count.set(self.count.get() + 1);
            match &*self.watch.borrow() {
                Some(Watch::Doubts(view)) => view.close(),
                Some(Watch::Pending(view)) => view.began(stripe),
                None => {}
            }
        }
    }

    pub fn remove(&self, stripe: StripeIndex) {
        let (word, bit) = Self::place(stripe);
        let word = &mut self.bits.borrow_mut()[word];
        if *word & bit != 0 {
            *word &= !bit;
            self.count.set(self.count.get() - 1);
            if let Some(Watch::Pending(view)) = &*self.watch.borrow() {
                view.ended(stripe);
            }
        }
    }

    /// This one, and all after it.
    pub fn remove_from(&self, mut stripe: StripeIndex) {
        while let Some(next) = self.next(stripe) {
            self.remove(next);
            stripe = next;
        }
    }

    /// The first one at or after `from`.
    pub fn next(&self, from: StripeIndex) -> Option<StripeIndex> {
        let words = self.bits.borrow().len() as u64;
        self.next_in(&(from.0..words * 64))
    }

    /// The first one of these. Nothing else is looked at.
    pub(crate) fn next_in(&self, stripes: &Range<u64>) -> Option<StripeIndex> {
        if self.count() == 0 {
            return None;
        }
        let bits = self.bits.borrow();
        let (first, bit) = Self::place(StripeIndex(stripes.start));
        let end = to_usize(stripes.end.div_ceil(64));
        let masked =
            |index: usize, word: u64| if index == first { word & !(bit - 1) } else { word };
        let words = bits.iter().enumerate().take(end).skip(first);
        let mut found = words.filter_map(|(index, word)| {
            let word = masked(index, *word);
            (word != 0).then(|| index as u64 * 64 + u64::from(word.trailing_zeros()))
        });
        found.next().filter(|stripe| *stripe < stripes.end).map(StripeIndex)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_stripes() {
        let set = StripeSet::none(200);
        assert_eq!(set.next(StripeIndex(0)), None);
        for stripe in [3, 64, 199, 64] {
            set.insert(StripeIndex(stripe));
        }
        assert_eq!(set.count(), 3);
        let mut found = Vec::new();
        let mut at = StripeIndex(0);
        while let Some(next) = set.next(at) {
            found.push(next.0);
            at = StripeIndex(next.0 + 1);
        }
        assert_eq!(found, [3, 64, 199]);
        let first_in = |stripes| set.next_in(&stripes).map(|stripe| stripe.0);
        assert_eq!([first_in(0..3), first_in(0..4), first_in(4..64)], [None, Some(3), None]);
        assert_eq!(
            [first_in(4..65), first_in(65..199), first_in(65..200)],
            [Some(64), None, Some(199)]
        );
        set.remove(StripeIndex(64));
        assert!(!set.contains(StripeIndex(64)) && set.contains(StripeIndex(3)));
        assert_eq!(set.next(StripeIndex(4)), Some(StripeIndex(199)));
        set.remove_from(StripeIndex(4));
        assert_eq!((set.count(), set.next(StripeIndex(0))), (1, Some(StripeIndex(3))));
        set.remove_from(StripeIndex(0));
        assert_eq!((set.count(), set.next(StripeIndex(0))), (0, None));
    }
}
