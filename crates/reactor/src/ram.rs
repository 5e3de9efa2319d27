//! Memory that acts as a drive, for measuring the engine without a device.

use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use crate::buffer::{Buffer, Buffers};
use crate::copy::{copy, copy_unread};
use crate::mapping::{Fill, Mapping, PageBytes};
use crate::op::{Errno, Op, Outcome};

/// Zeroed memory of a fixed size. It may be the drive of several reactors, of which one writes; as
/// on any drive, what is read while it is being written is a mixture.
pub struct Ram {
    memory: Mapping,
    bytes: usize,
}

// SAFETY: the mapping goes with the last reactor that has it, whichever that is.
unsafe impl Send for Ram {}
// SAFETY: bytes are copied in and out by address, without a reference to any of them. Who races
// with a copy can only make its bytes a mixture, of which the layers above make no use.
unsafe impl Sync for Ram {}

/// A drive of memory, on the one reactor that writes to it.
pub(crate) struct Lender {
    pub(crate) ram: Arc<Ram>,
    /// All of it.
    view: Buffer,
}

impl Lender {
    pub(crate) fn new(ram: Arc<Ram>) -> Lender {
        let keep = Rc::new(ram.clone());
        // SAFETY: the view keeps the mapping, and this reactor's thread alone writes there.
        let view = unsafe { Buffer::of_drive(ram.memory.start(), ram.bytes, keep) };
        Lender { ram, view }
    }

    /// A range as it is now, and will be after every later write.
    pub(crate) fn lend(&self, offset: u64, len: usize) -> Option<Buffer> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(len)?;
        (end <= self.view.len()).then(|| self.view.slice(offset..end))
    }
}

impl Ram {
    /// The system gives pages once they are written, so an empty drive costs nothing; unless
    /// huge pages were set aside, which are kept back for it.
    pub(crate) fn new(bytes: u64) -> Ram {
        let bytes = usize::try_from(bytes).expect("a 64-bit machine");
        let memory = Mapping::new(bytes, Fill::Later);
        let none = |error| panic!("no memory for a drive of {bytes} bytes: {error}");
        Ram { memory: memory.unwrap_or_else(none), bytes }
    }

    pub(crate) fn page_bytes(&self) -> PageBytes {
        self.memory.page_bytes()
    }

    /// The place of a range, or an error for one that is not inside.
    fn place(&self, offset: u64, len: usize) -> Result<NonNull<u8>, Errno> {
        let offset = usize::try_from(offset).map_err(|_| Errno(libc::EINVAL))?;
        let end = offset.checked_add(len).ok_or(Errno(libc::EINVAL))?;
        if end > self.bytes {
            return Err(Errno(libc::ENOSPC));
        }
        // SAFETY: checked to be inside the allocation.
        Ok(unsafe { self.memory.start().add(offset) })
    }

    pub(crate) fn run(&self, op: &Op) -> Outcome {
        match op {
            Op::Read { offset, into, .. } => self.read(*offset, into),
            Op::Write { offset, from, .. } => self.write(*offset, from),
            Op::WriteZeroes { offset, len, .. } => self.write_zeroes(*offset, *len),
            Op::Flush { .. } | Op::Descriptor { .. } => Ok(0),
        }
    }

    pub(crate) fn read(&self, offset: u64, into: &Buffers) -> Outcome {
        let mut from = self.place(offset, into.len())?;
        for piece in into.pieces() {
            // SAFETY: `place` checked the whole length; `piece` is mapped while its view lives.
            unsafe {
                copy(from.as_ptr(), piece.as_ptr(), piece.len());
                from = from.add(piece.len());
            }
        }
        Ok(into.len() as u64)
    }

    fn write(&self, offset: u64, from: &Buffers) -> Outcome {
        let mut to = self.place(offset, from.len())?;
        for piece in from.pieces() {
            // SAFETY: as in `read`. What is lent of a drive is never written to one: no overlap.
            unsafe {
                copy_unread(piece.as_ptr(), to.as_ptr(), piece.len(), from.len());
                to = to.add(piece.len());
            }
        }
        Ok(from.len() as u64)
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> Outcome {
        let bytes = usize::try_from(len).map_err(|_| Errno(libc::EINVAL))?;
        let to = self.place(offset, bytes)?;
        // SAFETY: `place` checked the whole length.
        unsafe { std::ptr::write_bytes(to.as_ptr(), 0, bytes) };
        Ok(len)
    }
}
