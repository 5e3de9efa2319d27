//! Where batches stand in the ring.

use std::ops::Range;

use ashlar_format::array_superblock::MemberState;
use ashlar_format::journal_batch::{PAYLOAD_BYTES_MAX, parity_bytes_max, reserve_bytes};

use super::{Class, HEADER_BYTES, Journal, PENDING_PER_RING};
use crate::member::Member;

/// The part of the ring that is used: from its oldest batch on, to the end of its newest. The two
/// may be one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Used {
    from: u64,
    last: Range<u64>,
}

impl Used {
    /// In a ring of `size`, which may have become smaller.
    fn bytes(&self, size: u64) -> u64 {
        let Used { from, last: Range { start, end } } = self;
        if start < from { size.saturating_sub(*from) + end } else { end - from }
    }

    /// Where `len` bytes can stand behind them in a ring of `size`, with `kept` bytes left.
    fn place_behind(&self, len: u64, kept: u64, size: u64) -> Option<u64> {
        let Used { from, last: Range { start, end } } = self.clone();
        if start < from {
            // The ring may have become smaller.
            return (end + len + kept < from && end + len <= size).then_some(end);
        }
        // Used in one piece: behind it, else at the front.
        if end + len <= size {
            return (end - from + len + kept <= size).then_some(end);
        }
        (len + kept < from.min(size)).then_some(0)
    }
}

impl Journal {
    /// Bytes of the ring: those of the smallest journal of any trusted member. One that is being
    /// filled takes what fits in its own; the ring is emptied before it is trusted, if that is
    /// smaller. (Were it to count before, what is in the ring might have no room for its parity.)
    pub(crate) fn ring_bytes(&self) -> u64 {
        let list = self.members.list();
        let smallest = |of: &dyn Fn(&&Member) -> bool| {
            list.iter().filter(of).map(|member| member.areas.journal.len).min()
        };
        let trusted = smallest(&|its| its.state == MemberState::Trusted && its.drive.is_some());
        trusted.or_else(|| smallest(&|its| its.keeps_metadata().is_some())).unwrap_or(0)
    }

    /// Bytes from the oldest batch to the end of the newest.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used(false).map_or(0, |used| used.bytes(self.ring_bytes()))
    }

    /// `with_named`: with batches that superblocks name, though they have left the ring.
    fn used(&self, with_named: bool) -> Option<Used> {
        let ring = self.ring.borrow();
        let named = if with_named { self.named_places() } else { None };
        let from = match (&named, ring.front()) {
            (Some((oldest, _)), Some(first)) if oldest.sequence > first.sequence => first.at,
            (Some((oldest, _)), _) => oldest.place.start,
            (None, first) => first?.at,
        };
        let last = ring.back().map(|last| last.at..last.at + last.len);
        Some(Used { from, last: last.or(named.map(|(_, newest)| newest.place))? })
    }

    pub(super) fn find_room(&self, len: u64, class: Class) -> Option<u64> {
        let size = self.ring_bytes();
        let parity = self.identity.layout().parity;
        let kept = match class {
            Class::New(new) => {
                let pending = self.pending.borrow().size().and(self.entered.get()).and(new);
                if pending.memory > PENDING_PER_RING * size {
                    return None;
                }
                parity_bytes_max(parity, pending.bytes) + reserve_bytes(parity)
            }
            Class::Parity => reserve_bytes(parity),
            Class::Oldest => 0,
        };
        let place = |with_named| match self.used(with_named) {
            Some(used) => used.place_behind(len, kept, size),
            None => (len + kept <= size).then_some(0),
        };
        let found = place(true);
        if found.is_none() && place(false).is_some() && !self.named_takes_room.replace(true) {
            // Whoever releases batches makes room.
            self.note_change();
        }
        found
    }

    /// Whether whole stripes with so many bytes of data would have room, were the ring empty.
    pub(crate) fn has_room_for(&self, payload: u64) -> bool {
        // A batch is at least half full: what did not fit in it is not more than a whole one.
        let batches = 2 * payload.div_ceil(u64::from(PAYLOAD_BYTES_MAX)) + 1;
        let kept = 2 * reserve_bytes(self.identity.layout().parity);
        payload + batches * HEADER_BYTES + kept <= self.ring_bytes()
    }
}

#[cfg(test)]
mod tests {
    //! Goal: no batch is given a byte of another that counts, or one behind the ring.
    //! Method: all places of small rings; those that fit behind what is used, byte by byte.

    use super::*;

    const SIZE: u64 = 12;

    /// Bytes from the first on to the end of the last, over the end of the ring if need be.
    fn bytes_of(used: &Used) -> Vec<u64> {
        let Used { from, last } = used;
        if last.start < *from {
            (0..last.end).chain(*from..SIZE).collect()
        } else {
            (*from..last.end).collect()
        }
    }

    #[test]
    fn places_are_free_and_leave_what_is_kept() {
        let mut found = 0;
        for (from, start) in (0..SIZE).flat_map(|from| (0..SIZE).map(move |start| (from, start))) {
            for end in start + 1..=SIZE {
                let used = Used { from, last: start..end };
                // Two that overlap.
                if start < from && end > from {
                    continue;
                }
                let taken = bytes_of(&used);
                assert_eq!(taken.len() as u64, used.bytes(SIZE), "{used:?}");
                for (len, kept) in (1..=SIZE).flat_map(|len| (0..3).map(move |kept| (len, kept))) {
                    let Some(at) = used.place_behind(len, kept, SIZE) else { continue };
                    found += 1;
                    assert!(at == 0 || at == end, "{used:?}: {at}");
                    assert!(at + len <= SIZE, "{used:?}: {len} at {at}");
                    assert!((at..at + len).all(|byte| !taken.contains(&byte)), "{used:?}: {at}");
                    let left = SIZE - taken.len() as u64 - len;
                    assert!(left >= kept, "{used:?}: {left} of {kept} are left");
                }
                // Of a ring that is smaller now.
                let small = SIZE - 4;
                let place = used.place_behind(2, 0, small);
                assert!(place.is_none_or(|at| at + 2 <= small), "{used:?}: {place:?}");
            }
        }
        assert!(found > 1000, "{found}");
    }
}
