//! Types for kinds of numbers, so that index, count and size never mix.

use std::ops::Range;

/// Bytes in the smallest unit a guest can address.
pub const SECTOR_BYTES: u64 = 512;

/// A stripe of an array, counted from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StripeIndex(pub u64);

/// A drive's place in an array, counted from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberIndex(pub u8);

impl MemberIndex {
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The member at `index` of a list of at most 256.
    pub fn new(index: usize) -> MemberIndex {
        MemberIndex(u8::try_from(index).expect("at most 256 members"))
    }
}

impl std::fmt::Display for MemberIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of a dirty-map region, counted from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionIndex(pub u64);

/// A byte range of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    pub offset: u64,
    pub len: u64,
}

impl Area {
    /// First byte after the area; `None` if it would not fit in 64 bits.
    pub fn end(self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }

    pub fn range(self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.len)
    }
}

const _: () = assert!(usize::BITS == 64, "lengths in bytes are held in usize");

/// A length that is known to fit in memory.
#[expect(clippy::cast_possible_truncation, reason = "asserted above: usize has 64 bits")]
pub const fn to_usize(len: u64) -> usize {
    len as usize
}
