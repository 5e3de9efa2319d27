//! Memory from the system, on the largest pages that it has to give.
//!
//! Pages that the operator has set aside (hugetlbfs) are tried first, then transparent huge pages,
//! then small ones. None of them is required.

use std::ptr::NonNull;

/// Bytes of a huge page.
pub const HUGE_BYTES: usize = 2 << 20;

/// What memory is mapped with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Set aside by the operator (`vm.nr_hugepages`).
    Huge,
    /// The system was asked for huge pages (madvise(2), `MADV_HUGEPAGE`), and makes them if it can.
    Transparent,
    Small,
}

/// How many bytes are on which pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageBytes {
    pub huge: u64,
    pub transparent: u64,
    pub small: u64,
}

impl PageBytes {
    #[must_use]
    pub fn plus(self, other: PageBytes) -> PageBytes {
        PageBytes {
            huge: self.huge + other.huge,
            transparent: self.transparent + other.transparent,
            small: self.small + other.small,
        }
    }

    /// Without some of what is in it.
    #[must_use]
    pub fn less(self, part: PageBytes) -> PageBytes {
        PageBytes {
            huge: self.huge - part.huge,
            transparent: self.transparent - part.transparent,
            small: self.small - part.small,
        }
    }

    pub fn total(self) -> u64 {
        self.huge + self.transparent + self.small
    }
}

/// When the pages are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    Now,
    /// As they are written. Huge ones that were set aside are given at once all the same: nobody
    /// else could have them meanwhile, and a fault later could end the process.
    Later,
}

/// Zeroed memory, unmapped when it is dropped.
pub struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    pages: Pages,
}

impl Mapping {
    /// Memory of at least this many bytes, at an address that its pages are aligned to.
    pub fn new(bytes: usize, fill: Fill) -> std::io::Result<Mapping> {
        let bytes = bytes.max(1);
        let huge_bytes = bytes.next_multiple_of(HUGE_BYTES);
        if bytes < HUGE_BYTES {
            return map(bytes, 0).map(|start| Mapping { start, bytes, pages: Pages::Small });
        }
        if let Some(mapping) = huge(huge_bytes) {
            return Ok(mapping);
        }
        let mapping = transparent(huge_bytes)?;
        if fill == Fill::Now {
            // Where the system does not know of this, it gives them later.
            advise(mapping.start, mapping.bytes, libc::MADV_POPULATE_WRITE);
        }
        Ok(mapping)
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub fn pages(&self) -> Pages {
        self.pages
    }

    pub fn page_bytes(&self) -> PageBytes {
        let (bytes, none) = (self.bytes as u64, PageBytes::default());
        match self.pages {
            Pages::Huge => PageBytes { huge: bytes, ..none },
            Pages::Transparent => PageBytes { transparent: bytes, ..none },
            Pages::Small => PageBytes { small: bytes, ..none },
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unmap(self.start, self.bytes);
    }
}

/// From the pages that were set aside; `None` if there are too few, or they may not be used.
fn huge(bytes: usize) -> Option<Mapping> {
    let start = map(bytes, libc::MAP_HUGETLB | libc::MAP_HUGE_2MB).ok()?;
    let mapping = Mapping { start, bytes, pages: Pages::Huge };
    // A control group or a policy may forbid pages that were promised, the last of them too. A
    // fault would tell by a signal that ends the process, this call tells by an error.
    advise(start, bytes, libc::MADV_POPULATE_WRITE).then_some(mapping)
}

/// `bytes`: a multiple of huge pages.
fn transparent(bytes: usize) -> std::io::Result<Mapping> {
    let start = map(bytes + HUGE_BYTES, libc::MAP_NORESERVE)?;
    let before = start.align_offset(HUGE_BYTES);
    // SAFETY: inside what was mapped: `before` is less than a huge page.
    let (aligned, end) = unsafe { (start.add(before), start.add(before + bytes)) };
    // What is left at both ends; a part of no bytes cannot be unmapped.
    [(start, before), (end, HUGE_BYTES - before)]
        .into_iter()
        .filter(|(_, len)| *len > 0)
        .for_each(|(part, len)| unmap(part, len));
    let asked = advise(aligned, bytes, libc::MADV_HUGEPAGE) && are_made();
    let pages = if asked { Pages::Transparent } else { Pages::Small };
    Ok(Mapping { start: aligned, bytes, pages })
}

/// Whether the system makes huge pages for those who ask.
fn are_made() -> bool {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    enabled.is_ok_and(|enabled| !enabled.contains("[never]"))
}

fn map(bytes: usize, flags: libc::c_int) -> std::io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: new memory at an address of the system's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    Ok(NonNull::new(start.cast()).expect("mmap does not map address 0"))
}

fn advise(start: NonNull<u8>, bytes: usize, advice: libc::c_int) -> bool {
    // SAFETY: mapped by this module, which gives no advice that takes content away.
    unsafe { libc::madvise(start.as_ptr().cast(), bytes, advice) == 0 }
}

fn unmap(start: NonNull<u8>, bytes: usize) {
    // SAFETY: mapped by this module, in whole pages; whoever had it has let go of it.
    unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
}

#[cfg(test)]
mod tests {
    //! Goal: memory is zeroed, whole and aligned, whatever pages the system has.
    //! Method: every route, also the one that this machine would not take.

    use super::*;

    /// All of it is ours, and zero; both ends can be written.
    fn check(mapping: &Mapping, bytes: usize) {
        assert!(mapping.len() >= bytes);
        let start = mapping.start().as_ptr();
        // SAFETY: mapped with this length.
        let all = unsafe { std::slice::from_raw_parts_mut(start, mapping.len()) };
        assert!(all.iter().all(|byte| *byte == 0));
        (all[0], all[bytes - 1]) = (1, 2);
        if mapping.pages() != Pages::Small {
            assert!(start.addr().is_multiple_of(HUGE_BYTES));
        }
    }

    #[test]
    fn memory_of_any_size() {
        for bytes in [1, 4096, HUGE_BYTES - 1, HUGE_BYTES, 3 * HUGE_BYTES + 1] {
            for fill in [Fill::Now, Fill::Later] {
                check(&Mapping::new(bytes, fill).unwrap(), bytes);
            }
        }
        assert!(Mapping::new(usize::MAX / 2, Fill::Later).is_err());
    }

    #[test]
    fn without_pages_set_aside() {
        for _ in 0..8 {
            let mapping = transparent(2 * HUGE_BYTES).unwrap();
            assert_ne!(mapping.pages(), Pages::Huge);
            check(&mapping, 2 * HUGE_BYTES);
        }
    }

    #[test]
    fn pages_set_aside_are_taken_while_there_are_some() {
        let free = || {
            let text = std::fs::read_to_string("/proc/meminfo").unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
            line.map_or(0, |line| line.trim().parse::<usize>().unwrap())
        };
        // More than any machine has.
        assert!(huge(1 << 50).is_none());
        if free() < 2 {
            return;
        }
        let before = free();
        let mapping = Mapping::new(2 * HUGE_BYTES, Fill::Later).unwrap();
        assert_eq!(mapping.pages(), Pages::Huge);
        assert!(free() <= before - 2, "pages that are only promised");
        check(&mapping, 2 * HUGE_BYTES);
    }
}
