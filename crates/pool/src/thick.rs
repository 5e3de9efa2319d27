//! A thick volume: ranges of an array, written in place.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ashlar_format::units::Area;
use ashlar_raid::array::Array;
use ashlar_raid::error::ArrayError;
use ashlar_reactor::buffer::Buffers;

pub struct Thick {
    pub(crate) uuid: [u8; 16],
    pub(crate) name: String,
    pub(crate) array: Rc<Array>,
    pub(crate) bytes: Cell<u64>,
    /// Ranges of the array, in the volume's order; together at least `bytes` long.
    pub(crate) extents: RefCell<Vec<Area>>,
}

impl Thick {
    /// Cuts a byte range of the volume into ranges of the array, and does `each` on them in turn:
    /// its place on the array, its place in the request, its length.
    async fn for_ranges<F: Future<Output = Result<(), ArrayError>>>(
        &self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(u64, u64, u64) -> F,
    ) -> Result<(), ArrayError> {
        if offset.checked_add(len).is_none_or(|end| end > self.bytes.get()) {
            return Err(ArrayError::Range);
        }
        let (mut done, mut extent_start) = (0, 0);
        let count = self.extents.borrow().len();
        for index in 0..count {
            let extent = self.extents.borrow()[index];
            let at = offset + done;
            if done < len && at < extent_start + extent.len {
                let inside = at - extent_start;
                let part = (extent.len - inside).min(len - done);
                each(extent.offset + inside, done, part).await?;
                done += part;
            }
            extent_start += extent.len;
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

    pub(crate) async fn read(&self, offset: u64, into: Buffers) -> Result<(), ArrayError> {
        let len = into.len() as u64;
        self.for_ranges(offset, len, |at, from, part| {
            self.array.read(at, into.slice(range(from, part)))
        })
        .await
    }

    pub(crate) async fn write(&self, offset: u64, from: Buffers) -> Result<(), ArrayError> {
        let len = from.len() as u64;
        self.for_ranges(offset, len, |at, start, part| {
            self.array.write(at, from.slice(range(start, part)))
        })
        .await
    }

    pub(crate) async fn discard(&self, offset: u64, len: u64) -> Result<(), ArrayError> {
        self.for_ranges(offset, len, |at, _, part| self.array.discard(at, part)).await
    }

    pub(crate) async fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), ArrayError> {
        self.for_ranges(offset, len, |at, _, part| self.array.write_zeroes(at, part)).await
    }
}

fn range(start: u64, len: u64) -> std::ops::Range<usize> {
    use ashlar_format::units::to_usize;
    to_usize(start)..to_usize(start + len)
}
