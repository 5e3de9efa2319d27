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
//! `assemble::first_generation`).

use std::cmp::Ordering;

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
    /// has what the others did not give it.
    pub fn judge(self, generation: u64) -> Ordering {
        let low = generation_low(generation);
        // Where nothing is sure it must be the very one.
        let least = if self.sure == 0 { self.asked } else { self.sure };
        match (age(low, least), age(low, self.asked)) {
            (Ordering::Less, _) => Ordering::Less,
            (_, Ordering::Greater) => Ordering::Greater,
            (Ordering::Equal | Ordering::Greater, _) => Ordering::Equal,
        }
    }

    /// Whether a drive with these slots holds a copy of before: what it surely took, or something
    /// newer, would stand in the slot of that.
    pub fn is_outdated(self, slots: [Slot; 2]) -> bool {
        let is_older = |slot| match slot {
            Slot::Has(generation) => age(generation_low(generation), self.sure) == Ordering::Less,
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
    fn what_was_given_is_its_own() {
        let judged = |sure, asked, generations: [u64; 4]| {
            generations.map(|its| OwnGeneration::stored(sure, asked).judge(its))
        };
        let [less, equal, greater] = [Ordering::Less, Ordering::Equal, Ordering::Greater];
        assert_eq!(judged(100, 103, [99, 100, 103, 104]), [less, equal, equal, greater]);
        assert_eq!(judged(0, 50, [49, 50, 51, 52]), [less, equal, greater, greater]);
        // Low halves go round.
        let round = 1 << 32;
        let around = [round - 2, round - 1, round + 2, round + 3];
        assert_eq!(judged(u32::MAX, 2, around), [less, equal, equal, greater]);
    }

    #[test]
    fn a_copy_of_before_is_told_from_a_damaged_slot() {
        use Slot::{Empty, Has, Unreadable};
        assert!(!OwnGeneration::stored(0, 50).is_outdated([Has(48), Has(47)]));
        let own = OwnGeneration::stored(100, 101);
        assert!(own.is_outdated([Has(98), Has(99)]));
        assert!(own.is_outdated([Has(98), Unreadable]));
        assert!(!own.is_outdated([Has(100), Has(99)]));
        assert!(!own.is_outdated([Has(100), Has(101)]));
        assert!(!own.is_outdated([Unreadable, Has(99)]));
        assert!(!own.is_outdated([Unreadable, Unreadable]));
        assert!(!own.is_outdated([Empty, Empty]));
        // As it was made.
        assert!(own.is_outdated([Empty, Has(1)]));
        assert!(!own.is_outdated([Unreadable, Has(1)]));
        assert!(!own.is_outdated([Empty, Has(101)]));
    }
}
