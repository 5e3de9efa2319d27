//! Which pages of guest memory the device has written to, in memory that the front end shares with
//! us (vhost-user, "Migration"): it copies a guest's memory while the guest runs, and copies again
//! what was written meanwhile.
//!
//! ```text
//! log      one bit for each page of 4 KiB, by the guest's addresses, the lowest bit first
//! request  data and status are written ── marked ── the ring shows that the request is used
//! front    takes a word of the log and leaves zero there, then copies the pages
//! end
//! ```
//!
//! Invariants:
//! - what was written is marked afterwards, never before: the front end may take the mark and copy
//!   the page in between, and would keep what was there;
//! - the mark is made by an instruction that nothing before it can pass, even where the bit is set
//!   already: that bit may just be on its way to the front end, who copies what it sees;
//! - the log is of a file that cannot shrink, and none of huge pages, which may run out when one is
//!   touched first: so touching it never is a SIGBUS. While a ring is at work with it, it is long
//!   enough for all of the guest's memory.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ashlar_format::units::to_usize;
use rustix::fs::SealFlags;

use crate::vhost::graveyard::Graveyard;
use crate::vhost::memory::{MappedRegion, MemoryError, Place, Window};
use crate::vhost::sigbus::Alarm;

/// What one bit stands for, whatever pages the memory really has.
pub(crate) const PAGE_BYTES: u64 = 4096;
const PAGES_PER_BYTE: u64 = 8;
/// Of a file system of huge pages, in `statfs` (`linux/magic.h`).
const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

/// Why a log cannot be used. The front end is at fault.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DirtyError {
    #[error("a dirty log in a file that may shrink: F_SEAL_SHRINK is missing")]
    Shrinks,
    #[error("a dirty log in a file of huge pages")]
    HugePages,
    #[error("a dirty log up to {log:#x}, and memory up to {memory:#x}")]
    Short { log: u64, memory: u64 },
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A log that is mapped and not yet known to the reactors.
#[derive(Clone)]
pub(crate) struct MappedDirtyLog(MappedRegion);

impl MappedDirtyLog {
    /// `offset` and `len`: where the log is in the file, in bytes.
    pub(crate) fn map(
        file: &File,
        offset: u64,
        len: u64,
        alarm: &Arc<Alarm>,
    ) -> Result<MappedDirtyLog, DirtyError> {
        if !rustix::fs::fcntl_get_seals(file).is_ok_and(|its| its.contains(SealFlags::SHRINK)) {
            return Err(DirtyError::Shrinks);
        }
        let system = rustix::fs::fstatfs(file).map_err(|error| MemoryError::Map(error.into()))?;
        if u64::try_from(system.f_type) == Ok(u64::from(HUGETLBFS_MAGIC)) {
            return Err(DirtyError::HugePages);
        }
        let place = Place { guest: 0, user: 0, len, offset };
        Ok(MappedDirtyLog(MappedRegion::map(file, place, alarm)?))
    }
}

/// A log as a reactor knows it.
#[derive(Clone, Debug)]
pub(crate) struct DirtyLog {
    bits: Window,
}

impl DirtyLog {
    pub(crate) fn adopt(mapped: MappedDirtyLog, graveyard: &Graveyard) -> DirtyLog {
        let bits = mapped.0.adopt(graveyard);
        assert!(bits.len() > 0, "no empty region is mapped");
        DirtyLog { bits }
    }

    /// Refuses a log that has no bits for memory up to the guest's address `end`.
    pub(crate) fn check(&self, end: u64) -> Result<(), DirtyError> {
        let log = self.pages().saturating_mul(PAGE_BYTES);
        if log < end {
            return Err(DirtyError::Short { log, memory: end });
        }
        Ok(())
    }

    fn pages(&self) -> u64 {
        self.bits.len() as u64 * PAGES_PER_BYTE
    }

    /// Marks `len` bytes at an address of the guest, which were written before.
    pub(crate) fn mark(&self, guest: u64, len: u64) {
        let Some(last) = len.checked_sub(1) else { return };
        // Memory that was taken away while a request had it is behind the end of a log that was
        // made for what is left. Nobody asks for it.
        let last = (guest.saturating_add(last) / PAGE_BYTES).min(self.pages() - 1);
        let mut page = guest / PAGE_BYTES;
        while page <= last {
            let (byte, first_bit) = (page / PAGES_PER_BYTE, page % PAGES_PER_BYTE);
            let last_bit = (last - byte * PAGES_PER_BYTE).min(PAGES_PER_BYTE - 1);
            // Pages 2 to 5: 1111_1100 and 0011_1111.
            let bits = (u8::MAX << first_bit) & (u8::MAX >> (PAGES_PER_BYTE - 1 - last_bit));
            self.bits.set_bits(to_usize(byte), bits, Ordering::Release);
            page = (byte + 1) * PAGES_PER_BYTE;
        }
    }
}

/// Where a ring marks what is written to the ring itself.
#[derive(Clone, Debug)]
pub(crate) struct RingLog {
    pub(crate) log: DirtyLog,
    /// The guest's address of the part that only the device writes to, as the front end has it.
    pub(crate) used: u64,
}

/// A part of a ring that the device writes to.
#[derive(Debug)]
pub(crate) struct Marked {
    window: Window,
    /// Of its first byte, the guest's address.
    log: Option<(DirtyLog, u64)>,
}

impl Marked {
    pub(crate) fn new(window: Window) -> Marked {
        Marked { window, log: None }
    }

    /// Marks from now on, and at once whatever was written before.
    pub(crate) fn log_to(&mut self, log: Option<(DirtyLog, u64)>) {
        self.log = log;
        self.mark(0, self.window.len());
    }

    /// To read from. What is stored there is not marked.
    pub(crate) fn window(&self) -> &Window {
        &self.window
    }

    /// Makes `stores` to `len` bytes at `offset`.
    pub(crate) fn write(&self, offset: usize, len: usize, stores: impl FnOnce(&Window)) {
        stores(&self.window);
        self.mark(offset, len);
    }

    fn mark(&self, offset: usize, len: usize) {
        if let Some((log, start)) = &self.log {
            log.mark(start.saturating_add(offset as u64), len as u64);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    //! Goal: exactly the pages that a range touches are marked, whatever the range is; and no log
    //! is taken that could end under us.
    //! Method: every range of a small memory against the definition; files as a front end could
    //! send them.

    use std::sync::mpsc;

    use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};

    use super::*;
    use crate::vhost::memory::tests::memory;

    pub(crate) fn file(bytes: u64, seals: SealFlags) -> File {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("log", flags).unwrap());
        file.set_len(bytes).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    }

    fn map(file: &File, offset: u64, len: u64) -> Result<MappedDirtyLog, DirtyError> {
        MappedDirtyLog::map(file, offset, len, &Alarm::new().unwrap())
    }

    /// A log of so many bytes, and the file to read it by.
    pub(crate) fn log(bytes: u64) -> (DirtyLog, File) {
        let file = file(bytes, SealFlags::SHRINK);
        let (graveyard, _retired) = mpsc::channel();
        (DirtyLog::adopt(map(&file, 0, bytes).unwrap(), &graveyard), file)
    }

    /// The marked pages of the first 64, which are unmarked by that.
    fn take(log: &DirtyLog) -> u64 {
        let bits = log.bits.load_u64(0);
        log.bits.store_u64(0, 0);
        bits
    }

    #[test]
    fn the_pages_of_a_range_are_marked_and_no_others() {
        let (log, _file) = log(8);
        let edges = [0, 1, 4095];
        for (first, count) in (0..64).flat_map(|first| (0..66).map(move |count| (first, count))) {
            for (into, short) in edges.iter().flat_map(|a| edges.map(|b| (*a, b))) {
                let (start, end) = (first * 4096 + into, (first + count) * 4096 - short.min(count));
                let touched = |page: &u64| start < (page + 1) * 4096 && end > page * 4096;
                let len = end.saturating_sub(start);
                let expected = (0..64).filter(touched).map(|page| 1u64 << page).sum::<u64>();
                log.mark(start, len);
                assert_eq!(take(&log), if len == 0 { 0 } else { expected }, "{start} {len}");
            }
        }
    }

    #[test]
    fn marks_add_up_and_nothing_is_marked_beyond_the_end() {
        let (log, _file) = log(9);
        [0, 3, 63].iter().for_each(|page| log.mark(page * 4096, 4096));
        assert_eq!(take(&log), 1 | 1 << 3 | 1 << 63);
        for (guest, len) in [(u64::MAX, 1), (u64::MAX, u64::MAX), (72 * 4096, 4096), (1 << 60, 9)] {
            log.mark(guest, len);
        }
        assert_eq!((take(&log), log.bits.load_u8(8)), (0, 0));
        log.mark(71 * 4096, u64::MAX);
        assert_eq!((take(&log), log.bits.load_u8(8)), (0, 0x80));
        assert!(log.check(72 * 4096).is_ok());
        assert!(matches!(log.check(72 * 4096 + 1), Err(DirtyError::Short { .. })));
    }

    /// Whoever takes a mark copies the page, and must find there what was written.
    #[test]
    fn a_page_is_marked_after_it_was_written() {
        let (log, _file) = log(8);
        let (memory, _retired) = memory(&[(0, 0x4000)]);
        let mut part = Marked::new(Window::new(memory.view(0x1000, 0x2000).unwrap()));
        part.log_to(Some((log.clone(), 0x1000)));
        assert_eq!(take(&log), 0b110, "whatever was written before");
        part.write(0x1000, 2, |window| {
            window.store_u16(0x1000, 7, Ordering::Relaxed);
            assert_eq!(take(&log), 0);
        });
        assert_eq!(take(&log), 0b100);
    }

    #[test]
    fn a_log_that_may_shrink_or_is_not_there_is_refused() {
        let sealed = file(4096, SealFlags::SHRINK);
        assert!(map(&sealed, 0, 4096).is_ok());
        assert!(map(&sealed, 100, 3996).is_ok());
        for (offset, len) in [(0, 0), (0, 4097), (1, 4096), (u64::MAX, 4096), (4096, 1)] {
            assert!(map(&sealed, offset, len).is_err(), "{offset} {len}");
        }
        for loose in [file(4096, SealFlags::empty()), file(4096, SealFlags::GROW)] {
            let refused = map(&loose, 0, 4096);
            assert!(matches!(refused, Err(DirtyError::Shrinks)));
        }
        let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::ALLOW_SEALING;
        let huge = File::from(memfd_create("log", flags).unwrap());
        huge.set_len(2 << 20).unwrap();
        fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
        let refused = map(&huge, 0, 4096);
        assert!(matches!(refused, Err(DirtyError::HugePages)));
        let null = File::options().read(true).write(true).open("/dev/zero").unwrap();
        assert!(map(&null, 0, 4096).is_err());
    }
}
