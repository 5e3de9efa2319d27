//! Memory that the driver and a controller share: queues, lists, and bounced data.
//!
//! The controller may change any byte at any time, so none is lent out as a slice.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::copy::copy;

/// Zeroed pages at one place.
pub struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range that this value alone gives back; no thread is special.
unsafe impl Send for SharedMemory {}

impl SharedMemory {
    pub fn new(len: usize) -> SharedMemory {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory at an address of the system's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        assert!(start != libc::MAP_FAILED, "no memory for {len} bytes of queues");
        SharedMemory { start: NonNull::new(start.cast()).expect("not at address 0"), len }
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub fn bytes(&self) -> usize {
        self.len
    }

    fn place(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= self.len && len <= self.len - offset, "{len} bytes at {offset}");
        // SAFETY: inside the mapping, as asserted.
        unsafe { self.start.as_ptr().add(offset) }
    }

    /// A dword that the controller writes: what it wrote before it is seen after.
    pub fn load(&self, offset: usize) -> u32 {
        let place = self.place(offset, 4).cast::<u32>();
        assert!(place.is_aligned());
        // SAFETY: inside the mapping and aligned, as asserted; zeroed memory is a valid atomic.
        let value = unsafe { AtomicU32::from_ptr(place) }.load(Ordering::Acquire);
        u32::from_le(value)
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let place = self.place(offset, bytes.len());
        // SAFETY: `place` checked the range; `bytes` is a slice of ours, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    }

    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        let place = self.place(offset, bytes.len());
        // SAFETY: as in `write`. A controller that races with this can only mix its own bytes.
        unsafe { std::ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Zeroes a range.
    pub fn clear(&self, offset: usize, len: usize) {
        let place = self.place(offset, len);
        // SAFETY: `place` checked the range.
        unsafe { std::ptr::write_bytes(place, 0, len) };
    }

    /// Copies memory of a view here; `from` is valid for `len` bytes, which its view keeps.
    pub(super) fn gather(&self, offset: usize, from: &crate::buffer::Buffer) {
        let place = self.place(offset, from.len());
        // SAFETY: `place` checked the range, the view keeps `from`. Guests that race with this mix
        // their own bytes.
        unsafe { copy(from.as_ptr(), place, from.len()) };
    }

    /// The other way.
    pub(super) fn scatter(&self, offset: usize, to: &crate::buffer::Buffer) {
        let place = self.place(offset, to.len());
        // SAFETY: as in `gather`.
        unsafe { copy(place, to.as_ptr(), to.len()) };
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; whoever shares it is gone (`Controller`).
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}
