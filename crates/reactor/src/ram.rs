//! Memory that acts as a drive, for measuring the engine without a device.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use crate::buffer::Buffers;
use crate::op::{Errno, Op, Outcome};

/// Zeroed memory of a fixed size.
pub(crate) struct Ram {
    start: NonNull<u8>,
    bytes: usize,
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), 4096).expect("a size that fits in memory")
}

impl Ram {
    pub(crate) fn new(bytes: u64) -> Ram {
        let bytes = usize::try_from(bytes).expect("a 64-bit machine");
        // SAFETY: the layout has a size above zero.
        let start = unsafe { alloc_zeroed(layout(bytes)) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout(bytes)) };
        Ram { start, bytes }
    }

    /// The place of a range, or an error for one that is not inside.
    fn place(&self, offset: u64, len: usize) -> Result<NonNull<u8>, Errno> {
        let offset = usize::try_from(offset).map_err(|_| Errno(libc::EINVAL))?;
        let end = offset.checked_add(len).ok_or(Errno(libc::EINVAL))?;
        if end > self.bytes {
            return Err(Errno(libc::ENOSPC));
        }
        // SAFETY: checked to be inside the allocation.
        Ok(unsafe { self.start.add(offset) })
    }

    pub(crate) fn run(&mut self, op: &Op) -> Outcome {
        match op {
            Op::Read { offset, into, .. } => self.read(*offset, into),
            Op::Write { offset, from, .. } => self.write(*offset, from),
            Op::WriteZeroes { offset, len, .. } => self.write_zeroes(*offset, *len),
            Op::Flush { .. } | Op::Readable { .. } => Ok(0),
        }
    }

    fn read(&self, offset: u64, into: &Buffers) -> Outcome {
        let mut from = self.place(offset, into.len())?;
        for piece in into.pieces() {
            // SAFETY: `place` checked the whole length; `piece` is mapped while its view lives.
            unsafe {
                std::ptr::copy(from.as_ptr(), piece.as_ptr(), piece.len());
                from = from.add(piece.len());
            }
        }
        Ok(into.len() as u64)
    }

    fn write(&mut self, offset: u64, from: &Buffers) -> Outcome {
        let mut to = self.place(offset, from.len())?;
        for piece in from.pieces() {
            // SAFETY: as in `read`.
            unsafe {
                std::ptr::copy(piece.as_ptr(), to.as_ptr(), piece.len());
                to = to.add(piece.len());
            }
        }
        Ok(from.len() as u64)
    }

    fn write_zeroes(&mut self, offset: u64, len: u64) -> Outcome {
        let bytes = usize::try_from(len).map_err(|_| Errno(libc::EINVAL))?;
        let to = self.place(offset, bytes)?;
        // SAFETY: `place` checked the whole length.
        unsafe { std::ptr::write_bytes(to.as_ptr(), 0, bytes) };
        Ok(len)
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.start.as_ptr(), layout(self.bytes)) }
    }
}
