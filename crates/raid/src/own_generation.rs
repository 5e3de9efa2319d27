//! The generation of the superblock on a member's own drive, as the others know it.
//!
//! ```text
//!             sure           asked
//!       older │ its own: one  │ another took more than the
//!             │ that it was   │ others know of, or it was
//!             │ given         │ used elsewhere
//! ```
//!
//! A drive that is older than what it surely took holds a copy of before: a backup, a snapshot that
//! was rolled back. One that was asked to take a superblock while it was pulled may have it or not.
//! A start of the array elsewhere goes on from far beyond all that its drives have (see
//! `assemble::first_generation`): one that is newer by less took the beginning of a change that the
//! others never heard of, when a crash came, unless it relies on none of them by then (see
//! `apart::went_on_alone`). (One that alone took the first superblock of a start
//! cannot be told from one that was used elsewhere, unless one that it relied on took later ones
//! from the others: it is refused, until an operator says that it may be overwritten.)

use std::cmp::Ordering;

use ashlar_format::array_superblock::{ERA_SEQUENCES_LOG2, SLOTS};

/// Generations that a start passes over: more than ever reached some members and not all. Even: the
/// slot of the newest is not the one that is written next.
pub const SEQUENCES_PER_START: u64 = 1 << 16;

/// Before the first sequence of a start, of records whose newest is `newest`: beyond what any start
/// has left, also on members that are away, that had one of those that are here: they tell of its
/// `era` (see `Array::bring_up`). The first is not written over the newest.
pub(crate) fn start_of_sequences(era: u64, newest: u64) -> u64 {
    in_slot_of(newest, (era << ERA_SEQUENCES_LOG2).max(newest))
}

/// The first from `least` on that has the slot of `newest`.
pub(crate) fn in_slot_of(newest: u64, least: u64) -> u64 {
    least + least.abs_diff(newest) % SLOTS
}

/// Low halves of generations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnGeneration {
    /// Of a superblock that is durable there. Zero: nobody knows of one.
    sure: u32,
    /// Of the newest that was given to it.
    asked: u32,
}

/// As a superblock has it.
pub fn generation_low(generation: u64) -> u32 {
    u32::try_from(generation & u64::from(u32::MAX)).expect("masked")
}

/// Low halves of generations, the first as seen from the second.
fn age(generation: u32, other: u32) -> Ordering {
    match generation.wrapping_sub(other) {
        0 => Ordering::Equal,
        1..=0x7fff_ffff => Ordering::Greater,
        0x8000_0000.. => Ordering::Less,
    }
}

/// What stands where a drive has a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// One of this array, of that generation.
    Has(u64),
    /// None was ever written there: not even the beginning of one, or one of another array.
    Empty,
    /// Says nothing: a crash may have torn it while it was written again.
    Unreadable,
}

impl OwnGeneration {
    pub fn stored(sure: u32, asked: u32) -> OwnGeneration {
        OwnGeneration { sure, asked }
    }

    pub fn sure(self) -> u32 {
        self.sure
    }

    pub fn asked(self) -> u32 {
        self.asked
    }

    pub fn ask(&mut self, generation: u64) {
        self.asked = generation_low(generation);
    }

    pub fn took(&mut self, generation: u64) {
        self.sure = generation_low(generation);
    }

    /// It was found there, whatever was known.
    pub fn found(&mut self, generation: u64) {
        let low = generation_low(generation);
        if age(low, self.asked) == Ordering::Greater {
            self.asked = low;
        }
    }

    /// What a drive with this one is.
    ///
    /// `Equal`: it has what it was given. `Less`: it is older, or nobody can tell. `Greater`: it
    /// was used elsewhere.
    pub fn judge(self, generation: u64) -> Ordering {
        let low = generation_low(generation);
        // Where nothing is sure it must be the very one.
        let least = if self.sure == 0 { self.asked } else { self.sure };
        // A start goes on from what the drive has, which is less than it was asked for, perhaps.
        let was_started = u64::from(low.wrapping_sub(self.asked)) >= SEQUENCES_PER_START / 2;
        match (age(low, least), age(low, self.asked)) {
            (Ordering::Less, _) => Ordering::Less,
            (_, Ordering::Greater) if was_started => Ordering::Greater,
            (_, Ordering::Greater) => Ordering::Less,
            (Ordering::Equal | Ordering::Greater, _) => Ordering::Equal,
        }
    }

    /// Whether a drive with this one took what it was never given here.
    pub fn is_beyond(self, generation: u64) -> bool {
        age(generation_low(generation), self.asked) == Ordering::Greater
    }

    /// Whether it surely took a later one than this, which was given to another. `newest`: the
    /// generation that says so.
    pub fn is_past(self, generation: u64, newest: u64) -> bool {
        self.sure != 0 && self.sure_by(newest) > generation
    }

    /// What it surely took, in full: low halves cannot tell what may be older than half a round.
    fn sure_by(self, newest: u64) -> u64 {
        newest.saturating_sub(u64::from(generation_low(newest).wrapping_sub(self.sure)))
    }

    /// Whether a drive with these slots holds a copy of before, as the superblock of generation
    /// `newest` knows it: what it surely took, or something newer, would stand in the slot of that.
    pub fn is_outdated(self, slots: [Slot; 2], newest: u64) -> bool {
        let sure = self.sure_by(newest);
        let is_older = |slot| match slot {
            Slot::Has(generation) => generation < sure,
            Slot::Empty | Slot::Unreadable => true,
        };
        let is_told = slots.iter().any(|slot| matches!(slot, Slot::Has(_)))
            && slots[usize::from(self.sure % 2 == 1)] != Slot::Unreadable;
        self.sure != 0 && is_told && slots.into_iter().all(is_older)
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what a drive may have of itself is told from older and from foreign.
    //! Method: generations around the limits.

    use super::*;

    #[test]
    fn what_was_taken_later_is_known() {
        let past = |sure: u64, generation| {
            let low = generation_low(sure);
            OwnGeneration::stored(low, low).is_past(generation, (1 << 32) + 2)
        };
        assert!(past(101, 100) && past((1 << 32) + 2, u64::from(u32::MAX)));
        assert!(!past(100, 100) && !past(99, 100) && !past(0, 100));
        // Later by low halves alone.
        assert!(!past(5, (1 << 31) + 6));
    }

    #[test]
    fn what_was_given_is_its_own() {
        let judged = |sure, asked, generations: [u64; 4]| {
            generations.map(|its| OwnGeneration::stored(sure, asked).judge(its))
        };
        let [less, equal, greater] = [Ordering::Less, Ordering::Equal, Ordering::Greater];
        let start = SEQUENCES_PER_START;
        assert_eq!(judged(100, 103, [99, 100, 103, 103 + start]), [less, equal, equal, greater]);
        assert_eq!(
            judged(100, 103, [104, 105, 101 + start, 9 * start]),
            [less, less, greater, greater]
        );
        assert_eq!(judged(0, 50, [49, 50, 51, 50 + start]), [less, equal, less, greater]);
        // Low halves go round.
        let round = 1 << 32;
        let around = [round - 2, round - 1, round + 2, round + 2 + start];
        assert_eq!(judged(u32::MAX, 2, around), [less, equal, equal, greater]);
    }

    /// All that a drive's slots can be, beside what it surely took.
    #[test]
    fn a_copy_of_before_is_told_from_a_damaged_slot() {
        use Slot::{Empty, Has, Unreadable};
        for turn in [0, 1, 1 << 32, (7 << 32) - 1] {
            for sure in [100, 101].map(|its| its + turn) {
                let own = OwnGeneration::stored(generation_low(sure), generation_low(sure + 2));
                let (its, other) = (usize::from(sure % 2 == 1), usize::from(sure % 2 == 0));
                let newest = sure + 50;
                // In the slot of what is sure, the other one, and whether it is a copy.
                for (here, beside, is_copy) in [
                    (Has(sure), Has(sure - 1), false),
                    (Has(sure), Has(sure + 1), false),
                    (Has(sure), Empty, false),
                    (Has(sure), Unreadable, false),
                    (Has(sure + 2), Has(sure + 1), false),
                    (Has(sure + 2), Unreadable, false),
                    (Has(sure - 2), Has(sure - 1), true),
                    (Has(sure - 2), Has(sure - 3), true),
                    (Has(sure - 2), Empty, true),
                    (Has(sure - 2), Unreadable, true),
                    // Torn when it was written again: the newer one is whole.
                    (Has(sure - 2), Has(sure + 1), false),
                    (Empty, Has(sure - 1), true),
                    (Empty, Has(sure + 1), false),
                    (Empty, Empty, false),
                    (Empty, Unreadable, false),
                    (Unreadable, Has(sure - 1), false),
                    (Unreadable, Has(sure + 1), false),
                    (Unreadable, Empty, false),
                    (Unreadable, Unreadable, false),
                ] {
                    let mut slots = [here; 2];
                    (slots[its], slots[other]) = (here, beside);
                    assert_eq!(own.is_outdated(slots, newest), is_copy, "{sure} {slots:?}");
                    let unknown = OwnGeneration::stored(0, generation_low(sure));
                    assert!(!unknown.is_outdated(slots, newest), "{slots:?}");
                }
            }
        }
        // Half of what a low half counts, and more, ago.
        let sure = (1 << 40) + 5;
        let own = OwnGeneration::stored(generation_low(sure), generation_low(sure));
        let old = sure - (3 << 31);
        assert!(own.is_outdated([Has(old), Has(old + 1)], sure + 9));
    }
}
