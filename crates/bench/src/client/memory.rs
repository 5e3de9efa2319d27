//! Memory that is shared with a back end.
//!
//! The back end may change every byte at any time: nothing here is lent out as a slice. Invariant:
//! every access is compared with the length before a pointer is made from it, and those of several
//! bytes are aligned, which the mapping and the assertions keep.

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Also of memory without huge pages: back ends that map in such steps find whole ones.
const PAGE_BYTES: usize = 2 << 20;

pub(crate) struct Memory {
    start: NonNull<c_void>,
    len: usize,
    file: File,
    huge: bool,
}

impl Memory {
    /// At least so many bytes, all zero; of huge pages where there are enough of them.
    pub(crate) fn new(bytes: usize) -> std::io::Result<Memory> {
        let len = bytes.next_multiple_of(PAGE_BYTES);
        let huge = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        Memory::map(len, huge, true).or_else(|_| Memory::map(len, MemfdFlags::CLOEXEC, false))
    }

    fn map(len: usize, flags: MemfdFlags, huge: bool) -> std::io::Result<Memory> {
        let file = File::from(memfd_create("ashlar-bench", flags)?);
        file.set_len(len as u64)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let map_flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let start =
            unsafe { mmap(std::ptr::null_mut(), len, protection, map_flags, file.as_fd(), 0)? };
        let start = NonNull::new(start).ok_or_else(|| std::io::Error::other("mapped at 0"))?;
        Ok(Memory { start, len, file, huge })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_huge(&self) -> bool {
        self.huge
    }

    /// What the back end is told of a place: the address here.
    pub(crate) fn address(&self, at: usize) -> u64 {
        assert!(at <= self.len, "byte {at} of {}", self.len);
        (self.start.as_ptr().addr() + at) as u64
    }

    #[inline]
    fn place(&self, at: usize, len: usize, align: usize) -> NonNull<u8> {
        let end = at.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.len), "byte {at} of {}", self.len);
        assert!(at.is_multiple_of(align), "byte {at} is not aligned to {align}");
        // SAFETY: inside the mapping, by the assertion above.
        unsafe { self.start.cast::<u8>().add(at) }
    }

    #[inline]
    pub(crate) fn u8(&self, at: usize) -> &AtomicU8 {
        // SAFETY: mapped as long as `self`, by `place`; all accesses of both sides are atomic.
        unsafe { AtomicU8::from_ptr(self.place(at, 1, 1).as_ptr()) }
    }

    #[inline]
    pub(crate) fn u16(&self, at: usize) -> &AtomicU16 {
        // SAFETY: as in `u8`; the start is a page's, so `place` keeps the alignment.
        unsafe { AtomicU16::from_ptr(self.place(at, 2, 2).cast().as_ptr()) }
    }

    #[inline]
    pub(crate) fn u32(&self, at: usize) -> &AtomicU32 {
        // SAFETY: as in `u16`.
        unsafe { AtomicU32::from_ptr(self.place(at, 4, 4).cast().as_ptr()) }
    }

    #[inline]
    pub(crate) fn u64(&self, at: usize) -> &AtomicU64 {
        // SAFETY: as in `u16`.
        unsafe { AtomicU64::from_ptr(self.place(at, 8, 8).cast().as_ptr()) }
    }

    pub(crate) fn write(&self, at: usize, from: &[u8]) {
        let to = self.place(at, from.len(), 1);
        // SAFETY: `place` checked the whole length; `from` is ours and elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) }
    }

    pub(crate) fn read(&self, at: usize, to: &mut [u8]) {
        let from = self.place(at, to.len(), 1);
        // SAFETY: `place` checked the whole length; a back end that writes meanwhile breaks the
        // protocol, and makes its own answer a mixture.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length; all borrows of it have ended.
        let unmapped = unsafe { munmap(self.start.as_ptr(), self.len) };
        debug_assert!(unmapped.is_ok(), "our own mapping: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    //! Goal: both sides of the mapping see the same bytes, and nothing beyond it is reached.
    //! Method: the file beside the mapping.

    use std::os::unix::fs::FileExt;
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn what_is_written_is_in_the_file() {
        let memory = Memory::new(1).unwrap();
        assert_eq!(memory.len(), PAGE_BYTES);
        memory.u32(4096).store(0x0403_0201, Ordering::Relaxed);
        memory.write(4100, &[5, 6, 7, 8]);
        assert_eq!(memory.u64(4096).load(Ordering::Relaxed), 0x0807_0605_0403_0201);
        if !memory.is_huge() {
            let mut bytes = [0; 8];
            memory.file().read_exact_at(&mut bytes, 4096).unwrap();
            assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8]);
        }
    }

    #[test]
    #[should_panic(expected = "of 2097152")]
    fn the_end_is_kept() {
        Memory::new(1).unwrap().u16(PAGE_BYTES).load(Ordering::Relaxed);
    }

    #[test]
    #[should_panic(expected = "not aligned")]
    fn words_are_aligned() {
        Memory::new(1).unwrap().u32(2).load(Ordering::Relaxed);
    }
}
