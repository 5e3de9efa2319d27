//! Memory that direct I/O accepts, and reading and writing with it.

use std::io;

use ashlar_format::units::to_usize;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::disk::Disk;

pub const PAGE_BYTES: u64 = 4096;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// Zeroed bytes that begin on a page.
pub struct Pages {
    pages: Vec<Page>,
}

impl Pages {
    /// `bytes` is rounded up to whole pages.
    pub fn zeroed(bytes: u64) -> Pages {
        let count = to_usize(bytes.div_ceil(PAGE_BYTES));
        Pages { pages: vec![Page::new_zeroed(); count] }
    }

    pub fn bytes(&self) -> &[u8] {
        self.pages.as_slice().as_bytes()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.pages.as_mut_slice().as_mut_bytes()
    }
}

/// Reads `len` bytes at `offset`, both multiples of a page.
pub fn read_pages(disk: &Disk, offset: u64, len: u64) -> io::Result<Pages> {
    let mut pages = Pages::zeroed(len);
    disk.read_exact_at(pages.bytes_mut(), offset)?;
    Ok(pages)
}

/// Zeroes a range, both ends multiples of a page.
pub fn write_zeroes(disk: &Disk, offset: u64, len: u64) -> io::Result<()> {
    disk.write_all_at(Pages::zeroed(len).bytes(), offset)
}
