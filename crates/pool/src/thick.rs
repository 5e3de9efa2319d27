//! A thick volume: ranges of an array, written in place.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use ashlar_format::units::{Area, to_usize};
use ashlar_raid::array::Array;
use ashlar_raid::block_status::BlockStatus;
use ashlar_raid::error::ArrayError;
use ashlar_raid::viewer::Shown;
use ashlar_raid::zero_step::{ZeroStep, Zeroing};
use ashlar_reactor::buffer::Buffers;
use smallvec::SmallVec;

pub struct Thick {
    pub(crate) uuid: [u8; 16],
    pub(crate) name: String,
    pub(crate) array: Rc<Array>,
    pub(crate) bytes: Cell<u64>,
    /// Ranges of the array, in the volume's order; together at least `bytes` long.
    pub(crate) extents: RefCell<Vec<Area>>,
}

/// What another reactor needs to read of a volume.
pub(crate) struct Glimpse {
    pub(crate) shown: Shown,
    pub(crate) bytes: u64,
    pub(crate) extents: Vec<Area>,
}

/// The ranges of the array that a byte range of a volume with these extents stands in, in order.
pub(crate) fn ranges(extents: &[Area], bytes: Range<u64>) -> SmallVec<[Range<u64>; 1]> {
    let (mut ranges, mut extent_start) = (SmallVec::new(), 0);
    for extent in extents {
        let first = bytes.start.max(extent_start);
        let last = bytes.end.min(extent_start + extent.len);
        if first < last {
            let at = |byte| extent.offset + (byte - extent_start);
            ranges.push(at(first)..at(last));
        }
        extent_start += extent.len;
    }
    ranges
}

impl Thick {
    /// The ranges of the array that a byte range of the volume stands in.
    fn ranges(&self, offset: u64, len: u64) -> Result<SmallVec<[Range<u64>; 1]>, ArrayError> {
        let end = offset.checked_add(len).filter(|end| *end <= self.bytes.get());
        let end = end.ok_or(ArrayError::Range)?;
        Ok(ranges(&self.extents.borrow(), offset..end))
    }

    /// For another reactor. `None`: there is nothing to see now.
    pub(crate) fn show(&self) -> Option<Glimpse> {
        let (bytes, extents) = (self.bytes.get(), self.extents.borrow().clone());
        Some(Glimpse { shown: self.array.show()?, bytes, extents })
    }

    /// Where in the array a range of the volume is, if that is in one place.
    fn place(&self, offset: u64, len: u64) -> Option<u64> {
        let end = offset.checked_add(len).filter(|end| *end <= self.bytes.get())?;
        let extents = self.extents.borrow();
        let first = extents.first().filter(|first| end <= first.len)?;
        Some(first.offset + offset)
    }

    pub(crate) async fn read(&self, offset: u64, into: Buffers) -> Result<(), ArrayError> {
        // Nearly every volume is in one place.
        if let Some(at) = self.place(offset, into.len() as u64) {
            return self.array.read(at, into).await;
        }
        let mut done = 0;
        for range in self.ranges(offset, into.len() as u64)? {
            let end = done + to_usize(range.end - range.start);
            self.array.read(range.start, into.slice(done..end)).await?;
            done = end;
        }
        Ok(())
    }

    /// Where a byte of the array is in the volume.
    pub(crate) fn find(&self, at: u64) -> Option<u64> {
        let mut before = 0;
        for extent in self.extents.borrow().iter() {
            if extent.range().contains(&at) {
                return Some(before + at - extent.offset);
            }
            before += extent.len;
        }
        None
    }

    pub(crate) async fn write(&self, offset: u64, from: Buffers) -> Result<(), ArrayError> {
        let ranges = self.ranges(offset, from.len() as u64)?;
        if ranges.is_empty() { Ok(()) } else { self.array.write_ranges(&ranges, from).await }
    }

    pub(crate) async fn discard(&self, offset: u64, len: u64) -> Result<(), ArrayError> {
        for range in self.ranges(offset, len)? {
            self.array.discard(range.start, range.end - range.start).await?;
        }
        Ok(())
    }

    pub(crate) async fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), ArrayError> {
        for range in self.ranges(offset, len)? {
            self.array.write_zeroes(range.start, range.end - range.start).await?;
        }
        Ok(())
    }

    /// See [`Volume::block_status`](crate::volume::Volume::block_status).
    pub(crate) async fn block_status(
        &self,
        offset: u64,
        len: u64,
    ) -> Result<BlockStatus, ArrayError> {
        match self.ranges(offset, len)?.into_iter().next() {
            Some(first) => self.array.block_status(first).await,
            None => Err(ArrayError::Range),
        }
    }

    /// See [`Volume::zero_step`](crate::volume::Volume::zero_step).
    pub(crate) fn zero_step(
        &self,
        zeroing: Zeroing,
        offset: u64,
        len: u64,
    ) -> Result<ZeroStep, ArrayError> {
        let first = self.ranges(offset, len)?.into_iter().next();
        Ok(first.map_or_else(ZeroStep::default, |first| self.array.zero_step(zeroing, first)))
    }
}
