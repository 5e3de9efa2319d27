//! Where a drive could not be read. That the same block fails again says nothing more about the
//! drive: else whoever reads a block again and again that is lost for good would cost it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use ashlar_reactor::op::Op;

/// Ranges that are known at a time: more than errors that any drive is allowed.
const RANGES_MAX: usize = 256;

#[derive(Default)]
pub(crate) struct Unreadable {
    /// From their first byte to their end. No two of them overlap.
    ranges: RefCell<BTreeMap<u64, u64>>,
}

impl Unreadable {
    /// A read failed, or another operation. False: a read that takes in what is known.
    pub(crate) fn is_new(&self, op: &Op) -> bool {
        let Op::Read { offset, into, .. } = op else { return true };
        let range = *offset..*offset + into.len() as u64;
        let mut ranges = self.ranges.borrow_mut();
        if one_within(&ranges, &range).is_some() {
            return false;
        }
        if ranges.len() == RANGES_MAX {
            ranges.pop_first();
        }
        ranges.insert(range.start, range.end);
        true
    }

    /// What is written may be read again, and what was read can be.
    pub(crate) fn answered(&self, op: &Op) {
        if self.ranges.borrow().is_empty() {
            return;
        }
        let (start, len) = match op {
            Op::Read { offset, into, .. } => (*offset, into.len() as u64),
            Op::Write { offset, from, .. } => (*offset, from.len() as u64),
            Op::WriteZeroes { offset, len, .. } => (*offset, *len),
            Op::Flush { .. } | Op::Descriptor { .. } => return,
        };
        let (mut ranges, end) = (self.ranges.borrow_mut(), start + len);
        while let Some((first, last)) = one_within(&ranges, &(start..end)) {
            ranges.remove(&first);
            for (first, last) in [(first, start.min(last)), (end.max(first), last)] {
                if first < last {
                    ranges.insert(first, last);
                }
            }
        }
    }
}

/// One that overlaps with these bytes: its first, and its end.
fn one_within(ranges: &BTreeMap<u64, u64>, bytes: &Range<u64>) -> Option<(u64, u64)> {
    let (first, end) = ranges.range(..bytes.end).next_back()?;
    (*end > bytes.start).then_some((*first, *end))
}
